"""Clients of the store's fault tests: `python -m tests.faults.store_client_process ROLE RUN_DIR`.

They say what they do in their log, one line each.
"""

import asyncio
import sys
from pathlib import Path

from kvtier.core.checksum import checksum
from kvtier.ports import BlockOwner
from kvtier.tiers.arena.client import ArenaClientConfig, connect_arena
from kvtier.tiers.arena.holdings import Wanted
from kvtier.tiers.arena.messages import BlockToCommit
from kvtier.wire import blocks, rpc, transport
from kvtier.wire import messages as pb
from tests.harness.waiting import eventually
from tests.support.store_cluster import BLOCK, MIB, described
from tests.tiers.contract import name_of, soon

CONFIG = ArenaClientConfig(segment_bytes=2 * MIB, staging_bytes=MIB)
WRITER_TTL_MS = 300


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def wanted(number: int) -> Wanted:
    return Wanted(name_of(number), BLOCK, BlockOwner(1))


async def hold(run_dir: Path) -> None:
    """Hold leases of blocks 1 to 3 by both ways, and reservations half written; until killed."""
    arena = connect_arena(run_dir / "arena.sock", CONFIG)
    leased = arena.lease([name_of(1), name_of(2)], 60_000, soon())
    granted = arena.reserve([wanted(n) for n in range(100, 104)], 60_000, soon())
    arena.allocate(BLOCK)[: BLOCK // 2] = described(100)[: BLOCK // 2]
    channel = transport.new_channel(f"unix:{run_dir / 'store.sock'}")
    request = pb.AcquireRequest(names=blocks.names_to([name_of(3)]), ttl_ms=60_000)
    call = rpc.call(channel, rpc.STORE, "Acquire")(request)
    answer = await call.read()
    reserving = pb.ReserveBlocksRequest(
        names=blocks.names_to([name_of(200), name_of(201)]),
        lengths=blocks.u64s([BLOCK, BLOCK]),
        ttl_ms=500,
    )
    reserved = await rpc.call(channel, rpc.STORE, "Reserve")(reserving)
    good = all(leased) and all(g.reservation_id for g in granted) and answer.statuses == b"\0"
    say("holding" if good and reserved.statuses == bytes(2) else "failed")
    await call.read()


def write_late(run_dir: Path) -> None:
    """Reserve block 1, be stopped for longer than that lasts, then commit it and say how it was."""
    arena = connect_arena(run_dir / "arena.sock", CONFIG)
    granted = arena.reserve([wanted(1)], WRITER_TTL_MS, soon())
    memory = arena.allocate(BLOCK)
    say("reserved" if granted[0].reservation_id else "failed")
    eventually((run_dir / "go").exists, 60, "leave to go on")
    memory[:] = described(1, version=66)
    offset = arena.offset_in_segment(memory)
    assert offset is not None
    block = BlockToCommit(wanted(1), offset, checksum(memory), granted[0].reservation_id)
    [result] = arena.commit([block], soon())
    say(f"committed {result.status} {result.reason}")
    for version in range(1000):
        memory[:] = described(1, version)
    say("done")


def main() -> None:
    role, run_dir = sys.argv[1], Path(sys.argv[2])
    if role == "hold":
        asyncio.run(hold(run_dir))
    else:
        write_late(run_dir)


if __name__ == "__main__":
    main()
