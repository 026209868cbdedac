"""An OpenAI client of a few lines: one streamed chat at a time, and what it cost.

What must not live here: what is asked, what is expected.
"""

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import UnavailableError
from kvtier.local.demo.chats import Message
from kvtier.local.probes import http_answer
from kvtier.sections import parse_address

_ANSWER_S: Final = 300.0
_LINE_BYTES_MAX: Final = 1 << 20
_SAMPLE: Final = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    model: str
    messages: Sequence[Message]
    tokens_max: int
    salt: str | None = None
    """Blocks are shared only among requests of one salt."""

    def body(self) -> bytes:
        fields: dict[str, object] = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.tokens_max,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
        }
        if self.salt is not None:
            fields["cache_salt"] = self.salt
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    piece: tuple[int, ...]
    """Its bytes."""
    gap: float
    """How much likelier it was than the next best, as a difference of logits; 0 where untold."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    text: str
    tokens: tuple[Token, ...]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    worker: str
    """Who answered, as the router says."""


def ask(address: str, request: Ask) -> Answer:
    """Send a chat to the router at host:port and read its stream. Blocks.

    UnavailableError for anything but a whole answer.
    """
    place = parse_address(address)
    connection = http.client.HTTPConnection(place.host, place.port, timeout=_ANSWER_S)
    try:
        sent_at = time.monotonic()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", request.body(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            told = answer.read(_LINE_BYTES_MAX).decode("utf-8", "replace")
            raise UnavailableError(f"the router answers {answer.status}: {told[:300]}")
        worker = answer.headers.get("x-kvtier-worker", "")
        return _Reading(sent_at, worker).read(_events(answer))
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise UnavailableError(f"no whole answer from {address}: {error!r}") from error
    finally:
        connection.close()


def samples(address: str, name: str) -> dict[str, float]:
    """The samples of one metric on a page, by their labels as they stand; empty where untold."""
    _, page = http_answer(address, "/metrics", timeout_s=10.0)
    found = {}
    for line in page.decode("utf-8", "replace").splitlines():
        matched = _SAMPLE.fullmatch(line)
        if matched is not None and matched["name"] == name:
            with contextlib.suppress(ValueError):
                found[matched["labels"] or ""] = float(matched["value"])
    return found


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := answer.readline(_LINE_BYTES_MAX):
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            answer.read(_LINE_BYTES_MAX)  # whoever leaves before the end looks like one who gave up
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise UnavailableError(f"the stream ends with {event['error']}")
        yield event
    raise UnavailableError("the stream broke off")


class _Reading:
    """Puts one answer together."""

    def __init__(self, sent_at: float, worker: str) -> None:
        self._sent_at = sent_at
        self._worker = worker
        self._ttft_s: float | None = None
        self._text: list[str] = []
        self._tokens: list[Token] = []
        self._usage: dict[str, Any] = {}

    def read(self, events: Iterator[dict[str, Any]]) -> Answer:
        for event in events:
            self._usage = event.get("usage") or self._usage
            for choice in event["choices"]:
                self._add(choice)
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(self._text),
            tokens=tuple(self._tokens),
            ttft_s=self._ttft_s or 0.0,
            prompt_tokens=int(self._usage["prompt_tokens"]),
            cached_tokens=int(details.get("cached_tokens", 0)),
            worker=self._worker,
        )

    def _add(self, choice: dict[str, Any]) -> None:
        listed = (choice.get("logprobs") or {}).get("content") or []
        piece = choice["delta"].get("content")
        if self._ttft_s is None and (piece or listed):
            self._ttft_s = time.monotonic() - self._sent_at
        self._text.append(piece or "")
        self._tokens += [_token(entry) for entry in listed]


def _token(entry: dict[str, Any]) -> Token:
    best = [float(other["logprob"]) for other in entry.get("top_logprobs", [])]
    gap = best[0] - best[1] if len(best) > 1 else 0.0
    return Token(tuple(entry.get("bytes") or entry["token"].encode()), gap)
