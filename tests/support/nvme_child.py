"""Programs that tests run on an NVMe tier in a process of their own, to break it or its disk.

    python -m tests.support.nvme_child NAME DIRECTORY [ARGUMENT ...]

Each prints lines that the test waits for; files in the test's directory say when to go on.
"""

import asyncio
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvtier.core.frame import FrameName, KeyKind
from kvtier.ports import BlockOwner, ByScope, GetRequest, GetStatus, PutRequest, PutStatus
from kvtier.tiers.nvme.archive import Archive
from kvtier.tiers.nvme.catalog import Catalog
from kvtier.tiers.nvme.home import Home
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.segments import Segment, Stage
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.types import Fingerprint, ScopeId
from tests.harness.waiting import eventually, eventually_async

NAMESPACE = Fingerprint(b"crash-loop".ljust(32, b"\0"))
PATIENCE_S = 20.0


def block_name(number: int) -> FrameName:
    return FrameName(KeyKind.PREFIX_KEY, number.to_bytes(32, "little"), NAMESPACE)


def block_bytes(number: int) -> bytes:
    """Bytes that say whose they are, of a length that only the number says."""
    rng = random.Random(number)
    return rng.randbytes(rng.choice([1, 100, 4096, 30_000]))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def soon() -> float:
    return time.monotonic() + PATIENCE_S


async def told(path: Path) -> None:
    """Wait for a file that the test makes."""

    await asyncio.to_thread(eventually, path.exists, PATIENCE_S, f"{path.name} is there")


async def get(
    tier: NvmeTier, number: int, deadline_s: float | None = None
) -> tuple[GetStatus, str]:
    """Read into memory of the caller's, and check every byte of a hit."""
    expected = block_bytes(number)
    into = memoryview(bytearray(len(expected)))
    request = GetRequest(block_name(number), into, len(expected))
    (result,) = await tier.get_many([request], deadline_s or soon())
    if result.is_hit:
        assert bytes(into) == expected, "wrong bytes"
    return result.status, result.reason


async def put(tier: NvmeTier, *numbers: int) -> list[tuple[PutStatus, str]]:
    requests = [PutRequest(block_name(n), block_bytes(n), BlockOwner(1)) for n in numbers]
    return [(r.status, r.reason) for r in await tier.put_many(requests, soon())]


def forget_cached(tier: NvmeTier) -> None:
    """Drop the tier's segments from the page cache."""
    for path in {at.path for name in tier.names() if (at := tier.locate(name)) is not None}:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


async def write(directory: Path, acks: str, start: str, batch: str, bytes_max: str) -> None:
    """Put blocks for ever; note each that was acknowledged, with the time, in a file."""
    config = NvmeConfig(directory, int(bytes_max), segment_bytes=2 << 20)
    tier = await NvmeTier.open(config)
    await write_into(tier, acks, int(start), int(batch))


async def write_into(tier: NvmeTier, acks: str, number: int, count: int) -> None:
    """See `write`."""
    log = os.open(acks, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    while True:
        numbers = range(number, number + count)
        results = await put(tier, *numbers)
        done = [n for n, (status, _) in zip(numbers, results, strict=True) if status == "stored"]
        os.write(log, "".join(f"{n} {time.monotonic()}\n" for n in done).encode())
        number += count


CRASH_POINTS: dict[str, tuple[type, str]] = {
    "generation": (Home, "begin_generation"),
    "state": (Home, "_write_state"),
    "segment": (Segment, "create"),
    "payload": (Stage, "write_run"),
    "publish": (Archive, "publish"),
    "index": (Catalog, "save"),
    "seal": (Segment, "seal"),
    "evict": (Archive, "retire"),
    "unlink": (Segment, "retire"),
}
"""The steps of a write, and of what makes room for one."""


def kill_at(side: str, point: str, count: int) -> None:
    """Have this process killed before or after the step, at the `count`th time it is reached."""
    owner, attribute = CRASH_POINTS[point]
    step = getattr(owner, attribute)
    reached = itertools.count(1)

    def crash(*arguments: object, **named: object) -> object:
        is_due = next(reached) == count
        if is_due and side == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = step(*arguments, **named)
        if is_due and side == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, attribute, crash)


async def crash(directory: Path, acks: str, side: str, point: str, count: str) -> None:
    """`write` into a small tier, until this process is killed at a step of a write."""
    kill_at(side, point, int(count))
    tier = await NvmeTier.open(NvmeConfig(directory, 24 << 20, segment_bytes=2 << 20))
    await write_into(tier, acks, 0, 16)


async def drop_scope(directory: Path) -> None:
    """Drop a scope, say so, and wait to be killed."""
    tier = await NvmeTier.open(NvmeConfig(directory))
    requests = [
        PutRequest(block_name(n), block_bytes(n), BlockOwner(1, ScopeId("secret" * (n % 2))))
        for n in range(20)
    ]
    await tier.put_many(requests, soon())
    await tier.settle(soon())
    dropped = await tier.drop(ByScope(ScopeId("secret")), soon())
    say(f"dropped {dropped}")
    await asyncio.sleep(PATIENCE_S)


async def failing_write(directory: Path) -> None:
    """Two good puts, one that the disk refuses, one good put; then all reads."""
    tier = await NvmeTier.open(NvmeConfig(directory))
    results = [(await put(tier, n))[0] for n in range(100, 104)]
    say(" ".join(status.value for status, _ in results))
    say(f"reason {results[2][1]}")
    found = [await get(tier, n) for n in range(100, 104)]
    say(" ".join(status.value for status, _ in found))
    say(f"quarantined {tier.health().disk.segments_quarantined}")
    await tier.close()


async def failing_read(directory: Path) -> None:
    """Cold reads of blocks 0 to 9, one at a time."""
    tier = await NvmeTier.open(NvmeConfig(directory))
    forget_cached(tier)
    found = [await get(tier, n) for n in range(10)]
    say(" ".join(status.value for status, _ in found))
    again = [await get(tier, n) for n in range(10)]
    say(" ".join(status.value for status, _ in again))
    health = tier.health()
    say(f"failures {health.disk.read_failures} given up {health.disk.segments_quarantined}")
    await tier.close()


async def stuck_read(directory: Path) -> None:
    """A read that the disk sits on: its caller's memory is its own again at the deadline."""
    tier = await NvmeTier.open(NvmeConfig(directory, readers_count=1))
    forget_cached(tier)
    into = memoryview(bytearray(len(block_bytes(0))))
    request = GetRequest(block_name(0), into)
    (result,) = await tier.get_many([request], time.monotonic() + 0.2)
    say(f"first {result.status.value}")
    pattern = b"\xa5" * into.nbytes
    into[:] = pattern
    say(f"second {(await get(tier, 1))[0].value}")  # the thread is back
    say(f"untouched {bytes(into) == pattern}")
    say(f"third {(await get(tier, 0))[0].value}")
    await tier.close()


async def hanging_reads(directory: Path) -> None:
    """Reads that all hang until the breaker opens; then the disk is well again."""
    tier = await NvmeTier.open(NvmeConfig(directory, readers_count=2, stall_s=0.01))
    forget_cached(tier)
    statuses = []
    for _ in range(20):
        statuses.append(await get(tier, 0, time.monotonic() + 0.05))
        if statuses[-1][1] == "breaker_open":
            break
    say(f"timeouts {sum(status is GetStatus.TIMEOUT for status, _ in statuses)}")
    say(f"then {statuses[-1][1]}; open {tier.health().reads_open}")
    await told(directory.parent / "well")

    async def hit() -> bool:
        return (await get(tier, 0))[0] is GetStatus.HIT

    await eventually_async(hit, PATIENCE_S, "reads are hits again")
    say("hits again")
    await tier.close()


async def failing_index(directory: Path) -> None:
    """The disk refuses the index: reads go on, writes are refused, then a new index is built."""
    tier = await NvmeTier.open(NvmeConfig(directory))
    say("ready")
    await told(directory.parent / "begin")
    say(f"put {(await put(tier, 100))[0][0].value}")

    async def refused() -> bool:
        (status, reason), *_ = await put(tier, 101)
        return (status, reason) == (PutStatus.REFUSED, "read_only")

    await eventually_async(refused, PATIENCE_S, "writes are refused")
    say(f"condition {tier.health().condition.value}; read {(await get(tier, 0))[0].value}")
    await told(directory.parent / "well")

    async def taken() -> bool:
        return (await put(tier, 102))[0][0] in {PutStatus.STORED, PutStatus.DUPLICATE}

    await eventually_async(taken, PATIENCE_S, "writes are taken again")
    say(f"condition {tier.health().condition.value}; rebuilt {tier.health().disk.index_rebuilds}")
    await tier.close()


PROGRAMS: dict[str, Callable[..., Awaitable[None]]] = {
    function.__name__: function
    for function in (
        write,
        crash,
        drop_scope,
        failing_write,
        failing_read,
        stuck_read,
        hanging_reads,
        failing_index,
    )
}


async def main() -> None:
    program, directory, *rest = sys.argv[1:]
    await PROGRAMS[program](Path(directory), *rest)


if __name__ == "__main__":
    asyncio.run(main())
