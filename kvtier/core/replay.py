"""Replay of request streams against one cache of a given capacity and policy.

Rules (those of the project's workload study): request-atomic, all blocks are looked up before any
is stored; the prefix hit is the unbroken leading run of resident blocks, which is what an engine
can reuse. What must not live here: reading traces, several caches, time to first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from kvtier.core.eviction import Policy
from kvtier.core.eviction.policy import K
from kvtier.errors import CallerError


@dataclass(frozen=True, slots=True)
class Hit:
    """What one request found: blocks of the leading run, resident blocks, tokens of the run."""

    prefix_blocks: int
    resident_blocks: int
    prefix_tokens: int


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """Sums over all requests so far."""

    requests: int = 0
    blocks: int = 0
    prefix_blocks: int = 0
    resident_blocks: int = 0
    tokens: int = 0
    prefix_tokens: int = 0
    evicted_blocks: int = 0

    @property
    def prefix_hit_rate(self) -> float:
        """Share of blocks in leading resident runs; 0 before the first block."""
        return self.prefix_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of input tokens in leading resident runs; 0 before the first token."""
        return self.prefix_tokens / self.tokens if self.tokens else 0.0


class CacheReplay(Generic[K]):
    """One cache of `capacity_blocks` (None: infinite) that a policy governs.

    A request pins what it found, makes room, stores its whole chain in one call and unpins, as a
    paged pool does. Of a chain longer than the capacity only the head is stored.
    """

    __slots__ = ("_block_tokens", "_capacity_blocks", "_counts", "_policy")

    def __init__(
        self, policy: Policy[K], *, capacity_blocks: int | None, block_tokens: int
    ) -> None:
        if capacity_blocks is not None and capacity_blocks < 1:
            raise CallerError(f"capacity_blocks is {capacity_blocks}, must be at least 1")
        if block_tokens < 1:
            raise CallerError(f"block_tokens is {block_tokens}, must be at least 1")
        self._policy = policy
        self._capacity_blocks = capacity_blocks
        self._block_tokens = block_tokens
        self._counts = ReplayCounts()

    @property
    def counts(self) -> ReplayCounts:
        """The sums so far."""
        return self._counts

    def request(self, keys: Sequence[K], tokens: int, now: float) -> Hit:
        """Look up and then store the chain of a request of `tokens` input tokens. O(blocks).

        Raises CallerError where the number of keys does not fit the number of tokens.
        """
        if not len(keys) == -(-tokens // self._block_tokens):
            raise CallerError(f"{len(keys)} blocks of {self._block_tokens} do not hold {tokens}")
        resident = [key in self._policy for key in keys]
        run = resident.index(False) if False in resident else len(resident)
        hit = Hit(run, sum(resident), min(tokens, run * self._block_tokens))
        evicted = self._store(keys, resident, now)
        c = self._counts
        self._counts = ReplayCounts(
            requests=c.requests + 1,
            blocks=c.blocks + len(keys),
            prefix_blocks=c.prefix_blocks + hit.prefix_blocks,
            resident_blocks=c.resident_blocks + hit.resident_blocks,
            tokens=c.tokens + tokens,
            prefix_tokens=c.prefix_tokens + hit.prefix_tokens,
            evicted_blocks=c.evicted_blocks + evicted,
        )
        return hit

    def _store(self, keys: Sequence[K], resident: Sequence[bool], now: float) -> int:
        policy = self._policy
        evicted = 0
        if self._capacity_blocks is not None:
            keys = keys[: self._capacity_blocks]
            found = [key for key, is_here in zip(keys, resident, strict=False) if is_here]
            missing = len(set(keys)) - len(set(found))
            short = len(policy) + missing - self._capacity_blocks
            if short > 0:
                pins = [(key, policy.pin(key)) for key in found]
                victims = policy.victims(short, now)
                policy.on_removed(victims)
                for key, token in pins:
                    policy.unpin(key, token)
                evicted = len(victims)
        policy.on_stored(keys, now)
        return evicted
