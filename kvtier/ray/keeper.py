"""One service as a child of this process, for as long as both live.

Killed with its child, and ending when its child ends or is silent: whoever restarts this process
restarts the service. It takes the same directory and port again. Knows no Ray. What must not live
here: which services there are.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import Root
from kvtier.errors import DeadlineError, UnavailableError
from kvtier.local.child import command_of
from kvtier.local.directory import DataDirectory
from kvtier.local.logs import rotate, tail
from kvtier.local.models import provide
from kvtier.local.plan import Kind
from kvtier.local.probes import Probe, accepts, grpc_serving, http_ok
from kvtier.local.sessions import kill_session
from kvtier.local.settings import Table, load_named, merged, toml_text
from kvtier_router.config import RouterConfig
from kvtier_services.index.config import IndexConfig
from kvtier_services.store.config import StoreConfig
from kvtier_services.worker.config import WorkerConfig

CLASSES: Final[dict[Kind, type[Root]]] = {
    Kind.INDEX: IndexConfig,
    Kind.STORE: StoreConfig,
    Kind.WORKER: WorkerConfig,
    Kind.ROUTER: RouterConfig,
}
"""What reads the settings of each kind."""
_PATHS: Final = {Kind.WORKER: ("/health", "/live"), Kind.ROUTER: ("/health", "/health")}
"""Of the probe at the start, and of the one later: a service that drains is alive."""
_LOOK_S: Final = 0.1
_WATCH_S: Final = 1.0
_HELD_S_MAX: Final = 30.0
_STOP_S_MAX: Final = 30.0
_LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Duty:
    """What a keeper keeps."""

    name: str
    kind: Kind
    ip: str
    port: int
    """0: a free one, remembered."""
    table: Table
    model: str
    root: Path
    """Directory of this service alone."""
    ready_s_max: float
    silent_s_max: float
    log_bytes_max: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What a service that serves can be called by."""

    address: str
    url: str
    socket: str
    admin: str
    pid: int


class Keeper:
    """See the module. The thread that makes it must live as long as the service is to live."""

    def __init__(self, duty: Duty, end: Callable[[int], None] = os._exit) -> None:
        """Start the service and wait until it serves. `end` is called when it has ended, or is
        silent. UnavailableError with the end of its log, DeadlineError; nothing is left then."""
        self._duty = duty
        self._end = end
        self._stack = ExitStack()
        self._is_stopping = False
        directory = DataDirectory(duty.root)
        try:
            _hold(self._stack, directory)
            self._log = directory.logs / f"{duty.name}.log"
            table = self._table(directory)
            self._probe, self._later = _probes(duty, table)
            self._process = self._spawn(directory, table)
            self.kept = self._when_ready(directory, table)
        except BaseException:
            self._stack.close()
            raise
        self._watch = threading.Thread(target=self._keep_watch, name="watch", daemon=True)
        self._watch.start()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when its time is up. Idempotent; `end` is not called."""
        self._is_stopping = True
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S_MAX)
        self._kill()
        self._watch.join()
        self._stack.close()

    def _table(self, directory: DataDirectory) -> Table:
        """The settings that this node chooses, below those that were told."""
        duty = self._duty
        wishes = {"listen": duty.port} if duty.port else {}
        ports = directory.ports(("listen", "pages"), wishes)
        pages = f"{_LOOPBACK}:{ports['pages']}"
        chosen: dict[str, object] = {"listen": {"bind": f"{duty.ip}:{ports['listen']}"}}
        if duty.kind is Kind.ROUTER:
            chosen["admin_bind"] = pages
        elif duty.kind is not Kind.WORKER:
            chosen["telemetry"] = {"metrics_bind": pages}
        if duty.kind is Kind.STORE:
            data = directory.root / "store"
            data.mkdir(mode=0o700, exist_ok=True)
            chosen |= {"data_dir": str(data), "run_dir": str(directory.make_run())}
        return merged(chosen, duty.table)

    def _spawn(self, directory: DataDirectory, table: Table) -> "subprocess.Popen[bytes]":
        duty = self._duty
        path = directory.root / "config" / f"{duty.name}.toml"
        path.touch(0o600)
        path.write_text(toml_text(table), encoding="utf-8")
        load_named(CLASSES[duty.kind], path, f"[{duty.kind.value}]")
        if duty.kind is Kind.WORKER:
            provide(duty.model, lambda _: None)
        with self._log.open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter)
                command_of([duty.kind.value, "--config", str(path)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._stack.callback(kill_session, process.pid)
        return process

    def _when_ready(self, directory: DataDirectory, table: Table) -> Kept:
        duty, until = self._duty, time.monotonic() + self._duty.ready_s_max
        while not self._probe():
            status = self._process.poll()
            if status is not None:
                raise UnavailableError(f"{duty.name} ended with {status}:\n{tail(self._log)}")
            if time.monotonic() > until:
                raise DeadlineError(f"{duty.name} does not serve after {duty.ready_s_max:g} s")
            time.sleep(_LOOK_S)
        socket = str(directory.run / "store.sock") if duty.kind is Kind.STORE else ""
        admin = str(table["admin_bind"]) if duty.kind is Kind.ROUTER else ""
        scheme = "https" if _has_tls(table) else "http"
        address = _bind(table)
        return Kept(address, f"{scheme}://{address}", socket, admin, self._process.pid)

    def _keep_watch(self) -> None:
        seen = time.monotonic()
        while not self._is_stopping:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_WATCH_S)
            rotate(self._log, self._duty.log_bytes_max)
            if self._later():
                seen = time.monotonic()
            is_silent = time.monotonic() - seen > self._duty.silent_s_max
            if not self._is_stopping and (is_silent or self._process.poll() is not None):
                self._kill()
                self._end(1)
                return

    def _kill(self) -> None:
        kill_session(self._process.pid)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _hold(stack: ExitStack, directory: DataDirectory) -> None:
    """Have the directory; the keeper before this one may be ending still. UnavailableError."""
    until = time.monotonic() + _HELD_S_MAX
    while True:
        try:
            stack.enter_context(directory.held())
        except UnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)
        else:
            return


def _probes(duty: Duty, table: Table) -> tuple[Probe, Probe]:
    """At the start, and later."""
    address = _bind(table)
    if _has_tls(table):
        return accepts(address), accepts(address)
    if duty.kind in _PATHS:
        first, later = _PATHS[duty.kind]
        return http_ok(address, first), http_ok(address, later)
    return grpc_serving(address), grpc_serving(address)


def _bind(table: Table) -> str:
    listen = table["listen"]
    assert isinstance(listen, dict)
    return str(listen["bind"])


def _has_tls(table: Table) -> bool:
    listen = table["listen"]
    return isinstance(listen, dict) and "tls" in listen
