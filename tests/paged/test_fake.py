"""The fake model: equal answers however it is run, another answer for one wrong byte."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.paged.fake import FakeModel, FakeTerms
from kvtier.paged.geometry import KvGeometry, LayerGroup, one_group
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import Logits, Slice

BLOCK = 4
PLAIN = one_group(2, 1, 8, KvDtype.FLOAT32, BLOCK)
HYBRID = KvGeometry(2, 1, 8, KvDtype.FLOAT32, BLOCK, (LayerGroup((1,)), LayerGroup((0,), 6)))
TOKENS = [7, 1, 255, 3, 3, 9, 12, 0, 1, 1, 2, 5, 8, 13]


def table(geometry: KvGeometry, blocks: Sequence[int]) -> list[Sequence[int]]:
    return [blocks] * len(geometry.groups)


def answer(
    model: FakeModel, pool: KvPool, blocks: Sequence[int], tokens: Sequence[int], chunks: list[int]
) -> int:
    """The next token after `tokens`, computed in chunks of the given lengths, then the rest."""
    start = 0
    for count in [*chunks, len(tokens)]:
        part = list(tokens[start : start + count])
        if part:
            tables = table(model.geometry, blocks)
            logits = model.step(pool, [Slice(part, start, tables)])
            start += len(part)
    return int(logits[0].argmax())


@pytest.mark.parametrize("geometry", [PLAIN, HYBRID])
@settings(max_examples=25)
@given(chunks=st.lists(st.integers(1, 7), max_size=8), blocks=st.permutations(range(6)))
def test_chunks_and_places_in_the_pool_change_nothing(
    geometry: KvGeometry, chunks: list[int], blocks: list[int]
) -> None:
    model = FakeModel(geometry)
    whole = KvPool(geometry, [6] * len(geometry.groups))
    parts = KvPool(geometry, [6] * len(geometry.groups))
    expected = answer(model, whole, range(6), TOKENS, [])
    assert answer(model, parts, blocks, TOKENS, chunks) == expected
    for place in range(len(TOKENS) // BLOCK):
        assert bytes(parts.block_memory(blocks[place])) == bytes(whole.block_memory(place))


def test_neighbours_in_the_batch_change_nothing() -> None:
    model = FakeModel(PLAIN)
    pool = KvPool(PLAIN, [12])
    slices = [
        Slice(TOKENS[:5], 0, [[0, 1]]),
        Slice(TOKENS, 0, [[2, 3, 4, 5]]),
        Slice([1], 0, [[6]], Logits.NONE),
        Slice(TOKENS[:9], 0, [[7, 8, 9]]),
    ]
    logits = model.step(pool, slices)
    assert logits.shape == (3, model.vocab_size)
    alone = [
        answer(model, KvPool(PLAIN, [4]), range(4), part.tokens, [])
        for part in slices
        if part.logits is Logits.LAST
    ]
    assert logits.argmax(dim=1).tolist() == alone


@pytest.mark.parametrize("geometry", [PLAIN, HYBRID])
def test_any_wrong_byte_that_is_read_changes_the_answer(geometry: KvGeometry) -> None:
    model = FakeModel(geometry)
    groups = range(len(geometry.groups))
    pool = KvPool(geometry, [4 for _ in groups])
    tables = table(geometry, range(4))
    spy = FakeSpy(model)
    expected = spy.next(pool, tables)
    wrong = 0
    for group in groups:
        first = 0 if geometry.groups[group].window is None else 2
        for block in range(first, 3):
            memory = pool.block_memory(block, group)
            for at in range(0, len(memory), 37):
                memory[at] ^= 1
                assert spy.next(pool, tables) != expected
                memory[at] ^= 1
                wrong += 1
    assert wrong > 20
    assert spy.next(pool, tables) == expected


class FakeSpy:
    """Runs one more token, again and again, on a prefix that is computed once."""

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self._filled = False

    def next(self, pool: KvPool, tables: list[Sequence[int]]) -> bytes:
        """KV bytes of the token at a block's border: a function of all blocks before it."""
        if not self._filled:
            self._model.step(pool, [Slice(TOKENS[:12], 0, tables, Logits.NONE)])
            self._filled = True
        self._model.step(pool, [Slice([5], 12, tables, Logits.NONE)])
        return bytes(pool.block_memory(3))


def test_the_unfinished_block_counts_too() -> None:
    model = FakeModel(PLAIN, FakeTerms(emits=range(259)))
    answers = set()
    for flip in range(64):
        pool = KvPool(PLAIN, [2])
        model.step(pool, [Slice(TOKENS[:6], 0, [[0, 1]], Logits.NONE)])
        pool.layer(0).values[1, 1, 0, 0] += flip
        answers.add(int(model.step(pool, [Slice([9], 6, [[0, 1]])]).argmax()))
    assert len(answers) > 32


def test_a_block_of_another_place_or_prefix_changes_the_answer() -> None:
    model = FakeModel(PLAIN, FakeTerms(emits=range(259)))
    pool = KvPool(PLAIN, [4])
    right = answer(model, pool, [0, 1, 2, 3], TOKENS, [])
    swapped = model.step(pool, [Slice(TOKENS[12:], 12, [[1, 0, 2, 3]])])
    assert int(swapped.argmax()) != right


def test_layers_are_waited_for_in_order_once_a_step() -> None:
    model, layers = FakeModel(PLAIN), list[int]()
    model.step(KvPool(PLAIN, [4]), [Slice(TOKENS, 0, [range(4)])], layers.append)
    assert layers == [0, 1]


def test_sampling_words_still_finds_a_swapped_block() -> None:
    geometry = one_group(4, 2, 64, KvDtype.FLOAT32, BLOCK)
    model = FakeModel(geometry, FakeTerms(stride_bytes=8 * 67, emits=range(259)))
    pool = KvPool(geometry, [4])
    right = answer(model, pool, [0, 1, 2, 3], TOKENS, [5])
    assert right == answer(model, KvPool(geometry, [4]), [3, 2, 1, 0], TOKENS, [])
    assert int(model.step(pool, [Slice(TOKENS[12:], 12, [[0, 2, 1, 3]])]).argmax()) != right


def test_a_step_takes_the_time_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("kvtier.paged.fake.time.sleep", slept.append)
    model = FakeModel(PLAIN, FakeTerms(prefill_tokens_per_s=0.01, step_s=1000.0))
    model.step(KvPool(PLAIN, [4]), [Slice(TOKENS, 0, [range(4)])])
    (seconds,) = slept
    assert 2390 < seconds <= 2400


def test_wrong_terms_and_slices_are_refused() -> None:
    for wrong in (
        {"stride_bytes": 12},
        {"stride_bytes": 0},
        {"emits": range(0)},
        {"emits": range(300)},
        {"prefill_tokens_per_s": 0.0},
        {"step_s": -1.0},
    ):
        with pytest.raises(CallerError):
            FakeTerms(**wrong)
    with pytest.raises(CallerError, match="multiple of 8"):
        FakeModel(one_group(1, 1, 1, KvDtype.FLOAT32, 4))
    model, pool = FakeModel(PLAIN, FakeTerms(context_tokens=10)), KvPool(PLAIN, [4])
    for part in (
        Slice([], 0, [[0]]),
        Slice([1], -1, [[0]]),
        Slice([1] * 5, 0, [[0]]),
        Slice([1], 0, [[4]]),
        Slice([1], 0, [[0], [0]]),
        Slice([1] * 11, 0, [[0, 1, 2]]),
    ):
        with pytest.raises(CallerError):
            model.step(pool, [part])
    with pytest.raises(CallerError):
        model.step(pool, [])
    with pytest.raises(CallerError, match="geometry"):
        model.step(KvPool(HYBRID, [4, 4]), [Slice([1], 0, [[0], [0]])])
    assert torch.equal(pool.layer(0).keys, torch.zeros_like(pool.layer(0).keys))
