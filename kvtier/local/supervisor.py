"""Starts the processes of a plan in order, mends them, ends them. One event loop, main thread.

A process that ends by itself is started again after a pause that doubles up to half a minute.
Children die with this process whatever ends it (`child.py`). What must not live here: what is
shown of it, settings.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvtier.errors import DeadlineError, NotFoundError, UnavailableError
from kvtier.local.child import command_of
from kvtier.local.directory import ServiceState
from kvtier.local.logs import rotate, tail
from kvtier.local.plan import Plan, Service
from kvtier.local.sessions import kill_session

_PAUSE_S_FIRST: Final = 0.5
_PAUSE_S_MAX: Final = 30.0
_STEADY_S: Final = 30.0
"""A process that served for so long begins with the first pause again."""
_LOOK_S_FIRST: Final = 0.05
_LOOK_S_MAX: Final = 0.5
_ROTATE_S: Final = 1.0
_KILLED_S: Final = 10.0


class State(StrEnum):
    """Of one process."""

    WAITING = "waiting"
    """For those that it needs."""
    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    """Ended by itself; it will be started again."""
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Change:
    """What became of a process."""

    name: str
    state: State
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a supervisor works."""

    logs: Path
    log_bytes_max: int
    ready_s_max: float


Observer = Callable[[Change], None]


class Supervisor:
    """See the module. `start`, then `close` in any case."""

    def __init__(self, plan: Plan, terms: Terms, observer: Observer) -> None:
        self._groups = [[_Unit(one, terms, self._told) for one in group] for group in plan.groups]
        self._observer = observer
        self._terms = terms
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all, each group after the one before it serves.

        UnavailableError with the end of its log where a process ends before it serves,
        DeadlineError where it takes too long; the caller closes.
        """
        self._tasks.append(asyncio.create_task(self._rotate()))
        for group in self._groups:
            starting = [asyncio.create_task(unit.start()) for unit in group]
            try:
                await asyncio.gather(*starting)
            finally:
                for task in starting:
                    task.cancel()
                await asyncio.gather(*starting, return_exceptions=True)
            self._tasks += [asyncio.create_task(unit.keep()) for unit in group]

    def states(self) -> tuple[ServiceState, ...]:
        """All processes in order."""
        return tuple(unit.shown() for unit in self._units)

    async def restart(self, name: str) -> None:
        """Stop one process, start it again and wait until it serves."""
        await self._unit(name).restart()

    async def until_up(self) -> None:
        """Wait until every process serves; DeadlineError after `ready_s_max`."""
        try:
            async with asyncio.timeout(self._terms.ready_s_max):
                for unit in self._units:
                    await unit.serves.wait()
        except TimeoutError:
            raise DeadlineError("not every process came up") from None

    async def close(self) -> None:
        """Stop all, last started first; who does not drain in its time is killed. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for group in reversed(self._groups):
            await asyncio.gather(*(unit.stop() for unit in group))

    def kill(self) -> None:
        """End all at once; `close` still has to run."""
        for unit in self._units:
            unit.signal(signal.SIGKILL)

    @property
    def _units(self) -> Sequence["_Unit"]:
        return [unit for group in self._groups for unit in group]

    def _unit(self, name: str) -> "_Unit":
        for unit in self._units:
            if unit.service.name == name:
                return unit
        raise NotFoundError(f"no process {name!r}")

    def _told(self, change: Change) -> None:
        self._observer(change)

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(_ROTATE_S)
            for unit in self._units:
                await asyncio.to_thread(unit.rotate)


class _Unit:
    """One process over its lives."""

    def __init__(self, service: Service, terms: Terms, told: Observer) -> None:
        self.service = service
        self.serves = asyncio.Event()
        self._terms = terms
        self._told = told
        self._log = terms.logs / f"{service.name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._state = State.WAITING
        self._since = time.monotonic()
        self._restarts = 0
        self._life = asyncio.Lock()
        """Held by the task that ends or starts it."""

    def shown(self) -> ServiceState:
        process = self._process
        alive = process is not None and process.returncode is None
        return ServiceState(
            name=self.service.name,
            state=self._state.value,
            pid=process.pid if process is not None and alive else None,
            address=self.service.address,
            restarts=self._restarts,
            since=self._since,
            log=str(self._log),
        )

    async def start(self) -> None:
        """Start and wait until it serves. UnavailableError, DeadlineError."""
        await self._spawn()
        process = self._running()
        ended = asyncio.create_task(process.wait())
        ready = asyncio.create_task(self._until_ready())
        try:
            done, _ = await asyncio.wait(
                {ended, ready},
                timeout=self._terms.ready_s_max,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for task in (ended, ready):
                task.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)
        name = self.service.name
        if process.returncode is not None:
            why = _status(process.returncode)
            raise UnavailableError(f"{name} {why}; the end of {self._log}:\n{tail(self._log)}")
        if not done:
            raise DeadlineError(
                f"{name} does not serve after {self._terms.ready_s_max:g} s; see {self._log}"
            )
        self._enter(State.UP)

    async def keep(self) -> None:
        """Start it again whenever it ends by itself, for ever."""
        pause_s = _PAUSE_S_FIRST
        while True:
            await self._running().wait()
            async with self._life:
                if self._running().returncode is None:
                    continue  # restarted on purpose meanwhile
                if time.monotonic() - self._since > _STEADY_S:
                    pause_s = _PAUSE_S_FIRST
                kill_session(self._running().pid)  # of vLLM, when its guard was killed
                why = _status(self._running().returncode)
                self._enter(State.DOWN, f"{why}; starting again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S_MAX)
                self._restarts += 1
                try:
                    await self.start()
                except (UnavailableError, DeadlineError):
                    self.signal(signal.SIGKILL)

    async def restart(self) -> None:
        """Stop it on purpose and start it again. UnavailableError, DeadlineError."""
        async with self._life:
            await self.stop()
            self._restarts += 1
            await self.start()

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL when its time is up. Idempotent."""
        process = self._process
        if process is None:
            self._enter(State.STOPPED)
            return
        if process.returncode is None:
            self._enter(State.STOPPING)
            self.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self.service.stop_s_max):
                    await process.wait()
            except TimeoutError:
                self.signal(signal.SIGKILL)
                async with asyncio.timeout(_KILLED_S):
                    await process.wait()
        if self._state is not State.STOPPED:
            self._enter(State.STOPPED)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs; SIGKILL to all processes that it has."""
        process = self._process
        if process is not None and process.returncode is None:
            if number is signal.SIGKILL:
                kill_session(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def rotate(self) -> None:
        """Keep the log within its bound. Blocks."""
        rotate(self._log, self._terms.log_bytes_max)

    async def _spawn(self) -> None:
        self.serves.clear()
        self._enter(State.STARTING)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command_of(self.service.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C of the terminal is for the supervisor alone
            )

    async def _until_ready(self) -> None:
        pause_s = _LOOK_S_FIRST
        while not await asyncio.to_thread(self.service.probe):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S_MAX)

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    def _enter(self, state: State, detail: str = "") -> None:
        self._state = state
        self._since = time.monotonic()
        if state is State.UP:
            self.serves.set()
        else:
            self.serves.clear()
        self._told(Change(self.service.name, state, detail))


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with status {code}"
