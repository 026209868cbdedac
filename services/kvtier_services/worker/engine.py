"""`WorkerEngine`: the core on a thread of its own, and the endpoint's requests handed over to it.

    event loop ── submit, cancel ──▶ inbox ──▶ engine thread: step, step, step
               ◀── deltas, one hand-over a step ──

What must not live here: decisions (`core`, `scheduler`), HTTP.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeVar

from kvtier.core.model_card import ModelCard
from kvtier.core.workers import Load
from kvtier.errors import (
    BackendError,
    DeadlineError,
    KvtierError,
    OverloadedError,
    UnavailableError,
)
from kvtier.paged.sampling import SamplingTerms
from kvtier.telemetry.logs import EventLog
from kvtier_services.worker.core import EngineCore, StepDone
from kvtier_services.worker.requests import Generation, GenerationRequest, TokenDelta

LOG = EventLog("kvtier_services.worker")
T = TypeVar("T")
_IDLE_S_MAX: Final = 0.25
"""Longest sleep of the thread: whatever was missed is found then."""
_LOAD_INTERVAL_S: Final = 0.1
_CHECK_S: Final = 10.0
_JOIN_S: Final = 30.0
_CHECK_PRIORITY: Final = -(2**31)


@dataclass(frozen=True, slots=True)
class Observers:
    """Who watches the engine, on its thread; calls return at once."""

    load: Callable[[Load], None] = lambda _: None
    step: Callable[[StepDone], None] = lambda _: None
    first_token: Callable[[float], None] = lambda _: None
    """Seconds from submit to the first token."""


class _Life(Enum):
    SERVING = auto()
    DRAINING = auto()
    OVER = auto()


class LiveGeneration:
    """See `Generation`. Everything but `began_s` belongs to the event loop."""

    def __init__(self, request: GenerationRequest, engine: "WorkerEngine") -> None:
        self.request = request
        self.began_s = time.monotonic()
        self._engine = engine
        self._deltas: deque[TokenDelta] = deque()
        self._news = asyncio.Event()
        self._error: KvtierError | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._is_over

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        while True:
            while self._deltas:
                yield self._deltas.popleft()
            if self._error is not None:
                raise self._error
            if self._is_over:
                return
            self._news.clear()
            await self._news.wait()

    def cancel(self) -> None:
        """See `Generation`."""
        if not self._is_over:
            self._is_over = True
            self._news.set()
            self._engine.cancel(self)

    def give(self, delta: TokenDelta) -> None:
        """Hand over what a step brought, on the event loop."""
        if self._is_over:
            return
        self._deltas.append(delta)
        self._is_over = delta.finish is not None
        self._news.set()

    def fail(self, error: KvtierError) -> None:
        """Nothing more comes, on the event loop."""
        if not self._is_over:
            self._is_over = True
            self._error = error
            self._news.set()


class WorkerEngine:
    """`Engine` of the endpoint. Made, started and called on one event loop."""

    def __init__(
        self, core: EngineCore, card: ModelCard, queue_max: int, observers: Observers | None = None
    ) -> None:
        """`queue_max`: requests that are accepted and have not ended, at most."""
        self._core = core
        self._card = card
        self._queue_max = queue_max
        self._observers = observers or Observers()
        self._wakeup = threading.Event()
        self._submitted: deque[LiveGeneration] = deque()
        self._cancelled: deque[LiveGeneration] = deque()
        self._asked: deque[Callable[[], None]] = deque()
        self._live: set[LiveGeneration] = set()
        self._emptied = asyncio.Event()
        self._life = _Life.SERVING
        self._failure: KvtierError | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- the endpoint, on the event loop

    @property
    def card(self) -> ModelCard:
        """See `Engine`."""
        return self._card

    @property
    def context_tokens(self) -> int:
        """See `Engine`."""
        return self._core.context_tokens

    @property
    def vocab_size(self) -> int:
        """See `Engine`."""
        return self._core.vocab_size

    @property
    def live_count(self) -> int:
        """Generations that were accepted and have not ended."""
        return len(self._live)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and did not fail."""
        return self._failure is None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Generation:
        """See `Engine`."""
        if self._failure is not None:
            raise self._failure
        if self._life is not _Life.SERVING:
            raise UnavailableError("this worker is stopping")
        self._core.check(request)
        if len(self._live) >= self._queue_max:
            raise OverloadedError(f"{self._queue_max} requests wait or run already")
        return self._accept(request)

    async def check(self) -> None:
        """See `Engine`: a token is computed now, or tokens of others are."""
        if self._failure is not None:
            raise self._failure
        if self._life is not _Life.SERVING:
            raise UnavailableError("this worker is stopping")
        before = self._core.counts.generated_tokens
        generation = self._accept(_probe())
        try:
            async with asyncio.timeout(_CHECK_S):
                async for _ in generation:
                    pass
        except TimeoutError:
            if self._core.counts.generated_tokens == before:
                raise DeadlineError(f"no token was computed for {_CHECK_S:g} s") from None
        finally:
            generation.cancel()

    def cancel(self, generation: LiveGeneration) -> None:
        """Give a generation up; see `Generation.cancel`."""
        self._forget(generation)
        self._cancelled.append(generation)
        self._wakeup.set()

    def wake(self) -> None:
        """There is an outcome to take in. Thread-safe."""
        self._wakeup.set()

    async def ask(self, call: Callable[[EngineCore], T]) -> T:
        """Have the engine's thread call something between two steps. UnavailableError where the
        thread does not run; whoever calls bounds the wait."""
        if not self.is_alive:
            raise UnavailableError("the engine does not run")
        answer: asyncio.Future[T] = self._loop.create_future()

        def on_thread() -> None:
            self._on_loop(_answered, answer, call(self._core))

        self._asked.append(on_thread)
        self._wakeup.set()
        return await answer

    @property
    def is_serving(self) -> bool:
        """Whether new requests are accepted."""
        return self._life is _Life.SERVING

    async def drain(self, deadline_s: float) -> None:
        """Accept nothing more, let what runs end for so long, then cut it off."""
        if self._life is _Life.SERVING:
            self._life = _Life.DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._live and self._thread.is_alive():
                    self._emptied.clear()
                    await self._emptied.wait()
        for generation in list(self._live):
            generation.fail(UnavailableError("this worker is stopping"))
            self.cancel(generation)

    async def close(self) -> None:
        """End the thread after the step that it is in. Idempotent."""
        self._life = _Life.OVER
        self._wakeup.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_S)
        for generation in list(self._live):
            generation.fail(UnavailableError("this worker has stopped"))
            self._forget(generation)

    # ---- parts, on the event loop

    def _accept(self, request: GenerationRequest) -> LiveGeneration:
        generation = LiveGeneration(request, self)
        self._live.add(generation)
        self._submitted.append(generation)
        self._wakeup.set()
        return generation

    def _forget(self, generation: LiveGeneration) -> None:
        self._live.discard(generation)
        if not self._live:
            self._emptied.set()

    def _deliver(self, deltas: Sequence[tuple[LiveGeneration, TokenDelta]]) -> None:
        for generation, delta in deltas:
            generation.give(delta)
            if generation.is_over:
                self._forget(generation)

    def _fail_all(self, error: KvtierError) -> None:
        for generation in list(self._live):
            generation.fail(error)
            self._forget(generation)

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # outermost edge of this thread
            LOG.exception("the engine failed", error)
            self._failure = BackendError(f"the engine failed: {type(error).__name__}")
            self._on_loop(self._fail_all, self._failure)

    def _serve(self) -> None:
        core, running = self._core, _Running()
        load_at = 0.0
        while self._life is not _Life.OVER:
            self._wakeup.clear()
            self._take_in(running)
            done = core.step()
            now = time.monotonic()
            if done.deliveries:
                self._hand_over(done, running, now)
            if done.idle is None:
                self._observers.step(done)
            if done.idle is not None or now >= load_at:
                self._observers.load(core.load())
                load_at = now + _LOAD_INTERVAL_S
            if done.idle is not None:
                until = done.idle.until
                wait_s = _IDLE_S_MAX if until is None else min(_IDLE_S_MAX, until - now)
                if wait_s > 0:
                    self._wakeup.wait(wait_s)

    def _take_in(self, running: "_Running") -> None:
        while self._asked:
            self._asked.popleft()()
        while self._submitted:
            generation = self._submitted.popleft()
            number = self._core.submit(generation.request)
            running.add(number, generation)
        while self._cancelled:
            number_or_none = running.remove(self._cancelled.popleft())
            if number_or_none is not None:
                self._core.cancel(number_or_none)

    def _hand_over(self, done: StepDone, running: "_Running", now: float) -> None:
        deltas = []
        for delivery in done.deliveries:
            generation = running.by_number[delivery.number]
            if delivery.delta.cached is not None:
                self._observers.first_token(now - generation.began_s)
            if delivery.delta.finish is not None:
                running.remove(generation)
            deltas.append((generation, delivery.delta))
        self._on_loop(self._deliver, deltas)

    def _on_loop(self, call: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *args)


class _Running:
    """Which generation is which number of the core; the engine's thread only."""

    def __init__(self) -> None:
        self.by_number: dict[int, LiveGeneration] = {}
        self._numbers: dict[LiveGeneration, int] = {}

    def add(self, number: int, generation: LiveGeneration) -> None:
        self.by_number[number] = generation
        self._numbers[generation] = number

    def remove(self, generation: LiveGeneration) -> int | None:
        number = self._numbers.pop(generation, None)
        if number is not None:
            del self.by_number[number]
        return number


def _answered(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _probe() -> GenerationRequest:
    return GenerationRequest(
        request_id="health",
        prompt_tokens=(0,),
        sampling=SamplingTerms(temperature=0.0),
        tokens_max=1,
        priority=_CHECK_PRIORITY,
    )
