"""Prompts, models and tenants of fault tests, all of them computed from small numbers.

A test and a publisher process that share a `Corpus` agree on every block without talking. What must
not live here: what anybody holds.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.fleet import HolderInfo
from kvtier.core.identity import chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import ModelCard
from kvtier.types import Fingerprint, HolderKind, InstanceId, NodeId

U64 = npt.NDArray[np.uint64]

SERVED_NAME: Final = "chat"
_TOKENS_COUNT: Final = 50_000


def card(block_tokens: int) -> ModelCard:
    """One served name, one pool per block size."""
    return ModelCard((SERVED_NAME,), "org/model", "rev-1", b"t" * 32, None, block_tokens)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Chains of one tenant on one model."""

    block_tokens: int = 16
    salt: str = ""
    seed: int = 0

    def tokens(self, chain: int, blocks: int) -> npt.NDArray[np.uint32]:
        """The first tokens of a prompt; a longer one continues a shorter one."""
        rng = np.random.default_rng((self.seed, chain))
        return rng.integers(0, _TOKENS_COUNT, blocks * self.block_tokens, dtype=np.uint32)

    def hashes(self, chain: int, blocks: int) -> U64:
        """The prefix hashes of a prompt's blocks, as a router computes them."""
        root = chain_root(card(self.block_tokens).pool, self.salt or None, None)
        return prefix_hashes(root, self.tokens(chain, blocks), self.block_tokens)


def namespace(block_tokens: int, shard: int = 0) -> Fingerprint:
    return Fingerprint(bytes([block_tokens, shard]) * 16)


def worker(name: str, block_tokens: int = 16, shard: int = 0, shards_count: int = 1) -> HolderInfo:
    """A worker without a store, or one shard of it."""
    return HolderInfo(
        kind=HolderKind.WORKER,
        instance=InstanceId(name),
        node=NodeId(f"node-of-{name}"),
        namespace=namespace(block_tokens, shard),
        card=card(block_tokens),
        shard_index=shard,
        shards_count=shards_count,
        block_bytes=1000,
    )
