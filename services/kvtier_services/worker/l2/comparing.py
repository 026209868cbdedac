"""Whether stored KV is what a worker computed, as far as arithmetic lets two runs agree. Pure.

The same tokens give other bits when they are computed in another batch, in other chunks or by
another kernel: sums of floats depend on their order. So two blocks agree where every vector of them
does: the difference of one token's K (or V) of one head in one layer is no longer than a tolerance
times the vector, or times the usual length of that head's vectors in the block where it is a short
one (the values of attention sinks are nearly nothing, and as noisy as the others). Vectors are
compared and not elements, because a small element of a long vector carries the noise of the long
one. What must not live here: what is compared and when.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.paged.geometry import KvGeometry

Buffer: TypeAlias = bytes | bytearray | memoryview
_Floats: TypeAlias = npt.NDArray[np.float32]

TOLERANCES: Final = {KvDtype.FLOAT32: 1e-3, KvDtype.FLOAT16: 5e-2, KvDtype.BFLOAT16: 3e-1}
"""By element type, for any model; see docs/operating.md for what was measured. The vectors of
another block, of another token or of noise differ by about 1 and more."""


def agrees(stored: Buffer, computed: Buffer, geometry: KvGeometry, tolerance: float) -> bool:
    """Whether two blocks of one layer group agree; tolerance 0: bit for bit. Pure; O(bytes).

    What was stored and is not finite agrees with nothing but its own bits. CallerError for blocks
    that are not of one length, or of no whole number of layers.
    """
    mine, theirs = np.frombuffer(computed, np.uint8), np.frombuffer(stored, np.uint8)
    if len(mine) != len(theirs) or len(mine) % geometry.slice_bytes:
        raise CallerError(f"blocks of {len(theirs)} and {len(mine)} bytes are not compared")
    if np.array_equal(mine, theirs):
        return True
    if tolerance <= 0:
        return False
    shape = (-1, geometry.block_tokens, geometry.kv_heads_count, geometry.head_dim)
    right = _floats(mine, geometry.dtype).reshape(shape)
    with np.errstate(over="ignore", invalid="ignore"):
        apart = _lengths(_floats(theirs, geometry.dtype).reshape(shape) - right)
        lengths = _lengths(right)
        usual = np.sqrt(np.mean(lengths * lengths, axis=1, keepdims=True))
        return bool((apart <= tolerance * np.maximum(lengths, usual)).all())


def _lengths(vectors: _Floats) -> _Floats:
    """Of the vectors in the last axis; not finite where one of their elements is not."""
    lengths: _Floats = np.sqrt(np.einsum("...d,...d->...", vectors, vectors))
    return lengths


def _floats(block: npt.NDArray[np.uint8], dtype: KvDtype) -> _Floats:
    match dtype:
        case KvDtype.FLOAT32:
            return block.view("<f4")
        case KvDtype.FLOAT16:
            return block.view("<f2").astype(np.float32)
        case KvDtype.BFLOAT16:
            return (block.view("<u2").astype(np.uint32) << 16).view(np.float32)
    raise CallerError(f"KV of {dtype.value} is not compared")
