"""NIXL between stores where something goes wrong: writes that come late, ends that are gone.

The bytes are moved by agents within this process, when the test lets them; that NIXL itself moves
them right is what `test_transports` shows where it is installed.
"""

import asyncio
import contextlib
import ctypes
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, KvtierError, LimitError, UnavailableError
from kvtier.peers import BulkFirst, BulkTransport, GrpcTransport, fallback, nixl_transport
from kvtier.peers import bulk_wire as form
from kvtier.peers.nixl_agent import Exposure
from kvtier.peers.nixl_server import ACQUAINTANCES_MAX, NixlEnd, Offer
from kvtier.peers.nixl_transport import NixlTransport, WhenCold
from kvtier.peers.staging import ALIGNMENT, SLOT_BYTES, SLOTS, Staging, step_of
from kvtier.ports import GetRequest, PeerTransport
from kvtier.sections import DialConfig, ListenConfig
from kvtier_services.store import peers as store_peers
from kvtier_services.store.config import BulkSection, PeersSection, PeerWay
from tests.harness.ports import free_port
from tests.harness.waiting import eventually_async
from tests.peers.test_bulk_server import KEYS, said
from tests.peers.test_transports import CORRUPT, HIT, MISS, Way, place_of
from tests.support.memory_agents import World
from tests.support.peer_stores import PATIENT, some_nodes
from tests.support.store_service import MIB, a_store, small_store
from tests.tiers.contract import BLOCK_BYTES, NAMESPACE, name_of, payload_of, soon

NIXL = PeersSection(transport=PeerWay.NIXL)
GREETING = form.GREETING.pack(form.MAGIC, form.VERSION, 0, 2) + b"s1"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Stores of this test serve with agents of this world."""
    world = World()
    monkeypatch.setattr(store_peers, "NixlEnd", partial(NixlEnd, maker=world.agent))
    yield world
    world.release()


@asynccontextmanager
async def a_way(
    directory: Path, world: World, *, serves: bool = True, cold: WhenCold = WhenCold.WAIT
) -> AsyncIterator[tuple[Way, NixlTransport]]:
    config = small_store(directory, peers=NIXL if serves else PeersSection())
    async with a_store(config) as (running, _):
        transport = NixlTransport(DialConfig(), cold=cold, maker=world.agent)
        try:
            yield Way(transport, place_of(running), running), transport
        finally:
            world.release()
            await transport.close()


async def left_behind(way: Way, world: World, memory: memoryview) -> None:
    """Begin a get whose payload is held back, and cancel it once the store has begun to move."""
    before = len(world.held)
    world.holds = True
    asked = [GetRequest(name_of(1), memory, BLOCK_BYTES)]
    call = asyncio.create_task(way.transport.get_many(way.peer, asked, soon()))

    async def has_begun() -> bool:
        return len(world.held) > before

    await eventually_async(has_begun, 30, "the store begins to move the block")
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    world.holds = False


async def count_is(transport: NixlTransport, name: str, count: int) -> None:
    async def is_so() -> bool:
        return bool(getattr(transport, name) == count)

    await eventually_async(is_so, 60, f"{name} is {count}")


async def test_a_slot_that_may_still_be_written_is_not_used_before_the_store_has_let_go_of_it(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "SETTLE_TRIES", 1000)
    monkeypatch.setattr(nixl_transport, "_PAUSE_S_MAX", 0.2)
    async with a_way(tmp_path, world) as (way, transport):
        assert await way.put(*range(20)) == ["stored"] * 20
        memory = memoryview(bytearray(BLOCK_BYTES))
        await left_behind(way, world, memory)
        await count_is(transport, "quarantined", 1)
        late, before = world.targets[-1], len(world.targets)
        for _ in range(3):
            found = await asyncio.gather(*(way.get(n, n + 1) for n in range(10)))
            assert found == [[HIT, HIT]] * 10
        assert late not in world.targets[before:]
        assert transport.free == SLOTS - 1
        world.release()
        await count_is(transport, "quarantined", 0)
        assert (transport.free, transport.retired) == (SLOTS, 0)
        assert bytes(memory) == bytes(BLOCK_BYTES)
        assert await way.get(*range(20)) == [HIT] * 20


async def test_a_slot_that_nobody_can_say_is_left_alone_is_never_used_again_and_then_all_are_anew(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "SETTLE_TRIES", 1)
    monkeypatch.setattr(nixl_transport, "SETTLE_S", 0.01)
    async with a_way(tmp_path, world) as (way, transport):
        assert await way.put(1, 2) == ["stored"] * 2
        for lost in range(1, SLOTS + 1):
            await left_behind(way, world, memoryview(bytearray(BLOCK_BYTES)))
            await count_is(transport, "retired", lost)
        assert transport.renewals == 0
        [lent] = [one for name, one in world.agents.items() if "asker" in name]
        memory = weakref.ref(lent.memories.pop().obj)
        world.release()
        assert await way.get(1, 2) == [HIT, HIT]
        gc.collect()
        assert memory() is not None, "what is written late must not hit what lies there next"
        assert (transport.renewals, transport.retired, transport.free) == (1, 0, SLOTS)


async def test_a_store_that_was_started_anew_knows_nothing_of_what_was_sent_before(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "SETTLE_TRIES", 1000)
    monkeypatch.setattr(nixl_transport, "_PAUSE_S_MAX", 0.2)
    bulk = BulkSection(port=free_port())
    transport = NixlTransport(DialConfig(), maker=world.agent)
    try:
        async with a_store(small_store(tmp_path / "1", peers=NIXL, bulk=bulk)) as (running, _):
            way = Way(transport, place_of(running), running)
            await way.put(1)
            await left_behind(way, world, memoryview(bytearray(BLOCK_BYTES)))
        async with a_store(small_store(tmp_path / "2", peers=NIXL, bulk=bulk)) as (running, _):
            await count_is(transport, "retired", 1)
            world.release()
            assert await way.get(1) == [MISS]
    finally:
        await transport.close()


async def test_a_transfer_that_fails_goes_another_way_and_its_slot_is_never_used_again(
    tmp_path: Path, world: World
) -> None:
    async with a_way(tmp_path, world) as (way, transport):
        assert await way.put(1) == ["stored"]
        world.fails = True
        for failed in (lambda: way.get(1), lambda: way.put(2), lambda: way.get(1)):
            with pytest.raises(UnavailableError):
                await failed()
        await count_is(transport, "retired", 3)
        chain: PeerTransport = BulkFirst(transport, BulkTransport(DialConfig()))
        way.transport = chain
        assert await way.get(1, 2) == [HIT, MISS]
        assert await way.put(3) == ["stored"]
        world.fails = False
        way.transport = transport
        begun = len(world.targets)
        assert await way.get(1, 2, 3) == [HIT, MISS, HIT]
        assert len(world.targets) > begun
        await chain.close()


async def lose_every_slot(way: Way, transport: NixlTransport, world: World) -> None:
    world.fails = True
    for lost in range(1, SLOTS + 1):
        with pytest.raises(UnavailableError):
            await way.get(1)
        await count_is(transport, "retired", lost)
    world.fails = False


async def test_agents_are_not_renewed_for_ever(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "RENEWALS_MAX", 1)
    async with a_way(tmp_path, world) as (way, transport):
        assert await way.put(1) == ["stored"]
        await lose_every_slot(way, transport, world)
        with pytest.raises(UnavailableError, match="too often"):
            await way.get(1)
        way.transport = BulkFirst(transport, BulkTransport(DialConfig()))
        assert await way.get(1) == [HIT]
        await way.transport.close()


async def test_where_no_other_agent_can_be_opened_calls_go_another_way(
    tmp_path: Path, world: World
) -> None:
    async with a_way(tmp_path, world) as (way, transport):
        assert await way.put(1) == ["stored"]
        await lose_every_slot(way, transport, world)
        world.is_full = True
        for _ in range(2):
            with pytest.raises(UnavailableError, match="no more"):
                await way.get(1)
        world.is_full = False
        assert await way.get(1) == [HIT]


async def test_bytes_that_arrive_wrong_are_corrupt_and_published_by_nobody(
    tmp_path: Path, world: World
) -> None:
    async with a_way(tmp_path, world) as (way, _):
        assert await way.put(1) == ["stored"]
        world.damages = True
        assert await way.get(1) == [CORRUPT]
        assert await way.put(2) == ["corrupt"]
        world.damages = False
        assert await way.get(1, 2) == [HIT, MISS]


async def test_a_store_without_nixl_is_called_the_other_way_and_no_slot_is_lost(
    tmp_path: Path, world: World
) -> None:
    async with a_way(tmp_path, world, serves=False) as (way, transport):
        with pytest.raises(UnavailableError):
            await way.get(1)
        assert (transport.quarantined, transport.retired, transport.free) == (0, 0, SLOTS)
        assert world.targets == []
        dial = DialConfig()
        chain: PeerTransport = BulkFirst(
            transport, BulkFirst(BulkTransport(dial), GrpcTransport(dial))
        )
        way.transport = chain
        assert await way.put(1) == ["stored"]
        assert await way.get(1, 2) == [HIT, MISS]
        await chain.close()


async def test_a_store_that_was_not_met_is_met_while_calls_go_another_way(
    tmp_path: Path, world: World
) -> None:
    async with a_way(tmp_path, world, cold=WhenCold.REFUSE) as (way, _):
        with pytest.raises(UnavailableError):
            await way.get(1)

        async def is_met() -> bool:
            try:
                return await way.get(1) == [MISS]
            except UnavailableError:
                return False

        await eventually_async(is_met, 30, "the two have met")


async def test_a_store_reads_another_at_once_and_by_nixl_as_soon_as_they_have_met(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_peers, "NixlTransport", partial(NixlTransport, maker=world.agent))
    monkeypatch.setattr(fallback, "AGAIN_S", 0.0)
    peers = replace(PATIENT, transport=PeerWay.NIXL)
    async with some_nodes(tmp_path, "a", "b", peers=peers, promote_touches_min=1000) as nodes:
        await nodes.put("a", 1, 2)
        assert await nodes.get("b", 1, 2, 3) == [True, True, False]

        async def came_by_nixl() -> bool:
            tried = 1  # with zeros, when the two met
            begun = max(tried, len(world.targets))
            assert await nodes.get("b", 1, 2) == [True, True]
            return len(world.targets) > begun

        await eventually_async(came_by_nixl, 60, "blocks come by NIXL")


async def test_payloads_longer_than_a_slot_and_of_unknown_length_come_over_the_channel(
    tmp_path: Path, world: World
) -> None:
    async with a_way(tmp_path, world) as (way, _):
        assert await way.put(*range(6), size=MIB) == ["stored"] * 6
        begun = len(world.targets)
        asked = [GetRequest(name_of(n)) for n in range(6)]
        results = await way.transport.get_many(way.peer, asked, soon())
        assert [bytes(r.payload or b"") for r in results] == [payload_of(n, MIB) for n in range(6)]
        assert await way.get(7, size=SLOT_BYTES + 1) == [MISS]
        assert len(world.targets) == begun
        assert await way.get(*range(6), size=MIB) == [HIT] * 6
        assert len(world.targets) == begun + 1


def test_addresses_of_slots_that_are_out_are_kept_and_others_are_given_back() -> None:
    for is_out in (True, False):
        staging = Staging(2, 1 << 16)
        slot = staging.take(soon())
        memory = weakref.ref(staging.memory.obj)
        if not is_out:
            staging.give_back(slot)
        staging.bury()
        del slot, staging
        gc.collect()
        assert (memory() is not None) == is_out


async def test_nothing_of_earlier_calls_goes_along_between_two_payloads(
    tmp_path: Path, world: World
) -> None:
    async with a_way(tmp_path, world) as (way, _):
        assert await way.put(*range(4)) == ["stored"] * 4
        for _ in range(2 * SLOTS):
            assert await way.get(*range(4)) == [HIT] * 4
        size = BLOCK_BYTES - ALIGNMENT - 1
        assert await way.put(*range(10, 13), size=size) == ["stored"] * 3
        assert await way.get(*range(10, 13), size=size) == [HIT] * 3
        for at in (0, 1):
            gap = world.targets[-1] + at * step_of(size) + size
            assert ctypes.string_at(gap, step_of(size) - size) == bytes(step_of(size) - size)


def test_what_an_earlier_call_offered_is_not_written_after_the_end_was_told() -> None:
    world = World()
    far = NixlEnd(Exposure.LOOPBACK, world.agent)
    asker = world.agent("asker", Exposure.LOOPBACK)
    known = far.met(asker.describe())
    end = soon()
    assert far.fence(known, Offer(3, 5, 0), end) is form.Ending.ENDED
    for late in (1, 5):
        with pytest.raises(UnavailableError):
            far.begin(known, Offer(3, late, 0))
    far.begin(known, Offer(3, 6, 0))
    with pytest.raises(UnavailableError):
        far.begin(known, Offer(3, 7, 0))
    assert far.fence(known, Offer(3, 5, 0), end) is form.Ending.ENDED
    assert far.fence(known, Offer(3, 6, 0), 0.0) is form.Ending.RUNNING
    far.end(known, Offer(3, 6, 0), is_clean=False)
    assert far.fence(known, Offer(3, 6, 0), end) is form.Ending.FAILED
    assert far.fence(known, Offer(4, 1, 0), end) is form.Ending.ENDED
    far.close()


def test_agents_that_are_gone_make_room_and_those_that_are_here_are_bounded() -> None:
    world = World()
    far = NixlEnd(Exposure.LOOPBACK, world.agent)
    here = [far.met(f"asker {i}".encode()) for i in range(ACQUAINTANCES_MAX)]
    with pytest.raises(LimitError):
        far.met(b"one more")
    assert far.met(b"asker 0") is here[0]
    far.left(here[0])
    with pytest.raises(LimitError):
        far.met(b"one more")
    far.left(here[0])
    assert far.met(b"one more").name == "one more"
    assert far.acquaintances == ACQUAINTANCES_MAX
    assert far.met(b"one more") is not here[0]
    far.close()


def op(number: int, payload_bytes: int = 0, count: int = 2) -> bytes:
    return GREETING + form.REQUEST.pack(
        number, 1, 32, 0, 0, count, 1000, payload_bytes, NAMESPACE, 7, 0
    )


MEET = op(form.NIXL_MEET, 8) + b"stranger"
OFFER = form.OFFER.pack(0, 1, 4096)
NONSENSE = {
    "a get of who has not met": op(form.NIXL_GET, 64) + KEYS + OFFER,
    "a put of who has not met": op(form.NIXL_PUT) + KEYS + OFFER,
    "an end of who has not met": op(form.NIXL_END) + OFFER,
    "no description": op(form.NIXL_MEET),
    "a long description": op(form.NIXL_MEET, 1 << 30),
    "half a description": op(form.NIXL_MEET, 100) + b"half",
    "memory of nobody": MEET + op(form.NIXL_GET, 64)[len(GREETING) :] + KEYS + OFFER,
    "no such slot": MEET + op(form.NIXL_TRY)[len(GREETING) :] + form.OFFER.pack(1 << 31, 1, 0),
    "more than a slot": MEET + op(form.NIXL_GET, SLOT_BYTES)[len(GREETING) :] + KEYS + OFFER,
    "an unknown length": MEET + op(form.NIXL_GET)[len(GREETING) :] + KEYS + OFFER,
}


async def test_nonsense_ends_its_connection_and_nothing_else(tmp_path: Path, world: World) -> None:
    async with a_way(tmp_path, world) as (way, transport):
        world.agent("stranger", Exposure.LOOPBACK)
        assert await way.put(1) == ["stored"]
        for data in NONSENSE.values():
            await said(way, data)
        assert await way.get(1, 2) == [HIT, MISS]
        assert (transport.quarantined, transport.retired) == (0, 0)


def test_off_loopback_nixl_wants_a_network_that_is_trusted(tmp_path: Path) -> None:
    far = ListenConfig(bind="10.0.0.7:7720", insecure=True)
    with pytest.raises(ConfigError, match="trusted_network"):
        small_store(tmp_path, listen=far, peers=NIXL)
    trusted = replace(NIXL, trusted_network=True)
    assert small_store(tmp_path, listen=far, peers=trusted).peers.trusted_network


def test_who_may_only_read_may_only_read_by_nixl() -> None:
    assert form.with_nixl(frozenset({form.GET})) >= {form.NIXL_GET, form.NIXL_MEET, form.NIXL_END}
    assert form.NIXL_PUT not in form.with_nixl(frozenset({form.GET}))
    assert form.NIXL_GET not in form.with_nixl(frozenset({form.PUT}))
    assert form.with_nixl(frozenset()) == frozenset()


async def test_close_ends_calls_meetings_and_agents(tmp_path: Path, world: World) -> None:
    async with a_way(tmp_path, world) as (way, transport):
        await way.put(1)
        await left_behind(way, world, memoryview(bytearray(BLOCK_BYTES)))
        await transport.close()
        await transport.close()
        assert transport.quarantined == 0
        with pytest.raises(KvtierError):
            await way.get(1)
        askers = [one for name, one in world.agents.items() if "asker" in name]
        assert askers
        assert not any(one.is_open for one in askers)
