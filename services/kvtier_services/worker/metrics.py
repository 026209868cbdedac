"""The metrics of a worker's engine: one table, nearly all of it read at a scrape.

What must not live here: the endpoint's (`http.metrics`), counting that the core already does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier.ports import GetStatus
from kvtier.telemetry.metrics import Label, MetricDef, MetricKind, Metrics, Readings
from kvtier.types import Source
from kvtier_services.worker.core import EngineCore, StepDone
from kvtier_services.worker.l2.prefetch import PrefetchCounts

_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_SECONDS: Final = (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
_SOURCES: Final = (Source.DRAM, Source.NVME, Source.REDIS, Source.PEER)

STEPS: Final = MetricDef(_COUNTER, "kvtier_worker_steps_total", "Runs of the model.")
STEP_SECONDS: Final = MetricDef(
    _HISTOGRAM, "kvtier_worker_step_seconds", "Time of a run of the model.",
    (Label("kind", ("decode", "prefill", "mixed")),), _SECONDS,
)  # fmt: skip
FIRST_TOKEN_SECONDS: Final = MetricDef(
    _HISTOGRAM, "kvtier_worker_first_token_seconds", "From submit to the first token.", (), _SECONDS
)
REQUESTS: Final = MetricDef(
    _COUNTER, "kvtier_worker_requests_total", "Requests, by what became of them.",
    (Label("outcome", ("accepted", "finished", "cancelled")),),
)  # fmt: skip
RUNNING: Final = MetricDef(
    _GAUGE, "kvtier_worker_live_requests", "Requests now, by state.",
    (Label("state", ("running", "waiting", "loading")),),
)  # fmt: skip
PROMPT_TOKENS: Final = MetricDef(
    _COUNTER, "kvtier_worker_prompt_tokens_total", "Tokens of accepted prompts."
)
COMPUTED_TOKENS: Final = MetricDef(
    _COUNTER, "kvtier_worker_computed_tokens_total",
    "Tokens that were computed: prompts and generated ones, again after a preemption.",
)  # fmt: skip
GENERATED_TOKENS: Final = MetricDef(
    _COUNTER, "kvtier_worker_generated_tokens_total", "Tokens that were generated."
)
PREEMPTED: Final = MetricDef(
    _COUNTER, "kvtier_worker_preempted_total", "Requests that gave their blocks to others."
)
STARVED: Final = MetricDef(
    _COUNTER, "kvtier_worker_starved_total", "Parts of steps left out because the pool was full."
)
BLOCKS: Final = MetricDef(
    _GAUGE, "kvtier_worker_blocks", "Blocks of the pool, by state.",
    (Label("state", ("free", "cached", "used")),),
)  # fmt: skip
WASTED_TOKENS: Final = MetricDef(
    _GAUGE, "kvtier_worker_wasted_tokens", "Places in blocks of requests that hold nothing yet."
)
LOOKUPS: Final = MetricDef(
    _COUNTER, "kvtier_worker_lookups_total", "Questions to the store, by outcome.",
    (Label("outcome", ("known", "unknown")),),
)  # fmt: skip
LOADED: Final = MetricDef(
    _COUNTER, "kvtier_worker_loaded_blocks_total", "Blocks loaded, by source.",
    (Label("source", tuple(source.name.lower() for source in _SOURCES)),),
)  # fmt: skip
LOADED_BYTES: Final = MetricDef(
    _COUNTER, "kvtier_worker_loaded_bytes_total", "KV loaded from the tiers below."
)
NOT_LOADED: Final = MetricDef(
    _COUNTER, "kvtier_worker_load_failures_total",
    "Blocks that a load did not bring, by why; all were recomputed.",
    (Label("reason", tuple(status.value for status in GetStatus if status is not GetStatus.HIT)),),
)  # fmt: skip
GIVEN_UP: Final = MetricDef(
    _COUNTER, "kvtier_worker_loads_given_up_total", "Loads whose request went on without them."
)
AHEAD: Final = MetricDef(
    _COUNTER, "kvtier_worker_computed_ahead_blocks_total",
    "Blocks computed while those behind them were loaded.",
)  # fmt: skip
BY_CHOICE: Final = MetricDef(
    _COUNTER, "kvtier_worker_recomputed_by_choice_total",
    "Blocks that the store has and that were computed because that was faster.",
)  # fmt: skip
SAVES: Final = MetricDef(
    _COUNTER, "kvtier_worker_saved_blocks_total", "Blocks written to the store, by outcome.",
    (Label("outcome", ("saved", "refused", "failed", "missed")),),
)  # fmt: skip
SAVES_WAITING: Final = MetricDef(
    _GAUGE, "kvtier_worker_saves_waiting", "Blocks that are to be written, by state.",
    (Label("state", ("queued", "in_flight")),),
)  # fmt: skip
HOT_SET: Final = MetricDef(
    _COUNTER, "kvtier_worker_hot_set_blocks_total",
    "Blocks of the hot set when the worker was to end: in the store already, or queued for it.",
    (Label("outcome", ("held", "queued")),),
)  # fmt: skip
HOT_SET_LEFT: Final = MetricDef(
    _GAUGE, "kvtier_worker_hot_set_left_blocks", "Blocks in the list left for the successor."
)
PREFETCHED: Final = MetricDef(
    _COUNTER, "kvtier_worker_prefetched_blocks_total",
    "Blocks of a predecessor's hot set, by outcome, before this worker was ready.",
    (Label("outcome", ("loaded", "absent", "left_out")),),
)  # fmt: skip
ATTACHED: Final = MetricDef(
    _GAUGE, "kvtier_worker_store_attached", "1 while KV goes through shared memory."
)
PREFILL_SPEED: Final = MetricDef(
    _GAUGE, "kvtier_worker_prefill_tokens_per_second", "Measured speed of prefill."
)
LOAD_SPEED: Final = MetricDef(
    _GAUGE, "kvtier_worker_load_bytes_per_second", "Measured speed of loads, by source.",
    (Label("source", tuple(source.name.lower() for source in _SOURCES)),),
)  # fmt: skip
AUDITS: Final = MetricDef(
    _COUNTER, "kvtier_worker_audits_total", "Requests that were computed to audit the store."
)
AUDITED: Final = MetricDef(
    _COUNTER, "kvtier_worker_audit_blocks_total",
    "Stored blocks that were computed again and compared, by outcome.",
    (Label("outcome", ("equal", "differs", "unread")),),
)  # fmt: skip
WRITER: Final = MetricDef(
    _GAUGE, "kvtier_worker_writer_info", "1, under the id that marks this worker's blocks.",
    (Label("writer", values_count_max=1),),
)  # fmt: skip
EVENTS_FENCED: Final = MetricDef(
    _GAUGE, "kvtier_worker_events_fenced", "1 once another process speaks for this worker."
)

TABLE: Final = (
    STEPS, STEP_SECONDS, FIRST_TOKEN_SECONDS, REQUESTS, RUNNING, PROMPT_TOKENS, COMPUTED_TOKENS,
    GENERATED_TOKENS, PREEMPTED, STARVED, BLOCKS, WASTED_TOKENS, LOOKUPS, LOADED, LOADED_BYTES,
    NOT_LOADED, GIVEN_UP, AHEAD, BY_CHOICE, SAVES, SAVES_WAITING, HOT_SET, HOT_SET_LEFT, PREFETCHED,
    AUDITS, AUDITED, WRITER, ATTACHED, PREFILL_SPEED, LOAD_SPEED, EVENTS_FENCED,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Looks:
    """What is read at a scrape besides the core."""

    writer: str
    """Id that blocks are written under; empty without a store."""
    is_attached: Callable[[], bool]
    is_fenced: Callable[[], bool]
    now: Callable[[], float]


class WorkerMetrics:
    """TABLE, bound. The readings are of another thread's numbers, each one whole."""

    def __init__(self, metrics: Metrics, core: EngineCore, looks: Looks) -> None:
        steps = metrics.histogram(STEP_SECONDS)
        self._by_kind = {kind: steps.at(kind) for kind in ("decode", "prefill", "mixed")}
        self.first_token = metrics.histogram(FIRST_TOKEN_SECONDS).at()
        self._core = core
        _pull_counts(metrics, core)
        _pull_offload(metrics, core)
        metrics.pull(WRITER, lambda: [((looks.writer,), 1.0)] if looks.writer else [])
        metrics.pull(ATTACHED, lambda: [((), float(looks.is_attached()))])
        metrics.pull(EVENTS_FENCED, lambda: [((), float(looks.is_fenced()))])
        metrics.pull(PREFILL_SPEED, lambda: [((), _prefill_speed(core, looks.now()))])
        metrics.pull(LOAD_SPEED, lambda: _load_speeds(core, looks.now()))

    def stepped(self, done: StepDone) -> None:
        """Observe one step; on the engine's thread."""
        kind = "decode" if not done.prefill_tokens else "mixed" if done.decodes_count else "prefill"
        self._by_kind[kind].observe(done.seconds)


def _pull_counts(metrics: Metrics, core: EngineCore) -> None:
    counts, scheduler = core.counts, core.scheduler
    simple: dict[MetricDef, Callable[[], float]] = {
        STEPS: lambda: counts.steps,
        PROMPT_TOKENS: lambda: counts.prompt_tokens,
        COMPUTED_TOKENS: lambda: counts.computed_tokens,
        GENERATED_TOKENS: lambda: counts.generated_tokens,
        PREEMPTED: lambda: scheduler.counts.preempted,
        STARVED: lambda: scheduler.counts.starved,
        BY_CHOICE: lambda: scheduler.counts.recomputed_by_choice,
        WASTED_TOKENS: lambda: core.wasted_tokens,
    }
    for definition, read in simple.items():
        metrics.pull(definition, _single(read))
    metrics.pull(
        REQUESTS,
        lambda: [
            (("accepted",), counts.requests),
            (("finished",), counts.finished),
            (("cancelled",), counts.cancelled),
        ],
    )
    metrics.pull(
        RUNNING,
        lambda: [
            (("running",), scheduler.running_count),
            (("waiting",), scheduler.waiting_count),
            (("loading",), scheduler.loading_count),
        ],
    )

    def blocks() -> Readings:
        usage = core.usage()
        return [
            (("free",), usage.free_count),
            (("cached",), usage.idle_count),
            (("used",), usage.in_use_count),
        ]

    metrics.pull(BLOCKS, blocks)


def _pull_offload(metrics: Metrics, core: EngineCore) -> None:
    offload = core.offload
    if offload is None:
        for definition in (
            LOOKUPS, LOADED, NOT_LOADED, SAVES, SAVES_WAITING, HOT_SET, PREFETCHED, AUDITED,
        ):  # fmt: skip
            metrics.pull(definition, list)
        for definition in (LOADED_BYTES, GIVEN_UP, AHEAD, AUDITS):
            metrics.pull(definition, lambda: [((), 0)])
        return
    counts, lookups, saves = offload.counts, offload.lookups, offload.saves
    metrics.pull(
        LOOKUPS,
        lambda: [
            (("known",), lookups.lookups - lookups.lookups_unknown),
            (("unknown",), lookups.lookups_unknown),
        ],
    )
    metrics.pull(
        LOADED,
        lambda: [((s.name.lower(),), n) for s, n in list(counts.blocks_loaded.items())],
    )
    metrics.pull(NOT_LOADED, lambda: [((r,), n) for r, n in list(counts.blocks_not_loaded.items())])
    metrics.pull(LOADED_BYTES, lambda: [((), counts.bytes_loaded)])
    metrics.pull(GIVEN_UP, lambda: [((), counts.loads_given_up)])
    metrics.pull(AHEAD, lambda: [((), counts.computed_ahead_blocks)])
    metrics.pull(
        SAVES,
        lambda: [
            (("saved",), saves.counts.saved),
            (("refused",), saves.counts.refused),
            (("failed",), saves.counts.failed),
            (("missed",), saves.counts.missed),
        ],
    )
    audited = offload.audits.counts
    metrics.pull(AUDITS, lambda: [((), audited.requests)])
    metrics.pull(
        AUDITED,
        lambda: [
            (("equal",), audited.equal),
            (("differs",), audited.differs),
            (("unread",), audited.unread),
        ],
    )
    hot = offload.hot
    metrics.pull(HOT_SET, lambda: [(("held",), hot.counts.held), (("queued",), hot.counts.offered)])
    metrics.pull(PREFETCHED, lambda: _prefetched(hot.prefetched))
    metrics.pull(
        SAVES_WAITING,
        lambda: [(("queued",), saves.backlog_count), (("in_flight",), saves.in_flight_count)],
    )


def _prefetched(counts: PrefetchCounts) -> Readings:
    left_out = counts.listed - counts.absent - counts.loaded
    return [
        (("loaded",), counts.loaded),
        (("absent",), counts.absent),
        (("left_out",), left_out),
    ]


def _single(read: Callable[[], float]) -> Callable[[], Readings]:
    return lambda: [((), read())]


def _prefill_speed(core: EngineCore, now: float) -> float:
    return 1024 / core.advisor.prefill_s(1024, 0, now)


def _load_speeds(core: EngineCore, now: float) -> Readings:
    loads = core.advisor.speeds(now).loads
    return [((source.name.lower(),), 1.0 / loads[source].second_s) for source in _SOURCES]
