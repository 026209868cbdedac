"""The metrics of the index service: one table, most of it read from the state at each scrape.

What must not live here: counting that the state already does.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from kvtier.core.events import Verdict
from kvtier.core.prefix_index import MatchResult
from kvtier.core.reservations import ReserveVerdict
from kvtier.security import Denial, Guard
from kvtier.telemetry.metrics import Label, MetricDef, MetricKind, Metrics, Readings
from kvtier.types import HOLDER_TIERS, HolderKind, Trust
from kvtier_services.index.broadcast import Broadcast
from kvtier_services.index.state import IndexState

Clock = Callable[[], float]

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_SECONDS: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 5e-2, 0.25, 1.0)
_TIER: Final = Label("tier", tuple(tier.name.lower() for tier in HOLDER_TIERS))
_KIND: Final = Label("kind", tuple(kind.name.lower() for kind in HolderKind))
_STATE: Final = Label("state", ("exact", "degraded", "hidden"))

EVENTS = MetricDef(
    _COUNTER,
    "kvtier_index_messages_total",
    "Messages of publishers by what they turned out to be.",
    (Label("verdict", tuple(verdict.value for verdict in Verdict)),),
)
APPLIED = MetricDef(_COUNTER, "kvtier_index_events_applied_total", "Events applied.")
STORED = MetricDef(_COUNTER, "kvtier_index_blocks_stored_total", "Copies of blocks stored.")
REMOVED = MetricDef(_COUNTER, "kvtier_index_blocks_removed_total", "Copies of blocks removed.")
UNRESOLVED = MetricDef(
    _COUNTER,
    "kvtier_index_events_unresolved_total",
    "Blocks of events that changed nothing, by reason.",
    (Label("reason", ("unknown_block", "undecodable")),),
)
EVICTED = MetricDef(
    _COUNTER, "kvtier_index_blocks_evicted_total", "Holdings evicted for the byte budget."
)
REFUSED = MetricDef(
    _COUNTER,
    "kvtier_index_refused_total",
    "Publishers refused or cut off, by reason.",
    (Label("reason", ("contradiction", "holder_full")),),
)
DENIED = MetricDef(
    _COUNTER,
    "kvtier_index_denied_total",
    "Calls denied, by reason.",
    (Label("reason", tuple(denial.value for denial in Denial)),),
)
BLOCKS = MetricDef(_GAUGE, "kvtier_index_blocks", "Distinct blocks in the index.")
HOLDINGS = MetricDef(_GAUGE, "kvtier_index_holdings", "Copies of blocks per tier.", (_TIER,))
BYTES = MetricDef(_GAUGE, "kvtier_index_bytes", "Native memory of the prefix index.")
NODES = MetricDef(_GAUGE, "kvtier_index_nodes", "Pages of the prefix index.")
HOLDERS = MetricDef(_GAUGE, "kvtier_index_holders", "Holders by kind and state.", (_KIND, _STATE))
FOLLOWERS = MetricDef(_GAUGE, "kvtier_index_followers", "Replicas that follow this index.")
POSITION = MetricDef(_COUNTER, "kvtier_index_position_total", "Changes since this process began.")
STREAMS = MetricDef(
    _GAUGE,
    "kvtier_index_streams",
    "Open streams by method.",
    (Label("method", ("publish", "snapshot", "watch")),),
)
LAGGED = MetricDef(
    _COUNTER, "kvtier_index_receivers_cut_off_total", "Receivers cut off because they lagged."
)
QUERIED = MetricDef(_COUNTER, "kvtier_index_queried_blocks_total", "Blocks asked for by Match.")
MATCHED = MetricDef(
    _COUNTER, "kvtier_index_matched_blocks_total", "Blocks that the best worker of a query holds."
)
MATCH_SECONDS = MetricDef(
    _HISTOGRAM, "kvtier_index_match_seconds", "Time of the queries of a Match.", (), _SECONDS
)
APPLY_SECONDS = MetricDef(
    _HISTOGRAM, "kvtier_index_apply_seconds", "Time to take in one message.", (), _SECONDS
)
RESERVATIONS = MetricDef(
    _COUNTER,
    "kvtier_index_reservations_total",
    "Reservations by verdict.",
    (Label("verdict", tuple(verdict.value for verdict in ReserveVerdict)),),
)

DEFINITIONS: Final = (
    EVENTS, APPLIED, STORED, REMOVED, UNRESOLVED, EVICTED, REFUSED, DENIED, BLOCKS, HOLDINGS, BYTES,
    NODES, HOLDERS, FOLLOWERS, POSITION, STREAMS, LAGGED, QUERIED, MATCHED, MATCH_SECONDS,
    APPLY_SECONDS, RESERVATIONS,
)  # fmt: skip


class IndexMetrics:
    """Counts what only the service sees, and lets the rest be read when it is scraped."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.queried_blocks_count = 0
        self.matched_blocks_count = 0
        self._metrics = metrics
        self._clock = clock
        self._streams = metrics.gauge(STREAMS)
        self._lagged = metrics.counter(LAGGED).at()
        self.match_took = metrics.tally(MATCH_SECONDS).observe
        self._apply_tally = metrics.tally(APPLY_SECONDS)
        self._reservations = metrics.counter(RESERVATIONS)
        metrics.pull(QUERIED, lambda: [((), self.queried_blocks_count)])
        metrics.pull(MATCHED, lambda: [((), self.matched_blocks_count)])

    def read_from(self, state: IndexState, broadcast: Broadcast, guard: Guard) -> None:
        """Bind everything that the state, the broadcast and the guard count themselves. Once."""
        counts, pull = state.counts, self._metrics.pull
        pull(EVENTS, lambda: [((v.value,), counts.verdicts[v]) for v in Verdict])
        pull(APPLIED, lambda: [((), counts.events_applied)])
        pull(STORED, lambda: [((), counts.blocks_stored)])
        pull(REMOVED, lambda: [((), counts.blocks_removed)])
        pull(
            UNRESOLVED,
            lambda: [
                (("unknown_block",), counts.blocks_unknown),
                (("undecodable",), counts.verdicts[Verdict.UNDECODABLE]),
            ],
        )
        pull(EVICTED, lambda: [((), counts.blocks_evicted)])
        pull(REFUSED, lambda: [((reason,), count) for reason, count in counts.refused.items()])
        pull(DENIED, lambda: [((d.value,), count) for d, count in guard.denials.items()])
        pull(BLOCKS, lambda: [((), state.fleet.index.stats().blocks)])
        pull(BYTES, lambda: [((), state.fleet.index.stats().bytes)])
        pull(NODES, lambda: [((), state.fleet.index.stats().pages)])
        pull(HOLDINGS, lambda: _holdings(state))
        pull(HOLDERS, lambda: _holders(state))
        pull(FOLLOWERS, lambda: [((), len(broadcast.followers))])
        pull(POSITION, lambda: [((), broadcast.position)])

    @contextlib.contextmanager
    def open_stream(self, method: str) -> Iterator[None]:
        gauge = self._streams.at(method)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def apply_took(self, seconds: float, count: int) -> None:
        """`count` messages were taken in together: each is given an equal share of the time."""
        if count:
            self._apply_tally.observe(seconds / count, count)

    def matched(self, result: MatchResult) -> None:
        self.queried_blocks_count += result.blocks_queried
        self.matched_blocks_count += result.blocks_found

    def reserved(self, verdict: ReserveVerdict) -> None:
        self._reservations.at(verdict.value).inc()

    def cut_off(self) -> None:
        self._lagged.inc()


def _holdings(state: IndexState) -> Readings:
    for record in state.fleet.records():
        for shard in record.shards:
            for tier, count in state.held((record.holder, shard)).items():
                yield (tier.name.lower(),), count


def _holders(state: IndexState) -> Readings:
    for record in state.fleet.records():
        trust, _ = state.trust(record.holder)
        word = "hidden" if record.hidden else ("exact" if trust is Trust.EXACT else "degraded")
        yield (record.key.kind.name.lower(), word), 1.0
