"""Attention over a paged pool: one step's slices write their KV, then each attends to its own.

A step's tokens stand one behind another in one row, however many requests they belong to, so the
model's other layers see one batch of tokens. Per layer: the new keys and values go to their blocks;
the blocks that are read are gathered once into a scratch (a block-major pool has no contiguous
layer to view, but one layer of a step fits the CPU's caches); each slice attends to its part of the
scratch, without padding to the longest neighbour, so what a slice gets does not depend on them. A
slice that starts a sequence reads nothing back. Masks are built once a step.

What must not live here: models, block tables' owners, sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvtier.errors import CallerError
from kvtier.paged.geometry import window_start
from kvtier.paged.pool import TORCH_DTYPES, KvPool
from kvtier.paged.runner import BeforeLayer, Slice


class Scratch:
    """Memory that steps gather into: grows to the largest step and is used again."""

    __slots__ = ("_memory",)

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def rows(self, count: int, like: Tensor) -> Tensor:
        """`[count, like.shape[1]]` of the dtype and device of `like`; contents mean nothing."""
        size = count * like.shape[1]
        memory = self._memory
        if memory.numel() < size or memory.dtype != like.dtype or memory.device != like.device:
            self._memory = memory = torch.empty(size, dtype=like.dtype, device=like.device)
        return memory[:size].view(count, like.shape[1])


@dataclass(frozen=True, slots=True)
class _Reach:
    """What one slice attends to in one group: tokens [token_start, token_stop) of the step.

    `gathered` are scratch tokens [start, stop) from the first key any of its queries reads to its
    own last; None where the slice starts its sequence, so that its own keys are all there is.
    `mask` is `[tokens, keys]` additive; None for a single token, and where plain causality does.
    """

    token_start: int
    token_stop: int
    gathered: tuple[int, int] | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """A step in one group: where to write, what to gather. Rows are those of KvPool, place 0."""

    write_rows: Tensor
    """i64 `[tokens]` rows of `token_rows`."""
    gather_rows: Tensor | None
    """i64 `[2 * blocks]` rows of `slice_rows`, keys' before values'; None: nothing to gather."""
    reaches: tuple[_Reach, ...]


class PagedStep:
    """One step over a pool: checked and planned when made, then used once for each layer.

    `positions` is i64 `[tokens]`: each token's position in its sequence. Raises CallerError for
    slices without tokens, tables that are too short, and ids that are no blocks.
    """

    __slots__ = ("_before_layer", "_places", "_plans", "_pool", "_scratch", "positions",
                 "tokens_count")  # fmt: skip

    def __init__(
        self,
        pool: KvPool,
        slices: Sequence[Slice],
        scratch: Scratch,
        before_layer: BeforeLayer | None = None,
    ) -> None:
        self._pool = pool
        self._scratch = scratch
        self._before_layer = before_layer
        check_slices(pool, slices)
        self.tokens_count = sum(len(part.tokens) for part in slices)
        positions = [
            position
            for part in slices
            for position in range(part.start, part.start + len(part.tokens))
        ]
        self.positions = torch.tensor(positions, device=pool.device)
        self._plans = [_plan(pool, group, slices) for group in range(len(pool.geometry.groups))]
        self._places = _places(pool)

    def window(self, layer: int) -> int | None:
        """How far back a layer looks, in tokens; None: all the way."""
        return self._pool.geometry.groups[self._places[layer][0]].window

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """Write a layer's new KV into the pool and attend; `[1, tokens, heads, head_dim]`.

        `query` is `[1, heads, tokens, head_dim]`, `key` and `value` `[1, kv_heads, tokens,
        head_dim]`, rotated; heads are a multiple of kv_heads (GQA, MQA). Calls `before_layer`
        first. CallerError for other shapes.
        """
        self._check_shapes(query, key, value)
        if self._before_layer is not None:
            self._before_layer(layer)
        group, place = self._places[layer]
        plan = self._plans[group]
        self._write(plan, group, place, key, value)
        keys, values = self._gather(plan, group, place)
        outputs = []
        for reach in plan.reaches:
            tokens = slice(reach.token_start, reach.token_stop)
            if reach.gathered is None:
                own = key[:, :, tokens], value[:, :, tokens]
                outputs.append(_attend(query[:, :, tokens], *own, reach.mask, scaling))
            else:
                start, stop = reach.gathered
                read = keys[:, :, start:stop], values[:, :, start:stop]
                outputs.append(_attend(query[:, :, tokens], *read, reach.mask, scaling))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        geometry = self._pool.geometry
        wanted = (1, geometry.kv_heads_count, self.tokens_count, geometry.head_dim)
        if key.shape != wanted or value.shape != wanted:
            raise CallerError(f"keys {tuple(key.shape)}, values {tuple(value.shape)}: not {wanted}")
        if query.shape[2:] != wanted[2:] or query.shape[1] % geometry.kv_heads_count:
            raise CallerError(f"queries {tuple(query.shape)} do not fit keys {wanted}")

    def _write(self, plan: _GroupPlan, group: int, place: int, key: Tensor, value: Tensor) -> None:
        rows = self._pool.token_rows(group)
        block_tokens = self._pool.geometry.block_tokens
        for kv, new in enumerate((key, value)):
            at = plan.write_rows + (2 * place + kv) * block_tokens
            source = new[0].transpose(0, 1).reshape(self.tokens_count, -1)
            rows.index_copy_(0, at, source.to(rows.dtype))

    def _gather(self, plan: _GroupPlan, group: int, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values that are read: `[1, kv_heads, gathered tokens, head_dim]`, strided."""
        geometry = self._pool.geometry
        rows = self._pool.slice_rows(group)
        if plan.gather_rows is None:
            nothing = rows.new_empty((1, geometry.kv_heads_count, 0, geometry.head_dim))
            return nothing, nothing
        at = plan.gather_rows + 2 * place
        both = self._scratch.rows(len(at), rows)
        torch.index_select(rows, 0, at, out=both)
        shaped = both.view(2, 1, -1, geometry.kv_heads_count, geometry.head_dim).transpose(2, 3)
        return shaped[0], shaped[1]


def check_slices(pool: KvPool, slices: Sequence[Slice]) -> None:
    """Raise CallerError for slices that a step over this pool cannot run. O(blocks)."""
    if not slices:
        raise CallerError("a step without slices")
    geometry = pool.geometry
    for part in slices:
        if not part.tokens or part.start < 0:
            raise CallerError(f"a slice of {len(part.tokens)} tokens from position {part.start}")
        if len(part.tables) != len(geometry.groups):
            raise CallerError(f"{len(part.tables)} tables for {len(geometry.groups)} groups")
        stop = -(-(part.start + len(part.tokens)) // geometry.block_tokens)
        for group, table in enumerate(part.tables):
            start = window_start(part.start, geometry.groups[group].window, geometry.block_tokens)
            if len(table) < stop:
                raise CallerError(f"a table of {len(table)} blocks, the slice reaches {stop}")
            used = table[start:stop]
            if min(used) < 0 or max(used) >= pool.blocks_counts[group]:
                raise CallerError(f"a table names blocks outside 0 .. {pool.blocks_counts[group]}")


def _places(pool: KvPool) -> list[tuple[int, int]]:
    return [pool.geometry.place(layer) for layer in range(pool.geometry.layers_count)]


def _plan(pool: KvPool, group: int, slices: Sequence[Slice]) -> _GroupPlan:
    geometry = pool.geometry
    block_tokens = geometry.block_tokens
    window = geometry.groups[group].window
    layers = len(geometry.groups[group].layers)
    written: list[int] = []
    gathered: list[int] = []
    reaches: list[_Reach] = []
    for part in slices:
        table = part.tables[group]
        token_start, stop = len(written), part.start + len(part.tokens)
        for position in range(part.start, stop):
            block, offset = divmod(position, block_tokens)
            written.append(table[block] * layers * 2 * block_tokens + offset)
        token_stop = len(written)
        first_key = 0 if window is None else max(0, part.start - window + 1)
        mask = _mask(pool, part, first_key, window)
        if part.start == 0:
            reaches.append(_Reach(token_start, token_stop, None, mask))
            continue
        first_block = first_key // block_tokens
        scratch_start = len(gathered) * block_tokens - first_block * block_tokens
        gathered.extend(table[first_block : -(-stop // block_tokens)])
        span = (scratch_start + first_key, scratch_start + stop)
        reaches.append(_Reach(token_start, token_stop, span, mask))
    gather_rows = None
    if gathered:
        keys = torch.tensor(gathered, device=pool.device) * (2 * layers)
        gather_rows = torch.cat((keys, keys + 1))
    write_rows = torch.tensor(written, device=pool.device)
    return _GroupPlan(write_rows, gather_rows, tuple(reaches))


def _mask(pool: KvPool, part: Slice, first_key: int, window: int | None) -> Tensor | None:
    """Additive `[tokens, keys]` of a slice whose keys start at position `first_key`."""
    tokens_count = len(part.tokens)
    stop = part.start + tokens_count
    if tokens_count == 1 or (part.start == 0 and (window is None or stop <= window)):
        return None
    dtype = TORCH_DTYPES[pool.geometry.dtype]
    shape = (tokens_count, stop - first_key)
    mask = torch.full(shape, float("-inf"), dtype=dtype, device=pool.device)
    # Query i of the slice is at column part.start - first_key + i: later columns are its future.
    mask.triu_(part.start - first_key + 1)
    if window is not None:
        past = torch.full(shape, float("-inf"), dtype=dtype, device=pool.device)
        mask += past.tril_(part.start - first_key - window)
    return mask


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """`[1, tokens, heads, head_dim]` of one slice; without a mask several tokens are causal."""
    heads, tokens, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    if tokens == 1:
        # A token's query heads of one KV head stand as rows, so that no key is read twice.
        packed = query.reshape(1, kv_heads, heads // kv_heads, head_dim)
        output = scaled_dot_product_attention(packed, keys, values, scale=scaling)
        return output.reshape(1, 1, heads, head_dim)
    output = scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=heads != kv_heads,
    )
    return output.transpose(1, 2)
