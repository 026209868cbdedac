"""The bulk channel's far end against callers that say nonsense, stop in the middle, or are many."""

import asyncio
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.peers import bulk_wire as form
from kvtier.peers.bulk_server import CONNECTIONS_MAX
from kvtier.wire import blocks
from tests.harness.waiting import eventually_async
from tests.peers.test_transports import HIT, MISS, Way, a_way
from tests.tiers.contract import BLOCK_BYTES, NAMESPACE, name_of, payload_of

GREETING = form.GREETING.pack(form.MAGIC, form.VERSION, 0, 2) + b"s1"
PUT_HEAD = form.REQUEST.pack(form.PUT, 1, 32, 0, 0, 2, 1000, 0, NAMESPACE, 7, 0)
KEYS = name_of(1).key + name_of(2).key
LENGTHS = blocks.u64s([BLOCK_BYTES] * 2)
PUT = GREETING + PUT_HEAD + KEYS + LENGTHS + blocks.u64s([1, 2])


def get_head(count: int, key_bytes: int = 32, kind: int = 1, op: int = form.GET) -> bytes:
    return GREETING + form.REQUEST.pack(op, kind, key_bytes, 0, 0, count, 1000, 0, NAMESPACE, 0, 0)


NONSENSE = {
    "nothing": b"",
    "half a greeting": GREETING[:5],
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
    "another version": form.GREETING.pack(form.MAGIC, 99, 0, 0),
    "a long token": form.GREETING.pack(form.MAGIC, form.VERSION, 65_535, 0),
    "no such operation": get_head(1, op=9) + bytes(32),
    "no blocks": get_head(0),
    "too many blocks": get_head(2**32 - 1) + bytes(32),
    "no such kind of key": get_head(1, kind=7) + bytes(32),
    "a long key": get_head(1, key_bytes=255) + bytes(255),
    "a short prefix key": get_head(1, key_bytes=8) + bytes(8),
    "half of the keys": get_head(5) + bytes(32),
    "a put without payload": PUT,
    "half of a payload": PUT + payload_of(1)[:100],
    "a length that cannot be": GREETING + PUT_HEAD + KEYS + blocks.u64s([2**63] * 2) + bytes(16),
}


async def said(way: Way, data: bytes) -> None:
    """Say something to the bulk port and hang up."""
    port = way.running.bulk_port

    def say() -> None:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass
            except TimeoutError:
                raise
            except OSError:
                return  # it has hung up already, at whatever point of this

    await asyncio.to_thread(say)


async def reservations_are_back(way: Way) -> None:
    async def are_back() -> bool:
        return way.running.arena.stats().blocks_reserved == 0

    await eventually_async(are_back, 30, "slots of a broken put come back")


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
async def test_nonsense_ends_its_connection_and_nothing_else(tmp_path: Path, data: bytes) -> None:
    async with a_way(tmp_path, "bulk") as way:
        assert await way.put(3) == ["stored"]
        await said(way, data)
        assert await way.get(1, 2, 3) == [MISS, MISS, HIT]
        await reservations_are_back(way)
        assert await way.put(1, 2) == ["stored", "stored"]


async def test_altered_conversations_never_store_or_give_wrong_bytes(tmp_path: Path) -> None:
    dice = random.Random(7)
    whole = [PUT + payload_of(1) + payload_of(2), get_head(2) + KEYS]
    changes: list[Callable[[bytearray], None]] = [
        lambda data: data.__setitem__(dice.randrange(len(data)), dice.randrange(256)),
        lambda data: data.__delitem__(slice(dice.randrange(len(data)), None)),
        lambda data: data.extend(dice.randbytes(dice.randrange(100))),
    ]
    async with a_way(tmp_path, "bulk") as way:
        for _ in range(60):
            data = bytearray(dice.choice(whole))
            for _ in range(dice.randrange(1, 4)):
                if data:
                    dice.choice(changes)(data)
            await said(way, bytes(data))
        await reservations_are_back(way)
        # The checksums that were declared are those of no payload: nothing was ever published.
        assert await way.get(1, 2) == [MISS, MISS]
        assert await way.put(1, 2) == ["stored", "stored"]
        assert await way.get(1, 2) == [HIT, HIT]


async def test_more_callers_than_there_is_room_for_are_hung_up_on(tmp_path: Path) -> None:
    async with a_way(tmp_path, "bulk") as way:
        address = ("127.0.0.1", way.running.bulk_port)
        callers = [
            await asyncio.to_thread(socket.create_connection, address, 10)
            for _ in range(CONNECTIONS_MAX)
        ]
        try:
            late = await asyncio.to_thread(socket.create_connection, address, 10)
            assert await asyncio.to_thread(late.recv, 1) == b""
            late.close()
        finally:
            for caller in callers:
                caller.close()
        assert await way.put(1) == ["stored"]
