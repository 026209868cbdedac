"""The embedded index: equal to its feed, changed over without a gap, honest about its age."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.event_columns import EventBatch, EventKind
from kvtier.core.fleet import Fleet, HolderInfo
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import ModelCard
from kvtier.core.naive_index import NaivePrefixIndex
from kvtier.core.prefix_index import NativePrefixIndex, runs_of
from kvtier.core.workers import Load
from kvtier.errors import CallerError, ConfigError, LimitError
from kvtier.limits import RESERVATIONS_PER_ROUTER_MAX
from kvtier.replica import IndexReplica, OwnReservation, ReplicaConfig, Reserved, WorkerName
from kvtier.replica.picture import Picture
from kvtier.replica.predictions import KEPT_COUNT_MAX, ForeignReservations, OwnReservations
from kvtier.sections import DialConfig
from kvtier.types import (
    Fingerprint,
    HolderId,
    HolderKind,
    InstanceId,
    NodeId,
    Source,
    Tier,
    Trust,
)
from kvtier.wire import convert, holders
from kvtier.wire import messages as pb
from tests.harness.ports import free_port
from tests.harness.waiting import eventually
from tests.support.scripted_feed import ScriptedFeed

DEADLINE_S = 45.0
ME = "router-1"
FAST = ReplicaConfig(
    router=ME,
    index_bytes_max=64 << 20,
    silence_s=3.0,
    lag_s_max=3.0,
    settle_s=0.3,
    reconnect_s_min=0.005,
    reconnect_s_max=0.05,
)
CARD = ModelCard(("tiny", "alias"), "org/tiny", "r1", b"t" * 32, None, 16)
WIDE = replace(CARD, block_tokens=32)
Hashes = npt.NDArray[np.uint64]


def hashes(*values: int) -> Hashes:
    return np.array(values, np.uint64)


def worker(number: int, card: ModelCard = CARD, **changes: object) -> HolderInfo:
    info = HolderInfo(
        kind=HolderKind.WORKER,
        instance=InstanceId(f"w{number}"),
        node=NodeId(f"n{number % 2}"),
        store=f"s{number % 2}",
        namespace=Fingerprint(b"n" * 32),
        card=card,
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def store(number: int) -> HolderInfo:
    return HolderInfo(
        kind=HolderKind.STORE,
        instance=InstanceId(f"s{number}"),
        node=NodeId(f"n{number}"),
        namespace=Fingerprint(b"n" * 32),
    )


def columns(kind: EventKind, tier: Tier, blocks: Hashes) -> EventBatch:
    return EventBatch(
        kinds=np.array([kind], np.uint8),
        tiers=np.array([tier], np.uint8),
        lengths=np.array([len(blocks)], np.uint32),
        parents=np.zeros(1, np.uint64),
        hashes=blocks,
    )


# ---- messages as an index sends them


def holder_message(
    holder: int,
    info: HolderInfo,
    *,
    seq: int = 0,
    hidden: bool = False,
    trust: Trust = Trust.EXACT,
    load: Load | None = None,
    namespaces: tuple[bytes, ...] | None = None,
) -> pb.SnapshotResponse:
    return pb.SnapshotResponse(
        holder=pb.Holder(
            holder=holder,
            hello=convert.hello_to(info, 7, seq),
            trust=convert.trust_to(trust),
            hidden=hidden,
            load=holders.load_to(load or Load()),
            namespaces=namespaces or (info.namespace,),
        )
    )


def batch_message(holder: int, batch: EventBatch, shard: int = 0) -> pb.SnapshotResponse:
    part = pb.HolderBatch(holder=holder, shard=shard, batch=convert.batch_to(batch, 0))
    return pb.SnapshotResponse(batch=part)


def stored(holder: int, *blocks: int, tier: Tier = Tier.GPU, shard: int = 0) -> pb.SnapshotResponse:
    return batch_message(holder, columns(EventKind.STORE, tier, hashes(*blocks)), shard)


def removed(holder: int, *blocks: int, tier: Tier = Tier.GPU) -> pb.SnapshotResponse:
    return batch_message(holder, columns(EventKind.REMOVE, tier, hashes(*blocks)))


def blocks_message(holder: int, number: int, *blocks: int) -> pb.SnapshotResponse:
    batch = convert.batch_to(columns(EventKind.STORE, Tier.GPU, hashes(*blocks)), 0)
    part = pb.HolderBlocks(holder=holder, number=number, batch=batch if blocks else None)
    return pb.SnapshotResponse(blocks=part)


def prediction(
    holder: int,
    ticket: int,
    *blocks: int,
    router: str = "other",
    key: str = "k",
    over: bool = False,
) -> pb.SnapshotResponse:
    return pb.SnapshotResponse(
        prediction=pb.Prediction(
            holder=holder,
            ticket=ticket,
            hashes=hashes(*blocks).tobytes(),
            ttl_ms=60_000,
            prefill_tokens=100,
            router=router,
            key=key,
            over=over,
        )
    )


# ---- the picture alone


def new_picture(own: OwnReservations | None = None) -> Picture:
    return Picture(NativePrefixIndex(64 << 20), own or OwnReservations(ME))


def tokens_of(picture: Picture, blocks: Hashes, pool: Pool | None = None) -> dict[str, int]:
    result = picture.match(blocks, pool)
    return {
        picture.holders[HolderId(holder)].info.instance: tokens
        for holder, tokens in zip(result.workers.tolist(), result.tokens.tolist(), strict=True)
    }


def test_a_picture_matches_what_it_was_told() -> None:
    picture = new_picture()
    for message in (holder_message(3, worker(0)), stored(3, 1, 2, 3), removed(3, 3)):
        picture.take(message, 1.0)
    assert tokens_of(picture, hashes(1, 2, 3)) == {"w0": 32}


def test_a_hidden_holder_is_not_matched_and_comes_back_with_its_blocks() -> None:
    picture = new_picture()
    picture.take(holder_message(3, worker(0)), 1.0)
    picture.take(stored(3, 1), 1.0)
    picture.take(holder_message(3, worker(0), hidden=True), 1.0)
    assert tokens_of(picture, hashes(1)) == {}
    assert picture.holders[HolderId(3)].is_hidden
    picture.take(holder_message(3, worker(0)), 1.0)
    assert tokens_of(picture, hashes(1)) == {"w0": 16}


def test_a_load_and_trust_are_seen_without_describing_the_holder_anew() -> None:
    picture = new_picture()
    picture.take(holder_message(3, worker(0), seq=1), 1.0)
    known = picture.holders[HolderId(3)].info
    picture.take(
        holder_message(3, worker(0), seq=9, trust=Trust.DEGRADED, load=Load(running_requests=4)),
        2.0,
    )
    view = picture.holders[HolderId(3)]
    assert (view.load.running_requests, view.trust, view.heard_at) == (4, Trust.DEGRADED, 2.0)
    assert view.info is known
    assert view.name == WorkerName(InstanceId("w0"), 0)


def test_a_block_counts_only_when_every_shard_holds_it() -> None:
    picture = new_picture()
    half = worker(0, shard_index=0, shards_count=2)
    picture.take(holder_message(1, half, namespaces=(b"a" * 32, b"")), 1.0)
    picture.take(stored(1, 1, 2), 1.0)
    assert tokens_of(picture, hashes(1, 2)) == {}
    picture.take(holder_message(1, half, namespaces=(b"a" * 32, b"b" * 32)), 1.0)
    picture.take(stored(1, 1, shard=1), 1.0)
    assert tokens_of(picture, hashes(1, 2)) == {"w0": 16}


def test_new_blocks_of_a_holder_replace_the_old_ones() -> None:
    picture = new_picture()
    picture.take(holder_message(1, worker(0)), 1.0)
    picture.take(stored(1, 1, 2, 3), 1.0)
    picture.take(blocks_message(1, 0, 1), 1.0)
    picture.take(blocks_message(1, 1, 2), 1.0)
    assert tokens_of(picture, hashes(1, 2, 3)) == {"w0": 32}
    picture.take(blocks_message(1, 0), 1.0)
    assert tokens_of(picture, hashes(1, 2, 3)) == {}


def test_a_holder_that_left_is_gone_with_all_that_was_on_its_way_to_it() -> None:
    picture = new_picture()
    picture.take(holder_message(1, worker(0)), 1.0)
    picture.take(stored(1, 1), 1.0)
    picture.take(prediction(1, 5, 2), 1.0)
    picture.take(pb.SnapshotResponse(removed_holder=1), 1.0)
    assert picture.holders == {}
    assert len(picture.foreign) == 0
    assert picture.chains("tiny") == ()
    picture.take(holder_message(1, worker(4)), 1.0)
    assert tokens_of(picture, hashes(1, 2)) == {}


def test_chains_follow_the_cards_of_the_fleet() -> None:
    picture = new_picture()
    assert picture.chains("tiny") == ()
    picture.take(holder_message(1, worker(0)), 1.0)
    assert [chain.pool.block_tokens for chain in picture.chains("alias")] == [16]
    picture.take(holder_message(2, worker(1, WIDE)), 1.0)
    assert sorted(chain.pool.block_tokens for chain in picture.chains("alias")) == [16, 32]


def test_reservations_of_others_count_until_they_are_over_or_expire() -> None:
    picture = new_picture()
    picture.take(holder_message(1, worker(0)), 0.0)
    picture.take(prediction(1, 5, 1, 2), 0.0)
    picture.take(prediction(1, 6, 9), 1.0)
    assert picture.foreign.totals(HolderId(1)) == Reserved(200, 2)
    assert runs_of(picture.match(hashes(1, 2), None), 0) == [(Source.PREDICTED, 2)]
    picture.take(prediction(1, 6, over=True), 1.0)
    assert picture.foreign.totals(HolderId(1)) == Reserved(100, 1)
    picture.tick(59.9)
    assert picture.foreign.totals(HolderId(1)) == Reserved(100, 1)
    picture.tick(60.0)
    assert picture.foreign.totals(HolderId(1)) == Reserved(0, 0)
    assert tokens_of(picture, hashes(1)) == {}


@pytest.mark.parametrize(
    "message",
    [
        pb.SnapshotResponse(),
        stored(9, 1),
        blocks_message(9, 0, 1),
        prediction(9, 1, 1),
        pb.SnapshotResponse(holder=pb.Holder(holder=1)),
        pb.SnapshotResponse(batch=pb.HolderBatch(holder=1, batch=pb.Batch(hashes=b"123"))),
        pb.SnapshotResponse(prediction=pb.Prediction(holder=1, hashes=b"123")),
    ],
)
def test_a_message_that_makes_no_sense_is_a_caller_error(message: pb.SnapshotResponse) -> None:
    picture = new_picture()
    picture.take(holder_message(1, worker(0)), 0.0)
    with pytest.raises(CallerError):
        picture.take(message, 0.0)


HOLDERS = (worker(0), worker(1), worker(2, WIDE), store(0), store(1))
changes = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "store", "remove", "clear", "hide", "leave", "replace")),
        st.integers(0, len(HOLDERS) - 1),
        st.integers(1, 12),
        st.integers(1, 6),
    ),
    max_size=40,
)


class Oracle:
    """The same changes on a fleet over the naive index, without any message."""

    def __init__(self) -> None:
        self.fleet = Fleet(NaivePrefixIndex())
        self.present: set[int] = set()

    def step(self, what: str, number: int, first: int, count: int) -> list[pb.SnapshotResponse]:
        """Do it here; returns what an index would send."""
        info, holder = HOLDERS[number], HolderId(number)
        tier = Tier.GPU if info.kind is HolderKind.WORKER else Tier.DRAM
        blocks = np.arange(first, first + count, dtype=np.uint64)
        messages: list[pb.SnapshotResponse] = []
        if number not in self.present:
            self.fleet.join(info, holder)
            self.present.add(number)
            messages.append(holder_message(number, info))
        index = self.fleet.index
        if what in ("store", "remove", "clear"):
            kind = {
                "store": EventKind.STORE, "remove": EventKind.REMOVE, "clear": EventKind.CLEAR_ALL
            }[what]  # fmt: skip
            batch = columns(kind, tier, blocks if what != "clear" else hashes())
            index.apply(holder, 0, batch)
            messages.append(batch_message(number, batch))
        elif what == "replace":
            index.clear(holder, shard=0)
            batch = columns(EventKind.STORE, tier, blocks)
            index.apply(holder, 0, batch)
            part = pb.HolderBlocks(holder=number, batch=convert.batch_to(batch, 0))
            messages.append(pb.SnapshotResponse(blocks=part))
        elif what == "hide":
            record = self.fleet.record(holder)
            (self.fleet.resume if record.hidden else self.fleet.hide)(holder)
            messages.append(holder_message(number, info, hidden=record.hidden))
        else:
            self.fleet.leave(holder)
            self.present.discard(number)
            messages.append(pb.SnapshotResponse(removed_holder=number))
        return messages

    def answers(self, blocks: Hashes, pool: Pool | None) -> list[tuple[int, int, object]]:
        return rows(self.fleet.match(blocks, pool))


def rows(result: object) -> list[tuple[int, int, object]]:
    return [
        (worker, tokens, runs_of(result, row))  # type: ignore[arg-type]
        for row, (worker, tokens) in enumerate(
            zip(result.workers.tolist(), result.tokens.tolist(), strict=True)  # type: ignore[attr-defined]
        )
    ]


@given(changes, st.integers(1, 12), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_a_picture_answers_like_the_naive_index(
    steps: list[tuple[str, int, int, int]], first: int, count: int
) -> None:
    oracle, picture = Oracle(), new_picture()
    query = np.arange(first, first + count, dtype=np.uint64)
    for step in steps:
        for message in oracle.step(*step):
            picture.take(pb.SnapshotResponse.FromString(message.SerializeToString()), 0.0)
        assert rows(picture.match(query, None)) == oracle.answers(query, None)
        assert rows(picture.match(query, CARD.pool)) == oracle.answers(query, CARD.pool)


# ---- own reservations


def own(key: str, *blocks: int, worker_number: int = 0, ttl_ms: int = 60_000) -> OwnReservation:
    name = WorkerName(InstanceId(f"w{worker_number}"), 0)
    return OwnReservation(key, name, 100, ttl_ms, hashes(*blocks))


def test_own_reservations_count_until_given_back_or_expired() -> None:
    mine = OwnReservations(ME)
    mine.add(own("a", ttl_ms=1000), 0.0)
    mine.add(own("b", ttl_ms=2000), 0.0)
    name = WorkerName(InstanceId("w0"), 0)
    assert mine.totals(name) == Reserved(200, 2)
    assert mine.end("b") is not None
    assert mine.end("b") is None
    assert mine.totals(name) == Reserved(100, 1)
    assert len(mine.tick(1.0)) == 1
    assert mine.totals(name) == Reserved(0, 0)


def test_own_keys_are_known_for_as_long_as_the_index_may_speak_of_them() -> None:
    mine = OwnReservations(ME)
    mine.add(own("a", ttl_ms=1000), 0.0)
    assert mine.is_own(ME, "a")
    assert not mine.is_own("other", "a")
    mine.end("a")
    assert mine.is_own(ME, "a")
    mine.tick(1.0)
    assert not mine.is_own(ME, "a")


def test_the_same_key_again_replaces_the_reservation() -> None:
    mine = OwnReservations(ME)
    mine.add(own("a", ttl_ms=1000), 0.0)
    mine.add(own("a", ttl_ms=5000, worker_number=1), 0.5)
    assert mine.totals(WorkerName(InstanceId("w0"), 0)) == Reserved(0, 0)
    assert mine.tick(1.0) == []
    assert mine.totals(WorkerName(InstanceId("w1"), 0)) == Reserved(100, 1)


def test_a_router_cannot_reserve_without_end() -> None:
    mine = OwnReservations(ME)
    for number in range(RESERVATIONS_PER_ROUTER_MAX):
        mine.add(own(f"k{number}"), 0.0)
    with pytest.raises(LimitError):
        mine.add(own("one more"), 0.0)


def test_what_has_prefilled_counts_no_more_and_is_kept_until_its_time() -> None:
    mine = OwnReservations(ME)
    ticket, _ = mine.add(own("a", 1, 2, ttl_ms=1000), 0.0)
    assert mine.prefilled("a", 5.0) == []
    assert mine.prefilled("a", 9.0) == []
    assert mine.totals(WorkerName(InstanceId("w0"), 0)) == Reserved(0, 0)
    assert [(kept.key, number) for kept, number, _ in mine.live()] == [("a", ticket)]
    assert mine.tick(4.0) == []
    assert mine.is_own(ME, "a")
    assert mine.tick(5.0) == [ticket]
    assert not mine.is_own(ME, "a")


@pytest.mark.parametrize("until", [2.0, 50.0])
def test_all_that_is_kept_can_be_kept_longer_or_shorter(until: float) -> None:
    mine = OwnReservations(ME)
    mine.add(own("a", 1), 0.0)
    mine.add(own("held", 1), 0.0)
    mine.prefilled("a", 10.0)
    mine.keep_until(until)
    assert mine.tick(until - 0.1) == []
    assert len(mine.tick(until)) == 1
    assert len(mine) == 1


def test_a_kept_reservation_is_given_back_like_any_other() -> None:
    mine = OwnReservations(ME)
    ticket, _ = mine.add(own("a", 1), 0.0)
    mine.prefilled("a", 10.0)
    assert mine.end("a") == ticket
    assert list(mine.live()) == []


def test_the_oldest_kept_reservation_makes_room() -> None:
    mine = OwnReservations(ME)
    tickets = []
    for number in range(KEPT_COUNT_MAX + 1):
        ticket, _ = mine.add(own(f"k{number}"), 0.0)
        tickets.append(ticket)
        ended = mine.prefilled(f"k{number}", 100.0)
    assert ended == tickets[:1]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("apek"), st.integers(0, 3), st.integers(1, 9)), max_size=60)
)
def test_totals_are_what_is_held_whatever_happened(steps: list[tuple[str, int, int]]) -> None:
    """Held ones and kept ones by a plain dictionary each."""
    mine, held, kept = OwnReservations(ME), dict[str, float](), dict[str, float]()
    for now, (what, number, more) in enumerate(steps):
        key = f"k{number}"
        if what == "a":
            mine.add(own(key, 1, ttl_ms=more * 1000), float(now))
            held[key] = now + more
            kept.pop(key, None)
        elif what == "p" and key in held:
            mine.prefilled(key, float(now + more))
            kept[key] = now + more
            del held[key]
        elif what == "e":
            mine.end(key)
            held.pop(key, None)
            kept.pop(key, None)
        elif what == "k":
            mine.keep_until(float(now + more))
            kept = dict.fromkeys(kept, now + more)
        mine.tick(float(now))
        held = {name: until for name, until in held.items() if until > now}
        kept = {name: until for name, until in kept.items() if until > now}
        total = Reserved(100 * len(held), len(held)) if held else Reserved(0, 0)
        assert mine.totals(WorkerName(InstanceId("w0"), 0)) == total
        assert {one.key for one, _, _ in mine.live()} == {*held, *kept}


@pytest.mark.parametrize("wrong", [{"ttl_ms": 0}, {"key": ""}, {"hashes": np.ones(2)}])
def test_a_reservation_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CallerError):
        replace(own("a"), **wrong)  # type: ignore[arg-type]


def test_tokens_by_holder_follow_foreign_reservations_as_holders_get_more() -> None:
    picture = new_picture()
    for number in (0, 200):
        picture.take(holder_message(number, worker(number)), 0.0)
    foreign: ForeignReservations = picture.foreign
    for ticket, holder in ((1, 0), (2, 200), (3, 200)):
        foreign.add(ticket, HolderId(holder), 50 * ticket, hashes(7 * ticket), 10.0)
    assert (foreign.tokens[0], foreign.tokens[200]) == (50, 250)
    foreign.end(2)
    foreign.end(2)
    assert (foreign.tokens[0], foreign.tokens[200]) == (50, 150)
    foreign.tick(10.0)
    assert foreign.tokens.sum() == 0


def test_a_foreign_prefill_that_an_own_one_computes_as_well_weighs_only_its_rest() -> None:
    mine = OwnReservations(ME)
    picture = new_picture(mine)
    picture.take(holder_message(0, worker(0)), 0.0)
    wanted = own("a", 1, 2, 3, 4)
    picture.predict(wanted, *mine.add(wanted, 0.0))
    foreign = picture.foreign
    foreign.add(1, HolderId(0), 100, hashes(1, 2, 3, 4, 5, 6), 10.0)  # knew nothing of them
    assert foreign.tokens[0] == 100 - 4 * 16
    foreign.add(2, HolderId(0), 32, hashes(1, 2, 3, 4, 8, 9), 10.0)  # knew the four
    assert foreign.tokens[0] == 100 - 4 * 16 + 32
    foreign.add(3, HolderId(0), 90, hashes(17, 18, 19, 20, 21), 10.0)  # has nothing in common
    assert foreign.tokens[0] == 100 - 4 * 16 + 32 + 90
    for ticket in (1, 2, 3):
        foreign.end(ticket)
    assert (foreign.tokens[0], foreign.requests[0]) == (0, 0)


def test_every_change_of_the_fleet_is_counted_and_blocks_are_not() -> None:
    picture = new_picture()
    picture.take(holder_message(1, worker(1)), 0.0)
    joined = picture.changes_count
    picture.take(batch_message(1, columns(EventKind.STORE, Tier.GPU, hashes(1, 2))), 0.0)
    assert picture.changes_count == joined
    picture.take(holder_message(1, worker(1), load=Load(running_requests=1)), 0.0)
    loaded = picture.changes_count
    picture.take(pb.SnapshotResponse(removed_holder=1), 0.0)
    assert joined < loaded < picture.changes_count


# ---- following an index


@pytest.fixture
def feed() -> Iterator[ScriptedFeed]:
    made = ScriptedFeed().start()
    yield made
    made.stop()


@pytest.fixture
def other_feed() -> Iterator[ScriptedFeed]:
    made = ScriptedFeed(index_epoch=50).start()
    yield made
    made.stop()


def replica_of(*feeds: ScriptedFeed, config: ReplicaConfig = FAST) -> IndexReplica:
    return IndexReplica(DialConfig(targets=tuple(feed.target for feed in feeds)), config)


def held_by(replica: IndexReplica, blocks: Hashes) -> dict[str, int]:
    match = replica.match(blocks)
    return {
        match.holders[HolderId(holder)].info.instance: tokens
        for holder, tokens in zip(
            match.result.workers.tolist(), match.result.tokens.tolist(), strict=True
        )
    }


def until(replica: IndexReplica, blocks: Hashes, expected: dict[str, int]) -> None:
    eventually(
        lambda: held_by(replica, blocks) == expected, DEADLINE_S, f"the replica says {expected}"
    )


def test_a_replica_starts_with_a_snapshot_and_follows(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    feed.tell(blocks_message(1, 0, 1, 2))
    with replica_of(feed, config=replace(FAST, models=("tiny",))) as replica:
        assert replica.wait_complete(DEADLINE_S)
        assert held_by(replica, hashes(1, 2, 3)) == {"w0": 32}
        feed.tell(stored(1, 3))
        until(replica, hashes(1, 2, 3), {"w0": 48})
        lag = replica.lag
        assert (lag.trust, lag.position, lag.index_epoch) == (Trust.EXACT, 3, 1)
        assert lag.age_s < DEADLINE_S
        assert feed.asked == [("tiny",)]
        assert [view.name.instance for view in replica.holders()] == ["w0"]


def test_before_its_first_picture_a_replica_knows_nothing_and_says_so(feed: ScriptedFeed) -> None:
    feed.is_held = True
    feed.tell(holder_message(1, worker(0)))
    feed.tell(stored(1, 1))
    with replica_of(feed) as replica:
        eventually(lambda: replica.stats().messages >= 2, DEADLINE_S, "the feed is heard")
        assert held_by(replica, hashes(1)) == {}
        assert replica.lag.trust is Trust.DEGRADED
        assert replica.lag.age_s == float("inf")
        assert not replica.wait_complete(0.0)
        feed.is_held = False
        assert replica.wait_complete(DEADLINE_S)
        assert held_by(replica, hashes(1)) == {"w0": 16}


def test_tokens_are_matched_on_every_chain_behind_a_name(feed: ScriptedFeed) -> None:
    prompt = list(range(64))
    narrow = prefix_hashes(chain_root(CARD.pool, "salt", None), prompt, 16)
    wide = prefix_hashes(chain_root(WIDE.pool, "salt", None), prompt, 32)
    feed.tell(holder_message(1, worker(0)))
    feed.tell(holder_message(2, worker(1, WIDE)))
    feed.tell(stored(1, *narrow[:3].tolist()))
    feed.tell(stored(2, *wide.tolist()))
    with replica_of(feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        matches = replica.match_tokens("tiny", prompt, "salt")
        found = {
            match.holders[HolderId(int(holder))].info.instance: int(tokens)
            for match in matches
            for holder, tokens in zip(match.result.workers, match.result.tokens, strict=True)
        }
        assert found == {"w0": 48, "w1": 64}
        assert {len(match.hashes) for match in matches} == {4, 2}
        assert replica.match_tokens("nobody", prompt, "salt") == ()
        assert all(len(match.result) == 0 for match in replica.match_tokens("tiny", prompt))


def test_a_replica_whose_index_dies_answers_on_and_grows_old(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    feed.tell(stored(1, 1))
    with replica_of(feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        feed.stop()
        eventually(lambda: replica.lag.trust is Trust.DEGRADED, DEADLINE_S, "degraded")
        age_s = replica.lag.age_s
        eventually(lambda: replica.lag.age_s > age_s, DEADLINE_S, "it grows old")
        assert held_by(replica, hashes(1)) == {"w0": 16}
        feed.tell(stored(1, 2))
        feed.start()
        until(replica, hashes(1, 2), {"w0": 32})
        assert replica.lag.trust is Trust.EXACT
        assert replica.stats().failures >= 1


def test_a_replica_takes_another_index_when_one_fails(
    feed: ScriptedFeed, other_feed: ScriptedFeed
) -> None:
    for number, each in enumerate((feed, other_feed)):
        # The numbers of holders differ from index to index.
        each.tell(holder_message(5 + number, worker(0)))
        each.tell(stored(5 + number, 1, 2))
    with replica_of(feed, other_feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        first, second = (feed, other_feed) if replica.lag.target == feed.target else (
            other_feed, feed
        )  # fmt: skip
        first.stop()
        eventually(lambda: replica.lag.target == second.target, DEADLINE_S, "fail-over")
        assert replica.lag.trust is Trust.EXACT
        assert replica.lag.index_epoch == second.index_epoch
        assert held_by(replica, hashes(1, 2)) == {"w0": 32}


def test_no_answer_changes_while_a_replica_fails_over(
    feed: ScriptedFeed, other_feed: ScriptedFeed
) -> None:
    for number, each in enumerate((feed, other_feed)):
        each.tell(holder_message(5 + number, worker(0)))
        each.tell(stored(5 + number, 1, 2))
    with replica_of(feed, other_feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        answers: list[dict[str, int]] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                answers.append(held_by(replica, hashes(1, 2)))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for _ in range(4):
                pictures = replica.stats().pictures
                leader = feed if replica.lag.target == feed.target else other_feed
                leader.stop()
                eventually(
                    lambda pictures=pictures: replica.stats().pictures > pictures,  # type: ignore[misc]
                    DEADLINE_S,
                    "another picture",
                )
                leader.start()
        finally:
            stop.set()
            asking.join()
        assert answers
        assert all(answer == {"w0": 32} for answer in answers)


def test_an_index_that_forgot_everything_is_waited_for(feed: ScriptedFeed) -> None:
    patient = replace(FAST, settle_s=3600.0)
    feed.tell(holder_message(1, worker(0)))
    feed.tell(stored(1, 1))
    with replica_of(feed, config=patient) as replica:
        assert replica.wait_complete(DEADLINE_S)
        feed.stop()
        feed.forget()
        feed.start()
        messages = replica.stats().messages
        eventually(lambda: replica.stats().messages > messages + 3, DEADLINE_S, "heard again")
        assert held_by(replica, hashes(1)) == {"w0": 16}
        feed.tell(holder_message(4, worker(0), trust=Trust.DEGRADED))
        feed.tell(blocks_message(4, 0, 1, 2))
        feed.tell(holder_message(4, worker(0)))
        until(replica, hashes(1, 2), {"w0": 32})
        assert replica.lag.index_epoch == 2


def test_a_holder_that_does_not_come_back_is_not_waited_for_for_ever(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    feed.tell(stored(1, 1))
    with replica_of(feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        feed.stop()
        feed.forget()
        feed.start()
        until(replica, hashes(1), {})
        assert replica.holders() == ()


def test_a_silent_index_is_left(feed: ScriptedFeed, other_feed: ScriptedFeed) -> None:
    impatient = replace(FAST, silence_s=0.2)
    with replica_of(feed, other_feed, config=impatient) as replica:
        assert replica.wait_complete(DEADLINE_S)
        leader = feed if replica.lag.target == feed.target else other_feed
        leader.is_silent = True
        eventually(lambda: replica.lag.target not in ("", leader.target), DEADLINE_S, "it is left")
        assert replica.stats().failures >= 1


def test_a_dead_target_is_passed_over(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    dead = f"127.0.0.1:{free_port()}"
    with IndexReplica(DialConfig(targets=(dead, feed.target)), FAST) as replica:
        assert replica.wait_complete(DEADLINE_S)
        assert replica.lag.target == feed.target


def test_a_broken_message_costs_the_stream_and_not_the_answers(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    feed.tell(stored(1, 1))
    with replica_of(feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        feed.tell(stored(9, 1))
        eventually(lambda: replica.stats().failures >= 2, DEADLINE_S, "streams are given up")
        assert held_by(replica, hashes(1)) == {"w0": 16}
        assert "9" in replica.stats().last_error


# ---- reservations over a feed


W0 = WorkerName(InstanceId("w0"), 0)


def test_an_own_reservation_counts_at_once_and_its_echo_not_again(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    with replica_of(feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        replica.reserve_local(own("k", 1, 2))
        assert replica.reserved(W0) == Reserved(100, 1)
        assert held_by(replica, hashes(1, 2)) == {"w0": 32}
        feed.tell(prediction(1, 1, 1, 2, router=ME, key="k"))
        feed.tell(prediction(1, 2, 7, router="other", key="k"))
        eventually(
            lambda: replica.reserved(W0) == Reserved(200, 2), DEADLINE_S, "the other's is heard"
        )
        replica.release_local("k")
        assert held_by(replica, hashes(1, 2)) == {}
        feed.tell(prediction(1, 3, 1, 2, router=ME, key="k"))
        feed.tell(prediction(1, 2, router="other", key="k", over=True))
        eventually(lambda: replica.reserved(W0) == Reserved(0, 0), DEADLINE_S, "all are over")


def test_own_reservations_survive_a_change_of_index(
    feed: ScriptedFeed, other_feed: ScriptedFeed
) -> None:
    feed.tell(holder_message(1, worker(0)))
    other_feed.tell(holder_message(2, worker(0)))
    with replica_of(feed, other_feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        replica.reserve_local(own("k", 1, 2))
        pictures = replica.stats().pictures
        (feed if replica.lag.target == feed.target else other_feed).stop()
        eventually(lambda: replica.stats().pictures > pictures, DEADLINE_S, "another picture")
        assert replica.reserved(W0) == Reserved(100, 1)
        assert held_by(replica, hashes(1, 2)) == {"w0": 32}
        replica.release_local("k")
        assert held_by(replica, hashes(1, 2)) == {}


def test_an_own_reservation_expires_by_itself(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    with replica_of(feed) as replica:
        assert replica.wait_complete(DEADLINE_S)
        replica.reserve_local(own("k", 1, ttl_ms=50))
        until(replica, hashes(1), {})
        assert replica.reserved(W0) == Reserved(0, 0)


# ---- wrong use


def test_a_replica_needs_an_index() -> None:
    with pytest.raises(ConfigError):
        IndexReplica(DialConfig())


def test_a_closed_replica_still_answers_and_does_not_start_again(feed: ScriptedFeed) -> None:
    feed.tell(holder_message(1, worker(0)))
    feed.tell(stored(1, 1))
    replica = replica_of(feed).start()
    assert replica.wait_complete(DEADLINE_S)
    replica.close()
    replica.close()
    assert held_by(replica, hashes(1)) == {"w0": 16}
    assert replica.lag.trust is Trust.DEGRADED
    with pytest.raises(CallerError):
        replica.start()


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(CallerError):
        ReplicaConfig(silence_s=float("inf"))
    with pytest.raises(CallerError):
        ReplicaConfig(reconnect_s_min=2.0)
