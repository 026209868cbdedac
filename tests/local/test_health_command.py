"""`kvtier health`: what a container engine asks, against real listeners with TLS and without."""

import asyncio
import contextlib
import datetime
import http.server
import io
import ssl
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.local import health
from kvtier.local.health import command
from kvtier.sections import ListenConfig, TlsConfig
from kvtier.security.certs import Issued, Validity, issue, new_authority
from kvtier.security.roles import new_principal
from kvtier_services.index.config import IndexConfig
from kvtier_services.index.main import serve
from tests.harness.ports import free_port

NAME = "index.fleet.example"
"""That nobody here can resolve."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is not sick here."""
    monkeypatch.setattr(health, "DEADLINE_S", 60.0)


def certificate(folder: Path, authority: Issued, hosts: Sequence[str], name: str) -> TlsConfig:
    validity = Validity(datetime.datetime.now(datetime.UTC), 1)
    issued = issue(authority, new_principal(name, "index"), hosts, validity)
    cert, key, ca = (folder / f"{name}.{end}" for end in ("crt", "key", "ca"))
    cert.write_bytes(issued.cert)
    key.touch(0o600)
    key.write_bytes(issued.key)
    ca.write_bytes(authority.cert)
    return TlsConfig(cert, key, ca)


@pytest.fixture(scope="module")
def authority() -> Issued:
    return new_authority(Validity(datetime.datetime.now(datetime.UTC), 2))


@contextlib.asynccontextmanager
async def index(listen: ListenConfig) -> AsyncIterator[int]:
    config = IndexConfig(listen=listen, drain_ms_max=0)
    async with serve(config, io.StringIO()) as running:
        yield running.port


async def look(*argv: str) -> int:
    return await asyncio.to_thread(command, list(argv))


async def test_an_index_is_well_while_it_serves_and_sick_when_it_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with index(ListenConfig("127.0.0.1:0")) as port:
        assert await look("index", "--bind", f"127.0.0.1:{port}") == 0
        assert capsys.readouterr().out == "ok\n"
        # It listens on all addresses in a container, and is called on this machine.
        assert await look("index", "--bind", f"0.0.0.0:{port}") == 0
    assert await look("index", "--bind", f"127.0.0.1:{port}") == 1
    assert f"127.0.0.1:{port}: UNAVAILABLE" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", [[NAME], ["10.1.2.3"], [f"*.{NAME}"]])
async def test_a_certificate_of_another_name_and_one_demanded_of_callers_are_no_obstacle(
    tmp_path: Path, authority: Issued, hosts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tls = certificate(tmp_path, authority, hosts, "one")
    async with index(ListenConfig("127.0.0.1:0", tls=tls)) as port:
        assert await look("index", *flags(port, tls)) == 0, capsys.readouterr().err
        # Whoever has the port now is not the one whose certificate is in the configuration.
        other = certificate(tmp_path, authority, hosts, "other")
        assert await look("index", *flags(port, replace(other, ca_file=None))) == 1


def flags(port: int, tls: TlsConfig) -> list[str]:
    told = ["--bind", f"127.0.0.1:{port}"]
    told += ["--listen-tls-cert-file", str(tls.cert_file)]
    told += ["--listen-tls-key-file", str(tls.key_file)]
    return told if tls.ca_file is None else [*told, "--listen-tls-ca-file", str(tls.ca_file)]


class Pages(http.server.BaseHTTPRequestHandler):
    """A service of which only the pages matter."""

    status = 200
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"status": "said"}')

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def pages(status: int = 200, tls: TlsConfig | None = None) -> Iterator[tuple[int, list[str]]]:
    """A listener that answers every page with `status`; its port, and the paths asked for."""
    asked: list[str] = []
    kind = type("OfThisTest", (Pages,), {"status": status, "asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        if tls is not None:
            assert tls.cert_file is not None
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(tls.cert_file, tls.key_file)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("kind", "path"), [("router", "/ready"), ("worker", "/health"), ("bridge", "/live")]
)
@pytest.mark.parametrize("status", [200, 503])
def test_the_page_that_costs_some_work_decides(
    kind: str, path: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--metrics-bind" if kind == "bridge" else "--listen-bind"
    with pages(status) as (port, asked):
        assert command([kind, flag, f"127.0.0.1:{port}"]) == (0 if status == 200 else 1)
    assert asked == [path]
    if status != 200:
        assert '503 {"status": "said"}' in capsys.readouterr().err


def test_pages_are_asked_for_with_the_services_own_certificate(
    tmp_path: Path, authority: Issued
) -> None:
    tls = certificate(tmp_path, authority, [NAME], "one")
    other = certificate(tmp_path, authority, [NAME], "other")
    with pages(tls=tls) as (port, asked):
        assert command(["worker", *flags(port, tls)]) == 0
        assert command(["worker", *flags(port, other)]) == 1
    assert asked == ["/health"]


async def test_tasks_that_ended_inside_a_service_that_answers_are_seen_by_its_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pages(status=503) as (page, _):
        async with index(ListenConfig("127.0.0.1:0")) as port:
            bind = ("--bind", f"127.0.0.1:{port}")
            assert await look("index", *bind, "--metrics-bind", f"127.0.0.1:{page}") == 1
    assert "/live: 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["worker", "--listen-bind", "127.0.0.1:0"], "port that the system chooses"),
        (["index", "--bind", "127.0.0.1:0"], "port that the system chooses"),
        (["bridge"], "telemetry.metrics_bind"),
        (["store", "--config", "/no/such/file.toml"], "cannot read"),
        (["worker", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_what_cannot_be_looked_at_is_said(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command(argv)


def test_nobody_there_is_sick_for_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bind = f"127.0.0.1:{free_port()}"
    for kind, argv in {
        "router": ["--listen-bind", bind],
        "worker": ["--listen-bind", f"unix:{tmp_path}/none.sock"],
        "bridge": ["--metrics-bind", bind],
        "store": ["--run-dir", str(tmp_path)],
        "index": ["--bind", bind],
    }.items():
        assert command([kind, *argv]) == 1, kind
        assert f"kvtier health {kind}: " in capsys.readouterr().err


def test_an_unknown_kind_costs_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["printer"]) == command([]) == 2
    assert "index|store|router|worker|bridge" in capsys.readouterr().err
