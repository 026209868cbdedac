"""Audits: what a worker finds of blocks whose checksums are right and whose KV is wrong."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.frame import FrameName
from kvtier.core.identity import KvDtype
from kvtier.engines.transformers.runner import load_runner
from kvtier.engines.transformers.sources import TINY, resolve
from kvtier.errors import CallerError
from kvtier.paged.geometry import KvGeometry, LayerGroup, one_group
from kvtier.types import PrefixKey
from kvtier_services.worker.l2.audit import AuditTerms
from kvtier_services.worker.l2.comparing import TOLERANCES, agrees
from kvtier_services.worker.l2.port import Drop
from tests.support.worker_rig import (
    FULL,
    MIXED,
    WINDOWED,
    CacheOff,
    LazyCarrier,
    Rig,
    RigTerms,
    Script,
    TierBelow,
    small_fake,
)

OFF = CacheOff()
PROMPT = [random.Random(i).randrange(259) for i in range(41)]
"""Ten blocks, and one token."""


class Scripted(random.Random):
    """Audits the requests that it is told to, and the blocks that are drawn."""

    def __init__(self, audits: Sequence[bool]) -> None:
        super().__init__(0)
        self._audits = list(audits)

    def random(self) -> float:
        return 0.0 if self._audits.pop(0) else 1.0

    def getrandbits(self, count: int, /) -> int:
        return super().getrandbits(count)


def auditing(blocks_max: int = 64, tolerance: float = 0.0) -> AuditTerms:
    return AuditTerms(1.0, blocks_max, tolerance, random.Random(0))


def saved(prompt: Sequence[int], groups: tuple[LayerGroup, ...] = FULL) -> TierBelow:
    """A tier with the blocks of a prompt, as another worker computed and wrote them."""
    below = TierBelow()
    rig = Rig(small_fake(groups=groups), RigTerms(), below)
    rig.generate(prompt, 1)
    rig.settle()
    return below


def poison(below: TierBelow, name: FrameName) -> None:
    payload = bytearray(below.held[name])
    payload[len(payload) // 2] ^= 1
    below.held[name] = bytes(payload)


def counted(rig: Rig) -> tuple[int, int, int]:
    assert rig.core.offload is not None
    counts = rig.core.offload.audits.counts
    return counts.equal, counts.differs, counts.unread


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_exactly_the_poisoned_blocks_are_found_and_dropped_and_the_answer_is_right(
    data: st.DataObject,
) -> None:
    below = saved(PROMPT)
    true = dict(below.held)
    bad = data.draw(st.lists(st.sampled_from(sorted(true, key=repr)), max_size=3, unique=True))
    for name in bad:
        poison(below, name)
    dice = random.Random(data.draw(st.integers(0, 2**20)))
    below.script = Script(dice, late_max=data.draw(st.sampled_from([0, 5])))
    carrier = LazyCarrier(dice) if data.draw(st.booleans()) else None
    steps = RigTerms(step_tokens_max=data.draw(st.sampled_from([3, 64])), audit=auditing())
    rig = Rig(terms=steps, below=below, carrier=carrier)
    told = rig.generate(PROMPT, 3)
    rig.settle()
    assert told.tokens == OFF.tokens(PROMPT, 3)
    assert told.cached is not None
    assert told.cached.dram == 0
    assert counted(rig) == (10 - len(bad), len(bad), 0)
    assert set(below.held) == set(true) - set(bad)
    again = rig.generate(PROMPT, 3)
    rig.settle()
    assert again.tokens == told.tokens
    assert below.held.items() >= true.items()  # what was missing was computed and written again


def test_without_an_audit_poison_is_believed() -> None:
    """What the test above would not show if the poison were none."""
    below = saved(PROMPT)
    poison(below, next(iter(below.held)))
    assert Rig(below=below).generate(PROMPT, 3).tokens != OFF.tokens(PROMPT, 3)


@pytest.mark.parametrize("groups", [FULL, MIXED, WINDOWED])
def test_honest_blocks_are_equal_in_every_layer_group(groups: tuple[LayerGroup, ...]) -> None:
    below = saved(PROMPT, groups)
    stored = len(below.held)
    rig = Rig(small_fake(groups=groups), RigTerms(step_tokens_max=4, audit=auditing()), below)
    assert rig.generate(PROMPT, 3).tokens == CacheOff(groups).tokens(PROMPT, 3)
    rig.settle()
    equal, differs, unread = counted(rig)
    assert (equal > 0, differs, unread) == (True, 0, 0)
    assert len(below.held) >= stored


def test_an_audit_is_bounded_and_there_is_one_at_a_time() -> None:
    below = saved(PROMPT)
    rig = Rig(terms=RigTerms(audit=auditing(blocks_max=4)), below=below)
    first, second = rig.submit(PROMPT, 2), rig.submit([*PROMPT, 3, 5], 2)
    rig.finish()
    rig.settle()
    assert counted(rig) == (4, 0, 0)
    assert rig.told[first].tokens == OFF.tokens(PROMPT, 2)
    assert rig.told[second].tokens == OFF.tokens([*PROMPT, 3, 5], 2)


def test_poison_that_was_loaded_before_stands_behind_no_audited_block() -> None:
    longer = [*PROMPT, *range(8)]
    below = saved(longer)
    poison(below, list(below.held)[4])
    rig = Rig(
        terms=RigTerms(audit=AuditTerms(0.5, dice=Scripted([False, True, False]))), below=below
    )
    assert rig.generate(PROMPT, 3).tokens != OFF.tokens(PROMPT, 3)
    assert rig.generate(longer, 3).tokens == OFF.tokens(longer, 3)
    rig.settle()
    assert counted(rig) == (2, 0, 0)  # the others are in L1: nobody would have loaded them


def test_poison_that_was_loaded_before_is_forgotten_once_it_is_found() -> None:
    below = saved(PROMPT)
    names = list(below.held)
    poison(below, names[4])
    rig = Rig(
        terms=RigTerms(audit=AuditTerms(0.5, dice=Scripted([False, True, False]))), below=below
    )
    assert rig.generate(PROMPT, 3).tokens != OFF.tokens(PROMPT, 3)
    rig.blocks.forget([PrefixKey(names[2].key)])
    assert rig.generate(PROMPT, 3).tokens == OFF.tokens(PROMPT, 3)
    rig.settle()
    assert counted(rig) == (7, 1, 0)
    assert [name in below.held for name in names] == [True] * 4 + [False] + [True] * 5
    assert rig.generate(PROMPT, 3).tokens == OFF.tokens(PROMPT, 3)


def test_a_drop_that_the_store_did_not_hear_is_tried_again() -> None:
    below = saved(PROMPT)
    wrong = list(below.held)[4]
    poison(below, wrong)
    rig = Rig(terms=RigTerms(audit=auditing()), below=below)
    rig.submit(PROMPT, 1)
    while not any(isinstance(order, Drop) for order in below.orders):
        rig.step()
    below.script.fails = 1.0
    for _ in range(4):
        rig.step(1.0)
    assert wrong in below.held
    below.script.fails = 0.0
    rig.finish()
    for _ in range(10):
        rig.step(1.0)
    assert wrong not in below.held
    assert len({order.ticket for order in below.orders if isinstance(order, Drop)}) > 1


def test_a_request_that_ends_early_or_a_store_that_gives_nothing_leaves_blocks_unread() -> None:
    below = saved(PROMPT)
    below.script.loses = 1.0
    rig = Rig(terms=RigTerms(audit=auditing()), below=below)
    assert rig.generate(PROMPT, 3).tokens == OFF.tokens(PROMPT, 3)
    rig.settle()
    assert counted(rig) == (0, 0, 10)

    below = saved(PROMPT)
    rig = Rig(terms=RigTerms(step_tokens_max=8, audit=auditing()), below=below)
    number = rig.submit(PROMPT, 3)
    while rig.core.counts.steps < 2:
        rig.step()
    rig.cancel(number)
    rig.settle()
    equal, differs, unread = counted(rig)
    assert (equal + unread, differs) == (10, 0)
    assert unread > 0


# ---- a model whose sums are of floats


@pytest.mark.parametrize("dtype", [KvDtype.FLOAT32, KvDtype.BFLOAT16])
def test_honest_blocks_of_a_real_model_are_equal_whatever_the_batches_were(
    dtype: KvDtype,
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source = resolve(TINY)
    runner = load_runner(source.directory, source.model_id, source.revision, 16, dtype=dtype)
    prompt = [random.Random(9).randrange(runner.vocab_size) for _ in range(200)]
    below = TierBelow()
    writer = Rig(runner, RigTerms(step_tokens_max=512), below)
    writer.generate(prompt, 1)
    writer.settle()
    assert len(below.held) == 12
    wrong = list(below.held)[3]
    below.held[wrong] = below.held[list(below.held)[5]]  # true KV of other tokens
    audit = auditing(tolerance=TOLERANCES[dtype])
    rig = Rig(runner, RigTerms(step_tokens_max=7, prefill_tokens_max=7, audit=audit), below)
    rig.submit([5] * 30, 40)  # decodes meanwhile
    rig.generate(prompt, 2)
    rig.settle()
    torch.set_num_threads(threads)
    assert counted(rig) == (11, 1, 0)


# ---- the comparison

GEOMETRY = one_group(2, 3, 8, KvDtype.FLOAT32, 4)


def naive(stored: bytes, computed: bytes, tolerance: float) -> bool:
    """The rule, one vector after another."""
    shape = (4, GEOMETRY.block_tokens, GEOMETRY.kv_heads_count, GEOMETRY.head_dim)
    left = np.frombuffer(stored, "<f4").astype(np.float64).reshape(shape)
    right = np.frombuffer(computed, "<f4").astype(np.float64).reshape(shape)
    for lane in range(shape[0]):
        for head in range(shape[2]):
            vectors = right[lane, :, head]
            usual = np.sqrt(sum(float(v @ v) for v in vectors) / len(vectors))
            for token, vector in enumerate(vectors):
                gap = np.linalg.norm(left[lane, token, head] - vector)
                if not gap <= tolerance * max(np.linalg.norm(vector), usual):
                    return False
    return True


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-3, 1e-1]),
    st.floats(0, 4).filter(lambda one: not 0.99 < one < 1.01),
)
@settings(max_examples=100, deadline=None)
def test_blocks_agree_as_far_as_each_vector_is_near(
    seed: int, tolerance: float, share: float
) -> None:
    """One vector is moved by a share of what is tolerated; each may be of another size."""
    dice = np.random.default_rng(seed)
    right = dice.standard_normal((4, 4, 3, 8)) * 10.0 ** dice.integers(-3, 3, (4, 1, 3, 1))
    left = right.copy()
    lane, token, head = dice.integers(4), dice.integers(4), dice.integers(3)
    length = np.linalg.norm(right[lane, :, head], axis=-1)
    most = max(length[token], np.sqrt(np.mean(length**2)))
    way = dice.standard_normal(8)
    left[lane, token, head] += way / np.linalg.norm(way) * share * tolerance * most
    stored, computed = left.astype("<f4").tobytes(), right.astype("<f4").tobytes()
    assert agrees(stored, computed, GEOMETRY, tolerance) == naive(stored, computed, tolerance)
    assert agrees(stored, computed, GEOMETRY, tolerance) == (share < 1)
    assert agrees(stored, computed, GEOMETRY, 0.0) == (stored == computed)


@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(TOLERANCES)), st.data())
@settings(max_examples=60, deadline=None)
def test_other_vectors_and_what_is_no_number_never_agree(
    seed: int, dtype: KvDtype, data: st.DataObject
) -> None:
    geometry = one_group(2, 3, 8, dtype, 4)
    dice = np.random.default_rng(seed)
    computed = _elements(dice.standard_normal(4 * 4 * 3 * 8), dtype)
    at = data.draw(st.integers(0, 47)) * 8 * dtype.element_bytes
    other = data.draw(st.sampled_from(["negated", "huge", "nan", "infinite"]))
    vector = dice.standard_normal(8)
    if other == "negated":
        size = 8 * dtype.element_bytes
        signs = bytearray(computed[at : at + size])
        for last in range(dtype.element_bytes - 1, size, dtype.element_bytes):
            signs[last] ^= 0x80
        put = bytes(signs)
    else:
        put = _elements({"huge": vector * 1e3, "nan": vector * np.nan,
                         "infinite": vector * np.inf}[other], dtype)  # fmt: skip
    stored = computed[:at] + put + computed[at + len(put) :]
    assert not agrees(stored, computed, geometry, TOLERANCES[dtype])
    assert agrees(computed, bytearray(computed), geometry, TOLERANCES[dtype])


@given(st.binary(min_size=768, max_size=768), st.integers(0, 768 * 8 - 1))
def test_without_a_tolerance_every_bit_counts(block: bytes, bit: int) -> None:
    """Also where the bytes are no numbers at all, as the fake model's."""
    geometry: KvGeometry = one_group(1, 3, 8, KvDtype.FLOAT32, 4)
    changed = bytearray(block)
    changed[bit // 8] ^= 1 << bit % 8
    assert agrees(bytes(block), bytearray(block), geometry, 0.0)
    assert not agrees(changed, block, geometry, 0.0)


def test_blocks_of_different_lengths_are_not_compared() -> None:
    for stored in (bytes(8), bytes(0), bytes(GEOMETRY.slice_bytes)):
        with pytest.raises(CallerError):
            agrees(stored, bytes(2 * GEOMETRY.slice_bytes), GEOMETRY, 0.1)


def _elements(values: np.ndarray, dtype: KvDtype) -> bytes:
    """As KV of a type, cut off where it has fewer bits."""
    if dtype is KvDtype.BFLOAT16:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype("<f4" if dtype is KvDtype.FLOAT32 else "<f2").tobytes()
