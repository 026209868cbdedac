"""Ids, keys and enums that every floor shares. No behaviour lives here."""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Final, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

BytesLike: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""Memory that native code reads, or writes, in place; wrap any other buffer in a memoryview."""

Integers: TypeAlias = BytesLike | Sequence[int]
"""A one-dimensional C-contiguous array of 4- or 8-byte integers (read in place, may be read-only),
or a list or tuple of ints."""

PrefixKey = NewType("PrefixKey", bytes)
"""32-byte chain hash: names a block by all tokens up to its end and what else shapes its KV."""

PrefixHash = NewType("PrefixHash", int)
"""First 8 bytes of a prefix key read as little-endian u64: what events, index and router use."""

Fingerprint = NewType("Fingerprint", bytes)
"""32-byte digest of a namespace: equal fingerprints mean interchangeable bytes."""

TenantId = NewType("TenantId", str)
ScopeId = NewType("ScopeId", str)
NodeId = NewType("NodeId", str)
InstanceId = NewType("InstanceId", str)

HolderId = NewType("HolderId", int)
"""Small dense integer (0 .. limits.HOLDERS_COUNT_MAX - 1) that an index gives to a holder."""

Epoch = NewType("Epoch", int)
"""Random non-zero u64 that a publisher draws when it starts."""

Seq = NewType("Seq", int)
"""u64 batch number within an epoch; the first batch is 1."""


class Tier(IntEnum):
    """Where a block can be had; the numbers travel."""

    GPU = 0
    DRAM = 1
    NVME = 2
    REDIS = 3
    PEER = 4
    """The stores of other nodes: a store reads them as a tier, and nobody holds anything in it."""


HOLDER_TIERS: Final = (Tier.GPU, Tier.DRAM, Tier.NVME, Tier.REDIS)
"""Where a holder keeps blocks, nearest first: the tiers of events, digests and the index."""


class Source(IntEnum):
    """From where a worker could get a block, cheapest first: the tiers of a match result."""

    GPU = 0
    """Its own L1."""
    PREDICTED = 1
    """Its own L1, once a request that was just routed to it has been prefilled."""
    DRAM = 2
    """The store of its node."""
    NVME = 3
    """The store of its node."""
    PEER = 4
    """The store of another node."""
    REDIS = 5
    """A shared Redis."""


class HolderKind(IntEnum):
    """What a holder is; decides whose match it counts for."""

    WORKER = 0
    STORE = 1
    SHARED = 2


class Role(StrEnum):
    """Which half of a request a worker runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Trust(StrEnum):
    """Whether what the index says of a holder is known to equal what the holder has."""

    EXACT = "exact"
    DEGRADED = "degraded"
