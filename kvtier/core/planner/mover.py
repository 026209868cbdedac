"""Making room and moving blocks down: eviction, demotion, write policies, budgets.

What must not live here: reads, puts, pins and drops by selection (see `planner`).
"""

from collections.abc import Sequence
from itertools import count

from kvtier.core.eviction import Removal
from kvtier.core.planner.budgets import ByteBudget, TouchCounts
from kvtier.core.planner.ledger import After, Kind, Ledger, Pool, Record, Stage, Transfer
from kvtier.core.planner.values import (
    Action,
    Block,
    Demote,
    Drop,
    Outcome,
    PlannerConfig,
    Reason,
    Reuse,
    TierConfig,
    TransferId,
    Verdict,
    WritePolicy,
)
from kvtier.limits import PLANNER_EVICTIONS_MAX
from kvtier.types import Tier


class Mover:
    """Decides what leaves a tier and where it goes; appends its actions to the caller's list.

    A demotion is queued, then writing, then over. From the first moment its source is held and its
    bytes below are reserved, so that it is neither evicted before it is written nor written where
    there is no room.
    """

    __slots__ = ("_budgets", "_config", "_ids", "_ledger", "_queued_bytes", "_touches",
                 "demotions", "verdicts")  # fmt: skip

    def __init__(self, config: PlannerConfig, ledger: Ledger, now: float) -> None:
        self._config = config
        self._ledger = ledger
        self._ids = count(1)
        self._budgets = {
            t.tier: ByteBudget(t.write_bytes_per_day, t.write_burst_bytes, now)
            for t in config.tiers
        }
        self._queued_bytes = {t.tier: 0 for t in config.tiers}
        self._touches = TouchCounts(config.touches_tracked_max, config.touch_half_life_s)
        self.verdicts = {t.tier: Verdict.OPEN for t in config.tiers}
        self.demotions: dict[TransferId, Transfer] = {}

    def draw_id(self) -> TransferId:
        """A transfer id that was never used."""
        return TransferId(next(self._ids))

    def touch(self, block: Block, now: float) -> int:
        """Count a use for admission and promotion; returns the count with it."""
        return self._touches.touch(block.key, now)

    def make_room(self, block: Block, tier: Tier, actions: list[Action], now: float) -> bool:
        """Drop what may go until the block fits; whether it fits now.

        What should be written below first is queued for that, but only as much as is needed: the
        caller is refused this time. Looks at no more than PLANNER_EVICTIONS_MAX blocks.
        """
        for _ in range(PLANNER_EVICTIONS_MAX):
            pools = self._ledger.shortage_pools(block, tier)
            if not pools:
                return True
            if sum(pool.leaving_bytes for pool in pools) >= block.size_bytes:
                return False
            if not self._evict_next(pools, tier, actions, now):
                return False
        return False

    def relieve(
        self, config: TierConfig, pools: Sequence[Pool], actions: list[Action], now: float
    ) -> None:
        """Where a pool is above the high watermark, let blocks go until it will be at the low."""
        for pool in pools:
            if self._ledger.staying_share(pool, config.tier) <= config.high_share:
                continue
            for _ in range(PLANNER_EVICTIONS_MAX):
                if self._ledger.staying_share(pool, config.tier) <= config.low_share:
                    break
                if not self._evict_next([pool], config.tier, actions, now):
                    break

    def copy_down(
        self,
        record: Record,
        policies: frozenset[WritePolicy],
        actions: list[Action],
        now: float,
    ) -> None:
        """Queue the next copy into a lower tier that one of these write policies asks for."""
        sources = [t for t in record.tiers if self.verdicts[t] is not Verdict.DOWN]
        if not sources or record.doomed or self._refusal_to_queue(record) is not None:
            return
        source = min(sources)
        for config in self._config.tiers:
            if _is_no_target(config.tier, source, record):
                continue
            if config.write_policy not in policies:
                continue
            if self._refusal(record, config, actions, now) is None:
                self._demote(record, source, config, After.KEEP, actions)
                return

    def started(self, transfer_id: TransferId) -> None:
        """A demotion has begun to write: its bytes count even if it is cancelled."""
        transfer = self.demotions.get(transfer_id)
        if transfer is not None:
            transfer.stage = Stage.WRITING

    def end_demotion(
        self, transfer: Transfer, outcome: Outcome, actions: list[Action], now: float
    ) -> None:
        """Book the outcome of a demotion."""
        record = self._ledger.find(transfer.key)
        assert record is not None
        assert transfer.source is not None
        assert transfer.target is not None
        source, target = transfer.source, transfer.target
        leaves = transfer.after is After.DROP
        record.demotion = None
        if leaves:
            self._ledger.count_leaving(record, source, -1)
        self._ledger.unreserve(record.block, target)
        self._queued_bytes[target] -= record.block.size_bytes
        if outcome is Outcome.DONE and transfer.void:
            if target not in record.tiers:
                actions.append(Drop(transfer.key, target, Reason.TIER_LOST))
        elif outcome is Outcome.DONE:
            record.demotion_failures = 0
            self._ledger.arrive(record, target, now)
        elif outcome is Outcome.CANCELLED:
            if transfer.stage is Stage.QUEUED:
                self._budgets[target].give_back(record.block.size_bytes)
        elif outcome in (Outcome.MISSING, Outcome.CORRUPT):
            self.lose_copy(record, source, outcome, actions)
        else:
            record.demotion_failures += 1
        self._ledger.sync_holds(record)
        if record.doomed:
            return
        written = target in record.tiers and source in record.tiers
        if written and leaves and self._still_pressed(record, source):
            self.drop_copy(record, source, Reason.COPY_ELSEWHERE, actions)
        if outcome is Outcome.DONE:
            self.copy_down(record, _AFTER_WRITE, actions, now)

    def lose_copy(
        self, record: Record, tier: Tier, outcome: Outcome, actions: list[Action]
    ) -> None:
        """A tier turned out not to have the block, or to have other bytes."""
        if outcome is Outcome.CORRUPT:
            self.drop_copy(record, tier, Reason.CORRUPT, actions)
        else:
            self._ledger.leave(record, tier, Removal.DROPPED)

    def drop_copy(self, record: Record, tier: Tier, reason: Reason, actions: list[Action]) -> None:
        """Remove one copy from the books and tell the shell to."""
        evicted = reason not in (Reason.CORRUPT, Reason.SELECTED)
        self._ledger.leave(record, tier, Removal.EVICTED if evicted else Removal.DROPPED)
        actions.append(Drop(record.block.key, tier, reason))

    def _still_pressed(self, record: Record, tier: Tier) -> bool:
        """Whether a block that was to leave should do so now that it is written below."""
        if record.pins or record.holds:
            return False
        config = next(t for t in self._config.tiers if t.tier is tier)
        pool = self._ledger.pool(record.block.scope_id, tier)
        return self._ledger.staying_share(pool, tier) > config.low_share

    def _evict_next(
        self, pools: Sequence[Pool], tier: Tier, actions: list[Action], now: float
    ) -> bool:
        """Drop or demote the first victim of the first pool that has one."""
        for pool in pools:
            for key in pool.policy.victims(1, now):
                record = self._ledger.find(key)
                assert record is not None
                target = self._demotion_target(record, tier, actions, now)
                if isinstance(target, TierConfig):
                    self._demote(record, tier, target, After.DROP, actions)
                else:
                    self.drop_copy(record, tier, target, actions)
                    self._ledger.close_if_empty(record)
                return True
        return False

    def _demotion_target(
        self, record: Record, source: Tier, actions: list[Action], now: float
    ) -> TierConfig | Reason:
        """Where an evicted block is written first, or why it is not."""
        if any(
            tier is not source and self.verdicts[tier] is not Verdict.DOWN for tier in record.tiers
        ):
            return Reason.COPY_ELSEWHERE
        refusal = self._refusal_to_queue(record)
        if refusal is not None:
            return refusal
        first: Reason | None = None
        for config in self._config.tiers:
            if _is_no_target(config.tier, source, record):
                continue
            refusal = self._refusal(record, config, actions, now)
            if refusal is None:
                return config
            first = first or refusal
        return first or Reason.NO_TIER_BELOW

    def _refusal_to_queue(self, record: Record) -> Reason | None:
        """Why no demotion of this block can be queued at all."""
        if record.demotion is not None:
            return Reason.BUSY
        if record.demotion_failures >= self._config.demotion_failures_max:
            return Reason.DEMOTION_FAILED
        if len(self.demotions) >= self._config.demotions_max:
            return Reason.QUEUE_FULL
        return None

    def _refusal(
        self, record: Record, config: TierConfig, actions: list[Action], now: float
    ) -> Reason | None:
        """Why the block may not be written into the tier now; makes room if nothing else speaks."""
        block, tier = record.block, config.tier
        if self.verdicts[tier] is not Verdict.OPEN:
            return Reason.TIER_DOWN
        if not self._is_admitted(block, config, now):
            return Reason.NOT_ADMITTED
        if not self._ledger.can_ever_fit(block, tier):
            return Reason.TOO_LARGE
        if self._queued_bytes[tier] + block.size_bytes > config.queued_bytes_max:
            return Reason.QUEUE_FULL
        if not self._budgets[tier].can_take(block.size_bytes, now):
            return Reason.BUDGET
        if not self.make_room(block, tier, actions, now):
            return Reason.NO_ROOM
        # Making room may have queued demotions of others.
        full = len(self.demotions) >= self._config.demotions_max
        return Reason.QUEUE_FULL if full else None

    def _is_admitted(self, block: Block, config: TierConfig, now: float) -> bool:
        return (
            config.write_policy is WritePolicy.ON_SEAL
            or block.reuse is Reuse.PREDICTED
            or self._touches.count(block.key, now) >= config.touches_min
        )

    def _demote(
        self,
        record: Record,
        source: Tier,
        target: TierConfig,
        after: After,
        actions: list[Action],
    ) -> None:
        block, tier = record.block, target.tier
        self._ledger.reserve(block, tier)
        self._budgets[tier].take(block.size_bytes)
        self._queued_bytes[tier] += block.size_bytes
        transfer = Transfer(self.draw_id(), Kind.DEMOTE, block.key, source, tier, after)
        self.demotions[transfer.transfer_id] = transfer
        record.demotion = transfer
        self._ledger.sync_holds(record)
        if after is After.DROP:
            self._ledger.count_leaving(record, source, 1)
        actions.append(Demote(transfer.transfer_id, block.key, source, tier, target.deadline_s))


def _is_no_target(tier: Tier, source: Tier, record: Record) -> bool:
    """Whether nothing goes from `source` down to the tier: it is not below, or only read."""
    return tier <= source or tier is Tier.PEER or tier in record.tiers


_AFTER_WRITE = frozenset({WritePolicy.ON_SEAL, WritePolicy.ON_REUSE})
