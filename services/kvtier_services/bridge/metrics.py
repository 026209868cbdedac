"""The metrics of a bridge: one table, read from its ranks at each scrape.

What must not live here: counting that the ranks already do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from kvtier.core.engine_events import EventFault, Unindexed
from kvtier.core.engine_sequence import Doubt
from kvtier.telemetry.metrics import Label, MetricDef, MetricKind, Metrics, Readings
from kvtier.types import Trust
from kvtier_services.bridge.feed import FeedFault
from kvtier_services.bridge.follower import Follower
from kvtier_services.bridge.load import LoadReader
from kvtier_services.bridge.memory import BridgeMemory
from kvtier_services.bridge.publishing import Speaker
from kvtier_services.bridge.rank import EngineRank, Source
from kvtier_services.bridge.resolver import Outcome

W = TypeVar("W", bound=StrEnum)

_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE
_STATES: Final = ("absent", "exact", "degraded")

RANKS: Final = MetricDef(
    _GAUGE, "kvtier_bridge_ranks", "Ranks of the engine, by whether what they hold is known.",
    (Label("state", _STATES),),
)  # fmt: skip
SOURCES: Final = MetricDef(
    _GAUGE, "kvtier_bridge_sources", "Ranks, by who says what they hold.",
    (Label("source", tuple(source.value for source in Source)),),
)  # fmt: skip
FEED_FAULTS: Final = MetricDef(
    _COUNTER, "kvtier_bridge_connector_refused_total", "Connectors not listened to, by why.",
    (Label("reason", tuple(fault.value for fault in FeedFault)),),
)  # fmt: skip
RESOLVED: Final = MetricDef(
    _COUNTER, "kvtier_bridge_store_lookups_total", "Digests that the store was asked for.",
    (Label("outcome", tuple(outcome.value for outcome in Outcome)),),
)  # fmt: skip
DOUBTS: Final = MetricDef(
    _GAUGE, "kvtier_bridge_doubts", "Ranks of which it is not known what they hold, by reason.",
    (Label("reason", tuple(doubt.value for doubt in Doubt)),),
)  # fmt: skip
DOUBTED: Final = MetricDef(
    _COUNTER, "kvtier_bridge_doubted_total", "How often ranks came to be in doubt, by reason.",
    (Label("reason", tuple(doubt.value for doubt in Doubt)),),
)  # fmt: skip
MESSAGES: Final = MetricDef(
    _COUNTER, "kvtier_bridge_messages_total", "Messages of the engine, by what became of them.",
    (Label("outcome", ("applied", "replayed", "duplicate")),),
)  # fmt: skip
SEQUENCE: Final = MetricDef(
    _COUNTER, "kvtier_bridge_sequence_total", "What happened to the order of messages.",
    (Label("event", ("gap", "lost", "restart", "replay_asked")),),
)  # fmt: skip
EVENTS: Final = MetricDef(_COUNTER, "kvtier_bridge_events_total", "Events applied.")
UNDECODABLE: Final = MetricDef(
    _COUNTER, "kvtier_bridge_events_undecodable_total", "Events that could not be read, by why.",
    (Label("reason", tuple(fault.value for fault in EventFault)),),
)  # fmt: skip
INDEXED: Final = MetricDef(_COUNTER, "kvtier_bridge_blocks_indexed_total", "Stored blocks told.")
UNINDEXED: Final = MetricDef(
    _COUNTER, "kvtier_bridge_blocks_unindexed_total", "Stored blocks not told, by why.",
    (Label("reason", tuple(reason.value for reason in Unindexed)),),
)  # fmt: skip
ODDITIES: Final = MetricDef(
    _COUNTER, "kvtier_bridge_oddities_total", "Blocks of which something odd was said.",
    (Label("kind", ("unknown_removal", "contradiction", "overflow")),),
)  # fmt: skip
RESIDENTS: Final = MetricDef(_GAUGE, "kvtier_bridge_resident_blocks", "Blocks that are followed.")
PENDING: Final = MetricDef(
    _GAUGE, "kvtier_bridge_pending_tokens", "Tokens of blocks whose parent was never seen."
)
KNOWN: Final = MetricDef(
    _GAUGE, "kvtier_bridge_known_keys", "Engine hashes whose prefix key is known."
)
MEMORY: Final = MetricDef(
    _COUNTER, "kvtier_bridge_memory_total", "What happened to what outlives the bridge.",
    (Label("event", ("save", "failure", "bad_row", "discard")),),
)  # fmt: skip
LOAD_FAILURES: Final = MetricDef(
    _COUNTER, "kvtier_bridge_load_failures_total", "Times that the engine did not tell its load."
)
UNSAVED: Final = MetricDef(
    _GAUGE, "kvtier_bridge_unsaved_steps", "Steps that a bridge that is killed now takes again."
)
PUBLISHED: Final = MetricDef(
    _GAUGE, "kvtier_bridge_published_copies", "Copies of blocks that indexes are told of."
)

DEFINITIONS: Final = (
    RANKS, SOURCES, FEED_FAULTS, RESOLVED, DOUBTS, DOUBTED, MESSAGES, SEQUENCE, EVENTS,
    UNDECODABLE, INDEXED, UNINDEXED, ODDITIES, RESIDENTS, PENDING, KNOWN, MEMORY, UNSAVED,
    PUBLISHED, LOAD_FAILURES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parts:
    """Whom the table is read from."""

    follower: Follower
    memory: BridgeMemory
    speaker: Speaker
    reader: LoadReader


def read_from(metrics: Metrics, parts: Parts) -> None:
    """Bind the table. Once. Read while the ranks' thread counts on: each number is whole."""
    follower, memory, speaker = parts.follower, parts.memory, parts.speaker

    def total(count: Callable[[EngineRank], int]) -> int:
        return sum(count(rank) for rank in follower.ranks)

    def each(words: Iterable[W], count: Callable[[EngineRank, W], int]) -> Readings:
        return [((w.value,), sum(count(rank, w) for rank in follower.ranks)) for w in words]

    def states() -> Readings:
        found = [_state(rank) for rank in follower.ranks]
        return [((state,), found.count(state)) for state in _STATES]

    pull = metrics.pull
    pull(RANKS, states)
    pull(SOURCES, lambda: each(Source, lambda rank, source: rank.source is source))
    pull(FEED_FAULTS, lambda: [
        ((fault.value,), sum(feed.faults[fault] for feed in follower.feeds.values()))
        for fault in FeedFault
    ])  # fmt: skip
    pull(RESOLVED, lambda: [
        ((outcome.value,), follower.resolver.outcomes[outcome]) for outcome in Outcome
    ])  # fmt: skip
    pull(DOUBTS, lambda: each(Doubt, lambda rank, doubt: doubt in rank.doubts))
    pull(DOUBTED, lambda: each(Doubt, lambda rank, doubt: rank.doubted[doubt]))
    pull(MESSAGES, lambda: [
        (("applied",), total(lambda rank: rank.tracker.counts.applied)),
        (("replayed",), total(lambda rank: rank.tracker.counts.replayed)),
        (("duplicate",), total(lambda rank: rank.tracker.counts.duplicates)),
    ])  # fmt: skip
    pull(SEQUENCE, lambda: [
        (("gap",), total(lambda rank: rank.tracker.counts.gaps)),
        (("lost",), total(lambda rank: rank.tracker.counts.lost)),
        (("restart",), total(lambda rank: rank.tracker.counts.restarts)),
        (("replay_asked",), total(lambda rank: rank.tracker.counts.replays)),
    ])  # fmt: skip
    pull(EVENTS, lambda: [((), total(lambda rank: rank.events))])
    pull(UNDECODABLE, lambda: each(EventFault, lambda rank, fault: rank.faults[fault]))
    pull(INDEXED, lambda: [((), total(lambda rank: rank.holdings.counts.indexed))])
    pull(UNINDEXED, lambda: each(
        Unindexed, lambda rank, reason: rank.holdings.counts.unindexed[reason]
    ))  # fmt: skip
    pull(ODDITIES, lambda: [
        (("unknown_removal",), total(lambda rank: rank.holdings.counts.unknown_removals)),
        (("contradiction",), total(lambda rank: rank.holdings.counts.contradictions)),
        (("overflow",), total(lambda rank: rank.holdings.counts.overflows)),
    ])  # fmt: skip
    pull(RESIDENTS, lambda: [((), total(lambda rank: rank.holdings.residents_count))])
    pull(PENDING, lambda: [((), total(lambda rank: rank.holdings.pending_tokens))])
    pull(KNOWN, lambda: [((), len(follower.known))])
    pull(MEMORY, lambda: [
        (("save",), memory.counts.saves),
        (("failure",), memory.counts.failures),
        (("bad_row",), memory.counts.bad_rows),
        (("discard",), memory.counts.discards),
    ])  # fmt: skip
    pull(UNSAVED, lambda: [((), total(lambda rank: rank.unsaved))])
    pull(LOAD_FAILURES, lambda: [((), parts.reader.failures)])
    pull(PUBLISHED, lambda: [((), sum(one.copies_count for one in speaker.stats()))])


def _state(rank: EngineRank) -> str:
    if not rank.is_joined:
        return "absent"
    return "exact" if rank.trust is Trust.EXACT else "degraded"
