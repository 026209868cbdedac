"""Promises that were not kept: blocks that had to make room are no fault of anybody's hashing."""

from kvtier.core.fleet import HolderInfo
from kvtier_router.routing import Usage
from kvtier_router.routing.values import ModelReport
from tests.router.routing.bench import PROMPT, Bench, chain, name
from tests.support.virtual_fleet import BLOCK_TOKENS, CARD, info_of, view_of, words

HELD = 40


def held_by(capacity_blocks: int) -> Bench:
    """A router of one worker that holds a prompt of 40 blocks, in a pool of so many."""
    bench = Bench(0)
    info: HolderInfo = info_of(0, CARD, capacity_blocks)
    bench.replica.tell(view_of(0, info, heard_at=100.0))
    bench.replica.store(0, chain(PROMPT))
    return bench


def answer(bench: Bench, *, lost_share: float, count: int = 100) -> ModelReport:
    """So many answers, of which a part found nothing of what was promised; the model then."""
    for number in range(count):
        decision = bench.route()
        assert decision.worker == name(0)
        is_lost = (number * 7919 % count) < lost_share * count
        decision.placement.first_token(0.05)
        decision.placement.finished(Usage(len(PROMPT), 10, 0 if is_lost else HELD * BLOCK_TOKENS))
        bench.advance(0.1)
    [report] = bench.router.models()
    return report


def test_blocks_that_are_gone_from_a_full_pool_were_evicted_and_nothing_is_wrong() -> None:
    report = answer(held_by(HELD), lost_share=0.26)
    assert report.cause == ""
    assert (report.hit_mismatches, report.evicted_promises) == (0, 26)


def test_blocks_that_were_never_there_make_a_model_degraded() -> None:
    report = answer(held_by(10 * HELD), lost_share=0.26)
    assert "of promised prefixes were not cached at all" in report.cause
    assert (report.hit_mismatches, report.evicted_promises) == (26, 0)


def test_a_pool_of_unknown_size_excuses_nothing() -> None:
    assert answer(held_by(0), lost_share=0.26).cause


def test_what_a_full_pool_can_excuse_has_an_end() -> None:
    report = answer(held_by(HELD), lost_share=0.9)
    assert "in full pools" in report.cause


def test_a_pool_that_has_filled_since_is_seen_as_full() -> None:
    bench = held_by(10 * HELD)
    answer(bench, lost_share=0.1, count=20)
    bench.replica.store(0, chain(words("more", 9 * HELD * BLOCK_TOKENS)))
    bench.advance(2.0)
    report = answer(bench, lost_share=0.1)
    assert report.hit_mismatches == 2
    assert report.evicted_promises == 10
