"""What the connector counts, on vLLM's own `/metrics`: `vllm:kvtier_<name>_total`.

Scheduler and workers hand over what they counted since they were asked last; vLLM sums it up over
its ranks, so that what workers count is blocks of one rank's shard.
What must not live here: the counting (scheduling.py, transfers.py).
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvtier.engines.vllm.scheduling import SchedulerCounts
from kvtier.engines.vllm.transfers import TransferCounts

COUNTERS: Final = {
    "looked": "Blocks of prompts that the store was asked for",
    "held": "Blocks that the store had of those",
    "loads_ordered": "Blocks that were to be loaded",
    "loads_failed": "Loads that brought no block",
    "loads_not_worth_it": "Loads that were not begun, because computing is faster",
    "lookups_unanswered": "Lookups without an answer in time",
    "saves_ordered": "Blocks that were to be saved",
    "loaded": "Blocks that were loaded",
    "not_loaded": "Blocks that were to be loaded and were computed",
    "load_s": "Seconds of loads",
    "saved": "Blocks that the store took",
    "not_saved": "Blocks that the store did not take",
    "dropped": "Blocks that were not saved because the staging memory was full",
    "save_s": "Seconds of saves",
}
"""By the fields of the counts."""


class Increments:
    """What was counted since the last question. One thread."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def of(self, counts: SchedulerCounts | TransferCounts) -> "KvtierStats | None":
        """None where nothing was."""
        now: dict[str, float] = asdict(counts)
        new = {name: n - self._told.get(name, 0) for name, n in now.items()}
        new = {name: n for name, n in new.items() if n}
        self._told = now
        return KvtierStats(data=new) if new else None


class KvtierStats(KVConnectorStats):
    """Increments by name."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KvtierStats":
        for name, n in other.data.items():
            self.data[name] = self.data.get(name, 0) + n
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KvtierMetrics(KVConnectorPromMetrics):
    """The counters of every engine behind one API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvtier_{name}", documentation=meaning, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: Mapping[str, float], engine_idx: int = 0) -> None:
        for name, n in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(n)
