"""What the endpoint asks of the engine and what it gets back: the seam between HTTP and the engine.

What must not live here: HTTP, text (the engine speaks token ids only), scheduling, torch.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier.core.checks import require_name
from kvtier.core.eviction.retention import RetentionPlan
from kvtier.core.model_card import ModelCard
from kvtier.errors import CallerError, LimitError
from kvtier.limits import (
    LOGPROBS_COUNT_MAX,
    NAME_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    STOP_TOKENS_COUNT_MAX,
    TOKEN_ID_MAX,
)
from kvtier.paged.sampling import SamplingTerms


class FinishReason(StrEnum):
    """Why the engine ended a generation by itself."""

    STOP = "stop"
    """The last token is an end-of-sequence or stop token. It is delivered, and is not text."""
    LENGTH = "length"
    """`tokens_max` tokens were generated, or the context is full."""


class Purpose(StrEnum):
    """What a request is for."""

    GENERATE = "generate"
    PREFILL = "prefill"
    """The first half of a split request: its whole blocks are written to the store at once, and
    the last delta, which says what the store has, comes when they are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate: a prompt of token ids and the terms of its continuation.

    `prompt_tokens` is not empty. `stop_token_ids` are in addition to the model's own, which
    `ignore_eos` switches off. `scope_salt` is the `cache_salt` of the client or of the router,
    None where there is none: it goes into the root of the prefix chain. A lower `priority` is
    served first (as in vLLM). `logprobs_count` None means no log-probabilities, 0 the chosen
    token's only. Whether the prompt fits the model is the engine's to check, in `submit`.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingTerms
    tokens_max: int
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    scope_salt: str | None = None
    priority: int = 0
    retention: RetentionPlan | None = None
    logprobs_count: int | None = None
    purpose: Purpose = Purpose.GENERATE

    def __post_init__(self) -> None:
        require_name("request_id", self.request_id)
        if not self.prompt_tokens:
            raise CallerError("prompt_tokens is empty")
        if len(self.prompt_tokens) > PROMPT_TOKENS_MAX:
            raise LimitError(f"{len(self.prompt_tokens)} prompt tokens exceed {PROMPT_TOKENS_MAX}")
        if min(self.prompt_tokens) < 0 or max(self.prompt_tokens) > TOKEN_ID_MAX:
            raise CallerError(f"prompt_tokens holds an id outside 0 to {TOKEN_ID_MAX}")
        if self.tokens_max < 1:
            raise CallerError(f"tokens_max is {self.tokens_max}, must be at least 1")
        if len(self.stop_token_ids) > STOP_TOKENS_COUNT_MAX:
            raise LimitError(f"more than {STOP_TOKENS_COUNT_MAX} stop_token_ids")
        if self.scope_salt is not None and not (
            0 < len(self.scope_salt.encode()) <= NAME_BYTES_MAX
        ):
            raise CallerError(f"scope_salt is empty or longer than {NAME_BYTES_MAX} bytes")
        count = self.logprobs_count
        if count is not None and not 0 <= count <= LOGPROBS_COUNT_MAX:
            raise CallerError(f"logprobs_count is {count}, must be 0 to {LOGPROBS_COUNT_MAX}")


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """How many prompt tokens were not computed, by the tier that had their KV."""

    gpu: int = 0
    dram: int = 0
    nvme: int = 0
    redis: int = 0
    peer: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.dram + self.nvme + self.redis + self.peer


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token; with the natural logarithms of its and the likeliest tokens' probabilities where
    the request asked for them (`top`: most likely first, (token id, logprob))."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of the blocks of a prefill half."""

    tokens: int
    """From the first on, in whole blocks, that the tiers below are known to have."""
    waited_s: float
    """From the last token computed until that was known."""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step added to one generation.

    `cached` stands in the first delta and in no other. `stored` stands in the last delta of a
    prefill half whose worker has tiers below. `finish` stands in the last delta and in no
    other; every generation that was not cancelled ends in one, or in a raised KvtierError.
    """

    tokens: tuple[GeneratedToken, ...]
    finish: FinishReason | None = None
    cached: CachedTokens | None = None
    stored: Stored | None = None


class Generation(Protocol):
    """A running generation, owned by one task of the event loop."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        """Return the deltas in order; one consumer. Raises KvtierError where the engine failed."""
        ...

    def cancel(self) -> None:
        """Give it up: everything it holds is free within one step. Idempotent, never blocks."""
        ...


class Engine(Protocol):
    """What the endpoint needs of an engine. Called on one event loop; nothing here blocks."""

    @property
    def card(self) -> ModelCard:
        """Names that are served, and what identifies the model."""
        ...

    @property
    def context_tokens(self) -> int:
        """Prompt and generated tokens of one sequence together, at most."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids of a prompt lie below this."""
        ...

    def submit(self, request: GenerationRequest) -> Generation:
        """Queue `request`.

        Raises CallerError for what can never run (prompt too long for context or pool),
        OverloadedError when the queue is full, UnavailableError when draining or failed.
        """
        ...

    async def check(self) -> None:
        """Do real work (compute a token); KvtierError where it fails or takes too long."""
        ...
