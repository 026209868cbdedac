"""The cost book learns speeds, forgets them, and the split loads only what is worth loading."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.costs import (
    FREE_SOURCES,
    BookPolicy,
    CostBook,
    LoadPolicy,
    LoadSample,
    PrefillSample,
    Prefix,
    Priors,
    Run,
    Speeds,
    predict_ttft_s,
    split,
)
from kvtier.core.estimates import Terms, Tuning, TwoTermEstimate
from kvtier.errors import CallerError
from kvtier.types import HolderId, Source

W0, W1 = HolderId(0), HolderId(1)
PAID = [source for source in Source if source not in FREE_SOURCES]


def prefill(book: CostBook, worker: HolderId, tokens_per_s: float, now: float) -> None:
    book.observe_prefill(worker, PrefillSample(1000, 0, 1000 / tokens_per_s), now)


def tokens_per_s(book: CostBook, worker: HolderId, now: float) -> float:
    return 1000 / book.speeds(worker, now).predict_prefill_s(1000)


def speeds_of(token_s: float, loads: dict[Source, tuple[float, float]]) -> Speeds:
    terms = {source: Terms(1e-3, 1e-9) for source in PAID}
    terms.update({source: Terms(*pair) for source, pair in loads.items()})
    return Speeds(Terms(token_s, token_s * 1e-9), terms)


# Estimates


@pytest.mark.parametrize("truth", [20.0, 400.0, 10_000.0, 3_000_000.0])
def test_a_prior_wrong_by_any_factor_is_left_within_ten_observations(truth: float) -> None:
    book = CostBook()
    for step in range(10):
        prefill(book, W0, truth, float(step))
    assert tokens_per_s(book, W0, 10.0) == pytest.approx(truth, rel=0.1)


def test_one_outlier_moves_an_estimate_by_less_than_half() -> None:
    book = CostBook()
    for step in range(30):
        prefill(book, W0, 10_000, step * 0.1)
    before = tokens_per_s(book, W0, 3.0)
    prefill(book, W0, 10, 3.0)
    assert tokens_per_s(book, W0, 3.0) > before / 2


def warm_fleet() -> CostBook:
    """Eight equal workers, measured for three seconds."""
    book = CostBook()
    for step in range(30):
        for worker in range(8):
            prefill(book, HolderId(worker), 10_000, step * 0.1)
    return book


def table_ratio(book: CostBook, now: float) -> float:
    rows = book.table([W0, W1], now).prefill_token_s
    return float(rows[0] / rows[1])


def test_one_held_up_answer_does_not_move_a_worker_at_all() -> None:
    book = warm_fleet()
    prefill(book, W0, 10_000 / 20, 3.0)
    assert table_ratio(book, 3.0) == pytest.approx(1.0, rel=1e-6)
    late = HolderId(9)
    prefill(book, late, 10_000 / 20, 3.0)
    assert tokens_per_s(book, late, 3.0) == pytest.approx(tokens_per_s(book, HolderId(10), 3.0))


@pytest.mark.parametrize("slow", [3.0, 8.0])
def test_a_slow_worker_is_known_after_five_answers_and_tried_again_after_ten_seconds(
    slow: float,
) -> None:
    book = warm_fleet()
    for step in range(5):
        prefill(book, W0, 10_000 / slow, 3.0 + step * 0.1)
    assert table_ratio(book, 3.5) > slow / 2
    for step in range(100):
        for other in range(1, 8):
            prefill(book, HolderId(other), 10_000, 3.6 + step * 0.1)
    assert table_ratio(book, 13.5) == pytest.approx(1.0, rel=1e-6)
    prefill(book, W0, 10_000 / slow, 13.6)
    assert table_ratio(book, 13.8) > slow / 3  # one more slow answer brings it all back


def test_a_lasting_change_is_followed_within_a_dozen_observations() -> None:
    book = CostBook()
    for step in range(30):
        prefill(book, W0, 10_000, step * 0.1)
    for step in range(12):
        prefill(book, W0, 1_000, 3.0 + step * 0.1)
    assert tokens_per_s(book, W0, 4.2) == pytest.approx(1_000, rel=0.25)


def test_a_worker_once_slow_is_believed_to_be_as_fast_as_the_fleet_after_a_while() -> None:
    book = CostBook()
    for step in range(300):
        now = step * 0.1
        for other in range(1, 8):
            prefill(book, HolderId(other), 10_000, now)
        if step % 10 == 0:
            prefill(book, W0, 500, now)
    assert tokens_per_s(book, W0, 30.0) < 1_000
    assert tokens_per_s(book, W0, 90.0) > 6_000


def test_an_unmeasured_worker_does_what_the_fleet_does() -> None:
    book = CostBook()
    for step in range(20):
        prefill(book, W0, 700, float(step))
    assert tokens_per_s(book, W1, 20.0) == pytest.approx(700, rel=0.1)


def test_latency_and_bandwidth_are_told_apart() -> None:
    book = CostBook()
    truth = Terms(0.02, 1 / 2e9)
    for step in range(60):
        size = [10_000, 100_000_000, 1_000_000_000][step % 3]
        sample = LoadSample(size, truth.seconds(1, size))
        book.observe_load(W0, Source.REDIS, sample, step * 0.1)
    found = book.speeds(W0, 6.0).loads[Source.REDIS]
    assert found.first_s == pytest.approx(truth.first_s, rel=0.15)
    assert found.second_s == pytest.approx(truth.second_s, rel=0.15)


def test_attention_over_a_long_context_is_learnt() -> None:
    book = CostBook()
    truth = Terms(1e-4, 1e-8)
    for step in range(80):
        tokens, context = [(512, 0), (2048, 60_000), (8192, 8192)][step % 3]
        seconds = truth.seconds(tokens, tokens * (context + tokens / 2))
        book.observe_prefill(W0, PrefillSample(tokens, context, seconds), step * 0.05)
    assert book.speeds(W0, 4.0).predict_prefill_s(4096, 30_000) == pytest.approx(
        truth.seconds(4096, 4096 * 32_048), rel=0.15
    )


def test_workers_that_differ_by_measuring_noise_have_equal_rows_in_the_table() -> None:
    book = CostBook()
    for step in range(50):
        prefill(book, W0, 10_000, step * 0.1)
        prefill(book, W1, 10_900, step * 0.1)
    rows = book.table([W0, W1], 5.0).prefill_token_s
    assert rows[0] == pytest.approx(rows[1], rel=1e-6)


def test_the_table_says_what_single_speeds_say_when_the_dead_band_is_off() -> None:
    book = CostBook(BookPolicy(deadband_log=0.0, deadband_sds=0.0))
    prefill(book, W0, 100, 1.0)
    book.observe_load(W1, Source.PEER, LoadSample(1 << 20, 0.5), 1.0)
    table = book.table([W1, W0], 2.0)
    for row, worker in enumerate([W1, W0]):
        ours, theirs = table.speeds(row), book.speeds(worker, 2.0)
        assert ours.prefill.first_s == pytest.approx(theirs.prefill.first_s)
        assert ours.loads[Source.PEER].second_s == pytest.approx(theirs.loads[Source.PEER].second_s)


def test_a_forgotten_worker_is_back_at_the_fleet() -> None:
    book = CostBook()
    for step in range(20):
        prefill(book, W1, 10_000, float(step))
    prefill(book, W0, 100, 20.0)
    book.forget(W0)
    assert tokens_per_s(book, W0, 20.0) == pytest.approx(tokens_per_s(book, HolderId(9), 20.0))


def test_the_table_is_at_most_refresh_s_old() -> None:
    book = CostBook(BookPolicy(refresh_s=0.5))
    old = book.table([W0], 0.0).prefill_token_s[0]
    for _ in range(5):
        prefill(book, W0, 10, 0.1)
    assert book.table([W0], 0.4).prefill_token_s[0] == old
    assert book.table([W0], 0.6).prefill_token_s[0] > 10 * old


def test_an_observation_so_small_that_its_prediction_underflows_does_no_harm() -> None:
    target = Terms(1e-3, 1e-9)
    estimate = TwoTermEstimate(target, Tuning(), 0.0)
    estimate.observe((5e-324, 0.0), 0.0, target, 0.0)
    assert 0 < estimate.terms(target, 0.0).first_s < float("inf")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e9),
            st.floats(0, 1e12),
            st.floats(0, 1e5),
            st.floats(0, 100),
        ),
        max_size=40,
    )
)
def test_an_estimate_stays_positive_and_finite_whatever_it_observes(
    samples: list[tuple[float, float, float, float]],
) -> None:
    target, now = Terms(1e-3, 1e-9), 0.0
    estimate = TwoTermEstimate(target, Tuning(), now)
    for x, y, seconds, passed in samples:
        now += passed
        if x + y > 0:
            estimate.observe((x, y), seconds, target, now)
    for later in (0.0, 1.0, 1e6):
        terms = estimate.terms(target, now + later)
        assert 0 < terms.first_s < float("inf")
        assert 0 < terms.second_s < float("inf")


@pytest.mark.parametrize(
    ("tokens", "context", "seconds"),
    [(0, 0, 1.0), (-1, 0, 1.0), (1, -1, 1.0), (1, 0, -1.0), (1, 0, float("nan")), (10**9, 0, 1.0)],
)
def test_a_senseless_prefill_sample_is_refused(tokens: int, context: int, seconds: float) -> None:
    with pytest.raises(CallerError):
        CostBook().observe_prefill(W0, PrefillSample(tokens, context, seconds), 0.0)


def test_senseless_loads_are_refused() -> None:
    book = CostBook()
    with pytest.raises(CallerError):
        book.observe_load(W0, Source.GPU, LoadSample(1, 1.0), 0.0)
    with pytest.raises(CallerError):
        book.observe_load(W0, Source.DRAM, LoadSample(-1, 1.0), 0.0)
    with pytest.raises(CallerError):
        book.observe_load(HolderId(-1), Source.DRAM, LoadSample(1, 1.0), 0.0)


# Split


def brute_force(prefix: Prefix, speeds: Speeds, overlap: float) -> tuple[float, list[int]]:
    """Least time over all cuts at which no shorter cut is less work; the cuts within rounding."""
    blocks = [run.source for run in prefix.runs for _ in range(run.blocks_count)]
    loads, met, load_s = [0.0], set(), 0.0
    for source in blocks:
        if source not in FREE_SOURCES:
            load_s += (
                speeds.predict_load_s({source: prefix.block_bytes})
                if (source not in met)
                else speeds.loads[source].second_s * prefix.block_bytes
            )
            met.add(source)
        loads.append(load_s)
    works, totals = [], []
    for cut, load in enumerate(loads):
        held = min(cut * prefix.block_tokens, prefix.prompt_tokens - 1)
        compute = speeds.predict_prefill_s(prefix.prompt_tokens - held, held)
        works.append(load + compute)
        totals.append(load + compute - overlap * min(load, compute))
    allowed = [c for c in range(len(loads)) if all(works[c] <= works[d] + 1e-9 for d in range(c))]
    best = min(totals[c] for c in allowed)
    return best, [c for c in allowed if totals[c] <= best + 1e-9]


RUNS = st.lists(st.builds(Run, st.sampled_from(list(Source)), st.integers(0, 6)), max_size=5).map(
    tuple
)
SPEEDS = st.builds(
    lambda token_s, loads: speeds_of(token_s, loads),
    st.floats(1e-6, 1e-2),
    st.dictionaries(st.sampled_from(PAID), st.tuples(st.floats(1e-6, 0.1), st.floats(1e-12, 1e-6))),
)


@settings(max_examples=150, deadline=None)
@given(RUNS, SPEEDS, st.integers(1, 40), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_split_is_the_best_of_all_cuts(
    runs: tuple[Run, ...], speeds: Speeds, extra_tokens: int, overlap: float
) -> None:
    blocks = sum(run.blocks_count for run in runs)
    prefix = Prefix(runs, blocks * 16 + extra_tokens - 1 or 1, 16, 1 << 15)
    plan = split(prefix, speeds, LoadPolicy(overlap=overlap))
    best, cuts = brute_force(prefix, speeds, overlap)
    assert plan.ttft_s == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert plan.blocks_count in cuts
    assert plan.ttft_s <= plan.cold_s + 1e-9
    assert plan.compute_tokens >= 1
    assert sum(load.predicted_s for load in plan.loads) == pytest.approx(plan.load_s)


@settings(max_examples=80, deadline=None)
@given(RUNS, SPEEDS, st.floats(1.0, 20.0))
def test_faster_tiers_never_make_a_request_slower(
    runs: tuple[Run, ...], speeds: Speeds, factor: float
) -> None:
    prefix = Prefix(runs, sum(run.blocks_count for run in runs) * 16 + 5, 16, 1 << 15)
    loads = {s: Terms(t.first_s / factor, t.second_s / factor) for s, t in speeds.loads.items()}
    slow, fast = split(prefix, speeds), split(prefix, replace(speeds, loads=loads))
    assert fast.ttft_s <= slow.ttft_s + 1e-9


def test_a_tier_slower_than_recomputing_is_not_read_at_all() -> None:
    """An emulated GPU of 30,000 tokens/s, 128 KiB a token, behind 0.5 GB/s: recompute."""
    speeds = speeds_of(1 / 30_000, {Source.DRAM: (1e-3, 1 / 0.5e9)})
    prefix = Prefix((Run(Source.DRAM, 100),), 2000, 16, 16 * (128 << 10))
    plan = split(prefix, speeds)
    assert (plan.blocks_count, plan.loads) == (0, ())
    assert plan.ttft_s == plan.cold_s


def test_a_fast_tier_is_read_as_far_as_load_and_compute_balance() -> None:
    speeds = speeds_of(1 / 30_000, {Source.DRAM: (1e-4, 1 / 8e9)})
    prefix = Prefix((Run(Source.DRAM, 125),), 2000, 16, 16 * (128 << 10))
    plan = split(prefix, speeds)
    assert 0 < plan.blocks_count < 125
    assert plan.load_s == pytest.approx(plan.compute_s, rel=0.1)
    assert plan.ttft_s < 0.75 * plan.cold_s
    serial = split(prefix, speeds, LoadPolicy(overlap=0.0))
    assert serial.blocks_count == 125


def test_blocks_in_l1_are_always_kept_and_never_loaded() -> None:
    speeds = speeds_of(1e-5, {})
    prefix = Prefix((Run(Source.GPU, 10), Run(Source.PREDICTED, 2)), 300, 16, 1 << 30)
    plan = split(prefix, speeds)
    assert (plan.blocks_count, plan.loads, plan.compute_tokens) == (12, (), 300 - 192)


def test_a_whole_hit_still_computes_the_last_token() -> None:
    plan = split(Prefix((Run(Source.GPU, 4),), 64, 16, 1), speeds_of(1e-3, {}))
    assert (plan.blocks_count, plan.compute_tokens) == (4, 1)


def test_the_time_without_any_prefix_is_the_cold_time() -> None:
    plan = split(Prefix((), 64, 16, 1), speeds_of(1e-3, {}))
    assert plan.blocks_count == 0
    assert plan.ttft_s == plan.cold_s == pytest.approx(0.064, rel=1e-3)


def test_a_load_is_given_up_before_it_costs_more_than_recomputing_twice() -> None:
    policy = LoadPolicy(deadline_multiple=3.0, deadline_floor_s=0.001, deadline_ceiling_s=2.0)
    assert policy.deadline_s(0.010, 1.0) == pytest.approx(0.030)
    assert policy.deadline_s(0.010, 0.015) == pytest.approx(0.015)
    assert policy.deadline_s(0.0001, 1.0) == 0.001
    assert policy.deadline_s(5.0, 100.0) == 2.0


def test_loads_of_a_plan_name_their_blocks_in_order() -> None:
    speeds = speeds_of(1.0, dict.fromkeys(PAID, (1e-06, 1e-12)))
    runs = (Run(Source.GPU, 3), Run(Source.NVME, 2), Run(Source.PEER, 4), Run(Source.NVME, 1))
    loads = split(Prefix(runs, 161, 16, 1024), speeds).loads
    assert [(p.source, p.first_block, p.blocks_count) for p in loads] == [
        (Source.NVME, 3, 2),
        (Source.PEER, 5, 4),
        (Source.NVME, 9, 1),
    ]
    assert all(load.deadline_s >= load.predicted_s for load in loads)
    assert all(a.first_block < b.first_block for a, b in pairwise(loads))


def test_loading_hides_behind_the_queue() -> None:
    speeds = speeds_of(1e-3, {Source.DRAM: (1e-3, 1e-6)})
    plan = split(Prefix((Run(Source.DRAM, 10),), 170, 16, 1000), speeds, LoadPolicy(overlap=0.0))
    assert plan.load_s > 0
    assert predict_ttft_s(plan, 0, speeds) == pytest.approx(plan.ttft_s)
    behind = predict_ttft_s(plan, 10_000, speeds)
    assert behind == pytest.approx(speeds.predict_prefill_s(10_000) + plan.compute_s)


@pytest.mark.parametrize(
    "bad",
    [
        {"block_tokens": 0},
        {"prompt_tokens": 0},
        {"block_bytes": -1},
        {"runs": (Run(Source.GPU, -1),)},
        {"runs": (Run(Source.GPU, 5),)},
    ],
)
def test_a_senseless_prefix_is_refused(bad: dict[str, object]) -> None:
    fields: dict[str, object] = {
        "runs": (Run(Source.GPU, 1),),
        "prompt_tokens": 64,
        "block_tokens": 16,
        "block_bytes": 1,
    }
    with pytest.raises(CallerError):
        Prefix(**(fields | bad))  # type: ignore[arg-type]


def test_senseless_policies_and_priors_are_refused() -> None:
    for bad in (
        lambda: LoadPolicy(overlap=1.5),
        lambda: LoadPolicy(deadline_multiple=0.5),
        lambda: LoadPolicy(deadline_floor_s=2.0, deadline_ceiling_s=1.0),
        lambda: Tuning(half_life_s=0.0),
        lambda: Tuning(noise_log_sd=float("nan")),
        lambda: Priors(prefill_tokens_per_s=-1.0).prefill(),
    ):
        with pytest.raises(CallerError):
            bad()
