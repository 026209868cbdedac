"""An index with TLS and tokens: who gets in, and to what; credentials that change meanwhile."""

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier.security import certs
from kvtier.security.clock import Clock
from kvtier.security.roles import GRANTABLE, AccessRole, new_principal
from kvtier.security.tokens import mint
from kvtier.wire import convert, rpc, transport
from kvtier.wire import messages as pb
from tests.harness.processes import Launch, ProcessRunner, kvtier_command
from tests.harness.proxy import TcpProxy
from tests.harness.readiness import GrpcTarget, grpc_ready
from tests.harness.waiting import eventually_async
from tests.support.corpus import worker
from tests.support.index_cluster import (
    IndexProcess,
    PublisherProcess,
    PublisherSpec,
    fleet_view,
    index_launch,
    same,
    start_publishers,
)
from tests.support.raw_publisher import unary

DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED

MAY = {
    "Publish": {"worker", "store", "bridge"},
    "Match": {"router", "operator", "worker", "store", "bridge"},
    "Reserve": {"router"},
    "Release": {"router", "operator"},
    "Snapshot": {"router", "index", "operator"},
    "WatchFleet": {"router", "operator", "store", "index"},
    "Stats": {"operator"},
    "Locate": {"store", "operator"},
}
"""Who may call what: written down a second time, so that a change of the policy shows here."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """An index with TLS and tokens, and the folder with its authority."""

    index: IndexProcess
    folder: Path

    def token(self, role: str, name: str = "", clock: Clock | None = None) -> str:
        principal = new_principal(name or f"the-{role}", role, (), ("*",))
        if clock is not None:
            return certs.add_token(self.folder, principal, 1, clock)
        return certs.add_token(self.folder, principal)

    @contextlib.asynccontextmanager
    async def channel(self, token: str | None) -> AsyncIterator[grpc.aio.Channel]:
        credentials = grpc.ssl_channel_credentials((self.folder / certs.CA_CERT).read_bytes())
        if token is not None:
            shown = grpc.access_token_call_credentials(token)
            credentials = grpc.composite_channel_credentials(credentials, shown)
        channel = transport.new_channel(self.index.address, credentials)
        try:
            yield channel
        finally:
            await channel.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded") / "secrets"
    with ProcessRunner("index_access", folder.parent) as runner:
        # The commands that the readme tells an operator.
        for number, arguments in enumerate(
            [
                ("init", str(folder)),
                ("issue", str(folder), "--role", "index", "--name", "i1", "--host", "127.0.0.1"),
                ("token", str(folder), "--role", "operator", "--name", "o1"),
            ]
        ):
            made = runner.spawn(Launch(f"certs{number}", kvtier_command("certs", *arguments)))
            assert made.wait(40) == 0
        launch, port = secured(runner, folder)
        yield Guarded(IndexProcess(runner.start(launch), port), folder)


def secured(runner: ProcessRunner, folder: Path, name: str = "index") -> tuple[Launch, int]:
    """How to start an index that asks for tokens over TLS."""
    from dataclasses import replace

    from tests.harness.ports import free_port

    port = free_port()
    tls = {
        "cert_file": str(folder / "index-i1.crt"),
        "key_file": str(folder / "index-i1.key"),
    }
    listen: Any = {
        "bind": f"127.0.0.1:{port}",
        "tokens_file": str(folder / certs.TOKENS),
        "tls": tls,
    }
    launch, _ = index_launch(runner, name, listen=listen)
    trusted = grpc.ssl_channel_credentials((folder / certs.CA_CERT).read_bytes())
    ready = grpc_ready(GrpcTarget(f"127.0.0.1:{port}", trusted), rpc.INDEX.full_name)
    return replace(launch, ready=ready), port


async def code_of(channel: grpc.aio.Channel, name: str) -> grpc.StatusCode:
    """Call a method with a harmless first message; how the call ends, OK if it is served.

    grpc says INTERNAL where a message was under way when the index ended the call: asked again.
    """
    for _ in range(50):
        code = await _code_of(channel, name)
        if code is not grpc.StatusCode.INTERNAL:
            break
    return code


async def _code_of(channel: grpc.aio.Channel, name: str) -> grpc.StatusCode:
    method = rpc.methods(rpc.INDEX)[name]
    hello = convert.hello_to(worker("probe"), 7, 0)
    harmless = {
        "Publish": pb.PublishRequest(hello=hello),
        "Match": pb.MatchRequest(),
        "Reserve": pb.ReserveRequest(hello=pb.RouterHello(router="r", epoch=1)),
        "Release": pb.ReleaseRequest(router="r", epoch=1),
        "Snapshot": pb.SnapshotRequest(),
        "WatchFleet": pb.WatchFleetRequest(),
        "Stats": pb.StatsRequest(),
        "Locate": pb.LocateRequest(namespace=bytes(32), hashes=bytes(8)),
    }[name]
    make = rpc.call(channel, rpc.INDEX, name)
    try:
        if not method.client_streams and not method.server_streams:
            await make(harmless, timeout=10)
            return grpc.StatusCode.OK
        call = make(timeout=10) if method.client_streams else make(harmless, timeout=10)
        if method.client_streams:
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(harmless)
                await call.done_writing()
        await call.read()
        if call.done():
            code: grpc.StatusCode = await call.code()
            return code
        call.cancel()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def settled(guarded: Guarded, token: str, wanted: grpc.StatusCode, name: str) -> None:
    """Wait until the index has looked at its changed tokens file."""
    async with guarded.channel(token) as channel:

        async def is_so() -> bool:
            return await code_of(channel, name) is wanted

        await eventually_async(is_so, 30, f"{name} gives {wanted}")


async def test_every_role_may_call_what_the_table_says_and_nothing_else(guarded: Guarded) -> None:
    assert set(MAY) == set(rpc.methods(rpc.INDEX)), "every RPC of the descriptors is in the table"
    tokens = {str(role): guarded.token(str(role)) for role in sorted(GRANTABLE)}
    await settled(guarded, tokens["operator"], grpc.StatusCode.OK, "Stats")
    asked = 0
    for role, token in tokens.items():
        async with guarded.channel(token) as channel:
            for name, roles in MAY.items():
                code = await code_of(channel, name)
                wanted = grpc.StatusCode.OK if role in roles else DENIED
                assert code is wanted, f"{role} calls {name}"
                asked += 1
    assert asked == len(GRANTABLE) * len(MAY) == 48
    guarded.index.clean_log()


async def test_no_wrong_expired_or_malformed_credentials_open_nothing(guarded: Guarded) -> None:
    long_ago = time.time() - 40 * 86_400
    then = Clock(wall=lambda: long_ago, monotonic=time.monotonic)
    expired = guarded.token("operator", clock=then)
    good = guarded.token("operator")
    await settled(guarded, good, grpc.StatusCode.OK, "Stats")
    for bad in (None, mint(), expired, good[:-1], good + "x", good.swapcase(), "x" * 4096, "odd"):
        async with guarded.channel(bad) as channel:
            for name in MAY:
                assert await code_of(channel, name) is UNKNOWN, f"{name} with {bad!r}"
            # Liveness alone answers to everybody; watching it does not.
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await health.Watch(health_pb2.HealthCheckRequest(), timeout=10).read()
            assert error.value.code() is UNKNOWN
    log = guarded.index.clean_log()
    for secret in (good, expired):
        assert secret not in log


async def ask(channel: grpc.aio.Channel, path: str) -> Any:
    method: Any = channel.unary_unary(path)
    return await method(b"", timeout=10)


async def test_methods_that_are_none_and_reflection_are_closed(guarded: Guarded) -> None:
    token = guarded.token("router")
    await settled(guarded, token, grpc.StatusCode.OK, "Match")
    paths = [
        "/kvtier.v1.Index/Destroy",
        "/kvtier.v1.Nothing/Match",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/",
    ]
    async with guarded.channel(token) as channel:
        for path in paths:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await ask(channel, path)
            assert error.value.code() in {DENIED, grpc.StatusCode.UNIMPLEMENTED}, path


async def test_without_tls_or_with_a_foreign_authority_there_is_no_connection(
    guarded: Guarded, tmp_path: Path
) -> None:
    certs.init(tmp_path / "foreign")
    foreign = grpc.ssl_channel_credentials((tmp_path / "foreign" / certs.CA_CERT).read_bytes())
    for credentials in (None, foreign):
        channel = transport.new_channel(guarded.index.address, credentials)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Stats")(pb.StatsRequest(), timeout=10)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()


async def test_a_worker_publishes_only_as_itself(guarded: Guarded) -> None:
    own = certs.add_token(guarded.folder, new_principal("w1", "worker"))
    await settled(guarded, own, grpc.StatusCode.OK, "Match")
    async with guarded.channel(own) as channel:
        for name, wanted in (("w1", grpc.StatusCode.OK), ("w2", DENIED), ("w1x", DENIED)):
            call = rpc.call(channel, rpc.INDEX, "Publish")(timeout=10)
            hello = convert.hello_to(worker(name), 7, 0)
            await call.write(pb.PublishRequest(hello=hello))
            if wanted is grpc.StatusCode.OK:
                assert (await call.read()).welcome.need_snapshot
                await call.write(pb.PublishRequest(goodbye=pb.Goodbye()))
                await call.done_writing()
            assert await call.code() is wanted, name
        # By tokens ask only routers and operators: it would tell about other tenants' prompts.
        query = pb.MatchQuery(tokens=bytes(64), served_name="chat", scope_salt="another")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await unary(channel, "Match")(pb.MatchRequest(queries=[query]), timeout=10)
        assert error.value.code() is DENIED


async def holds_what(guarded: Guarded, token: str, publisher: PublisherProcess) -> None:
    truth = await publisher.truth()
    async with guarded.channel(token) as channel:

        async def is_so() -> bool:
            view = await fleet_view(channel)
            name = publisher.spec.worker
            return name in view and not view[name].hidden and same(view[name].shards[0], truth)

        await eventually_async(is_so, 30, "the index holds what the publisher does")


async def test_tokens_are_changed_and_withdrawn_under_a_running_publisher(
    guarded: Guarded, processes: ProcessRunner
) -> None:
    operator = guarded.token("operator")
    await settled(guarded, operator, grpc.StatusCode.OK, "Stats")
    principal = new_principal("roll", "worker")
    old = certs.add_token(guarded.folder, principal)
    token_file = processes.directory / "token"
    token_file.write_text(old)
    with TcpProxy(("127.0.0.1", guarded.index.port)) as link:
        spec = PublisherSpec(
            "roll",
            [link.address],
            config={"refused_retry_s": 0.3},
            tls={"ca_file": str(guarded.folder / certs.CA_CERT)},
            token_file=str(token_file),
        )
        (publisher,) = await start_publishers(processes, spec)
        await publisher.ask("fill", chains=5, blocks=64)
        await holds_what(guarded, operator, publisher)

        # A second token beside the first; the publisher's file follows; the first is withdrawn.
        new = certs.add_token(guarded.folder, principal)
        token_file.write_text(new)
        _withdraw(guarded.folder, old)
        await settled(guarded, old, UNKNOWN, "Match")
        refusals = len((await publisher.ask("stats"))["refusals"])
        assert link.reset() == 1
        await publisher.ask("store", chain=90, begin=0, end=8)
        await holds_what(guarded, operator, publisher)
        assert len((await publisher.ask("stats"))["refusals"]) - refusals <= 1

        # Withdrawn altogether it is told why, and tries on without a storm.
        _withdraw(guarded.folder, new)
        await settled(guarded, new, UNKNOWN, "Match")
        link.reset()

        async def is_refused() -> bool:
            refused = (await publisher.ask("stats"))["refusals"]
            return bool(refused) and "UNAUTHENTICATED" in refused[-1]

        await eventually_async(is_refused, 30, "the publisher is turned away")
        await publisher.ask("store", chain=91, begin=0, end=8)
        # With a third one it is back, and nothing was restarted.
        token_file.write_text(certs.add_token(guarded.folder, principal))
        await holds_what(guarded, operator, publisher)
        assert guarded.index.process.starts_count == 1
        assert publisher.process.starts_count == 1
        opened = (await publisher.ask("stats"))["streams"][0]["opened"]
        assert opened < 60
    guarded.index.clean_log()


def _withdraw(folder: Path, token: str) -> None:
    """Take one token out of the file, as an operator would with an editor."""
    from kvtier.security import files, tokens

    path = folder / certs.TOKENS
    entries = dict(tokens.parse_entries(path.read_bytes()))
    del entries[tokens.hashed(token)]
    text = "\n".join(tokens.format_entry(entry) for entry in entries.values())
    files.write_private(path, text.encode())


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([], "tls.cert_file and tls.key_file and tokens_file or tls.ca_file"),
        (["tls"], "tokens_file or tls.ca_file"),
        (["tokens"], "tls.cert_file and tls.key_file"),
    ],
    ids=["nothing", "only tls", "only tokens"],
)
def test_off_loopback_an_index_refuses_to_start_without_both(
    guarded: Guarded, processes: ProcessRunner, given: list[str], missing: str
) -> None:
    flags = ["--bind", "0.0.0.0:0"]
    if "tls" in given:
        flags += ["--cert-file", str(guarded.folder / "index-i1.crt")]
        flags += ["--key-file", str(guarded.folder / "index-i1.key")]
    if "tokens" in given:
        flags += ["--tokens-file", str(guarded.folder / certs.TOKENS)]
    process = processes.spawn(Launch("open", kvtier_command("index", *flags)))
    assert process.wait(40) == 1
    (line,) = process.log_text().splitlines()[1:]
    assert f"without {missing}" in line


def test_roles_and_times_of_this_file_are_those_of_the_code() -> None:
    assert {str(role) for role in GRANTABLE} == {
        "router", "worker", "store", "bridge", "index", "operator",
    }  # fmt: skip
    assert AccessRole.LOCAL not in GRANTABLE
    assert datetime.timedelta(days=certs.TOKEN_DAYS) > datetime.timedelta(days=40)
