"""What a foreign engine says of its KV cache, in one vocabulary for vLLM, SGLang and TensorRT-LLM.

Values only: decoders (`kvtier.engines.events`) make them of bytes, `engine_holdings` applies them.
What must not live here: wire formats, the meaning of an event for an index.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

U32Array: TypeAlias = npt.NDArray[np.uint32]

EngineHash = NewType("EngineHash", bytes)
"""An engine's name of a block: 8 bytes big-endian where it publishes an integer (signed or not),
else the digest as it came. Two engines may give one block two names, and two blocks one."""

GPU: Final = "GPU"
"""The medium of an event that names none."""


class Unindexed(StrEnum):
    """Why stored blocks are not told to an index; labels of a metric. None of them is an error."""

    NO_TOKENS = "no_tokens"
    """A placeholder, as offloading connectors publish it."""
    LENGTHS = "lengths"
    """Hashes and tokens do not correspond one to one: blocks were skipped (hybrid models)."""
    ATTENTION = "attention"
    """Of a cache group that does not hold whole prefixes: sliding window, Mamba, ..."""
    BLOCK_TOKENS = "block_tokens"
    """Of another size than the model card says, for example the short end of a prompt."""
    SALT_UNSEEN = "salt_unseen"
    """This engine's version does not publish salts, so whose block it is cannot be told."""
    ADAPTER_UNSEEN = "adapter_unseen"
    """Of an adapter that is named by a number only, or perhaps of one."""
    ADAPTER_UNKNOWN = "adapter_unknown"
    """Of an adapter without a digest in the model card."""
    EXTRAS = "extras"
    """Of an input (an image, prompt embeddings) whose content cannot be identified."""
    DEPENDENT = "dependent"
    """Behind a block that is not indexed for who it is."""
    UNRESOLVED = "unresolved"
    """Behind a block that was never seen; indexed as soon as that is."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which cache of an engine: hashes are equal across groups, and owners of lower tiers."""

    medium: str = GPU
    ownership: str = ""
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockExtras:
    """What else than tokens shapes one block: multimodal items (identifier, offset of the item from
    the block's start) and the digest of prompt embeddings."""

    items: tuple[tuple[str, int], ...] = ()
    embeds: bytes | None = None


NO_EXTRAS: Final[Mapping[int, BlockExtras]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """Consecutive blocks of one chain appeared; the first one lies behind `parent` (None: first).

    `tokens` are those of all blocks, empty where `unindexed` says why they are of no use. `salt` is
    the request's cache_salt where `parent` is None; behind a parent it is in the parent's name.
    `extras` is by position in `hashes`.
    """

    place: Place
    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    tokens: U32Array
    block_tokens: int
    adapter: str | None = None
    salt: str | None = None
    extras: Mapping[int, BlockExtras] = field(default_factory=lambda: NO_EXTRAS)
    unindexed: Unindexed | None = None


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each block left; `place` None: all copies, wherever they were."""

    place: Place | None
    hashes: tuple[EngineHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksMoved:
    """All copies of blocks went from one place of the engine to another."""

    source: Place
    target: Place
    hashes: tuple[EngineHash, ...]


@dataclass(frozen=True, slots=True)
class AllCleared:
    """The engine emptied its GPU pool."""


EngineEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksMoved | AllCleared


class EventFault(StrEnum):
    """Why something that an engine sent could not be read; labels of a metric.

    Whatever it was may have been lost: after one of these nobody knows what the engine holds.
    """

    MALFORMED = "malformed"
    """The payload is not what it should be encoded in."""
    SHAPE = "shape"
    """The payload is well encoded, but no batch; or an entry of it is no event."""
    TOO_LARGE = "too_large"
    UNKNOWN_TYPE = "unknown_type"
    FIELD = "field"
    """A field of an event is missing, or of a wrong type or value."""


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """What one message said: its events in order, less those that could not be read."""

    events: tuple[EngineEvent, ...] = ()
    faults: Mapping[EventFault, int] = field(default_factory=dict)
    dp_rank: int | None = None
