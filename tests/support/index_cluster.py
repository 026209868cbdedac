"""Index and publisher processes of a fault test, and what they say of themselves.

`IndexProcess` runs `kvtier index`, `PublisherProcess` the module `publisher_process`. `converged`
holds the promise that every fault test ends with: what the index knows, read over its wire, equals
the union of what its publishers hold. What must not live here: faults, what a test expects of them.
"""

import asyncio
import base64
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from kvtier.core.event_columns import EventKind
from kvtier.types import HOLDER_TIERS, Tier
from kvtier.wire import convert, transport
from kvtier.wire import messages as pb
from tests.harness.netns import Node
from tests.harness.ports import free_port
from tests.harness.processes import (
    REPOSITORY,
    Launch,
    Process,
    ProcessRunner,
    kvtier_command,
    python_module,
)
from tests.harness.proxy import TcpProxy
from tests.harness.readiness import grpc_ready
from tests.harness.toml_text import TomlValue
from tests.harness.waiting import eventually_async
from tests.support.corpus import SERVED_NAME, U64, Corpus, card
from tests.support.raw_publisher import tokens_of, unary

CONVERGED_S = 45.0
LEASE_MS = 1500
NODE_PORT = 7710
SERVICE = "kvtier.v1.Index"
_ANSWER_S = 30.0

Copies = dict[Tier, U64]
"""Per tier every copy's hash, sorted; tiers without any are left out."""


@dataclass(frozen=True, slots=True)
class HolderView:
    """A holder as the index describes it in a snapshot."""

    epoch: int
    hidden: bool
    trust: int
    reason: str
    age_ms: int
    shards: Mapping[int, Copies]


class IndexProcess:
    """One `kvtier index` on a port of its own that survives restarts."""

    def __init__(self, process: Process, port: int, host: str = "127.0.0.1") -> None:
        self.process = process
        self.port = port
        self.address = f"{host}:{port}"

    def clean_log(self) -> str:
        """What it logged; fails where that shows an error that nobody handled."""
        text = self.process.log_text()
        assert "Traceback" not in text, text
        return text


def index_launch(
    runner: ProcessRunner, name: str = "index", **settings: TomlValue
) -> tuple[Launch, int]:
    """How to start an index on loopback with a TOML file of its own, and its port.

    Short leases, a long grace; it is ready when its health service says so.
    """
    port = free_port()
    defaults: dict[str, TomlValue] = {
        "lease_ms": LEASE_MS,
        "drain_ms_max": 500,
        "listen": {"bind": f"127.0.0.1:{port}"},
    }
    path = runner.config_file(f"{name}.toml", defaults | settings)
    argv = kvtier_command("index", "--config", str(path))
    return Launch(name, argv, ready=grpc_ready(f"127.0.0.1:{port}", SERVICE)), port


def index_launch_in(
    node: Node, runner: ProcessRunner, name: str = "index", **settings: TomlValue
) -> Launch:
    """How to start an index on port 7710 of another machine, reachable from all of its network."""
    listen: TomlValue = {"bind": f"{node.address}:{NODE_PORT}", "insecure": True}
    launch, _ = index_launch(runner, name, listen=listen, **settings)

    def is_ready() -> bool:
        with TcpProxy(node.dial(NODE_PORT, node.address)) as window:
            return grpc_ready(window.address, SERVICE)()

    return replace(launch, ready=is_ready, prefix=node.prefix)


async def start_index(
    runner: ProcessRunner, name: str = "index", **settings: TomlValue
) -> IndexProcess:
    launch, port = index_launch(runner, name, **settings)
    return IndexProcess(await asyncio.to_thread(runner.start, launch), port)


@dataclass(frozen=True, slots=True)
class PublisherSpec:
    """One publisher process. Its chains are those of `Corpus(block_tokens, salt, seed)`."""

    name: str
    targets: Sequence[str]
    instance: str = ""
    """The worker's name; the process's where empty."""
    block_tokens: int = 16
    salt: str = ""
    seed: int = 0
    shard: int = 0
    shards_count: int = 1
    config: Mapping[str, float] = field(default_factory=dict)
    """Fields of `PublisherConfig`, which are quick here."""
    tls: Mapping[str, str] = field(default_factory=dict)
    """Fields of `TlsConfig`."""
    token_file: str = ""
    insecure: bool = False
    prefix: Sequence[str] = ()
    """As in `Launch`."""

    @property
    def corpus(self) -> Corpus:
        return Corpus(self.block_tokens, self.salt, self.seed)

    @property
    def worker(self) -> str:
        return self.instance or self.name


class PublisherProcess:
    """One worker's publisher; every `ask` is one command of `publisher_process.Commands`."""

    def __init__(self, spec: PublisherSpec, process: Process, control: Path) -> None:
        self.spec = spec
        self.process = process
        self._control = control

    async def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a command; AssertionError where none comes in time."""
        return await asyncio.to_thread(_ask, self._control, {"do": do, **arguments})

    async def truth(self) -> Copies:
        """What it holds, by its own books."""
        said = await self.ask("truth")
        packed = {Tier(int(tier)): base64.b64decode(text) for tier, text in said.items()}
        return {tier: np.frombuffer(data, "<u8") for tier, data in packed.items() if data}

    async def flushed(self, deadline_s: float = CONVERGED_S) -> None:
        """Until every target acknowledged everything."""
        assert await self.ask("flush", deadline_s=deadline_s), await self.ask("stats")

    async def close(self) -> None:
        """Goodbye, and the end of the process."""
        assert await self.ask("close")
        assert await asyncio.to_thread(self.process.wait, 40) == 0


def _ask(control: Path, command: Mapping[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(control))
        with connection.makefile("rwb") as lines:
            lines.write(json.dumps(command).encode() + b"\n")
            lines.flush()
            line = lines.readline()
    assert line, f"no answer to {command}"
    return json.loads(line)


def _answers(control: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(_ask(control, {"do": "ping"}))
    return False


def publisher_launch(runner: ProcessRunner, spec: PublisherSpec) -> tuple[Launch, Path]:
    control = runner.directory / f"{spec.name}.sock"
    quick = {"reconnect_s_max": 0.25, "heartbeat_s": 0.15, "close_s": 5.0}
    table = {
        "instance": spec.worker,
        "targets": list(spec.targets),
        "block_tokens": spec.block_tokens,
        "salt": spec.salt,
        "seed": spec.seed,
        "shard": spec.shard,
        "shards_count": spec.shards_count,
        "config": quick | dict(spec.config),
        "tls": dict(spec.tls),
        "token_file": spec.token_file,
        "insecure": spec.insecure,
        "control": str(control),
    }
    path = runner.directory / f"{spec.name}.json"
    path.write_text(json.dumps(table))
    launch = Launch(
        spec.name,
        python_module("tests.support.publisher_process", str(path)),
        ready=lambda: _answers(control),
        environment={"PYTHONPATH": str(REPOSITORY)},
        prefix=spec.prefix,
    )
    return launch, control


async def start_publishers(runner: ProcessRunner, *specs: PublisherSpec) -> list[PublisherProcess]:
    """Start them side by side; ready means that they answer, not that an index knows them."""
    launches = [publisher_launch(runner, spec) for spec in specs]
    processes = await asyncio.to_thread(runner.start_all, [launch for launch, _ in launches])
    return [
        PublisherProcess(spec, process, control)
        for spec, process, (_, control) in zip(specs, processes, launches, strict=True)
    ]


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A plain channel to an index, closed at the end."""
    channel = transport.new_channel(address)
    try:
        yield channel
    finally:
        await channel.close()


# ---- what an index says


async def fleet_view(channel: grpc.aio.Channel) -> dict[str, HolderView]:
    """Instance -> holder, of fleets whose workers have one rank each."""
    return {instance: view for (instance, _), view in (await ranks_view(channel)).items()}


async def ranks_view(channel: grpc.aio.Channel) -> dict[tuple[str, int], HolderView]:
    """(Instance, dp rank) -> holder, read over `Snapshot` without following."""
    return {
        (holder.hello.instance, holder.hello.dp_rank): HolderView(
            epoch=holder.hello.epoch,
            hidden=holder.hidden,
            trust=holder.trust,
            reason=holder.degraded_reason,
            age_ms=holder.age_ms,
            shards=shards,
        )
        for holder, shards in await holders_of(channel)
    }


async def holders_of(channel: grpc.aio.Channel) -> list[tuple[pb.Holder, dict[int, Copies]]]:
    """Every holder as the index describes it, and what it has by shard, read over `Snapshot`."""
    described: dict[int, pb.Holder] = {}
    found: dict[int, dict[int, dict[Tier, list[U64]]]] = {}
    is_complete = False
    feed = unary(channel, "Snapshot")(pb.SnapshotRequest(), timeout=_ANSWER_S)
    async for response in feed:
        match response.WhichOneof("message"):
            case "holder":
                described[response.holder.holder] = response.holder
                found.setdefault(response.holder.holder, {})
            case "blocks":
                blocks: pb.HolderBlocks = response.blocks
                shards = found[blocks.holder]
                if blocks.number == 0:
                    shards[blocks.shard] = {}
                _gather(shards[blocks.shard], blocks.batch)
            case "complete":
                is_complete = True
    assert is_complete, "the snapshot ended early"
    return [
        (holder, {shard: _sorted(tiers) for shard, tiers in found[number].items()})
        for number, holder in described.items()
    ]


def _gather(tiers: dict[Tier, list[U64]], message: pb.Batch) -> None:
    batch = convert.batch_from(message)
    assert (batch.kinds == EventKind.STORE).all()
    rows = np.repeat(batch.tiers, batch.lengths)
    for tier in HOLDER_TIERS:
        chosen = batch.hashes[rows == tier]
        if len(chosen):
            tiers.setdefault(tier, []).append(chosen)


def _sorted(tiers: Mapping[Tier, list[U64]]) -> Copies:
    return {tier: np.sort(np.concatenate(pieces)) for tier, pieces in tiers.items()}


def same(one: Copies, other: Copies) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(one[tier], other[tier]) for tier in one
    )


async def stats_of(channel: grpc.aio.Channel) -> pb.StatsResponse:
    answer: pb.StatsResponse = await unary(channel, "Stats")(pb.StatsRequest(), timeout=_ANSWER_S)
    return answer


async def counts_of(channel: grpc.aio.Channel) -> dict[str, int]:
    """Every counter of `Stats` by name."""
    return {row.name: row.count for row in (await stats_of(channel)).events}


async def match(channel: grpc.aio.Channel, hashes: U64, block_tokens: int = 0) -> dict[str, int]:
    """Instance -> tokens, of the pool with these blocks or of all."""
    pool = convert.pool_name(card(block_tokens).pool) if block_tokens else b""
    query = pb.MatchQuery(hashes=hashes.astype("<u8").tobytes(), pool=pool)
    request = pb.MatchRequest(queries=[query])
    return tokens_of(await unary(channel, "Match")(request, timeout=_ANSWER_S))


async def match_prompt(channel: grpc.aio.Channel, corpus: Corpus, chain: int) -> dict[str, int]:
    """Instance -> tokens, best of all pools, of a prompt as its tenant's router asks for it."""
    tokens = corpus.tokens(chain, 64).astype("<u4").tobytes()
    query = pb.MatchQuery(tokens=tokens, served_name=SERVED_NAME, scope_salt=corpus.salt)
    request = pb.MatchRequest(queries=[query])
    response: pb.MatchResponse = await unary(channel, "Match")(request, timeout=_ANSWER_S)
    best: dict[str, int] = {}
    for row in range(len(response.results)):
        for worker, tokens_count in tokens_of(response, row).items():
            best[worker] = max(best.get(worker, 0), tokens_count)
    return best


# ---- the promise


async def converged(
    index: IndexProcess | str,
    publishers: Iterable[PublisherProcess],
    deadline_s: float = CONVERGED_S,
) -> None:
    """Until the index shows exactly what these live, quiet publishers hold, EXACT, and matches it.

    Holders that are hidden do not count. Every shard of a worker must be among `publishers`.
    """
    address = index if isinstance(index, str) else index.address
    told = [(one.spec, await one.truth()) for one in publishers]
    wanted: dict[str, dict[int, Copies]] = {}
    for spec, truth in told:
        wanted.setdefault(spec.worker, {})[spec.shard] = truth
    async with channel_to(address) as channel:
        last = "nothing"

        async def is_equal() -> bool:
            nonlocal last
            try:
                last = _difference(await fleet_view(channel), wanted)
            except grpc.aio.AioRpcError as error:
                last = str(error.code())
            return not last

        try:
            await eventually_async(is_equal, deadline_s, "index == union of publishers")
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None
        await _matches_truth(channel, told)


def _difference(view: Mapping[str, HolderView], wanted: Mapping[str, Mapping[int, Copies]]) -> str:
    """What differs first; empty where nothing does."""
    shown = {name: holder for name, holder in view.items() if not holder.hidden}
    if shown.keys() != wanted.keys():
        return f"holders {sorted(shown)} instead of {sorted(wanted)}"
    for name, shards in wanted.items():
        holder = shown[name]
        if holder.trust != pb.TRUST_EXACT:
            return f"{name} is degraded: {holder.reason}"
        for shard, truth in shards.items():
            known = holder.shards.get(shard, {})
            if not same(known, truth):
                sizes = [{tier.name: len(held) for tier, held in c.items()} for c in (known, truth)]
                return f"{name} shard {shard}: holds {sizes[0]} instead of {sizes[1]}"
    return ""


async def _matches_truth(
    channel: grpc.aio.Channel, told: Sequence[tuple[PublisherSpec, Copies]]
) -> None:
    """Every prompt of a sample is matched as a plain walk over the truths says."""
    held: dict[str, list[set[int]]] = {}
    sizes: dict[str, int] = {}
    for spec, truth in told:
        blocks = {block for part in truth.values() for block in part.tolist()}
        held.setdefault(spec.worker, []).append(blocks)
        sizes[spec.worker] = spec.block_tokens
    for corpus in dict.fromkeys(spec.corpus for spec, _ in told):
        for chain in range(5):
            expected: dict[str, int] = {}
            for worker, shards in held.items():
                own = replace(corpus, block_tokens=sizes[worker])
                hashes = own.hashes(chain, 64 * corpus.block_tokens // own.block_tokens)
                tokens = _walk(hashes, shards) * own.block_tokens
                expected |= {worker: tokens} if tokens else {}
            assert await match_prompt(channel, corpus, chain) == expected, (corpus, chain)
            size = corpus.block_tokens
            of_pool = {name: tokens for name, tokens in expected.items() if sizes[name] == size}
            assert await match(channel, corpus.hashes(chain, 64), size) == of_pool, (corpus, chain)


def _walk(hashes: U64, shards: Sequence[set[int]]) -> int:
    """How many blocks from the first on are in all shards."""
    for number, block in enumerate(hashes.tolist()):
        if not all(block in shard for shard in shards):
            return number
    return len(hashes)
