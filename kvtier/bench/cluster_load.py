"""Sends a replay to an OpenAI endpoint when its requests are due, and measures each answer.

What must not live here: traces, clusters, what the figures are held against.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO

import aiohttp

from kvtier.bench.cluster_trace import Ask, Blocks, Replay
from kvtier.bench.index_service_processes import BenchError

_ANSWER_S_MAX: Final = 600.0
_CONNECT_S_MAX: Final = 10.0
_ERROR_CHARS: Final = 200
_EVENT_BYTES_MAX: Final = 1 << 20
_BAR_CHARS: Final = 30
_DRAW_S: Final = 0.2
_LINE_S: Final = 10.0
"""Between lines where the progress is no terminal's."""
_EXPLAIN: Final = {"x-kvtier-explain": "1"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replay is sent. `url` is without `/v1`."""

    url: str
    model: str
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request went; times are infinite and counts zero where `error` is not empty."""

    late_s: float
    """How long after it was due it was sent."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    by_tier: Mapping[str, int]
    """Cached prompt tokens by tier; empty where the endpoint does not tell them apart."""
    ttft_s: float
    gaps_s: tuple[float, ...]
    """Between pieces of text."""
    total_s: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a replay."""

    outcomes: tuple[Outcome, ...]
    took_s: float

    @property
    def answered(self) -> list[Outcome]:
        return [one for one in self.outcomes if not one.error]

    @property
    def errors(self) -> list[str]:
        return [one.error for one in self.outcomes if one.error]


async def find_model(url: str, api_key: str) -> str:
    """The first model that an endpoint serves. BenchError where it does not tell."""
    endpoint = Endpoint(url, "", api_key)
    timeout = aiohttp.ClientTimeout(total=_CONNECT_S_MAX)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=endpoint.headers) as session,
            session.get(f"{url}/v1/models") as answer,
        ):
            told = await answer.json(content_type=None)
        return str(told["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url}/v1/models tells no model: {error!r}") from error


async def replay(endpoint: Endpoint, wanted: Replay, open_max: int, title: str) -> Replayed:
    """Send every request when it is due and wait for all answers.

    At most `open_max` are under way; one that has to wait for another is late, which its outcome
    says. Progress goes to standard error.
    """
    blocks, places = Blocks(wanted.piece_tokens), asyncio.Semaphore(open_max)
    progress = Progress(title, len(wanted.asks))
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S_MAX, connect=_CONNECT_S_MAX)
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    async with aiohttp.ClientSession(
        timeout=timeout,
        headers={**endpoint.headers, **_EXPLAIN},
        connector=aiohttp.TCPConnector(limit=open_max),
        read_bufsize=_EVENT_BYTES_MAX,
    ) as session:

        async def send(ask: Ask, body: bytes) -> None:
            try:
                late_s = time.perf_counter() - started - ask.at
                outcome = await _answered(session, endpoint, body, late_s)
            finally:
                places.release()
            outcomes.append(outcome)
            progress.done(failed=bool(outcome.error))

        async with asyncio.TaskGroup() as group:
            for ask in wanted.asks:
                body = _body(endpoint.model, ask, blocks.prompt(ask))
                await asyncio.sleep(max(0.0, ask.at - (time.perf_counter() - started)))
                await places.acquire()
                group.create_task(send(ask, body))
    progress.close()
    return Replayed(tuple(outcomes), time.perf_counter() - started)


def _body(model: str, ask: Ask, prompt: Sequence[int]) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def _answered(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: bytes, late_s: float
) -> Outcome:
    reading = _Reading()
    headers = {"content-type": "application/json"}
    try:
        async with session.post(
            f"{endpoint.url}/v1/completions", data=body, headers=headers
        ) as answer:
            if answer.status != 200:
                told = (await answer.content.read(_EVENT_BYTES_MAX)).decode("utf-8", "replace")
                return _failed(late_s, f"status {answer.status}: {told[:_ERROR_CHARS]}")
            async for line in answer.content:
                reading.line(line)
        return reading.outcome(late_s)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError) as error:
        return _failed(late_s, repr(error)[:_ERROR_CHARS])


def _failed(late_s: float, error: str) -> Outcome:
    endless = float("inf")
    return Outcome(late_s, 0, 0, 0, {}, endless, (), endless, error)


@dataclass(slots=True)
class _Reading:
    """Reads one stream, line by line."""

    sent_at: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    usage: Mapping[str, object] = field(default_factory=dict)
    is_done: bool = False

    def line(self, line: bytes) -> None:
        """Take a line. ValueError for an event that is not JSON or tells an error."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        event: object = json.loads(data)
        if not isinstance(event, dict) or "error" in event:
            raise ValueError(f"the stream says {data[:_ERROR_CHARS]!r}")
        choices = event.get("choices") or []
        if any(choice.get("text") for choice in choices):
            self.times.append(time.perf_counter())
        found = event.get("usage")
        if isinstance(found, dict):
            self.usage = found

    def outcome(self, late_s: float) -> Outcome:
        """What the stream came to. ValueError where it broke off or was empty."""
        if not self.is_done:
            raise ValueError("the stream broke off")
        if not self.times:
            raise ValueError("the answer is empty")
        details, ours = self.usage.get("prompt_tokens_details"), self.usage.get("kvtier")
        by_tier = ours.get("cached_tokens") if isinstance(ours, dict) else None
        return Outcome(
            late_s=late_s,
            prompt_tokens=_count(self.usage, "prompt_tokens"),
            output_tokens=_count(self.usage, "completion_tokens"),
            cached_tokens=_count(details, "cached_tokens"),
            by_tier=by_tier if isinstance(by_tier, dict) else {},
            ttft_s=self.times[0] - self.sent_at,
            gaps_s=tuple(b - a for a, b in zip(self.times, self.times[1:], strict=False)),
            total_s=time.perf_counter() - self.sent_at,
        )


def _count(told: object, name: str) -> int:
    found = told.get(name) if isinstance(told, Mapping) else None
    return found if isinstance(found, int) else 0


class Progress:
    """A bar on a terminal, now and then a line elsewhere."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self._title = title
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._redraws = self._stream.isatty()
        self._started = self._told_at = time.perf_counter()
        self._done = 0
        self._failed = 0

    def done(self, *, failed: bool) -> None:
        """One more is done."""
        self._done += 1
        self._failed += failed
        pause_s = _DRAW_S if self._redraws else _LINE_S
        if time.perf_counter() - self._told_at > pause_s:
            self._tell("\r" if self._redraws else "\n")

    def close(self) -> None:
        """Tell the end."""
        self._tell("\n")

    def _tell(self, end: str) -> None:
        self._told_at = time.perf_counter()
        full = _BAR_CHARS * self._done // max(1, self._total)
        bar = "#" * full + "." * (_BAR_CHARS - full)
        errors = f", {self._failed} errors" if self._failed else ""
        self._stream.write(
            f"{self._title} [{bar}] {self._done}/{self._total}{errors}, "
            f"{self._told_at - self._started:.0f} s{end}"
        )
        self._stream.flush()
