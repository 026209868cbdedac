"""Blocks in vLLM's caches as payloads: one span a block, `[layers, heads, tokens, key ‖ value]`.

vLLM hands out one tensor a layer, of the logical shape `[blocks, heads, tokens, content]`; how it
lies in memory is vLLM's choice and does not show in a payload. On a CPU, where a layer's block is
one span, bytes are copied by one native call a layer, straight between payload and cache; anywhere
else torch gathers on the device and one transfer crosses the bus.
What must not live here: names of blocks, threads, the store.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtier.core.block_copy import copy_checksum_many
from kvtier.core.identity import ModelSpec
from kvtier.errors import CallerError

_LAYER = re.compile(r"\d+")
_DIMENSIONS = 4


class KvPages:
    """One rank's caches. Any thread; blocks in use by one call must not be in use by another."""

    def __init__(self, caches: Mapping[str, Tensor], spec: ModelSpec) -> None:
        """`caches` by layer's name, shape `[blocks, heads, tokens, content]`, as `spec` has them.

        Raises CallerError where they are not what the namespace says.
        """
        named = sorted(caches.items(), key=lambda item: _layer_number(item[0]))
        self._layers = [tensor for _, tensor in named]
        self._check(spec)
        self.blocks_count = int(self._layers[0].shape[0])
        self._layer_bytes = spec.block_bytes // len(self._layers)
        self.block_bytes = spec.block_bytes
        self._flat = _flat(self._layers, self._layer_bytes)

    @property
    def is_in_place(self) -> bool:
        """Whether bytes are copied straight between payload and cache."""
        return bool(self._flat)

    def gather(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        """Copy blocks into `out`, u8 `[len(block_ids), block_bytes]`, contiguous.

        On a device this waits for what its current stream has queued.
        """
        self._check_call(block_ids, out)
        if self._flat:
            blocks, payloads = self._offsets(block_ids)
            for number, layer in enumerate(self._flat):
                into = payloads + np.uint64(number * self._layer_bytes)
                copy_checksum_many(out.reshape(-1), into, layer, blocks, self._layer_bytes)
            return
        host = torch.from_numpy(out).view(len(block_ids), len(self._layers), self._layer_bytes)
        ids = torch.tensor(list(block_ids), device=self._layers[0].device)
        stacked = torch.stack([layer.index_select(0, ids) for layer in self._layers], dim=1)
        host.copy_(stacked.view(torch.uint8).view(host.shape))

    def scatter(self, block_ids: Sequence[int], payloads: npt.NDArray[np.uint8]) -> None:
        """Copy payloads, u8 `[len(block_ids), block_bytes]`, contiguous, into blocks.

        On a device it is over when this returns.
        """
        self._check_call(block_ids, payloads)
        if self._flat:
            blocks, begins = self._offsets(block_ids)
            for number, layer in enumerate(self._flat):
                source = begins + np.uint64(number * self._layer_bytes)
                copy_checksum_many(layer, blocks, payloads.reshape(-1), source, self._layer_bytes)
            return
        first = self._layers[0]
        ids = torch.tensor(list(block_ids), device=first.device)
        host = torch.from_numpy(payloads).view(len(block_ids), len(self._layers), -1)
        staged = host.to(first.device).view(first.dtype)
        for number, cache in enumerate(self._layers):
            cache[ids] = staged[:, number].view(len(block_ids), *cache.shape[1:])
        if first.is_cuda:
            torch.cuda.current_stream(first.device).synchronize()

    # ---- parts

    def _offsets(
        self, block_ids: Sequence[int]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Where blocks begin in a layer's cache, and in a row of payloads."""
        blocks = np.asarray(block_ids, np.uint64) * np.uint64(self._layer_bytes)
        payloads = np.arange(len(block_ids), dtype=np.uint64) * np.uint64(self.block_bytes)
        return blocks, payloads

    def _check(self, spec: ModelSpec) -> None:
        if len(self._layers) != spec.shard.layers_count:
            raise CallerError(f"{len(self._layers)} caches for {spec.shard.layers_count} layers")
        shapes = {tuple(layer.shape[1:]) for layer in self._layers if layer.ndim == _DIMENSIONS}
        want = (spec.shard.heads_count, spec.block_tokens, 2 * spec.head_dim)
        if shapes != {want} or any(layer.ndim != _DIMENSIONS for layer in self._layers):
            raise CallerError(f"caches of shapes {sorted(shapes)}, expected {want} after blocks")
        sizes = {layer.element_size() for layer in self._layers}
        if sizes != {spec.kv_dtype.element_bytes}:
            raise CallerError(f"caches of {sorted(sizes)} bytes an element for {spec.kv_dtype}")

    def _check_call(self, block_ids: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        if rows.shape != (len(block_ids), self.block_bytes) or not rows.flags.c_contiguous:
            raise CallerError(f"payloads of shape {rows.shape} for {len(block_ids)} blocks")
        if min(block_ids) < 0 or max(block_ids) >= self.blocks_count:
            raise CallerError(f"blocks outside 0 .. {self.blocks_count - 1}")


def _layer_number(name: str) -> tuple[int, str]:
    """The layer's number is the first in its name: `model.layers.7.self_attn.attn`."""
    found = _LAYER.search(name)
    if found is None:
        raise CallerError(f"layer {name!r} has no number")
    return int(found.group()), name


def _flat(layers: list[Tensor], layer_bytes: int) -> list[npt.NDArray[np.uint8]]:
    """Each layer's cache as bytes, block after block; empty where blocks do not lie so."""
    if any(layer.device.type != "cpu" or not layer.is_contiguous() for layer in layers):
        return []
    flat = [layer.view(torch.uint8).view(-1).numpy() for layer in layers]
    return flat if all(one.nbytes % layer_bytes == 0 for one in flat) else []
