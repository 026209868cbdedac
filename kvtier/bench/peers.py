"""Blocks of another node's store over loopback TCP, against what TCP itself does meanwhile.

Every figure is a median of ratios: each batch of ours beside one of raw TCP between two processes,
of as many bytes from and into the same memory. Everything that is read is verified; TLS figures
stand beside those without. Beside them stands what a byte costs the busier of the two processes in
CPU time, ours over raw: that bounds the ratio from above, and other load hardly moves it. A third
batch is raw TCP whose ends hash what they move: what is lost there no verified transfer can win.
What must not live here: links of a network (the fault tests have them).
"""

import argparse
import asyncio
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from kvtier.bench import peers_split
from kvtier.bench.cpus import apart
from kvtier.bench.peers_raw import Area, Hashing, RawPeer
from kvtier.bench.report import Bar, Result
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import KvtierError, UnavailableError
from kvtier.local.loopback import free_port
from kvtier.peers import BulkTransport, GrpcTransport
from kvtier.peers.nixl_agent import is_installed
from kvtier.peers.nixl_transport import NixlTransport
from kvtier.ports import BlockOwner, GetRequest, PeerPlace, PeerTransport, PutRequest
from kvtier.sections import DialConfig, TlsConfig
from kvtier.security import certs, files, new_principal
from kvtier.types import Fingerprint, InstanceId, NodeId

MIB: Final = 1 << 20
SIZES: Final = (2 * MIB, 256 << 10)
BATCH_BYTES: Final = 64 * MIB
BARS: Final = {2 * MIB: 0.65, 256 << 10: 0.5}
FIRST_BLOCK_MS_MAX: Final = 1.0
START_S: Final = 120.0
CALL_S: Final = 30.0
NAMESPACE: Final = Fingerprint(b"peers" + bytes(27))
INSTANCE: Final = InstanceId("bench-store")
CREDENTIAL: Final = "bench.token"
WRITER: Final = 1


@dataclass(frozen=True, slots=True)
class Channel:
    """One way to the store, and what is held against a bar."""

    name: str
    tls: bool
    has_bar: bool

    @property
    def title(self) -> str:
        return f"{self.name} tls" if self.tls else self.name

    @property
    def part(self) -> str:
        """What `--only` calls it."""
        return self.title.replace(" ", "-")


CHANNELS: Final = (
    Channel("bulk", tls=False, has_bar=True),
    Channel("grpc", tls=False, has_bar=False),
    Channel("nixl", tls=False, has_bar=False),
    Channel("bulk", tls=True, has_bar=False),
    Channel("grpc", tls=True, has_bar=False),
)
SPLIT_PART: Final = "split"
PARTS: Final = (*(channel.part for channel in CHANNELS), SPLIT_PART)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=256, help="bytes of each figure")
    parser.add_argument("--calls", type=int, default=300, help="pairs of small calls")
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="measure only this part; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=None, help="pairs of split and whole prompts")
    parser.add_argument(
        "--quick", action="store_true", help="split with the tiny model; do not quote the figures"
    )


def run(arguments: argparse.Namespace) -> list[Result]:
    """Start stores and the far end of raw TCP, measure, end them; then the same with workers."""
    parts = arguments.only or [part for part in PARTS if part != "nixl" or is_installed()]
    results = _channel_rows([one for one in CHANNELS if one.part in parts], arguments)
    if SPLIT_PART in parts:
        sizes = peers_split.TINY if arguments.quick else peers_split.sizes_here()
        results += peers_split.split_rows(
            sizes if arguments.rounds is None else replace(sizes, rounds=arguments.rounds)
        )
    return results


def _channel_rows(wanted: Sequence[Channel], arguments: argparse.Namespace) -> list[Result]:
    cpus = os.sched_getaffinity(0)
    results: list[Result] = []
    try:
        for tls in (False, True):
            channels = [channel for channel in wanted if channel.tls is tls]
            if not channels:
                continue
            dram_bytes = (2 * len(channels) * arguments.mib * 5 // 256 + 2) * 64 * MIB
            nixl = any(channel.name == "nixl" for channel in channels)
            with a_store(tls, dram_bytes, nixl=nixl) as place, raw_peer() as raw:
                results += asyncio.run(_measured(channels, place, raw, arguments))
    finally:
        os.sched_setaffinity(0, cpus)
    return results


@dataclass(frozen=True, slots=True)
class Place:
    """A store that runs, and how to call it."""

    peer: PeerPlace
    dial: DialConfig
    pid: int


@contextmanager
def a_store(tls: bool, dram_bytes: int, *, nixl: bool) -> Iterator[Place]:
    """A store process without lower tiers; with TLS and a token, or NIXL, where asked for."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        folder = Path(directory)
        port, bulk_port = free_port(), free_port()
        lines = [
            f'data_dir = "{folder}/data"',
            f'instance = "{INSTANCE}"',
            "[dram]",
            f"bytes_max = {dram_bytes}",
            "[nvme]",
            "enabled = false",
            "[bulk]",
            f"port = {bulk_port}",
            "[listen]",
            f'bind = "localhost:{port}"',
        ]
        dial = DialConfig()
        if tls:
            lines += _secured(folder)
            dial = DialConfig(
                tls=TlsConfig(ca_file=folder / certs.CA_CERT), token_file=folder / CREDENTIAL
            )
        if nixl:
            lines += ["[peers]", 'transport = "nixl"']
        (folder / "store.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        script = Path(sys.executable).parent / "kvtier"
        process = subprocess.Popen(  # noqa: S603 (our own entry point)
            [str(script), "store", "--config", str(folder / "store.toml")],
            stderr=subprocess.DEVNULL,
        )
        try:
            apart(process.pid)
            grpc, bulk = f"localhost:{port}", f"localhost:{bulk_port}"
            yield Place(PeerPlace(INSTANCE, NodeId("bench"), grpc, bulk), dial, process.pid)
        finally:
            process.terminate()
            process.wait(START_S)


def _secured(folder: Path) -> list[str]:
    """An authority, a certificate for the store and a token for the bench; the store's settings."""
    certs.init(folder)
    cert, key = certs.issue_into(folder, new_principal("s1", "store"), ["localhost"])
    token = certs.add_token(folder, new_principal("bench", "worker"))
    files.write_private(folder / CREDENTIAL, token.encode())
    return [
        f'tokens_file = "{folder / certs.TOKENS}"',
        "[listen.tls]",
        f'cert_file = "{cert}"',
        f'key_file = "{key}"',
    ]


@contextmanager
def raw_peer() -> Iterator[RawPeer]:
    """The far end of raw TCP as a process, connected."""
    argv = [sys.executable, "-P", "-m", "kvtier.bench.peers_raw", str(2 * BATCH_BYTES)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)  # noqa: S603 (our own)
    with ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        apart(process.pid)
        assert process.stdout is not None
        stack.enter_context(process.stdout)
        peer = RawPeer(int(process.stdout.readline()), process.pid)
        stack.callback(peer.close)
        yield peer


@asynccontextmanager
async def opened(channel: Channel, place: Place) -> AsyncIterator[PeerTransport]:
    """The transport of a channel, once the store takes a block through it."""
    transport: PeerTransport
    match channel.name:
        case "bulk":
            transport = BulkTransport(place.dial)
        case "nixl":
            transport = NixlTransport(place.dial)
        case _:
            transport = GrpcTransport(place.dial)
    end = time.monotonic() + START_S
    try:
        while True:
            try:
                name = name_of(f"{channel.name} begins", 0)
                put = [PutRequest(name, b"first", BlockOwner(WRITER))]
                [result] = await transport.put_many(place.peer, put, time.monotonic() + CALL_S)
                if result.is_held:
                    break
            except KvtierError as error:
                if time.monotonic() > end:
                    raise UnavailableError("the store does not start") from error
            await asyncio.sleep(0.05)
        yield transport
    finally:
        await transport.close()


async def _measured(
    channels: Sequence[Channel], place: Place, raw: RawPeer, arguments: argparse.Namespace
) -> list[Result]:
    results: list[Result] = []
    size_bytes = max(arguments.mib * MIB // BATCH_BYTES, 2) * BATCH_BYTES
    source = np.random.default_rng(1).integers(0, 255, size_bytes, np.uint8)
    target = np.ones(size_bytes, np.uint8)
    for channel in channels:
        async with opened(channel, place) as transport:
            for block in SIZES:
                batches = Batches(
                    transport, place.peer, raw, f"{channel.name}{channel.tls}{block}", place.pid
                )
                put = await batches.put(source, block)
                get = await batches.get(source, target, block)
                results += _rows(channel, block, "put", put)
                results += _rows(channel, block, "get", get)
            results += await _first_block(channel, transport, place.peer, arguments.calls)
    return results


@dataclass(frozen=True, slots=True)
class Rate:
    """Medians over the batches of one figure."""

    ratio: float
    bytes_per_s: float
    raw_bytes_per_s: float
    cpu_ratio: float
    """CPU time of the busier process, raw TCP's over ours."""
    hashed_ratio: float
    """Of raw TCP whose ends hash: what nothing that verifies can exceed."""
    hashed_cpu_ratio: float


def _rows(channel: Channel, block: int, what: str, rate: Rate) -> list[Result]:
    way = f"{channel.title} {what} {block >> 10} KiB"
    bar = BARS[block] if channel.has_bar else None
    return [
        Result(f"{way} / raw tcp", rate.ratio, "x", bar),
        Result(f"{way} / raw tcp by CPU time", rate.cpu_ratio, "x"),
        Result(way, rate.bytes_per_s / 1e9, "GB/s"),
        Result(f"raw tcp beside {way}", rate.raw_bytes_per_s / 1e9, "GB/s"),
        Result(f"raw tcp that hashes beside {way} / raw tcp", rate.hashed_ratio, "x"),
        Result(f"raw tcp that hashes beside {way} / raw tcp by CPU", rate.hashed_cpu_ratio, "x"),
    ]


@dataclass(frozen=True, slots=True)
class Batches:
    """One figure's batches, each beside one of raw TCP."""

    transport: PeerTransport
    peer: PeerPlace
    raw: RawPeer
    kind: str
    """Part of the blocks' names."""
    pid: int
    """Of the store."""

    async def put(self, source: Area, block: int) -> Rate:
        """Every block is put once."""
        turns: list[Turn] = []
        for number, parts in enumerate(_batches(source, block)):
            requests = [
                PutRequest(name_of(self.kind, number << 20 | i), part, BlockOwner(WRITER))
                for i, part in enumerate(parts)
            ]
            watch = Watch(self)
            results = await self.transport.put_many(self.peer, requests, time.monotonic() + CALL_S)
            ours = watch.lap()
            self.raw.put(parts, Hashing.NONE)
            raw = watch.lap()
            self.raw.put(parts, Hashing.VERIFIED)
            turns.append(Turn(ours, raw, watch.lap()))
            if not all(result.is_held for result in results):
                raise UnavailableError("a put was refused")
        return _rate(turns)

    async def get(self, source: Area, target: Area, block: int) -> Rate:
        """Every block is got once, and compared with what was put."""
        turns: list[Turn] = []
        for number, parts in enumerate(_batches(target, block)):
            requests = [
                GetRequest(name_of(self.kind, number << 20 | i), part.data, block)
                for i, part in enumerate(parts)
            ]
            watch = Watch(self)
            self.raw.get(parts, Hashing.VERIFIED)  # ours is the last: all fill the same memory
            hashed = watch.lap()
            self.raw.get(parts, Hashing.NONE)
            raw = watch.lap()
            results = await self.transport.get_many(self.peer, requests, time.monotonic() + CALL_S)
            turns.append(Turn(watch.lap(), raw, hashed))
            if not all(result.is_hit for result in results):
                raise UnavailableError("a block was not there")
        if not np.array_equal(source, target):
            raise AssertionError("wrong bytes")
        return _rate(turns)


def _batches(area: Area, block: int) -> Iterator[list[Area]]:
    for first in range(0, len(area), BATCH_BYTES):
        yield [area[at : at + block] for at in range(first, first + BATCH_BYTES, block)]


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds: of the clock, and of CPU that this process and the far end have used."""

    clock: float
    near: float
    far: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch in all its ways."""

    ours: Span
    raw: Span
    hashed: Span


class Watch:
    """Takes the time of one thing after another."""

    def __init__(self, batches: Batches) -> None:
        self._far = (batches.pid, batches.raw.pid)
        self._before = self._now()

    def lap(self) -> Span:
        """Since the last call, or the beginning."""
        before, now = self._before, self._now()
        self._before = now
        return Span(now.clock - before.clock, now.near - before.near, now.far - before.far)

    def _now(self) -> Span:
        far = sum(_cpu_s(pid) for pid in self._far)  # one of the two rests
        return Span(time.perf_counter(), time.process_time(), far)


def _cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, to a nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _rate(turns: Sequence[Turn]) -> Rate:
    """Of a batch each; the first of them warms up."""
    kept = turns[1:]
    ours, raws, hashed = zip(*((t.ours, t.raw, t.hashed) for t in kept), strict=True)
    return Rate(
        _clock_ratio(raws, ours),
        BATCH_BYTES / statistics.median(one.clock for one in ours),
        BATCH_BYTES / statistics.median(one.clock for one in raws),
        _busier_s(raws) / _busier_s(ours),
        _clock_ratio(raws, hashed),
        _busier_s(raws) / _busier_s(hashed),
    )


def _clock_ratio(firsts: Sequence[Span], seconds: Sequence[Span]) -> float:
    return statistics.median(a.clock / b.clock for a, b in zip(firsts, seconds, strict=True))


def _busier_s(spans: Sequence[Span]) -> float:
    """CPU time of the busier end."""
    return max(sum(one.near for one in spans), sum(one.far for one in spans))


async def _first_block(
    channel: Channel, transport: PeerTransport, peer: PeerPlace, calls: int
) -> list[Result]:
    """By how much reading one block takes longer than asking for one that is not there."""
    block = SIZES[-1]
    there = name_of(f"{channel.name}{channel.tls}{block}", 0)
    absent = name_of("nobody has it", 0)
    into = memoryview(bytearray(block))
    empties, firsts = [], []
    for _ in range(calls):
        began = time.perf_counter()
        await transport.get_many(peer, [GetRequest(absent, None, block)], time.monotonic() + CALL_S)
        between = time.perf_counter()
        [result] = await transport.get_many(
            peer, [GetRequest(there, into, block)], time.monotonic() + CALL_S
        )
        ended = time.perf_counter()
        if not result.is_hit:
            raise UnavailableError("a block was not there")
        empties.append(between - began)
        firsts.append(ended - between)
    empty_ms, first_ms = (1e3 * statistics.median(one) for one in (empties, firsts))
    way = channel.title
    bar = FIRST_BLOCK_MS_MAX if channel.has_bar else None
    return [
        Result(f"{way} empty call", empty_ms, "ms"),
        Result(
            f"{way} first block of 256 KiB above it", first_ms - empty_ms, "ms", bar, Bar.AT_MOST
        ),
    ]


def name_of(kind: str, number: int) -> FrameName:
    """A block of the bench."""
    key = hashlib.sha256(f"{kind} {number}".encode()).digest()
    return FrameName(KeyKind.PREFIX_KEY, key, NAMESPACE)
