"""Loads and compute at once: the head of a gap is computed, layers arrive as they are read.

The fake model reads every byte, so whatever is read before it is there changes the tokens.
"""

import random

import pytest

from kvtier.core.costs import LoadPolicy, Prefix, Run, Speeds, head_to_compute, split
from kvtier.core.estimates import Terms
from kvtier.types import Source
from kvtier_services.worker.l2.port import Load
from tests.support.worker_rig import (
    FULL,
    MIXED,
    SLOW,
    CacheOff,
    LazyCarrier,
    Rig,
    RigTerms,
    Script,
    TierBelow,
    small_fake,
)

OFF = CacheOff()
PROMPT = [(7 + 11 * i) % 259 for i in range(65)]
"""16 blocks, and one token."""


def filled() -> TierBelow:
    tier = TierBelow()
    rig = Rig(below=tier)
    rig.generate(PROMPT, 1)
    rig.settle()
    return tier


def loading(tier: TierBelow, script: Script) -> tuple[Rig, int, Load]:
    """A rig that computes a head while it loads the rest; the load does not end yet."""
    rig = Rig(terms=RigTerms(step_tokens_max=8, priors=SLOW), below=tier)
    number = rig.submit(PROMPT, 4)
    loads: list[Load] = []
    while not loads:
        rig.step(0.0)
        loads = [order for order in tier.orders if isinstance(order, Load)]
    tier.script = script
    return rig, number, loads[0]


def test_the_head_of_a_gap_is_computed_while_its_tail_is_loaded() -> None:
    tier = filled()
    rig, number, load = loading(tier, Script(late_max=0))
    head = 16 - len(load.names)
    assert 4 <= head <= 9
    request = rig.core.request(number)
    assert load.names == request.chain.names(head, 16, rig.namespace)
    tier.is_frozen = True
    for _ in range(head):
        rig.step(0.0)
    assert request.computed == 4 * head  # waits for the load where it begins
    assert not rig.step(0.0)
    tier.is_frozen = False
    rig.finish()
    told = rig.told[number]
    assert told.tokens == OFF.tokens(PROMPT, 4)
    assert told.cached is not None
    assert told.cached.dram == 4 * (16 - head)
    assert rig.core.counts.computed_tokens == 4 * head + 1 + 3
    assert rig.core.offload is not None
    assert rig.core.offload.counts.computed_ahead_blocks == head


def test_a_tail_that_arrives_before_the_head_is_computed_is_used_when_it_is() -> None:
    tier = filled()
    rig, number, load = loading(tier, Script())
    rig.step(0.0)
    assert rig.core.request(number).computed < 4 * (16 - len(load.names))
    rig.finish()
    assert rig.told[number].tokens == OFF.tokens(PROMPT, 4)
    assert rig.core.counts.computed_tokens == 65 - 4 * len(load.names) + 3


@pytest.mark.parametrize("lost", [0, 3])
def test_a_tail_that_is_lost_in_part_is_computed_from_there(lost: int) -> None:
    tier = filled()
    rig, number, load = loading(tier, Script())
    del tier.held[load.names[lost]]
    rig.finish()
    assert rig.told[number].tokens == OFF.tokens(PROMPT, 4)
    told = rig.told[number].cached
    assert told is not None
    assert told.total == 4 * lost


def test_a_tail_that_hangs_is_left_behind_and_computed() -> None:
    tier = filled()
    rig, number, _ = loading(tier, Script())
    tier.is_frozen = True
    rig.step(20.0)
    rig.finish()
    assert rig.told[number].tokens == OFF.tokens(PROMPT, 4)
    assert rig.blocks.usage().in_use_count > 0
    tier.is_frozen = False
    rig.step()
    assert rig.blocks.usage().in_use_count == 0
    assert rig.generate(PROMPT, 4).tokens == OFF.tokens(PROMPT, 4)


def test_a_request_that_is_cancelled_keeps_its_blocks_until_nobody_writes_them() -> None:
    tier = filled()
    rig, number, _ = loading(tier, Script())
    tier.is_frozen = True
    rig.step(0.0)
    rig.cancel(number)
    assert rig.blocks.usage().in_use_count == 16
    tier.is_frozen = False
    rig.step()
    assert rig.blocks.usage().in_use_count == 0


def test_others_take_no_blocks_that_are_being_written() -> None:
    tier = filled()
    rig = Rig(terms=RigTerms(blocks=20, step_tokens_max=8, priors=SLOW), below=tier)
    first = rig.submit(PROMPT, 4, priority=1)
    while not any(isinstance(order, Load) for order in tier.orders):
        rig.step(0.0)
    tier.is_frozen = True
    second = rig.submit([5] * 20, 8, priority=0)
    for _ in range(30):
        rig.step(0.0)
    tier.is_frozen = False
    rig.finish()
    assert rig.told[first].tokens == OFF.tokens(PROMPT, 4)
    assert rig.told[second].tokens == OFF.tokens([5] * 20, 8)


def test_nothing_is_computed_ahead_where_loading_is_much_faster() -> None:
    speeds = Speeds(Terms(0.0025, 1e-7), {Source.DRAM: Terms(0.0005, 1 / 3e9)})
    prefix = Prefix((Run(Source.DRAM, 125),), 2015, 16, 737_280)
    plan = split(prefix, speeds, LoadPolicy(overlap=0.0))
    assert plan.blocks_count == 125
    assert head_to_compute(prefix, speeds, plan, 0.15) == 0


@pytest.mark.parametrize("l1_blocks", [0, 40])
def test_the_head_takes_as_long_as_the_tail(l1_blocks: int) -> None:
    speeds = Speeds(Terms(1 / 30_000, 1e-12), {Source.DRAM: Terms(0.0005, 1 / 8e9)})
    runs = (Run(Source.GPU, l1_blocks), Run(Source.DRAM, 256))
    prefix = Prefix(runs, 16 * (256 + l1_blocks) + 9, 16, 2 << 20)
    plan = split(prefix, speeds, LoadPolicy(overlap=0.0))
    head = head_to_compute(prefix, speeds, plan, 0.15)
    compute_s, load_s = 16 * head / 30_000, 0.0005 + (256 - head) * (2 << 20) / 8e9
    assert compute_s == pytest.approx(load_s, rel=0.05)
    assert max(compute_s, load_s) < 0.8 * plan.load_s


# ---- staged


def staged(dice: random.Random, tier: TierBelow, groups: object = FULL) -> tuple[Rig, LazyCarrier]:
    carrier = LazyCarrier(dice)
    runner = small_fake(groups=FULL if groups is FULL else MIXED)
    return Rig(runner, below=tier, carrier=carrier), carrier


def test_a_request_runs_before_its_blocks_are_in_the_pool_and_reads_them_all_the_same() -> None:
    rig, carrier = staged(random.Random(1), filled())
    told = rig.generate(PROMPT, 6)
    assert told.tokens == OFF.tokens(PROMPT, 6)
    assert told.cached is not None
    assert told.cached.dram == 64
    assert carrier.waited > 0
    loads = [order for order in rig.below.orders if isinstance(order, Load)]  # type: ignore[union-attr]
    assert [len(load.names) for load in loads] == [8, 8]  # as many as there are slots


def test_bytes_that_are_not_waited_for_would_be_seen() -> None:
    rig, _ = staged(random.Random(1), filled())
    rig.transfer.before_layer = lambda layer: None  # type: ignore[method-assign]
    assert rig.generate(PROMPT, 6).tokens != OFF.tokens(PROMPT, 6)


def test_each_layer_waits_for_its_own_slice_only() -> None:
    rig, carrier = staged(random.Random(1), filled())
    seen: list[tuple[int, int]] = []
    before_layer = rig.transfer.before_layer

    def watched(layer: int) -> None:
        before_layer(layer)
        seen.append((layer, carrier.ended))

    rig.transfer.before_layer = watched  # type: ignore[method-assign]
    rig.generate(PROMPT, 1)
    (first, at_first), (second, at_second) = seen[:2]
    assert (first, second) == (0, 1)
    assert at_first < at_second


def test_staged_bytes_are_the_pools_bytes() -> None:
    plain, lazy = TierBelow(), TierBelow()
    Rig(below=plain).generate(PROMPT, 9)
    first = Rig(below=plain)
    first.generate(PROMPT, 9)
    first.settle()
    second, _ = staged(random.Random(2), lazy)
    second.generate(PROMPT, 9)
    second.settle()
    assert first.below is not None
    assert lazy.held == first.below.held
