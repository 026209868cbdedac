"""One row to the routers and its answer back, tried again while that may help.

A failure counts against a row only where others were answered since its last try: when nobody is
answered the fleet is out, and rows wait. What must not live here: which row goes when.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from kvtier.batch.answers import Outcome
from kvtier.batch.rows import Row
from kvtier.errors import UnavailableError
from kvtier.limits import BATCH_PAUSE_MS_MAX, BATCH_ROW_BYTES_MAX, BATCH_TRIES_MAX

_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_PAUSE_S_FIRST: Final = 0.1
_CHARS_MAX: Final = 300
_ASK_S_MAX: Final = 10.0
_HEADERS: Final = {"content-type": "application/json", "x-kvtier-explain": "1"}


@dataclass(frozen=True, slots=True)
class Terms:
    """How rows are sent."""

    urls: Sequence[str]
    """Without /v1."""
    model: str
    """For rows that name none."""
    answer_s_max: float
    outage_s_max: float


@dataclass(frozen=True, slots=True)
class _Refused:
    """A try that may be made again."""

    status: int
    """0: nobody answered."""
    told: Mapping[str, object] | None
    why: str
    wait_s: float


@dataclass(slots=True)
class Sender:
    """Sends rows, many at a time. Knows which router answered last, and when."""

    _session: aiohttp.ClientSession
    _terms: Terms
    _at: int = 0
    """Of the router that is tried first."""
    _answered: int = 0
    _answered_at: float = field(default_factory=time.monotonic)

    async def send(self, row: Row) -> Outcome:
        """What became of the row. UnavailableError where nothing was answered for too long."""
        body = json.dumps({"model": self._terms.model, **row.body}, separators=(",", ":")).encode()
        tries, seen, pause_s = 0, self._answered, _PAUSE_S_FIRST
        while True:
            told = await self._try(row, body)
            if isinstance(told, Outcome):
                self._answered += 1
                self._answered_at = time.monotonic()
                return told
            if self._answered > seen:
                tries, seen = tries + 1, self._answered
            if tries >= BATCH_TRIES_MAX:
                return _given_up(told)
            if time.monotonic() - self._answered_at > self._terms.outage_s_max:
                raise UnavailableError(
                    f"nothing was answered for {self._terms.outage_s_max:g} s, at last: {told.why}"
                )
            await asyncio.sleep(max(pause_s, told.wait_s))
            pause_s = min(2 * pause_s, BATCH_PAUSE_MS_MAX / 1000, self._terms.outage_s_max)

    async def _try(self, row: Row, body: bytes) -> Outcome | _Refused:
        at = self._at
        url = f"{self._terms.urls[at]}{row.url.value}"
        try:
            async with self._session.post(url, data=body, headers=_HEADERS) as answer:
                told = _parsed(await _whole(answer))
                status, request_id = answer.status, answer.headers.get("x-request-id", "")
                wait_s = _seconds(answer.headers.get("retry-after"))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if self._at == at:
                self._at = (at + 1) % len(self._terms.urls)
            return _Refused(0, None, f"{url}: {error!r}"[:_CHARS_MAX], 0.0)
        if status in _AGAIN or (status == 200 and told is None):
            return _Refused(status, told, f"{url}: status {status}", wait_s)
        response = {"status_code": status, "request_id": request_id, "body": told}
        return Outcome(response, None)


async def model_of(session: aiohttp.ClientSession, urls: Sequence[str], patience_s: float) -> str:
    """The first model that a router serves. UnavailableError where none tells one in time."""
    until = time.monotonic() + patience_s
    timeout, why = aiohttp.ClientTimeout(total=_ASK_S_MAX), "no router"
    while True:
        for url in urls:
            try:
                async with session.get(f"{url}/v1/models", timeout=timeout) as answer:
                    told = await answer.json(content_type=None)
                return str(told["data"][0]["id"])
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                why = repr(error)
            except (LookupError, TypeError):
                why = f"{url}/v1/models names no model"
        if time.monotonic() > until:
            raise UnavailableError(f"no router tells what it serves: {why}"[:_CHARS_MAX])
        await asyncio.sleep(_PAUSE_S_FIRST)


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > BATCH_ROW_BYTES_MAX:
            raise aiohttp.ClientPayloadError(f"answer is longer than {BATCH_ROW_BYTES_MAX} bytes")
    return b"".join(parts)


def _parsed(body: bytes) -> Mapping[str, object] | None:
    """The object in a body; None where there is none."""
    try:
        told = json.loads(body)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _seconds(text: str | None) -> float:
    """Of a Retry-After; 0 where it says none."""
    whole = int(text) if text is not None and text.isascii() and text.isdigit() else 0
    return min(whole, BATCH_PAUSE_MS_MAX / 1000)


def _given_up(last: _Refused) -> Outcome:
    response = {"status_code": last.status, "request_id": "", "body": last.told}
    error = {"code": "given_up", "message": f"{BATCH_TRIES_MAX} tries, the last: {last.why}"}
    return Outcome(response if last.status else None, error)
