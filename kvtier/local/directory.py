"""The data directory of a cluster: who has it, what runs, which ports it uses.

    LOCK         held by the supervisor, with its pid
    state.json   what runs, for `kvtier status`
    ports.json   ports that were chosen, so that a cluster keeps its addresses
    config/      what each service reads; logs/, store/, redis/, run/ (sockets)

What must not live here: processes, settings.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import BackendError, ConfigError, UnavailableError
from kvtier.local import loopback

LOCK: Final = "LOCK"
STATE: Final = "state.json"
PORTS: Final = "ports.json"
_SOCKET_BYTES_MAX: Final = 78
"""Of the directory; the longest in it is that of a vLLM server's connector."""
_LOCK_TRIES: Final = 20
_LOCK_PAUSE_S: Final = 0.01
_STATE_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ServiceState:
    """One process as `kvtier status` shows it."""

    name: str
    state: str
    pid: int | None
    address: str
    restarts: int
    since: float
    """Monotonic time of the machine at which it got into this state."""
    log: str


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What a supervisor says of its cluster."""

    endpoint: str
    admin: str
    services: tuple[ServiceState, ...]


class DataDirectory:
    """One directory, made on first use, of one supervisor at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def logs(self) -> Path:
        """Where log files are."""
        return self.root / "logs"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have the directory for oneself. UnavailableError where another supervisor has it."""
        self._make(self.root)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock = os.open(self.root / LOCK, flags, 0o600)
        except OSError as error:
            raise BackendError(f"{self.root / LOCK}: {error.strerror}") from error
        try:
            if not _locked(lock):
                raise UnavailableError(
                    f"a cluster runs in {self.root} already (process {self.supervisor()}): "
                    f"kvtier down --data-dir {self.root}, or take another --data-dir"
                )
            self.forget()  # what a killed supervisor said
            os.ftruncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
            for name in ("logs", "config"):
                self._make(self.root / name)
            try:
                yield
            finally:
                self.forget()
        finally:
            os.close(lock)

    def supervisor(self) -> int | None:
        """Pid of the supervisor that has the directory; None where nobody has it."""
        try:
            lock = os.open(self.root / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(lock, 32).decode("ascii", "replace").strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(lock)
        return None

    # What runs

    def tell(self, state: ClusterState) -> None:
        """Write the state, whole or not at all. BackendError where the disk does not take it."""
        self._replace(STATE, json.dumps(asdict(state), indent=1))

    def forget(self) -> None:
        """Take the state away."""
        (self.root / STATE).unlink(missing_ok=True)

    def state(self) -> ClusterState | None:
        """What the supervisor last said; None where it has not said anything yet."""
        told = self._read(STATE)
        if not isinstance(told, dict):
            return None
        try:
            services = tuple(ServiceState(**entry) for entry in told["services"])
            return ClusterState(told["endpoint"], told["admin"], services)
        except (KeyError, TypeError) as error:
            raise BackendError(f"{self.root / STATE} is of another version") from error

    # Ports and sockets

    def ports(self, names: tuple[str, ...], wishes: Mapping[str, int]) -> dict[str, int]:
        """A free port for each name: the one of last time, else the wish, else any. Remembers."""
        told = self._read(PORTS)
        known = told if isinstance(told, dict) else {}
        chosen: dict[str, int] = {}
        for name in names:
            chosen[name] = (
                _had(known.get(name), chosen)
                or _had(wishes.get(name), chosen)
                or loopback.free_port(chosen.values())
            )
        self._replace(PORTS, json.dumps({**known, **chosen}, indent=1))
        return chosen

    @property
    def run(self) -> Path:
        """Where Unix sockets go: in the directory, or in a short one where its path is too long."""
        near = self.root / "run"
        if len(os.fsencode(near)) <= _SOCKET_BYTES_MAX:
            return near
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"kvtier-{os.getuid()}-{digest}"

    def make_run(self) -> Path:
        """The directory of sockets, for its user alone. ConfigError where others reach it."""
        self._make(self.run)
        found = self.run.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o77:
            raise ConfigError(f"{self.run} can be reached by others")
        return self.run

    def clear_run(self) -> None:
        """Remove the directory of sockets."""
        shutil.rmtree(self.run, ignore_errors=True)

    # Files

    def _make(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise BackendError(f"{path}: {error.strerror}") from error

    def _replace(self, name: str, text: str) -> None:
        path = self.root / f".{name}-{secrets.token_hex(4)}"
        try:
            path.write_text(text, encoding="utf-8")
            path.replace(self.root / name)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise BackendError(f"{self.root / name}: {error.strerror}") from error

    def _read(self, name: str) -> object:
        try:
            with (self.root / name).open("rb") as file:
                return json.loads(file.read(_STATE_BYTES_MAX))
        except (OSError, ValueError):
            return None


def _locked(lock: int) -> bool:
    """Take the lock of an open file; False where somebody has it.

    Those who only look (`supervisor`) have it for microseconds, so they are waited for.
    """
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True
    return False


def _had(port: object, chosen: Mapping[str, int]) -> int:
    """The port, leased, where a server could listen on it and it is not given out; else 0."""
    if type(port) is not int or port in chosen.values() or not loopback.is_free(port):
        return 0
    return port if loopback.lease(port) else 0
