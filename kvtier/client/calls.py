"""Calls to one of several index replicas: deadlines, fail-over, errors of our own tree.

One place retries: an idempotent call goes to each target at most once, the one that answered last
first. A target that does not answer may use up only its share of the deadline, so that a frozen
one costs time and not the answer. Streams have no deadline; the channel's keepalive ends one whose
other end is gone or frozen within GRPC_KEEPALIVE_MS and GRPC_KEEPALIVE_TIMEOUT_MS.

What must not live here: what is asked.
"""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from kvtier.errors import (
    BackendError,
    CallerError,
    ConfigError,
    DeadlineError,
    KvtierError,
    UnavailableError,
)
from kvtier.sections import DialConfig
from kvtier.security import Dialer
from kvtier.wire import rpc
from kvtier.wire.loop_thread import end
from kvtier.wire.status import error_of

_RETIRED_S = 10.0
"""Calls that are under way on a replaced channel have so long to finish."""
_JITTER = secrets.SystemRandom()


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Deadlines and pauses of an IndexClient."""

    deadline_s: float = 1.0
    """Of each call that brings none of its own."""
    reconnect_s_min: float = 0.05
    reconnect_s_max: float = 1.0
    """Pauses of streams that are opened again; doubles, with jitter."""

    def __post_init__(self) -> None:
        for name in ("deadline_s", "reconnect_s_min", "reconnect_s_max"):
            if not 0 < getattr(self, name) < float("inf"):
                raise CallerError(f"{name}: want a finite duration, got {getattr(self, name)}")

    def pause_s(self, failures: int) -> float:
        """How long to wait after so many failures in a row; the upper half is at random."""
        doubled = self.reconnect_s_min * 2.0 ** min(max(failures - 1, 0), 30)
        return min(self.reconnect_s_max, doubled) * _JITTER.uniform(0.5, 1.0)


class Targets:
    """The channels to all targets; which one is asked first. Belongs to one event loop."""

    def __init__(self, dial: DialConfig, config: ClientConfig) -> None:
        if not dial.targets:
            raise ConfigError("targets: a client needs an index to call")
        self._dial = dial
        self._dialers = {target: Dialer(dial, target) for target in dial.targets}
        self._first = dial.targets[0]
        self._config = config
        self._renewed_at: dict[str, float] = {}
        self._retired: set[asyncio.Task[None]] = set()

    def in_order(self) -> list[str]:
        """All targets, the one that answered last first."""
        others = [target for target in self._dialers if target != self._first]
        return [self._first, *others]

    def new_dialer(self, target: str) -> Dialer:
        """A connection of its own for a stream that lives long; the caller closes it."""
        return Dialer(self._dial, target)

    async def ask(self, name: str, request: Any, deadline_s: float) -> Any:
        """One unary call that may be repeated. Raises an error of our tree, the last target's."""
        clock = asyncio.get_running_loop().time
        end = clock() + deadline_s
        error: KvtierError = UnavailableError("no index was called")
        order = self.in_order()
        for number, target in enumerate(order):
            left_s = end - clock()
            if left_s <= 0:
                break
            try:
                answer = await self._call(target, name, request, left_s / (len(order) - number))
            except (UnavailableError, DeadlineError, BackendError) as failed:
                error = failed
                if isinstance(failed, UnavailableError):
                    self._renew(target, clock())
                continue
            self._first = target
            return answer
        raise error

    async def _call(self, target: str, name: str, request: Any, timeout_s: float) -> Any:
        call = rpc.call(self._dialers[target].channel(), rpc.INDEX, name)
        try:
            return await call(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, target) from error
        except grpc.aio.UsageError as error:
            raise UnavailableError(f"{target}: {error}") from error

    def _renew(self, target: str, now: float) -> None:
        """Let later calls connect anew instead of failing for as long as gRPC backs off.

        At most once a `reconnect_s_max`; calls under way on the old channel go on for a while.
        """
        if now - self._renewed_at.get(target, float("-inf")) < self._config.reconnect_s_max:
            return
        self._renewed_at[target] = now
        try:
            renewed = Dialer(self._dial, target)
        except ConfigError:
            return  # credential files that are being replaced: the old channel has the old ones
        task = asyncio.create_task(_close_later(self._dialers[target]))
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)
        self._dialers[target] = renewed

    async def close(self) -> None:
        await end(tuple(self._retired))
        for dialer in self._dialers.values():
            await dialer.close()


async def _close_later(dialer: Dialer) -> None:
    try:
        await asyncio.sleep(_RETIRED_S)
    finally:
        await dialer.close()
