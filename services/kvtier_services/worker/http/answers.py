"""Answers to generation requests: whole, or as server-sent events.

A stream begins with its first token, so that everything that fails before has a status of its own;
what fails later ends it with an error event and never with `[DONE]`. What must not live here:
routes, parsing, the shapes of JSON.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from kvtier.errors import DeadlineError, KvtierError
from kvtier.openai.errors import error_object
from kvtier.openai.sse import DONE, event
from kvtier.telemetry.logs import EventLog
from kvtier_services.worker.http.choices import Choice, Flow, Piece, running
from kvtier_services.worker.http.metrics import EndpointMetrics
from kvtier_services.worker.http.parameters import Delivery
from kvtier_services.worker.http.preparing import Prepared
from kvtier_services.worker.http.settings import EndpointSettings
from kvtier_services.worker.http.shapes import Envelope, JsonObject, encoded, usage_of
from kvtier_services.worker.requests import Engine

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}
_log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class Answering:
    """One request and how it is answered."""

    prepared: Prepared
    envelope: Envelope
    explained: bool
    """The usage says from which tiers cached tokens came."""
    headers: Mapping[str, str]
    """Of the answer."""
    elsewhere_tokens: int = 0
    """Of the prompt, computed for this request by another worker."""
    begun_at: float = field(default_factory=time.monotonic)

    def usage(self) -> JsonObject:
        terms = self.prepared.terms
        return usage_of(
            self.prepared.choices,
            terms.choices_count,
            explained=self.explained,
            elsewhere_tokens=self.elsewhere_tokens,
        )


class BrokenStreamError(Exception):
    """A stream ended in an error event: the client has been told, the answer is not complete."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__()
        self.response = response


class Answerer:
    """Runs requests on an engine and answers them."""

    def __init__(
        self, engine: Engine, settings: EndpointSettings, metrics: EndpointMetrics
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics

    async def answer(self, request: web.Request, job: Answering) -> web.StreamResponse:
        """Answer `request`; cancel whatever runs when the client goes or the time is up.

        Raises KvtierError while nothing has been sent, and BrokenStreamError afterwards.
        """
        prepared = job.prepared
        stream: _EventStream | None = None
        try:
            async with (
                asyncio.timeout(self._settings.generation_ms_max / 1e3),
                running(self._engine, prepared.choices, prepared.requests) as flow,
            ):
                first = await flow.pieces()
                self._metrics.first_token.observe(time.monotonic() - job.begun_at)
                if prepared.terms.delivery is Delivery.WHOLE:
                    return self._finished(job, await _whole(job, first, flow))
                stream = _EventStream(job, self._settings.write_ms_max / 1e3)
                await stream.run(request, first, flow)
                return self._finished(job, stream.response)
        except TimeoutError:
            error: KvtierError = DeadlineError("the answer took too long")
        except KvtierError as failure:
            error = failure
        except Exception as bug:  # outermost edge: a stream must not end as if it were complete
            if stream is None or not stream.begun or isinstance(bug, ConnectionError):
                raise
            _log.exception("a stream failed", bug)
            error = KvtierError()
        if stream is None or not stream.begun:
            raise error
        await stream.fail(error)
        raise BrokenStreamError(stream.response)

    def _finished(self, job: Answering, response: web.StreamResponse) -> web.StreamResponse:
        metrics, choices = self._metrics, job.prepared.choices
        metrics.duration.observe(time.monotonic() - job.begun_at)
        metrics.completion_tokens.inc(sum(choice.completion_tokens for choice in choices))
        for choice in choices[:: job.prepared.terms.choices_count]:
            metrics.prompt_tokens.inc(choice.prompt_tokens)
            for tier, series in metrics.cached_tokens.items():
                series.inc(getattr(choice.cached, tier))
        return response


async def _whole(job: Answering, first: Sequence[Piece], flow: Flow) -> web.Response:
    pieces: defaultdict[int, list[Piece]] = defaultdict(list)
    batch = first
    while batch:
        for piece in batch:
            pieces[piece.index].append(piece)
        batch = await flow.pieces()
    shape = job.prepared.shape
    shown = [shape.whole(choice, pieces[choice.index]) for choice in job.prepared.choices]
    beside = shape.beside(job.prepared.choices)
    body = job.envelope.around(shape.whole_object, shown, usage=job.usage(), **beside)
    return web.Response(body=encoded(body), content_type="application/json", headers=job.headers)


class _EventStream:
    """One answer as server-sent events."""

    def __init__(self, job: Answering, write_s_max: float) -> None:
        self.response = web.StreamResponse(headers={**_HEADERS, **job.headers})
        self.begun = False
        self._job = job
        self._shape = job.prepared.shape
        self._write_s_max = write_s_max
        terms = job.prepared.terms
        self._with_usage = terms.delivery is Delivery.STREAM_WITH_USAGE
        self._speaks_tokens = terms.with_token_ids or terms.logprobs_count is not None

    async def run(self, request: web.Request, first: Sequence[Piece], flow: Flow) -> None:
        """Send everything up to and with `[DONE]`."""
        await self.response.prepare(request)
        self.begun = True
        openings = [self._shape.opening(choice) for choice in self._job.prepared.choices]
        opened = [self._chunk([opening]) for opening in openings if opening is not None]
        await self._write([*opened, *self._chunks(first)])
        while batch := await flow.pieces():
            await self._write(self._chunks(batch))
        last = [self._chunk([], usage=self._job.usage())] if self._with_usage else []
        await self._write([*last, DONE])
        await self.response.write_eof()

    async def fail(self, error: KvtierError) -> None:
        """Say what went wrong, as the last event."""
        await self._write([event(encoded({"error": error_object(error)}))])
        await self.response.write_eof()

    def _chunks(self, pieces: Iterable[Piece]) -> list[bytes]:
        return [self._chunk([self._shape.chunk(piece)]) for piece in pieces if self._says(piece)]

    def _says(self, piece: Piece) -> bool:
        """Whether a piece is worth a chunk: text may be held back for a while."""
        return bool(piece.text or piece.finish or (self._speaks_tokens and piece.token_ids))

    def _chunk(self, choices: Sequence[JsonObject], usage: JsonObject | None = None) -> bytes:
        more: dict[str, object] = {"usage": usage} if self._with_usage else {}
        around = self._job.envelope.around(self._shape.chunk_object, choices, **more)
        return event(encoded(around))

    async def _write(self, events: Sequence[bytes]) -> None:
        """Send events in one piece. ConnectionError where the client is gone or takes nothing."""
        if not events:
            return
        try:
            async with asyncio.timeout(self._write_s_max):
                await self.response.write(b"".join(events))
        except TimeoutError:
            raise ConnectionResetError("the client does not read its answer") from None


def choices_text(choices: Sequence[Choice]) -> str:
    """How the choices of an answer ended, for a log line."""
    return ",".join(choice.finish or "unfinished" for choice in choices)
