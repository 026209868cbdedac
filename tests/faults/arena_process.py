"""Processes of the arena's fault tests: `python -m tests.faults.arena_process ROLE SOCKET ...`.

They say what they do in their log, one line each. Payloads describe themselves: every word of one
is the block's number and the version it was put with.
"""

import asyncio
import itertools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtier.core.frame import FrameName
from kvtier.errors import KvtierError
from kvtier.ports import BlockOwner, ByNames, GetRequest, GetStatus, PutRequest
from kvtier.tiers.arena import messages, taking
from kvtier.tiers.arena.client import ArenaClient, ArenaClientConfig, connect_arena
from kvtier.tiers.arena.directory import NOWHERE, NativeOperations
from kvtier.tiers.arena.holdings import Holdings, Wanted
from kvtier.tiers.arena.messages import BlockToCommit
from kvtier.tiers.arena.server import ArenaListener, ArenaServer, ArenaServerConfig
from kvtier.tiers.arena.tier import ArenaConfig, ArenaTier
from tests.harness.waiting import eventually
from tests.tiers.contract import name_of, soon

PAYLOAD_BYTES = 64 << 10
NUMBERS = 24
CLIENT = ArenaClientConfig(1 << 20, 512 << 10)
CONFIG = ArenaConfig(1 << 20, 128 << 10, 256)
"""Sixteen slots for twenty-four blocks: slots are reused all the time."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def described(number: int, version: int) -> bytes:
    return np.full(PAYLOAD_BYTES // 8, number << 32 | version, np.uint64).tobytes()


def version_of(number: int, payload: memoryview) -> int | None:
    """The version that a payload says it is of, or None if it is not one whole payload of it."""
    words = np.frombuffer(payload, np.uint64)
    first = int(words[0])
    whole = len(words) == PAYLOAD_BYTES // 8 and bool((words == first).all())
    return first & 0xFFFFFFFF if whole and first >> 32 == number else None


def put_request(number: int, version: int) -> PutRequest:
    return PutRequest(name_of(number), described(number, version), BlockOwner(1))


async def serve(path: Path) -> None:
    """An arena, until it is killed."""
    tier = ArenaTier(CONFIG)
    ArenaListener(ArenaServer(tier, ArenaServerConfig(), time.monotonic), path).start()
    await tier.put_many([put_request(n, 0) for n in range(4)], soon())
    say("ready")
    await asyncio.Event().wait()


async def churn(path: Path) -> None:
    """An arena whose blocks are dropped and put anew, in other slots, as fast as it can."""
    tier = ArenaTier(CONFIG)
    ArenaListener(ArenaServer(tier, ArenaServerConfig(), time.monotonic), path).start()
    say("ready")
    version = 0
    while True:
        version += 1
        for number in range(NUMBERS):
            await tier.drop(ByNames((name_of(number),)), soon())
            await tier.put_many([put_request(number, version)], soon())
            await asyncio.sleep(0)


def read(path: Path, rounds: int) -> None:
    """Read every block `rounds` times and say how it went."""
    client = connect_arena(path, CLIENT)
    hits, misses, wrong, versions = count_reads(client, rounds)
    say(f"hits {hits} misses {misses} wrong {wrong} versions {versions}")
    client.close()


def count_reads(client: ArenaClient, rounds: int) -> tuple[int, int, int, int]:
    """Hits, misses, wrong or torn payloads, and how many versions were seen.

    More rounds are read until some of each were seen: the writer may stand still for a while.
    """
    counts = dict.fromkeys(GetStatus, 0)
    wrong = 0
    versions: set[int | None] = set()
    targets = [memoryview(bytearray(PAYLOAD_BYTES)) for _ in range(NUMBERS)]
    requests = [GetRequest(name_of(n), targets[n], PAYLOAD_BYTES) for n in range(NUMBERS)]
    end = soon()
    for done in itertools.count():
        is_mixed = counts[GetStatus.HIT] and counts[GetStatus.MISS] and len(versions) > 1
        if done >= rounds and (is_mixed or time.monotonic() > end):
            break
        for number, result in enumerate(client.get_many(requests)):
            counts[result.status] += 1
            if result.payload is not None:
                version = version_of(number, result.payload)
                wrong += version is None
                versions.add(version)
    others = counts[GetStatus.CORRUPT] + counts[GetStatus.ERROR]
    return counts[GetStatus.HIT], counts[GetStatus.MISS], wrong + others, len(versions)


def hold(path: Path) -> None:
    """Hold leases and half-written reservations until it is killed."""
    client = connect_arena(path, CLIENT)
    leased = client.lease([name_of(n) for n in range(4)], 600_000, soon())
    memory = client.allocate(2 * PAYLOAD_BYTES)
    granted = client.reserve(
        [Wanted(name_of(n), PAYLOAD_BYTES, BlockOwner(1)) for n in (100, 101)], 60_000, soon()
    )
    memory[:PAYLOAD_BYTES] = described(100, 1)
    held = sum(one is not None for one in leased), sum(one.reservation_id > 0 for one in granted)
    say(f"holding {held[0]} leases {held[1]} reservations")
    signal.pause()


def late(path: Path, go: Path) -> None:
    """Reserve, write half, wait until told, write the rest and commit."""
    client = connect_arena(path, CLIENT)
    name: FrameName = name_of(200)
    wanted = Wanted(name, PAYLOAD_BYTES, BlockOwner(1))
    (granted,) = client.reserve([wanted], 100, soon())
    memory = client.allocate(PAYLOAD_BYTES)
    payload = described(200, 1)
    memory[: PAYLOAD_BYTES // 2] = payload[: PAYLOAD_BYTES // 2]
    say(f"reserved {granted.reservation_id > 0}")
    eventually(go.exists, 60, "told to go on")
    memory[PAYLOAD_BYTES // 2 :] = payload[PAYLOAD_BYTES // 2 :]
    offset = client.offset_in_segment(memory)
    assert offset is not None
    block = BlockToCommit(wanted, offset, None, granted.reservation_id)
    (result,) = client.commit([block], soon())
    say(f"commit {result.status} {result.reason}")
    client.close()


CRASH_POINTS: dict[str, tuple[object, str]] = {
    "slots": (Holdings, "prepare"),
    "copy": (taking, "take"),
    "directory": (NativeOperations, "publish"),
    "books": (Holdings, "_keep"),
    "evict": (NativeOperations, "remove"),
}
"""The steps of a client's put in the store."""


def kill_at(side: str, point: str, count: int) -> None:
    """Have this process killed before or after the step, at the `count`th time it is reached."""
    owner, attribute = CRASH_POINTS[point]
    step = getattr(owner, attribute)
    reached = itertools.count(1)

    def crash(*arguments: object) -> object:
        is_due = next(reached) == count
        if is_due and side == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(*arguments)
        if is_due and side == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    is_static = owner is NativeOperations
    setattr(owner, attribute, staticmethod(crash) if is_static else crash)


async def crash(path: Path, side: str, point: str) -> None:
    """A store that is killed at a step of a put, once some were taken."""
    kill_at(side, point, 4)
    await serve(path)


def stall(path: Path, go: Path) -> None:
    """Announce two blocks, hand over one, wait until told, hand over the other."""
    client = connect_arena(path, CLIENT)
    requests = [put_request(n, 1) for n in (200, 201)]
    payloads = [memoryview(described(n, 1)) for n in (200, 201)]
    places, sizes = [NOWHERE] * 2, [PAYLOAD_BYTES] * 2
    client.send(messages.pack_begin(7, requests, places, sizes), soon())
    client.give(payloads[:1], 7, soon())
    say("begun")
    eventually(go.exists, 60, "told to go on")
    client.give(payloads[1:], 7, soon())
    tag, count, body = client.receive(soon())
    say(f"put {tag} {[str(one.status) for one in messages.parse_results(count, body)]}")
    client.close()


def small(arena_bytes: int) -> None:
    """Ask for an arena that this process may not have."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        ArenaTier(ArenaConfig(arena_bytes, 1 << 20))
    except KvtierError as error:
        say(f"refused {type(error).__name__}")


ROLES: dict[str, Callable[[list[str]], None]] = {
    "store": lambda rest: asyncio.run(serve(Path(rest[0]))),
    "churn": lambda rest: asyncio.run(churn(Path(rest[0]))),
    "read": lambda rest: read(Path(rest[0]), int(rest[1])),
    "hold": lambda rest: hold(Path(rest[0])),
    "late": lambda rest: late(Path(rest[0]), Path(rest[1])),
    "crash": lambda rest: asyncio.run(crash(Path(rest[0]), rest[1], rest[2])),
    "stall": lambda rest: stall(Path(rest[0]), Path(rest[1])),
    "small": lambda rest: small(int(rest[0])),
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](sys.argv[2:])
