"""Who gets in: a real server on loopback, callers with good, bad and no credentials."""

import asyncio
import contextlib
import datetime
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from hypothesis import given
from hypothesis import strategies as st

from kvtier import limits, security
from kvtier.errors import CallerError, ConfigError, ForbiddenError, UnauthenticatedError
from kvtier.sections import DialConfig, ListenConfig, TlsConfig
from kvtier.security import AccessRole, Denial, Policy, certs, tls, tokens
from kvtier.security.clock import Clock
from kvtier.security.files import POLL_S, Watched
from kvtier.security.roles import from_uri, new_principal, to_uri
from kvtier.types import InstanceId, ScopeId
from kvtier.wire import transport

SERVICE = "test.Echo"
CALL_S = 10.0
KINDS = ("Unary", "Fan", "Gather", "Chat")
STREAMED = {"Gather", "Chat"}
"""Kinds whose requests are streams."""
ROUTERS = {f"/{SERVICE}/{kind}": {AccessRole.ROUTER} for kind in KINDS}
POLICY = Policy.of({**ROUTERS, f"/{SERVICE}/Stop": {AccessRole.OPERATOR}})
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED


@dataclass(slots=True)
class MovingClock:
    """Real time plus what the test adds."""

    wall_s: float = field(default_factory=lambda: Clock().wall())
    monotonic_s: float = 0.0

    def clock(self) -> Clock:
        return Clock(wall=lambda: self.wall_s, monotonic=lambda: self.monotonic_s)

    def poll(self) -> None:
        """From now on, files are looked at again."""
        self.monotonic_s += POLL_S


# A service whose answers name the caller, in all four kinds


async def unary(request: bytes, _: object) -> bytes:
    return request + security.caller().name.encode()


async def fan(request: bytes, _: object) -> AsyncIterator[bytes]:
    for _number in range(2):
        yield request + security.caller().name.encode()


async def gather(requests: AsyncIterator[bytes], _: object) -> bytes:
    return b"".join([part async for part in requests]) + security.caller().name.encode()


async def chat(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(request + security.caller().name.encode())


def handlers() -> list[grpc.GenericRpcHandler]:
    echo: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Fan": grpc.unary_stream_rpc_method_handler(fan),
        "Gather": grpc.stream_unary_rpc_method_handler(gather),
        "Chat": grpc.stream_stream_rpc_method_handler(chat),
        "Stop": grpc.unary_unary_rpc_method_handler(unary),
        "Unlisted": grpc.unary_unary_rpc_method_handler(unary),
    }
    servicer = HealthServicer()
    check: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Check": grpc.unary_unary_rpc_method_handler(
            servicer.Check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        ),
        "Watch": grpc.unary_stream_rpc_method_handler(
            servicer.Watch,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        ),
    }
    return [
        grpc.method_handlers_generic_handler(SERVICE, echo),
        grpc.method_handlers_generic_handler("grpc.health.v1.Health", check),
    ]


@contextlib.asynccontextmanager
async def serving(
    listen: ListenConfig, clock: Clock | None = None, policy: Policy = POLICY
) -> AsyncIterator[security.SecureServer]:
    secured = security.new_server(listen, policy, clock or Clock())
    secured.server.add_generic_rpc_handlers(handlers())
    await secured.server.start()
    try:
        yield secured
    finally:
        await secured.server.stop(0)


@contextlib.asynccontextmanager
async def dialing(
    secured: security.SecureServer, clock: Clock | None = None, **dial: Any
) -> AsyncIterator[security.Dialer]:
    target = f"127.0.0.1:{secured.port}"
    dialer = security.Dialer(DialConfig(targets=(target,), **dial), target, clock or Clock())
    try:
        yield dialer
    finally:
        await dialer.close()


def method(channel: grpc.aio.Channel, path: str) -> Any:
    """Callable of a method; its last word says of which kind it is."""
    kinds: dict[str, Callable[..., Any]] = {
        "Fan": channel.unary_stream,
        "Watch": channel.unary_stream,
        "Gather": channel.stream_unary,
        "Chat": channel.stream_stream,
    }
    return kinds.get(path.rsplit("/", 1)[1], channel.unary_unary)(path)


async def silence() -> AsyncIterator[bytes]:
    """Requests of a client that waits for the server to speak first."""
    await asyncio.sleep(2 * CALL_S)
    yield b">"


async def call(channel: grpc.aio.Channel, kind: str = "Unary", **options: Any) -> bytes:
    """One call of a kind with the request `>`; its answers joined."""
    return await begun(channel, kind, iter([b">"]) if kind in STREAMED else b">", options)


async def begun(channel: grpc.aio.Channel, kind: str, request: Any, options: Any) -> bytes:
    answers = method(channel, f"/{SERVICE}/{kind}")(request, **{"timeout": CALL_S, **options})
    if kind in {"Fan", "Chat"}:
        return b"".join([part async for part in answers])
    answer: bytes = await answers
    return answer


async def refusal(channel: grpc.aio.Channel, kind: str = "Unary", **options: Any) -> Any:
    """Status and text of a call that is refused.

    Nothing is sent on a stream: a write that meets the end of its call makes grpc.aio's client
    report INTERNAL in place of the server's status.
    """
    request = silence() if kind in STREAMED else b">"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await begun(channel, kind, request, options)
    return caught.value.code(), caught.value.details()


def bearer(token: str) -> tuple[tuple[str, str | bytes], ...]:
    return (("authorization", f"Bearer {token}"),)


def token_listen(folder: Path) -> ListenConfig:
    return ListenConfig(tokens_file=folder / certs.TOKENS)


def token_file(folder: Path, token: str) -> Path:
    path = folder / "token"
    path.write_text(token + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class Pki:
    """A folder with an authority."""

    folder: Path

    @classmethod
    def new(cls, folder: Path) -> "Pki":
        certs.init(folder)
        return cls(folder)

    def tls(self, role: str, name: str, **options: Any) -> TlsConfig:
        principal = new_principal(name, role)
        cert, key = certs.issue_into(self.folder, principal, ["127.0.0.1"], **options)
        return TlsConfig(cert, key, self.folder / certs.CA_CERT)

    def listen(self, **options: Any) -> ListenConfig:
        return ListenConfig(tls=self.tls("index", "i1"), **options)


def days_ago(days: int) -> Clock:
    return Clock(wall=lambda: Clock().wall() - days * certs.DAY_S)


def serial(pem: bytes | None) -> int:
    assert pem is not None
    return x509.load_pem_x509_certificate(pem).serial_number


# Tokens


@pytest.mark.parametrize("kind", KINDS)
async def test_the_right_role_may_call_every_kind_of_method(tmp_path: Path, kind: str) -> None:
    token = certs.add_token(tmp_path, new_principal("r1", "router"))
    async with (
        serving(token_listen(tmp_path)) as secured,
        dialing(secured, token_file=token_file(tmp_path, token)) as dialer,
    ):
        answers = 2 if kind == "Fan" else 1
        assert await call(dialer.channel(), kind) == b">r1" * answers
        assert set(secured.guard.denials.values()) == {0}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_wrong_role_may_call_no_kind_of_method(tmp_path: Path, kind: str) -> None:
    token = certs.add_token(tmp_path, new_principal("w1", "worker"))
    async with (
        serving(token_listen(tmp_path)) as secured,
        dialing(secured, token_file=token_file(tmp_path, token)) as dialer,
    ):
        assert await refusal(dialer.channel(), kind) == (DENIED, "not allowed")
        assert secured.guard.denials[Denial.ROLE] == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_token_no_kind_of_method_answers(tmp_path: Path, kind: str) -> None:
    certs.add_token(tmp_path, new_principal("r1", "router"))
    async with serving(token_listen(tmp_path)) as secured, dialing(secured) as dialer:
        assert (await refusal(dialer.channel(), kind))[0] is UNAUTHENTICATED
        assert secured.guard.denials[Denial.MISSING] == 1


async def test_all_bad_tokens_get_the_same_answer_and_only_the_count_tells(tmp_path: Path) -> None:
    time = MovingClock()
    router = new_principal("r1", "router")
    expired = certs.add_token(tmp_path, router, days=1, clock=time.clock())
    good = certs.add_token(tmp_path, router, days=9, clock=time.clock())
    time.wall_s += 2 * certs.DAY_S
    shown: dict[Denial, list[tuple[tuple[str, str | bytes], ...]]] = {
        Denial.UNKNOWN: [bearer(tokens.mint()), bearer(good[:-1]), bearer(good + "a")],
        Denial.EXPIRED: [bearer(expired)],
        Denial.MALFORMED: [
            bearer(""),
            bearer("x"),
            bearer("x" * 257),
            bearer(f" {good}"),
            bearer(good) + bearer(good),
            (("authorization", good),),
            (("authorization", f"Basic {good}"),),
            (("authorization", "Bearer"),),
        ],
        Denial.MISSING: [(), (("authorization-bin", good.encode()),), (("token", good),)],
    }
    async with (
        serving(token_listen(tmp_path), time.clock()) as secured,
        dialing(secured) as dialer,
    ):
        channel = dialer.channel()
        for denial, attempts in shown.items():
            for metadata in attempts:
                answer = await refusal(channel, metadata=metadata)
                assert answer == (UNAUTHENTICATED, "no valid credentials")
            assert secured.guard.denials[denial] == len(attempts)
        assert await call(channel, metadata=bearer(good)) == b">r1"
        lower_case = (("authorization", f"bearer {good}"),)
        assert await call(channel, metadata=lower_case) == b">r1"


async def test_a_refused_stream_ends_without_a_single_message_of_it(tmp_path: Path) -> None:
    certs.add_token(tmp_path, new_principal("r1", "router"))
    async with serving(token_listen(tmp_path)) as secured, dialing(secured) as dialer:
        for kind in ("Gather", "Chat"):
            streaming = method(dialer.channel(), f"/{SERVICE}/{kind}")(timeout=CALL_S)
            assert await streaming.code() is UNAUTHENTICATED


async def test_a_method_without_policy_is_denied_even_to_operators(tmp_path: Path) -> None:
    token = certs.add_token(tmp_path, new_principal("root", "operator"))
    async with (
        serving(token_listen(tmp_path)) as secured,
        dialing(secured, token_file=token_file(tmp_path, token)) as dialer,
    ):
        channel = dialer.channel()
        assert (await refusal(channel, "Unlisted"))[0] is DENIED
        assert (await refusal(channel, "Absent"))[0] is DENIED
        assert secured.guard.denials[Denial.NO_POLICY] == 2
    async with serving(token_listen(tmp_path)) as secured, dialing(secured) as dialer:
        assert (await refusal(dialer.channel(), "Absent"))[0] is UNAUTHENTICATED


async def test_health_check_alone_answers_without_credentials(tmp_path: Path) -> None:
    certs.add_token(tmp_path, new_principal("r1", "router"))
    async with serving(token_listen(tmp_path)) as secured, dialing(secured) as dialer:
        channel = dialer.channel()
        path = "/grpc.health.v1.Health/"
        answer = await method(channel, path + "Check")(b"", timeout=CALL_S)
        response = health_pb2.HealthCheckResponse.FromString(answer)
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        watching = method(channel, path + "Watch")(b"", timeout=CALL_S)
        assert await watching.code() is UNAUTHENTICATED


async def test_health_watch_answers_to_any_known_caller(tmp_path: Path) -> None:
    token = certs.add_token(tmp_path, new_principal("s1", "store"))
    async with serving(token_listen(tmp_path)) as secured, dialing(secured) as dialer:
        watch = method(dialer.channel(), "/grpc.health.v1.Health/Watch")
        watching = watch(b"", timeout=CALL_S, metadata=bearer(token))
        assert await watching.read() == b"\x08\x01"
        watching.cancel()


async def test_without_credentials_configured_loopback_callers_may_call_what_is_listed() -> None:
    async with serving(ListenConfig()) as secured, dialing(secured) as dialer:
        assert await call(dialer.channel()) == b">local"
        assert await call(dialer.channel(), "Stop") == b">local"
        assert (await refusal(dialer.channel(), "Unlisted"))[0] is DENIED


async def test_outside_of_a_call_there_is_no_caller() -> None:
    with pytest.raises(UnauthenticatedError):
        security.caller()


async def test_concurrent_calls_each_see_their_own_caller(tmp_path: Path) -> None:
    named = {f"r{n}": certs.add_token(tmp_path, new_principal(f"r{n}", "router")) for n in range(8)}
    async with serving(token_listen(tmp_path)) as secured, dialing(secured) as dialer:
        channel = dialer.channel()
        calls = [
            call(channel, kind, metadata=bearer(token))
            for kind in ("Unary", "Gather", "Chat")
            for token in named.values()
        ]
        answers = await asyncio.gather(*calls)
    assert answers == [f">{name}".encode() for name in named] * 3


async def test_a_synchronous_handler_is_never_run(tmp_path: Path) -> None:
    ran = []

    def synchronous(request: bytes, _: object) -> bytes:
        ran.append(request)
        return request

    secured = security.new_server(ListenConfig(), Policy.of(ROUTERS))
    handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(synchronous)
    generic = grpc.method_handlers_generic_handler(SERVICE, {"Unary": handler})
    secured.server.add_generic_rpc_handlers([generic])
    await secured.server.start()
    try:
        async with dialing(secured) as dialer:
            code, _ = await refusal(dialer.channel())
    finally:
        await secured.server.stop(0)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert ran == []


# Rotation of tokens


async def test_a_new_token_works_and_a_withdrawn_one_ends_without_restart(tmp_path: Path) -> None:
    time = MovingClock()
    router = new_principal("r1", "router")
    first = certs.add_token(tmp_path, router)
    async with (
        serving(token_listen(tmp_path), time.clock()) as secured,
        dialing(secured) as dialer,
    ):
        channel = dialer.channel()
        second = certs.add_token(tmp_path, router)
        assert (await refusal(channel, metadata=bearer(second)))[0] is UNAUTHENTICATED
        time.poll()
        assert await call(channel, metadata=bearer(first)) == b">r1"
        assert await call(channel, metadata=bearer(second)) == b">r1"
        (tmp_path / certs.TOKENS).write_text("token = []", encoding="utf-8")
        time.poll()
        assert (await refusal(channel, metadata=bearer(first)))[0] is UNAUTHENTICATED


@pytest.mark.parametrize("broken", ["", "[[token", "token = [{}]", None])
async def test_a_broken_tokens_file_keeps_the_old_tokens_and_is_counted(
    tmp_path: Path, broken: str | None
) -> None:
    time = MovingClock()
    token = certs.add_token(tmp_path, new_principal("r1", "router"))
    async with (
        serving(token_listen(tmp_path), time.clock()) as secured,
        dialing(secured, token_file=token_file(tmp_path, token)) as dialer,
    ):
        book = secured.tokens
        assert book is not None
        path = tmp_path / certs.TOKENS
        good = path.read_bytes()
        if broken is None:
            path.unlink()
        else:
            path.write_text(broken, encoding="utf-8")
        for _ in range(3):
            time.poll()
            assert await call(dialer.channel()) == b">r1"
        assert (book.source.reload_errors, bool(book.source.last_error)) == (1, True)
        path.write_bytes(good)
        time.poll()
        assert await call(dialer.channel()) == b">r1"
        assert (book.source.reload_errors, book.source.last_error) == (1, "")


async def test_a_client_shows_the_new_token_of_its_file(tmp_path: Path) -> None:
    time = MovingClock()
    first = certs.add_token(tmp_path, new_principal("r1", "router"))
    second = certs.add_token(tmp_path, new_principal("r2", "router"))
    async with (
        serving(token_listen(tmp_path)) as secured,
        dialing(secured, time.clock(), token_file=token_file(tmp_path, first)) as dialer,
    ):
        channel = dialer.channel()
        assert await call(channel) == b">r1"
        token_file(tmp_path, second)
        time.poll()
        assert await call(channel) == b">r2"
        assert dialer.channel() is channel


def test_a_tokens_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    certs.add_token(tmp_path, new_principal("r1", "router"))
    (tmp_path / certs.TOKENS).chmod(0o620)
    with pytest.raises(ConfigError, match="written by others"):
        tokens.TokenBook(tmp_path / certs.TOKENS)


@pytest.mark.parametrize("content", [b"", b"short", b"two words of text here", b"\xff" * 40])
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match="no token"):
        tokens.TokenSource(tmp_path / "token")


def test_a_fifo_or_a_folder_is_no_credential_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        tokens.TokenSource(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        tokens.TokenSource(tmp_path / "absent")


def test_tokens_do_not_repeat_and_carry_the_prefix_that_scanners_look_for() -> None:
    minted = {tokens.mint() for _ in range(100)}
    assert len(minted) == 100
    assert all(token.startswith("kvtier_") and len(token) == 50 for token in minted)


# Certificates


@pytest.mark.parametrize("kind", KINDS)
async def test_a_certificate_of_the_right_role_is_enough(tmp_path: Path, kind: str) -> None:
    pki = Pki.new(tmp_path)
    async with (
        serving(pki.listen()) as secured,
        dialing(secured, tls=pki.tls("router", "r1")) as good,
        dialing(secured, tls=pki.tls("worker", "w1")) as bad,
    ):
        answers = 2 if kind == "Fan" else 1
        assert await call(good.channel(), kind) == b">r1" * answers
        assert await refusal(bad.channel(), kind) == (DENIED, "not allowed")
        assert secured.guard.denials[Denial.ROLE] == 1


async def test_without_or_with_a_foreign_certificate_there_is_no_connection(tmp_path: Path) -> None:
    ours, theirs = Pki.new(tmp_path / "a"), Pki.new(tmp_path / "b")
    own = theirs.tls("router", "r1")
    foreign = TlsConfig(own.cert_file, own.key_file, ours.folder / certs.CA_CERT)
    none = TlsConfig(ca_file=ours.folder / certs.CA_CERT)
    async with serving(ours.listen()) as secured:
        for config in (foreign, none):
            async with dialing(secured, tls=config) as dialer:
                assert (await refusal(dialer.channel()))[0] is grpc.StatusCode.UNAVAILABLE
        async with dialing(secured) as plain:
            assert (await refusal(plain.channel()))[0] is grpc.StatusCode.UNAVAILABLE
        assert set(secured.guard.denials.values()) == {0}


async def test_a_client_trusts_no_server_of_a_foreign_authority(tmp_path: Path) -> None:
    ours, theirs = Pki.new(tmp_path / "a"), Pki.new(tmp_path / "b")
    async with (
        serving(theirs.listen()) as secured,
        dialing(secured, tls=TlsConfig(ca_file=ours.folder / certs.CA_CERT)) as dialer,
    ):
        assert (await refusal(dialer.channel()))[0] is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_certificate_gets_no_connection(tmp_path: Path) -> None:
    pki = Pki.new(tmp_path)
    expired = pki.tls("router", "r1", days=1, clock=days_ago(3))
    with pytest.raises(ConfigError, match="ended at"):
        tls.watch(expired)
    forced = tls.watch(expired, days_ago(3)).get()
    async with serving(pki.listen()) as secured:
        channel = transport.new_channel(
            f"127.0.0.1:{secured.port}", tls.channel_credentials(forced)
        )
        try:
            assert (await refusal(channel))[0] is grpc.StatusCode.UNAVAILABLE
        finally:
            await channel.close()


async def test_a_certificate_that_names_nobody_is_no_identity(tmp_path: Path) -> None:
    pki = Pki.new(tmp_path)
    operator = new_principal("root", "operator")
    for names in ([], ["https://operator/root"], ["kvtier://nobody/x"], [to_uri(operator)] * 2):
        cert, key = foreign_names(pki, names)
        config = TlsConfig(cert, key, pki.folder / certs.CA_CERT)
        async with serving(pki.listen()) as secured, dialing(secured, tls=config) as dialer:
            assert (await refusal(dialer.channel()))[0] is UNAUTHENTICATED
            assert secured.guard.denials[Denial.MISSING] == 1


def foreign_names(pki: Pki, names: Iterable[str]) -> tuple[Path, Path]:
    """A certificate of the authority with other names; its common name claims to be an operator."""
    authority = x509.load_pem_x509_certificate((pki.folder / certs.CA_CERT).read_bytes())
    signer = serialization.load_pem_private_key((pki.folder / certs.CA_KEY).read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    uris = [x509.UniformResourceIdentifier(name) for name in names]
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvtier://operator/root")])
        )
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([*uris, x509.DNSName("kvtier.example")]), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = pki.folder / "odd.crt", pki.folder / "odd.key"
    files[0].write_bytes(cert.public_bytes(pem))
    files[1].write_bytes(
        key.private_bytes(
            pem,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


async def test_token_and_certificate_must_name_the_same_caller(tmp_path: Path) -> None:
    pki = Pki.new(tmp_path)
    token = token_file(tmp_path, certs.add_token(tmp_path, new_principal("r1", "router")))
    listen = pki.listen(tokens_file=tmp_path / certs.TOKENS)
    async with serving(listen) as secured:
        async with dialing(secured, tls=pki.tls("router", "r1"), token_file=token) as same:
            assert await call(same.channel()) == b">r1"
        async with dialing(secured, tls=pki.tls("router", "r2"), token_file=token) as stolen:
            assert (await refusal(stolen.channel()))[0] is UNAUTHENTICATED
            assert secured.guard.denials[Denial.CONTRADICTING] == 1
        async with dialing(secured, tls=pki.tls("router", "r2")) as certified:
            assert await call(certified.channel()) == b">r2"
            wrong = bearer(tokens.mint())
            assert (await refusal(certified.channel(), metadata=wrong))[0] is UNAUTHENTICATED


async def test_a_token_over_tls_needs_no_certificate_of_the_client(tmp_path: Path) -> None:
    pki = Pki.new(tmp_path)
    token = token_file(tmp_path, certs.add_token(tmp_path, new_principal("r1", "router")))
    server = pki.tls("index", "i1")
    listen = ListenConfig(
        tls=TlsConfig(server.cert_file, server.key_file), tokens_file=tmp_path / certs.TOKENS
    )
    trust = TlsConfig(ca_file=tmp_path / certs.CA_CERT)
    async with serving(listen) as secured:
        async with dialing(secured, tls=trust, token_file=token) as dialer:
            for kind in KINDS:
                assert await call(dialer.channel(), kind) == b">r1" * (2 if kind == "Fan" else 1)
        async with dialing(secured, tls=trust) as dialer:
            assert (await refusal(dialer.channel()))[0] is UNAUTHENTICATED


# Rotation of certificates


async def test_a_renewed_server_certificate_is_shown_to_new_connections(tmp_path: Path) -> None:
    time = MovingClock()
    pki = Pki.new(tmp_path)
    client = pki.tls("router", "r1")
    async with serving(pki.listen(), time.clock()) as secured:
        before = await shown_serial(secured, client)
        pki.tls("index", "i1")
        time.poll()
        after = await shown_serial(secured, client)
        assert before != after
        renewed = (tmp_path / "index-i1.crt").read_bytes()
        assert after == serial(renewed)


async def shown_serial(secured: security.SecureServer, client: TlsConfig) -> int:
    """Serial number of the certificate that the server shows to a new connection."""
    context = ssl.create_default_context(cafile=client.ca_file)
    assert client.cert_file is not None
    context.load_cert_chain(client.cert_file, client.key_file)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(
        "127.0.0.1", secured.port, ssl=context, server_hostname="127.0.0.1"
    )
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return x509.load_der_x509_certificate(der).serial_number


async def test_an_open_connection_outlives_the_renewal_of_the_certificate(tmp_path: Path) -> None:
    time = MovingClock()
    pki = Pki.new(tmp_path)
    async with (
        serving(pki.listen(), time.clock()) as secured,
        dialing(secured, tls=pki.tls("router", "r1")) as old,
    ):
        assert await call(old.channel()) == b">r1"
        pki.tls("index", "i1")
        time.poll()
        async with dialing(secured, tls=pki.tls("router", "r2")) as new:
            assert await call(new.channel()) == b">r2"
        assert await call(old.channel()) == b">r1"


async def test_half_renewed_or_broken_files_keep_the_old_certificate(tmp_path: Path) -> None:
    time = MovingClock()
    pki = Pki.new(tmp_path)
    client = pki.tls("router", "r1")
    async with serving(pki.listen(), time.clock()) as secured:
        pem = secured.pem
        assert pem is not None
        before = await shown_serial(secured, client)
        old_key = (tmp_path / "index-i1.key").read_bytes()
        pki.tls("index", "i1")
        new_key = (tmp_path / "index-i1.key").read_bytes()
        (tmp_path / "index-i1.key").write_bytes(old_key)
        time.poll()
        assert await shown_serial(secured, client) == before
        assert "is not the key of" in pem.last_error
        (tmp_path / "index-i1.key").write_bytes(b"nothing")
        time.poll()
        assert await shown_serial(secured, client) == before
        assert pem.reload_errors == 2
        (tmp_path / "index-i1.key").write_bytes(new_key)
        time.poll()
        assert await shown_serial(secured, client) != before
        assert pem.last_error == ""


async def test_a_removed_authority_lets_its_clients_in_no_more(tmp_path: Path) -> None:
    time = MovingClock()
    ours, theirs = Pki.new(tmp_path / "a"), Pki.new(tmp_path / "b")
    both = tmp_path / "both.pem"
    ours_pem = (ours.folder / certs.CA_CERT).read_bytes()
    both.write_bytes(ours_pem + (theirs.folder / certs.CA_CERT).read_bytes())
    server = ours.tls("index", "i1")
    listen = ListenConfig(tls=TlsConfig(server.cert_file, server.key_file, both))
    own = theirs.tls("router", "r1")
    client = TlsConfig(own.cert_file, own.key_file, ours.folder / certs.CA_CERT)
    async with serving(listen, time.clock()) as secured:
        async with dialing(secured, tls=client) as dialer:
            assert await call(dialer.channel()) == b">r1"
        both.write_bytes(ours_pem)
        time.poll()
        async with dialing(secured, tls=client) as dialer:
            assert (await refusal(dialer.channel()))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_client_with_a_renewed_certificate_gets_a_new_channel(tmp_path: Path) -> None:
    time = MovingClock()
    pki = Pki.new(tmp_path)
    config = pki.tls("router", "r1")
    async with (
        serving(pki.listen()) as secured,
        dialing(secured, time.clock(), tls=config) as dialer,
    ):
        first = dialer.channel()
        chatting = method(first, f"/{SERVICE}/Chat")(timeout=CALL_S)
        await chatting.write(b"1")
        assert await chatting.read() == b"1r1"
        pki.tls("router", "r1")
        assert dialer.channel() is first
        time.poll()
        second = dialer.channel()
        assert second is not first
        assert await call(second) == b">r1"
        await chatting.write(b"2")
        assert await chatting.read() == b"2r1"
        await chatting.done_writing()


@pytest.mark.parametrize("missing", ["cert_file", "key_file", "ca_file"])
def test_credential_files_that_are_missing_refuse_to_start(tmp_path: Path, missing: str) -> None:
    config = Pki.new(tmp_path).tls("index", "i1")
    path = getattr(config, missing)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        tls.watch(config)
    path.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match="holds no PEM"):
        tls.watch(config)


# Where to listen and whom to call

TLS = TlsConfig(Path("c"), Path("k"))
MTLS = TlsConfig(Path("c"), Path("k"), Path("a"))
TOKENS = Path("t")
LOCAL = ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/x.sock", "[::ffff:127.0.0.1]:1"]
NETWORK = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "index.example:1", "[::ffff:0.0.0.0]:1"]


@pytest.mark.parametrize("bind", LOCAL)
def test_a_local_address_needs_no_credentials(bind: str) -> None:
    security.check_listen(ListenConfig(bind=bind))


@pytest.mark.parametrize("bind", NETWORK)
def test_an_address_that_others_reach_needs_tls_and_credentials(bind: str) -> None:
    for refused in (
        ListenConfig(bind=bind),
        ListenConfig(bind=bind, tls=TLS),
        ListenConfig(bind=bind, tokens_file=TOKENS),
    ):
        with pytest.raises(ConfigError, match="insecure"):
            security.check_listen(refused)
    for accepted in (
        ListenConfig(bind=bind, tls=TLS, tokens_file=TOKENS),
        ListenConfig(bind=bind, tls=MTLS),
        ListenConfig(bind=bind, tls=MTLS, tokens_file=TOKENS),
        ListenConfig(bind=bind, insecure=True),
    ):
        security.check_listen(accepted)


async def test_a_server_refuses_an_unsafe_address_before_it_binds() -> None:
    with pytest.raises(ConfigError, match=r"tls\.cert_file .* and tokens_file or tls\.ca_file"):
        security.new_server(ListenConfig(bind="0.0.0.0:0"), POLICY)


async def test_a_taken_port_is_a_config_error() -> None:
    async with serving(ListenConfig()) as secured:
        with pytest.raises(ConfigError, match="taken"):
            security.new_server(ListenConfig(bind=f"127.0.0.1:{secured.port}"), POLICY)


async def test_a_unix_socket_serves_like_a_port(tmp_path: Path) -> None:
    bind = f"unix:{tmp_path}/s"
    async with serving(ListenConfig(bind=bind)) as secured:
        assert secured.port == 0
        dialer = security.Dialer(DialConfig(targets=(bind,)), bind)
        try:
            assert await call(dialer.channel()) == b">local"
        finally:
            await dialer.close()


def test_a_token_is_not_shown_to_other_machines_in_plain_text() -> None:
    for target in NETWORK:
        with pytest.raises(ConfigError, match="plain text"):
            security.check_dial(DialConfig(targets=("127.0.0.1:1", target), token_file=TOKENS))
        for accepted in (
            DialConfig(targets=(target,)),
            DialConfig(targets=(target,), tls=TLS, token_file=TOKENS),
            DialConfig(targets=(target,), token_file=TOKENS, insecure=True),
        ):
            security.check_dial(accepted)
    security.check_dial(DialConfig(targets=tuple(LOCAL), token_file=TOKENS))


async def test_a_dialer_calls_only_its_own_targets() -> None:
    with pytest.raises(ConfigError, match="none of the targets"):
        security.Dialer(DialConfig(targets=("127.0.0.1:1",)), "127.0.0.1:2")


# Roles and the policy


def test_principals_speak_and_publish_only_as_granted() -> None:
    worker = new_principal("w1", "worker")
    bridge = new_principal("b1", "bridge", ["team-*"], ["vllm-*", "b1"])
    assert worker.may_publish_as(InstanceId("w1"))
    assert not worker.may_publish_as(InstanceId("w10"))
    assert not worker.may_speak_for(ScopeId(""))
    assert new_principal("r", "router").may_speak_for(ScopeId("any"))
    assert new_principal("o", "operator").may_speak_for(ScopeId("any"))
    assert bridge.may_publish_as(InstanceId("vllm-7"))
    assert not bridge.may_publish_as(InstanceId("b2"))
    assert bridge.may_speak_for(ScopeId("team-a"))
    with pytest.raises(ForbiddenError) as caught:
        bridge.require_scope(ScopeId("secret-scope"))
    assert "secret-scope" not in str(caught.value)
    with pytest.raises(ForbiddenError):
        bridge.require_instance(InstanceId("w1"))
    bridge.require_instance(InstanceId("b1"))


PATTERN = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="*"), min_size=1, max_size=20
)


@given(
    role=st.sampled_from(sorted(set(AccessRole) - {AccessRole.LOCAL})),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    scopes=st.lists(PATTERN, max_size=3),
    instances=st.lists(PATTERN.map(lambda text: text + "*"), max_size=3),
)
def test_a_principal_survives_the_way_through_a_certificate(
    role: str, name: str, scopes: list[str], instances: list[str]
) -> None:
    principal = new_principal(name, role, scopes, instances)
    uri = to_uri(principal)
    assert uri.isascii()
    assert from_uri(uri) == principal


@given(st.one_of(st.text(max_size=60), st.text(max_size=40).map("kvtier://worker/".__add__)))
def test_any_text_is_a_principal_of_a_granted_role_or_a_caller_error(text: str) -> None:
    try:
        principal = from_uri(text)
    except CallerError:
        return
    assert principal.role is not AccessRole.LOCAL
    assert from_uri(to_uri(principal)) == principal


@pytest.mark.parametrize(
    "uri",
    [
        "kvtier://local/x",
        "kvtier://worker",
        "kvtier://worker/",
        "kvtier://worker/a/b",
        "kvtier://worker/a#x",
        "kvtier://worker/a?role=operator",
        "kvtier://worker/a?scope",
        "kvtier://worker/a?scope=",
        "kvtier://worker/a?scope=*x*",
        "kvtier://user@worker/a",
        "kvtier://worker:1/a",
        "kvtier://worker/%2e%2e",
        "kvtier://[/a",
        "spiffe://worker/a",
    ],
)
def test_a_name_that_is_not_exactly_ours_is_refused(uri: str) -> None:
    with pytest.raises(CallerError):
        from_uri(uri)


@pytest.mark.parametrize(
    "methods",
    [
        {"Echo/Unary": {AccessRole.ROUTER}},
        {"/test.Echo/": {AccessRole.ROUTER}},
        {"/test.Echo/Unary": set[AccessRole]()},
        {"/test.Echo/Unary": {AccessRole.LOCAL}},
        {"/grpc.health.v1.Health/Check": {AccessRole.ROUTER}},
    ],
)
def test_a_policy_that_says_nothing_or_too_much_is_refused(
    methods: dict[str, set[AccessRole]],
) -> None:
    with pytest.raises(CallerError):
        Policy.of(methods)


def test_the_policy_is_compared_with_the_descriptors_in_both_directions() -> None:
    service = health_pb2.DESCRIPTOR.services_by_name["Health"]
    assert security.without_policy(POLICY, [service]) == ()
    assert security.without_method(POLICY, [service]) == tuple(
        sorted([*ROUTERS, "/test.Echo/Stop"])
    )

    @dataclass(frozen=True)
    class Method:
        name: str

    @dataclass(frozen=True)
    class Service:
        full_name: str
        methods: tuple[Method, ...]

    ours = Service(SERVICE, tuple(map(Method, [*KINDS, "Stop", "Forgotten"])))
    assert security.without_policy(POLICY, [ours]) == ("/test.Echo/Forgotten",)
    assert security.without_method(POLICY, [ours]) == ()


def test_reflection_is_for_operators() -> None:
    path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    assert POLICY.allows(new_principal("o", "operator"), path)
    assert not POLICY.allows(new_principal("r", "router"), path)


# Transport


def test_clients_never_ping_more_often_than_servers_permit() -> None:
    server, client = dict(transport.SERVER_OPTIONS), dict(transport.CHANNEL_OPTIONS)
    permitted = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= 2 * permitted
    assert 1000 <= client["grpc.keepalive_timeout_ms"] <= 10_000
    assert client["grpc.http2.ping_timeout_ms"] == client["grpc.keepalive_timeout_ms"]
    assert client["grpc.enable_retries"] == 0


async def test_a_message_above_the_ceiling_is_refused_on_both_sides() -> None:
    async with serving(ListenConfig()) as secured, dialing(secured) as dialer:
        echo = method(dialer.channel(), f"/{SERVICE}/Unary")
        fits = b"x" * (limits.GRPC_MESSAGE_BYTES_MAX - len(b"local"))
        assert len(await echo(fits, timeout=CALL_S)) == limits.GRPC_MESSAGE_BYTES_MAX
        for size in (limits.GRPC_MESSAGE_BYTES_MAX, limits.GRPC_MESSAGE_BYTES_MAX + 1):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo(b"x" * size, timeout=CALL_S)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# Watched files


def test_files_are_looked_at_once_a_poll_and_read_only_when_changed(tmp_path: Path) -> None:
    time, path, reads = MovingClock(), tmp_path / "f", 0
    path.write_text("1", encoding="utf-8")

    def parse() -> str:
        nonlocal reads
        reads += 1
        return path.read_text(encoding="utf-8")

    watched = Watched.open([path], parse, time.clock())
    time.poll()
    assert (watched.get(), reads) == ("1", 1)
    path.write_text("22", encoding="utf-8")
    assert (watched.get(), reads) == ("1", 1)
    time.poll()
    assert (watched.get(), watched.get(), reads) == ("22", "22", 2)


def test_a_change_of_same_size_and_time_is_seen_when_the_file_was_replaced(tmp_path: Path) -> None:
    time, path = MovingClock(), tmp_path / "f"
    path.write_text("1", encoding="utf-8")
    os.utime(path, ns=(5, 5))
    watched = Watched.open([path], lambda: path.read_text(encoding="utf-8"), time.clock())
    other = tmp_path / "g"
    other.write_text("2", encoding="utf-8")
    os.utime(other, ns=(5, 5))
    other.replace(path)
    time.poll()
    assert watched.get() == "2"
