"""Affinity without an index: weighted rendezvous hashing on the first prefix blocks, bounded loads.

Every worker has its own pseudo-random rank for every key, and the request goes to the best rank
whose load is under the bound (consistent hashing with bounded loads, Mirrokni et al., SODA 2018).
Rendezvous ranks in place of a ring: minimal movement is exact, weights are exact, and what
overflows from one worker spreads over all others instead of falling on the ring's neighbour.

What must not live here: any use of prefix matches or speeds (scoring.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import CallerError, UnavailableError
from kvtier.limits import HOLDERS_COUNT_MAX, NAME_BYTES_MAX
from kvtier.types import InstanceId, PrefixHash

U64Array = NDArray[np.uint64]
FloatArray = NDArray[np.float64]

_MASK: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Member:
    """One worker of the fleet, as hashing sees it."""

    seed: int
    """u64 that depends on the worker's name only: see `member_seed`."""
    weight: float = 1.0
    """Share of the load it should carry, relative to the others."""


def member_seed(instance: InstanceId, dp_rank: int) -> int:
    """The u64 by which every router ranks this worker alike. Raises CallerError on bad input."""
    name = instance.encode("utf-8", "surrogatepass")
    if not 0 < len(name) <= NAME_BYTES_MAX or dp_rank < 0:
        raise CallerError("instance must be 1 to 1024 bytes and dp_rank not negative")
    return int.from_bytes(sha256(name + b"\0" + str(dp_rank).encode()).digest()[:8], "little")


def affinity_key(prefix_hashes: U64Array, depth_blocks: int = 2) -> PrefixHash:
    """The hash by which a prompt sticks: its prefix of `depth_blocks` blocks, or all if shorter.

    A chain hash names all blocks before it, so one is enough. Raises CallerError on an empty prompt
    (fewer tokens than a block: there is nothing to be affine to, choose by load).
    """
    if len(prefix_hashes) == 0 or depth_blocks < 1:
        raise CallerError("affinity needs at least one block")
    return PrefixHash(int(prefix_hashes[min(depth_blocks, len(prefix_hashes)) - 1]))


class BoundedHash:
    """A fixed set of members; build a new one when the fleet changes (O(members))."""

    __slots__ = ("_bound", "_seeds", "_weights")

    def __init__(self, members: Sequence[Member], bound: float = 1.25) -> None:
        """`bound` >= 1 is the c of the paper: no member carries more than c times its share."""
        if not 0 < len(members) <= HOLDERS_COUNT_MAX:
            raise CallerError(f"{len(members)} members out of range")
        if not 1.0 <= bound < float("inf"):
            raise CallerError(f"bound must be >= 1 and finite, got {bound!r}")
        if any(not 0 <= m.seed <= _MASK for m in members):
            raise CallerError("seeds must be u64")
        if any(not 0.0 < m.weight < float("inf") for m in members):
            raise CallerError("weights must be positive and finite")
        self._bound = bound
        self._seeds = np.array([m.seed for m in members], dtype=np.uint64)
        self._weights = np.array([m.weight for m in members], dtype=np.float64)

    def choose(
        self, key: PrefixHash, loads: FloatArray, eligible: NDArray[np.bool_] | None = None
    ) -> int:
        """Row of the member for `key`; does not mutate. O(members), vectorised.

        `loads` are requests (or tokens, in units of one request) in flight by row. The chosen one's
        load after this request is at most `load_max` (with whole requests as loads).
        Raises UnavailableError where nobody is eligible.
        """
        if len(loads) != len(self._seeds) or not 0 <= key <= _MASK:
            raise CallerError("loads must have a row for each member and key must be a u64")
        mask = np.ones(len(loads), dtype=np.bool_) if eligible is None else eligible
        weight = float(self._weights[mask].sum())
        if weight == 0.0:
            raise UnavailableError("no worker is eligible")
        total = float(loads[mask].sum()) + 1.0
        ranks = self.ranks(key)
        ranks[~mask] = np.inf
        room = loads + 1.0 <= np.ceil(self._bound * total * self._weights / weight)
        ranks[~room] = np.inf
        if not np.isfinite(ranks).any():  # Only fractional loads can leave nobody under the bound
            ranks = np.where(mask, loads / self._weights, np.inf)
        return int(ranks.argmin())

    def load_max(self, total: float, row: int, eligible: NDArray[np.bool_] | None = None) -> int:
        """The bound for `row` when `total` requests are in flight, this one included; pure."""
        weights = self._weights if eligible is None else self._weights[eligible]
        return ceil(self._bound * total * float(self._weights[row]) / float(weights.sum()))

    def ranks(self, key: int) -> FloatArray:
        """Exponential variates with rate `weight` from (key, seed), by row: the least one wins.
        Alike in every process. A new array."""
        mixed = _mix(self._seeds ^ np.uint64(_mix_one(key)))
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
        ranks: FloatArray = -np.log(uniform) / self._weights
        return ranks


def _mix(values: U64Array) -> U64Array:
    """splitmix64's finaliser, elementwise (Steele et al., OOPSLA 2014)."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _mix_one(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
