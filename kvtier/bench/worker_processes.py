"""Stores and workers of the worker bench, as processes, and a client that takes their time.

What must not live here: what is measured.
"""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.bench.toml_text import toml_text
from kvtier.errors import BackendError, UnavailableError

MIB: Final = 1 << 20
_START_S: Final = 300.0
_END_S: Final = 20.0
_ANSWER_S: Final = 300.0
_POLL_S: Final = 0.05
_PORT: Final = re.compile(rb"\bserving\b.*\bport\D{1,3}(\d+)")
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to, and when."""

    ttft_s: float
    """From sending the request to its first token."""
    tokens: tuple[int, ...]
    cached: Mapping[str, int]
    """Prompt tokens that were not computed, by tier; those with none are left out."""


@dataclass(slots=True)
class Service:
    """One `kvtier NAME` process."""

    name: str
    config: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        """Start it and wait until it serves."""
        self.starts += 1
        log = self.config.with_suffix(f".{self.starts}.log")
        script = Path(sys.executable).parent / "kvtier"
        with log.open("wb") as out:
            self.process = subprocess.Popen(  # noqa: S603 (our own entry point)
                [str(script), self.name, "--config", str(self.config)], stdout=out, stderr=out
            )
        end = time.monotonic() + _START_S
        while (found := _PORT.search(log.read_bytes())) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                said = log.read_text(errors="replace")[-2000:]
                status = self.process.poll()
                raise UnavailableError(f"kvtier {self.name} does not start ({status}):\n{said}")
            time.sleep(_POLL_S)
        self.port = int(found[1])

    def stop(self) -> None:
        """End it. Idempotent."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """Of a store for one measurement."""

    dram_bytes: int
    nvme_bytes: int = 0
    """0: without that tier."""


@dataclass(slots=True)
class StoreNode:
    """A store, its directory and the address for workers."""

    service: Service
    directory: Path

    @property
    def target(self) -> str:
        return f"unix:{self.directory}/run/store.sock"

    def forget_dram(self) -> None:
        """End it, drop what the kernel remembers of its files, start it: only NVMe has blocks."""
        self.service.stop()
        self.drop_file_cache()
        self.service.start()

    def drop_file_cache(self) -> None:
        """The next reads are the disk's. Waits until the files are written."""
        for path in self.directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(slots=True)
class Worker:
    """A worker and a connection to it."""

    service: Service
    salt: str | None = None
    _connection: http.client.HTTPConnection | None = field(default=None, init=False)

    def restart(self) -> None:
        """End it and start it: its L1 is empty."""
        self.disconnect()
        self.service.stop()
        self.service.start()

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, prompt: Sequence[int], tokens_count: int) -> Answer:
        """Generate greedily; takes the time of the first token."""
        body = json.dumps(
            {
                "model": "bench",
                "prompt": list(prompt),
                "max_tokens": tokens_count,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        ).encode()
        headers = {"content-type": "application/json", "x-kvtier-explain": "1"}
        connection = self._connected()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise BackendError(f"a worker answered {response.status}: {response.read()[:500]!r}")
        return streamed(response, began)

    def metric(self, name: str) -> float:
        """The sum of all samples of a metric."""
        connection = self._connected()
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
        lines = [line for line in page.splitlines() if re.match(rf"{name}[ {{]", line)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_saved(self, blocks_count: int) -> None:
        """Until so many blocks, since its start, were written below."""
        end = time.monotonic() + _START_S
        while self.metric("kvtier_worker_saved_blocks_total") < blocks_count:
            if time.monotonic() > end:
                raise UnavailableError(f"{blocks_count} blocks were not written below")
            time.sleep(_POLL_S)

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(
                "127.0.0.1", self.service.port, timeout=_ANSWER_S
            )
            self._connection.connect()
        return self._connection


def streamed(response: http.client.HTTPResponse, began: float) -> Answer:
    """Read a completion's stream to its end. BackendError for one without a token."""
    first_s: float | None = None
    tokens: list[int] = []
    cached: dict[str, int] = {}
    while line := response.readline():
        if not line.startswith(_DATA) or line.startswith(_DATA + _DONE):
            continue
        chunk = json.loads(line[len(_DATA) :])
        for choice in chunk["choices"]:
            if choice["token_ids"] and first_s is None:
                first_s = time.perf_counter() - began
            tokens += choice["token_ids"]
        usage = chunk.get("usage")
        if usage is not None:
            by_tier = usage["kvtier"]["cached_tokens"]
            cached = {tier: count for tier, count in by_tier.items() if count}
    if first_s is None:
        raise BackendError("a worker answered without a token")
    return Answer(first_s, tuple(tokens), cached)


class Node:
    """A machine of the bench: the services that it started end with it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._services: list[Service] = []
        self._workers: list[Worker] = []

    def store(
        self, name: str, sizes: StoreSizes, more: Mapping[str, object] | None = None
    ) -> StoreNode:
        """Start a store that writes to NVMe, where it has it, at once, and never promotes; `more`
        is further configuration."""
        data = self._directory / name
        table: dict[str, object] = {
            "data_dir": str(data),
            "promote_touches_min": 1_000_000,
            "listen": {"bind": "127.0.0.1:0"},
            "dram": {"bytes_max": sizes.dram_bytes, "segments_bytes_max": 2048 * MIB},
            "nvme": {"enabled": False},
        }
        if sizes.nvme_bytes:
            table["nvme"] = {"bytes_max": sizes.nvme_bytes, "write_policy": "on_seal"}
        return StoreNode(self._started("store", name, table | dict(more or {})), data)

    def index(self, name: str) -> str:
        """Start an index; its address."""
        table = {"listen": {"bind": "127.0.0.1:0"}}
        return f"127.0.0.1:{self._started('index', name, table).port}"

    def router(self, name: str, table: Mapping[str, object]) -> int:
        """Start a router; its port."""
        own = {"listen": {"bind": "127.0.0.1:0"}}
        return self._started("router", name, own | dict(table)).port

    def worker(self, name: str, table: Mapping[str, object]) -> Worker:
        """Start a worker; `table` is its configuration besides its address."""
        own: dict[str, object] = {
            "listen": {"bind": "127.0.0.1:0"},
            "instance": name,
            "node": "bench",
            "hot_set": {"write_ms_max": 0, "prefetch_ms_max": 0},  # a restart empties L1
        }
        worker = Worker(self._started("worker", name, own | dict(table)))
        self._workers.append(worker)
        return worker

    def end(self) -> None:
        """End all, youngest first."""
        for worker in self._workers:
            worker.disconnect()
        for service in reversed(self._services):
            service.stop()

    def _started(self, command: str, name: str, table: Mapping[str, object]) -> Service:
        config = self._directory / f"{name}.toml"
        config.write_text(toml_text(table), encoding="utf-8")
        service = Service(command, config)
        self._services.append(service)
        service.start()
        return service


@contextlib.contextmanager
def a_node(directory: Path | None) -> Iterator[Node]:
    """A node with a temporary directory below `directory`, the system's own where None."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as folder:
        node = Node(Path(folder))
        try:
            yield node
        finally:
            node.end()
