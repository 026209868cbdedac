"""`Stats` of the store: what operators see with `kvtier inspect store`.

What must not live here: metrics for scrapes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvtier.core.planner import ScopeQuota
from kvtier.ports import Clock
from kvtier.store import StoreStats, TieredStore, TierView
from kvtier.types import InstanceId, Tier
from kvtier.wire import messages as pb
from kvtier_services.store.metrics import OPERATIONS, Timings

E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True)
class StatsView:
    """Turns counters into the response."""

    store: TieredStore
    timings: Timings
    quotas: tuple[ScopeQuota, ...]
    clock: Clock
    started_s: float
    sessions: Callable[[], Mapping[str, int]]
    """What clients hold, by name."""

    def response(self, epoch: int, instance: InstanceId) -> pb.StoreStatsResponse:
        stats = self.store.stats()
        return pb.StoreStatsResponse(
            store_epoch=epoch,
            instance=instance,
            uptime_ms=int(1000 * (self.clock() - self.started_s)),
            tiers=[self._tier(tier, view) for tier, view in stats.tiers.items()],
            quotas=[
                pb.StoreQuota(
                    scope=quota.scope_id,
                    tier=quota.tier,
                    used_bytes=stats.quota_used_bytes[quota.scope_id, quota.tier],
                    bytes_max=quota.bytes_max,
                )
                for quota in self.quotas
            ],
            counts=_named((_counts(stats) | dict(self.sessions())).items()),
        )

    def _tier(self, tier: Tier, view: TierView) -> pb.StoreTierStats:
        stats = view.stats
        return pb.StoreTierStats(
            tier=tier,
            blocks=stats.blocks,
            bytes=stats.bytes,
            bytes_max=stats.bytes_max,
            blocks_pinned=stats.blocks_pinned,
            blocks_reserved=stats.blocks_reserved,
            verdict=view.verdict.value,
            tripped=view.tripped_count,
            drops_pending=view.drops_pending,
            bytes_read=stats.payload_bytes_read,
            bytes_written=stats.payload_bytes_written,
            gets=_of_enum(stats.gets),
            puts=_of_enum(stats.puts),
            removals=_of_enum(stats.removals),
            corrupt=_of_enum(stats.corrupt),
            calls=_named((what, self.timings.calls[tier, what]) for what in OPERATIONS),
            call_us=_named((what, self.timings.micros[tier, what]) for what in OPERATIONS),
        )


def _counts(stats: StoreStats) -> dict[str, int]:
    counts = stats.counts
    found = {
        "misses": counts.misses,
        "joins": counts.joins,
        "divergent_puts": counts.divergent_puts,
        "divergent_copies": counts.divergent_copies,
        "drops_forgotten": counts.drops_forgotten,
        "transfers": stats.transfers,
        "in_flight_bytes": stats.in_flight_bytes,
        "pins": stats.pins,
        "pinned_bytes": stats.pinned_bytes,
    }
    for what, by_tier in (
        ("hits", counts.hits), ("fetched", counts.fetched), ("promoted", counts.promoted),
        ("demoted", counts.demoted), ("demotions_failed", counts.demotions_failed),
    ):  # fmt: skip
        found |= {f"{what}_{tier.name.lower()}": count for tier, count in by_tier.items()}
    found |= {
        f"dropped_{tier.name.lower()}_{reason.value}": count
        for (tier, reason), count in counts.dropped.items()
    }
    return found | {f"refused_{reason.value}": n for reason, n in counts.refused.items()}


def _of_enum(counts: Mapping[E, int]) -> list[pb.NamedCount]:
    return _named((str(key.value), count) for key, count in counts.items())


def _named(counts: Iterable[tuple[str, int]]) -> list[pb.NamedCount]:
    return [pb.NamedCount(name=name, count=count) for name, count in counts if count]
