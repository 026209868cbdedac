"""The first half of a split request: a prompt is computed, its blocks are written, nothing is said.

`x-kvtier-prefill: 1` makes one of any generation request: the answer, in one piece, comes when the
store has the prompt's whole blocks, or is known not to take them, and says how many there are.
`x-kvtier-prefilled: N` goes with the second half: so many prompt tokens were computed for this very
request by somebody else, and do not count as cached. Routers and operators use these; a router
passes no client's header on. What must not live here: what is written when (`l2`).
"""

import asyncio
from dataclasses import replace
from typing import Final

from aiohttp import web

from kvtier.errors import CallerError, DeadlineError
from kvtier_services.worker.http.metrics import EndpointMetrics
from kvtier_services.worker.http.preparing import Prepared
from kvtier_services.worker.http.settings import EndpointSettings
from kvtier_services.worker.http.shapes import Envelope, encoded, usage_of
from kvtier_services.worker.requests import Engine, GenerationRequest, Purpose, Stored

PREFILL_HEADER: Final = "x-kvtier-prefill"
PREFILLED_HEADER: Final = "x-kvtier-prefilled"
_DIGITS_MAX: Final = 9


class Prefiller:
    """Answers prefill halves."""

    def __init__(
        self, engine: Engine, settings: EndpointSettings, metrics: EndpointMetrics
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._metrics = metrics

    async def answer(self, prepared: Prepared, envelope: Envelope) -> web.Response:
        """Compute the prompt and answer; what runs is given up when the caller goes.

        CallerError for a request with several sequences: they are not split.
        """
        if len(prepared.requests) != 1:
            raise CallerError(f"{PREFILL_HEADER}: only of one prompt with one choice")
        choice = prepared.choices[0]
        stored = Stored(0, 0.0)
        generation = self._engine.submit(prefill_of(prepared.requests[0]))
        try:
            async with asyncio.timeout(self._settings.generation_ms_max / 1e3):
                async for delta in generation:
                    choice.cached = delta.cached or choice.cached
                    stored = delta.stored or stored
        except TimeoutError:
            raise DeadlineError("the prompt took too long") from None
        finally:
            generation.cancel()
        self._metrics.prompt_tokens.inc(choice.prompt_tokens)
        for tier, series in self._metrics.cached_tokens.items():
            series.inc(getattr(choice.cached, tier))
        told = {"stored_tokens": stored.tokens, "store_wait_s": round(stored.waited_s, 6)}
        usage = usage_of([choice], 1, explained=True)
        body = envelope.around("kvtier.prefill", [], usage=usage, kvtier=told)
        return web.Response(body=encoded(body), content_type="application/json")


def prefill_of(request: GenerationRequest) -> GenerationRequest:
    """The prefill half of a request. Pure."""
    return replace(request, tokens_max=1, logprobs_count=None, purpose=Purpose.PREFILL)


def prefilled_tokens(text: str | None) -> int:
    """What the header says; 0 where it says nothing. CallerError for what is no number."""
    if text is None:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise CallerError(f"{PREFILLED_HEADER} is no number of tokens")
    return int(text)
