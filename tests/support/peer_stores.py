"""Stores of several nodes and an index inside the test's process, and blocks between them.

What must not live here: faults, what a test expects.
"""

import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.ports import ByNames
from kvtier.sections import DialConfig, ListenConfig
from kvtier.types import HolderKind, Tier
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.main import RunningIndex
from kvtier_services.index.main import serve as serve_index
from kvtier_services.store.config import PeersSection
from kvtier_services.store.main import RunningStore
from tests.harness.waiting import eventually_async
from tests.support.store_service import BLOCK, Client, a_store, names, small_store
from tests.tiers.contract import payload_of, soon

PATIENT = PeersSection(deadline_ms=20_000, ask_ms=20_000)
"""No test of what peers give is to fail for a slow machine."""


@dataclass
class Nodes:
    """What runs, by name of the store."""

    index: RunningIndex
    stores: dict[str, RunningStore]
    clients: dict[str, Client]

    async def put(self, store: str, *numbers: int, size: int = BLOCK) -> None:
        """Put blocks and wait until the index knows of them."""
        assert set(await self.clients[store].put_numbers(*numbers, size=size)) == {"stored"}
        await self.told(store, *numbers)

    async def told(self, store: str, *numbers: int) -> None:
        async def is_told() -> bool:
            return self.held_by(store) >= hashes(*numbers)

        await eventually_async(is_told, 30, f"the index knows what {store} has")

    def held_by(self, store: str) -> set[int]:
        """Prefix hashes that the index knows of one store."""
        found: set[int] = set()
        for record in self.index.state.fleet.records():
            if record.key.kind is HolderKind.STORE and record.info.instance == store:
                for tier in (Tier.DRAM, Tier.NVME):
                    snapshot = self.index.state.fleet.index.snapshot(record.holder, tier, 0)
                    found.update(snapshot.hashes.tolist())
        return found

    async def get(self, store: str, *numbers: int, size: int = BLOCK) -> list[bool]:
        """Which blocks a store gives; other bytes than were put fail."""
        found = await self.clients[store].get(numbers, payload_bytes=size)
        for number, payload in zip(numbers, found, strict=True):
            assert payload in (None, payload_of(number, size))
        return [payload is not None for payload in found]

    def fetched(self, store: str) -> int:
        """Blocks that a store got from others."""
        return self.stores[store].store.stats().counts.fetched.get(Tier.PEER, 0)

    def metric(self, store: str, line: str) -> float:
        """A value of a store's page of metrics."""
        page = self.stores[store].metrics.render().decode()
        found = [row.split()[-1] for row in page.splitlines() if row.startswith(f"{line} ")]
        assert len(found) == 1, f"{line} is not there once"
        return float(found[0])

    async def drop(self, store: str, *numbers: int) -> int:
        return await self.stores[store].store.drop(ByNames(tuple(names(*numbers))), soon())


def hashes(*numbers: int) -> set[int]:
    return {int.from_bytes(name.key[:8], "little") for name in names(*numbers)}


@asynccontextmanager
async def some_nodes(directory: Path, *stores: str, **changes: Any) -> AsyncIterator[Nodes]:
    """An index, and a store of each name on a node of its own."""
    config = IndexConfig(listen=ListenConfig(bind="127.0.0.1:0"), drain_ms_max=0)
    async with AsyncExitStack() as stack:
        index = await stack.enter_async_context(serve_index(config, io.StringIO()))
        nodes = Nodes(index, {}, {})
        for name in stores:
            await start_node(stack, nodes, directory, name, **changes)
        yield nodes


async def start_node(
    stack: AsyncExitStack, nodes: Nodes, directory: Path, name: str, **changes: Any
) -> None:
    """One more store."""
    settings = {"peers": PATIENT, "node": f"node-of-{name}", "instance": name} | changes
    dial = DialConfig(targets=(f"127.0.0.1:{nodes.index.port}",))
    config = small_store(directory / name, index=dial, **settings)
    running, client = await stack.enter_async_context(a_store(config))
    nodes.stores[name], nodes.clients[name] = running, client
