"""The processes of the router bench: index, mock workers and routers, as an operator starts them.

What must not live here: what is sent to them.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvtier.bench.index_service_processes import BenchError, Program, index_arguments
from kvtier.bench.router_http import Connection, Reply, get, post
from kvtier.bench.router_mock import MODEL, MockSpec
from kvtier.bench.router_text import write_model

WORKERS: Final = 8
SEEN_S_MAX: Final = 30.0
SEEN_EVERY_S: Final = 0.1
_CLI: Final = "import sys; from kvtier.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """What is started."""

    mock: MockSpec = field(
        default_factory=lambda: MockSpec(tuple(f"w{number}" for number in range(WORKERS)))
    )
    lone: tuple[str, ...] = ()
    """Workers of `mock` that get a process of their own, to be killed."""
    indexes: int = 1
    """0: the routers know the workers by configuration alone."""
    routers: int = 1
    policy: str = "cache_aware"
    texts: Path | None = None
    """A model directory for the routers."""
    router_flags: tuple[str, ...] = ()


@dataclass(slots=True)
class Fleet:
    """Everything runs."""

    spec: FleetSpec
    indexes: list[Program]
    mocks: list[Program]
    mock_ports: list[int]
    routers: list[Program]
    ports: list[int]
    """Of the routers."""

    async def states(self) -> dict[str, dict[str, int]]:
        """What every worker did; workers of a dead process are left out."""
        found: dict[str, dict[str, int]] = {}
        for port in self.mock_ports:
            with contextlib.suppress(BenchError):
                found |= json.loads((await ask(port, get("/"))).body)
        return found

    async def slow_down(self, worker: str, factor: float) -> None:
        body = json.dumps({worker: factor}).encode()
        for port in self.mock_ports:
            with contextlib.suppress(BenchError):
                await ask(port, post("/", body))

    async def kill_worker(self, worker: str) -> None:
        """SIGKILL for the process of a lone worker."""
        await self.mocks[1 + self.spec.lone.index(worker)].kill()

    async def seen(self, count: int) -> None:
        """Wait until every router may send to so many workers. BenchError if it takes too long."""
        for port in self.ports:
            await _until_seen(port, count)


async def _until_seen(port: int, count: int) -> None:
    for _ in range(int(SEEN_S_MAX / SEEN_EVERY_S)):
        if await workers_seen(port) >= count:
            return
        await asyncio.sleep(SEEN_EVERY_S)
    raise BenchError(f"a router sees {await workers_seen(port)} of {count} workers")


async def ask(port: int, raw: bytes) -> Reply:
    """One request on a connection of its own."""
    connection = Connection(port)
    try:
        return await connection.request(raw)
    finally:
        connection.close()


async def workers_seen(port: int) -> int:
    """How many workers a router may send requests to."""
    page = (await ask(port, get("/metrics"))).body.decode()
    for line in page.splitlines():
        if line.startswith("kvtier_router_eligible_workers") and MODEL in line:
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


@contextlib.asynccontextmanager
async def running(spec: FleetSpec) -> AsyncIterator[Fleet]:
    """The fleet while entered, every worker known to every router."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(arguments: Sequence[str]) -> Program:
            program = await Program.start(arguments)
            stack.push_async_callback(program.stop)
            return program

        indexes = [await start(index_arguments()) for _ in range(spec.indexes)]
        targets = tuple([f"127.0.0.1:{await index.port()}" for index in indexes])
        mocks = []
        for names in _processes(spec):
            mock = replace(spec.mock, names=names, index=targets)
            mocks.append(await start(["-P", "-m", "kvtier.bench.router_mock", mock.dumps()]))
        mock_ports = [await mock.port() for mock in mocks]
        fleet = Fleet(spec, indexes, mocks, mock_ports, [], [])
        workers = {name: state["port"] for name, state in (await fleet.states()).items()}
        for number in range(spec.routers):
            arguments = _router_arguments(spec, number, targets, workers)
            fleet.routers.append(await start(["-c", _CLI, "router", *arguments]))
        fleet.ports += [await router.port() for router in fleet.routers]
        await fleet.seen(len(spec.mock.names))
        yield fleet
        for number, router in enumerate(fleet.routers):
            if words := router.last_words():
                raise BenchError(f"router {number} ended during the measurement, {words}")


def _processes(spec: FleetSpec) -> list[tuple[str, ...]]:
    together = tuple(name for name in spec.mock.names if name not in spec.lone)
    return [together, *((name,) for name in spec.lone)]


def _router_arguments(
    spec: FleetSpec, number: int, targets: Sequence[str], workers: dict[str, int]
) -> list[str]:
    flags = [
        "--listen-bind=127.0.0.1:0",
        "--admin-bind=",
        f"--instance=router-{number}",
        f"--policy={spec.policy}",
    ]
    if spec.texts is not None:
        flags.append(f"--texts={MODEL}={spec.texts}")
    if targets:
        flags += [f"--index-targets={target}" for target in targets]
    else:
        flags += [f"--static-workers={name}=127.0.0.1:{at} {MODEL}" for name, at in workers.items()]
    return [*flags, *spec.router_flags]


@contextlib.contextmanager
def model_directory(given: Path | None) -> Iterator[Path]:
    """A model directory while entered: the given one, or one that is written for the while."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        directory = Path(folder) / "model"
        write_model(directory)
        yield directory
