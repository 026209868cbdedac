"""Which other stores have a block: asked of the index in batches, remembered for a moment.

Questions that come in one pass of the event loop travel together: the groups of one long read ask
once. What is remembered is a hint like the answer itself: a wrong one costs a miss.
What must not live here: whom to take of several (`tier`), calls to peers.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from kvtier.core.event_columns import Hashes
from kvtier.core.frame import FrameName, KeyKind
from kvtier.core.health import Breaker, BreakerPolicy, Outcome
from kvtier.errors import DeadlineError, KvtierError, UnavailableError
from kvtier.limits import PEER_ABSENT_BLOCKS_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.ports import Clock, PeerPlace
from kvtier.types import Fingerprint, InstanceId
from kvtier.wire.loop_thread import end

Places: TypeAlias = tuple[PeerPlace, ...]
HashOf: TypeAlias = Callable[[FrameName], int | None]
_Key: TypeAlias = tuple[Fingerprint, int]

_HASH_BYTES: Final = 8
_NOWHERE: Final[Places] = ()


class PeerIndex(Protocol):
    """What is needed of an index: `kvtier.client.IndexClient` is one."""

    async def locate(
        self, namespace: Fingerprint, hashes: Hashes, instance: str, deadline_s: float
    ) -> tuple[Places, ...]:
        """Stores per block, other than `instance`. `deadline_s` is a duration."""
        ...


@dataclass(frozen=True, slots=True)
class FinderPolicy:
    """How long answers are believed, and how long the index may take."""

    ask_s: float = 0.25
    found_s: float = 2.0
    absent_s: float = 0.5
    breaker: BreakerPolicy = field(
        default_factory=lambda: BreakerPolicy(
            failures_max=2, open_s=0.5, open_s_max=15.0, probes_to_close=1
        )
    )
    """Of the index: a frozen one is to cost nobody's time for long."""


@dataclass(frozen=True, slots=True)
class _Known:
    places: Places
    until: float


def prefix_hash_of(name: FrameName) -> int | None:
    """By what the index knows a block that is named by its prefix key; None for any other."""
    if name.key_kind is not KeyKind.PREFIX_KEY:
        return None
    return int.from_bytes(name.key[:_HASH_BYTES], "little")


class Finder:
    """See the module. Belongs to one event loop; remembers PEER_ABSENT_BLOCKS_MAX blocks."""

    def __init__(
        self,
        index: PeerIndex,
        instance: InstanceId,
        clock: Clock,
        hash_of: HashOf = prefix_hash_of,
        policy: FinderPolicy | None = None,
    ) -> None:
        self._index = index
        self._instance = instance
        self._clock = clock
        self._hash_of = hash_of
        self._policy = policy or FinderPolicy()
        self._known: OrderedDict[_Key, _Known] = OrderedDict()
        self._asking: dict[_Key, asyncio.Future[Places]] = {}
        self._waiting: dict[Fingerprint, dict[int, asyncio.Future[Places]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._breaker = Breaker(self._policy.breaker)
        self.questions = 0
        """Calls to the index."""

    async def find(self, names: Sequence[FrameName], deadline_s: float) -> list[Places]:
        """Stores of each block; none for a block that the index has no word for.

        Raises what asking raised, DeadlineError where the answer is late.
        """
        keys = [self._key(name) for name in names]
        now = self._clock()
        found: dict[_Key | None, Places] = {None: _NOWHERE}
        ways: dict[_Key, asyncio.Future[Places]] = {}
        for key in dict.fromkeys(keys):
            known = None if key is None else self._known.get(key)
            if known is not None and now < known.until:
                found[key] = known.places
            elif key is not None:
                ways[key] = self._way(key)
        if ways:
            await self._wait(list(ways.values()), deadline_s)
        found |= {key: way.result() for key, way in ways.items()}
        return [found[key] for key in keys]

    def forget(self, names: Sequence[FrameName]) -> None:
        """What was believed of these turned out wrong: nobody has them, for a moment."""
        until = self._clock() + self._policy.absent_s
        for key in map(self._key, names):
            if key is not None:
                self._remember(key, _Known(_NOWHERE, until))

    async def close(self) -> None:
        """End all questions."""
        await end(self._tasks)

    def _key(self, name: FrameName) -> _Key | None:
        number = self._hash_of(name)
        return None if number is None else (name.namespace, number)

    def _remember(self, key: _Key, known: _Known) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > PEER_ABSENT_BLOCKS_MAX:
            self._known.popitem(last=False)

    def _way(self, key: _Key) -> asyncio.Future[Places]:
        """The answer that is under way for a block, or a new question."""
        way = self._asking.get(key)
        if way is None:
            way = asyncio.get_running_loop().create_future()
            self._asking[key] = way
            if not self._waiting:
                task = asyncio.get_running_loop().create_task(self._ask_all())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._waiting.setdefault(key[0], {})[key[1]] = way
        return way

    async def _wait(self, ways: Sequence[asyncio.Future[Places]], deadline_s: float) -> None:
        timeout = max(0.0, deadline_s - self._clock())
        _, late = await asyncio.wait(ways, timeout=timeout)
        if late:
            raise DeadlineError("the index did not say in time who has the blocks")

    async def _ask_all(self) -> None:
        await asyncio.sleep(0)  # let the other groups of this pass join
        waiting, self._waiting = self._waiting, {}
        pieces = [
            (namespace, dict(list(ways.items())[at : at + TIER_BATCH_BLOCKS_MAX]))
            for namespace, ways in waiting.items()
            for at in range(0, len(ways), TIER_BATCH_BLOCKS_MAX)
        ]
        try:
            await asyncio.gather(*(self._ask(namespace, ways) for namespace, ways in pieces))
        finally:
            for namespace, ways in pieces:
                for number, way in ways.items():
                    if not way.done():
                        self._asking.pop((namespace, number), None)
                        _fail(way, UnavailableError("the index is not asked any more"))

    async def _ask(self, namespace: Fingerprint, ways: dict[int, asyncio.Future[Places]]) -> None:
        try:
            answers = await self._answers(namespace, list(ways))
        except KvtierError as error:
            for number, way in ways.items():
                del self._asking[namespace, number]
                _fail(way, error)
            return
        now = self._clock()
        for (number, way), places in zip(ways.items(), answers, strict=True):
            lasts_s = self._policy.found_s if places else self._policy.absent_s
            self._remember((namespace, number), _Known(places, now + lasts_s))
            del self._asking[namespace, number]
            way.set_result(places)

    async def _answers(self, namespace: Fingerprint, numbers: list[int]) -> tuple[Places, ...]:
        began = self._clock()
        permit = self._breaker.acquire(began)
        if permit is None:
            raise UnavailableError("the index did not answer lately")
        self.questions += 1
        outcome = Outcome.CANCELLED
        try:
            answers = await self._index.locate(
                namespace, numbers, self._instance, self._policy.ask_s
            )
            outcome = Outcome.SUCCESS
        except KvtierError:
            outcome = Outcome.FAILURE
            raise
        finally:
            now = self._clock()
            self._breaker.report(permit, outcome, now - began, now)
        return answers


def _fail(way: asyncio.Future[Places], error: KvtierError) -> None:
    way.set_exception(error)
    way.exception()  # perhaps nobody waits any more
