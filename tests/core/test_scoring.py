"""One continuous cost: load counts always, prefixes count as the time they save, ties spread."""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.costs import (
    FREE_SOURCES,
    SOURCES_COUNT,
    CostBook,
    FloatArray,
    PrefillSample,
    Prefix,
    Run,
    SpeedTable,
    split,
)
from kvtier.core.scoring import Ask, Decision, Fleet, RecentTokens, Weights, decide
from kvtier.errors import CallerError, UnavailableError
from kvtier.types import HolderId, Role, Source

TOKENS_PER_S = 10_000.0
WORKERS = 8


def table(workers_count: int = WORKERS, tokens_per_s: float = TOKENS_PER_S) -> SpeedTable:
    token_s = np.full(workers_count, 1 / tokens_per_s)
    latency_s = np.full((workers_count, SOURCES_COUNT), 1e-3)
    byte_s = np.full((workers_count, SOURCES_COUNT), 1e-10)
    for source in FREE_SOURCES:
        latency_s[:, source] = byte_s[:, source] = 0.0
    return SpeedTable(token_s, token_s / 32_768, latency_s, byte_s)


def fleet_of(workers_count: int = WORKERS) -> Fleet:
    fleet = Fleet.idle(workers_count)
    fleet.kv_bytes_per_token[:] = 128 << 10
    return fleet


def shares(
    fleet: Fleet, ask: Ask, draws: int = 400, weights: Weights | None = None, seed: int = 1
) -> list[int]:
    random, counts = Random(seed), [0] * len(fleet.eligible)
    speeds = table(len(counts))
    for _ in range(draws):
        counts[decide(ask, fleet, speeds, random.random(), weights or Weights()).chosen] += 1
    return counts


# Prefix against load


def test_the_holder_of_a_prefix_is_chosen_among_idle_workers() -> None:
    fleet = fleet_of()
    fleet.held_tokens[3, Source.GPU] = 1500
    assert shares(fleet, Ask(2000))[3] == 400


def test_affinity_is_kept_under_moderate_load() -> None:
    fleet = fleet_of()
    fleet.held_tokens[3, Source.GPU] = 1800
    fleet.queued_tokens[3] = 1000
    fleet.decoding_count[3] = 4
    assert shares(fleet, Ask(2000))[3] == 400


def test_an_overloaded_holder_loses() -> None:
    """A death spiral would send everything to the holder of the prefix."""
    fleet = fleet_of()
    fleet.held_tokens[3, Source.GPU] = 1800
    fleet.queued_tokens[3] = 10_000
    assert shares(fleet, Ask(2000))[3] == 0


def test_reserved_tokens_count_as_queued_ones() -> None:
    fleet = fleet_of(2)
    fleet.reserved_tokens[0] = 5000
    assert decide(Ask(500), fleet, table(2), 0.0).chosen == 1


def test_many_decoding_sequences_count() -> None:
    fleet = fleet_of(2)
    fleet.decoding_count[0] = 200
    assert decide(Ask(500), fleet, table(2), 0.0).chosen == 1


def test_a_pool_that_is_pinned_full_counts() -> None:
    fleet = fleet_of(2)
    fleet.capacity_tokens[:] = 10_000
    fleet.pinned_tokens[0] = 9_900
    assert decide(Ask(2000), fleet, table(2), 0.0).chosen == 1


def test_nearer_tiers_win_over_farther_ones() -> None:
    speeds = table(4)
    speeds.load_byte_s[:, Source.DRAM] = 1 / 5e9
    speeds.load_byte_s[:, Source.PEER] = 1 / 2e9
    fleet = fleet_of(4)
    fleet.held_tokens[0, Source.PEER] = 1900
    fleet.held_tokens[1, Source.GPU] = 1900
    fleet.held_tokens[2, Source.DRAM] = 1900
    order = []
    for _ in range(4):
        order.append(decide(Ask(2000), fleet, speeds, 0.0).chosen)
        fleet.eligible[order[-1]] = False
    assert order == [1, 2, 0, 3]


def test_a_tier_slower_than_recomputing_earns_nothing() -> None:
    speeds = table(2)
    speeds.load_byte_s[:, Source.REDIS] = 1e-6
    fleet = fleet_of(2)
    fleet.held_tokens[0, Source.REDIS] = 1900
    costs = decide(Ask(2000), fleet, speeds, 0.0).costs
    assert costs.total_s[0] == costs.total_s[1]
    assert costs.reused_tokens.tolist() == [0.0, 0.0]


def test_a_slow_worker_loses_to_a_fast_one() -> None:
    speeds = table(2)
    speeds.prefill_token_s[0] *= 5
    assert decide(Ask(2000), fleet_of(2), speeds, 0.0).chosen == 1


def test_the_cost_is_continuous_in_load_and_in_prefix() -> None:
    """No mode switch: a small change of the input is a small change of the cost."""
    fleet, speeds = fleet_of(1), table(1)
    before = decide(Ask(4000), fleet, speeds, 0.0).costs.total_s[0]
    for step in range(1, 400):
        fleet.queued_tokens[0] = step * 10
        fleet.held_tokens[0, Source.GPU] = step * 9
        after = decide(Ask(4000), fleet, speeds, 0.0).costs.total_s[0]
        assert abs(after - before) < 0.005
        before = after


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=SOURCES_COUNT, max_size=SOURCES_COUNT),
    st.integers(1, 60),
    st.floats(1e-6, 1e-3),
    st.floats(1e-12, 1e-8),
)
def test_the_cost_of_an_idle_worker_is_what_the_split_predicts_at_source_grain(
    blocks: list[int], extra: int, token_s: float, byte_s: float
) -> None:
    """The twin is costs.split, which may cut inside a source, so it is never slower."""
    speeds = table(1, 1 / token_s)
    speeds.load_byte_s[:, 2:] = byte_s
    fleet = fleet_of(1)
    fleet.held_tokens[0] = np.array(blocks) * 16.0
    prompt = sum(blocks) * 16 + extra
    runs = tuple(Run(source, blocks[source]) for source in Source)
    plan = split(Prefix(runs, prompt, 16, 16 * (128 << 10)), speeds.speeds(0))
    ttft_s = decide(Ask(prompt), fleet, speeds, 0.0).costs.ttft_s[0]
    assert plan.ttft_s <= ttft_s + 1e-9
    assert ttft_s <= plan.cold_s + 1e-9
    if all(count <= 1 for count in blocks[1:]):
        assert ttft_s == pytest.approx(plan.ttft_s, rel=1e-6, abs=1e-9)


# Ties and spreading


def test_equal_cold_workers_share_equally_whatever_the_draws() -> None:
    counts = shares(fleet_of(), Ask(500), draws=1600)
    assert min(counts) > 150


def closed_loop(concurrency: int, requests: int, noise: float, seed: int) -> list[int]:
    """Cold requests of a closed loop over equal workers that serve one after the other; speeds are
    measured with noise, reservations live until the end. Returns requests by worker."""
    random, book, fleet = Random(seed), CostBook(), fleet_of()
    recent, counts, free_at = RecentTokens(WORKERS), [0] * WORKERS, [0.0] * WORKERS
    rows = [HolderId(row) for row in range(WORKERS)]
    running: list[tuple[float, int, int, float]] = []
    now = 0.0
    for number in range(requests):
        if len(running) >= concurrency:
            now, _, row, tokens = heappop(running)
            fleet.reserved_tokens[row] -= tokens
        tokens = random.randrange(300, 700)
        fleet.recent_tokens = recent.column(now)
        row = decide(Ask(tokens), fleet, book.table(rows, now), random.random()).chosen
        counts[row] += 1
        recent.add(row, tokens, now)
        fleet.reserved_tokens[row] += tokens
        seconds = tokens / TOKENS_PER_S * random.uniform(1 - noise, 1 + noise)
        free_at[row] = max(now, free_at[row]) + seconds
        heappush(running, (free_at[row], number, row, tokens))
        book.observe_prefill(rows[row], PrefillSample(tokens, 0, seconds), now)
    return counts


@pytest.mark.parametrize("concurrency", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", [1, 2])
def test_cold_requests_spread_evenly_at_any_concurrency(concurrency: int, seed: int) -> None:
    counts = closed_loop(concurrency, 800, noise=0.2, seed=seed)
    assert max(counts) / min(counts) <= 1.3


def test_a_hot_prefix_spreads_as_its_holder_fills_up() -> None:
    fleet, speeds, random = fleet_of(), table(), Random(7)
    fleet.held_tokens[0, Source.GPU] = 1800
    chosen = []
    for _ in range(160):  # A burst: nothing is done before it is all placed
        row = decide(Ask(2000), fleet, speeds, random.random()).chosen
        fleet.reserved_tokens[row] += 2000 - fleet.held_tokens[row].sum()
        fleet.held_tokens[row, Source.PREDICTED] = 1800 - fleet.held_tokens[row, Source.GPU]
        chosen.append(row)
    assert chosen[:5] == [0] * 5
    assert len(set(chosen)) >= 4
    assert max(chosen.count(row) for row in range(WORKERS)) < 80


def test_a_burst_of_siblings_lands_together() -> None:
    """The first is cold; its predicted blocks draw the next ones to it."""
    fleet, speeds = fleet_of(), table()
    first = decide(Ask(4000), fleet, speeds, 0.3).chosen
    fleet.held_tokens[first, Source.PREDICTED] = 3900
    fleet.reserved_tokens[first] += 4000
    assert decide(Ask(4000), fleet, speeds, 0.9, Weights(work=1.0)).chosen == first


def test_a_worker_slow_for_a_while_is_back_at_its_fair_share_within_a_minute() -> None:
    random, book, fleet, recent = Random(3), CostBook(), fleet_of(), RecentTokens(WORKERS)
    rows = [HolderId(row) for row in range(WORKERS)]
    late, slow_phase, now = [0] * WORKERS, [0] * WORKERS, 0.0
    while now < 120.0:
        now += 0.05
        fleet.recent_tokens = recent.column(now)
        row = decide(Ask(500), fleet, book.table(rows, now), random.random()).chosen
        recent.add(row, 500, now)
        slow = row == 0 and now < 30.0
        seconds = 500 / TOKENS_PER_S * (10 if slow else 1) * random.uniform(0.9, 1.1)
        book.observe_prefill(rows[row], PrefillSample(500, 0, seconds), now)
        if 5.0 < now < 30.0:
            slow_phase[row] += 1
        if now >= 90.0:
            late[row] += 1
    assert slow_phase[0] < sum(slow_phase) / WORKERS / 3
    assert late[0] >= sum(late) / WORKERS / 1.3


def test_a_ramping_worker_takes_part_in_that_share_of_decisions() -> None:
    fleet = fleet_of()
    fleet.ramp[5] = 0.2
    counts = shares(fleet, Ask(500), draws=4000)
    assert 0.1 < counts[5] / (4000 / WORKERS) < 0.4


def test_ramping_workers_serve_when_there_are_no_others() -> None:
    fleet = fleet_of(2)
    fleet.ramp[:] = 1e-9
    assert sum(shares(fleet, Ask(500))) == 400


# Ranked near-ties


def ranked(fleet: Fleet, *ranks: float) -> Fleet:
    fleet.ranks = lambda reused: np.array(ranks)
    return fleet


def test_ranked_ties_fall_alike_whatever_the_draw() -> None:
    fleet = ranked(fleet_of(4), 0.5, 0.1, 0.3, 0.4)
    assert shares(fleet, Ask(500)) == [0, 400, 0, 0]
    fleet.queued_tokens[1] = 5000  # no tie any more: load comes first
    assert shares(fleet, Ask(500)) == [0, 0, 400, 0]


def test_the_first_by_rank_is_passed_over_once_it_was_sent_clearly_more() -> None:
    fleet = ranked(fleet_of(4), 0.5, 0.1, 0.3, 0.4)
    fleet.recent_tokens[1] = 1500
    assert decide(Ask(1000), fleet, table(4), 0.0).chosen == 1
    fleet.recent_tokens[1] = 2500
    assert decide(Ask(1000), fleet, table(4), 0.0).chosen == 2


def test_of_ranked_ties_those_that_reuse_most_are_left_and_ranks_hear_how_much() -> None:
    heard = []

    def ranks(reused: float) -> FloatArray:
        heard.append(reused)
        return np.array([0.1, 0.2, 0.9, 0.3])

    fleet = fleet_of(4)
    fleet.ranks = ranks
    fleet.held_tokens[2:, Source.GPU] = 1500
    fleet.queued_tokens[2:] = 3070  # as dear as to compute it elsewhere
    decision = decide(Ask(2000), fleet, table(4), 0.0, Weights(work=1.0))
    assert decision.tied == (0, 1, 2, 3)
    assert decision.chosen == 3
    assert heard == [1500.0]


# Pools, adapters, stages, age


def test_canary_shares_are_kept_exactly_by_the_draw() -> None:
    fleet = fleet_of()
    fleet.pool[6:] = 1
    ask = Ask(500, pool_shares={0: 0.9, 1: 0.1})
    counts = shares(fleet, ask, draws=5000)
    assert sum(counts[6:]) / 5000 == pytest.approx(0.1, abs=0.02)
    assert min(counts) > 0


def test_a_canary_without_a_healthy_worker_gives_its_share_away() -> None:
    fleet = fleet_of()
    fleet.pool[6:] = 1
    fleet.eligible[6:] = False
    assert sum(shares(fleet, Ask(500, pool_shares={0: 0.1, 1: 0.9}))[:6]) == 400


def test_a_pool_that_has_no_share_gets_nothing() -> None:
    fleet = fleet_of()
    fleet.pool[6:] = 1
    fleet.held_tokens[7, Source.GPU] = 499
    assert shares(fleet, Ask(500, pool_shares={0: 1.0, 1: 0.0}))[7] == 0


def test_a_loaded_adapter_is_preferred_but_not_at_any_price() -> None:
    fleet = fleet_of(2)
    fleet.adapter_loaded[0] = False
    assert decide(Ask(500), fleet, table(2), 0.0).chosen == 1
    fleet.queued_tokens[1] = 20_000
    assert decide(Ask(500), fleet, table(2), 0.0).chosen == 0


def test_the_second_half_of_a_request_goes_where_its_kv_is_nearest() -> None:
    speeds = table(3)
    speeds.load_byte_s[:, Source.PEER] = 1e-9
    fleet = fleet_of(3)
    fleet.queued_tokens[:] = [0, 90_000, 0]  # Prefill queues do not matter to a decode
    fleet.held_tokens[1, Source.GPU] = 1500
    ask = Ask(2000, stage=Role.DECODE)
    assert decide(ask, fleet, speeds, 0.0).chosen == 1
    fleet.decoding_count[1] = 5000
    assert decide(ask, fleet, speeds, 0.0).chosen != 1


def test_credit_for_a_prefix_halves_with_each_half_life_of_age() -> None:
    fleet = fleet_of(1)
    fleet.held_tokens[0, Source.GPU] = 1600
    reused = []
    for age_s in (0.0, 60.0, 120.0, 6000.0):
        fleet.age_s[0] = age_s
        reused.append(float(decide(Ask(2000), fleet, table(1), 0.0).costs.reused_tokens[0]))
    assert reused == pytest.approx([1600, 800, 400, 0], abs=1e-6)


def test_work_that_others_wait_for_counts_by_its_weight() -> None:
    fleet = fleet_of(2)
    fleet.held_tokens[0, Source.GPU] = 1900
    fleet.queued_tokens[0] = 2200
    assert decide(Ask(2000), fleet, table(2), 0.0, Weights(work=0.0)).chosen == 1
    assert decide(Ask(2000), fleet, table(2), 0.0, Weights(work=1.0)).chosen == 0


# Explanations and bad input


def test_a_decision_explains_itself() -> None:
    fleet = fleet_of(3)
    fleet.held_tokens[1, Source.GPU] = 1000
    fleet.queued_tokens[1] = 100
    fleet.eligible[2] = False
    decision = decide(Ask(2000), fleet, table(3), 0.5)
    reasons = decision.reasons()
    assert (decision.chosen, decision.runner_up, decision.tied) == (1, 0, (1,))
    assert [reason.candidate for reason in reasons] == [True, True, False]
    assert reasons[1].queue_s == pytest.approx(0.01)
    assert reasons[1].reused_tokens == 1000
    for reason in reasons[:2]:
        parts = reason.queue_s + reason.compute_s + reason.decode_s + reason.adapter_s
        assert parts <= reason.ttft_s + 1e-12 <= parts + reason.load_s + 1e-9
        assert reason.total_s >= reason.ttft_s


def test_a_single_candidate_has_no_runner_up() -> None:
    fleet = fleet_of(2)
    fleet.eligible[0] = False
    decision = decide(Ask(10), fleet, table(2), 0.0)
    assert (decision.chosen, decision.runner_up) == (1, None)


def test_without_an_eligible_worker_the_service_is_unavailable() -> None:
    fleet = fleet_of(2)
    fleet.eligible[:] = False
    with pytest.raises(UnavailableError):
        decide(Ask(10), fleet, table(2), 0.0)


def break_length(fleet: Fleet) -> None:
    fleet.queued_tokens = np.zeros(1)


def break_held(fleet: Fleet) -> None:
    fleet.held_tokens = np.zeros((2, 2))


def break_number(fleet: Fleet) -> None:
    fleet.queued_tokens[0] = np.nan


@pytest.mark.parametrize("breaking", [break_length, break_held, break_number])
def test_columns_that_do_not_fit_are_refused(breaking: Callable[[Fleet], None]) -> None:
    fleet = fleet_of(2)
    breaking(fleet)
    with pytest.raises(CallerError):
        decide(Ask(10), fleet, table(2), 0.0)


def test_senseless_arguments_are_refused() -> None:
    for bad in (
        lambda: decide(Ask(10), fleet_of(2), table(2), 1.0),
        lambda: decide(Ask(10), fleet_of(2), table(2), -0.1),
        lambda: decide(Ask(10), fleet_of(2), table(2), float("nan")),
        lambda: Ask(0),
        lambda: Ask(1, pool_shares={0: -1.0}),
        lambda: Ask(1, pool_shares={0: 0.0}),
        lambda: Weights(work=-1.0),
        lambda: Weights(overlap=2.0),
        lambda: Fleet.idle(0),
        lambda: RecentTokens(0),
    ):
        with pytest.raises(CallerError):
            bad()


COLUMN = st.lists(st.floats(0, 1e7), min_size=4, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    COLUMN,
    COLUMN,
    st.lists(st.floats(0, 5000), min_size=4 * SOURCES_COUNT, max_size=4 * SOURCES_COUNT),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.floats(0, 1, exclude_max=True),
)
def test_the_choice_is_an_eligible_near_minimum(
    queued: list[float], decoding: list[float], held: list[float], eligible: list[bool], u: float
) -> None:
    fleet = fleet_of(4)
    fleet.queued_tokens = np.array(queued)
    fleet.decoding_count = np.array(decoding)
    fleet.held_tokens = np.array(held).reshape(4, SOURCES_COUNT)
    fleet.eligible = np.array(eligible)
    if not any(eligible):
        return
    weights = Weights()
    decision: Decision = decide(Ask(3000), fleet, table(4), u, weights)
    totals: FloatArray = decision.costs.total_s
    best = totals.min()
    assert fleet.eligible[decision.chosen]
    assert decision.chosen in decision.tied
    assert totals[decision.chosen] <= best + max(
        weights.tie_absolute_s, weights.tie_relative * best
    )
    assert decision == replace(decide(Ask(3000), fleet, table(4), u), costs=decision.costs)
