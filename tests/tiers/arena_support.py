"""An arena behind its socket, for tests: the server in this loop, clients on threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvtier.tiers.arena.client import ArenaClient, ArenaClientConfig, connect_arena
from kvtier.tiers.arena.server import ArenaListener, ArenaServer, ArenaServerConfig
from kvtier.tiers.arena.tier import ArenaConfig, ArenaTier

T = TypeVar("T")

SLAB_BYTES = 16 << 10
ARENA = ArenaConfig(256 << 10, SLAB_BYTES, 256)
CLIENT = ArenaClientConfig(segment_bytes=256 << 10, staging_bytes=128 << 10)


@dataclass
class Node:
    """One store process's arena."""

    tier: ArenaTier
    server: ArenaServer
    listener: ArenaListener
    path: Path

    def connect(self, config: ArenaClientConfig = CLIENT) -> ArenaClient:
        """A session; blocks, so call it on a thread."""
        return connect_arena(self.path, config)


@asynccontextmanager
async def node(
    directory: Path,
    config: ArenaServerConfig | None = None,
    arena: ArenaConfig = ARENA,
) -> AsyncIterator[Node]:
    tier = ArenaTier(arena)
    server = ArenaServer(tier, config or ArenaServerConfig(), time.monotonic)
    path = directory / "arena.sock"
    listener = ArenaListener(server, path)
    listener.start()
    try:
        yield Node(tier, server, listener, path)
    finally:
        await listener.close()
        await tier.close()


async def on_thread(work: Callable[[], T]) -> T:
    """Run what blocks beside the loop."""
    return await asyncio.to_thread(work)
