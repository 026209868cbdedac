"""An OpenAI client of a few lines: one streamed chat at a time, and what it cost.

What must not live here: what is asked, what is expected.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier.errors import UnavailableError
from kvtier.local.demo.chats import Message
from kvtier.sections import parse_address

_ANSWER_S: Final = 300.0
_LINE_BYTES_MAX: Final = 1 << 20
_TIERS: Final = ("gpu", "dram", "nvme", "redis", "peer")


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
    reused: Mapping[str, int]
    """Prompt tokens that were not computed, by the tier that had their KV; gpu is the worker's own
    pool, wherever that is."""
    worker: str
    """Who answered, as the router says."""


Asking = Callable[[str, Ask], Answer]
"""Sends a request to the router at host:port, as `ask` does."""


def ask(address: str, request: Ask) -> Answer:
    """Send a chat to the router at host:port and read its stream. Blocks.

    UnavailableError for anything but a whole answer.
    """
    place = parse_address(address)
    connection = http.client.HTTPConnection(place.host, place.port, timeout=_ANSWER_S)
    try:
        sent_at = time.monotonic()
        headers = {"content-type": "application/json", "x-kvtier-explain": "1"}
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
        by_tier = self._usage["kvtier"]["cached_tokens"]
        return Answer(
            text="".join(self._text),
            tokens=tuple(self._tokens),
            ttft_s=self._ttft_s or 0.0,
            prompt_tokens=int(self._usage["prompt_tokens"]),
            reused={tier: int(by_tier[tier]) for tier in _TIERS},
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
