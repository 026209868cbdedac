"""Runs the project's real entry points as operating system processes, and breaks them.

A `ProcessRunner` belongs to one test (or one fixture): it gives each process a log file under
`.test-logs/<test>/`, a clean environment and a working directory, waits until it is ready, and at
its end kills what it started, and nothing else: the whole session of each process, found by the pid
that it got from the kernel. All calls block; an async test wraps the long ones (`start`, `wait`) in
`asyncio.to_thread`. What must not live here: fakes of our services, sleeps as synchronisation.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.harness.readiness import ReadyProbe
from tests.harness.toml_text import TomlTable, toml_text
from tests.harness.waiting import NeverHappenedError, eventually

REPOSITORY = Path(__file__).resolve().parents[2]
LOG_ROOT = REPOSITORY / ".test-logs"
END_DEADLINE_S = 30.0
_NAME_CHARACTERS_MAX = 120
_TAIL_LINES = 40
_TAIL_BYTES_MAX = 64 << 10
_FOREIGN_VARIABLES = re.compile(
    r"(KVTIER|OTEL|GRPC)_|LD_PRELOAD$|(https?|no|all|grpc)_proxy$", re.I
)
_ENDING_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT})


class HarnessError(AssertionError):
    """The process under test did not do what the test relies on."""


class NotReadyError(HarnessError):
    """A process ended, or was not ready before its deadline; the message carries its log's tail."""


class DiedByItselfError(HarnessError):
    """A process ended although the test neither signalled nor awaited it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one process; `name` names it in the test and its log file."""

    name: str
    argv: Sequence[str]
    ready: ReadyProbe | None = None
    ready_deadline_s: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the cleaned environment of the tests."""
    prefix: Sequence[str] = ()
    """A command that ends in an exec of what follows, for example a network namespace's."""
    directory: Path | None = None
    """Working directory; the runner's if None."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            raise ValueError(f"name must be of letters, digits, _ . -, got {self.name!r}")
        if not self.argv:
            raise ValueError(f"argv of {self.name} is empty")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the kernel says of a process, or of all processes of its session."""

    rss_bytes: int
    cpu_s: float
    """User and system time; the kernel counts in ticks of 10 ms."""
    fds_count: int
    threads_count: int


def kvtier_command(*arguments: str) -> tuple[str, ...]:
    """The argv of `kvtier ARGUMENTS` by the console script of the running interpreter's venv."""
    script = Path(sys.executable).parent / "kvtier"
    if not script.exists():
        raise HarnessError(f"{script} is missing: install the project into this environment")
    return (str(script), *arguments)


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """The argv of `python -m MODULE ARGUMENTS` with the running interpreter."""
    return (sys.executable, "-m", module, *arguments)


def clean_environment() -> dict[str, str]:
    """This process's environment without what configures our services, gRPC, proxies, preloads."""
    kept = {key: value for key, value in os.environ.items() if not _FOREIGN_VARIABLES.match(key)}
    return kept | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


class Process:
    """One process of a runner. `restart` gives it a new pid on the same command, log and ports."""

    def __init__(self, launch: Launch, log_path: Path, directory: Path) -> None:
        self.launch = launch
        self.log_path = log_path
        self.starts_count = 0
        self._directory = launch.directory or directory
        self._popen: subprocess.Popen[bytes] | None = None
        self._end_expected = False

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def pid(self) -> int:
        """Pid of the current (or last) life."""
        return self._started().pid

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self._started().poll()

    def spawn(self) -> None:
        """Start it in a session of its own; does not wait until it is ready."""
        if self._popen is not None and (self.alive or self._members()):
            raise HarnessError(f"{self.name} (pid {self.pid}) still runs")
        self.starts_count += 1
        self._end_expected = False
        with self.log_path.open("ab") as log:
            log.write(f"--- start {self.starts_count} of {self.name}\n".encode())
            log.flush()
            self._popen = subprocess.Popen(
                [*self.launch.prefix, *self.launch.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=clean_environment() | dict(self.launch.environment),
                start_new_session=True,
            )
        _live.add(self)

    def wait_ready(self) -> None:
        """Block until its probe is true; raise NotReadyError at once if it ends before that."""
        probe = self.launch.ready
        if probe is None:
            return

        def ready_or_dead() -> bool:
            return not self.alive or probe()

        try:
            eventually(ready_or_dead, self.launch.ready_deadline_s, f"{self.name} is ready")
        except NeverHappenedError as error:
            raise NotReadyError(f"{error}\n{self.log_tail()}") from None
        if not self.alive:
            self._end_expected = True
            status = self.returncode
            raise NotReadyError(f"{self.name} ended with {status}\n{self.log_tail()}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, not to its children."""
        if not self.alive:
            raise HarnessError(f"{self.name} does not run (status {self.returncode})")
        if number in _ENDING_SIGNALS:
            self._end_expected = True
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it and wait until the kernel has taken everything back; children live on."""
        self.send(signal.SIGKILL)
        self.wait(END_DEADLINE_S)

    def terminate(self) -> None:
        """SIGTERM it, without waiting."""
        self.send(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP it and wait until it stands still."""
        self.send(signal.SIGSTOP)
        state = psutil.Process(self.pid)
        eventually(
            lambda: state.status() == psutil.STATUS_STOPPED, END_DEADLINE_S, f"{self.name} stops"
        )

    def thaw(self) -> None:
        """SIGCONT it."""
        self.send(signal.SIGCONT)

    def wait(self, deadline_s: float) -> int:
        """Block until it ends and return its status; the end then counts as expected."""
        try:
            status = self._started().wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise HarnessError(
                f"{self.name} has not ended within {deadline_s:g} s\n{self.log_tail()}"
            ) from None
        self._end_expected = True
        return status

    def restart(self, launch: Launch | None = None) -> None:
        """Kill what is left of it and start it again, on the same command or on another one in its
        place; wait until ready."""
        self.end()
        self.launch = launch or self.launch
        self.spawn()
        self.wait_ready()

    def end(self) -> None:
        """Kill every process of its session and wait until none is left. Idempotent."""
        if self._popen is None:
            return

        def none_left() -> bool:
            for member in self._members():
                _kill_quietly(member)
            return not self.alive and not self._members()

        eventually(none_left, END_DEADLINE_S, f"every process of {self.name} ends")
        self._end_expected = True
        _live.discard(self)

    @property
    def died_by_itself(self) -> bool:
        """True if it ended without a signal of, or a wait by, the test."""
        return self._popen is not None and not self.alive and not self._end_expected

    def usage(self) -> Usage:
        """Memory, CPU time, descriptors and threads of the process itself."""
        return _usage([psutil.Process(self.pid)])

    def session_usage(self) -> Usage:
        """The sum over all processes of its session (pages shared by two count twice)."""
        return _usage([psutil.Process(pid) for pid in self._members()])

    def log_text(self) -> str:
        """Everything it has written, in all its lives."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines_count: int = _TAIL_LINES) -> str:
        """The last lines of its log under a line that names the file."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES_MAX))
            text = log.read().decode(errors="replace")
        lines = text.splitlines()[-lines_count:]
        return "\n".join([f"--- tail of {self.log_path.relative_to(LOG_ROOT.parent)}", *lines])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._popen is None:
            raise HarnessError(f"{self.name} has not been started")
        return self._popen

    def _members(self) -> list[int]:
        """Pids of its session that are no zombies.

        A session id is not given out again while a member lives; so when the leader has been reaped
        and its pid exists again, that is another's, and no member of ours is left.
        """
        leader = self.pid
        if not self.alive and psutil.pid_exists(leader):
            return []
        return [pid for pid in psutil.pids() if _session_of(pid) == leader]


_live: set[Process] = set()


def live_processes() -> frozenset[Process]:
    """Every process, of any runner, that was started and not ended."""
    return frozenset(_live)


class ProcessRunner:
    """Starts the processes of one test; a context manager that ends them."""

    def __init__(self, test_name: str, directory: Path) -> None:
        self.directory = directory
        # A module's fixtures may live in two test processes at a time.
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        self.log_directory = LOG_ROOT / worker / _folder_name(test_name)
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        self.log_directory.mkdir(parents=True, exist_ok=True)
        for old in self.log_directory.glob("*.log"):
            old.unlink()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        dead = [process for process in self._processes.values() if process.died_by_itself]
        for process in self._processes.values():
            process.end()
        if dead and kind is None:
            tails = "\n".join(f"{p.name}: status {p.returncode}\n{p.log_tail()}" for p in dead)
            raise DiedByItselfError(f"ended, and the test did not end them:\n{tails}")

    def __getitem__(self, name: str) -> Process:
        return self._processes[name]

    def spawn(self, launch: Launch) -> Process:
        """Start a process and return at once."""
        if launch.name in self._processes:
            raise HarnessError(f"two processes named {launch.name!r}; use restart")
        log_path = self.log_directory / f"{launch.name}.log"
        process = Process(launch, log_path, self.directory)
        process.spawn()
        self._processes[launch.name] = process
        return process

    def start(self, launch: Launch) -> Process:
        """Start a process and block until it is ready."""
        process = self.spawn(launch)
        process.wait_ready()
        return process

    def start_all(self, launches: Iterable[Launch]) -> list[Process]:
        """Start several side by side, then block until all are ready."""
        processes = [self.spawn(launch) for launch in launches]
        for process in processes:
            process.wait_ready()
        return processes

    def config_file(self, name: str, table: TomlTable) -> Path:
        """Write a TOML file into the runner's directory and return its path."""
        path = self.directory / name
        path.write_text(toml_text(table))
        return path

    def log_tails(self) -> list[tuple[str, str]]:
        """(name, tail of the log) of every process, for a failed test's report."""
        return [(process.name, process.log_tail()) for process in self._processes.values()]


def _folder_name(test_name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", test_name).strip("-.")
    if len(safe) <= _NAME_CHARACTERS_MAX:
        return safe or "unnamed"
    return f"{safe[:_NAME_CHARACTERS_MAX]}-{sha256(test_name.encode()).hexdigest()[:8]}"


def _session_of(pid: int) -> int | None:
    """The session of a process; None where it is gone or a zombie.

    From `/proc/PID/stat`: after the name in parentheses come state, parent, group, session.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, _parent, _group, session = text.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(session)


def _kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _usage(processes: list[psutil.Process]) -> Usage:
    rss_bytes, cpu_s, fds_count, threads_count = 0, 0.0, 0, 0
    for process in processes:
        with process.oneshot():
            times = process.cpu_times()
            rss_bytes += process.memory_info().rss
            cpu_s += times.user + times.system
            fds_count += process.num_fds()
            threads_count += process.num_threads()
    return Usage(rss_bytes, cpu_s, fds_count, threads_count)
