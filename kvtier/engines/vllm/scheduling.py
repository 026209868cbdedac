"""Scheduler side of the connector, sans-I/O: what to load and what to save, request by request.

A request's blocks are looked up as it arrives. It loads the unbroken run that the store has beyond
what the engine holds, asynchronously; a load that brought nothing makes the request's next lookup a
miss, so that it cannot load for ever. Every whole block that the store does not have is saved once,
in the step that fills it.
What must not live here: vLLM's objects (connector.py), the store (lookups.py), bytes (pages.py).
`now` is monotonic seconds.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Protocol

from kvtier.engines.vllm.facts import EngineFacts
from kvtier.engines.vllm.settings import LoadPolicy, SavePolicy, Settings
from kvtier.engines.vllm.worth import Worth
from kvtier.types import Fingerprint

RECENT_MAX: Final = 65_536
RECENT_S: Final = 10.0
"""A block that was ordered to be saved is not ordered again for so long."""
IDLE_WAIT_S: Final = 0.03
"""An engine that computes nothing waits for an answer for so long. If it went round instead, its
processes would spin for a second after each empty step, and take cores from the next step."""
LOOKED_S: Final = 5.0
"""An answer about what the store has is used for so long, while a request waits."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Digests of one request's leading blocks, and the namespaces of each rank's shard of them."""

    digests: tuple[bytes, ...]
    namespaces: tuple[Fingerprint, ...]


class Answer(Protocol):
    """A lookup under way."""

    def wait(self, seconds: float) -> None:
        """Return once done, at the latest after so long."""
        ...

    def done(self) -> bool:
        """Whether `held` may be read."""
        ...

    def held(self) -> tuple[bool, ...] | None:
        """Per block, whether every rank's shard is in the store; None where nobody could say."""
        ...


class Store(Protocol):
    """Whom the scheduler asks; answers arrive from a thread of its own."""

    def look(self, names: BlockNames, deadline_s: float) -> Answer:
        """Begin to ask; never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Blocks of one request to bring into the engine's cache, head first."""

    request_id: str
    digests: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    adapter: bytes | None = None
    generation: str = ""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Blocks to copy out of the engine's cache in the step that fills them."""

    digests: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    prefix_hashes: tuple[int, ...] = ()
    """One a block, where the index can speak of them."""
    adapter: bytes | None = None
    generation: str = ""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What the workers are to do beside one step."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    number: int = 0
    """Of a step that computes something; else 0."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it arrives."""

    request_id: str
    digests: Sequence[bytes]
    """The engine's own list, which grows as tokens are generated."""
    prompt_tokens: int
    namespaces: tuple[Fingerprint, ...]
    adapter: bytes | None = None
    prefix_hashes: Sequence[int] = ()
    """Of whole blocks, growing with `digests`; empty where the index cannot speak of them."""
    generation: str = ""
    """Of the weights; see `EngineFacts`."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request of a step, as it will be when the step is over."""

    request_id: str
    computed_tokens: int
    block_ids: Sequence[int]


class _Next(Enum):
    """What the next question about a request gets."""

    ANSWER = 1
    """Of the lookup that was begun."""
    NEW_LOOKUP = 2
    MISS = 3
    """Once: after a load that brought nothing, and where nobody answered in time."""


@dataclass(slots=True)
class _Tracked:
    arrival: Arrival
    next: _Next = _Next.NEW_LOOKUP
    answer: Answer | None = None
    asked_at: float = 0.0
    held: tuple[bool, ...] | None = None
    """Per block, whether the store has it; None while nobody has said so."""
    first_block: int = 0
    """Where the load that is offered to the engine begins."""
    considered: int = 0
    """Blocks that were saved, or need not be."""


@dataclass(slots=True)
class SchedulerCounts:
    """Since the start; blocks."""

    looked: int = 0
    held: int = 0
    loads_ordered: int = 0
    saves_ordered: int = 0
    lookups_unanswered: int = 0
    loads_failed: int = 0
    loads_not_worth_it: int = 0


@dataclass(slots=True)
class Scheduling:
    """All requests of one engine; one thread."""

    settings: Settings
    block_tokens: int
    store: Store
    worth: Worth
    counts: SchedulerCounts = field(default_factory=SchedulerCounts)
    _requests: dict[str, _Tracked] = field(default_factory=dict)
    _recent: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    _loads: list[LoadOrder] = field(default_factory=list)
    _steps: int = 0
    _computes: bool = False
    """Whether the last step computed something."""
    _saves_nothing: bool = False
    """Since a renewal that left blocks of before in the engine."""

    def arrived(self, arrival: Arrival, now: float) -> None:
        """A new request; its blocks are looked up at once."""
        tracked = self._requests[arrival.request_id] = _Tracked(arrival)
        self._look(tracked, now)

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def matched(self, request_id: str, computed_tokens: int, now: float) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: not known yet, ask again.

        May be asked any number of times; orders nothing. Waits for `IDLE_WAIT_S` at most, and only
        where the engine computes nothing meanwhile.
        """
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.next is _Next.MISS:
            return 0
        is_old = tracked.held is not None and now - tracked.asked_at > LOOKED_S
        if tracked.next is _Next.NEW_LOOKUP or is_old:
            self._look(tracked, now)
        if tracked.answer is None:
            return 0  # a prompt of less than one block
        if tracked.held is None and not self._computes and now - tracked.asked_at < IDLE_WAIT_S:
            tracked.answer.wait(min(IDLE_WAIT_S, self._lookup_s))
        if tracked.held is None and not self._learn(tracked):
            if not tracked.answer.done() and now - tracked.asked_at < self._lookup_s:
                return None
            self.counts.lookups_unanswered += 1
            tracked.next = _Next.MISS
            return 0
        held = tracked.held or ()
        tracked.first_block = computed_tokens // self.block_tokens
        blocks = 0
        for is_held in held[tracked.first_block :]:
            if not is_held:
                break
            blocks += 1
        weighs = self.settings.load is LoadPolicy.WORTH
        if blocks and weighs and not self.worth.is_worth_it(blocks, now):
            self.counts.loads_not_worth_it += 1
            return 0
        return blocks * self.block_tokens

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine made room: order the load of `external_tokens`, none where that is 0."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.next is _Next.MISS:
            tracked.next = _Next.NEW_LOOKUP
        blocks = external_tokens // self.block_tokens
        if not blocks:
            return
        first = tracked.first_block
        stop = first + blocks
        self._loads.append(
            LoadOrder(
                request_id,
                tuple(tracked.arrival.digests[first:stop]),
                tuple(block_ids[first:stop]),
                tracked.arrival.adapter,
                tracked.arrival.generation,
            )
        )
        self.counts.loads_ordered += blocks

    def step(self, scheduled: Sequence[Scheduled], now: float, tokens: int = 0) -> StepOrders:
        """What the workers are to do beside a step of `scheduled`, which computes `tokens`."""
        number, self._computes = 0, tokens > 0
        if tokens:
            number = self._steps = self._steps + 1
            self.worth.step_begun(number, tokens, now)
        loads, self._loads = tuple(self._loads), []
        saves = []
        for one in scheduled:
            tracked = self._requests.get(one.request_id)
            if tracked is None:
                continue
            order = self._to_save(tracked, one, now)
            if order is not None:
                saves.append(order)
                self.counts.saves_ordered += len(order.digests)
        return StepOrders(loads, tuple(saves), number)

    def stepped(self, number: int, now: float) -> None:
        """A step that computed something is over."""
        self.worth.step_ended(number, now)

    def loaded(self, request_id: str, leading_blocks: int, seconds: float, now: float) -> None:
        """A load ended with so many blocks in place, head first; the store has no more of it."""
        self.worth.loaded(leading_blocks, seconds, now)
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if tracked.held is not None:
            held_until = tracked.first_block + leading_blocks
            tracked.held = tracked.held[:held_until]
        if leading_blocks == 0:
            self.counts.loads_failed += 1
            tracked.next = _Next.MISS

    def renewed(self, facts: EngineFacts) -> None:
        """What was stored before stands for other weights: requests begin anew under `facts`."""
        for tracked in self._requests.values():
            arrival = tracked.arrival
            tracked.arrival = replace(
                arrival,
                namespaces=facts.namespaces(arrival.adapter),
                generation=facts.generation,
                prefix_hashes=(),
            )
            tracked.next, tracked.answer, tracked.held = _Next.NEW_LOOKUP, None, None
            tracked.considered = 0
        self._recent.clear()
        self._saves_nothing = False

    def save_nothing(self) -> None:
        """The engine still computes on blocks of before a renewal: until the next one, whatever it
        fills stands for no weights that have a name."""
        self._saves_nothing = True

    def finished(self, request_id: str) -> None:
        """A request is over, however."""
        self._requests.pop(request_id, None)

    # ---- parts

    @property
    def _lookup_s(self) -> float:
        return self.settings.lookup_ms / 1000

    def _look(self, tracked: _Tracked, now: float) -> None:
        arrival = tracked.arrival
        blocks = min(len(arrival.digests), arrival.prompt_tokens // self.block_tokens)
        tracked.held, tracked.asked_at, tracked.next = None, now, _Next.ANSWER
        if not blocks:
            tracked.held = ()
            return
        names = BlockNames(tuple(arrival.digests[:blocks]), arrival.namespaces)
        tracked.answer = self.store.look(names, self._lookup_s)
        self.counts.looked += blocks

    def _learn(self, tracked: _Tracked) -> bool:
        """Take an answer in, if there is one."""
        if tracked.answer is not None and tracked.answer.done():
            tracked.held = tracked.answer.held()
            self.counts.held += sum(tracked.held or ())
        return tracked.held is not None

    def _to_save(self, tracked: _Tracked, one: Scheduled, now: float) -> SaveOrder | None:
        policy, arrival = self.settings.save, tracked.arrival
        if policy is SavePolicy.NONE or self._saves_nothing:
            return None
        whole = min(one.computed_tokens // self.block_tokens, len(arrival.digests))
        if policy is SavePolicy.PROMPT:
            whole = min(whole, arrival.prompt_tokens // self.block_tokens)
        start, tracked.considered = tracked.considered, max(tracked.considered, whole)
        if start >= whole:
            return None
        if tracked.held is None and not self._learn(tracked):
            return None  # nobody answers: a save would only wait for its deadline
        held = tracked.held or ()
        wanted = [i for i in range(start, whole) if i >= len(held) or not held[i]]
        wanted = [i for i in wanted if self._is_due(arrival.digests[i], arrival.adapter, now)]
        if not wanted:
            return None
        hashes = arrival.prefix_hashes
        named = bool(hashes) and wanted[-1] < len(hashes)
        return SaveOrder(
            tuple(arrival.digests[i] for i in wanted),
            tuple(one.block_ids[i] for i in wanted),
            tuple(hashes[i] for i in wanted) if named else (),
            arrival.adapter,
            arrival.generation,
        )

    def _is_due(self, digest: bytes, adapter: bytes | None, now: float) -> bool:
        """Whether a block was not ordered to be saved lately; notes that it now is."""
        key = digest + (adapter or b"")
        ordered_at = self._recent.get(key)
        if ordered_at is not None and now - ordered_at <= RECENT_S:
            return False
        self._recent[key] = now
        self._recent.move_to_end(key)
        while len(self._recent) > RECENT_MAX:
            self._recent.popitem(last=False)
        return True
