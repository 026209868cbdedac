"""How KV lies in a paged pool: groups of layers, blocks, bytes.

A block is one contiguous span, block-major. Inside it, layer slices in the group's layer order; a
slice is K then V, each `[block_tokens, kv_heads, head_dim]`, C order, elements of `dtype`:

    block = [layers of the group, 2 (K, V), block_tokens, kv_heads, head_dim]

So a block is one payload for a tier or a peer, and a layer slice is a contiguous part of it that
can arrive before the rest. What must not live here: torch, memory, which block belongs to whom.
"""

from dataclasses import dataclass
from typing import Final

from kvtier.core.checks import require_integer
from kvtier.core.identity import KvDtype, ModelSpec, Shard
from kvtier.errors import CallerError
from kvtier.limits import (
    BLOCK_TOKENS_MAX,
    HEAD_DIM_MAX,
    HEADS_COUNT_MAX,
    LAYERS_COUNT_MAX,
    PROMPT_TOKENS_MAX,
)

LAYOUT: Final = "kvtier.block-major.v1:layer,kv,token,head,dim"
"""Name of the order above; part of every namespace."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose blocks are kept together, and how far back they look.

    `window` is in tokens: a token at position t attends to positions t - window + 1 .. t; None is
    full attention. `layers` are the model's layer numbers, ascending.
    """

    layers: tuple[int, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise CallerError(f"layers {self.layers!r:.80} are not ascending, or none")
        for layer in self.layers:
            require_integer("layer", layer, 0, LAYERS_COUNT_MAX - 1)
        if self.window is not None:
            require_integer("window", self.window, 1, PROMPT_TOKENS_MAX)


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Shapes and bytes of a model's KV. Groups cover all layers once; full attention first."""

    layers_count: int
    kv_heads_count: int
    head_dim: int
    dtype: KvDtype
    block_tokens: int
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        require_integer("layers_count", self.layers_count, 1, LAYERS_COUNT_MAX)
        require_integer("kv_heads_count", self.kv_heads_count, 1, HEADS_COUNT_MAX)
        require_integer("head_dim", self.head_dim, 1, HEAD_DIM_MAX)
        require_integer("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        if not isinstance(self.dtype, KvDtype):
            raise CallerError(f"dtype {self.dtype!r} is not a KvDtype")
        covered = sorted(layer for group in self.groups for layer in group.layers)
        if covered != list(range(self.layers_count)):
            raise CallerError(f"groups do not cover layers 0 .. {self.layers_count - 1} once each")
        windows = [group.window for group in self.groups]
        if None in windows[1:]:
            raise CallerError("a group with full attention is not the first, or there are two")
        if len(set(windows)) != len(windows):
            raise CallerError(f"two groups have one window: {windows}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return self.layers_count * self.layer_token_bytes

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads_count * self.head_dim * self.dtype.element_bytes

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer's K and V in a block."""
        return self.block_tokens * self.layer_token_bytes

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group."""
        return len(self.groups[group].layers) * self.slice_bytes

    def place(self, layer: int) -> tuple[int, int]:
        """(group, position of the layer's slice inside the group's block) of a model layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise CallerError(f"layer {layer} is outside 0 .. {self.layers_count - 1}")

    def spec(self, group: int, model_id: str, revision: str, rope_digest: bytes) -> ModelSpec:
        """The namespace of a group's blocks: all that makes their bytes interchangeable.

        A model with one group has its plain layout; the groups of another are told apart by which
        layers they hold, since their blocks share prefix keys.
        """
        layers = self.groups[group].layers
        layout = LAYOUT
        if len(self.groups) > 1:
            layout = f"{LAYOUT}/group={group}of{len(self.groups)},layers={_ranges(layers)}"
        return ModelSpec(
            model_id=model_id,
            revision=revision,
            kv_dtype=self.dtype,
            layers=len(layers),
            kv_heads=self.kv_heads_count,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            layout=layout,
            rope_digest=rope_digest,
            shard=Shard(0, len(layers), 0, self.kv_heads_count),
        )


def one_group(
    layers_count: int,
    kv_heads_count: int,
    head_dim: int,
    dtype: KvDtype,
    block_tokens: int,
) -> KvGeometry:
    """The geometry of a model whose layers all have full attention."""
    group = LayerGroup(tuple(range(layers_count)))
    return KvGeometry(layers_count, kv_heads_count, head_dim, dtype, block_tokens, (group,))


def window_start(tokens_count: int, window: int | None, block_tokens: int) -> int:
    """First block that a query at position `tokens_count` or later can still read. Pure.

    A prefix hit of `tokens_count` tokens needs the blocks from here on, nothing before.
    """
    if window is None or tokens_count < window:
        return 0
    return (tokens_count - window + 1) // block_tokens


def _ranges(layers: tuple[int, ...]) -> str:
    """`0-2.5` of (0, 1, 2, 5): short for contiguous and for alternating layers up to the limit."""
    parts: list[str] = []
    start = previous = layers[0]
    for layer in (*layers[1:], -1):
        if layer == previous + 1:
            previous = layer
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = layer
    return ".".join(parts)
