"""The planner: puts, reads, outcomes, pins and drops of one node's store.

What must not live here: how room is made and blocks move down (see `mover`), and the counters (see
`ledger`).
"""

from collections.abc import Iterable, Sequence

from kvtier.core.eviction import PRIORITY_MAX, Removal
from kvtier.core.planner.ledger import Batch, Keep, Kind, Ledger, PolicyMaker, Record, Transfer
from kvtier.core.planner.mover import Mover
from kvtier.core.planner.pins import PinBook
from kvtier.core.planner.values import (
    Action,
    Block,
    BlockKey,
    Cancel,
    Drop,
    Fetch,
    Join,
    Outcome,
    PinId,
    Pinned,
    PlannerConfig,
    Promote,
    Reason,
    Reuse,
    Selection,
    Serve,
    Skip,
    TierUsage,
    TransferId,
    Verdict,
    Wanted,
    Write,
    WritePolicy,
)
from kvtier.errors import CallerError, LimitError, OverloadedError
from kvtier.limits import MATCH_BLOCKS_MAX, PIN_KEYS_MAX, PINS_COUNT_MAX, PLANNER_BLOCKS_MAX
from kvtier.types import ScopeId, Tier

_ON_REUSE = frozenset({WritePolicy.ON_REUSE})
_AT_SEAL = frozenset({WritePolicy.ON_SEAL, WritePolicy.ON_REUSE})
_GONE = frozenset({Outcome.MISSING, Outcome.CORRUPT})


class Planner:
    """Decides for one store; deterministic, no clock of its own, `now` never needed to be exact.

    Every method that returns actions has booked them already: carry them out in order and report
    each transfer once, whatever came of it. A transfer is never given up by time alone, since a
    stopped writer may still write. Reports of unknown transfers change nothing, so telling twice
    is harmless. Blocks of one call are one chain, head first. A block that is being written down
    is never dropped before the report; resident plus reserved bytes never exceed a capacity or a
    quota. Sizes are those that the caller gives: what a tier adds on disk is that tier's to count.
    """

    __slots__ = ("_config", "_flights", "_ledger", "_mover", "_pinned_bytes", "_pins", "_tiers")

    def __init__(self, config: PlannerConfig, make_policy: PolicyMaker, now: float) -> None:
        self._config = config
        self._tiers = {t.tier: t for t in config.tiers}
        self._ledger = Ledger(config, make_policy)
        self._mover = Mover(config, self._ledger, now)
        self._flights: dict[TransferId, Transfer] = {}
        self._pins = PinBook()
        self._pinned_bytes = 0

    # Views

    def usage(self, tier: Tier) -> TierUsage:
        """Counters of a configured tier. Mutates nothing."""
        self._check_tier(tier)
        return self._ledger.usage(tier)

    def quota_used_bytes(self, scope_id: ScopeId, tier: Tier) -> int:
        """Resident and reserved bytes of a scope with a quota (else of all without one)."""
        self._check_tier(tier)
        return self._ledger.pool(scope_id, tier).used_bytes

    def tiers_of(self, key: BlockKey) -> frozenset[Tier]:
        """Where the block is resident and may be read. Mutates nothing."""
        record = self._ledger.find(key)
        return frozenset() if record is None or record.doomed else frozenset(record.tiers)

    def block(self, key: BlockKey) -> Block | None:
        """What is known of a block that is somewhere or on its way. Mutates nothing."""
        record = self._ledger.find(key)
        return None if record is None else record.block

    def has_pin(self, pin_id: PinId) -> bool:
        """Whether the pin still holds: it ends by time, `unpin`, or for one of higher priority."""
        return pin_id in self._pins

    @property
    def blocks_count(self) -> int:
        """Blocks resident somewhere or on their way."""
        return len(self._ledger)

    @property
    def transfers_count(self) -> int:
        """Transfers whose report is awaited."""
        return len(self._flights) + len(self._mover.demotions)

    @property
    def pinned_bytes(self) -> int:
        """Bytes held by pins in DRAM."""
        return self._pinned_bytes

    # Events

    def put(self, blocks: Sequence[Block], now: float) -> list[Action]:
        """A writer offers sealed blocks: `Write` or `Skip` for each, and what makes room."""
        self._check_count(blocks)
        actions: list[Action] = []
        batch = Batch(tuple(block.key for block in blocks))
        for block in blocks:
            self._put_one(block, batch, actions, now)
        self._settle(batch, now)
        return actions

    def adopted(self, blocks: Sequence[Block], tier: Tier, now: float) -> list[Action]:
        """A writer put blocks into a tier by itself: booked as puts that have ended.

        `Drop` for each that has no place there (what makes room may not suffice, or it contradicts
        what is known), and what makes room.
        """
        self._check_tier(tier)
        self._check_count(blocks)
        actions: list[Action] = []
        for block in blocks:
            record = self._ledger.find(block.key)
            if record is not None and tier in record.tiers:
                continue
            refusal = self._refusal_to_adopt(block, record)
            if refusal is None and not self._ledger.can_ever_fit(block, tier):
                refusal = Reason.TOO_LARGE
            if refusal is None and not self._mover.make_room(block, tier, actions, now):
                refusal = Reason.NO_ROOM
            if refusal is not None:
                actions.append(Drop(block.key, tier, refusal))
                continue
            record = self._ledger.open(block)
            self._mover.touch(block, now)
            self._ledger.arrive(record, tier, now)
            self._mover.copy_down(record, _AT_SEAL, actions, now)
        self._ledger.touch([block.key for block in blocks], now)
        for scope_id in {block.scope_id for block in blocks}:
            self._relieve(scope_id, tier, actions, now)
        return actions

    def read(self, wanted: Sequence[Wanted], now: float) -> list[Action]:
        """A reader wants blocks: `Serve`, `Fetch`, `Promote`, `Join` or `Skip` for each."""
        return self._read(wanted, Keep.WISH, now)

    def prefetch(self, wanted: Sequence[Wanted], now: float) -> list[Action]:
        """Bring blocks up before they are read: `Promote`, `Join` or `Skip` for each. No touch."""
        return self._read(wanted, Keep.MUST, now)

    def touch(self, keys: Sequence[BlockKey], now: float) -> list[Action]:
        """Readers used blocks in place. May copy down what has now been touched often enough."""
        self._check_count(keys)
        actions: list[Action] = []
        self._ledger.touch(keys, now)
        for key in keys:
            record = self._ledger.find(key)
            if record is not None and not record.doomed:
                self._mover.touch(record.block, now)
                self._mover.copy_down(record, _ON_REUSE, actions, now)
        return actions

    def started(self, transfer_id: TransferId) -> None:
        """A queued demotion is being written now."""
        self._mover.started(transfer_id)

    def report(self, transfer_id: TransferId, outcome: Outcome, now: float) -> list[Action]:
        """A transfer ended. A failed read goes on to the next tier, or ends with a `Skip`."""
        actions: list[Action] = []
        demotion = self._mover.demotions.pop(transfer_id, None)
        flight = self._flights.pop(transfer_id, None)
        transfer = demotion or flight
        if transfer is None:
            return actions
        record = self._ledger.find(transfer.key)
        assert record is not None
        if demotion is not None:
            self._mover.end_demotion(demotion, outcome, actions, now)
        else:
            self._end_flight(transfer, record, outcome, actions, now)
        if record.doomed and record.flight is None and record.demotion is None:
            self._purge(record, actions)
        self._unpin_absent(record)
        self._ledger.close_if_empty(record)
        if transfer.target is not None:
            self._relieve(record.block.scope_id, transfer.target, actions, now)
        return actions

    def set_verdict(self, tier: Tier, verdict: Verdict) -> None:
        """What the tier is good for from now on."""
        self._check_tier(tier)
        self._mover.verdicts[tier] = verdict

    def restored(self, blocks: Sequence[Block], tier: Tier, now: float) -> list[Action]:
        """A tier found blocks at start. What does not fit is dropped."""
        self._check_tier(tier)
        self._check_count(blocks)
        actions: list[Action] = []
        for block in blocks:
            known = self._ledger.find(block.key)
            conflict = known is not None and not _agree(known.block, block)
            if known is not None and tier in known.tiers:
                continue
            full = known is None and len(self._ledger) >= PLANNER_BLOCKS_MAX
            if (
                conflict
                or full
                or self._ledger.shortage_pools(block, tier)
                or (not self._ledger.can_ever_fit(block, tier))
            ):
                actions.append(
                    Drop(block.key, tier, Reason.CONFLICT if conflict else Reason.NO_ROOM)
                )
            else:
                self._ledger.arrive(self._ledger.open(block), tier, now)
        return actions

    def vanished(self, keys: Iterable[BlockKey], tier: Tier) -> None:
        """A tier lost blocks by itself (Redis evicts, a sample was not found)."""
        self._check_tier(tier)
        for key in keys:
            record = self._ledger.find(key)
            if record is not None:
                self._lose(record, tier)

    def tier_lost(self, tier: Tier) -> None:
        """A tier starts empty: nothing is in it, and what is being written there will not be."""
        self._check_tier(tier)
        for transfer in [*self._flights.values(), *self._mover.demotions.values()]:
            if transfer.target is tier:
                transfer.void = True
        for record in list(self._ledger.records()):
            self._lose(record, tier)

    def drop(self, selection: Selection) -> list[Action]:
        """Remove the selected blocks everywhere: `Drop`s, or `Cancel`s whose drops follow.

        O(selected keys), without keys O(blocks). A block is gone for readers at once.
        """
        actions: list[Action] = []
        candidates = (
            list(self._ledger.records())
            if selection.keys is None
            else [r for r in map(self._ledger.find, sorted(selection.keys)) if r is not None]
        )
        for record in candidates:
            if record.doomed or not selection.matches(record.block):
                continue
            transfers = [t for t in (record.flight, record.demotion) if t is not None]
            if transfers:
                record.doomed = True
                actions += [Cancel(t.transfer_id, record.block.key) for t in transfers]
            else:
                self._purge(record, actions)
                self._ledger.close_if_empty(record)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Once in a while: end pins, and bring every tier below its watermark."""
        actions: list[Action] = []
        self._expire_pins(now)
        for config in self._config.tiers:
            self._mover.relieve(config, self._ledger.pools(config.tier), actions, now)
        return actions

    # Pins

    def pin(self, keys: Sequence[BlockKey], priority: int, ttl_s: float, now: float) -> Pinned:
        """Keep blocks in DRAM until unpinned or `ttl_s` has passed.

        A full pin budget lets pins of lower priority go; keys that still do not fit, or are not in
        DRAM, are left out of the answer. Raises OverloadedError beyond PINS_COUNT_MAX pins.
        """
        if len(keys) > PIN_KEYS_MAX:
            raise LimitError(f"{len(keys)} keys in one pin exceed PIN_KEYS_MAX ({PIN_KEYS_MAX})")
        if not 0 <= priority <= PRIORITY_MAX:
            raise CallerError(f"priority is {priority}, must be 0 to {PRIORITY_MAX}")
        if not 0 < ttl_s <= self._config.pin_ttl_s_max:
            raise CallerError(f"ttl_s is {ttl_s}, must be at most {self._config.pin_ttl_s_max}")
        self._expire_pins(now)
        if len(self._pins) >= PINS_COUNT_MAX and not self._displace(priority):
            raise OverloadedError(f"{PINS_COUNT_MAX} pins of no lower priority are held")
        pin_id = self._pins.draw_id()
        ceiling = self._config.pinned_share_max * self._tiers[Tier.DRAM].capacity_bytes
        kept: list[BlockKey] = []
        for key in dict.fromkeys(keys):
            record = self._ledger.find(key)
            if record is None or record.doomed or Tier.DRAM not in record.tiers:
                continue
            while not record.pins and self._pinned_bytes + record.block.size_bytes > ceiling:
                if not self._displace(priority):
                    break
            else:
                self._pinned_bytes += 0 if record.pins else record.block.size_bytes
                record.pins.add(pin_id)
                self._ledger.sync_holds(record)
                kept.append(key)
        self._pins.add(pin_id, tuple(kept), priority, now + ttl_s)
        return Pinned(pin_id, tuple(kept))

    def unpin(self, pin_id: PinId) -> None:
        """End a pin. Unknown and ended pins are ignored: telling twice is harmless."""
        pin = self._pins.remove(pin_id)
        for key in () if pin is None else pin.keys:
            record = self._ledger.find(key)
            if record is not None and pin_id in record.pins:
                record.pins.remove(pin_id)
                if not record.pins:
                    self._pinned_bytes -= record.block.size_bytes
                    self._ledger.sync_holds(record)

    def _displace(self, priority: int) -> bool:
        weakest = self._pins.weakest_below(priority)
        if weakest is None:
            return False
        self.unpin(weakest)
        return True

    def _expire_pins(self, now: float) -> None:
        for pin_id in self._pins.expired(now):
            self.unpin(pin_id)

    def _unpin_absent(self, record: Record) -> None:
        """Pins are of the copy in DRAM: without it they hold nothing."""
        if record.pins and Tier.DRAM not in record.tiers:
            self._pinned_bytes -= record.block.size_bytes
            record.pins.clear()
            self._ledger.sync_holds(record)

    # Puts and reads

    def _put_one(self, block: Block, batch: Batch, actions: list[Action], now: float) -> None:
        refusal = self._refusal_to_put(block)
        if refusal is not None:
            actions.append(Skip(block.key, refusal))
            record = self._ledger.find(block.key)
            if refusal is Reason.RESIDENT and record is not None:
                self._mover.touch(block, now)
                self._mover.copy_down(record, _ON_REUSE, actions, now)
            return
        record = self._ledger.open(block)
        flight = self._launch(record, Transfer(self._mover.draw_id(), Kind.WRITE, block.key,
                                               None, None, batch=batch))  # fmt: skip
        if not self._mover.make_room(record.block, Tier.DRAM, actions, now):
            self._abandon(record, flight)
            actions.append(Skip(block.key, Reason.NO_ROOM))
            return
        self._aim_at_dram(record, flight)
        self._mover.touch(block, now)
        actions.append(Write(flight.transfer_id, block.key, Tier.DRAM))

    def _refusal_to_put(self, block: Block) -> Reason | None:
        record = self._ledger.find(block.key)
        if record is not None:
            if record.doomed:
                return Reason.SELECTED
            if not _agree(record.block, block):
                return Reason.CONFLICT
            if record.flight is not None:
                return Reason.IN_FLIGHT
            if Tier.DRAM in record.tiers:
                return Reason.RESIDENT
        if self._mover.verdicts[Tier.DRAM] is not Verdict.OPEN:
            return Reason.TIER_DOWN
        if not self._ledger.can_ever_fit(block, Tier.DRAM):
            return Reason.TOO_LARGE
        return Reason.BUSY if self._is_full(record) else None

    def _refusal_to_adopt(self, block: Block, record: Record | None) -> Reason | None:
        if record is None:
            return Reason.BUSY if len(self._ledger) >= PLANNER_BLOCKS_MAX else None
        if record.doomed:
            return Reason.SELECTED
        return None if _agree(record.block, block) else Reason.CONFLICT

    def _read(self, wanted: Sequence[Wanted], keep: Keep, now: float) -> list[Action]:
        self._check_count(wanted)
        actions: list[Action] = []
        batch = Batch(tuple(w.block.key for w in wanted))
        for want in wanted:
            self._read_one(want, keep, batch, actions, now)
        self._settle(batch, now)
        return actions

    def _read_one(
        self, want: Wanted, keep: Keep, batch: Batch, actions: list[Action], now: float
    ) -> None:
        key = want.block.key
        record = self._ledger.find(key)
        if record is not None and record.doomed:
            actions.append(Skip(key, Reason.SELECTED))
            return
        touches = 0 if keep is Keep.MUST else self._mover.touch(want.block, now)
        if record is not None and Tier.DRAM in record.tiers and self._is_readable(Tier.DRAM):
            actions.append(Skip(key, Reason.RESIDENT) if keep is Keep.MUST else Serve(key))
            self._mover.copy_down(record, _ON_REUSE, actions, now)
            return
        if record is not None and record.flight is not None:
            actions.append(Join(key))
            return
        refusal = self._refusal_to_read(record, want)
        if refusal is not None:
            actions.append(Skip(key, refusal))
            return
        if keep is Keep.WISH and want.block.reuse is not Reuse.PREDICTED:
            keep = Keep.WISH if touches >= self._config.promote_touches_min else Keep.NO
        record = self._ledger.open(want.block)
        flight = Transfer(self._mover.draw_id(), Kind.FETCH, key, None, None,
                          keep=keep, hinted=want.hinted, batch=batch)  # fmt: skip
        self._fly(record, flight, actions, now)

    def _refusal_to_read(self, record: Record | None, want: Wanted) -> Reason | None:
        known = frozenset() if record is None else frozenset(record.tiers)
        sources = (known | want.hinted) & self._tiers.keys() - {Tier.DRAM}
        if not sources:
            return Reason.MISS
        if not any(self._is_readable(tier) for tier in sources):
            return Reason.TIER_DOWN
        return Reason.BUSY if self._is_full(record) else None

    def _fly(self, record: Record, flight: Transfer, actions: list[Action], now: float) -> None:
        """Start reading from the nearest tier that was not tried, or end with a `Skip`."""
        key = record.block.key
        source = next(
            (
                tier
                for tier in self._tiers
                if tier is not Tier.DRAM
                and tier not in flight.tried
                and (tier in record.tiers or tier in flight.hinted)
                and self._is_readable(tier)
            ),
            None,
        )
        if source is None:
            self._ledger.close_if_empty(record)
            actions.append(Skip(key, Reason.MISS))
            return
        flight.source = source
        flight.tried |= {source}
        self._launch(record, flight)
        deadline_at = now + self._tiers[source].deadline_s
        if self._can_keep(record, flight, actions, now):
            flight.kind = Kind.PROMOTE
            self._aim_at_dram(record, flight)
            actions.append(Promote(flight.transfer_id, key, source, deadline_at))
        elif flight.keep is Keep.MUST:
            self._abandon(record, flight)
            actions.append(Skip(key, Reason.NO_ROOM))
        else:
            actions.append(Fetch(flight.transfer_id, key, source, deadline_at))

    def _can_keep(
        self, record: Record, flight: Transfer, actions: list[Action], now: float
    ) -> bool:
        return (
            flight.keep is not Keep.NO
            and self._mover.verdicts[Tier.DRAM] is Verdict.OPEN
            and self._ledger.can_ever_fit(record.block, Tier.DRAM)
            and self._mover.make_room(record.block, Tier.DRAM, actions, now)
        )

    def _end_flight(
        self,
        flight: Transfer,
        record: Record,
        outcome: Outcome,
        actions: list[Action],
        now: float,
    ) -> None:
        record.flight = None
        if flight.target is not None:
            self._ledger.unreserve(record.block, flight.target)
            if outcome is Outcome.DONE:
                if not flight.void:
                    self._ledger.arrive(record, flight.target, now)
                elif flight.target not in record.tiers:
                    actions.append(Drop(flight.key, flight.target, Reason.TIER_LOST))
        self._ledger.sync_holds(record)
        if flight.source is not None and outcome in _GONE:
            self._mover.lose_copy(record, flight.source, outcome, actions)
        if outcome is Outcome.DONE and flight.kind is Kind.WRITE and Tier.DRAM in record.tiers:
            self._mover.copy_down(record, _AT_SEAL, actions, now)
        retry = outcome not in (Outcome.DONE, Outcome.CANCELLED) and not record.doomed
        if retry and flight.source is not None:
            again = Transfer(self._mover.draw_id(), Kind.FETCH, flight.key, None, None,
                             keep=flight.keep, tried=flight.tried, hinted=flight.hinted,
                             batch=flight.batch)  # fmt: skip
            self._fly(record, again, actions, now)
        if flight.batch is not None:
            flight.batch.outstanding -= 1
            self._settle(flight.batch, now)

    # Pieces

    def _launch(self, record: Record, flight: Transfer) -> Transfer:
        """Book a flight; its source is held from here on."""
        record.flight = flight
        self._flights[flight.transfer_id] = flight
        if flight.batch is not None:
            flight.batch.outstanding += 1
        self._ledger.sync_holds(record)
        return flight

    def _abandon(self, record: Record, flight: Transfer) -> None:
        """Take back a flight that was not told to the shell."""
        record.flight = None
        del self._flights[flight.transfer_id]
        if flight.batch is not None:
            flight.batch.outstanding -= 1
        self._ledger.sync_holds(record)
        self._ledger.close_if_empty(record)

    def _aim_at_dram(self, record: Record, flight: Transfer) -> None:
        flight.target = Tier.DRAM
        self._ledger.reserve(record.block, Tier.DRAM)

    def _settle(self, batch: Batch, now: float) -> None:
        """Touch a chain once, as a whole, when nothing of it is on its way any more."""
        if batch.outstanding == 0:
            self._ledger.touch(batch.keys, now)

    def _purge(self, record: Record, actions: list[Action]) -> None:
        for tier in sorted(record.tiers):
            self._mover.drop_copy(record, tier, Reason.SELECTED, actions)
        self._unpin_absent(record)

    def _lose(self, record: Record, tier: Tier) -> None:
        self._ledger.leave(record, tier, Removal.DROPPED)
        self._unpin_absent(record)
        self._ledger.close_if_empty(record)

    def _relieve(self, scope_id: ScopeId, tier: Tier, actions: list[Action], now: float) -> None:
        own = self._ledger.pool(scope_id, tier)
        common = self._ledger.pools(tier)[0]
        pools = [common] if own is common else [own, common]
        self._mover.relieve(self._tiers[tier], pools, actions, now)

    def _is_readable(self, tier: Tier) -> bool:
        return self._mover.verdicts[tier] is not Verdict.DOWN

    def _is_full(self, record: Record | None) -> bool:
        """Whether one more flight, or a record for it, would pass a ceiling."""
        blocks_full = record is None and len(self._ledger) >= PLANNER_BLOCKS_MAX
        return blocks_full or len(self._flights) >= self._config.flights_max

    def _check_tier(self, tier: Tier) -> None:
        if tier not in self._tiers:
            raise CallerError(f"tier {tier!r} is not configured")

    def _check_count(self, items: Sequence[object]) -> None:
        if len(items) > MATCH_BLOCKS_MAX:
            raise LimitError(f"{len(items)} blocks exceed MATCH_BLOCKS_MAX ({MATCH_BLOCKS_MAX})")


def _agree(one: Block, other: Block) -> bool:
    """Whether two descriptions of one key can be of the same bytes."""
    return one.size_bytes == other.size_bytes and one.scope_id == other.scope_id
