"""Audits: a sampled request computes what it could load, and what the store has is held against it.

A checksum tells that a block is what its writer wrote; only computing it tells that the writer was
right. An audited request is computed whole, from its first token on: nothing that was loaded before
can stand behind its KV, so a stored block that differs is wrong, and not the worker's own. The
stored bytes come into memory of the audit's own, are never used, and one that differs is dropped
from the store and, with what follows it in its chain, from L1. There is one audit at a time, of a
bounded number of blocks drawn at random, compared a few a step.

What must not live here: what two blocks that agree are (`comparing`), what an operator does then.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtier.core.frame import FrameName
from kvtier.paged.group_blocks import NO_BLOCK
from kvtier.telemetry.logs import EventLog
from kvtier.types import ScopeId, Source
from kvtier_services.worker.l2.comparing import agrees
from kvtier_services.worker.l2.port import Drop, Dropped, Fetch, Fetched, Ticket
from kvtier_services.worker.l2.saving import block_name
from kvtier_services.worker.l2.writing import WritePorts
from kvtier_services.worker.sequences import Request

LOG = EventLog("kvtier_services.worker")
_STEP_BYTES: Final = 4 << 20
"""Compared between two steps, and one block at least."""
_SHOWN_BYTES: Final = 8
"""Of a key in the log: what the index calls the block."""
_DROPS_MAX: Final = 10
"""How often a block is tried to be dropped, where the store cannot be asked."""
_PAUSE_S: Final = 1.0
"""Before the second time; doubled for each next, up to the most."""
_PAUSE_S_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class AuditTerms:
    """See `OffloadSection`."""

    fraction: float = 0.0
    blocks_max: int = 64
    tolerance: float = 0.0
    """See `comparing.agrees`."""
    dice: random.Random = field(default_factory=random.SystemRandom)
    """Decides which requests and blocks. The system's: nobody else can know."""


@dataclass(slots=True)
class AuditCounts:
    """Blocks, since the start; of `requests` requests."""

    requests: int = 0
    equal: int = 0
    differs: int = 0
    unread: int = 0
    """Chosen and not compared: the store did not give it, or the request ended before it."""


@dataclass(slots=True)
class _Entry:
    """A block that is to be compared."""

    name: FrameName
    stored: memoryview
    writer_id: int | None = None
    """Of the stored one, once it is there."""
    computed: bytes | None = None


_Place = tuple[int, int]
"""(group, number of the block in the sequence)"""


@dataclass(slots=True)
class _Audit:
    request: Request
    entries: dict[_Place, _Entry]
    """That are not counted yet."""
    fetches: dict[Ticket, list[_Place]] = field(default_factory=dict)
    """Under way."""
    is_over: bool = False
    """The request is."""


@dataclass(slots=True)
class _Wrong:
    """A block that is to be dropped."""

    name: FrameName
    known_as: bytes
    """In the save book."""
    tries: int = 0
    again_at: float = 0.0


class Audits:
    """The audits of one worker. Not thread-safe; the engine's thread owns it."""

    def __init__(self, ports: WritePorts, terms: AuditTerms, fetch_s_max: float) -> None:
        self._ports = ports
        self._terms = terms
        self._fetch_s_max = fetch_s_max
        self._geometry = ports.transfer.pool.geometry
        self._audit: _Audit | None = None
        self._drops: dict[Ticket, _Wrong] = {}
        """Under way."""
        self._undropped: list[_Wrong] = []
        """Where the store could not be asked."""
        self.counts = AuditCounts()

    @property
    def is_busy(self) -> bool:
        """Whether something is audited, or dropped for that."""
        return self._audit is not None or bool(self._drops)

    def deadlines(self, now: float) -> list[float]:
        """When `tick` has something to do."""
        times = [wrong.again_at for wrong in self._undropped]
        if self._audit is not None and any(map(_is_ready, self._audit.entries.values())):
            times.append(now)
        return times

    def begin(
        self,
        request: Request,
        start: int,
        below: Sequence[Sequence[Source | None]],
        scope: ScopeId,
    ) -> bool:
        """Decide whether a request is audited, of which the store has blocks from `start` on.

        If so the stored blocks are asked for, and the request must be computed whole. Mutates.
        """
        found = [
            (group, start + at)
            for group, sources in enumerate(below)
            for at, source in enumerate(sources)
            if source is not None
        ]
        terms = self._terms
        if self._audit is not None or not found or terms.dice.random() >= terms.fraction:
            return False
        chosen = sorted(terms.dice.sample(found, min(len(found), terms.blocks_max)))
        audit = self._audit = _Audit(request, {})
        self.counts.requests += 1
        for group in range(len(below)):
            places = [place for one, place in chosen if one == group]
            if places:
                self._fetch(audit, group, places, scope)
        return True

    def sealed(self, request: Request, start: int, stop: int) -> None:
        """Blocks start .. stop - 1 were computed: keep copies of those that are audited.

        Where blocks are staged on their way to the host this waits for them.
        """
        audit = self._audit
        if audit is None or audit.request is not request:
            return
        tables = self._ports.blocks.tables(request.holder)
        for group, table in enumerate(tables):
            wanted = [
                place
                for one, place in audit.entries
                if one == group and start <= place < stop and table[place] != NO_BLOCK
            ]
            self._copy(audit, group, wanted, [table[place] for place in wanted])

    def ended(self, request: Request) -> None:
        """A request is over: nothing more of it will be computed."""
        if self._audit is not None and self._audit.request is request:
            self._audit.is_over = True

    def take(self, outcome: Fetched | Dropped, now: float) -> None:
        """An order is over."""
        if isinstance(outcome, Dropped):
            self._dropped(outcome, now)
            return
        audit = self._audit
        assert audit is not None, "an audit waits for its fetches"
        for place, writer_id in zip(
            audit.fetches.pop(outcome.ticket), outcome.writer_ids, strict=True
        ):
            if writer_id is None:
                self._unread(audit, place)
            else:
                audit.entries[place].writer_id = writer_id

    def tick(self, now: float) -> None:
        """Compare a part of what is there, end an audit that is through, drop what is not yet."""
        for wrong in [one for one in self._undropped if now >= one.again_at]:
            self._undropped.remove(wrong)
            self._drop(wrong)
        audit = self._audit
        if audit is None:
            return
        left = _STEP_BYTES
        for place, entry in list(audit.entries.items()):
            if _is_ready(entry) and left > 0:
                left -= entry.stored.nbytes
                del audit.entries[place]
                self._compare(audit.request, place, entry)
            elif entry.computed is None and audit.is_over and not audit.fetches:
                self._unread(audit, place)
        if not audit.entries and not audit.fetches:
            self._audit = None

    # ---- parts

    def _fetch(self, audit: _Audit, group: int, places: Sequence[int], scope: ScopeId) -> None:
        size, namespace = self._geometry.block_bytes(group), self._ports.namespaces[group]
        chain, memory = audit.request.chain, np.empty((len(places), size), np.uint8)
        entries = [
            _Entry(chain.names(place, place + 1, namespace)[0], memory[at].data)
            for at, place in enumerate(places)
        ]
        ticket = self._ports.tickets.draw()
        audit.fetches[ticket] = [(group, place) for place in places]
        audit.entries.update(zip(audit.fetches[ticket], entries, strict=True))
        names = tuple(entry.name for entry in entries)
        into = tuple(entry.stored for entry in entries)
        self._ports.below.begin(Fetch(ticket, names, into, scope, self._fetch_s_max))

    def _copy(
        self, audit: _Audit, group: int, places: Sequence[int], blocks: Sequence[int]
    ) -> None:
        transfer, at = self._ports.transfer, 0
        while at < len(places):
            part = slice(at, at + transfer.room(group))
            saving = transfer.save(blocks[part], group) if part.stop > at else None
            if saving is None:
                return  # No room on the way: these stay uncompared.
            saving.join()
            for i, place in enumerate(places[part]):
                audit.entries[group, place].computed = bytes(saving.memory(i))
            saving.release()
            at = part.stop

    def _compare(self, request: Request, place: _Place, entry: _Entry) -> None:
        assert entry.computed is not None
        assert entry.writer_id is not None
        if agrees(entry.stored, entry.computed, self._geometry, self._terms.tolerance):
            self.counts.equal += 1
            return
        self.counts.differs += 1
        group, number = place
        keys = request.chain.keys
        LOG.warning(
            "a stored block is not what was computed",
            block=keys[number][:_SHOWN_BYTES].hex(),
            writer=writer_text(entry.writer_id),
            group=group,
            place=number,
        )
        # Copies in L1 may have come from there, and what follows may have been computed on them.
        self._ports.blocks.forget(keys[number:])
        self._drop(_Wrong(entry.name, block_name(group, keys[number])))

    def _drop(self, wrong: _Wrong) -> None:
        ticket = self._ports.tickets.draw()
        self._drops[ticket] = wrong
        self._ports.below.begin(Drop(ticket, (wrong.name,)))

    def _dropped(self, outcome: Dropped, now: float) -> None:
        wrong = self._drops.pop(outcome.ticket)
        wrong.tries += 1
        if outcome.is_done:
            self._ports.saves.doubt([wrong.known_as])
        elif wrong.tries < _DROPS_MAX:
            wrong.again_at = now + min(_PAUSE_S_MAX, _PAUSE_S * 2 ** (wrong.tries - 1))
            self._undropped.append(wrong)
        else:
            LOG.warning("a wrong block stays stored", block=wrong.name.key[:_SHOWN_BYTES].hex())

    def _unread(self, audit: _Audit, place: _Place) -> None:
        del audit.entries[place]
        self.counts.unread += 1


def writer_text(writer_id: int) -> str:
    """A writer's id as logs show it and `kvtier store drop --writer` takes it. Pure."""
    return f"{writer_id:016x}"


def _is_ready(entry: _Entry) -> bool:
    return entry.computed is not None and entry.writer_id is not None
