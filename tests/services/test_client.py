"""The SDK against real indexes: answers, watches, reservations, fail-over, credentials, errors."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

import kvtier.client
from kvtier.client import (
    ClientConfig,
    FleetChange,
    FleetChangeKind,
    IndexClient,
    OwnReservation,
    TokenPrompt,
    WorkerName,
    blocking,
)
from kvtier.client.results import change_from, matches_from, stats_from
from kvtier.core.identity import chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.errors import (
    BackendError,
    CallerError,
    ConfigError,
    DeadlineError,
    FencedError,
    ForbiddenError,
    IdentityError,
    KvtierError,
    LimitError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from kvtier.limits import MATCH_QUERIES_MAX
from kvtier.publisher import Publisher, PublisherConfig, StreamState
from kvtier.sections import DialConfig, ListenConfig
from kvtier.security import certs, new_principal
from kvtier.types import InstanceId, Source, Tier, Trust
from kvtier.wire import messages as pb
from kvtier.wire.status import error_of
from tests.harness.ports import free_port
from tests.harness.proxy import Admission, TcpProxy
from tests.harness.waiting import eventually, eventually_async
from tests.support.live_index import DEADLINE_S, LiveIndex
from tests.support.raw_publisher import CARD, worker_info

CHAIN = np.arange(1, 65, dtype=np.uint64)
W1 = WorkerName(InstanceId("w1"), 0)
PATIENT = ClientConfig(deadline_s=DEADLINE_S, reconnect_s_min=0.005, reconnect_s_max=0.05)
QUICK = PublisherConfig(coalesce_s=0.001, reconnect_s_min=0.005, reconnect_s_max=0.05)


@pytest.fixture
def index() -> Iterator[LiveIndex]:
    with LiveIndex(lease_ms=5_000) as running:
        yield running


@pytest.fixture
def other_index() -> Iterator[LiveIndex]:
    with LiveIndex(lease_ms=5_000) as running:
        yield running


def dial(*indexes: LiveIndex) -> DialConfig:
    return DialConfig(targets=tuple(one.target for one in indexes))


@asynccontextmanager
async def a_client(*indexes: LiveIndex) -> AsyncIterator[IndexClient]:
    async with IndexClient(dial(*indexes), PATIENT) as client:
        yield client


@asynccontextmanager
async def a_worker(
    client: IndexClient, name: str = "w1", blocks: int = 32
) -> AsyncIterator[Publisher]:
    publisher = client.publisher(worker_info(name), QUICK).start()
    try:
        publisher.store(Tier.GPU, 0, CHAIN[:blocks])
        assert await asyncio.to_thread(publisher.flush, DEADLINE_S)
        yield publisher
    finally:
        await asyncio.to_thread(publisher.close)


# ---- answers


async def test_a_match_tells_each_worker_with_its_runs(index: LiveIndex) -> None:
    async with a_client(index) as client, a_worker(client), a_worker(client, "w2", 4):
        match = await client.match(CHAIN)
        assert {worker.name.instance for worker in match.workers} == {"w1", "w2"}
        assert match.tokens_of(W1) == 32 * 16
        assert match.tokens_of(WorkerName(InstanceId("nobody"))) == 0
        row = [worker.name for worker in match.workers].index(W1)
        assert match.runs(row) == [(Source.GPU, 32)]
        assert match.worker(row).trust is Trust.EXACT
        assert match.worker(row).block_tokens == 16
        assert match.blocks_queried == 64
        assert match.index_epoch != 0


async def test_many_chains_are_matched_in_one_call_and_in_order(index: LiveIndex) -> None:
    async with a_client(index) as client, a_worker(client):
        matches = await client.match_many([CHAIN[:3], [99], CHAIN[:5].tolist(), []], CARD.pool)
        assert [match.tokens_of(W1) for match in matches] == [48, 0, 80, 0]
        assert [len(match) for match in matches] == [1, 0, 1, 0]
        assert await client.match_many([]) == ()


async def test_a_prompt_is_matched_by_its_tokens(index: LiveIndex) -> None:
    prompt = list(range(100))
    hashes = prefix_hashes(chain_root(CARD.pool, "salt", None), prompt, 16)
    async with a_client(index) as client, a_worker(client) as publisher:
        publisher.store(Tier.GPU, 0, hashes)
        assert await asyncio.to_thread(publisher.flush, DEADLINE_S)
        (match,) = await client.match_tokens(TokenPrompt("chat", prompt, "salt"))
        assert match.tokens_of(W1) == 96
        packed = np.array(prompt, np.uint32)
        (other,) = await client.match_tokens(TokenPrompt("chat", packed, "another salt"))
        assert len(other) == 0
        assert await client.match_tokens(TokenPrompt("nobody serves this", prompt)) == ()


async def test_statistics_name_holders_tiers_and_events(index: LiveIndex) -> None:
    async with a_client(index) as client, a_worker(client):
        await client.match(CHAIN)
        stats = await client.stats()
        (holder,) = stats.holders
        assert (stats.blocks, stats.holdings, stats.matched_blocks) == (32, 32, 32)
        assert holder.view.name == W1
        assert holder.view.info.card == CARD
        assert [(tier.tier, tier.blocks, tier.bytes) for tier in holder.tiers] == [
            (Tier.GPU, 32, 32_000)
        ]
        assert stats.events["blocks_stored"] == 32
        assert holder.events


# ---- a watch


async def until_kind(watch: AsyncIterator[FleetChange], kind: FleetChangeKind) -> FleetChange:
    async with asyncio.timeout(DEADLINE_S):
        async for change in watch:
            if change.kind is kind:
                return change
    raise AssertionError("the watch ended")


async def test_a_watch_begins_with_who_is_there_and_tells_who_comes_and_goes(
    index: LiveIndex,
) -> None:
    async with a_client(index) as client, a_worker(client):
        watch = client.watch_fleet()
        first = await anext(watch)
        assert first.kind is FleetChangeKind.JOINED
        assert first.holder is not None
        assert first.holder.name == W1
        assert (await until_kind(watch, FleetChangeKind.CURRENT)).holder is None
        async with a_worker(client, "w2"):
            joined = await until_kind(watch, FleetChangeKind.JOINED)
            assert joined.holder is not None
            assert joined.holder.name.instance == "w2"
        left = await until_kind(watch, FleetChangeKind.LEFT)
        assert left.holder is not None
        assert left.holder.name.instance == "w2"
        await watch.aclose()  # type: ignore[attr-defined]


async def test_a_watch_survives_its_index_and_says_so(index: LiveIndex) -> None:
    async with a_client(index) as client, a_worker(client):
        watch = client.watch_fleet()
        await until_kind(watch, FleetChangeKind.CURRENT)
        await asyncio.to_thread(index.stop)
        await until_kind(watch, FleetChangeKind.INTERRUPTED)
        await asyncio.to_thread(index.start)
        joined = await until_kind(watch, FleetChangeKind.JOINED)
        assert joined.holder is not None
        assert joined.holder.name == W1
        await watch.aclose()  # type: ignore[attr-defined]


# ---- reservations


def reservation(key: str = "k", ttl_ms: int = 60_000, instance: str = "w1") -> OwnReservation:
    name = WorkerName(InstanceId(instance), 0)
    return OwnReservation(key, name, 500, ttl_ms, np.arange(1001, 1005, dtype=np.uint64))


def reserved(index: LiveIndex) -> int:
    holder = index.holder("w1")
    return 0 if holder is None else index.state.routers.reserved(holder).prefill_tokens


async def until_reserved(index: LiveIndex, tokens: int) -> None:
    async def seen() -> bool:
        return reserved(index) == tokens

    await eventually_async(seen, DEADLINE_S, f"{tokens} tokens are reserved")


async def test_a_reservation_is_seen_by_others_until_released(index: LiveIndex) -> None:
    async with (
        a_client(index) as client,
        a_worker(client),
        client.reservations("router-1") as session,
    ):
        result = await session.reserve(reservation())
        assert result.is_granted
        assert result.worker_prefill_tokens == 500
        match = await client.match(np.arange(1001, 1005, dtype=np.uint64))
        assert match.runs(0) == [(Source.PREDICTED, 4)]
        assert session.live_count == 1
        session.release("k")
        session.release("no such key")
        await until_reserved(index, 0)
        assert session.live_count == 0


async def test_what_is_only_told_is_reserved_as_well_and_nobody_waits(index: LiveIndex) -> None:
    async with (
        a_client(index) as client,
        a_worker(client),
        client.reservations("router-1") as session,
    ):
        session.tell(reservation())  # before there is any connection
        session.tell(reservation())
        await until_reserved(index, 500)
        session.tell(reservation("k2"))
        await until_reserved(index, 1000)
        for key in ("k", "k2"):
            session.release(key)
        await until_reserved(index, 0)
        assert session.live_count == 0


async def test_reservations_end_with_their_session(index: LiveIndex) -> None:
    async with (
        a_client(index) as client,
        a_worker(client),
        client.reservations("router-1") as session,
    ):
        assert (await session.reserve(reservation())).is_granted
        await until_reserved(index, 500)
    await until_reserved(index, 0)


async def test_a_reservation_goes_to_every_index(index: LiveIndex, other_index: LiveIndex) -> None:
    async with (
        a_client(index, other_index) as client,
        a_worker(client),
        client.reservations("router-1") as session,
    ):
        assert (await session.reserve(reservation())).is_granted
        await until_reserved(index, 500)
        await until_reserved(other_index, 500)
        session.release("k")
        await until_reserved(index, 0)
        await until_reserved(other_index, 0)


async def test_living_reservations_are_told_again_when_a_stream_breaks(index: LiveIndex) -> None:
    with TcpProxy(("127.0.0.1", index.port)) as proxy:
        through = IndexClient(DialConfig(targets=(f"127.0.0.1:{proxy.port}",)), PATIENT)
        async with (
            a_client(index) as client,
            a_worker(client),
            through,
            through.reservations("router-1") as session,
        ):
            assert (await session.reserve(reservation("gone"))).is_granted
            assert (await session.reserve(reservation("kept"))).is_granted
            proxy.admit(Admission.RESET)
            assert proxy.reset() == 1
            await until_reserved(index, 0)
            session.release("gone")
            proxy.admit(Admission.ACCEPT)
            await until_reserved(index, 500)
            session.release("kept")
            await until_reserved(index, 0)


async def test_an_unknown_worker_is_not_granted(index: LiveIndex) -> None:
    async with a_client(index) as client, client.reservations("router-1") as session:
        result = await session.reserve(reservation())
        assert not result.is_granted
        assert result.reason == "unknown_worker"
        assert session.live_count == 0


async def test_the_same_key_twice_is_a_mistake_of_the_caller(index: LiveIndex) -> None:
    async with (
        a_client(index) as client,
        a_worker(client),
        client.reservations("router-1") as session,
    ):
        await session.reserve(reservation())
        with pytest.raises(CallerError, match="reserved already"):
            await session.reserve(reservation())


async def test_without_any_index_a_reservation_is_unavailable_and_forgotten() -> None:
    lonely = IndexClient(DialConfig(targets=(f"127.0.0.1:{free_port()}",)), PATIENT)
    async with lonely as client, client.reservations("router-1") as session:
        with pytest.raises(UnavailableError, match="no index is connected"):
            await session.reserve(reservation(), deadline_s=0.05)
        assert session.live_count == 0


# ---- fail-over and deadlines


async def test_a_dead_index_is_passed_over(index: LiveIndex) -> None:
    dead = f"127.0.0.1:{free_port()}"
    targets = DialConfig(targets=(dead, index.target))
    async with (
        a_client(index) as client,
        a_worker(client),
        IndexClient(targets, PATIENT) as both,
    ):
        assert (await both.match(CHAIN)).tokens_of(W1) == 512
        assert (await both.match(CHAIN)).tokens_of(W1) == 512


async def test_losing_one_of_two_indexes_changes_no_answer(
    index: LiveIndex, other_index: LiveIndex
) -> None:
    async with a_client(index, other_index) as client, a_worker(client):
        for lost in (index, other_index):
            assert (await client.match(CHAIN)).tokens_of(W1) == 512
            await asyncio.to_thread(lost.stop)
            assert (await client.match(CHAIN)).tokens_of(W1) == 512
            await asyncio.to_thread(lost.start)

            async def is_back(lost: LiveIndex = lost) -> bool:
                return lost.trust("w1") is Trust.EXACT

            await eventually_async(is_back, DEADLINE_S, "the publisher is back")


async def test_an_index_that_answers_nothing_costs_time_and_not_the_answer(
    index: LiveIndex,
) -> None:
    with TcpProxy(("127.0.0.1", index.port)) as proxy:
        targets = DialConfig(targets=(f"127.0.0.1:{proxy.port}", index.target))
        async with (
            a_client(index) as client,
            a_worker(client),
            IndexClient(targets, PATIENT) as both,
        ):
            await both.match(CHAIN)
            proxy.cut()
            assert (await both.match(CHAIN, deadline_s=6.0)).tokens_of(W1) == 512
            proxy.heal()


async def test_a_call_ends_at_its_deadline(index: LiveIndex) -> None:
    with TcpProxy(("127.0.0.1", index.port)) as proxy:
        targets = DialConfig(targets=(f"127.0.0.1:{proxy.port}",))
        async with IndexClient(targets, PATIENT) as client:
            await client.match(CHAIN)
            proxy.cut()
            with pytest.raises(DeadlineError):
                await client.match(CHAIN, deadline_s=0.05)
            proxy.heal()


async def test_with_no_index_at_all_a_call_is_unavailable() -> None:
    dead = DialConfig(targets=tuple(f"127.0.0.1:{free_port()}" for _ in range(2)))
    async with IndexClient(dead, PATIENT) as client:
        with pytest.raises(UnavailableError):
            await client.match(CHAIN)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_deadline_that_is_none_is_refused(index: LiveIndex, deadline_s: float) -> None:
    async with a_client(index) as client:
        with pytest.raises(CallerError, match="deadline_s"):
            await client.match(CHAIN, deadline_s=deadline_s)


# ---- credentials


def show(folder: Path, role: str, name: str, **grants: tuple[str, ...]) -> Path:
    """A file with a new token of a role."""
    token = certs.add_token(folder, new_principal(name, role, **grants))
    path = folder / f"token-{name}"
    path.write_text(token + "\n", encoding="utf-8")
    return path


async def test_who_shows_no_token_gets_nothing_and_roles_get_what_is_theirs(
    tmp_path: Path,
) -> None:
    router = show(tmp_path, "router", "r1")
    worker = show(tmp_path, "worker", "w1", instances=("w1",))
    listen = ListenConfig("127.0.0.1:0", tokens_file=tmp_path / certs.TOKENS)
    with LiveIndex(listen=listen) as index:
        async with IndexClient(dial(index), PATIENT) as nobody:
            with pytest.raises(UnauthenticatedError):
                await nobody.match(CHAIN)
            with pytest.raises(UnauthenticatedError):
                await anext(nobody.watch_fleet())
        async with IndexClient(DialConfig((index.target,), token_file=router), PATIENT) as client:
            assert len(await client.match(CHAIN)) == 0
            with pytest.raises(ForbiddenError):
                await client.stats()
        async with IndexClient(DialConfig((index.target,), token_file=worker), PATIENT) as client:
            with pytest.raises(ForbiddenError):
                await client.match_tokens(TokenPrompt("chat", [1, 2]))
            async with a_worker(client):
                assert (await client.match(CHAIN)).tokens_of(W1) == 512
            impostor = client.publisher(worker_info("w2"), QUICK)
            with impostor:
                await asyncio.to_thread(
                    eventually,
                    lambda: impostor.stats().streams[0].state is StreamState.REFUSED,
                    DEADLINE_S,
                    "an impostor is refused",
                )


# ---- errors


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.CANCELLED, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError),
        (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, ForbiddenError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, OverloadedError),
        (grpc.StatusCode.INVALID_ARGUMENT, CallerError),
        (grpc.StatusCode.OUT_OF_RANGE, LimitError),
        (grpc.StatusCode.FAILED_PRECONDITION, IdentityError),
        (grpc.StatusCode.ABORTED, FencedError),
        (grpc.StatusCode.UNKNOWN, BackendError),
        (grpc.StatusCode.INTERNAL, BackendError),
        (grpc.StatusCode.UNIMPLEMENTED, BackendError),
    ],
)
def test_each_status_becomes_an_error_of_our_tree(
    code: grpc.StatusCode, kind: type[KvtierError]
) -> None:
    metadata = grpc.aio.Metadata()
    error = error_of(grpc.aio.AioRpcError(code, metadata, metadata, details="why"), "here:1")
    assert type(error) is kind
    assert str(error) == "here:1: why"


def a_result(**changes: bytes) -> pb.MatchResponse:
    columns = {
        "workers": np.array([0], "<u4").tobytes(),
        "tokens": np.array([16], "<u8").tobytes(),
        "run_offsets": np.array([0, 1], "<u4").tobytes(),
        "run_sources": b"\0",
        "run_blocks": np.array([1], "<u4").tobytes(),
    }
    result = pb.MatchResult(**(columns | changes))  # type: ignore[arg-type]
    return pb.MatchResponse(results=[result], workers=[pb.WorkerRef(instance="w1")])


@pytest.mark.parametrize(
    "nonsense",
    [
        {"workers": b"\1\0\0\0"},
        {"workers": b""},
        {"workers": b"123"},
        {"tokens": b"12345"},
        {"run_offsets": b""},
        {"run_offsets": np.array([0, 2], "<u4").tobytes()},
        {"run_sources": b"\0\0"},
        {"run_sources": b"\x20"},
    ],
)
def test_an_answer_that_contradicts_itself_is_the_fault_of_the_service(
    nonsense: dict[str, bytes],
) -> None:
    assert matches_from(a_result())[0].tokens_of(W1) == 16
    with pytest.raises(BackendError):
        matches_from(a_result(**nonsense))


def test_a_holder_that_cannot_be_is_the_fault_of_the_service() -> None:
    event = pb.FleetEvent(kind=pb.FleetEvent.KIND_JOINED, holder=pb.Holder(holder=1))
    with pytest.raises(BackendError):
        change_from(event, 0.0)
    with pytest.raises(BackendError):
        stats_from(pb.StatsResponse(holders=[pb.HolderStats(holder=pb.Holder())]), 0.0)
    assert change_from(pb.FleetEvent(), 0.0) is None


async def test_wrong_arguments_are_refused_before_any_call() -> None:
    unused = DialConfig(targets=("127.0.0.1:1",))
    wrong = TokenPrompt("chat", np.ones(3))  # type: ignore[arg-type]
    async with IndexClient(unused) as client:
        with pytest.raises(CallerError, match="hashes"):
            await client.match([-1])
        with pytest.raises(LimitError):
            await client.match_many([[1]] * (MATCH_QUERIES_MAX + 1))
        with pytest.raises(CallerError, match="tokens"):
            await client.match_tokens(TokenPrompt("chat", [2**32]))
        with pytest.raises(CallerError, match="tokens"):
            await client.match_tokens(wrong)
        with pytest.raises(CallerError, match="router"):
            client.reservations("")
    with pytest.raises(ConfigError):
        IndexClient(DialConfig())
    with pytest.raises(CallerError):
        ClientConfig(deadline_s=float("inf"))


# ---- without asyncio


def test_the_blocking_client_does_the_same(index: LiveIndex) -> None:
    with (
        blocking.IndexClient(dial(index), PATIENT) as client,
        client.publisher(worker_info("w1"), QUICK) as publisher,
    ):
        publisher.store(Tier.GPU, 0, CHAIN)
        assert publisher.flush(DEADLINE_S)
        assert client.match(CHAIN).tokens_of(W1) == 1024
        assert [one.tokens_of(W1) for one in client.match_many([CHAIN[:1], [999]])] == [16, 0]
        assert client.match_tokens(TokenPrompt("nobody", [1])) == ()
        assert client.stats().blocks == 64
        with client.reservations("router-1") as session:
            assert session.reserve(reservation()).is_granted
            assert reserved(index) == 500
            session.release("k")
            eventually(lambda: reserved(index) == 0, DEADLINE_S, "released")


def test_the_blocking_watch_calls_back_until_closed(index: LiveIndex) -> None:
    current = threading.Event()
    told: list[FleetChange] = []

    def tell(change: FleetChange) -> None:
        told.append(change)
        if change.kind is FleetChangeKind.CURRENT:
            current.set()

    with (
        blocking.IndexClient(dial(index), PATIENT) as client,
        client.publisher(worker_info("w1"), QUICK) as publisher,
    ):
        publisher.store(Tier.GPU, 0, CHAIN)
        assert publisher.flush(DEADLINE_S)
        watch = client.watch_fleet(tell)
        assert current.wait(DEADLINE_S)
        assert told[0].kind is FleetChangeKind.JOINED
        watch.close()
        assert watch.error is None


def test_a_closed_blocking_client_says_so(index: LiveIndex) -> None:
    client = blocking.IndexClient(dial(index), PATIENT)
    client.close()
    client.close()
    with pytest.raises(UnavailableError):
        client.match(CHAIN)


def test_the_surface_of_the_client_is_small() -> None:
    assert 0 < len(kvtier.client.__all__) <= 12
    assert all(hasattr(kvtier.client, name) for name in kvtier.client.__all__)
