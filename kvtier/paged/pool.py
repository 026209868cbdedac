"""The bytes of a paged KV pool: one storage tensor a group, block-major.

`KvPool` gives views of layers for a model, and memory of blocks for tiers. What must not live here:
which block belongs to whom (blocks.py), staging and streams (transfer.py), attention.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.limits import SLOTS_COUNT_MAX
from kvtier.paged.blocks import BlockCopy
from kvtier.paged.geometry import KvGeometry

TORCH_DTYPES: Final = {
    KvDtype.FLOAT32: torch.float32,
    KvDtype.BFLOAT16: torch.bfloat16,
    KvDtype.FLOAT16: torch.float16,
}
"""Element types that attention can read; quantised KV is a codec's, not the pool's."""


class LayerKv(NamedTuple):
    """One layer's keys and values, strided `[blocks, block_tokens, kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor


class KvPool:
    """KV of all blocks of all groups on one device; allocated once, not cleared.

    Views share the pool's memory and live as long as anyone refers to them. Nothing here locks:
    who writes a block while others read is the block manager's matter.
    """

    __slots__ = ("_arrays", "_rows", "_storages", "blocks_counts", "device", "geometry")

    def __init__(
        self,
        geometry: KvGeometry,
        blocks_counts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> None:
        """`blocks_counts[g]` blocks for group g. CallerError for dtypes without arithmetic."""
        if geometry.dtype not in TORCH_DTYPES:
            raise CallerError(f"a pool of {geometry.dtype.value} cannot be attended to")
        if len(blocks_counts) != len(geometry.groups):
            raise CallerError(f"{len(blocks_counts)} counts for {len(geometry.groups)} groups")
        for count in blocks_counts:
            if not 1 <= count <= SLOTS_COUNT_MAX:
                raise CallerError(f"a group of {count} blocks, must be 1 to {SLOTS_COUNT_MAX}")
        self.geometry = geometry
        self.blocks_counts = tuple(blocks_counts)
        self.device = torch.device(device)
        # Zeroed on a CPU, so that the pool's memory is there when the first request comes.
        self._storages = [
            torch.zeros((count, geometry.block_bytes(group)), dtype=torch.uint8, device=self.device)
            for group, count in enumerate(self.blocks_counts)
        ]
        dtype = TORCH_DTYPES[geometry.dtype]
        self._rows = [storage.view(dtype) for storage in self._storages]
        on_cpu = self.device.type == "cpu"
        self._arrays = [storage.numpy() for storage in self._storages] if on_cpu else []

    @property
    def pool_bytes(self) -> int:
        """Bytes of all groups."""
        return sum(storage.nbytes for storage in self._storages)

    def storage(self, group: int = 0) -> torch.Tensor:
        """All bytes of a group, u8 `[blocks, block_bytes]`, contiguous; the pool's own memory."""
        return self._storages[group]

    def layer(self, layer: int) -> LayerKv:
        """Views of a layer's keys and values in the pool's memory."""
        group, place = self.geometry.place(layer)
        geometry = self.geometry
        shape = (
            self.blocks_counts[group],
            len(geometry.groups[group].layers),
            2,
            geometry.block_tokens,
            geometry.kv_heads_count,
            geometry.head_dim,
        )
        both = self._rows[group].view(shape)[:, place]
        return LayerKv(both[:, 0], both[:, 1])

    def token_rows(self, group: int) -> torch.Tensor:
        """A group as a matrix whose rows are one token's K or V of one layer, elements of `dtype`.

        `[blocks * layers * 2 * block_tokens, kv_heads * head_dim]`, contiguous; the row of (block,
        place of the layer, kv, token) is `((block * layers + place) * 2 + kv) * block_tokens +
        token`.
        """
        return self._rows[group].view(-1, self.geometry.kv_heads_count * self.geometry.head_dim)

    def slice_rows(self, group: int) -> torch.Tensor:
        """As `token_rows`, a row being all tokens of K or of V of one layer in one block."""
        geometry = self.geometry
        return self._rows[group].view(
            -1, geometry.block_tokens * geometry.kv_heads_count * geometry.head_dim
        )

    def block_memory(self, block: int, group: int = 0) -> memoryview:
        """The bytes of one block, writable, without a copy. Only on a CPU.

        What a tier reads from and writes into. Raises CallerError elsewhere (see transfer.py), and
        for what is no block.
        """
        return self.block_array(block, group).data

    def layer_memory(self, block: int, layer: int) -> memoryview:
        """The bytes of one layer's slice of a block, writable, without a copy. Only on a CPU."""
        group, place = self.geometry.place(layer)
        start = place * self.geometry.slice_bytes
        return self.block_array(block, group)[start : start + self.geometry.slice_bytes].data

    def block_array(
        self, block: int, group: int = 0
    ) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """As `block_memory`, as u8 `[block_bytes]`."""
        if not self._arrays:
            raise CallerError(f"blocks on {self.device} have no memory that a CPU can address")
        if not 0 <= block < self.blocks_counts[group]:
            raise CallerError(f"block {block} is outside 0 .. {self.blocks_counts[group] - 1}")
        array: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._arrays[group][block]
        return array

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Make copies inside the pool, in their order (copy-on-write of `BlockManager.grow`)."""
        for copy in copies:
            storage = self._storages[copy.group]
            storage[copy.target].copy_(storage[copy.source])


def blocks_of_budget(geometry: KvGeometry, budget_bytes: int, context_tokens: int) -> list[int]:
    """Share a budget among groups; pure. `[blocks of group g]`, one at least of each.

    Full attention and windows get blocks for the same number of sequences of `context_tokens`, so
    that no group is full while another has room: a group's share is what one sequence needs of it.
    """
    needs = []
    for group in geometry.groups:
        reach = context_tokens if group.window is None else min(context_tokens, group.window)
        needs.append(-(-reach // geometry.block_tokens) + (group.window is not None))
    unit = sum(need * geometry.block_bytes(g) for g, need in enumerate(needs))
    return [max(1, min(SLOTS_COUNT_MAX, budget_bytes * need // unit)) for need in needs]
