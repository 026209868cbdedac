"""Stores and workers in network namespaces, an index on a node of its own, TLS and roles.

What must not live here: faults, what a test expects.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.client.store import BlockStoreClient, StoreClientConfig
from kvtier.sections import DialConfig
from kvtier.security import certs, files, new_principal
from tests.harness.netns import Node
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually_async
from tests.support.worker_cluster import TOKEN_BYTES

MIB = 1 << 20
INDEX_PORT, STORE_PORT, BULK_PORT, METRICS_PORT, WORKER_PORT = 7710, 7720, 7721, 7790, 7730
READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """The cluster's authority and tokens, in a folder that every node sees."""

    folder: Path

    def tls(self, node: Node, role: str) -> dict[str, TomlValue]:
        """Settings of a listener of a node."""
        principal = new_principal(f"{role}-{node.name}", role)
        cert, key = certs.issue_into(self.folder, principal, [node.address])
        return {"cert_file": str(cert), "key_file": str(key)}

    def token(self, name: str, role: str) -> Path:
        """The file with a caller's token. All are made before a service starts, which would not
        hear of later ones at once."""
        path = self.folder / f"{name}.token"
        if path.exists():
            return path
        token = certs.add_token(self.folder, new_principal(name, role))
        files.write_private(path, token.encode())
        return path

    @property
    def tokens_file(self) -> str:
        return str(self.folder / certs.TOKENS)

    @property
    def ca_file(self) -> str:
        return str(self.folder / certs.CA_CERT)


@dataclass(frozen=True, slots=True)
class StoreNode:
    """A node with a store, and perhaps a worker."""

    node: Node
    store: Process
    token: Path
    """Of a worker."""

    @property
    def run_dir(self) -> Path:
        return self.node.host_data_directory / "store" / "run"

    def client(self) -> BlockStoreClient:
        """As a worker of the node: over the store's socket, which files show everywhere."""
        dial = DialConfig(targets=(f"unix:{self.run_dir}/store.sock",), token_file=self.token)
        return BlockStoreClient(dial, StoreClientConfig(deadline_s=20.0))

    async def metric(self, line: str) -> float:
        """A value of the store's page of metrics, 0 where it has none yet."""
        page = await asyncio.to_thread(self._page)
        return float(next((r.split()[-1] for r in page if r.startswith(f"{line} ")), 0.0))

    def _page(self) -> list[str]:
        script = (
            "import urllib.request as u;"
            f"page = u.urlopen('http://127.0.0.1:{METRICS_PORT}/metrics', timeout=30);"
            "print(page.read().decode())"
        )
        return self.node.run("python3", "-c", script).splitlines()


async def start(runner: ProcessRunner, launch: Launch) -> Process:
    """Start a service of a node and wait until it says that it serves."""
    process = await asyncio.to_thread(runner.start, replace(launch, ready=None))

    async def serves() -> bool:
        assert process.alive, process.log_text()
        return "serving" in process.log_text()

    await eventually_async(serves, READY_S, f"{launch.name} serves")
    return process


async def start_index(runner: ProcessRunner, node: Node, keys: Credentials) -> Process:
    settings: dict[str, TomlValue] = {
        "listen": {
            "bind": f"{node.address}:{INDEX_PORT}",
            "tokens_file": keys.tokens_file,
            "tls": keys.tls(node, "index"),
        }
    }
    path = runner.config_file(f"index-{node.name}.toml", settings)
    argv = kvtier_command("index", "--config", str(path))
    return await start(runner, Launch(f"index-{node.name}", argv, prefix=node.prefix))


async def start_store(
    runner: ProcessRunner, node: Node, index: Node, keys: Credentials, **settings: TomlValue
) -> StoreNode:
    """A store that reads others over TLS with a token of its own."""
    name = f"store-{node.name}"
    defaults: dict[str, TomlValue] = {
        "data_dir": str(node.data_directory / "store"),
        "instance": name,
        "node": node.name,
        "drain_ms_max": 1000,
        "listen": {
            "bind": f"{node.address}:{STORE_PORT}",
            "tokens_file": keys.tokens_file,
            "tls": keys.tls(node, "store"),
        },
        "bulk": {"port": BULK_PORT},
        "index": {
            "targets": [f"{index.address}:{INDEX_PORT}"],
            "token_file": str(keys.token(name, "store")),
            "tls": {"ca_file": keys.ca_file},
        },
        "telemetry": {"metrics_bind": f"127.0.0.1:{METRICS_PORT}"},
        "dram": {"bytes_max": 64 * MIB, "slab_bytes": 4 * MIB, "blocks_max": 4096},
        "nvme": {"enabled": False},
    }
    path = runner.config_file(f"{name}.toml", defaults | settings)
    argv = kvtier_command("store", "--config", str(path))
    process = await start(runner, Launch(name, argv, prefix=node.prefix))
    return StoreNode(node, process, keys.token(f"worker-{node.name}", "worker"))


async def start_worker(runner: ProcessRunner, node: StoreNode, **settings: TomlValue) -> Process:
    """A worker with a fake model on the loopback of a node, over the node's store."""
    name = f"worker-{node.node.name}"
    defaults: dict[str, TomlValue] = {
        "listen": {"bind": f"127.0.0.1:{WORKER_PORT}"},
        "instance": name,
        "node": node.node.name,
        "drain_ms_max": 1000,
        "cache": {"kv_memory_bytes": 8 * MIB},
        "model": {
            "model": "fake",
            "fake": {"prefill_tokens_per_s": 500.0, "token_bytes": TOKEN_BYTES},
        },
        "offload": {"lookup_ms_max": 5_000},
        "store": {
            "targets": [f"unix:{node.node.data_directory}/store/run/store.sock"],
            "token_file": str(node.token),
        },
    }
    path = runner.config_file(f"{name}.toml", defaults | settings)
    argv = kvtier_command("worker", "--config", str(path))
    return await start(runner, Launch(name, argv, prefix=node.node.prefix))


@dataclass(frozen=True, slots=True)
class Belongings:
    """What a node's processes have open: sockets and shared memory, by the kernel's names."""

    sockets: frozenset[str]
    mappings: frozenset[str]


def belongings(processes: Sequence[Process]) -> Belongings:
    """Of all processes of the sessions that these lead."""
    sockets: set[str] = set()
    mappings: set[str] = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        for descriptor in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:"):
                    sockets.add(target)
        for line in (folder / "maps").read_text().splitlines():
            if "/memfd:" in line or "/dev/shm" in line:
                fields = line.split()
                mappings.add(f"{fields[3]} {fields[4]}")
    return Belongings(frozenset(sockets), frozenset(mappings))
