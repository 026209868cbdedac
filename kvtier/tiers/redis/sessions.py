"""Whether and how the server may be used now: deadline, breaker, connection, and what is wrong.

One call is one session: one permit, one connection, one attempt. While the breaker is not closed
every call is refused at once, without a wait: a task of this module asks the server with PING until
it answers again, so that no request pays for finding out.

What must not live here: commands other than PING, results.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final

from kvtier.core.health import Breaker, BreakerState, Outcome, Permit
from kvtier.errors import DeadlineError
from kvtier.ports import Clock
from kvtier.tiers.redis.config import RedisConfig
from kvtier.tiers.redis.connection import RedisConnection, ServerFacts
from kvtier.tiers.redis.control import RedisControl
from kvtier.tiers.redis.pool import Locate, RedisPool
from kvtier.tiers.redis.replies import ErrorReply, Reply
from kvtier.tiers.redis.troubles import (
    WRITES_ONLY,
    WRONG_TYPE,
    RedisTroubleError,
    Trouble,
    classify,
    code_of,
)

_PAUSES_PER_OPEN: Final = 4


class RedisSessions:
    """See the module's docstring. `locate` finds the server."""

    def __init__(
        self,
        config: RedisConfig,
        control: RedisControl,
        locate: Locate,
        on_connected: Callable[[ServerFacts], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._config = config
        self._control = control
        self._clock = clock
        self._pool = RedisPool(config, locate, on_connected)
        self._breaker = Breaker(config.breaker)
        self._writes = Breaker(config.breaker)
        self._prober: asyncio.Task[None] | None = None
        self._is_closed = False
        self.trouble: Trouble | None = None
        """What the last session met; None: nothing."""
        self.write_trouble: Trouble | None = None
        """Why the last write was refused; None: it was not."""

    @property
    def state(self) -> BreakerState:
        """Of the breaker, now."""
        return self._breaker.state(self._clock())

    @property
    def tripped_count(self) -> int:
        """How often the breaker opened."""
        return self._breaker.tripped_count

    @property
    def connects_count(self) -> int:
        """Connections attempted."""
        return self._pool.opened_count

    @contextlib.asynccontextmanager
    async def session(self, deadline_s: float) -> AsyncIterator[RedisConnection]:
        """A connection until the deadline.

        Raises DeadlineError at it, RedisTroubleError for everything else, at once where the breaker
        is not closed. Counts what came of it.
        """
        began_s = self._clock()
        if began_s >= deadline_s:
            raise DeadlineError("the deadline had passed before the call")
        if self._breaker.state(began_s) is not BreakerState.CLOSED:
            self._probe()
            raise RedisTroubleError(Trouble.BREAKER_OPEN)
        permit = self._breaker.acquire(began_s)
        assert permit is not None
        outcome = Outcome.CANCELLED
        try:
            async with (
                asyncio.timeout(deadline_s - began_s),
                self._pool.connection() as connection,
            ):
                yield connection
            self.trouble = None
            outcome = Outcome.SUCCESS
        except TimeoutError as error:
            outcome = Outcome.FAILURE
            self.trouble = Trouble.SILENT
            raise DeadlineError("Redis did not answer by the deadline") from error
        except RedisTroubleError as error:
            self.trouble = error.trouble
            outcome = Outcome.FAILURE
            raise
        finally:
            now = self._clock()
            self._breaker.report(permit, outcome, now - began_s, now)
            if self._breaker.state(now) is not BreakerState.CLOSED:
                self._probe()

    def judge(self, replies: Iterable[Reply]) -> None:
        """Raise RedisTroubleError where the error replies say that the server is of no use."""
        for reply in replies:
            if isinstance(reply, ErrorReply) and code_of(reply) != WRONG_TYPE:
                trouble = classify(reply)
                if trouble not in WRITES_ONLY:
                    raise RedisTroubleError(trouble, code_of(reply))

    def write_permit(self) -> Permit | None:
        """Leave to send payloads; None where the server refused the last ones (no memory, say).

        Hand it back with `report_write`.
        """
        return self._writes.acquire(self._clock())

    async def report_write(
        self, permit: Permit, outcome: Outcome, replies: Sequence[Reply]
    ) -> None:
        """Tell what came of a permitted write. A demoted master is left for the new one."""
        refusals = [classify(reply) for reply in replies if isinstance(reply, ErrorReply)]
        met = next((trouble for trouble in refusals if trouble in WRITES_ONLY), None)
        if met is not None:
            outcome = Outcome.FAILURE
        if outcome is not Outcome.CANCELLED:
            self.write_trouble = met
        self._writes.report(permit, outcome, 0.0, self._clock())
        if met is Trouble.READ_ONLY:
            await self.forget()

    async def forget(self) -> None:
        """Leave this server: the next call finds out where the master is."""
        self._pool.forget_all()
        await self._control.forget()

    async def close(self) -> None:
        """End everything. Idempotent."""
        self._is_closed = True
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
            self._prober = None
        await self._pool.close()

    def _probe(self) -> None:
        """Have somebody find out when the server is back."""
        if self._is_closed or (self._prober is not None and not self._prober.done()):
            return
        self._prober = asyncio.get_running_loop().create_task(self._probe_until_closed())

    async def _probe_until_closed(self) -> None:
        while (state := self._breaker.state(self._clock())) is not BreakerState.CLOSED:
            permit = None if state is BreakerState.OPEN else self._breaker.acquire(self._clock())
            if permit is None:
                await asyncio.sleep(self._config.breaker.open_s / _PAUSES_PER_OPEN)
                continue
            began_s = self._clock()
            outcome = Outcome.CANCELLED
            try:
                outcome = await self._ping()
            finally:
                now = self._clock()
                self._breaker.report(permit, outcome, now - began_s, now)

    async def _ping(self) -> Outcome:
        wait_s = self._config.connect_timeout_s + self._config.reply_timeout_s
        try:
            async with asyncio.timeout(wait_s), self._pool.connection() as connection:
                await connection.ask(b"PING")
        except TimeoutError:
            self.trouble = Trouble.SILENT
            return Outcome.FAILURE
        except RedisTroubleError as error:
            self.trouble = error.trouble
            return Outcome.FAILURE
        self.trouble = None
        return Outcome.SUCCESS
