"""Whole blocks between a pool and host memory: in place on a CPU, staged on CUDA.

    in place   a block's host memory is the pool's own: nothing is copied
    staged     blocks lie in slots of (pinned) host memory on their way. A save gathers them on the
               device and brings them over in one transfer; a restore goes in slices of layers, in
               the order in which a model reads them, so that a step can begin when the first is in

A `Carrier` moves the bytes: a CUDA stream beside the model's, or a thread. The gather and scatter
on the device are one kernel of ours (compiled at run time by cupy; it reads pinned memory itself),
or torch where cupy is not installed. What must not live here: which blocks move and when, L2,
frames and checksums.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

import torch
from torch import Tensor

from kvtier.errors import CallerError
from kvtier.limits import BATCH_COPIES_MAX
from kvtier.paged.pool import KvPool

SLICES_COUNT: Final = 4
"""Into how many slices of layers a restore is cut: more begin earlier and cost more calls."""
_WORD_BYTES: Final = 16
_THREADS: Final = 256
_SOURCE: Final = r"""
extern "C" __global__ void move_blocks(
    uint4* pool, uint4* staged, const long long* ids, long long block_words, long long first,
    long long words, int scatter) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= words) return;
  uint4* in_pool = pool + ids[blockIdx.y] * block_words + first + at;
  uint4* in_stage = staged + (long long)blockIdx.y * block_words + first + at;
  if (scatter) *in_pool = *in_stage; else *in_stage = *in_pool;
}
"""


class Arrival(Protocol):
    """Bytes on their way."""

    @property
    def done(self) -> bool:
        """Whether they are there; never blocks."""
        ...

    def wait(self) -> None:
        """Whatever the caller's thread, or its current stream, does next comes after them."""
        ...

    def join(self) -> None:
        """Block the caller's thread until they are there."""
        ...


class Carrier(Protocol):
    """Does pieces of work one after another, beside the caller."""

    def carry(self, work: Callable[[], None]) -> Arrival:
        """Begin a piece of work behind those before it, and behind what the caller did so far."""
        ...


class StreamCarrier:
    """A CUDA stream beside the model's. Work only queues; it runs when the device is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def carry(self, work: Callable[[], None]) -> Arrival:
        """See `Carrier`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            return _StreamArrival(self._stream.record_event(), self._device)


class _StreamArrival:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    @property
    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def join(self) -> None:
        self._event.synchronize()


class ThreadCarrier:
    """One thread: for pools of a CPU that are staged all the same (torch's copies free the GIL)."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "block copies")

    def carry(self, work: Callable[[], None]) -> Arrival:
        """See `Carrier`."""
        return _ThreadArrival(self._executor.submit(work))

    def close(self) -> None:
        """End the thread after what it was given."""
        self._executor.shutdown()


class _ThreadArrival:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def join(self) -> None:
        self._future.result()


class Landing:
    """Where a tier writes blocks of one group, and how they get from there into the pool."""

    def __init__(self, transfer: "BlockTransfer", blocks: Sequence[int], group: int, first: int):
        self._transfer = transfer
        self._blocks = list(blocks)
        self._group = group
        self._first = first
        """Slot of the first block; -1 in place."""

    def memory(self, at: int) -> memoryview:
        """The writable bytes of the `at`-th block, until it is restored or abandoned."""
        if self._first < 0:
            return self._transfer.pool.block_memory(self._blocks[at], self._group)
        return self._transfer.slot_memory(self._group, self._first + at)

    def restore(self, count: int) -> None:
        """Begin to move the first `count` blocks to the pool; nobody writes the memory any more.

        Whoever reads them calls `BlockTransfer.before_layer` first. In place nothing is to do.
        """
        if self._first >= 0:
            self._transfer.restore(self._blocks, self._group, self._first, count)


class Saving:
    """Blocks of one group on their way to host memory."""

    def __init__(
        self, transfer: "BlockTransfer", blocks: Sequence[int], group: int, first: int,
        arrival: Arrival | None,
    ) -> None:  # fmt: skip
        self._transfer = transfer
        self._blocks = list(blocks)
        self._group = group
        self._first = first
        self._arrival = arrival

    @property
    def is_staged(self) -> bool:
        """Whether the pool's blocks are free for others once it is done."""
        return self._first >= 0

    @property
    def done(self) -> bool:
        """Whether the bytes are there; never blocks."""
        return self._arrival is None or self._arrival.done

    def join(self) -> None:
        """Block the calling thread until they are."""
        if self._arrival is not None:
            self._arrival.join()

    def memory(self, at: int) -> memoryview:
        """The bytes of the `at`-th block, once done and until `release`."""
        if not self.done:
            raise CallerError("the transfer is not over")
        if self._first < 0:
            return self._transfer.pool.block_memory(self._blocks[at], self._group)
        return self._transfer.slot_memory(self._group, self._first + at)

    def release(self) -> None:
        """Nobody reads the memory any more."""
        if self._first >= 0:
            self._transfer.free(self._group, self._first, len(self._blocks))


class _Restore:
    """A restore that is under way: the arrival of each layer, in the order they were begun."""

    def __init__(self, group: int, first: int, count: int) -> None:
        self.group = group
        self.first = first
        self.count = count
        self.by_layer: dict[int, Arrival] = {}
        self.last: Arrival | None = None


class BlockTransfer:
    """Moves blocks of one pool to and from host memory. Used by one thread: the pool's own.

    Staged, it owns `slots` blocks of host memory of each group, for both directions, as many on a
    device, and hands out runs of them. A restore comes after what the model's stream has queued so
    far.
    """

    def __init__(self, pool: KvPool, slots: int, carrier: Carrier | None = None) -> None:
        """Stages where there is a `carrier`, or where the pool is on a CUDA device."""
        if not 1 <= slots <= BATCH_COPIES_MAX:
            raise CallerError(f"{slots} staged blocks, must be 1 to {BATCH_COPIES_MAX}")
        self.pool = pool
        self._slots = slots
        self._restores: list[_Restore] = []
        self._host: list[Tensor] = []
        self._device_stage: list[Tensor] = []
        self._taken = [[False] * slots for _ in pool.blocks_counts]
        self._move: Mover = _torch_mover
        on_cuda = pool.device.type == "cuda"
        if not on_cuda and pool.device.type != "cpu":
            raise CallerError(f"transfers of a pool on {pool.device} are not supported")
        self._carrier = StreamCarrier(pool.device) if carrier is None and on_cuda else carrier
        if self._carrier is None:
            return
        for group in range(len(pool.blocks_counts)):
            shape = (slots, pool.geometry.block_bytes(group))
            self._host.append(torch.zeros(shape, dtype=torch.uint8, pin_memory=on_cuda))
            if on_cuda:
                stage = torch.empty(shape, dtype=torch.uint8, device=pool.device)
                self._device_stage.append(stage)
        if on_cuda:
            self._move = device_mover()

    @property
    def in_place(self) -> bool:
        """Whether host memory is the pool's own: there is nothing to start or to wait for."""
        return self._carrier is None

    @property
    def is_restoring(self) -> bool:
        """Whether `before_layer` must be called."""
        self.settle()
        return bool(self._restores)

    def settle(self) -> None:
        """Give back the slots of restores that are over. Mutates."""
        while self._restores and (last := self._restores[0].last) is not None and last.done:
            over = self._restores.pop(0)
            self.free(over.group, over.first, over.count)

    def room(self, group: int = 0) -> int:
        """How many blocks of a group `save` or `landing` could take now, in one run."""
        if self._carrier is None:
            return BATCH_COPIES_MAX
        longest = run = 0
        for taken in self._taken[group]:
            run = 0 if taken else run + 1
            longest = max(longest, run)
        return longest

    def save(self, blocks: Sequence[int], group: int = 0) -> Saving | None:
        """Start copying blocks to the host; None where there is no room for them now.

        The blocks must not be written until it is done; in place not before `release`.
        """
        self._check(blocks, group)
        carrier = self._carrier
        if carrier is None:
            return Saving(self, blocks, group, -1, None)
        first = self._take(group, len(blocks))
        if first is None:
            return None
        ids = torch.tensor(list(blocks), dtype=torch.int64)
        arrival = carrier.carry(lambda: self._gather(ids, group, first))
        return Saving(self, blocks, group, first, arrival)

    def landing(self, blocks: Sequence[int], group: int = 0) -> Landing | None:
        """Host memory for blocks that are to be loaded; None where there is no room now."""
        self._check(blocks, group)
        if self._carrier is None:
            return Landing(self, blocks, group, -1)
        first = self._take(group, len(blocks))
        return None if first is None else Landing(self, blocks, group, first)

    def before_layer(self, layer: int) -> None:
        """What the caller reads or writes of a layer next comes after all restores of it."""
        for restore in self._restores:
            arrival = restore.by_layer.get(layer)
            if arrival is not None:
                arrival.wait()

    # ---- for Landing and Saving

    def slot_memory(self, group: int, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self._host[group][slot].numpy().data

    def free(self, group: int, first: int, count: int) -> None:
        """Give slots back."""
        self._taken[group][first : first + count] = [False] * count

    def restore(self, blocks: Sequence[int], group: int, first: int, count: int) -> None:
        """See `Landing.restore`."""
        if not count:
            self.free(group, first, len(blocks))
            return
        assert self._carrier is not None
        restore = _Restore(group, first, len(blocks))
        self._restores.append(restore)
        layers = self.pool.geometry.groups[group].layers
        ids = torch.tensor(list(blocks[:count]), dtype=torch.int64)
        step = -(-len(layers) // SLICES_COUNT)
        for start in range(0, len(layers), step):
            span = start, min(start + step, len(layers))
            arrival = self._carrier.carry(self._scatterer(ids, group, first, span))
            restore.by_layer.update(dict.fromkeys(layers[slice(*span)], arrival))
            restore.last = arrival

    # ---- parts

    def _scatterer(
        self, ids: Tensor, group: int, first: int, span: tuple[int, int]
    ) -> Callable[[], None]:
        """Work that moves the layers at places [span) of blocks out of slots from `first` on."""
        size = self.pool.geometry.slice_bytes
        start, stop = span[0] * size, span[1] * size
        storage = self.pool.storage(group)
        staged = self._host[group][first : first + len(ids)]

        def scatter() -> None:
            self._move(storage, staged, ids, (start, stop), True)

        return scatter

    def _gather(self, ids: Tensor, group: int, first: int) -> None:
        storage = self.pool.storage(group)
        host = self._host[group][first : first + len(ids)]
        whole = 0, storage.shape[1]
        if not self._device_stage:
            self._move(storage, host, ids, whole, False)
            return
        stage = self._device_stage[group][first : first + len(ids)]
        self._move(storage, stage, ids, whole, False)
        host.copy_(stage, non_blocking=True)

    def _take(self, group: int, count: int) -> int | None:
        """The first of so many free slots in a row, taken."""
        self.settle()
        taken, run = self._taken[group], 0
        for slot in range(self._slots):
            run = 0 if taken[slot] else run + 1
            if run == count:
                first = slot + 1 - count
                taken[first : slot + 1] = [True] * count
                return first
        return None

    def _check(self, blocks: Sequence[int], group: int) -> None:
        if not blocks or (self._carrier is not None and len(blocks) > self._slots):
            raise CallerError(f"a batch of {len(blocks)} blocks, must be 1 to {self._slots}")
        if not 0 <= group < len(self.pool.blocks_counts):
            raise CallerError(f"group {group} does not exist")
        if min(blocks) < 0 or max(blocks) >= self.pool.blocks_counts[group]:
            raise CallerError(f"blocks outside 0 .. {self.pool.blocks_counts[group] - 1}")
        if len(set(blocks)) != len(blocks):
            raise CallerError("a block comes twice in one batch")


Mover = Callable[[Tensor, Tensor, Tensor, tuple[int, int], bool], None]
"""(pool `[blocks, bytes]`, staged `[n, bytes]`, ids i64 `[n]` on the host, bytes [start, stop) of
each block, into the pool?): moves on the caller's thread, or its current stream."""


def device_mover() -> Mover:
    """The kernel by cupy where it is installed and the bytes are whole words, else torch's."""
    try:
        import cupy
    except ImportError:
        return _torch_mover
    kernel = cupy.RawKernel(_SOURCE, "move_blocks")

    def move(
        pool: Tensor, staged: Tensor, ids: Tensor, span: tuple[int, int], into_pool: bool
    ) -> None:
        if any(count % _WORD_BYTES for count in (pool.shape[1], *span)):
            _torch_mover(pool, staged, ids, span, into_pool)
            return
        block_words = pool.shape[1] // _WORD_BYTES
        first, words = span[0] // _WORD_BYTES, (span[1] - span[0]) // _WORD_BYTES
        on_device = ids.to(pool.device, non_blocking=True)
        grid = (-(-words // _THREADS), len(ids))
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(pool.device).cuda_stream)
        with cupy.cuda.Device(pool.device.index or 0), stream:
            addresses = (pool.data_ptr(), staged.data_ptr(), on_device.data_ptr())
            kernel(grid, (_THREADS,), (*addresses, block_words, first, words, int(into_pool)))

    return move


def _torch_mover(
    pool: Tensor, staged: Tensor, ids: Tensor, span: tuple[int, int], into_pool: bool
) -> None:
    """Block by block into the pool: each piece is contiguous on both sides, one plain copy."""
    start, stop = span
    if into_pool:
        for at, block in enumerate(ids.tolist()):
            pool[block, start:stop].copy_(staged[at, start:stop], non_blocking=True)
    else:
        torch.index_select(pool, 0, ids.to(pool.device), out=staged)
