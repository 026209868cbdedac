"""The metrics of the store service: one table, nearly all of it read from the store at a scrape.

What must not live here: counting that the store and its tiers already do.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from kvtier.core.health import BreakerState
from kvtier.core.planner import Reason, Verdict
from kvtier.errors import FrameFault
from kvtier.peers import PeerTier, PeerView
from kvtier.ports import GetStatus, PutStatus, RemovalCause
from kvtier.security import Denial, Guard
from kvtier.store import StoreStats
from kvtier.telemetry.metrics import Label, MetricDef, MetricKind, Metrics, Readings
from kvtier.tiers.arena.server import ServerStats
from kvtier.types import Tier

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_SECONDS: Final = (1e-4, 2.5e-4, 1e-3, 2.5e-3, 1e-2, 2.5e-2, 0.1, 0.25, 1.0, 2.5, 10.0)
_TIERS: Final = (Tier.DRAM, Tier.NVME, Tier.PEER, Tier.REDIS)
_TIER: Final = Label("tier", tuple(tier.name.lower() for tier in _TIERS))
_REASONS: Final = tuple(reason.value for reason in Reason)
PEER_STATES: Final = (*(state.name.lower() for state in BreakerState), "left_out")
OPERATIONS: Final = ("get", "put", "drop")


def _by_tier(name: str, kind: MetricKind, text: str, *labels: Label) -> MetricDef:
    return MetricDef(kind, name, text, (_TIER, *labels))


BLOCKS = _by_tier("kvtier_store_blocks", _GAUGE, "Blocks that a tier holds.")
BYTES = _by_tier("kvtier_store_bytes", _GAUGE, "Bytes that a tier takes.")
BYTES_MAX = _by_tier("kvtier_store_bytes_max", _GAUGE, "Bytes that a tier may take.")
PINNED = _by_tier("kvtier_store_pinned_blocks", _GAUGE, "Blocks that a tier may not evict.")
RESERVED = _by_tier(
    "kvtier_store_reserved_blocks", _GAUGE, "Blocks that are being written, or in quarantine."
)
GETS = _by_tier(
    "kvtier_store_gets_total", _COUNTER, "Blocks read from a tier, by outcome.",
    Label("outcome", tuple(status.value for status in GetStatus)),
)  # fmt: skip
PUTS = _by_tier(
    "kvtier_store_puts_total", _COUNTER, "Blocks written to a tier, by outcome.",
    Label("outcome", tuple(status.value for status in PutStatus)),
)  # fmt: skip
REMOVALS = _by_tier(
    "kvtier_store_removals_total", _COUNTER, "Blocks that left a tier, by cause.",
    Label("cause", tuple(cause.value for cause in RemovalCause)),
)  # fmt: skip
CORRUPT = _by_tier(
    "kvtier_corrupt_blocks_total", _COUNTER, "Copies that were not what was asked for.",
    Label("fault", tuple(fault.value for fault in FrameFault)),
)  # fmt: skip
READ_BYTES = _by_tier("kvtier_store_read_bytes_total", _COUNTER, "Payload read from a tier.")
WRITTEN_BYTES = _by_tier("kvtier_store_written_bytes_total", _COUNTER, "Payload written to a tier.")
UP = _by_tier(
    "kvtier_store_tier_state", _GAUGE, "1 for the state that a tier is in.",
    Label("state", tuple(verdict.value for verdict in Verdict)),
)  # fmt: skip
TRIPPED = _by_tier("kvtier_store_breaker_opened_total", _COUNTER, "How often a breaker opened.")
OWED = _by_tier("kvtier_store_drops_pending", _GAUGE, "Drops that a tier could not do yet.")
PROMOTED = _by_tier("kvtier_store_promoted_total", _COUNTER, "Blocks that came up into DRAM.")
DEMOTED = _by_tier("kvtier_store_demoted_total", _COUNTER, "Blocks written below, by that tier.")
DEMOTION_FAILED = _by_tier(
    "kvtier_store_demotions_failed_total", _COUNTER, "Blocks that could not be written below."
)
DROPPED = _by_tier(
    "kvtier_store_dropped_total", _COUNTER, "Copies that the store let go, by reason.",
    Label("reason", _REASONS),
)  # fmt: skip
REFUSED = MetricDef(
    _COUNTER, "kvtier_store_refused_total", "Puts that were refused.", (Label("reason", _REASONS),)
)
MISSES = MetricDef(_COUNTER, "kvtier_store_misses_total", "Blocks asked for that were nowhere.")
JOINS = MetricDef(
    _COUNTER, "kvtier_store_joins_total", "Calls that waited for a block another was moving."
)
DIVERGENT = MetricDef(
    _COUNTER,
    "kvtier_store_divergent_puts_total",
    "Puts of other bytes under a name that was there.",
)
DIVERGENT_COPIES = MetricDef(
    _COUNTER, "kvtier_store_divergent_copies_total", "Copies that found other bytes below."
)
IN_FLIGHT = MetricDef(_GAUGE, "kvtier_store_in_flight_bytes", "Blocks between tiers.")
PINS = MetricDef(_GAUGE, "kvtier_store_pins", "Pins that hold blocks.")
LEASES = MetricDef(_GAUGE, "kvtier_store_leases", "Leases of blocks in shared memory.")
RESERVATIONS = MetricDef(_GAUGE, "kvtier_store_reservations", "Puts of clients elsewhere, begun.")
RESERVATIONS_EXPIRED = MetricDef(
    _COUNTER, "kvtier_store_reservations_expired_total", "Reservations that ended by time."
)
SESSIONS = MetricDef(_GAUGE, "kvtier_store_arena_sessions", "Clients of shared memory.")
QUARANTINED = MetricDef(
    _GAUGE, "kvtier_store_quarantined_slots", "Slots whose writers were given up and may write."
)
SESSIONS_BROKEN = MetricDef(
    _COUNTER, "kvtier_store_arena_broken_total", "Clients cut off for what they said."
)
UNANNOUNCED = MetricDef(
    _COUNTER, "kvtier_store_unannounced_total", "Batches of namespaces beyond the ceiling."
)
DENIED = MetricDef(
    _COUNTER, "kvtier_store_denied_total", "Calls denied, by reason.",
    (Label("reason", tuple(denial.value for denial in Denial)),),
)  # fmt: skip
CALL_SECONDS = MetricDef(
    _HISTOGRAM, "kvtier_store_tier_call_seconds", "Time of calls to a tier.",
    (_TIER, Label("operation", OPERATIONS)), _SECONDS,
)  # fmt: skip

SERVING = MetricDef(
    _GAUGE, "kvtier_store_serving", "1 while a block goes into DRAM and comes out, by trial."
)
TRIALS_FAILED = MetricDef(
    _COUNTER, "kvtier_store_trials_failed_total", "Trials of DRAM that failed or took too long."
)

PEERS = MetricDef(
    _GAUGE, "kvtier_store_peers", "Other stores that were asked, by what they are good for now.",
    (Label("state", PEER_STATES),),
)  # fmt: skip
PEER_FAILURES = MetricDef(
    _COUNTER, "kvtier_store_peer_failures_total", "Calls to other stores without an answer."
)
PEER_CORRUPT = MetricDef(
    _COUNTER, "kvtier_store_peer_corrupt_total", "Bad copies that other stores gave."
)
PEER_UNANSWERED = MetricDef(
    _COUNTER, "kvtier_store_peer_unanswered_total", "Reads for which no index said who has blocks."
)
PEER_QUESTIONS = MetricDef(
    _COUNTER, "kvtier_store_peer_questions_total", "Questions to the index who has blocks."
)

DEFINITIONS: Final = (
    BLOCKS, BYTES, BYTES_MAX, PINNED, RESERVED, GETS, PUTS, REMOVALS, CORRUPT, READ_BYTES,
    WRITTEN_BYTES, UP, TRIPPED, OWED, PROMOTED, DEMOTED, DEMOTION_FAILED, DROPPED, REFUSED, MISSES,
    JOINS, DIVERGENT, DIVERGENT_COPIES, IN_FLIGHT, PINS, LEASES, RESERVATIONS,
    RESERVATIONS_EXPIRED, SESSIONS, QUARANTINED, SESSIONS_BROKEN, UNANNOUNCED, DENIED, CALL_SECONDS,
    SERVING, TRIALS_FAILED, PEERS, PEER_FAILURES, PEER_CORRUPT, PEER_QUESTIONS, PEER_UNANSWERED,
)  # fmt: skip


class Timings:
    """`Latencies` of the store: a histogram for scrapes, and sums for `Stats`."""

    def __init__(self, metrics: Metrics) -> None:
        self.calls: Counter[tuple[Tier, str]] = Counter()
        self.micros: Counter[tuple[Tier, str]] = Counter()
        self._histogram = metrics.histogram(CALL_SECONDS)

    def took(self, tier: Tier, operation: str, seconds: float) -> None:
        """See `Latencies`."""
        self.calls[tier, operation] += 1
        self.micros[tier, operation] += round(1e6 * seconds)
        self._histogram.at(_word(tier), operation).observe(seconds)


def read_from(metrics: Metrics, stats: Callable[[], StoreStats]) -> None:
    """Bind everything that the store and its tiers count themselves. Once."""

    def tiers(definition: MetricDef, read: Callable[[StoreStats, Tier], float]) -> None:
        def readings() -> list[tuple[tuple[str, ...], float]]:
            now = stats()
            return [((_word(tier),), read(now, tier)) for tier in now.tiers]

        metrics.pull(definition, readings)

    tiers(BLOCKS, lambda s, t: s.tiers[t].stats.blocks)
    tiers(BYTES, lambda s, t: s.tiers[t].stats.bytes)
    tiers(BYTES_MAX, lambda s, t: s.tiers[t].stats.bytes_max)
    tiers(PINNED, lambda s, t: s.tiers[t].stats.blocks_pinned)
    tiers(RESERVED, lambda s, t: s.tiers[t].stats.blocks_reserved)
    tiers(READ_BYTES, lambda s, t: s.tiers[t].stats.payload_bytes_read)
    tiers(WRITTEN_BYTES, lambda s, t: s.tiers[t].stats.payload_bytes_written)
    tiers(TRIPPED, lambda s, t: s.tiers[t].tripped_count)
    tiers(OWED, lambda s, t: s.tiers[t].drops_pending)
    tiers(PROMOTED, lambda s, t: s.counts.promoted.get(t, 0))
    tiers(DEMOTED, lambda s, t: s.counts.demoted.get(t, 0))
    tiers(DEMOTION_FAILED, lambda s, t: s.counts.demotions_failed.get(t, 0))
    _read_outcomes(metrics, stats)
    counts: dict[MetricDef, Callable[[StoreStats], float]] = {
        MISSES: lambda s: s.counts.misses,
        JOINS: lambda s: s.counts.joins,
        DIVERGENT: lambda s: s.counts.divergent_puts,
        DIVERGENT_COPIES: lambda s: s.counts.divergent_copies,
        IN_FLIGHT: lambda s: s.in_flight_bytes,
        PINS: lambda s: s.pins,
    }
    for definition, read in counts.items():
        metrics.pull(definition, partial(_one, stats, read))


def _one(stats: Callable[[], StoreStats], read: Callable[[StoreStats], float]) -> Readings:
    return [((), read(stats()))]


def _read_outcomes(metrics: Metrics, stats: Callable[[], StoreStats]) -> None:
    metrics.pull(
        GETS,
        lambda: [
            ((_word(t), status.value), count)
            for t, view in stats().tiers.items()
            for status, count in view.stats.gets.items()
        ],
    )
    metrics.pull(
        PUTS,
        lambda: [
            ((_word(t), status.value), count)
            for t, view in stats().tiers.items()
            for status, count in view.stats.puts.items()
        ],
    )
    metrics.pull(
        REMOVALS,
        lambda: [
            ((_word(t), cause.value), count)
            for t, view in stats().tiers.items()
            for cause, count in view.stats.removals.items()
        ],
    )
    metrics.pull(
        CORRUPT,
        lambda: [
            ((_word(t), fault.value), count)
            for t, view in stats().tiers.items()
            for fault, count in view.stats.corrupt.items()
        ],
    )
    metrics.pull(
        UP,
        lambda: [
            ((_word(t), verdict.value), float(view.verdict is verdict))
            for t, view in stats().tiers.items()
            for verdict in Verdict
        ],
    )
    metrics.pull(
        DROPPED,
        lambda: [
            ((_word(t), reason.value), found.counts.dropped.get((t, reason), 0))
            for found in [stats()]
            for t in found.tiers
            for reason in Reason
        ],
    )
    metrics.pull(
        REFUSED,
        lambda: [((reason.value,), count) for reason, count in stats().counts.refused.items()],
    )


def read_peers(metrics: Metrics, peers: PeerTier | None) -> None:
    """Bind what is known of other stores, nothing where none are asked. Once."""

    def states() -> Readings:
        views = [] if peers is None else [_peer_state(view) for view in peers.peers()]
        return [((state,), views.count(state)) for state in PEER_STATES]

    metrics.pull(PEERS, states)
    metrics.pull(PEER_FAILURES, lambda: [((), 0 if peers is None else peers.failures)])
    metrics.pull(PEER_CORRUPT, lambda: [((), 0 if peers is None else peers.corrupt)])
    metrics.pull(PEER_UNANSWERED, lambda: [((), 0 if peers is None else peers.unanswered)])
    metrics.pull(PEER_QUESTIONS, lambda: [((), 0 if peers is None else peers.questions)])


def _peer_state(view: PeerView) -> str:
    return "left_out" if view.is_left_out else view.state.name.lower()


def read_service(metrics: Metrics, arena: Callable[[], ServerStats], guards: list[Guard]) -> None:
    """Bind what the arena's server and the guards of the ports count. Once."""
    metrics.pull(SESSIONS, lambda: [((), arena().sessions)])
    metrics.pull(QUARANTINED, lambda: [((), arena().quarantined)])
    metrics.pull(SESSIONS_BROKEN, lambda: [((), arena().broken_messages)])
    metrics.pull(
        DENIED,
        lambda: [((d.value,), sum(guard.denials[d] for guard in guards)) for d in Denial],
    )


def _word(tier: Tier) -> str:
    return tier.name.lower()
