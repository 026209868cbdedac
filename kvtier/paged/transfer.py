"""Whole blocks between a pool and host memory: in place on a CPU, staged on CUDA.

    CPU    a block's host memory is the pool's own: nothing is copied
    CUDA   blocks are gathered on the device into one buffer, which crosses the bus in one transfer
           to or from pinned memory, on a stream of its own beside the model's

The gather and scatter on the device are one kernel of ours (compiled at run time by cupy), or torch
indexing where cupy is not installed. What must not live here: which blocks move and when, L2,
frames and checksums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvtier.errors import CallerError
from kvtier.limits import BATCH_COPIES_MAX
from kvtier.paged.pool import KvPool

_WORD_BYTES: Final = 16
_THREADS: Final = 256
_SOURCE: Final = r"""
extern "C" __global__ void move_blocks(
    uint4* pool, uint4* staged, const long long* ids, long long words, int scatter) {
  const long long block = ids[blockIdx.y];
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= words) return;
  uint4* in_pool = pool + block * words + at;
  uint4* in_stage = staged + (long long)blockIdx.y * words + at;
  if (scatter) *in_pool = *in_stage; else *in_stage = *in_pool;
}
"""

Mover = Callable[[Tensor, Tensor, Tensor, bool], None]
"""(pool `[blocks, bytes]`, staged `[n, bytes]`, ids i64 `[n]`, into the pool?): moves on the
current stream of the tensors' device."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A transfer that was started; `wait` blocks until its bytes are there."""

    _event: torch.cuda.Event | None
    _host: Tensor

    @property
    def done(self) -> bool:
        """Whether it is over; never blocks."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Block the calling thread until it is over."""
        if self._event is not None:
            self._event.synchronize()

    def memory(self, at: int) -> memoryview:
        """The bytes of the `at`-th block of the batch, once done; the transfer's own memory."""
        if not self.done:
            raise CallerError("the transfer is not over")
        return self._host[at].numpy().data


class BlockTransfer:
    """Moves blocks of one pool to and from host memory. Used by one thread at a time.

    On CUDA it owns `slots` blocks of pinned memory and as many on the device, for each group and
    direction; a batch has at most as many blocks, and staged bytes stay valid until the next
    transfer of the same direction and group. A transfer waits for what the model's stream has
    queued so far, and the model's stream waits for loads that `fence` handed to it.
    """

    __slots__ = ("_device_stage", "_host_in", "_host_out", "_move", "_pool", "_slots", "_stream")

    def __init__(self, pool: KvPool, slots: int) -> None:
        if not 1 <= slots <= BATCH_COPIES_MAX:
            raise CallerError(f"{slots} staged blocks, must be 1 to {BATCH_COPIES_MAX}")
        self._pool = pool
        self._slots = slots
        self._stream: torch.cuda.Stream | None = None
        self._host_in: list[Tensor] = []
        self._host_out: list[Tensor] = []
        self._device_stage: list[tuple[Tensor, Tensor]] = []
        self._move: Mover = _torch_mover
        if pool.device.type == "cpu":
            return
        if pool.device.type != "cuda":
            raise CallerError(f"transfers of a pool on {pool.device} are not supported")
        self._stream = torch.cuda.Stream(pool.device)
        self._move = device_mover()
        for group in range(len(pool.blocks_counts)):
            shape = (slots, pool.geometry.block_bytes(group))
            self._host_in.append(torch.empty(shape, dtype=torch.uint8, pin_memory=True))
            self._host_out.append(torch.empty(shape, dtype=torch.uint8, pin_memory=True))
            stages = [torch.empty(shape, dtype=torch.uint8, device=pool.device) for _ in range(2)]
            self._device_stage.append((stages[0], stages[1]))

    @property
    def in_place(self) -> bool:
        """Whether host memory is the pool's own: there is nothing to start or to wait for."""
        return self._stream is None

    def save(self, blocks: Sequence[int], group: int = 0) -> Ticket:
        """Start copying blocks to the host; the ticket's `memory(i)` is that of `blocks[i]`.

        The blocks must not be written until it is done. On a CPU they are copied at once: callers
        that can hold a block read `KvPool.block_memory` instead.
        """
        ids = self._checked(blocks, group)
        storage = self._pool.storage(group)
        if self._stream is None:
            return Ticket(None, storage[ids])
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            stage = self._device_stage[group][0][: len(blocks)]
            self._move(storage, stage, ids.to(self._pool.device, non_blocking=True), False)
            host = self._host_out[group][: len(blocks)]
            host.copy_(stage, non_blocking=True)
            return Ticket(self._stream.record_event(), host)

    def load_memory(self, block: int, at: int, group: int = 0) -> memoryview:
        """Where a tier writes the bytes of the `at`-th block of the next `load`: writable.

        On a CPU the pool's own memory of `block`. On CUDA pinned memory, not to be written while an
        earlier load of the group is under way.
        """
        if self._stream is None:
            return self._pool.block_memory(block, group)
        if not 0 <= at < self._slots:
            raise CallerError(f"place {at} is outside 0 .. {self._slots - 1}")
        return self._host_in[group][at].numpy().data

    def load(self, blocks: Sequence[int], group: int = 0) -> Ticket:
        """Start moving what was written into `load_memory` places 0, 1, ... to the blocks."""
        ids = self._checked(blocks, group)
        storage = self._pool.storage(group)
        if self._stream is None:
            return Ticket(None, storage[:0])
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        with torch.cuda.stream(self._stream):
            stage = self._device_stage[group][1][: len(blocks)]
            host = self._host_in[group][: len(blocks)]
            stage.copy_(host, non_blocking=True)
            self._move(storage, stage, ids.to(self._pool.device, non_blocking=True), True)
            return Ticket(self._stream.record_event(), host)

    def fence(self) -> None:
        """Make the model's stream wait for all transfers started so far; blocks no thread."""
        if self._stream is not None:
            torch.cuda.current_stream(self._pool.device).wait_stream(self._stream)

    def _checked(self, blocks: Sequence[int], group: int) -> Tensor:
        if not 0 < len(blocks) <= self._slots:
            raise CallerError(f"a batch of {len(blocks)} blocks, must be 1 to {self._slots}")
        if not 0 <= group < len(self._pool.blocks_counts):
            raise CallerError(f"group {group} does not exist")
        if min(blocks) < 0 or max(blocks) >= self._pool.blocks_counts[group]:
            raise CallerError(f"blocks outside 0 .. {self._pool.blocks_counts[group] - 1}")
        if len(set(blocks)) != len(blocks):
            raise CallerError("a block comes twice in one batch")
        return torch.tensor(list(blocks), dtype=torch.int64)


def device_mover() -> Mover:
    """The kernel by cupy where it is installed and the blocks are whole words, else torch's."""
    try:
        import cupy
    except ImportError:
        return _torch_mover
    kernel = cupy.RawKernel(_SOURCE, "move_blocks")

    def move(pool: Tensor, staged: Tensor, ids: Tensor, into_pool: bool) -> None:
        if pool.shape[1] % _WORD_BYTES:
            _torch_mover(pool, staged, ids, into_pool)
            return
        words = pool.shape[1] // _WORD_BYTES
        grid = (-(-words // _THREADS), len(ids))
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(pool.device).cuda_stream)
        with cupy.cuda.Device(pool.device.index or 0), stream:
            arguments = (pool.data_ptr(), staged.data_ptr(), ids.data_ptr(), words, int(into_pool))
            kernel(grid, (_THREADS,), arguments)

    return move


def _torch_mover(pool: Tensor, staged: Tensor, ids: Tensor, into_pool: bool) -> None:
    if into_pool:
        pool.index_copy_(0, ids, staged)
    else:
        torch.index_select(pool, 0, ids, out=staged)
