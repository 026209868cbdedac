"""Sessions of an arena: what a client may do, what it holds, and what is left when it goes."""

import asyncio
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kvtier.core.checksum import checksum
from kvtier.core.frame import FrameName
from kvtier.errors import (
    BackendError,
    CallerError,
    DeadlineError,
    LimitError,
    OverloadedError,
    UnavailableError,
)
from kvtier.ports import (
    BlockOwner,
    ByNames,
    GetRequest,
    GetStatus,
    PutRequest,
    PutResult,
    PutStatus,
    RemovalCause,
)
from kvtier.tiers.arena import messages
from kvtier.tiers.arena.client import ArenaClient, ArenaClientConfig
from kvtier.tiers.arena.directory import ABI_VERSION, NOWHERE
from kvtier.tiers.arena.holdings import Reservation, Wanted
from kvtier.tiers.arena.messages import BlockToCommit, Hello, Kind
from kvtier.tiers.arena.ring import CONTROL_BYTES, new_giver
from kvtier.tiers.arena.server import ArenaListener, ArenaServer, ArenaServerConfig, Session
from kvtier.tiers.arena.tier import ArenaConfig, ArenaTier
from tests.harness.waiting import eventually_async
from tests.tiers.arena_support import CLIENT, Node, node, on_thread
from tests.tiers.contract import (
    BLOCK_BYTES,
    bytes_of,
    get_bytes,
    name_of,
    payload_of,
    put_of,
    soon,
)

SEGMENT_BYTES = 64 << 10


def statuses(client: ArenaClient, *numbers: int) -> list[GetStatus]:
    return [result.status for result in client.get_many([GetRequest(name_of(n)) for n in numbers])]


def put(client: ArenaClient, *requests: PutRequest) -> list[PutStatus]:
    return [result.status for result in client.put_many(requests, soon())]


def churn(client: ArenaClient, start: int) -> None:
    put(client, *map(put_of, range(start, start + 10)))


class ManualTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Plain:
    """The plain methods, without a socket: the session's segment is written from here."""

    def __init__(self, config: ArenaServerConfig | None = None) -> None:
        self.time = ManualTime()
        self.tier = ArenaTier(ArenaConfig(64 << 10, 16 << 10, 64))
        self.server = ArenaServer(self.tier, config or ArenaServerConfig(), self.time)

    def session(self) -> Session:
        return self.server.open_session(ABI_VERSION, SEGMENT_BYTES)


def wanted(number: int, size: int = BLOCK_BYTES) -> Wanted:
    return Wanted(name_of(number), size, BlockOwner(7))


async def test_what_one_client_puts_another_reads_without_a_call(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        writer, reader = await on_thread(store.connect), await on_thread(store.connect)
        assert (
            await on_thread(lambda: put(writer, put_of(1), put_of(2, 1000)))
            == [PutStatus.STORED] * 2
        )
        into = memoryview(bytearray(BLOCK_BYTES))
        # On this thread: the server's loop stands still, so an answer of it cannot be waited for.
        first, second, third = reader.get_many(
            [
                GetRequest(name_of(1), into, BLOCK_BYTES),
                GetRequest(name_of(2)),
                GetRequest(name_of(3)),
            ]
        )
        assert bytes(into) == bytes_of(first) == payload_of(1)
        assert bytes_of(second) == payload_of(2, 1000)
        assert second.header is not None
        assert second.header.writer_id == 7
        assert third.status is GetStatus.MISS
        assert reader.contains([name_of(1), name_of(3)]) == [True, False]
        writer.close()
        reader.close()


async def test_the_first_writer_wins_over_sessions_too(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        one, two = await on_thread(store.connect), await on_thread(store.connect)
        await on_thread(lambda: put(one, put_of(1)))
        assert await on_thread(lambda: put(two, put_of(1), put_of(1, version=1))) == [
            PutStatus.DUPLICATE,
            PutStatus.DIVERGENT,
        ]
        assert await get_bytes(store.tier, name_of(1)) == payload_of(1)
        assert store.tier.stats().divergent_puts == 1
        one.close()
        two.close()


async def test_a_batch_larger_than_the_staging_area_goes_through_it_piece_by_piece(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        requests = [put_of(n, 3000 + n) for n in range(100)]
        assert set(await on_thread(lambda: put(client, *requests))) == {PutStatus.STORED}
        hits = [n for n in range(100) if statuses(client, n) == [GetStatus.HIT]]
        assert len(hits) > 20
        for n in hits:
            (result,) = client.get_many([GetRequest(name_of(n))])
            assert bytes_of(result) == payload_of(n, 3000 + n)
        too_long = put_of(7, CLIENT.staging_bytes + 1)
        assert await on_thread(lambda: put(client, too_long)) == [PutStatus.REFUSED]
        client.close()


async def test_a_payload_in_the_segment_is_put_in_place(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        memory = client.allocate(BLOCK_BYTES)
        memory[:] = payload_of(1)
        offset = client.offset_in_segment(memory)
        assert offset is not None
        assert offset >= CLIENT.staging_bytes
        assert client.offset_in_segment(memoryview(payload_of(1))) is None
        request = PutRequest(name_of(1), memory, BlockOwner(7))
        assert await on_thread(lambda: put(client, request)) == [PutStatus.STORED]
        memory[:] = bytes(BLOCK_BYTES)
        assert await get_bytes(store.tier, name_of(1)) == payload_of(1)
        with pytest.raises(BackendError):
            client.allocate(CLIENT.segment_bytes)
        client.close()


async def test_a_declared_checksum_is_held_against_what_the_store_copied(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        right = checksum(payload_of(1))
        bad = PutRequest(name_of(1), payload_of(1), BlockOwner(7), right ^ 1)
        good = PutRequest(name_of(1), payload_of(1), BlockOwner(7), right)
        assert await on_thread(lambda: put(client, bad, good)) == [
            PutStatus.CORRUPT,
            PutStatus.STORED,
        ]
        assert store.tier.stats().blocks_reserved == 0
        client.close()


async def test_what_a_client_reads_outlives_what_it_does_not_read(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(0)))
        for start in range(1, 201, 10):
            assert statuses(client, 0) == [GetStatus.HIT]
            client.flush_touches()
            await on_thread(partial(churn, client, start))
        assert store.tier.stats().removals[RemovalCause.EVICTED] > 0
        assert statuses(client, 0, 1) == [GetStatus.HIT, GetStatus.MISS]
        client.close()


async def test_a_corrupt_block_that_a_client_finds_is_dropped_by_the_store(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(1), put_of(2)))
        memory = store.tier.frame_memory(name_of(1))
        assert memory is not None
        memory[1][100] ^= 4
        assert statuses(client, 1, 2) == [GetStatus.CORRUPT, GetStatus.HIT]

        async def dropped() -> bool:
            return store.tier.held(name_of(1)) is None

        await eventually_async(dropped, 30, "the store drops the block")
        assert sum(store.tier.stats().corrupt.values()) == 1
        assert statuses(client, 1, 2) == [GetStatus.MISS, GetStatus.HIT]
        client.close()


async def test_a_false_report_of_corruption_drops_nothing() -> None:
    plain = Plain()
    await plain.tier.put_many([put_of(1)], soon())
    held = plain.tier.held(name_of(1))
    assert held is not None
    plain.tier.recheck(held.entry, held.generation)
    plain.tier.recheck(held.entry, held.generation + 2)
    plain.tier.recheck(10**9, 0)
    assert plain.tier.held(name_of(1)) is held
    await plain.tier.close()


async def test_a_lease_keeps_a_block_until_it_is_released(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(0)))
        leased, missing = await on_thread(
            lambda: client.lease([name_of(0), name_of(99)], 60_000, soon())
        )
        assert missing is None
        assert leased is not None
        for start in range(1, 201, 10):
            await on_thread(partial(churn, client, start))
        assert client.leased_view(leased) == payload_of(0)
        assert client.leased_view(leased).readonly
        assert checksum(client.leased_view(leased)) == leased.payload_checksum
        assert client.is_valid([leased]) == [True]
        await on_thread(lambda: client.release([leased, leased], soon()))
        for start in range(201, 401, 10):
            await on_thread(partial(churn, client, start))
        assert client.is_valid([leased]) == [False]
        client.close()


async def test_a_drop_ends_a_lease_and_the_reader_can_tell(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(0)))
        (leased,) = await on_thread(lambda: client.lease([name_of(0)], 60_000, soon()))
        assert leased is not None
        await store.tier.drop(ByNames((name_of(0),)), soon())
        assert client.is_valid([leased]) == [False]
        await store.tier.put_many([put_of(0)], soon())
        assert client.is_valid([leased]) == [False]
        client.close()


async def test_a_lease_that_ran_out_no_longer_keeps_its_block() -> None:
    plain = Plain()
    session = plain.session()
    await plain.tier.put_many([put_of(0)], soon())
    (leased,) = plain.server.lease(session, [name_of(0)], 1000)
    assert leased is not None
    plain.time.now += 0.9
    plain.server.expire()
    assert plain.tier.stats().blocks_pinned == 1
    plain.time.now += 0.2
    plain.server.expire()
    assert plain.tier.stats().blocks_pinned == 0
    assert plain.server.stats().leases_expired == 1
    assert plain.server.stats().leases == 0
    plain.server.release(session, [leased.lease_id])
    await plain.tier.close()


RING_BYTES = 32 << 10


class Writer:
    """A session whose blocks come through the ring, one after another as the test says."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain
        self.session = plain.server.open_session(ABI_VERSION, SEGMENT_BYTES, RING_BYTES)
        self.giver = new_giver(RING_BYTES)
        self.answers: dict[int, list[PutResult]] = {}

    def begin(self, tag: int, *numbers: int, checksums: dict[int, int] | None = None) -> None:
        blocks = [BlockToCommit(wanted(n), NOWHERE, (checksums or {}).get(n)) for n in numbers]
        self.plain.server.begin(self.session, tag, blocks)

    async def give(self, tag: int, *payloads: bytes) -> list[PutStatus] | None:
        """Hand payloads over; the outcome of the put, once it is whole."""
        rest: list[bytes] | None = list(payloads)
        while rest is not None:
            given, _ = self.giver.give(self.session.segment.view, rest, tag, 0)
            await self.plain.server.advance(self.session, self.answers.__setitem__)
            rest = rest[len(given) // 8 :] or None
        results = self.answers.get(tag)
        return None if results is None else [result.status for result in results]


async def test_blocks_that_are_handed_over_bit_by_bit_are_published_together() -> None:
    plain = Plain()
    writer = Writer(plain)
    right = checksum(payload_of(2))
    writer.begin(1, 1, 2, 3, checksums={2: right, 3: right})
    assert plain.tier.stats().blocks_reserved == plain.server.stats().reservations == 3
    assert await writer.give(1, payload_of(1)) is None
    assert plain.tier.held(name_of(1)) is None
    stored, corrupt = PutStatus.STORED, PutStatus.CORRUPT
    assert await writer.give(1, payload_of(2), payload_of(3)) == [stored, stored, corrupt]
    for number in (1, 2):
        assert await get_bytes(plain.tier, name_of(number)) == payload_of(number)
    assert plain.tier.held(name_of(3)) is None
    assert plain.tier.stats().blocks_reserved == plain.server.stats().reservations == 0
    await plain.tier.close()


async def test_blocks_of_the_ring_and_of_the_segment_may_be_mixed() -> None:
    plain = Plain()
    writer = Writer(plain)
    at = SEGMENT_BYTES - BLOCK_BYTES
    writer.session.segment.view[at:] = payload_of(2)
    places = {1: NOWHERE, 2: at, 3: NOWHERE}
    blocks = [BlockToCommit(wanted(n), place) for n, place in places.items()]
    plain.server.begin(writer.session, 1, blocks)
    assert await writer.give(1, payload_of(1), payload_of(3)) == [PutStatus.STORED] * 3
    for number in places:
        assert await get_bytes(plain.tier, name_of(number)) == payload_of(number)
    await plain.tier.close()


async def test_bytes_of_another_put_than_was_announced_end_the_session() -> None:
    plain = Plain()
    writer = Writer(plain)
    writer.begin(1, 1)
    writer.giver.give(writer.session.segment.view, [payload_of(9)], 2, 0)
    with pytest.raises(CallerError, match="broken"):
        await plain.server.advance(writer.session, writer.answers.__setitem__)
    plain.server.close_session(writer.session)
    assert plain.tier.held(name_of(1)) is None
    assert plain.tier.stats().blocks_reserved == 0
    await plain.tier.close()


async def test_a_payload_that_its_writer_changes_in_the_ring_is_not_published() -> None:
    plain = Plain()
    writer = Writer(plain)
    writer.begin(1, 1, 2)
    view = writer.session.segment.view
    writer.giver.give(view, [payload_of(1), payload_of(2)], 1, 0)
    view[CONTROL_BYTES + 5] ^= 1
    assert await writer.give(1) == [PutStatus.CORRUPT, PutStatus.STORED]
    assert plain.tier.held(name_of(1)) is None
    assert await get_bytes(plain.tier, name_of(2)) == payload_of(2)
    await plain.tier.close()


async def test_of_blocks_that_others_put_meanwhile_the_first_are_kept() -> None:
    plain = Plain()
    writer = Writer(plain)
    writer.begin(1, 1, 2)
    await plain.tier.put_many([put_of(1)], soon())
    offered = payload_of(1, version=1), payload_of(2)
    assert await writer.give(1, *offered) == [PutStatus.DIVERGENT, PutStatus.STORED]
    assert await get_bytes(plain.tier, name_of(1)) == payload_of(1)
    # One that is there from the beginning takes no slot.
    writer.begin(2, 1, 3)
    assert plain.tier.stats().blocks_reserved == 1
    again = payload_of(1), payload_of(3)
    assert await writer.give(2, *again) == [PutStatus.DUPLICATE, PutStatus.STORED]
    writer.begin(3, 4, 4, 5)
    twice = payload_of(4), payload_of(4), payload_of(5)
    stored, duplicate = PutStatus.STORED, PutStatus.DUPLICATE
    assert await writer.give(3, *twice) == [stored, duplicate, stored]
    assert plain.tier.stats().blocks_reserved == 0
    assert plain.tier.stats().divergent_puts == 1
    await plain.tier.close()


async def test_blocks_that_do_not_come_give_their_slots_back_and_may_come_later() -> None:
    plain = Plain()
    writer = Writer(plain)
    writer.begin(1, 1, 2, 3)
    await writer.give(1, payload_of(1))
    plain.time.now += 60.0
    plain.server.expire()
    assert plain.server.stats().reservations_expired == 2
    assert plain.tier.stats().blocks_reserved == 0
    # What had come is there, whoever comes for the rest.
    assert await get_bytes(plain.tier, name_of(1)) == payload_of(1)
    assert await writer.give(1, payload_of(2), payload_of(3)) == [PutStatus.STORED] * 3
    assert await get_bytes(plain.tier, name_of(3)) == payload_of(3)
    writer.begin(2, 4, 5)
    plain.server.close_session(writer.session)
    assert plain.tier.stats().blocks_reserved == 0
    await plain.tier.close()


async def test_a_block_whose_writer_stood_still_in_its_middle_is_lost_alone() -> None:
    plain = Plain()
    writer = Writer(plain)
    large, size = b"".join(payload_of(n) for n in range(4)), 4 * BLOCK_BYTES
    names = [BlockToCommit(wanted(n, size), NOWHERE) for n in (1, 2, 3)]
    assert size < RING_BYTES < 3 * size
    plain.server.begin(writer.session, 1, names)
    given, _ = writer.giver.give(writer.session.segment.view, [large] * 3, 1, 0)
    await plain.server.advance(writer.session, writer.answers.__setitem__)
    done = len(given) // 8
    plain.time.now += 60.0
    plain.server.expire()
    assert plain.tier.stats().blocks_reserved == 0
    results = await writer.give(1, *[large] * (3 - done))
    assert results is not None
    assert results.count(PutStatus.ERROR) == 1
    assert results.count(PutStatus.STORED) == 2
    for number, status in zip((1, 2, 3), results, strict=True):
        expected = large if status is PutStatus.STORED else None
        assert await get_bytes(plain.tier, name_of(number)) == expected
    await plain.tier.close()


async def test_a_client_announces_no_more_than_it_may() -> None:
    plain = Plain(ArenaServerConfig(reservations_max=3))
    writer = Writer(plain)
    writer.begin(0, 1, 2)
    writer.begin(1, 3, 4)  # past its reservations: they take slots when they come
    assert plain.tier.stats().blocks_reserved == 2
    with pytest.raises(CallerError):
        writer.begin(1, 5)
    with pytest.raises(CallerError):
        writer.begin(2)
    with pytest.raises(CallerError, match="outside"):
        plain.server.begin(writer.session, 2, [BlockToCommit(wanted(6), SEGMENT_BYTES)])
    with pytest.raises(CallerError, match="not there"):
        plain.server.begin(plain.session(), 2, [BlockToCommit(wanted(6), NOWHERE)])
    assert await writer.give(0, payload_of(1), payload_of(2)) == [PutStatus.STORED] * 2
    assert await writer.give(1, payload_of(3), payload_of(4)) == [PutStatus.STORED] * 2
    for tag in range(16):
        writer.begin(tag, 10 + tag)
    with pytest.raises(CallerError):
        writer.begin(16, 50)
    await plain.tier.close()


@pytest.mark.parametrize("ring_bytes", [1, 1024, RING_BYTES + 8, SEGMENT_BYTES, 2**63])
async def test_a_ring_that_cannot_be_opens_no_session(ring_bytes: int) -> None:
    plain = Plain()
    with pytest.raises(CallerError, match="ring_bytes"):
        plain.server.open_session(ABI_VERSION, SEGMENT_BYTES, ring_bytes)
    assert plain.server.stats().sessions == 0
    assert plain.server.stats().refused_sessions == 1
    await plain.tier.close()


async def test_a_reservation_is_committed_into_its_slot() -> None:
    plain = Plain()
    session = plain.session()
    (granted,) = plain.server.reserve(session, [wanted(1)], 1000)
    assert granted.reservation_id
    assert plain.tier.stats().blocks_reserved == 1
    await plain.tier.put_many([put_of(2)], soon())
    (again,) = plain.server.reserve(session, [wanted(2)], 1000)
    assert (again.reservation_id, again.result.status) == (0, PutStatus.DUPLICATE)
    block = BlockToCommit(wanted(1), 0, None, granted.reservation_id)
    (result,) = await plain.server.commit(session, [block], soon())
    assert result.status is PutStatus.STORED
    assert await get_bytes(plain.tier, name_of(1)) == bytes(BLOCK_BYTES)
    assert plain.tier.stats().blocks_reserved == 0
    (twice,) = await plain.server.commit(session, [block], soon())
    assert (twice.status, twice.reason) == (PutStatus.ERROR, "no_reservation")
    await plain.tier.close()


async def test_a_reservation_is_for_its_block_alone() -> None:
    plain = Plain()
    session = plain.session()
    (granted,) = plain.server.reserve(session, [wanted(1)], 1000)
    for other in (wanted(2), wanted(1, 100)):
        block = BlockToCommit(other, 0, None, granted.reservation_id)
        (result,) = await plain.server.commit(session, [block], soon())
        assert (result.status, result.reason) == (PutStatus.ERROR, "other_reservation")
    other_session = plain.session()
    block = BlockToCommit(wanted(1), 0, None, granted.reservation_id)
    (stolen,) = await plain.server.commit(other_session, [block], soon())
    assert stolen.reason == "no_reservation"
    plain.server.abort(session, [granted.reservation_id, granted.reservation_id, 77])
    assert plain.tier.stats().blocks_reserved == 0
    await plain.tier.close()


async def test_no_time_frees_a_reserved_slot_and_an_expired_one_is_never_published() -> None:
    plain = Plain()
    session = plain.session()
    granted = plain.server.reserve(session, [wanted(1), wanted(2), wanted(3)], 1000)
    plain.time.now += 3600
    plain.server.expire()
    plain.server.expire()
    assert plain.server.stats().reservations_expired == 3
    assert plain.server.stats().quarantined == 3
    assert plain.tier.stats().blocks_reserved == 3
    # Its writer goes on: nothing is published, and its slot is free since it is done.
    late = BlockToCommit(wanted(1), 0, None, granted[0].reservation_id)
    (result,) = await plain.server.commit(session, [late], soon())
    assert (result.status, result.reason) == (PutStatus.ERROR, "expired")
    plain.server.abort(session, [granted[1].reservation_id])
    assert plain.server.stats().quarantined == 1
    plain.server.close_session(session)  # the proof that the last writer is gone
    assert plain.server.stats().quarantined == 0
    assert plain.tier.stats().blocks_reserved == 0
    assert plain.tier.held(name_of(1)) is None
    await plain.tier.close()


async def test_a_quarantined_slot_is_given_to_nobody() -> None:
    plain = Plain()
    session = plain.session()
    plain.server.reserve(session, [wanted(0, 16 << 10)], 1000)
    plain.time.now += 2
    plain.server.expire()
    results = await plain.tier.put_many([put_of(n, 16 << 10) for n in range(1, 5)], soon())
    assert [result.status for result in results].count(PutStatus.STORED) == 3
    assert results[3].reason == "full"
    await plain.tier.close()


async def test_ceilings_of_a_session_hold() -> None:
    plain = Plain(ArenaServerConfig(sessions_max=2, reservations_max=2, leases_max=1))
    session = plain.session()
    plain.session()
    with pytest.raises(OverloadedError):
        plain.session()
    granted = plain.server.reserve(session, [wanted(n) for n in range(3)], 1000)
    assert [one.reservation_id > 0 for one in granted] == [True, True, False]
    assert granted[2].result.reason == "reservations_max"
    await plain.tier.put_many([put_of(8), put_of(9)], soon())
    leased = plain.server.lease(session, [name_of(8), name_of(9)], 1000)
    assert [one is not None for one in leased] == [True, False]
    with pytest.raises(LimitError):
        plain.server.lease(session, [name_of(8)], 10**9)
    with pytest.raises(CallerError):
        plain.server.reserve(session, [wanted(5)], 0)
    plain.server.close_session(session)
    plain.server.close_session(session)
    assert plain.tier.stats().blocks_pinned == 0
    assert plain.tier.stats().blocks_reserved == 0
    assert plain.server.stats().sessions == 1
    plain.session()
    assert plain.server.stats().refused_sessions == 1
    await plain.tier.close()


@pytest.mark.parametrize(
    ("abi", "segment_bytes", "error"),
    [
        (ABI_VERSION + 1, SEGMENT_BYTES, CallerError),
        (ABI_VERSION, 1, CallerError),
        (ABI_VERSION, 1 << 41, LimitError),
        (ABI_VERSION, (1 << 30), OverloadedError),
    ],
)
async def test_a_client_that_cannot_come_in_is_refused(
    abi: int, segment_bytes: int, error: type[Exception]
) -> None:
    plain = Plain(ArenaServerConfig(segments_bytes_max=1 << 20))
    with pytest.raises(error):
        plain.server.open_session(abi, segment_bytes)
    assert plain.server.stats().sessions == 0
    assert plain.server.stats().refused_sessions == 1
    await plain.tier.close()


async def test_a_commit_outside_the_segment_is_refused() -> None:
    plain = Plain()
    session = plain.session()
    for offset in (SEGMENT_BYTES - 1, SEGMENT_BYTES, 2**64 - 1):
        with pytest.raises(CallerError):
            await plain.server.commit(session, [BlockToCommit(wanted(1), offset)], soon())
    assert plain.tier.stats().blocks_reserved == 0
    await plain.tier.close()


async def test_a_slot_is_filled_in_place_by_the_store_itself() -> None:
    plain = Plain()
    first, second = plain.tier.reserve_many([wanted(1), wanted(2)])
    assert isinstance(first, Reservation)
    assert isinstance(second, Reservation)
    for number, reservation in ((1, first), (2, second)):
        plain.tier.writable(reservation)[:] = payload_of(number)
    results = await plain.tier.commit(
        [first, second], [checksum(payload_of(1)), checksum(payload_of(1))]
    )
    assert [result.status for result in results] == [PutStatus.STORED, PutStatus.CORRUPT]
    assert await get_bytes(plain.tier, name_of(1)) == payload_of(1)
    assert plain.tier.held(name_of(2)) is None
    assert plain.tier.stats().blocks_reserved == 0
    plain.tier.abort([first, second])
    (third,) = plain.tier.reserve_many([wanted(3)])
    assert isinstance(third, Reservation)
    plain.tier.quarantine(third)
    assert plain.tier.quarantined_count == 1
    with pytest.raises(CallerError):
        await plain.tier.commit([third], [0])
    plain.tier.abort([third])
    assert plain.tier.stats().blocks_reserved == 0
    await plain.tier.close()


async def open_raw(store: Node) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, str(store.path))
    return raw


@pytest.mark.parametrize(
    "message",
    [
        b"\x00",
        b"\xff" * 64,
        messages.pack_results(1, []),
        messages.pack(Kind.COMMIT, 200, 1, b"\x00" * 300),
        messages.pack_commit(1, [BlockToCommit(wanted(1), 2**63)]),
        messages.pack_lease(1, 0, [name_of(1)]),
        messages.pack(Kind.BEGIN, 0, 1, b"\x00\x00"),
        messages.pack_begin(1, [put_of(1)], [2**63], [BLOCK_BYTES]),
        messages.pack_begin(1, [put_of(1)], [NOWHERE], [BLOCK_BYTES]),
        messages.pack_hello(Hello(ABI_VERSION, SEGMENT_BYTES)),
    ],
)
async def test_a_message_that_is_none_ends_the_connection_and_nothing_else(
    tmp_path: Path, message: bytes
) -> None:
    async with node(tmp_path) as store:
        good = await on_thread(store.connect)
        loop = asyncio.get_running_loop()
        raw = await open_raw(store)
        await loop.sock_sendall(raw, messages.pack_hello(Hello(ABI_VERSION, SEGMENT_BYTES)))
        assert messages.head_of(await loop.sock_recv(raw, 4096))[0].kind is Kind.WELCOME
        await loop.sock_sendall(raw, message)
        assert await loop.sock_recv(raw, 4096) == b""
        raw.close()
        assert store.server.stats().broken_messages == 1
        assert store.server.stats().sessions == 1
        assert await on_thread(lambda: put(good, put_of(1))) == [PutStatus.STORED]
        good.close()


async def test_another_abi_gets_no_memory(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        loop = asyncio.get_running_loop()
        raw = await open_raw(store)
        await loop.sock_sendall(raw, messages.pack_hello(Hello(ABI_VERSION + 1, SEGMENT_BYTES)))
        message, fds, _, _ = await on_thread(lambda: received(raw))
        assert messages.head_of(message)[0].kind is Kind.REFUSED
        assert fds == []
        raw.close()


def received(raw: socket.socket) -> tuple[bytes, list[int], int, object]:
    raw.settimeout(10)
    return socket.recv_fds(raw, 4096, 8)


async def test_a_client_whose_segment_is_refused_misses(tmp_path: Path) -> None:
    config = ArenaServerConfig(segment_bytes_max=128 << 10)
    async with node(tmp_path, config) as store:
        with pytest.raises(UnavailableError):
            await on_thread(store.connect)
    with pytest.raises(UnavailableError):
        await on_thread(
            lambda: Node(store.tier, store.server, store.listener, tmp_path / "no").connect()
        )


async def test_sessions_end_with_their_connections(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(1)))
        await on_thread(lambda: client.lease([name_of(1)], 60_000, soon()))
        granted = await on_thread(lambda: client.reserve([wanted(2)], 60_000, soon()))
        assert granted[0].reservation_id
        assert store.server.stats().leases == store.server.stats().reservations == 1
        client.close()
        client.close()

        async def ended() -> bool:
            return store.server.stats().sessions == 0

        await eventually_async(ended, 30, "the session ends")
        assert store.tier.stats().blocks_pinned == 0
        assert store.tier.stats().blocks_reserved == 0


async def test_a_client_of_a_closed_arena_misses_and_can_say_so(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(1)))
    assert statuses(client, 1) == [GetStatus.MISS]
    assert client.contains([name_of(1)]) == [False]
    assert await on_thread(lambda: put(client, put_of(2))) == [PutStatus.ERROR]
    assert not client.is_attached
    with pytest.raises(UnavailableError):
        await on_thread(lambda: client.lease([name_of(1)], 1000, soon()))
    client.flush_touches()
    client.close()


async def test_a_closed_session_says_so(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(1)))
        memory = client.allocate(64)
        client.close()
        for use in (
            lambda: client.get_many([GetRequest(name_of(1))]),
            lambda: client.contains([name_of(1)]),
            lambda: client.put_many([put_of(1)], soon()),
            lambda: client.allocate(64),
            lambda: client.release([], soon()),
        ):
            with pytest.raises(UnavailableError):
                use()
        client.flush_touches()
        memory[:] = b"m" * 64  # what was handed out stays mapped


async def test_reads_do_not_wait_for_a_put_of_another_thread(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        await on_thread(lambda: put(client, put_of(1)))
        # The loop stands still while this test does not await: the put hangs until it times out.
        hung = threading.Thread(
            target=client.put_many, args=([put_of(2)], time.monotonic() + 1.0), daemon=True
        )
        hung.start()
        for _ in range(300):
            assert statuses(client, 1) == [GetStatus.HIT]
        with pytest.raises((DeadlineError, UnavailableError)):
            client.release([], time.monotonic() + 0.01)
        hung.join(30)
        assert not hung.is_alive()
        client.close()


async def test_a_store_that_does_not_answer_costs_the_deadline_and_the_session(
    tmp_path: Path,
) -> None:
    async with node(tmp_path) as store:
        client = await on_thread(store.connect)
        # On this thread, so the loop that should answer stands still.
        results = client.put_many([put_of(1)], time.monotonic() + 0.05)
        assert [result.status for result in results] == [PutStatus.TIMEOUT]
        assert not client.is_attached
        with pytest.raises(UnavailableError):
            client.reserve([wanted(1)], 1000, soon())
        other = await on_thread(store.connect)
        (late,) = other.put_many([put_of(2)], time.monotonic() - 1)
        assert late.status is PutStatus.TIMEOUT
        third = await on_thread(store.connect)
        with pytest.raises(DeadlineError):
            third.release([], time.monotonic() - 1)
        for one in (client, other, third):
            one.close()


async def test_nobody_else_can_reach_the_socket(tmp_path: Path) -> None:
    async with node(tmp_path) as store:
        assert store.path.stat().st_mode & 0o077 == 0
        second = ArenaListener(store.server, store.path)
        with pytest.raises(BackendError):
            second.start()
    assert not store.path.exists()


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(CallerError):
        ArenaConfig(1000, 64)
    with pytest.raises(CallerError):
        ArenaConfig(128, 100)
    with pytest.raises(CallerError):
        ArenaConfig(0)
    with pytest.raises(CallerError):
        ArenaClientConfig(100, 200)
    with pytest.raises(CallerError):
        ArenaServerConfig(sessions_max=0)


def test_a_name_is_found_by_its_key() -> None:
    table: dict[FrameName, int] = {name_of(n): n for n in range(100)}
    assert all(table[name_of(n)] == n for n in range(100))
    assert name_of(1) != FrameName(name_of(1).key_kind, name_of(1).key, name_of(1).namespace, 1)
