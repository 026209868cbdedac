"""The tier of other nodes' stores, over peers and an index that do as they are told."""

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from kvtier.core.health import BreakerPolicy, BreakerState
from kvtier.errors import BackendError, UnavailableError
from kvtier.peers import Finder, PeerPolicy, PeerTier
from kvtier.peers.finding import FinderPolicy
from kvtier.peers.tier import DROPPED_S
from kvtier.ports import (
    BlockOwner,
    ByNames,
    ByNamespace,
    ByWriter,
    GetRequest,
    GetStatus,
    PutRequest,
    PutStatus,
    Selection,
)
from kvtier.types import InstanceId
from tests.support.peer_fakes import (
    WRITER,
    FakeIndex,
    FakePeer,
    FakeTransport,
    Now,
    begun,
    corrupt,
    hash_of,
    place,
)
from tests.tiers.contract import BLOCK_BYTES, NAMESPACE, name_of, payload_of

POLICY = PeerPolicy(
    call_s=5.0,
    breaker=BreakerPolicy(failures_max=2, open_s=1.0, open_s_max=4.0, probes_to_close=1),
    corrupt_max=2,
)


@dataclass
class Rig:
    """A tier over fakes."""

    policy: PeerPolicy = POLICY
    index: FakeIndex = field(default_factory=FakeIndex)
    transport: FakeTransport = field(default_factory=FakeTransport)
    now: Now = field(default_factory=Now)

    def __post_init__(self) -> None:
        # Nothing is remembered, so that each read asks anew.
        finder = Finder(
            self.index,
            InstanceId("me"),
            self.now,
            policy=FinderPolicy(ask_s=30.0, found_s=1e-9, absent_s=1e-9),
        )
        self.tier = PeerTier(finder, self.transport, self.now, self.policy)

    def give(self, peer: str, *numbers: int) -> FakePeer:
        """A peer has these, and the index says so."""
        fake = self.transport.peers.setdefault(peer, FakePeer())
        for number in numbers:
            name = name_of(number)
            fake.has[name] = number
            known = self.index.held.get(hash_of(name), ())
            self.index.held[hash_of(name)] = (*known, place(peer))
        return fake

    async def get(self, *numbers: int, wait_s: float = 60.0) -> list[GetStatus]:
        self.now.s += 0.001
        requests = [GetRequest(name_of(n), None, BLOCK_BYTES) for n in numbers]
        results = await self.tier.get_many(requests, self.now() + wait_s)
        for number, result in zip(numbers, results, strict=True):
            if result.is_hit:
                assert result.payload is not None
                assert bytes(result.payload) == payload_of(number)
        return [result.status for result in results]


HIT, MISS, CORRUPT = GetStatus.HIT, GetStatus.MISS, GetStatus.CORRUPT


async def test_one_question_and_one_call_bring_a_chain_of_one_peer() -> None:
    rig = Rig()
    peer = rig.give("a", *range(32))
    assert await rig.get(*range(33)) == [HIT] * 32 + [MISS]
    assert len(rig.index.questions) == 1
    assert len(peer.calls) == 1


async def test_groups_that_begin_together_ask_the_index_once() -> None:
    rig = Rig()
    rig.give("a", *range(64))
    found = await asyncio.gather(*(rig.get(*range(at, at + 16)) for at in range(0, 64, 16)))
    assert found == [[HIT] * 16] * 4
    assert len(rig.index.questions) == 1


async def test_as_few_peers_as_can_be_are_asked() -> None:
    rig = Rig()
    most = rig.give("most", 1, 2, 3, 4)
    rig.give("one", 3)
    rest = rig.give("rest", 5)
    assert await rig.get(1, 2, 3, 4, 5) == [HIT] * 5
    assert [len(call) for call in most.calls] == [4]
    assert [len(call) for call in rest.calls] == [1]
    assert not rig.transport.peers["one"].calls


@pytest.mark.parametrize("error", [UnavailableError("gone"), BackendError("nonsense")])
async def test_what_one_peer_does_not_give_another_one_does(error: Exception) -> None:
    rig = Rig()
    rig.give("bad", 1, 2).error = error  # type: ignore[assignment]
    rig.give("good", 1, 2)
    assert await rig.get(1, 2) == [HIT, HIT]
    assert rig.tier.stats().gets == {HIT: 2}


async def test_a_peer_that_is_gone_costs_misses_and_soon_no_calls() -> None:
    rig = Rig()
    gone = rig.give("gone", 1)
    gone.error = UnavailableError("no route")
    for _ in range(6):
        assert await rig.get(1) == [MISS]
    assert len(gone.calls) == 2
    [view] = rig.tier.peers()
    assert (view.state, view.failures) == (BreakerState.OPEN, 2)
    gone.error = None
    rig.now.s += 2.0
    assert await rig.get(1) == [HIT]
    assert rig.tier.peers()[0].state is BreakerState.CLOSED


async def test_one_dead_peer_does_not_close_the_way_to_another() -> None:
    rig = Rig()
    rig.give("gone", 1).error = UnavailableError("no route")
    rig.give("there", 2)
    for _ in range(5):
        assert await rig.get(1, 2) == [MISS, HIT]


async def test_a_peer_that_gives_bad_copies_is_counted_and_left_out_for_a_while() -> None:
    rig = Rig()
    liar = rig.give("liar", 1, 2, 3)
    liar.answer = corrupt
    assert await rig.get(1) == [CORRUPT]
    assert await rig.get(2) == [CORRUPT]
    assert await rig.get(3) == [MISS]
    assert rig.tier.corrupt == 2
    [view] = rig.tier.peers()
    assert (view.is_left_out, view.corrupt) == (True, 2)
    assert sum(rig.tier.stats().corrupt.values()) == 2
    assert not (await rig.tier.contains([name_of(3)], rig.now() + 60))[0]
    liar.answer = None
    rig.now.s += POLICY.corrupt_s
    assert await rig.get(3) == [HIT]


async def test_a_good_copy_elsewhere_makes_up_for_a_bad_one() -> None:
    rig = Rig()
    rig.give("liar", 1).answer = corrupt
    rig.give("good", 1)
    for _ in range(4):
        assert await rig.get(1) == [HIT]


async def test_without_an_index_there_are_misses_and_soon_no_questions() -> None:
    rig = Rig()
    rig.give("a", 1)
    rig.index.error = UnavailableError("no index")
    for _ in range(6):
        assert await rig.get(1, 2) == [MISS, MISS]
    assert len(rig.index.questions) == 2
    assert rig.tier.unanswered == 6
    with pytest.raises(UnavailableError):
        await rig.tier.contains([name_of(1)], rig.now() + 60)
    rig.index.error = None
    rig.now.s += 1.0
    assert await rig.get(1) == [HIT]


async def test_no_more_bytes_are_under_way_than_is_allowed() -> None:
    rig = Rig(replace(POLICY, peer_bytes_max=3 * BLOCK_BYTES, bytes_max=4 * BLOCK_BYTES))
    for peer in ("a", "b", "c"):
        rig.give(peer, *(range(10) if peer == "a" else [100 + ord(peer)]))
    reads = [rig.get(n) for n in range(10)] + [rig.get(100 + ord(p)) for p in "bc"]
    assert set(map(tuple, await asyncio.gather(*reads))) == {(HIT,)}
    assert rig.transport.in_flight_max <= 4 * BLOCK_BYTES
    assert rig.tier.in_flight_bytes == 0


async def test_a_read_ends_at_its_deadline_though_others_hold_all_the_room() -> None:
    rig = Rig(replace(POLICY, peer_bytes_max=BLOCK_BYTES, bytes_max=BLOCK_BYTES))
    holder = rig.give("a", 1, 2)
    holder.gate = asyncio.Event()
    first = asyncio.create_task(rig.get(1))
    await begun(lambda: bool(holder.calls))
    assert await rig.get(2, wait_s=0.05) == [MISS]
    holder.gate.set()
    assert await first == [HIT]


async def test_a_cancelled_read_gives_its_room_back() -> None:
    rig = Rig(replace(POLICY, peer_bytes_max=BLOCK_BYTES, bytes_max=BLOCK_BYTES))
    holder = rig.give("a", 1, 2)
    holder.gate = asyncio.Event()
    first = asyncio.create_task(rig.get(1))
    await begun(lambda: bool(holder.calls))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert rig.tier.in_flight_bytes == 0
    holder.gate = None
    assert await rig.get(2) == [HIT]


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (ByNames((name_of(1),)), [MISS, HIT]),
        (ByNamespace(NAMESPACE), [MISS, MISS]),
        (ByWriter(WRITER), [MISS, MISS]),
        (ByWriter(WRITER + 1), [HIT, HIT]),
    ],
    ids=lambda one: type(one).__name__,
)
async def test_what_was_dropped_here_stays_away_for_a_while(
    selection: Selection, left: list[GetStatus]
) -> None:
    rig = Rig()
    rig.give("a", 1, 2)
    assert await rig.tier.drop(selection, rig.now() + 60) == 0
    assert await rig.get(1, 2) == left
    rig.now.s += DROPPED_S
    assert await rig.get(1, 2) == [HIT, HIT]


async def test_nothing_is_ever_written_to_a_peer() -> None:
    rig = Rig()
    put = PutRequest(name_of(1), payload_of(1), BlockOwner(1))
    [result] = await rig.tier.put_many([put], rig.now() + 60)
    assert result.status is PutStatus.REFUSED


async def test_a_store_that_came_back_elsewhere_is_called_there_with_a_clean_slate() -> None:
    rig = Rig()
    fake = rig.give("a", 1)
    fake.error = UnavailableError("gone")
    for _ in range(3):
        await rig.get(1)
    fake.error = None
    rig.index.held[hash_of(name_of(1))] = (replace(place("a"), grpc_address="a:2"),)
    assert await rig.get(1) == [HIT]


async def test_after_close_it_says_so_and_the_transport_is_closed() -> None:
    rig = Rig()
    await rig.tier.close()
    assert rig.transport.is_closed
    with pytest.raises(UnavailableError):
        await rig.get(1)
