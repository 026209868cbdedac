"""Payloads of any kind as flat memory: buffers, numpy arrays and CPU tensors, without a copy.

Torch is never imported: a tensor is whatever looks like one. What must not live here: calls.
"""

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtier.errors import CallerError
from kvtier.types import BytesLike


@runtime_checkable
class TensorLike(Protocol):
    """The part of a torch tensor that is needed here."""

    @property
    def device(self) -> object: ...

    def data_ptr(self) -> int: ...

    def is_contiguous(self) -> bool: ...

    def contiguous(self) -> "TensorLike": ...

    def numel(self) -> int: ...

    def element_size(self) -> int: ...


Payload: TypeAlias = BytesLike | TensorLike
"""What can be put, or be filled."""


_BUFFERS: Final = (bytes, bytearray, memoryview)
"""Made once: a union of them would be made anew for every block."""


class _TensorMemory:
    """Lets numpy see a tensor's memory as bytes, whatever its dtype, and keeps it alive."""

    def __init__(self, tensor: TensorLike, size: int) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def readable(payload: Payload) -> memoryview:
    """The bytes of a payload; a copy only where its layout is not contiguous.

    CallerError for a tensor of a device and for what has no plain bytes.
    """
    if isinstance(payload, _BUFFERS):
        return _flat(memoryview(payload))
    if isinstance(payload, np.ndarray):
        contiguous = payload.flags.c_contiguous
        return _array_view(payload if contiguous else np.ascontiguousarray(payload))
    # Last, because looking for a protocol's members costs microseconds.
    if isinstance(payload, TensorLike):
        _require_cpu(payload)
        return _tensor_view(payload if payload.is_contiguous() else payload.contiguous())
    raise CallerError(f"{type(payload).__name__} is neither a buffer, an array nor a tensor")


def all_readable(payloads: Sequence[Payload]) -> list[memoryview]:
    """`readable` of each; most batches are buffers of bytes already."""
    views = _plain_views(payloads)
    return [readable(payload) for payload in payloads] if views is None else views


def all_writable(targets: Sequence[Payload | None]) -> list[memoryview | None]:
    """`writable` of each that is given; most batches are buffers of bytes already."""
    views = _plain_views(targets)
    if views is None or any([view.readonly for view in views]):  # noqa: C419 (hot)
        return [None if target is None else writable(target) for target in targets]
    return list(views)


def _plain_views(payloads: Sequence[Payload | None]) -> list[memoryview] | None:
    """Views of buffers that are flat and of bytes, as they are; None unless all of them are."""
    try:
        views: list[memoryview] = list(map(memoryview, payloads))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return None
    for view in views:
        if view.format != "B" or view.ndim != 1 or not view.c_contiguous or not view.nbytes:
            return None
    return views


def writable(target: Payload) -> memoryview:
    """The memory of a target, to be filled. CallerError unless it is contiguous and writable."""
    if isinstance(target, _BUFFERS):
        view = _flat(memoryview(target))
    elif isinstance(target, np.ndarray):
        if not target.flags.c_contiguous:
            raise CallerError("an array to read into must be contiguous")
        view = _array_view(target)
    elif isinstance(target, TensorLike):
        _require_cpu(target)
        if not target.is_contiguous():
            raise CallerError("a tensor to read into must be contiguous")
        return _tensor_view(target)
    else:
        raise CallerError(f"{type(target).__name__} is neither a buffer, an array nor a tensor")
    if view.readonly:
        raise CallerError("memory to read into must be writable")
    return view


def _tensor_view(tensor: TensorLike) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    return memoryview(np.asarray(_TensorMemory(tensor, size)))  # type: ignore[arg-type]


def _array_view(array: npt.NDArray[np.generic]) -> memoryview:
    if array.ndim == 1 and array.dtype.char == "B" and array.nbytes:
        return memoryview(array)  # type: ignore[arg-type]
    if array.dtype.hasobject:
        raise CallerError("an array of objects has no bytes")
    if not array.nbytes:
        return memoryview(bytearray())
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _require_cpu(tensor: TensorLike) -> None:
    kind = getattr(tensor.device, "type", None)
    if kind != "cpu":
        raise CallerError(f"a tensor must be in CPU memory, this one is on {kind}")


def _flat(view: memoryview) -> memoryview:
    try:
        if view.c_contiguous and not view.nbytes:
            return memoryview(bytearray())
        return view.cast("B")
    except (TypeError, ValueError) as error:
        raise CallerError(f"not a contiguous buffer of a plain type: {error}") from error
