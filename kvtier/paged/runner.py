"""What a worker asks of a model: run one step over slices of several requests.

What must not live here: a model (kvtier.engines, kvtier.paged.fake), sampling, scheduling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from kvtier.paged.geometry import KvGeometry
from kvtier.paged.pool import KvPool


class Logits(Enum):
    """Whether a slice's last token is asked for its logits."""

    NONE = "none"
    """A prefill chunk that is not the last."""
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Slice:
    """One request's part of a step: `tokens` at positions `start`, `start + 1`, ...

    `tables[g]` holds the ids of the request's blocks in group g from position 0 on, at least as
    many as the slice reaches. Entries that a sliding window has left may be any value; only ids
    that the tokens can attend to are read. The step reads the lists and keeps none.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    logits: Logits = Logits.LAST


BeforeLayer = Callable[[int], None]
"""Called with a model layer's number before KV of that layer is read: it may block until the bytes
of that layer have arrived. Called for each layer once a step, ascending."""


class ModelRunner(Protocol):
    """A model that keeps its KV in a pool. One thread calls it at a time."""

    @property
    def geometry(self) -> KvGeometry: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Positions that the model can take: prompt and generated tokens together."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def model_id(self) -> str: ...

    @property
    def revision(self) -> str:
        """Digest of the weights (and of whatever else decides the KV) as text."""
        ...

    @property
    def rope_digest(self) -> bytes:
        """32 bytes over rope and its scaling."""
        ...

    @property
    def device(self) -> torch.device: ...

    def step(
        self, pool: KvPool, slices: Sequence[Slice], before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        """Write the KV of the slices' tokens into the pool and return the logits asked for.

        float32 `[wanted, vocab_size]` on the runner's device, one row for each slice with
        `Logits.LAST`, in the order of the slices. Blocks: until the step is done on a CPU; on a
        GPU work may still be queued on the current stream. Raises CallerError for slices that
        reach beyond their tables or the context, before anything is written.
        """
        ...
