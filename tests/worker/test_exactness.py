"""Whatever happens to a request, its tokens are those of a run with the cache off.

The fake model's next token is a hash of every KV byte that it reads, so a wrong byte shows.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.costs import Priors
from kvtier.core.eviction import LruPolicy, PriorityPolicy
from kvtier.core.planner import WritePolicy
from kvtier.paged.geometry import LayerGroup
from kvtier.types import PrefixHash
from kvtier_services.worker.l2.audit import AuditTerms
from tests.support.worker_rig import (
    FULL,
    MIXED,
    SLOW,
    WINDOWED,
    CacheOff,
    LazyCarrier,
    Rig,
    RigTerms,
    Script,
    TierBelow,
    small_fake,
)

SHAPES: list[tuple[LayerGroup, ...]] = [FULL, MIXED, WINDOWED]
OFF = {groups: CacheOff(groups) for groups in SHAPES}
STEMS = [[random.Random(f"{n}.{i}").randrange(259) for i in range(30)] for n in range(3)]


def some_prompt(dice: random.Random) -> list[int]:
    tail = [dice.randrange(3) for _ in range(dice.randint(1, 6))]
    return dice.choice(STEMS)[: dice.randint(1, 30)] + tail


def some_terms(dice: random.Random) -> RigTerms:
    return RigTerms(
        blocks=dice.choice([15, 16, 18, 24, 64]),
        sequences_max=dice.choice([2, 8]),
        step_tokens_max=dice.choice([5, 16, 64]),
        write_policy=dice.choice(list(WritePolicy)),
        prefill_tokens_max=dice.choice([4, 32]),
        policy=dice.choice([PriorityPolicy, LruPolicy]),
        priors=SLOW if dice.random() < 0.3 else Priors(),
        audit=some_audit(random.Random(dice.random())),
    )


def some_audit(dice: random.Random) -> AuditTerms:
    return AuditTerms(dice.choice([0.0, 0.0, 0.3]), dice.choice([1, 4, 64]), 0.0, dice)


def some_tier(dice: random.Random) -> TierBelow | None:
    if dice.random() < 0.2:
        return None
    return TierBelow(
        Script(
            random.Random(dice.random()),
            late_max=dice.choice([0, 1, 6]),
            fails=dice.choice([0.0, 0.2]),
            loses=dice.choice([0.0, 0.3]),
            block_s=dice.choice([0.0, 0.003]),
        )
    )


def run_schedule(rig: Rig, dice: random.Random) -> dict[int, tuple[list[int], int]]:
    """Submit, step, cancel, forget L1 and stop the tier below at random; what must come out."""
    wanted = {}
    for _ in range(10):
        prompt, count = some_prompt(dice), dice.randint(1, 14)
        wanted[rig.submit(prompt, count, priority=dice.randint(0, 1))] = (prompt, count)
        for _ in range(dice.randint(0, 8)):
            rig.step(dice.choice([0.0, 0.001, 0.2, 6.0]))
        if dice.random() < 0.3:
            rig.blocks.clear()
        if dice.random() < 0.2:
            victim = dice.choice(list(wanted))
            if rig.told[victim].finish is None:
                rig.cancel(victim)
                del wanted[victim]
        if rig.below is not None:
            rig.below.is_frozen = dice.random() < 0.2
    if rig.below is not None:
        rig.below.is_frozen = False
    rig.finish()
    return wanted


def some_rig(dice: random.Random, groups: tuple[LayerGroup, ...]) -> Rig:
    carrier = dice.choice([None, LazyCarrier(random.Random(dice.random()))])
    return Rig(small_fake(groups=groups), some_terms(dice), some_tier(dice), carrier)


@pytest.mark.parametrize("groups", [FULL, MIXED, WINDOWED], ids=["full", "mixed", "windowed"])
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_any_schedule_gives_the_tokens_of_the_cache_off_run(
    groups: tuple[LayerGroup, ...], seed: int
) -> None:
    dice = random.Random(seed)
    rig = some_rig(dice, groups)
    wanted = run_schedule(rig, dice)
    for number, (prompt, count) in wanted.items():
        assert rig.told[number].tokens == OFF[groups].tokens(prompt, count)
    if rig.below is not None:
        rig.settle()
    if rig.core.offload is not None:
        assert rig.core.offload.audits.counts.differs == 0
    rig.step()
    for group in range(len(groups)):
        assert rig.blocks.usage(group).in_use_count == 0
    cached = {PrefixHash(int.from_bytes(k[:8], "little")) for k in rig.blocks.cached_keys()}
    assert rig.events.hashes == cached


@pytest.mark.parametrize("groups", [FULL, MIXED, WINDOWED], ids=["full", "mixed", "windowed"])
def test_random_schedules_reach_every_path(groups: tuple[LayerGroup, ...]) -> None:
    paths = ("preempted", "held_back", "loaded", "lost", "given_up", "hits", "ahead", "waited",
             "audited")  # fmt: skip
    seen = dict.fromkeys(paths, 0)
    for seed in range(60):
        dice = random.Random(seed)
        rig = some_rig(dice, groups)
        run_schedule(rig, dice)
        counts = rig.core.scheduler.counts
        seen["preempted"] += counts.preempted
        seen["held_back"] += counts.held_back
        seen["hits"] += sum(told.cached.gpu for told in rig.told.values() if told.cached)
        if rig.core.offload is not None:
            below = rig.core.offload.counts
            seen["loaded"] += sum(below.blocks_loaded.values())
            seen["lost"] += sum(below.blocks_not_loaded.values())
            seen["given_up"] += below.loads_given_up
            seen["audited"] += rig.core.offload.audits.counts.equal
            seen["ahead"] += below.computed_ahead_blocks
        if isinstance(rig.carrier, LazyCarrier):
            seen["waited"] += rig.carrier.waited
    if groups is not FULL:
        del seen["ahead"]  # with windows nothing is computed while something is loaded
    if groups is WINDOWED:
        del seen["preempted"]  # windows never fill the pool
    assert min(seen.values()) > 0, seen


def test_bytes_that_are_loaded_are_the_bytes_that_were_saved() -> None:
    tier = TierBelow()
    first = Rig(below=tier)
    first.generate(STEMS[0], 8)
    first.settle()
    second = Rig(below=tier)
    told = second.generate(STEMS[0], 8)
    assert told.tokens == OFF[FULL].tokens(STEMS[0], 8)
    assert len(tier.loaded) == 7
    for name, payload in tier.loaded:
        assert payload == tier.held[name]
    assert told.cached is not None
    assert told.cached.dram == 28
    assert second.core.counts.computed_tokens == 30 - 28 + 7


def test_one_wrong_byte_changes_the_tokens_that_follow() -> None:
    tier = TierBelow()
    first = Rig(below=tier)
    first.generate(STEMS[0], 8)
    first.settle()
    for name, payload in list(tier.held.items())[:7]:
        changed = bytearray(payload)
        changed[len(changed) // 2] ^= 1
        second = Rig(below=TierBelow())
        assert second.below is not None
        second.below.held = tier.held | {name: bytes(changed)}
        assert second.generate(STEMS[0], 8).tokens != OFF[FULL].tokens(STEMS[0], 8)
