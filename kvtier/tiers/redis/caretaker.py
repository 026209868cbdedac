"""Looks after one tier's belief and, where elected, announces the shared Redis for everybody.

Runs what `holder` decides: one `look` every `look_s`. What comes out is in `poll`: events for
whoever publishes KVEvents. What must not live here: decisions, publishing.
"""

import asyncio
import contextlib
import random
import secrets
import time
from typing import Final

from kvtier.errors import BackendError, DeadlineError
from kvtier.ports import Clock, RemovalCause
from kvtier.tiers.redis.holder import HolderEvent, HolderPolicy, SharedHolder, Standing
from kvtier.tiers.redis.naming import name_of_key, pattern
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.troubles import RedisTroubleError, Trouble
from kvtier.types import Fingerprint

_ID_BYTES: Final = 16
_ANNOUNCED_S: Final = 3600.0
"""How long a successor may need to hear which namespaces were announced: longer than any lease."""


class RedisCaretaker:
    """One per tier. Use `run` as a task, or `look` step by step; `close` it before the tier."""

    def __init__(
        self, tier: RedisTier, policy: HolderPolicy | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._tier = tier
        self._policy = policy or HolderPolicy()
        self._clock = clock
        self._holder = SharedHolder(tier.belief, self._policy)
        self._token = secrets.token_hex(_ID_BYTES)
        self._id = secrets.token_hex(_ID_BYTES)
        self._dice = random.Random(secrets.randbits(64))  # noqa: S311 (a sample, no secret)
        self._cursor = 0
        self._namespaces: set[Fingerprint] = set()
        """What was announced as of the last look."""
        self.trouble: Trouble | None = None
        """What the last look met; None: it was complete."""

    def standing(self) -> Standing:
        """What this store is for the holder now."""
        self._holder.on_time(self._clock())
        return self._holder.standing()

    @property
    def holder_id(self) -> str:
        """The id of the shared Redis, once a look succeeded; before, what we would call it."""
        return self._id

    def poll(self) -> list[HolderEvent]:
        """What to publish next, in order. Does no I/O."""
        self._holder.on_time(self._clock())
        return self._holder.poll()

    async def run(self) -> None:
        """Look every `look_s` until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._policy.look_s)

    async def look(self) -> None:
        """One look: counters, lock, a sample, some pages of a census. Never raises for the server.

        Bounded by `lock_ttl_s`; what was not done then is done at the next look.
        """
        now = self._clock()
        self._holder.on_time(now)
        try:
            async with asyncio.timeout(self._policy.lock_ttl_s):
                await self._look()
            self.trouble = None
        except RedisTroubleError as error:
            self.trouble = error.trouble
        except (BackendError, DeadlineError, TimeoutError):
            self.trouble = self._tier.trouble or Trouble.SILENT
        if self.trouble is not None and self._holder.is_counting:
            self._cursor = 0
            self._holder.abandon_census()

    async def close(self) -> None:
        """Give the lock back, so that another store takes over at once. Never raises for I/O.

        What was announced must have been taken back: a successor does not wait for its census.
        """
        try:
            async with asyncio.timeout(self._policy.look_s):
                if self.standing() is not Standing.BYSTANDER:
                    await self._tier.control.forget_announced()
                await self._tier.control.release_lock(self._token)
        except (TimeoutError, RedisTroubleError):
            return  # the term ends by itself

    async def _look(self) -> None:
        control = self._tier.control
        await self._tier.follow_master()
        state = await control.state()
        lost = self._holder.on_server(state.run_id, state.keys_count, state.evicted_count)
        self._tier.told_removed(lost, RemovalCause.LOST)
        self._id = await control.identify(self._id)
        asked_s = self._clock()
        is_ours = await control.hold_lock(self._token, self._policy.lock_ttl_s)
        inherited: list[Fingerprint] = []
        if is_ours and self._holder.standing() is Standing.BYSTANDER:
            inherited = await control.announced()
            self._namespaces = set()
        self._holder.on_lock(self._id, asked_s=asked_s, is_ours=is_ours, inherited=inherited)
        if not is_ours and self._holder.is_counting:
            self._cursor = 0
            self._holder.abandon_census()
        deadline_s = asked_s + self._policy.lock_ttl_s
        asked, missing = await self._tier.sampled(self._policy.sample_count, self._dice, deadline_s)
        self._holder.on_sampled(asked, missing)
        if self._holder.is_census_due(self._clock()):
            self._cursor = 0
            self._holder.begin_census(self._clock())
        if self._holder.is_counting:
            await self._count_some()
        if self._holder.standing() is Standing.ANNOUNCER:
            await self._remember()

    async def _remember(self) -> None:
        """Leave word of what is announced, before it is: nothing is awaited between this and the
        `poll` that follows a look. A namespace that is empty stays for one look more."""
        namespaces = self._tier.belief.namespaces()
        with contextlib.suppress(RedisTroubleError):  # a server out of memory takes nothing new
            await self._tier.control.remember_announced(namespaces | self._namespaces, _ANNOUNCED_S)
        self._namespaces = namespaces

    async def _count_some(self) -> None:
        for _ in range(self._policy.pages_per_look):
            cursor, keys = await self._tier.control.scan(
                self._cursor, pattern(), self._policy.page_count
            )
            names = [name for key in keys if (name := name_of_key(key)) is not None]
            self._tier.told_stored(self._tier.belief.seen(names))
            self._cursor = cursor
            if cursor == 0:
                lost = self._holder.end_census()
                self._tier.told_removed(lost, RemovalCause.LOST)
                return
