"""Writes that were begun: blocks are held, copied to host memory where they must be, and written.

What must not live here: what to write (`saving`), lookups, loads.
"""

from dataclasses import dataclass

from kvtier.core.frame import KeyKind, frame_names
from kvtier.core.keys import KEY_BYTES
from kvtier.paged.blocks import BlockManager
from kvtier.paged.group_blocks import BlockId
from kvtier.paged.transfer import BlockTransfer, Saving
from kvtier.ports import PutStatus
from kvtier.types import Fingerprint, PrefixKey
from kvtier_services.worker.l2.port import BlockCache, Save, Saved, Ticket
from kvtier_services.worker.l2.saving import Haste, SaveBook, SaveEnd, SaveItem
from kvtier_services.worker.l2.tickets import Tickets


@dataclass(slots=True)
class _Writing:
    items: list[SaveItem]
    held: list[BlockId]
    """Empty once nobody reads them any more."""
    saving: Saving


@dataclass(frozen=True, slots=True)
class WritePorts:
    """What writes are made of."""

    below: BlockCache
    transfer: BlockTransfer
    blocks: BlockManager
    saves: SaveBook
    tickets: Tickets
    namespaces: tuple[Fingerprint, ...]
    """Of each layer group."""


class Writes:
    """The writes of one worker. Not thread-safe; the engine's thread owns it."""

    def __init__(self, ports: WritePorts, order_blocks_max: int) -> None:
        self._ports = ports
        self._order_blocks_max = order_blocks_max
        self._gathering: list[_Writing] = []
        self._by_ticket: dict[Ticket, _Writing] = {}

    @property
    def is_busy(self) -> bool:
        """Whether blocks are being written, or copied for that."""
        return bool(self._by_ticket or self._gathering)

    @property
    def is_gathering(self) -> bool:
        """Whether `tick` has something to do soon."""
        return bool(self._gathering)

    def begin(self, haste: Haste, now: float) -> None:
        """Begin to write what waits, as far as there is room."""
        groups = range(len(self._ports.namespaces))
        while all(self._ports.transfer.room(group) >= self._order_blocks_max for group in groups):
            items = self._ports.saves.take(now, haste)
            if not items:
                return
            self._hold(items)
        self.tick()

    def tick(self) -> None:
        """Hand over what has been copied to host memory."""
        waiting, self._gathering = self._gathering, []
        for writing in waiting:
            if writing.saving.done:
                self._order(writing)
            else:
                self._gathering.append(writing)

    def take(self, outcome: Saved, now: float) -> None:
        """A write is over."""
        writing = self._by_ticket.pop(outcome.ticket)
        writing.saving.release()
        self._drop(writing)
        ends = map(_save_end, outcome.held, outcome.reasons)
        names = [item.name for item in writing.items]
        self._ports.saves.ended(list(zip(names, ends, strict=True)), now)

    # ---- parts

    def _hold(self, items: list[SaveItem]) -> None:
        blocks, saves = self._ports.blocks, self._ports.saves
        held: list[BlockId] = []
        there: list[SaveItem] = []
        for item in items:
            block = blocks.hold(PrefixKey(item.key), item.group)
            if block is None:
                saves.dropped(item)
            else:
                there.append(item)
                held.append(block)
        if not there:
            return
        saving = self._ports.transfer.save(held, there[0].group)
        assert saving is not None, "there was room"
        writing = _Writing(there, held, saving)
        if saving.done:
            self._order(writing)
        else:
            self._gathering.append(writing)

    def _order(self, writing: _Writing) -> None:
        first = writing.items[0]
        keys = b"".join(item.key for item in writing.items)
        namespace = self._ports.namespaces[first.group]
        order = Save(
            self._ports.tickets.draw(),
            tuple(frame_names(KeyKind.PREFIX_KEY, keys, KEY_BYTES, namespace)),
            tuple(writing.saving.memory(i) for i in range(len(writing.items))),
            first.scope,
            first.priority,
        )
        if writing.saving.is_staged:
            self._drop(writing)
        self._by_ticket[order.ticket] = writing
        self._ports.below.begin(order)

    def _drop(self, writing: _Writing) -> None:
        for block in writing.held:
            self._ports.blocks.drop(block, writing.items[0].group)
        writing.held = []


def _save_end(held: bool, reason: str) -> SaveEnd:
    if held:
        return SaveEnd.SAVED
    return SaveEnd.REFUSED if reason == PutStatus.REFUSED.value else SaveEnd.FAILED
