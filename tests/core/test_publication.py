"""The publisher's side: coalescing, ring, resident set, cursors of several replicas."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import limits
from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.event_messages import (
    AckUpTo,
    Batch,
    Fence,
    FenceReason,
    Heartbeat,
    Hello,
    RequestHello,
    RequestResend,
    RequestSnapshot,
    Resume,
    SnapshotChunk,
    SnapshotReason,
    TierDigest,
)
from kvtier.core.publication import Message, Publication, PublicationConfig
from kvtier.errors import CallerError
from kvtier.types import Epoch, Seq, Tier, Trust
from tests.sim.event_world import Blocks, digest_of, replay, take

E, F = Epoch(0xE), Epoch(0xF)
NOW = 10.0
GPU, DRAM = Tier.GPU, Tier.DRAM


class Sealed:
    """An encoder that keeps what it was given."""

    def __init__(self) -> None:
        self.batches: dict[tuple[Epoch, int], EventBatch] = {}

    def __call__(self, epoch: Epoch, seq: Seq, events: EventBatch) -> bytes:
        self.batches[epoch, seq] = events
        return bytes(events.payload_bytes)

    def last(self) -> EventBatch:
        return list(self.batches.values())[-1]


def publication(
    sealed: Sealed | None = None, config: PublicationConfig | None = None
) -> Publication:
    return Publication(E, sealed if sealed is not None else Sealed(), config)


def live(config: PublicationConfig | None = None) -> Publication:
    """A publication with one replica that has resumed after 0."""
    pub = publication(config=config)
    pub.attach("r")
    assert pub.poll("r", NOW) == [Hello(E, Seq(0))]
    pub.receive("r", Resume(E, Seq(0)))
    return pub


def seal(pub: Publication, *names: int) -> None:
    for name in names:
        pub.store(GPU, 0, [name], NOW)
        pub.flush()


def seqs(messages: list[Message]) -> list[int]:
    return [message.seq for message in messages if isinstance(message, Batch)]


def chunks(messages: list[Message]) -> list[SnapshotChunk[EventBatch]]:
    return [message for message in messages if isinstance(message, SnapshotChunk)]


def contents(of: list[SnapshotChunk[EventBatch]]) -> Blocks:
    blocks: Blocks = Counter()
    for chunk in of:
        replay(blocks, chunk.payload)
    return blocks


# ---- coalescing


def test_a_chain_that_grows_is_one_event() -> None:
    sealed = Sealed()
    pub = publication(sealed)
    pub.store(GPU, 0, [1, 2], NOW)
    pub.store(GPU, 2, [3], NOW)
    pub.flush()
    events = sealed.last()
    assert events.lengths.tolist() == [3]
    assert events.hashes.tolist() == [1, 2, 3]
    assert events.parents.tolist() == [0]
    assert pub.stats.events_coalesced == 1


def test_a_branch_another_tier_or_another_kind_is_an_event_of_its_own() -> None:
    sealed = Sealed()
    pub = publication(sealed)
    pub.store(GPU, 0, [1, 2], NOW)
    pub.store(GPU, 1, [3], NOW)
    pub.store(DRAM, 3, [4], NOW)
    pub.remove(DRAM, [4], NOW)
    pub.clear_tier(DRAM, NOW)
    pub.clear_all(NOW)
    pub.flush()
    events = sealed.last()
    assert events.kinds.tolist() == [0, 0, 0, 1, 2, 3]
    assert events.parents.tolist() == [0, 1, 3, 0, 0, 0]
    assert events.lengths.tolist() == [2, 1, 1, 1, 0, 0]
    assert events.tiers.tolist() == [0, 0, 1, 1, 1, 0]


def test_store_and_remove_of_one_block_inside_a_window_keep_their_order() -> None:
    sealed = Sealed()
    pub = publication(sealed)
    for _ in range(2):
        pub.store(GPU, 0, [5], NOW)
        pub.remove(GPU, [5], NOW)
    pub.store(GPU, 0, [5], NOW)
    pub.flush()
    assert sealed.last().kinds.tolist() == [0, 1, 0, 1, 0]
    blocks: Blocks = Counter()
    replay(blocks, sealed.last())
    assert blocks == {(GPU, 5): 1}


def test_removes_are_merged_up_to_a_full_message() -> None:
    sealed = Sealed()
    pub = publication(sealed, PublicationConfig(batch_blocks_max=1024))
    for name in range(1, 1025):
        pub.remove(GPU, [name], NOW)
    pub.flush()
    assert pub.seq == 1
    assert sealed.last().lengths.tolist() == [1024]


def test_a_long_chain_is_split_over_batches_and_stays_a_chain() -> None:
    sealed = Sealed()
    pub = publication(sealed, PublicationConfig(batch_blocks_max=4))
    pub.store(GPU, 99, np.arange(1, 11, dtype=np.uint64), NOW)
    pub.flush()
    assert [events.hashes.tolist() for events in sealed.batches.values()] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10],
    ]
    assert [events.parents.tolist() for events in sealed.batches.values()] == [[99], [4], [8]]


def test_a_batch_is_full_of_events_before_the_next_change_is_counted() -> None:
    sealed = Sealed()
    pub = publication(sealed, PublicationConfig(batch_events_max=2))
    pub.store(GPU, 0, [1], NOW)
    pub.store(GPU, 0, [2], NOW)
    pub.store(GPU, 0, [3], NOW)
    assert pub.seq == 1
    assert pub.digest()[GPU] == TierDigest(2, 1 ^ 2)


def test_changes_wait_for_company_no_longer_than_the_window() -> None:
    pub = live(PublicationConfig(coalesce_s=0.5))
    assert pub.deadline() is None
    pub.store(GPU, 0, [1], NOW)
    pub.store(GPU, 1, [2], NOW + 0.4)
    assert pub.deadline() == NOW + 0.5
    assert pub.poll("r", NOW + 0.4) == []
    assert seqs(pub.poll("r", NOW + 0.5)) == [1]


# ---- replicas


def test_a_replica_is_greeted_first_and_fed_after_its_answer() -> None:
    pub = publication()
    seal(pub, 1, 2)
    pub.attach("r")
    assert pub.poll("r", NOW) == [Hello(E, Seq(2))]
    assert pub.poll("r", NOW) == []
    assert pub.heartbeat("r") == Hello(E, Seq(2))
    pub.receive("r", Resume(E, Seq(1)))
    assert seqs(pub.poll("r", NOW)) == [2]


def test_replicas_have_cursors_of_their_own() -> None:
    pub = live()
    seal(pub, 1, 2, 3)
    pub.attach("s")
    pub.poll("s", NOW)
    pub.receive("s", Resume(E, Seq(2)))
    assert seqs(pub.poll("r", NOW)) == [1, 2, 3]
    assert seqs(pub.poll("s", NOW)) == [3]
    pub.receive("r", AckUpTo(E, Seq(3)))
    assert pub.lag_batches("r") == 0
    assert pub.lag_batches("s") == 3


def test_a_resend_comes_from_the_ring() -> None:
    pub = live()
    seal(pub, 1, 2, 3)
    pub.poll("r", NOW)
    pub.receive("r", RequestResend(E, Seq(2)))
    assert seqs(pub.poll("r", NOW)) == [2, 3]
    assert pub.stats.resends == 1
    assert pub.stats.snapshots_begun == 0


def test_what_the_ring_has_forgotten_comes_as_a_snapshot() -> None:
    pub = live(PublicationConfig(ring_batches_max=2))
    seal(pub, 1, 2, 3, 4)
    messages = pub.poll("r", NOW)
    assert seqs(messages) == []
    (chunk,) = chunks(messages)
    assert (chunk.mark.at_seq, chunk.number, chunk.last) == (4, 0, True)
    assert contents([chunk]) == {(GPU, name): 1 for name in (1, 2, 3, 4)}
    assert pub.stats.overflows == 1


def test_the_ring_is_bounded_by_bytes_too() -> None:
    pub = live(PublicationConfig(ring_bytes_max=22 * 3))
    seal(pub, 1, 2, 3, 4, 5)
    pub.receive("r", Resume(E, Seq(2)))
    assert seqs(pub.poll("r", NOW)) == [3, 4, 5]


def test_acknowledged_batches_leave_the_ring() -> None:
    pub = live()
    seal(pub, 1, 2, 3)
    pub.poll("r", NOW)
    pub.receive("r", AckUpTo(E, Seq(2)))
    pub.receive("r", RequestResend(E, Seq(2)))
    assert chunks(pub.poll("r", NOW)), "batch 2 was everywhere and is gone"


def test_a_detached_replica_holds_nothing_back() -> None:
    pub = live()
    pub.attach("s")
    seal(pub, 1, 2)
    pub.poll("r", NOW)
    pub.receive("r", AckUpTo(E, Seq(2)))
    pub.detach("s")
    assert pub.replicas() == ("r",)
    pub.receive("r", RequestResend(E, Seq(1)))
    assert chunks(pub.poll("r", NOW))


def test_no_more_than_a_window_is_on_its_way() -> None:
    pub = live(PublicationConfig(window_batches_max=2))
    seal(pub, 1, 2, 3, 4)
    assert seqs(pub.poll("r", NOW)) == [1, 2]
    assert pub.poll("r", NOW) == []
    pub.receive("r", AckUpTo(E, Seq(1)))
    assert seqs(pub.poll("r", NOW)) == [3]


def test_a_snapshot_and_live_batches_take_turns() -> None:
    pub = live(PublicationConfig(chunk_blocks_max=1))
    seal(pub, 1, 2)
    pub.receive("r", RequestSnapshot(E, SnapshotReason.DRIFT))
    first = pub.poll("r", NOW, messages_max=1)
    seal(pub, 3)
    rest = pub.poll("r", NOW)
    assert contents(chunks(first + rest)) == {(GPU, 1): 1, (GPU, 2): 1}
    assert [chunk.number for chunk in chunks(first + rest)] == [0, 1]
    assert [chunk.last for chunk in chunks(first + rest)] == [False, True]
    assert seqs(rest) == [3]


def test_a_snapshot_seals_what_is_pending() -> None:
    pub = live(PublicationConfig(coalesce_s=100.0))
    pub.store(GPU, 0, [1], NOW)
    pub.receive("r", RequestSnapshot(E, SnapshotReason.DRIFT))
    (chunk,) = chunks(pub.poll("r", NOW))
    assert chunk.mark.at_seq == pub.seq == 1
    assert contents([chunk]) == {(GPU, 1): 1}


def test_an_empty_publisher_sends_one_empty_chunk() -> None:
    pub = live()
    pub.receive("r", RequestSnapshot(E, SnapshotReason.NEW_EPOCH))
    (chunk,) = chunks(pub.poll("r", NOW))
    assert chunk.last
    assert chunk.payload.events_count == chunk.payload.blocks_count == 0


def test_a_resend_of_what_the_coming_snapshot_contains_does_not_stop_it() -> None:
    pub = live(PublicationConfig(chunk_blocks_max=1))
    seal(pub, 1, 2)
    pub.receive("r", RequestSnapshot(E, SnapshotReason.DRIFT))
    first = pub.poll("r", NOW, messages_max=1)
    pub.receive("r", RequestResend(E, Seq(1)))
    assert [chunk.last for chunk in chunks(first + pub.poll("r", NOW))] == [False, True]


def test_a_snapshot_keeps_chains_together() -> None:
    pub = live()
    pub.store(GPU, 0, [1, 2, 3], NOW)
    pub.store(GPU, 1, [4, 5], NOW)
    pub.remove(GPU, [2], NOW)
    pub.receive("r", RequestSnapshot(E, SnapshotReason.NEW_EPOCH))
    (chunk,) = chunks(pub.poll("r", NOW))
    assert chunk.payload.hashes.tolist() == [1, 3, 4, 5]
    assert chunk.payload.parents.tolist() == [0, 2, 1]
    assert chunk.payload.lengths.tolist() == [1, 1, 2]


def test_a_heartbeat_tells_what_was_sent_and_the_digest_only_when_all_was() -> None:
    pub = live(PublicationConfig(window_batches_max=1))
    seal(pub, 6, 9)
    pub.poll("r", NOW)
    assert pub.heartbeat("r") == Heartbeat(E, Seq(1), None)
    pub.receive("r", AckUpTo(E, Seq(1)))
    pub.poll("r", NOW)
    empty = TierDigest(0, 0)
    wanted = (TierDigest(2, 6 ^ 9), empty, empty, empty)
    assert pub.heartbeat("r") == Heartbeat(E, Seq(2), wanted)


def test_the_digest_does_not_run_ahead_of_the_sealed_batches() -> None:
    pub = live(PublicationConfig(coalesce_s=100.0))
    seal(pub, 6)
    pub.store(GPU, 0, [9], NOW)
    pub.poll("r", NOW)
    beat = pub.heartbeat("r")
    assert isinstance(beat, Heartbeat)
    assert beat.digest is not None
    assert beat.digest[GPU] == TierDigest(1, 6)


def test_answers_to_another_epoch_are_ignored() -> None:
    pub = live()
    seal(pub, 1)
    pub.poll("r", NOW)
    pub.receive("r", RequestSnapshot(F, SnapshotReason.DRIFT))
    pub.receive("r", Fence(F, FenceReason.DEAD_EPOCH))
    pub.receive("r", AckUpTo(F, Seq(99)))
    assert pub.poll("r", NOW) == []
    assert pub.fenced is None


def test_an_index_that_lost_its_memory_is_greeted_again() -> None:
    pub = live()
    pub.receive("r", RequestHello(E))
    assert pub.poll("r", NOW) == [Hello(E, Seq(0))]


# ---- the end of an epoch


def test_a_fence_is_terminal_for_all_replicas() -> None:
    pub = live()
    pub.attach("s")
    pub.receive("s", Fence(E, FenceReason.DEAD_EPOCH))
    assert pub.fenced is FenceReason.DEAD_EPOCH
    pub.store(GPU, 0, [1], NOW)
    pub.flush()
    assert pub.poll("r", NOW) == []
    assert pub.heartbeat("r") is None
    assert pub.seq == 0


@pytest.mark.parametrize("reply", [Resume(E, Seq(5)), AckUpTo(E, Seq(5)), RequestResend(E, Seq(6))])
def test_an_index_that_knows_more_than_was_sealed_ends_the_epoch(
    reply: Resume | AckUpTo | RequestResend,
) -> None:
    pub = live()
    seal(pub, 1)
    pub.receive("r", reply)
    assert pub.fenced is FenceReason.REGRESSED


def test_a_successor_says_everything_anew_in_its_own_epoch() -> None:
    sealed = Sealed()
    pub = publication(sealed)
    seal(pub, 1, 2)
    pub.attach("r")
    pub.receive("r", Fence(E, FenceReason.DEAD_EPOCH))
    pub.store(GPU, 0, [3], NOW)
    heir = pub.successor(F)
    assert pub.copies_count == 0
    heir.attach("r")
    assert heir.poll("r", NOW) == [Hello(F, Seq(0))]
    heir.receive("r", RequestSnapshot(F, SnapshotReason.NEW_EPOCH))
    (chunk,) = chunks(heir.poll("r", NOW))
    assert chunk.mark.epoch == F
    assert contents([chunk]) == {(GPU, 1): 1, (GPU, 2): 1, (GPU, 3): 1}
    assert heir.digest()[GPU] == TierDigest(3, 1 ^ 2 ^ 3)


# ---- bad input


def test_bad_input_is_refused_and_changes_nothing() -> None:
    pub = live()
    for hashes in ([-1], [2**64], [1.5], ["1"], [True], np.ones(2, np.int64), np.ones((2, 2))):
        with pytest.raises(CallerError, match="hashes"):
            pub.store(GPU, 0, hashes, NOW)  # type: ignore[arg-type]
    with pytest.raises(CallerError, match="parent"):
        pub.store(GPU, -1, [1], NOW)
    with pytest.raises(ValueError, match="Tier"):
        pub.store(9, 0, [1], NOW)  # type: ignore[arg-type]
    with pytest.raises(CallerError, match="not attached"):
        pub.poll("nobody", NOW)
    with pytest.raises(CallerError, match="epoch"):
        Publication(Epoch(0), Sealed())
    with pytest.raises(CallerError, match="successor"):
        pub.successor(E)
    pub.store(GPU, 0, [], NOW)
    pub.flush()
    assert (pub.seq, pub.copies_count) == (0, 0)


def test_replicas_are_bounded() -> None:
    pub = publication()
    for number in range(limits.REPLICAS_COUNT_MAX):
        pub.attach(str(number))
    pub.attach("0")
    with pytest.raises(CallerError, match="replica"):
        pub.attach("one more")


@pytest.mark.parametrize(
    "config",
    [
        {"batch_blocks_max": 0},
        {"batch_blocks_max": limits.BATCH_BLOCKS_MAX + 1},
        {"batch_events_max": limits.BATCH_EVENTS_MAX + 1},
        {"ring_batches_max": limits.RING_BATCHES_MAX + 1},
        {"ring_bytes_max": 0},
        {"window_batches_max": 0},
        {"chunk_blocks_max": 0},
    ],
)
def test_bounds_outside_their_ceilings_are_refused(config: dict[str, int]) -> None:
    with pytest.raises(CallerError):
        PublicationConfig(**config)


# ---- against the oracle

NAMES = st.integers(1, 12)
CHANGES: st.SearchStrategy[tuple[EventKind, Tier, list[int]]] = st.one_of(
    st.tuples(st.just(EventKind.STORE), st.sampled_from([GPU, DRAM]), st.lists(NAMES, max_size=9)),
    st.tuples(st.just(EventKind.REMOVE), st.sampled_from([GPU, DRAM]), st.lists(NAMES, max_size=9)),
    st.tuples(st.just(EventKind.CLEAR_TIER), st.sampled_from([GPU, DRAM]), st.just([])),
    st.tuples(st.just(EventKind.CLEAR_ALL), st.just(GPU), st.just([])),
)


@settings(max_examples=150)
@given(st.lists(CHANGES, max_size=30), st.integers(1, 7), st.integers(1, 4))
def test_batches_snapshot_and_digest_all_say_what_happened(
    changes: list[tuple[EventKind, Tier, list[int]]], batch_blocks: int, batch_events: int
) -> None:
    sealed = Sealed()
    config = PublicationConfig(
        batch_blocks_max=batch_blocks, batch_events_max=batch_events, chunk_blocks_max=3
    )
    pub = publication(sealed, config)
    truth: Blocks = Counter()
    for kind, tier, names in changes:
        match kind:
            case EventKind.STORE:
                pub.store(tier, 0, names, NOW)
                truth.update((tier, name) for name in names)
            case EventKind.REMOVE:
                pub.remove(tier, names, NOW)
                for name in names:
                    take(truth, tier, name)
            case EventKind.CLEAR_TIER:
                pub.clear_tier(tier, NOW)
                truth = Counter({place: n for place, n in truth.items() if place[0] != tier})
            case EventKind.CLEAR_ALL:
                pub.clear_all(NOW)
                truth.clear()
    pub.flush()
    replayed: Blocks = Counter()
    for events in sealed.batches.values():
        replay(replayed, events)
        assert events.blocks_count <= batch_blocks
        assert events.events_count <= batch_events
        assert int(events.lengths.sum()) == events.blocks_count
    assert replayed == truth
    assert pub.digest() == digest_of(truth)
    assert pub.copies_count == truth.total()
    pub.attach("r")
    pub.receive("r", RequestSnapshot(E, SnapshotReason.NEW_EPOCH))
    assert contents(chunks(pub.poll("r", NOW, messages_max=1000))) == truth


def test_copies_of_a_block_stop_at_their_ceiling() -> None:
    pub = publication()
    names = np.full(limits.COPIES_COUNT_MAX + 5, 7, np.uint64)
    pub.store(GPU, 0, names, NOW)
    assert pub.copies_count == limits.COPIES_COUNT_MAX
    pub.remove(GPU, names[: limits.COPIES_COUNT_MAX], NOW)
    assert pub.copies_count == 0


def test_a_doubt_is_said_at_once_and_taken_back_only_behind_what_was_stored_before() -> None:
    pub = live(PublicationConfig(window_batches_max=1))
    beat = pub.heartbeat("r")
    assert beat is not None
    assert beat.trust is Trust.EXACT
    pub.set_trust(Trust.DEGRADED)
    assert pub.heartbeat("r") == Heartbeat(E, Seq(0), pub.digest(), Trust.DEGRADED)
    seal(pub, 1)
    pub.store(GPU, 0, [2], NOW)
    pub.set_trust(Trust.EXACT)
    assert pub.seq == 2
    assert seqs(pub.poll("r", NOW)) == [1]  # the window has no room for the second
    assert pub.heartbeat("r") == Heartbeat(E, Seq(1), None, Trust.DEGRADED)
    pub.receive("r", AckUpTo(E, Seq(1)))
    assert seqs(pub.poll("r", NOW)) == [2]
    assert pub.heartbeat("r") == Heartbeat(E, Seq(2), pub.digest(), Trust.EXACT)


def test_a_doubt_is_part_of_the_greeting_and_of_the_next_epoch() -> None:
    pub = publication()
    pub.set_trust(Trust.DEGRADED)
    pub.attach("r")
    assert pub.poll("r", NOW) == [Hello(E, Seq(0), Trust.DEGRADED)]
    heir = pub.successor(F)
    heir.attach("r")
    assert heir.poll("r", NOW) == [Hello(F, Seq(0), Trust.DEGRADED)]
