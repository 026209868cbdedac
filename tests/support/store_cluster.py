"""Store processes of a fault test, clients of them, and payloads that say what they are.

What must not live here: faults, what a test expects of them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.client.store import BlockStoreClient, ReadTerms, SharedMemory, StoreClientConfig
from kvtier.ports import GetResult
from kvtier.sections import DialConfig
from kvtier.tiers.arena.client import ArenaClientConfig
from kvtier.types import Tier
from kvtier.wire import messages as pb
from kvtier.wire import rpc, transport
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import grpc_ready
from tests.harness.toml_text import TomlValue
from tests.tiers.contract import name_of

MIB = 1 << 20
BLOCK = 64 << 10
SERVICE = "kvtier.v1.Store"
CLIENT = StoreClientConfig(
    deadline_s=5.0, arena=ArenaClientConfig(segment_bytes=2 * MIB, staging_bytes=MIB)
)


@dataclass(frozen=True, slots=True)
class StoreProcess:
    """One `kvtier store` in a directory of its own that survives restarts."""

    process: Process
    port: int
    run_dir: Path

    @property
    def socket(self) -> str:
        return f"unix:{self.run_dir / 'store.sock'}"

    @property
    def arena_socket(self) -> Path:
        return self.run_dir / "arena.sock"

    def client(self, *, remote: bool = False) -> BlockStoreClient:
        """A client on this machine; `remote`: over TCP, as one of another machine."""
        if remote:
            config = StoreClientConfig(deadline_s=5.0, shared_memory=SharedMemory.NEVER)
            return BlockStoreClient(DialConfig(targets=(f"127.0.0.1:{self.port}",)), config)
        return BlockStoreClient(DialConfig(targets=(self.socket,)), CLIENT)

    async def stats(self) -> pb.StoreStatsResponse:
        channel = transport.new_channel(f"127.0.0.1:{self.port}")
        try:
            call = rpc.call(channel, rpc.STORE, "Stats")
            answer: pb.StoreStatsResponse = await call(pb.StoreStatsRequest(), timeout=40)
            return answer
        finally:
            await channel.close()

    async def tier(self, tier: Tier) -> pb.StoreTierStats:
        return next(one for one in (await self.stats()).tiers if one.tier == tier)

    async def count(self, name: str) -> int:
        return next((c.count for c in (await self.stats()).counts if c.name == name), 0)

    def clean_log(self) -> str:
        """What it logged; fails where that shows an error that nobody handled."""
        text = self.process.log_text()
        assert "Traceback" not in text, text
        return text


def store_launch(
    runner: ProcessRunner, directory: Path, name: str = "store", **settings: TomlValue
) -> tuple[Launch, int]:
    """How to start a small store on loopback with a TOML file of its own, and its port."""
    port = free_port()
    defaults: dict[str, Any] = {
        "data_dir": str(directory),
        "drain_ms_max": 2000,
        "instance": name,
        "node": "node-1",
        "listen": {"bind": f"127.0.0.1:{port}"},
        "dram": {"bytes_max": 8 * MIB, "slab_bytes": MIB, "blocks_max": 4096},
        "nvme": {"bytes_max": 64 * MIB, "write_policy": "on_seal"},
    }
    path = runner.config_file(f"{name}.toml", defaults | settings)
    argv = kvtier_command("store", "--config", str(path))
    return Launch(name, argv, ready=grpc_ready(f"127.0.0.1:{port}", SERVICE)), port


def start_store(
    runner: ProcessRunner, directory: Path, name: str = "store", **settings: TomlValue
) -> StoreProcess:
    launch, port = store_launch(runner, directory, name, **settings)
    return StoreProcess(runner.start(launch), port, directory / "run")


def described(number: int, version: int = 0, size: int = BLOCK) -> bytes:
    """A payload whose every word is the block's number and a version."""
    return np.full(size // 8, number << 32 | version, np.uint64).tobytes()


def version_of(number: int, payload: memoryview) -> int | None:
    """The version that a payload says it is of, None if it is no whole payload of this block."""
    words = np.frombuffer(payload, np.uint64)
    first = int(words[0]) if len(words) else -1
    is_whole = bool(len(words)) and bool((words == first).all()) and first >> 32 == number
    return first & 0xFFFFFFFF if is_whole else None


async def put(client: BlockStoreClient, numbers: Sequence[int], version: int = 0) -> list[bool]:
    """Put blocks; which of them the store holds now."""
    payloads = [described(n, version) for n in numbers]
    return [r.is_held for r in await client.put_many([name_of(n) for n in numbers], payloads)]


async def get(client: BlockStoreClient, numbers: Sequence[int]) -> list[int | None]:
    """The versions that are read, None for a miss; fails on any other bytes."""
    results = await client.get_many(
        [name_of(n) for n in numbers], None, ReadTerms(payload_bytes=BLOCK)
    )
    return [_version(n, result) for n, result in zip(numbers, results, strict=True)]


def _version(number: int, result: GetResult) -> int | None:
    if not result.is_hit:
        return None
    assert result.payload is not None
    version = version_of(number, result.payload)
    assert version is not None, f"wrong bytes for block {number}"
    return version


def some_numbers(dice: random.Random, below: int, count: int) -> list[int]:
    return [dice.randrange(below) for _ in range(count)]
