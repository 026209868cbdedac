"""What every way between stores promises: one suite over gRPC, the bulk channel and NIXL."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.core.planner import WritePolicy
from kvtier.errors import (
    DeadlineError,
    ForbiddenError,
    KvtierError,
    UnauthenticatedError,
    UnavailableError,
)
from kvtier.peers import BulkFirst, BulkTransport, GrpcTransport
from kvtier.peers import bulk_wire as form
from kvtier.peers.bulk_server import GROUP_BLOCKS
from kvtier.peers.nixl_agent import is_installed
from kvtier.peers.nixl_transport import NixlTransport
from kvtier.ports import (
    BlockOwner,
    GetRequest,
    GetStatus,
    PeerPlace,
    PeerTransport,
    PutRequest,
    PutStatus,
)
from kvtier.sections import DialConfig, ListenConfig, TlsConfig
from kvtier.security import certs, files, new_principal
from kvtier.types import InstanceId, NodeId
from kvtier_services.store.config import NvmeSection, PeersSection, PeerWay, StoreConfig
from kvtier_services.store.main import RunningStore
from tests.support.store_service import MIB, a_store, small_store
from tests.tiers.contract import (
    BLOCK_BYTES,
    OTHER_NAMESPACE,
    name_of,
    payload_of,
    soon,
)

WAYS = ("grpc", "bulk", "bulk or grpc", "nixl")
OWNER = BlockOwner(7)


@dataclass
class Way:
    """A transport and a store that it reaches."""

    transport: PeerTransport
    peer: PeerPlace
    running: RunningStore

    async def put(self, *numbers: int, size: int = BLOCK_BYTES, version: int = 0) -> list[str]:
        requests = [
            PutRequest(name_of(n), payload_of(n, size, version=version), OWNER) for n in numbers
        ]
        results = await self.transport.put_many(self.peer, requests, soon())
        return [result.status.value for result in results]

    async def get(self, *numbers: int, size: int = BLOCK_BYTES) -> list[GetStatus]:
        """Into memory of the caller's; a hit with other bytes fails."""
        buffers = [memoryview(bytearray(size)) for _ in numbers]
        requests = [
            GetRequest(name_of(n), buffer, size) for n, buffer in zip(numbers, buffers, strict=True)
        ]
        results = await self.transport.get_many(self.peer, requests, soon())
        for number, result, buffer in zip(numbers, results, buffers, strict=True):
            if result.is_hit:
                assert bytes(buffer) == payload_of(number, size)
                assert result.header is not None
                assert result.header.name == name_of(number)
        return [result.status for result in results]


def transport_of(kind: str, dial: DialConfig | None = None) -> PeerTransport:
    dial = dial or DialConfig()
    if kind == "grpc":
        return GrpcTransport(dial)
    if kind == "nixl":
        return NixlTransport(dial)
    bulk = BulkTransport(dial)
    return bulk if kind == "bulk" else BulkFirst(bulk, GrpcTransport(dial))


def place_of(running: RunningStore, host: str = "127.0.0.1") -> PeerPlace:
    return PeerPlace(
        InstanceId("s1"), NodeId("n1"), f"{host}:{running.port}", f"{host}:{running.bulk_port}"
    )


@asynccontextmanager
async def a_way(
    directory: Path, kind: str, dial: DialConfig | None = None, **changes: Any
) -> AsyncIterator[Way]:
    if kind == "nixl":
        changes = {"peers": PeersSection(transport=PeerWay.NIXL), **changes}
    config: StoreConfig = small_store(directory, **changes)
    host = "127.0.0.1" if config.listen.tls is None else "localhost"
    async with AsyncExitStack() as stack:
        running, _ = await stack.enter_async_context(a_store(config))
        transport = transport_of(kind, dial)
        stack.push_async_callback(transport.close)
        yield Way(transport, place_of(running, host), running)


HIT, MISS, CORRUPT, ERROR = GetStatus.HIT, GetStatus.MISS, GetStatus.CORRUPT, GetStatus.ERROR


@pytest.fixture(params=WAYS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "nixl" and not is_installed():
        pytest.skip("NIXL is not installed: pip install 'kvtier[nixl]'")
    return name


async def test_what_is_put_is_got_and_the_rest_is_a_miss(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        assert await way.put(1, 2, 3) == ["stored"] * 3
        assert await way.get(3, 9, 1, 2) == [HIT, MISS, HIT, HIT]
        assert await way.put(2) == ["duplicate"]
        assert await way.put(2, 4, version=1) == ["divergent", "stored"]
        assert await way.get(2) == [HIT]


async def test_a_store_takes_what_came_into_its_books(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(*range(20))
        [there] = set(await way.running.store.contains([name_of(n) for n in range(20)], soon()))
        assert there
        assert way.running.store.stats().transfers == 0


async def test_more_blocks_than_a_group_and_payloads_of_all_lengths(
    tmp_path: Path, kind: str
) -> None:
    async with a_way(tmp_path, kind) as way:
        many = range(GROUP_BLOCKS + 50)
        assert set(await way.put(*many, size=64)) == {"stored"}
        assert set(await way.get(*many, size=64)) == {HIT}
        for i, size in enumerate((1, 63, 4097, MIB)):
            assert await way.put(1000 + i, size=size) == ["stored"]
            assert await way.get(1000 + i, size=size) == [HIT]


async def test_memory_is_the_transports_where_the_caller_gives_none(
    tmp_path: Path, kind: str
) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(1, 2)
        asked = [GetRequest(name_of(n)) for n in (1, 2)]
        results = await way.transport.get_many(way.peer, asked, soon())
        payloads = [bytes(r.payload) for r in results if r.payload is not None]
        assert payloads == [payload_of(1), payload_of(2)]


async def test_another_length_and_another_namespace_are_no_hits(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(1)
        assert (await way.get(1, size=BLOCK_BYTES // 2))[0] is not HIT
        other = [GetRequest(name_of(1, OTHER_NAMESPACE), None, BLOCK_BYTES)]
        [result] = await way.transport.get_many(way.peer, other, soon())
        assert result.status is MISS


async def test_a_damaged_copy_is_never_handed_out(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(1, 2, 3)
        arena = way.running.arena
        memory = arena.frame_memory(name_of(2))
        assert memory is not None
        memory[1][100] ^= 1
        statuses = await way.get(1, 2, 3)
        assert statuses[0] is statuses[2] is HIT
        assert statuses[1] is not HIT


async def test_blocks_below_dram_are_given_too(tmp_path: Path, kind: str) -> None:
    nvme = NvmeSection(bytes_max=64 * MIB, write_policy=WritePolicy.ON_SEAL, deadline_ms=20_000)
    async with a_way(tmp_path, kind, nvme=nvme) as way:
        for start in range(0, 24, 4):
            assert set(await way.put(*range(start, start + 4), size=MIB // 2)) == {"stored"}
            assert await way.running.store.settled(soon())
        assert set(await way.get(*range(24), size=MIB // 2)) == {HIT}


async def test_a_payload_that_no_slot_could_hold_is_refused_and_the_rest_is_kept(
    tmp_path: Path, kind: str
) -> None:
    async with a_way(tmp_path, kind) as way:
        payloads = {1: payload_of(1), 2: bytes(MIB + 1), 3: payload_of(3)}
        requests = [PutRequest(name_of(n), payload, OWNER) for n, payload in payloads.items()]
        results = await way.transport.put_many(way.peer, requests, soon())
        assert [r.status for r in results] == [
            PutStatus.STORED, PutStatus.REFUSED, PutStatus.STORED,
        ]  # fmt: skip
        assert await way.get(1, 3) == [HIT, HIT]


async def test_a_wrong_checksum_is_not_published(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        put = PutRequest(name_of(1), payload_of(1), OWNER, payload_checksum=1)
        [result] = await way.transport.put_many(way.peer, [put], soon())
        assert result.status is PutStatus.CORRUPT
        assert await way.get(1) == [MISS]


async def test_a_store_under_another_name_is_not_taken_for_the_one_that_is_meant(
    tmp_path: Path, kind: str
) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(1)
        way.peer = replace(way.peer, instance=InstanceId("another"))
        with pytest.raises(UnavailableError):
            await way.get(1)


async def test_a_store_that_is_not_there_is_unavailable(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        with socket.create_server(("127.0.0.1", 0)) as bound:
            free = bound.getsockname()[1]
        gone = f"127.0.0.1:{free}"
        way.peer = replace(way.peer, grpc_address=gone, bulk_address=gone)
        with pytest.raises(UnavailableError):
            await way.get(1)


async def test_a_store_that_says_nothing_costs_the_deadline_and_no_more(
    tmp_path: Path, kind: str
) -> None:
    async with a_way(tmp_path, kind) as way:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            peer = replace(way.peer, grpc_address=address, bulk_address=address)
            asked = [GetRequest(name_of(1), None, BLOCK_BYTES)]
            with pytest.raises((DeadlineError, UnavailableError)):
                await way.transport.get_many(peer, asked, time.monotonic() + 0.2)


async def test_a_cancelled_call_leaves_the_callers_memory_alone(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(*range(6), size=MIB)
        memory = memoryview(bytearray(6 * MIB))
        asked = [GetRequest(name_of(n), memory[n * MIB : (n + 1) * MIB], MIB) for n in range(6)]
        for turns in range(1, 40, 3):
            call = asyncio.create_task(way.transport.get_many(way.peer, asked, soon()))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            before = bytes(memory)
            await asyncio.sleep(0)
            assert bytes(memory) == before
        assert await way.get(0) != [HIT]  # another length than was put
        assert await way.get(*range(6), size=MIB) == [HIT] * 6


async def test_calls_at_once_do_not_mix(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(*range(64))
        found = await asyncio.gather(*(way.get(n, n + 1, 99) for n in range(20)))
        assert found == [[HIT, HIT, MISS]] * 20


async def test_after_close_nothing_is_called(tmp_path: Path, kind: str) -> None:
    async with a_way(tmp_path, kind) as way:
        await way.put(1)
        await way.transport.close()
        await way.transport.close()
        if kind == "bulk":
            with pytest.raises(UnavailableError):
                await way.get(1)


# Who is let in


@dataclass
class Credentials:
    """A cluster's authority and tokens in a folder."""

    folder: Path

    def __post_init__(self) -> None:
        certs.init(self.folder)

    def listen(self, *, certificates: bool = False) -> ListenConfig:
        cert, key = certs.issue_into(self.folder, new_principal("s1", "store"), ["localhost"])
        ca = self.folder / certs.CA_CERT if certificates else None
        return ListenConfig(
            bind="localhost:0",
            tls=TlsConfig(cert, key, ca),
            tokens_file=None if certificates else self.folder / certs.TOKENS,
        )

    def token(self, role: str) -> Path:
        path = self.folder / f"{role}.token"
        files.write_private(path, certs.add_token(self.folder, new_principal("it", role)).encode())
        return path

    @property
    def trust(self) -> TlsConfig:
        return TlsConfig(ca_file=self.folder / certs.CA_CERT)

    def certified(self, role: str) -> DialConfig:
        cert, key = certs.issue_into(self.folder, new_principal("it", role), ["localhost"])
        return DialConfig(tls=TlsConfig(cert, key, self.folder / certs.CA_CERT))


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(tmp_path / "certs")


async def test_with_tls_and_a_token_a_store_reads_and_may_not_write(
    tmp_path: Path, kind: str, credentials: Credentials
) -> None:
    worker = DialConfig(tls=credentials.trust, token_file=credentials.token("worker"))
    store = DialConfig(tls=credentials.trust, token_file=credentials.token("store"))
    listen = credentials.listen()
    async with a_way(tmp_path / "s", kind, worker, listen=listen) as way:
        assert await way.put(1) == ["stored"]
        reader = Way(transport_of(kind, store), way.peer, way.running)
        try:
            assert await reader.get(1) == [HIT]
            with pytest.raises(KvtierError):
                await reader.put(2)
            assert await reader.get(1, 2) == [HIT, MISS]
        finally:
            await reader.transport.close()


@pytest.mark.parametrize("role", ["router", "index"])
async def test_roles_that_read_no_payload_are_not_let_in(
    tmp_path: Path, kind: str, credentials: Credentials, role: str
) -> None:
    dial = DialConfig(tls=credentials.trust, token_file=credentials.token(role))
    async with a_way(tmp_path / "s", kind, dial, listen=credentials.listen()) as way:
        with pytest.raises(ForbiddenError):
            await way.get(1)


async def test_without_a_token_or_with_a_wrong_one_nobody_is_let_in(
    tmp_path: Path, kind: str, credentials: Credentials
) -> None:
    credentials.token("worker")
    wrong = tmp_path / "wrong.token"
    elsewhere = Credentials(tmp_path / "elsewhere")
    files.write_private(wrong, elsewhere.token("worker").read_bytes())
    listen = credentials.listen()
    for token in (None, wrong):
        dial = DialConfig(tls=credentials.trust, token_file=token)
        async with a_way(tmp_path / f"s{token is None}", kind, dial, listen=listen) as way:
            with pytest.raises(UnauthenticatedError):
                await way.get(1)


async def test_certificates_say_who_calls(
    tmp_path: Path, kind: str, credentials: Credentials
) -> None:
    listen = credentials.listen(certificates=True)
    async with a_way(tmp_path / "s", kind, credentials.certified("worker"), listen=listen) as way:
        assert await way.put(1) == ["stored"]
        assert await way.get(1) == [HIT]
        other = transport_of(kind, credentials.certified("router"))
        try:
            with pytest.raises(ForbiddenError):
                await Way(other, way.peer, way.running).get(1)
        finally:
            await other.close()
        nobody = transport_of(kind, DialConfig(tls=credentials.trust))
        try:
            with pytest.raises(KvtierError):
                await Way(nobody, way.peer, way.running).get(1)
        finally:
            await nobody.close()


async def test_a_store_whose_certificate_is_of_another_authority_is_not_talked_to(
    tmp_path: Path, kind: str, credentials: Credentials
) -> None:
    token = credentials.token("worker")
    stranger = Credentials(tmp_path / "stranger")
    dial = DialConfig(tls=stranger.trust, token_file=token)
    async with a_way(tmp_path / "s", kind, dial, listen=credentials.listen()) as way:
        with pytest.raises(UnavailableError):
            await way.get(1)


@pytest.mark.parametrize("address", ["10.77.0.9:1", "peer.example:1"])
async def test_nothing_is_said_to_another_machine_without_tls(kind: str, address: str) -> None:
    transport = transport_of(kind)
    try:
        peer = PeerPlace(InstanceId("s1"), NodeId("n1"), address, address)
        asked = [GetRequest(name_of(1), None, BLOCK_BYTES)]
        with pytest.raises(UnavailableError, match="no TLS"):
            await transport.get_many(peer, asked, soon())
    finally:
        await transport.close()


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "TLS"])
async def test_a_store_that_falls_silent_costs_the_deadline_and_no_more(
    credentials: Credentials, has_tls: bool
) -> None:
    context, dial = None, DialConfig()
    if has_tls:
        dial = DialConfig(tls=credentials.trust)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        cert, key = certs.issue_into(
            credentials.folder, new_principal("s1", "store"), ["127.0.0.1"]
        )
        context.load_cert_chain(cert, key)
    asked = [GetRequest(name_of(1), None, BLOCK_BYTES)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = asyncio.create_task(asyncio.to_thread(let_in_and_ignore, listener, context))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        transport = BulkTransport(dial)
        try:
            peer = PeerPlace(InstanceId("s1"), NodeId("n1"), address, address)
            with pytest.raises(DeadlineError):
                async with asyncio.timeout(30.0):
                    await transport.get_many(peer, asked, time.monotonic() + 2.0)
        finally:
            await transport.close()
        assert await silent > form.REQUEST.size


def let_in_and_ignore(listener: socket.socket, context: ssl.SSLContext | None) -> int:
    """Welcome one caller, and say nothing until it hangs up; how many bytes it asked with."""
    plain, _ = listener.accept()
    with plain if context is None else context.wrap_socket(plain, server_side=True) as caller:
        caller.settimeout(60.0)
        heard = caller.recv(1 << 16)
        caller.sendall(b"\0")
        with contextlib.suppress(OSError):
            while more := caller.recv(1 << 16):
                heard += more
    return len(heard)
