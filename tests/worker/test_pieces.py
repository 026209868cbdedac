"""The small parts that decide: what to write, what to load, how much prefill a step may carry."""

import pytest

from kvtier.core.costs import PrefillSample
from kvtier.ports import NO_SCOPE
from kvtier.types import ScopeId, Source
from kvtier_services.worker.l2.advisor import Advisor, PrefixFound
from kvtier_services.worker.l2.port import RunOutcome
from kvtier_services.worker.l2.saving import Haste, SaveBook, SaveEnd, SaveItem, SaveLimits
from kvtier_services.worker.l2.windowed import GroupShape
from kvtier_services.worker.pace import Pace, PacePolicy, StepRecord

MIB = 1 << 20


def items(*numbers: int, scope: ScopeId = NO_SCOPE) -> list[SaveItem]:
    return [SaveItem(bytes([number]) * 32, scope) for number in numbers]


def keys(taken: list[SaveItem]) -> list[int]:
    return [item.key[0] for item in taken]


def test_blocks_are_written_head_first_and_each_once() -> None:
    book = SaveBook(SaveLimits(gather_blocks=1, in_flight_blocks_max=10))
    book.offer(items(1, 2, 3), 0.0)
    book.offer(items(2, 3, 4), 0.0)
    assert keys(book.take(0.0)) == [1, 2, 3, 4]
    assert book.take(0.0) == []
    book.offer(items(1), 0.0)
    assert book.take(0.0) == []


def test_an_order_is_of_one_scope_and_fits_what_may_be_in_flight() -> None:
    book = SaveBook(SaveLimits(in_flight_blocks_max=3, gather_blocks=1))
    book.offer(items(1, 2, scope=ScopeId("a")), 0.0)
    book.offer(items(3, 4, scope=ScopeId("b")), 0.0)
    assert keys(book.take(0.0)) == [1, 2]
    assert keys(book.take(0.0)) == [3]
    assert book.take(0.0) == []
    book.ended([(item.key, SaveEnd.SAVED) for item in items(1, 2)], 0.0)
    assert keys(book.take(0.0)) == [4]
    assert book.counts.saved == 2


def test_known_blocks_are_not_written_until_they_are_doubted() -> None:
    book = SaveBook(SaveLimits(gather_blocks=1, in_flight_blocks_max=10))
    book.know([item.key for item in items(1)])
    book.offer(items(1, 2), 0.0)
    assert keys(book.take(0.0)) == [2]
    book.doubt([item.key for item in items(1)])
    book.offer(items(1), 0.0)
    assert keys(book.take(0.0)) == [1]


def test_failures_wait_longer_and_longer_and_refusals_are_final() -> None:
    book = SaveBook(SaveLimits(gather_blocks=1, in_flight_blocks_max=10))
    book.offer(items(1, 2), 0.0)
    now, waits = 0.0, []
    for _ in range(8):
        taken = book.take(now)
        assert 1 in keys(taken)
        ends = [(i.key, SaveEnd.FAILED if i.key[0] == 1 else SaveEnd.REFUSED) for i in taken]
        book.ended(ends, now)
        resume_at = book.next_at(now)
        assert resume_at is not None
        assert book.take(now) == []
        waits.append(resume_at - now)
        now = resume_at
    assert waits == sorted(waits)
    assert waits[0] < waits[-1] <= 2.0
    assert (book.counts.failed, book.counts.refused) == (8, 1)


def test_the_backlog_is_bounded_and_what_falls_out_is_counted() -> None:
    book = SaveBook(SaveLimits(gather_blocks=1, in_flight_blocks_max=10, backlog_blocks_max=2))
    book.offer(items(1, 2, 3), 0.0)
    assert keys(book.take(0.0)) == [2, 3]
    assert book.counts.missed == 1


def test_a_write_waits_for_company_but_not_for_long() -> None:
    book = SaveBook(SaveLimits(in_flight_blocks_max=10, gather_blocks=4, gather_s=0.25))
    book.offer(items(1, 2), 1.0)
    assert book.take(1.1) == []
    assert book.next_at(1.1) == 1.25
    book.offer(items(3), 1.2)
    assert keys(book.take(1.25)) == [1, 2, 3]
    assert book.next_at(1.25) is None
    book.offer(items(4, 5, 6, 7), 2.0)
    assert keys(book.take(2.0)) == [4, 5, 6, 7]
    book.offer(items(8), 3.0)
    assert keys(book.take(3.0, Haste.NOW)) == [8]


def test_groups_share_keys_and_not_orders() -> None:
    book = SaveBook(SaveLimits(in_flight_blocks_max=10, gather_blocks=1))
    first, second = items(1)[0], SaveItem(items(1)[0].key, NO_SCOPE, group=1)
    book.offer([first, second], 0.0)
    assert book.take(0.0) == [first]
    assert book.take(0.0) == [second]
    book.ended([(second.name, SaveEnd.SAVED)], 0.0)
    book.offer([first, second], 0.0)
    assert book.counts.saved == 1
    assert book.backlog_count == 0


def advisor(tokens_per_s: float) -> Advisor:
    one = Advisor(16, [GroupShape(2 * MIB)])
    for _ in range(20):
        one.computed(PrefillSample(512, 0, 512 / tokens_per_s), 0.0)
    return one


def test_blocks_are_loaded_where_that_is_faster_than_computing() -> None:
    slow_compute = advisor(1_000)
    runs = slow_compute.intend(PrefixFound(2000, 10, ((Source.DRAM,) * 114,)), 0.0).runs
    assert [(run.source, run.blocks_count) for run in runs] == [(Source.DRAM, 114)]
    assert 0.05 < runs[0].deadline_s < 3.0


def test_a_slow_tier_is_left_alone_once_it_was_measured() -> None:
    fast_compute = advisor(30_000)
    found = PrefixFound(2000, 0, ((Source.DRAM,) * 124,))
    assert fast_compute.intend(found, 0.0).runs
    for _ in range(3):
        late = RunOutcome(Source.DRAM, 124, 16, 0.067, was_late=True)
        fast_compute.loaded([late], 0, 0.0)
    assert fast_compute.intend(found, 0.1).runs == ()
    assert not fast_compute.intend(found, 5.0).runs
    assert fast_compute.intend(found, 180.0).runs, (
        "what was slow once is tried again within minutes"
    )


def test_misses_teach_nothing_about_speed() -> None:
    one = advisor(1_000)
    before = one.speeds(0.0).loads[Source.DRAM]
    one.loaded([RunOutcome(Source.DRAM, 10, 0, 0.5, was_late=False)], 0, 0.0)
    assert one.speeds(0.0).loads[Source.DRAM] == before


@pytest.mark.parametrize(("decode_s", "expected"), [(0.1, 80), (0.0, 8)])
def test_prefill_beside_decodes_takes_no_more_than_its_share_of_time(
    decode_s: float, expected: int
) -> None:
    one = advisor(1_000)
    pace = Pace(PacePolicy(stall_ratio_max=1.8, stall_s_min=0.001), one)
    for _ in range(20):
        pace.learn(StepRecord(8, 0, 0, decode_s), 0.0)
    assert expected * 0.7 <= pace.prefill_tokens_max(1024, 0.0) <= expected * 1.3


def test_prefill_speed_is_learned_without_the_decodes_beside_it() -> None:
    one = Advisor(16, [GroupShape(MIB)])
    pace = Pace(PacePolicy(), one)
    for _ in range(30):
        pace.learn(StepRecord(8, 0, 0, 0.1), 0.0)
    for _ in range(30):
        pace.learn(StepRecord(8, 100, 0, 0.2), 0.0)
    assert one.prefill_s(1000, 0, 0.0) == pytest.approx(1.0, rel=0.3)


def test_a_chunk_is_smaller_the_more_tokens_it_follows() -> None:
    one = Advisor(16, [GroupShape(MIB)])
    pace = Pace(PacePolicy(stall_ratio_max=2.0), one)
    for _ in range(20):
        pace.learn(StepRecord(8, 0, 0, 0.1), 0.0)
    chunks = []
    for context in range(0, 4001, 100):
        chunks.append(pace.prefill_tokens_max(context, 0.0))
        seconds = 32 * (0.001 + 1e-6 * (context + 16))
        pace.learn(StepRecord(8, 32, context, 0.1 + seconds), 0.0)
    assert 80 <= chunks[3] <= 110
    assert 14 <= chunks[-1] <= 28
