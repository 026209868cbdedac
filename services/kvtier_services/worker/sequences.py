"""One request as the engine serves it: its tokens, what of them is computed, and where it stands.

What must not live here: decisions (`scheduler`), torch, clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from kvtier.core.eviction import PRIORITY_DEFAULT, Retention
from kvtier.core.frame import FrameName, KeyKind, frame_names
from kvtier.core.keys import KEY_BYTES, prefix_keys
from kvtier.types import Fingerprint, PrefixKey, Source
from kvtier_services.worker.l2.port import LoadRun
from kvtier_services.worker.requests import CachedTokens, GenerationRequest, Purpose


class Phase(Enum):
    """Where a request stands. Only RUNNING ones take part in steps."""

    WAITING = auto()
    """Holds nothing."""
    LOADING = auto()
    """Holds blocks that are being written from below."""
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Ahead:
    """A load that begins beyond what a request has computed: both go on at once."""

    first_block: int
    """Where the computing stops until the load is over."""
    arrived_blocks: int | None
    """From the first on; None while it is under way."""
    runs: tuple[LoadRun, ...]


class KeyChain:
    """Prefix keys of the full blocks of a growing token list. O(1) a token."""

    __slots__ = ("_block_tokens", "_root", "keys")

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self.keys: list[PrefixKey] = []
        """Read it, do not write."""

    def extend(self, tokens: list[int]) -> None:
        """Take in the blocks that became full; `tokens` are all tokens so far. Mutates."""
        begun = len(self.keys) * self._block_tokens
        if len(tokens) - begun < self._block_tokens:
            return
        root = self.keys[-1] if self.keys else self._root
        fresh = np.asarray(tokens[begun:], np.int64)
        span = prefix_keys(root, fresh, self._block_tokens).keys.tobytes()
        self.keys += [PrefixKey(span[at : at + KEY_BYTES]) for at in range(0, len(span), KEY_BYTES)]

    def names(self, start: int, stop: int, namespace: Fingerprint) -> tuple[FrameName, ...]:
        """What blocks start .. stop - 1 are called in the tiers below."""
        span = b"".join(self.keys[start:stop])
        return tuple(frame_names(KeyKind.PREFIX_KEY, span, KEY_BYTES, namespace))


@dataclass(slots=True)
class Request:
    """State of one request. The scheduler and the engine core mutate it, on one thread."""

    number: int
    """Order of arrival; also the name of the request in the engine."""
    terms: GenerationRequest
    chain: KeyChain
    tokens: list[int]
    """Prompt and generated."""
    holder: str = ""
    """Name under which the block manager knows it now."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Leading tokens whose KV is in its blocks."""
    sealed_blocks: int = 0
    """Leading blocks that the prefix cache knows."""
    below_from: int = 0
    """First block that the lookup asked for."""
    below: tuple[tuple[Source | None, ...], ...] = ()
    """What the lookup found of each layer group, from block `below_from` on."""
    ahead: Ahead | None = None
    cached: dict[Source, int] = field(default_factory=dict)
    """Prompt tokens that were not computed, by where they came from."""
    worth: Sequence[Retention] = ()
    """How dearly its blocks are kept, one each from the first on; none: as any other's."""
    awaits_lookup: bool = False
    """Not admitted until it is known what the tiers below have."""
    is_audited: bool = False
    """Computed whole, from its first token on, whatever is cached."""
    was_admitted: bool = False
    cached_told: bool = False
    computed_tokens: int = 0
    """Tokens that steps computed for it, again after preemptions."""
    preemptions: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is more important: priority as the client has it, then age."""
        return self.terms.priority, self.number

    @property
    def is_prefill(self) -> bool:
        """Whether it is the first half of a split request."""
        return self.terms.purpose is Purpose.PREFILL

    @property
    def is_loading(self) -> bool:
        """Whether blocks that it holds are being written from below."""
        if self.phase is Phase.LOADING:
            return True
        return self.ahead is not None and self.ahead.arrived_blocks is None

    @property
    def prompt_count(self) -> int:
        return len(self.terms.prompt_tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_count :]

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is not there yet: one while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        return self.uncomputed == 1 and len(self.tokens) > self.prompt_count

    def priority_of(self, block: int, now: float) -> int:
        """How dearly a block is kept now, 0 to 100."""
        if not self.worth:
            return PRIORITY_DEFAULT
        worth = self.worth[min(block, len(self.worth) - 1)]
        is_over = worth.expires_at is not None and now >= worth.expires_at
        return PRIORITY_DEFAULT if is_over else worth.priority

    def append(self, token: int) -> None:
        """Take a generated token; mutates."""
        self.tokens.append(token)
        self.chain.extend(self.tokens)

    def cached_tokens(self) -> CachedTokens:
        """`cached` as the endpoint has it."""
        return CachedTokens(
            gpu=self.cached.get(Source.GPU, 0),
            dram=self.cached.get(Source.DRAM, 0),
            nvme=self.cached.get(Source.NVME, 0),
            redis=self.cached.get(Source.REDIS, 0),
            peer=self.cached.get(Source.PEER, 0),
        )
