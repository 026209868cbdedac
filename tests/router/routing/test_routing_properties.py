"""What the brain promises of a whole fleet, in virtual time: balance, affinity, recovery, herds.

Rivals are the same brain under other policies: bounded-load affinity hashing (no index at all) and
least loaded.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from kvtier_router.routing import Policy, RoutingConfig
from tests.support.virtual_fleet import Noise, Outcome, Prompt, Setup, World, cold, mixed, words

ENDLESS_BLOCKS = 100_000
SLOW_WORKER, KILLED_WORKER = 5, 2
RIVALS = {
    "ours": Setup(),
    "hashing": Setup(has_index=False),
    "least loaded": Setup(config=RoutingConfig(policy=Policy.LEAST_LOADED)),
}


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
def test_unrelated_cold_requests_spread_evenly_at_any_concurrency(concurrency: int) -> None:
    outcome = World(Setup(capacity_blocks=ENDLESS_BLOCKS)).loop(cold(1, 480), concurrency)
    assert outcome.spread() <= 1.3
    assert len(outcome.ttfts) == 480


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
def test_they_spread_evenly_where_times_are_noisy_and_answers_are_held_up(
    concurrency: int, seed: int
) -> None:
    setup = Setup(capacity_blocks=ENDLESS_BLOCKS, seed=seed, noise=Noise(), horizon_s=900.0)
    outcome = World(setup).loop(cold(seed, 800), concurrency)
    assert outcome.spread() <= 1.3
    assert len(outcome.ttfts) == 800


def test_they_spread_evenly_through_several_routers_too() -> None:
    setup = Setup(capacity_blocks=ENDLESS_BLOCKS, routers_count=4)
    assert World(setup).loop(cold(2, 800), 16).spread() <= 1.3


@pytest.mark.parametrize("noise", [None, Noise()])
@pytest.mark.parametrize("slow", [3.0, 8.0])
def test_a_worker_slow_for_a_while_is_spared_and_back_at_its_fair_share_within_a_minute(
    slow: float, noise: Noise | None
) -> None:
    world = World(Setup(capacity_blocks=ENDLESS_BLOCKS, horizon_s=125.0, noise=noise))
    random, prompts, now = Random(1), list[Prompt](), 0.0
    while now < 120.0:
        now += random.expovariate(20.0)
        tokens = words(f"s{len(prompts)}", random.randrange(300, 1500))
        prompts.append(Prompt(now, tokens, 0.3))
    world.workers[0].slow = slow
    world.clock.at(30.0, lambda: setattr(world.workers[0], "slow", 1.0))
    outcome = world.play(prompts)

    def share(begin: float, end: float) -> float:
        placed = Counter(name for at, name in outcome.placed if begin <= at < end)
        return placed["w0"] / placed.total()

    assert share(5.0, 30.0) < 1 / 8 / 2
    assert 1 / 8 / 1.3 <= share(75.0, 120.0) <= 1.3 / 8


@cache
def troubled(rival: str, seed: int, rate_per_s: float) -> Outcome:
    """The mixed workload with one slow worker and one that dies."""
    world = World(replace(RIVALS[rival], seed=seed))
    world.workers[SLOW_WORKER].slow = 3.0
    world.clock.at(10.0, world.workers[KILLED_WORKER].kill)
    return world.play(mixed(seed, 600, rate_per_s))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("rate_per_s", [10.0, 30.0])
def test_hits_of_affinity_and_tail_of_balance_with_a_slow_and_a_killed_worker(
    seed: int, rate_per_s: float
) -> None:
    ours, *rivals = [troubled(rival, seed, rate_per_s) for rival in RIVALS]
    assert ours.hit >= 0.95 * max(rival.hit for rival in rivals)
    assert ours.quantile(0.99) <= min(rival.quantile(0.99) for rival in rivals)
    assert ours.refused == 0
    assert len(ours.ttfts) >= 600


def test_a_hot_prefix_spreads_over_workers_when_it_is_too_much_for_one() -> None:
    world = World(Setup(capacity_blocks=ENDLESS_BLOCKS))
    hot = words("hot", 2560)
    prompts = [
        Prompt(0.01 * number, np.concatenate([hot, words(f"h{number}", 300)]), 0.2)
        for number in range(400)
    ]
    outcome = world.play(prompts)
    assert outcome.hit > 0.8
    assert sum(count > 40 for count in outcome.share.values()) >= 3
    # A request waits at its holder for up to 1 + Weights.work times the prefill it saves there.
    assert outcome.quantile(0.99) < 1.3


@cache
def through(routers_count: int, seed: int, rate_per_s: float, is_shared: bool = True) -> Outcome:
    setup = Setup(seed=seed, routers_count=routers_count, shares_reservations=is_shared)
    return World(setup).play(mixed(seed, 600, rate_per_s))


def test_four_routers_on_one_index_hit_as_much_as_one() -> None:
    runs = [(seed, rate) for seed in (1, 2, 3) for rate in (15.0, 30.0)]
    one = sum(through(1, seed, rate).hit for seed, rate in runs)
    four = sum(through(4, seed, rate).hit for seed, rate in runs)
    assert four >= 0.98 * one


def test_without_shared_reservations_four_routers_herd() -> None:
    """The simulation would notice if reservations did nothing: seed by seed, and in the sum."""
    runs = [(through(4, seed, 30.0, False), through(4, seed, 30.0)) for seed in range(1, 7)]
    worse = [alone.hit < shared.hit for alone, shared in runs]
    late = [alone.quantile(0.9) > shared.quantile(0.9) for alone, shared in runs]
    assert sum(worse) >= 5
    assert sum(late) >= 5
    alone_p99, shared_p99 = (sum(run[side].quantile(0.99) for run in runs) for side in (0, 1))
    assert alone_p99 > 1.1 * shared_p99


@pytest.mark.parametrize("seed", [1, 2])
def test_bursts_of_siblings_are_computed_once_through_four_routers_and_late_events(
    seed: int,
) -> None:
    def computed(routers_count: int) -> int:
        setup = Setup(
            seed=seed,
            routers_count=routers_count,
            event_delay_s=0.05,
            capacity_blocks=ENDLESS_BLOCKS,
        )
        world, random, prompts = World(setup), Random(seed), list[Prompt]()
        for family in range(8):
            common = words(f"f{seed}/{family}", 3000)
            for number in range(32):
                tail = words(f"t{seed}/{family}/{number}", 100)
                at_s = 1.0 + family + random.random() * 0.01
                prompts.append(Prompt(at_s, np.concatenate([common, tail]), 0.3))
        outcome = world.play(sorted(prompts, key=lambda prompt: prompt.at_s))
        return outcome.prompt_tokens - outcome.cached_tokens

    assert computed(4) <= 1.3 * computed(1)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_minute_without_the_index_costs_few_hits_and_no_request(seed: int) -> None:
    def played(is_lost: bool) -> Outcome:
        world = World(Setup(seed=seed))
        index = world.index
        assert index is not None
        if is_lost:
            world.clock.at(5.0, index.lose)
            world.clock.at(65.0, lambda: index.find(world.workers))
        return world.play(mixed(seed, 900, 12.0))

    without, always = played(True), played(False)
    assert without.hit >= 0.85 * always.hit
    assert without.hit != always.hit  # it was really gone
    assert (without.refused, without.failures) == (0, 0)


def test_workers_may_die_one_after_the_other_without_a_request_being_lost() -> None:
    world = World(Setup(seed=4))
    for number in range(7):
        world.clock.at(3.0 + 2.0 * number, world.workers[number].kill)
    outcome = world.play(mixed(4, 200, 10.0))
    assert outcome.failures > 0
    assert outcome.refused == 0
    assert len(outcome.ttfts) >= 200


def lose_workers(world: World) -> None:
    world.clock.at(4.0, world.workers[1].kill)


def lose_index(world: World) -> None:
    assert world.index is not None
    world.clock.at(4.0, world.index.lose)


@pytest.mark.parametrize("fault", [lose_workers, lose_index])
def test_nothing_stays_counted_when_all_is_over(fault: Callable[[World], None]) -> None:
    world = World(Setup(seed=5, routers_count=2, horizon_s=60.0))
    fault(world)
    world.play(mixed(5, 150, 20.0))
    for router in world.routers:
        assert router.in_flight_count == 0
        reports = router.workers()
        assert sum(report.requests_in_flight for report in reports) == 0
        assert sum(report.waiting_prefill_tokens for report in reports) == 0


def test_the_simulation_is_deterministic() -> None:
    first, second = (World(Setup(seed=6)).play(mixed(6, 120, 20.0)) for _ in range(2))
    assert first == second
