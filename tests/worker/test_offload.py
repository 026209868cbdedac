"""The tiers below, scripted: what is asked of them, and what their failures cost."""

import random
from itertools import pairwise

import pytest

from kvtier.core.eviction import RetentionPlan, TokenRange
from kvtier.core.planner import WritePolicy
from kvtier.types import Source
from kvtier_services.worker.l2.port import Load, Lookup, RunOutcome, Save
from tests.support.worker_rig import CacheOff, Rig, RigTerms, Script, TierBelow

OFF = CacheOff()
PROMPT = [(7 + 11 * i) % 259 for i in range(33)]


def filled(prompt: list[int] = PROMPT, **terms: object) -> TierBelow:
    """A tier that has all blocks of a prompt."""
    tier = TierBelow()
    rig = Rig(below=tier)
    rig.generate(prompt, 1, **terms)
    rig.settle()
    return tier


def orders(tier: TierBelow, kind: type[Load | Lookup | Save]) -> int:
    return sum(isinstance(order, kind) for order in tier.orders)


def test_a_prefix_is_loaded_once_and_then_served_from_l1() -> None:
    tier = filled()
    rig = Rig(below=tier)
    first, again = rig.generate(PROMPT, 3), rig.generate(PROMPT, 3)
    assert first.cached is not None and again.cached is not None  # noqa: PT018
    assert (first.cached.dram, first.cached.gpu) == (32, 0)
    assert (again.cached.dram, again.cached.gpu) == (0, 32)
    assert first.tokens == again.tokens == OFF.tokens(PROMPT, 3)
    assert orders(tier, Load) == 1


def test_what_came_from_below_is_not_written_there_again() -> None:
    tier = filled()
    saves = orders(tier, Save)
    rig = Rig(below=tier)
    rig.generate(PROMPT, 1)
    rig.settle()
    assert orders(tier, Save) == saves


def test_others_run_while_a_request_loads() -> None:
    tier = filled()
    rig = Rig(below=tier)
    other = rig.submit([1, 2, 3], 20)
    rig.step()
    number = rig.submit(PROMPT, 3)
    for _ in range(3):
        rig.step(0.0)
    tier.is_frozen = True
    before = len(rig.told[other].tokens)
    for _ in range(5):
        assert rig.step(0.0)
    assert len(rig.told[other].tokens) == before + 5
    tier.is_frozen = False
    rig.finish()
    cached = rig.told[number].cached
    assert cached is not None
    assert cached.dram == 32


def test_a_lookup_without_an_answer_delays_a_request_for_a_moment_only() -> None:
    tier = filled()
    tier.is_frozen = True
    rig = Rig(below=tier)
    number = rig.submit(PROMPT, 2)
    assert not rig.step(0.001)
    assert rig.step(0.2)
    rig.finish()
    assert rig.told[number].tokens == OFF.tokens(PROMPT, 2)
    cached = rig.told[number].cached
    assert cached is not None
    assert cached.total == 0


def test_a_load_that_hangs_is_left_behind_and_its_blocks_are_not_used_meanwhile() -> None:
    tier = filled()
    tier.script = Script(random.Random(1), loses=0.5)
    rig = Rig(terms=RigTerms(blocks=20), below=tier)
    number = rig.submit(PROMPT, 6)
    while not orders(tier, Load):
        rig.step(0.0)
    tier.is_frozen = True
    rig.step(20.0)
    assert rig.core.offload is not None
    assert rig.core.offload.counts.loads_given_up == 1
    rig.finish()
    assert rig.told[number].tokens == OFF.tokens(PROMPT, 6)
    assert rig.blocks.usage().in_use_count >= 8
    tier.is_frozen = False
    rig.step()
    assert rig.blocks.usage().in_use_count == 0
    assert rig.generate(PROMPT, 6).tokens == OFF.tokens(PROMPT, 6)


def test_a_request_that_is_cancelled_while_it_loads_frees_its_blocks_when_the_load_ends() -> None:
    tier = filled()
    rig = Rig(below=tier)
    number = rig.submit(PROMPT, 6)
    while not orders(tier, Load):
        rig.step(0.0)
    rig.cancel(number)
    assert rig.blocks.usage().in_use_count == 8
    rig.step()
    assert rig.blocks.usage().in_use_count == 0


def test_blocks_before_a_lost_one_are_kept_and_the_rest_is_computed() -> None:
    tier = filled()
    rig = Rig(below=tier)
    number = rig.submit(PROMPT, 3)
    while not orders(tier, Load):
        rig.step(0.0)
    load = next(order for order in tier.orders if isinstance(order, Load))
    del tier.held[load.names[5]]
    rig.finish()
    cached = rig.told[number].cached
    assert cached is not None
    assert cached.dram == 5 * 4
    assert rig.core.counts.computed_tokens == 33 - 20 + 2
    assert rig.told[number].tokens == OFF.tokens(PROMPT, 3)


def test_saves_that_fail_are_tried_again_when_the_store_is_back() -> None:
    tier = TierBelow(Script(fails=1.0))
    rig = Rig(below=tier)
    rig.generate(PROMPT, 1)
    for _ in range(5):
        rig.step(0.5)
    assert not tier.held
    tier.script.fails = 0.0
    rig.settle()
    assert len(tier.held) == 8


def test_nothing_is_loaded_that_is_computed_faster() -> None:
    tier = filled()
    rig = Rig(below=tier)
    rig.generate([9] * 40, 1)
    now = rig.clock.now
    for _ in range(20):
        slow = [RunOutcome(Source.DRAM, 8, 8, 30.0, was_late=False)]
        rig.core.advisor.loaded(slow, 0, now)
    told = rig.generate(PROMPT, 2)
    assert told.cached is not None
    assert told.cached.total == 0
    assert orders(tier, Load) == 0
    assert rig.core.scheduler.counts.recomputed_by_choice == 8


def test_scopes_neither_share_nor_see_blocks_below() -> None:
    tier = filled(scope_salt="one")
    scopes = {order.scope for order in tier.orders if isinstance(order, Save)}
    assert scopes == {"one"}
    other = Rig(below=tier).generate(PROMPT, 1, scope_salt="two")
    same = Rig(below=tier).generate(PROMPT, 1, scope_salt="one")
    assert other.cached is not None and same.cached is not None  # noqa: PT018
    assert (other.cached.total, same.cached.dram) == (0, 32)


def test_on_reuse_writes_a_block_when_it_is_hit_again() -> None:
    tier = TierBelow()
    rig = Rig(terms=RigTerms(write_policy=WritePolicy.ON_REUSE), below=tier)
    rig.generate(PROMPT, 1)
    rig.settle()
    assert not tier.held
    rig.generate(PROMPT, 1)
    rig.settle()
    assert len(tier.held) == 8


def test_on_evict_writes_what_is_about_to_leave() -> None:
    tier = TierBelow()
    rig = Rig(terms=RigTerms(blocks=40, write_policy=WritePolicy.ON_EVICT), below=tier)
    rig.generate(PROMPT, 1)
    rig.settle()
    assert not tier.held
    for n in range(4):
        rig.generate([n] * 33, 1)
        rig.settle()
    assert len(tier.held) >= 8
    told = Rig(below=tier).generate(PROMPT, 1)
    assert told.cached is not None
    assert told.cached.dram == 32


def test_a_block_that_is_being_written_is_not_evicted() -> None:
    tier = TierBelow()
    rig = Rig(terms=RigTerms(blocks=16), below=tier)
    rig.generate(PROMPT, 1)
    tier.is_frozen = True
    for n in range(6):
        rig.generate([n] * 30, 2)
        assert rig.blocks.usage().in_use_count >= 1
    tier.is_frozen = False
    rig.settle()
    told = Rig(below=tier).generate(PROMPT, 1)
    assert told.tokens == OFF.tokens(PROMPT, 1)


def test_what_waits_for_company_is_written_before_it_is_evicted() -> None:
    tier = TierBelow()
    rig = Rig(terms=RigTerms(blocks=48), below=tier)
    for n in range(12):
        number = rig.submit([n] * 33, 1)
        while rig.told[number].finish is None:
            rig.step(0.0)  # so little time passes that only eviction makes haste
    rig.settle()
    assert rig.core.offload is not None
    counts = rig.core.offload.saves.counts
    assert (counts.saved, counts.missed) == (96, 0)
    assert orders(tier, Save) < 48


def test_a_retention_hint_goes_down_with_the_blocks() -> None:
    plan = RetentionPlan((TokenRange(0, 8, 90), TokenRange(8, 16, 10)), decode_priority=70)
    for policy in WritePolicy:
        tier = TierBelow()
        rig = Rig(terms=RigTerms(write_policy=policy), below=tier)
        for _ in range(2):
            rig.generate(PROMPT, 10, retention=plan)
        rig.settle()
        if policy is WritePolicy.ON_EVICT:
            for n in range(10):
                rig.generate([n] * 33, 1)
                rig.settle()
        saves = [order for order in tier.orders if isinstance(order, Save)]
        priority = {name: order.priority for order in saves for name in order.names}
        request = rig.core.request(rig.submit(PROMPT, 1))
        names = request.chain.names(0, 8, rig.namespace)
        assert [priority[name] for name in names] == [90, 90, 10, 10, 35, 35, 35, 35], policy
        if policy is WritePolicy.ON_SEAL:
            assert 70 in priority.values()


def test_a_preempted_request_comes_back_from_below() -> None:
    tier = TierBelow()
    rig = Rig(terms=RigTerms(blocks=16, step_tokens_max=64), below=tier)
    numbers = [rig.submit([n, *PROMPT[:20]], 16) for n in range(3)]
    rig.finish()
    assert rig.core.scheduler.counts.preempted > 0
    for n, number in enumerate(numbers):
        assert rig.told[number].tokens == OFF.tokens([n, *PROMPT[:20]], 16)


@pytest.mark.parametrize("steps", [1, 4])
def test_events_say_what_l1_holds_and_in_which_chain(steps: int) -> None:
    heard: list[tuple[int, list[int]]] = []
    rig = Rig(terms=RigTerms(step_tokens_max=33 if steps == 1 else 8))
    store = rig.events.store

    def listen(tier: object, parent: int, hashes: object) -> None:
        heard.append((parent, [int(one) for one in hashes]))  # type: ignore[attr-defined]
        store(tier, parent, hashes)  # type: ignore[arg-type]

    rig.events.store = listen  # type: ignore[method-assign]
    rig.generate(PROMPT, 1)
    assert heard[0][0] == 0
    assert len(heard) == steps
    for (_, before), (parent, _) in pairwise(heard):
        assert parent == before[-1]
