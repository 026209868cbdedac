"""The JSON of answers: completions and chat completions, whole and in chunks, usage and models.

What must not live here: what is in them (choices.py), errors (kvtier.openai).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Protocol

from kvtier.core.model_card import ModelCard
from kvtier_services.worker.http.choices import Choice, Piece, PlacedToken
from kvtier_services.worker.requests import CachedTokens

JsonObject = Mapping[str, object]
_LOGPROB_LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON has not; as in OpenAI's answers."""

TokenText = Callable[[int], str]


def encoded(value: object) -> bytes:
    """Compact JSON. A number that is not finite would be a bug of ours."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        "utf-8"
    )


class Shape(Protocol):
    """How one kind of request is answered, choice by choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, choice: Choice) -> JsonObject | None:
        """The first chunk of a choice, None where it says nothing."""
        ...

    def chunk(self, piece: Piece) -> JsonObject:
        """What a chunk says of a choice. The piece's text may be empty."""
        ...

    def whole(self, choice: Choice, pieces: Sequence[Piece]) -> JsonObject:
        """What a whole answer says of a choice."""
        ...

    def beside(self, choices: Sequence[Choice]) -> JsonObject:
        """What a whole answer says beside its choices."""
        ...


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a request wants to see of its tokens."""

    logprobs_count: int | None
    with_token_ids: bool
    token_text: TokenText


class CompletionShape:
    """`/v1/completions`."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering

    def opening(self, choice: Choice) -> JsonObject | None:
        return self.chunk(Piece(choice.index, choice.echo)) if choice.echo else None

    def chunk(self, piece: Piece) -> JsonObject:
        return self._shown(piece.index, piece.text, [piece], piece.finish)

    def whole(self, choice: Choice, pieces: Sequence[Piece]) -> JsonObject:
        text = choice.echo + "".join(piece.text for piece in pieces)
        shown = self._shown(choice.index, text, pieces, choice.finish)
        if self._rendering.with_token_ids:
            return {**shown, "prompt_token_ids": choice.prompt_token_ids}
        return shown

    def beside(self, choices: Sequence[Choice]) -> JsonObject:
        return {}

    def _shown(
        self, index: int, text: str, pieces: Sequence[Piece], finish: str | None
    ) -> JsonObject:
        shown: dict[str, object] = {"index": index, "text": text, "logprobs": None}
        tokens = [token for piece in pieces for token in piece.tokens]
        if self._rendering.logprobs_count is not None and (tokens or finish is not None):
            shown["logprobs"] = self._logprobs(tokens)
        shown["finish_reason"] = finish
        if self._rendering.with_token_ids:
            shown["token_ids"] = [i for piece in pieces for i in piece.token_ids]
        return shown

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> JsonObject:
        text = self._rendering.token_text
        tops: list[JsonObject] | None = None
        if self._rendering.logprobs_count:
            tops = [self._top(placed) for placed in tokens]
        return {
            "tokens": [text(placed.token.token_id) for placed in tokens],
            "token_logprobs": [_finite(placed.token.logprob) for placed in tokens],
            "top_logprobs": tops,
            "text_offset": [placed.offset for placed in tokens],
        }

    def _top(self, placed: PlacedToken) -> JsonObject:
        """By text: of several tokens with one text (parts of characters) the likeliest counts."""
        token, text = placed.token, self._rendering.token_text
        top = {text(i): _finite(value) for i, value in reversed(token.top)}
        return top | {text(token.token_id): _finite(token.logprob)}


class ChatShape:
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering

    def opening(self, choice: Choice) -> JsonObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: Piece) -> JsonObject:
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return self._shown(piece.index, "delta", delta, [piece], piece.finish)

    def whole(self, choice: Choice, pieces: Sequence[Piece]) -> JsonObject:
        text = "".join(piece.text for piece in pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._shown(choice.index, "message", message, pieces, choice.finish)

    def beside(self, choices: Sequence[Choice]) -> JsonObject:
        """As vLLM: all choices of a chat have one prompt."""
        if self._rendering.with_token_ids:
            return {"prompt_token_ids": choices[0].prompt_token_ids}
        return {}

    def _shown(
        self, index: int, name: str, said: JsonObject, pieces: Sequence[Piece], finish: str | None
    ) -> JsonObject:
        shown: dict[str, object] = {"index": index, name: said, "logprobs": None}
        if self._rendering.logprobs_count is not None:
            tokens = [token for piece in pieces for token in piece.tokens]
            shown["logprobs"] = {
                "content": [self._logprob(placed) for placed in tokens],
                "refusal": None,
            }
        shown["finish_reason"] = finish
        if self._rendering.with_token_ids:
            shown["token_ids"] = [i for piece in pieces for i in piece.token_ids]
        return shown

    def _logprob(self, placed: PlacedToken) -> JsonObject:
        token = placed.token
        tops = [self._entry(i, value) for i, value in token.top]
        return {**self._entry(token.token_id, token.logprob), "top_logprobs": tops}

    def _entry(self, token_id: int, logprob: float | None) -> JsonObject:
        text = self._rendering.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float | None) -> float:
    if logprob is None or not math.isfinite(logprob):
        return _LOGPROB_LEAST
    return logprob


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is the same in every chunk of an answer."""

    id: str
    created: int
    model: str
    fingerprint: str

    def around(self, kind: str, choices: Sequence[JsonObject], **more: object) -> JsonObject:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


def usage_of(
    choices: Sequence[Choice], choices_count: int, *, explained: bool, elsewhere_tokens: int = 0
) -> JsonObject:
    """Count tokens: prompts once each, however many choices (`choices_count`) each has.

    What another worker computed for this request (`elsewhere_tokens`) was not cached; then
    `reused_tokens` says how many this one did not compute. With
    `explained`, an object `kvtier` says from which tier cached tokens came.
    """
    firsts = choices[::choices_count]
    prompt_tokens = sum(choice.prompt_tokens for choice in firsts)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    reused = sum(choice.cached.total for choice in firsts)
    details = {"cached_tokens": max(0, reused - elsewhere_tokens)}
    if elsewhere_tokens:
        details["reused_tokens"] = reused
    usage: dict[str, object] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
    }
    if explained:
        usage["kvtier"] = {
            "cached_tokens": {
                tier.name: sum(getattr(choice.cached, tier.name) for choice in firsts)
                for tier in fields(CachedTokens)
            }
        }
    return usage


def fingerprint_of(card: ModelCard) -> str:
    """A short name of what serves: equal cards, equal fingerprints."""
    return f"kvtier-{card.digest().hex()[:12]}"


def model_object(card: ModelCard, name: str, context_tokens: int, created: int) -> JsonObject:
    """One entry of `/v1/models`; `root` and `max_model_len` as in vLLM."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvtier",
        "root": card.model_id,
        "parent": None,
        "max_model_len": context_tokens,
    }
