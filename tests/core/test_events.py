"""Acceptance of an event stream, message by message. The whole protocol runs in `tests/sim`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import limits
from kvtier.core.event_messages import (
    AckUpTo,
    Batch,
    Digest,
    Fence,
    FenceReason,
    Heartbeat,
    Hello,
    RequestHello,
    RequestResend,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
    SnapshotMark,
    SnapshotReason,
    TierDigest,
)
from kvtier.core.events import (
    Acceptor,
    AcceptorConfig,
    Action,
    ApplyBatch,
    ClearStream,
    DegradedReason,
    DiscardStaged,
    ReplaceWithSnapshot,
    StageChunk,
    Verdict,
)
from kvtier.errors import CallerError
from kvtier.types import Epoch, Seq, Trust

A, B = Epoch(0xA), Epoch(0xB)
NOW = 50.0
DIGEST: Digest = (TierDigest(1, 7),)


def batch(seq: int, epoch: Epoch = A) -> Batch[str]:
    return Batch(epoch, Seq(seq), f"b{seq}", 10)


def mark(at_seq: int, snapshot_id: int = 1, epoch: Epoch = A) -> SnapshotMark:
    return SnapshotMark(epoch, snapshot_id, Seq(at_seq))


def chunk(of: SnapshotMark, number: int, last: bool = False) -> SnapshotChunk[str]:
    return SnapshotChunk(of, number, last, f"c{number}")


def synced(at_seq: int = 0, config: AcceptorConfig | None = None) -> Acceptor[str]:
    acceptor = Acceptor[str](config)
    acceptor.hello(Hello(A, Seq(at_seq)), NOW)
    acceptor.snapshot_chunk(chunk(mark(at_seq), 0, last=True), NOW)
    assert acceptor.trust is Trust.EXACT
    return acceptor


def test_an_unknown_stream_is_degraded_and_wants_a_snapshot() -> None:
    acceptor = Acceptor[str]()
    assert acceptor.degraded_reasons() == {DegradedReason.UNKNOWN}
    outcome = acceptor.hello(Hello(A, Seq(3)), NOW)
    assert outcome.verdict is Verdict.NEED_SNAPSHOT
    assert outcome.actions == (RequestSnapshot(A, SnapshotReason.NEW_EPOCH),)
    assert DegradedReason.SNAPSHOT_PENDING in acceptor.degraded_reasons()


def test_the_next_batch_is_applied_and_acknowledged() -> None:
    outcome = synced().batch(batch(1), NOW)
    assert outcome.verdict is Verdict.APPLY
    assert outcome.actions == (ApplyBatch(Seq(1), "b1"), AckUpTo(A, Seq(1)))


def test_a_repeated_batch_is_acknowledged_again_and_not_applied() -> None:
    acceptor = synced()
    acceptor.batch(batch(1), NOW)
    outcome = acceptor.batch(batch(1), NOW)
    assert outcome.verdict is Verdict.DUPLICATE
    assert outcome.actions == (AckUpTo(A, Seq(1)),)
    assert acceptor.counts[Verdict.DUPLICATE] == 1


def test_a_gap_asks_once_for_a_delta_and_what_came_early_follows_it() -> None:
    acceptor = synced()
    outcome = acceptor.batch(batch(2), NOW)
    assert outcome.verdict is Verdict.GAP
    assert outcome.actions == (RequestResend(A, Seq(1)),)
    assert acceptor.degraded_reasons() == {DegradedReason.GAP_PENDING}
    assert acceptor.batch(batch(3), NOW).actions == ()
    assert acceptor.batch(batch(1), NOW).actions == (
        ApplyBatch(Seq(1), "b1"),
        ApplyBatch(Seq(2), "b2"),
        ApplyBatch(Seq(3), "b3"),
        AckUpTo(A, Seq(3)),
    )
    assert acceptor.trust is Trust.EXACT


def test_an_unanswered_resend_is_asked_for_again_after_its_timeout() -> None:
    acceptor = synced(config=AcceptorConfig(resend_timeout_s=1.0))
    acceptor.batch(batch(2), NOW)
    assert acceptor.heartbeat(Heartbeat(A, Seq(2)), None, NOW + 0.5).actions == ()
    assert acceptor.heartbeat(Heartbeat(A, Seq(2)), None, NOW + 1.0).actions == (
        RequestResend(A, Seq(1)),
    )


def test_a_heartbeat_notices_that_the_last_batch_was_lost() -> None:
    acceptor = synced()
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(1)), None, NOW)
    assert outcome.verdict is Verdict.GAP
    assert outcome.actions == (RequestResend(A, Seq(1)),)


def test_early_batches_beyond_the_bound_are_counted_and_asked_for_later() -> None:
    acceptor = synced(config=AcceptorConfig(held_batches_max=1))
    acceptor.batch(batch(2), NOW)
    acceptor.batch(batch(3), NOW)
    assert acceptor.held_overflows_count == 1
    assert acceptor.batch(batch(1), NOW).actions[-1] == AckUpTo(A, Seq(2))
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(3)), None, NOW)
    assert outcome.actions == (RequestResend(A, Seq(3)),)


def test_early_batches_beyond_the_byte_bound_are_not_held() -> None:
    acceptor = synced(config=AcceptorConfig(held_bytes_max=15))
    acceptor.batch(batch(2), NOW)
    acceptor.batch(batch(3), NOW)
    assert acceptor.held_overflows_count == 1


def test_the_same_epoch_resumes_where_it_was() -> None:
    acceptor = synced(at_seq=4)
    outcome = acceptor.hello(Hello(A, Seq(6)), NOW)
    assert outcome.verdict is Verdict.RESUME
    assert outcome.actions == (Resume(A, Seq(4)),)
    assert acceptor.degraded_reasons() == {DegradedReason.GAP_PENDING}


def test_a_new_epoch_clears_the_old_and_fences_it_for_ever() -> None:
    acceptor = synced(at_seq=4)
    outcome = acceptor.hello(Hello(B, Seq(0)), NOW)
    assert outcome.verdict is Verdict.NEED_SNAPSHOT
    assert outcome.actions == (ClearStream(), RequestSnapshot(B, SnapshotReason.NEW_EPOCH))
    fence = (Fence(A, FenceReason.DEAD_EPOCH),)
    assert acceptor.hello(Hello(A, Seq(9)), NOW).actions == fence
    assert acceptor.batch(batch(5), NOW).actions == fence
    assert acceptor.heartbeat(Heartbeat(A, Seq(5)), None, NOW).actions == fence
    assert acceptor.snapshot_chunk(chunk(mark(9, 2), 0), NOW).actions == fence
    assert acceptor.undecodable(A, NOW).actions == fence
    assert acceptor.epoch == B
    assert acceptor.counts[Verdict.FENCED] == 5


def test_the_memory_of_the_dead_is_bounded() -> None:
    acceptor = Acceptor[str]()
    for number in range(1, limits.DEAD_EPOCHS_COUNT_MAX + 3):
        acceptor.hello(Hello(Epoch(number), Seq(0)), NOW)
    assert acceptor.hello(Hello(Epoch(2), Seq(0)), NOW).verdict is Verdict.FENCED
    assert acceptor.hello(Hello(Epoch(1), Seq(0)), NOW).verdict is Verdict.NEED_SNAPSHOT


def test_a_batch_of_an_epoch_without_hello_asks_for_one_and_changes_nothing() -> None:
    acceptor = synced()
    outcome = acceptor.batch(batch(1, B), NOW)
    assert outcome.verdict is Verdict.UNKNOWN_EPOCH
    assert outcome.actions == (RequestHello(B),)
    assert acceptor.epoch == A
    assert acceptor.trust is Trust.EXACT


def test_a_sequence_that_starts_again_in_the_same_epoch_is_no_silent_reset() -> None:
    acceptor = synced(at_seq=7)
    outcome = acceptor.hello(Hello(A, Seq(0)), NOW)
    assert outcome.verdict is Verdict.PROTOCOL_ERROR
    assert outcome.actions == (Resume(A, Seq(7)),)
    assert acceptor.degraded_reasons() == {DegradedReason.REGRESSED}
    outcome = acceptor.batch(batch(1), NOW)
    assert outcome.verdict is Verdict.PROTOCOL_ERROR
    assert outcome.actions == (AckUpTo(A, Seq(7)),)
    assert acceptor.applied_seq == 7
    acceptor.heartbeat(Heartbeat(A, Seq(7)), None, NOW)
    assert acceptor.trust is Trust.EXACT


def test_a_heartbeat_behind_the_applied_batches_is_a_protocol_error() -> None:
    acceptor = synced(at_seq=7)
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(6)), None, NOW)
    assert outcome.verdict is Verdict.PROTOCOL_ERROR
    assert outcome.actions == (AckUpTo(A, Seq(7)),)


def test_batch_zero_is_a_protocol_error() -> None:
    assert synced().batch(batch(0), NOW).verdict is Verdict.PROTOCOL_ERROR


def test_live_batches_follow_the_snapshot_without_a_hole() -> None:
    acceptor = Acceptor[str]()
    acceptor.hello(Hello(A, Seq(2)), NOW)
    assert acceptor.batch(batch(2), NOW).verdict is Verdict.HELD
    assert acceptor.batch(batch(3), NOW).verdict is Verdict.HELD
    of = mark(2)
    assert acceptor.snapshot_chunk(chunk(of, 0), NOW).actions == (StageChunk(of, "c0"),)
    assert acceptor.batch(batch(1), NOW).verdict is Verdict.DUPLICATE
    assert acceptor.batch(batch(4), NOW).verdict is Verdict.HELD
    outcome = acceptor.snapshot_chunk(chunk(of, 1, last=True), NOW)
    assert outcome.verdict is Verdict.REPLACED
    assert outcome.actions == (
        StageChunk(of, "c1"),
        ReplaceWithSnapshot(of),
        ApplyBatch(Seq(3), "b3"),
        ApplyBatch(Seq(4), "b4"),
        AckUpTo(A, Seq(4)),
    )
    assert acceptor.trust is Trust.EXACT


def test_a_hole_behind_the_snapshot_is_asked_for_as_a_delta() -> None:
    acceptor = Acceptor[str]()
    acceptor.hello(Hello(A, Seq(2)), NOW)
    acceptor.batch(batch(4), NOW)
    outcome = acceptor.snapshot_chunk(chunk(mark(2), 0, last=True), NOW)
    assert outcome.actions[-2:] == (AckUpTo(A, Seq(2)), RequestResend(A, Seq(3)))
    assert acceptor.degraded_reasons() == {DegradedReason.GAP_PENDING}


def test_a_snapshot_with_a_hole_is_given_up_and_the_old_state_stands() -> None:
    acceptor = synced(at_seq=3)
    of = mark(5, snapshot_id=2)
    acceptor.snapshot_chunk(chunk(of, 0), NOW)
    outcome = acceptor.snapshot_chunk(chunk(of, 2, last=True), NOW)
    assert outcome.verdict is Verdict.ABORTED
    assert outcome.actions == (
        DiscardStaged(of),
        RequestSnapshot(A, SnapshotReason.INCOMPLETE),
    )
    assert acceptor.applied_seq == 3
    assert acceptor.snapshot_chunk(chunk(of, 1), NOW).verdict is Verdict.STALE


def test_a_snapshot_whose_beginning_was_lost_is_asked_for_anew() -> None:
    acceptor = Acceptor[str]()
    acceptor.hello(Hello(A, Seq(2)), NOW)
    outcome = acceptor.snapshot_chunk(chunk(mark(2), 1), NOW)
    assert outcome.verdict is Verdict.ABORTED
    assert outcome.actions == (RequestSnapshot(A, SnapshotReason.NEW_EPOCH),)


def test_a_snapshot_of_later_batches_makes_their_absence_known_before_it_is_whole() -> None:
    acceptor = synced(at_seq=1)
    acceptor.snapshot_chunk(chunk(mark(5, snapshot_id=2), 0), NOW)
    assert acceptor.degraded_reasons() == {DegradedReason.GAP_PENDING}
    acceptor.disconnect()
    assert acceptor.degraded_reasons() == {DegradedReason.GAP_PENDING}
    acceptor.snapshot_chunk(chunk(mark(5, snapshot_id=3), 0, last=True), NOW)
    assert acceptor.trust is Trust.EXACT


def test_early_batches_that_a_snapshot_contains_give_their_room_back() -> None:
    acceptor = synced(config=AcceptorConfig(held_batches_max=1))
    acceptor.batch(batch(3), NOW)
    acceptor.snapshot_chunk(chunk(mark(5, snapshot_id=2), 0), NOW)
    acceptor.batch(batch(6), NOW)
    outcome = acceptor.snapshot_chunk(chunk(mark(5, snapshot_id=2), 1, last=True), NOW)
    assert ApplyBatch(Seq(6), "b6") in outcome.actions
    assert acceptor.held_overflows_count == 0


def test_a_snapshot_older_than_the_live_state_is_ignored() -> None:
    acceptor = synced(at_seq=5)
    outcome = acceptor.snapshot_chunk(chunk(mark(4, snapshot_id=2), 0, last=True), NOW)
    assert outcome.verdict is Verdict.STALE
    assert outcome.actions == ()
    assert acceptor.applied_seq == 5


def test_a_repeated_chunk_is_not_staged_twice() -> None:
    acceptor = Acceptor[str]()
    acceptor.hello(Hello(A, Seq(2)), NOW)
    acceptor.snapshot_chunk(chunk(mark(2), 0), NOW)
    assert acceptor.snapshot_chunk(chunk(mark(2), 0), NOW).verdict is Verdict.DUPLICATE


def test_a_newer_snapshot_takes_the_place_of_the_one_that_is_arriving() -> None:
    acceptor = Acceptor[str]()
    acceptor.hello(Hello(A, Seq(2)), NOW)
    acceptor.snapshot_chunk(chunk(mark(2, 1), 0), NOW)
    outcome = acceptor.snapshot_chunk(chunk(mark(3, 2), 0), NOW)
    assert outcome.actions == (DiscardStaged(mark(2, 1)), StageChunk(mark(3, 2), "c0"))
    assert acceptor.snapshot_chunk(chunk(mark(2, 1), 1), NOW).verdict is Verdict.STALE


def test_a_snapshot_that_races_a_new_epoch_is_abandoned() -> None:
    acceptor = synced(at_seq=3)
    of = mark(5, snapshot_id=2)
    acceptor.snapshot_chunk(chunk(of, 0), NOW)
    outcome = acceptor.hello(Hello(B, Seq(0)), NOW)
    assert outcome.actions[0] == DiscardStaged(of)
    assert acceptor.snapshot_chunk(chunk(of, 1, last=True), NOW).verdict is Verdict.FENCED


def test_a_broken_connection_abandons_the_snapshot_and_keeps_the_state() -> None:
    acceptor = synced(at_seq=3)
    of = mark(5, snapshot_id=2)
    acceptor.snapshot_chunk(chunk(of, 0), NOW)
    assert acceptor.disconnect() == (DiscardStaged(of),)
    assert acceptor.applied_seq == 3
    assert acceptor.hello(Hello(A, Seq(5)), NOW).actions == (Resume(A, Seq(3)),)


def test_a_snapshot_that_stops_half_way_is_asked_for_again() -> None:
    acceptor = Acceptor[str](AcceptorConfig(snapshot_timeout_s=5.0))
    acceptor.hello(Hello(A, Seq(2)), NOW)
    acceptor.snapshot_chunk(chunk(mark(2), 0), NOW + 3)
    beat = Heartbeat(A, Seq(2))
    assert acceptor.heartbeat(beat, None, NOW + 7.9).verdict is Verdict.HELD
    outcome = acceptor.heartbeat(beat, None, NOW + 8)
    assert outcome.verdict is Verdict.NEED_SNAPSHOT
    assert outcome.actions == (RequestSnapshot(A, SnapshotReason.NEW_EPOCH),)


def test_an_unasked_snapshot_that_stops_half_way_gives_way_to_a_delta() -> None:
    acceptor = synced(at_seq=3, config=AcceptorConfig(snapshot_timeout_s=5.0))
    of = mark(5, snapshot_id=2)
    acceptor.snapshot_chunk(chunk(of, 0), NOW)
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(5)), None, NOW + 5)
    assert outcome.verdict is Verdict.ABORTED
    assert outcome.actions == (DiscardStaged(of), RequestResend(A, Seq(4)))


def test_different_digests_with_nothing_in_flight_are_drift() -> None:
    acceptor = synced(at_seq=3)
    other: Digest = (TierDigest(1, 8),)
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(3), DIGEST), other, NOW)
    assert outcome.verdict is Verdict.DRIFT
    assert outcome.actions == (RequestSnapshot(A, SnapshotReason.DRIFT),)
    assert DegradedReason.DRIFT in acceptor.degraded_reasons()
    acceptor.snapshot_chunk(chunk(mark(3, 2), 0, last=True), NOW)
    assert acceptor.trust is Trust.EXACT


def test_digests_are_not_compared_while_batches_are_in_flight() -> None:
    acceptor = synced(at_seq=3)
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(4), DIGEST), (), NOW)
    assert outcome.verdict is Verdict.GAP


def test_equal_or_absent_digests_are_no_drift() -> None:
    acceptor = synced(at_seq=3)
    for claimed, held in ((DIGEST, DIGEST), (None, DIGEST), (DIGEST, None)):
        outcome = acceptor.heartbeat(Heartbeat(A, Seq(3), claimed), held, NOW)
        assert outcome.verdict is Verdict.OK
        assert outcome.actions == (AckUpTo(A, Seq(3)),)


def test_an_evicted_stream_is_degraded_but_asks_for_no_snapshots() -> None:
    acceptor = synced(at_seq=3)
    acceptor.degrade(DegradedReason.BUDGET_EVICTED)
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(3), DIGEST), (), NOW)
    assert outcome.verdict is Verdict.OK
    assert acceptor.degraded_reasons() == {DegradedReason.BUDGET_EVICTED}
    assert acceptor.resync(NOW) == (RequestSnapshot(A, SnapshotReason.OPERATOR),)
    acceptor.snapshot_chunk(chunk(mark(3, 2), 0, last=True), NOW)
    assert acceptor.trust is Trust.EXACT


def test_a_batch_that_cannot_be_decoded_is_gone_round_by_a_snapshot() -> None:
    acceptor = synced(at_seq=3, config=AcceptorConfig(snapshot_timeout_s=5.0))
    outcome = acceptor.undecodable(A, NOW)
    assert outcome.actions == (RequestSnapshot(A, SnapshotReason.UNDECODABLE),)
    assert acceptor.undecodable(A, NOW + 1).actions == ()
    assert acceptor.batch(batch(5), NOW + 1).actions == ()
    assert DegradedReason.UNDECODABLE in acceptor.degraded_reasons()
    acceptor.snapshot_chunk(chunk(mark(4, 2), 0, last=True), NOW + 2)
    assert acceptor.applied_seq == 5
    assert acceptor.trust is Trust.EXACT


def test_hidden_survives_a_snapshot_and_ends_when_restored() -> None:
    acceptor = synced(at_seq=3)
    acceptor.degrade(DegradedReason.HIDDEN)
    acceptor.snapshot_chunk(chunk(mark(3, 2), 0, last=True), NOW)
    assert acceptor.degraded_reasons() == {DegradedReason.HIDDEN}
    acceptor.restore(DegradedReason.HIDDEN)
    assert acceptor.trust is Trust.EXACT


def test_a_forgotten_epoch_may_return_with_a_snapshot() -> None:
    acceptor = synced(at_seq=3)
    assert acceptor.forget() == (ClearStream(),)
    assert acceptor.degraded_reasons() == {DegradedReason.UNKNOWN}
    assert acceptor.hello(Hello(A, Seq(3)), NOW).verdict is Verdict.NEED_SNAPSHOT


def test_a_forgotten_epoch_is_dead_once_another_was_adopted() -> None:
    acceptor = synced(at_seq=3)
    acceptor.forget()
    acceptor.hello(Hello(B, Seq(0)), NOW)
    assert acceptor.hello(Hello(A, Seq(3)), NOW).verdict is Verdict.FENCED


def test_nothing_is_asked_of_nobody() -> None:
    acceptor = Acceptor[str]()
    assert acceptor.resync(NOW) == ()
    assert acceptor.disconnect() == ()


@pytest.mark.parametrize("epoch", [0, -1, 2**64])
def test_an_epoch_outside_u64_is_refused(epoch: int) -> None:
    acceptor = Acceptor[str]()
    with pytest.raises(CallerError, match="epoch"):
        acceptor.hello(Hello(Epoch(epoch), Seq(0)), NOW)
    with pytest.raises(CallerError, match="epoch"):
        acceptor.batch(batch(1, Epoch(epoch)), NOW)
    assert acceptor.epoch is None


@pytest.mark.parametrize("seq", [-1, 2**64])
def test_a_seq_outside_u64_is_refused_and_changes_nothing(seq: int) -> None:
    acceptor = synced(at_seq=3)
    with pytest.raises(CallerError, match="seq"):
        acceptor.hello(Hello(A, Seq(seq)), NOW)
    with pytest.raises(CallerError, match="seq"):
        acceptor.batch(batch(seq), NOW)
    with pytest.raises(CallerError, match="seq"):
        acceptor.heartbeat(Heartbeat(A, Seq(seq)), None, NOW)
    with pytest.raises(CallerError, match="seq"):
        acceptor.snapshot_chunk(chunk(mark(seq, 2), 0), NOW)
    assert acceptor.trust is Trust.EXACT


@pytest.mark.parametrize(
    "config",
    [
        {"held_batches_max": -1},
        {"held_batches_max": limits.RING_BATCHES_MAX + 1},
        {"held_bytes_max": -1},
    ],
)
def test_bounds_outside_their_ceilings_are_refused(config: dict[str, int]) -> None:
    with pytest.raises(CallerError):
        AcceptorConfig(**config)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_timeouts_must_be_positive(timeout: float) -> None:
    with pytest.raises(CallerError):
        AcceptorConfig(resend_timeout_s=timeout)


@given(st.lists(st.integers(1, 12), max_size=60))
def test_in_any_order_each_batch_is_applied_once_and_in_order(arrivals: list[int]) -> None:
    acceptor = synced()
    applied: list[int] = []
    for seq in arrivals:
        for action in acceptor.batch(batch(seq), NOW).actions:
            if isinstance(action, ApplyBatch):
                applied.append(action.seq)
    contiguous = 0
    while contiguous + 1 in set(arrivals):
        contiguous += 1
    assert applied == list(range(1, contiguous + 1))
    behind = max(arrivals, default=0) > contiguous
    assert (acceptor.trust is Trust.DEGRADED) is behind


EPOCHS = st.sampled_from([A, B, Epoch(0xC)])
SEQS = st.integers(0, 6).map(Seq)
MARKS = st.builds(SnapshotMark, EPOCHS, st.integers(-1, 4), SEQS)
MESSAGES = st.one_of(
    st.builds(Hello, EPOCHS, SEQS),
    st.builds(lambda epoch, seq: Batch(epoch, seq, "b", 10), EPOCHS, SEQS),
    st.builds(Heartbeat, EPOCHS, SEQS, st.none() | st.just(DIGEST)),
    st.builds(SnapshotChunk, MARKS, st.integers(-1, 3), st.booleans(), st.just("c")),
    st.sampled_from(["undecodable", "disconnect", "forget", "resync"]),
)


def test_only_the_next_batch_with_nothing_in_the_way_is_plain() -> None:
    acceptor = synced()
    assert acceptor.next_plain(A) == 1
    assert acceptor.next_plain(B) is None, "another epoch"
    acceptor.advance(2)
    assert acceptor.counts[Verdict.APPLY] == acceptor.applied_seq == 2
    assert acceptor.next_plain(A) == 3
    acceptor.batch(batch(4), NOW)
    assert acceptor.next_plain(A) is None, "what is held must follow"
    acceptor.batch(batch(3), NOW)
    assert acceptor.next_plain(A) == 5
    acceptor.snapshot_chunk(chunk(mark(9, 4), 0), NOW)
    assert acceptor.next_plain(A) is None, "a snapshot is arriving"
    assert Acceptor[str]().next_plain(A) is None, "no Hello yet"


def test_no_batch_is_plain_behind_the_last_number() -> None:
    acceptor = synced()
    acceptor.snapshot_chunk(chunk(mark(2**64 - 2, 9), 0, last=True), NOW)
    assert acceptor.next_plain(A) == 2**64 - 1
    acceptor.advance(1)
    assert acceptor.next_plain(A) is None


@given(st.lists(MESSAGES | st.builds(batch, st.integers(1, 4)), max_size=40))
def test_a_batch_that_advances_is_one_that_would_be_applied_alone(
    story: list[Hello | Batch[str] | Heartbeat | SnapshotChunk[str] | str],
) -> None:
    plain, quick = Acceptor[str](), Acceptor[str]()
    for acceptor in (plain, quick):
        acceptor.hello(Hello(A, Seq(0)), NOW)
        acceptor.snapshot_chunk(chunk(mark(0), 0, last=True), NOW)
    for message in story:
        actions = speak(plain, message, NOW)
        if isinstance(message, Batch) and quick.next_plain(message.epoch) == message.seq:
            quick.advance(1)
            ack = AckUpTo(message.epoch, message.seq)
            assert actions == (ApplyBatch(message.seq, message.payload), ack)
        else:
            assert speak(quick, message, NOW) == actions
        assert quick.applied_seq == plain.applied_seq
        assert quick.lag_batches == plain.lag_batches
        assert quick.counts == plain.counts
        assert quick.degraded_reasons() == plain.degraded_reasons()
        assert (quick.trust is Trust.EXACT) is (not quick.degraded_reasons())


@given(st.lists(st.tuples(MESSAGES, st.floats(0, 10)), max_size=40))
def test_nonsense_never_breaks_the_order_of_what_is_applied(
    story: list[tuple[Hello | Batch[str] | Heartbeat | SnapshotChunk[str] | str, float]],
) -> None:
    acceptor = Acceptor[str](AcceptorConfig(held_batches_max=3))
    dead: set[Epoch] = set()
    live_seq, staged, now = 0, set[SnapshotMark](), NOW
    for message, wait in story:
        now += wait
        before = acceptor.epoch
        for action in speak(acceptor, message, now):
            match action:
                case ApplyBatch(seq, _):
                    assert seq == live_seq + 1
                    live_seq = seq
                case StageChunk(of, _):
                    staged.add(of)
                case DiscardStaged(of):
                    staged.remove(of)
                case ReplaceWithSnapshot(of):
                    staged.remove(of)
                    live_seq = of.at_seq
                case ClearStream():
                    live_seq = 0
                case _:
                    pass
        assert acceptor.applied_seq == live_seq
        assert len(staged) <= 1
        if acceptor.epoch is not None and acceptor.epoch != before:
            assert acceptor.epoch not in dead
            dead |= {before} if before is not None else set()


def speak(
    acceptor: Acceptor[str],
    message: Hello | Batch[str] | Heartbeat | SnapshotChunk[str] | str,
    now: float,
) -> tuple[Action[str], ...]:
    match message:
        case Hello():
            return acceptor.hello(message, now).actions
        case Batch():
            return acceptor.batch(message, now).actions
        case Heartbeat():
            return acceptor.heartbeat(message, (), now).actions
        case SnapshotChunk():
            return acceptor.snapshot_chunk(message, now).actions
        case "undecodable":
            return acceptor.undecodable(A, now).actions
        case "disconnect":
            return acceptor.disconnect()
        case "forget":
            return acceptor.forget()
        case _:
            return acceptor.resync(now)


def test_what_a_publisher_doubts_stands_until_it_says_otherwise() -> None:
    acceptor = Acceptor[str]()
    acceptor.hello(Hello(A, Seq(0), Trust.DEGRADED), NOW)
    acceptor.snapshot_chunk(chunk(mark(0), 0, last=True), NOW)
    assert acceptor.degraded_reasons() == {DegradedReason.SOURCE}
    outcome = acceptor.heartbeat(Heartbeat(A, Seq(0), None, Trust.DEGRADED), None, NOW)
    assert outcome.verdict is Verdict.OK
    assert acceptor.degraded_reasons() == {DegradedReason.SOURCE}
    acceptor.heartbeat(Heartbeat(A, Seq(0)), None, NOW)
    assert acceptor.degraded_reasons() == frozenset()
    acceptor.hello(Hello(A, Seq(0), Trust.DEGRADED), NOW)
    assert acceptor.degraded_reasons() == {DegradedReason.SOURCE}
