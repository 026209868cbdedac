"""What answers teach a router of its workers' speed, and what they must not."""

import numpy as np
import pytest

from kvtier_router.routing import RouteAsk, Usage
from tests.router.routing.bench import Bench, chain, name
from tests.support.virtual_fleet import words

LONG = words("long", 60_000)
OTHER = words("other", 60_000)


def cold_s(bench: Bench) -> float:
    """What computing a long prompt that nobody has is predicted to take."""
    [row] = bench.router.explain(RouteAsk("model", OTHER)).candidates
    return row.compute_s


def hit(bench: Bench, tokens_count: int, ttft_s: float) -> None:
    """One answer to a prompt that is cached whole, which took so long to begin."""
    bench.replica.store(0, chain(LONG[:tokens_count]))
    decision = bench.route(LONG[:tokens_count])
    assert decision.worker == name(0)
    bench.advance(ttft_s)
    decision.placement.first_token(ttft_s)
    decision.placement.finished(Usage(tokens_count, 10, tokens_count - 1))
    bench.advance(0.5)


@pytest.mark.parametrize("token_s", [1e-6, 4.5e-6, 1.5e-5])
def test_what_handling_a_long_cached_prompt_costs_is_not_learnt_as_slow_prefill(
    token_s: float,
) -> None:
    bench = Bench(1)
    before = cold_s(bench)
    for number in range(30):
        tokens_count = len(LONG) - 6_000 * (number % 3)
        hit(bench, tokens_count, 0.004 + token_s * tokens_count)
    assert cold_s(bench) == pytest.approx(before, rel=0.2)


def test_a_worker_that_gets_slow_is_still_found_out_by_its_hits() -> None:
    bench = Bench(1)
    for _ in range(10):
        hit(bench, 30_000, 0.1)
    before = cold_s(bench)
    for _ in range(10):
        hit(bench, 30_000, 3.0)
    assert cold_s(bench) > 1.5 * before


def test_prefill_that_is_slow_behind_a_long_context_is_learnt_as_that() -> None:
    bench = Bench(1)
    before = cold_s(bench)
    context = LONG[:30_016]
    bench.replica.store(0, chain(context))
    for number in range(20):
        tokens = np.concatenate([context, words(f"turn {number}", 4_000)])
        decision = bench.route(tokens)
        if number == 0:
            slow_s = 4 * decision.predicted_ttft_s
        bench.advance(slow_s)
        decision.placement.first_token(slow_s)
        decision.placement.finished(Usage(len(tokens), 10, len(context)))
        bench.advance(0.5)
    assert cold_s(bench) > 2 * before
