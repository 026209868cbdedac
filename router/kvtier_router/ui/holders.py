"""The fleet as the dashboard lists it: a light line a holder, and a full row for those on a page.

What must not live here: requests, events.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from kvtier.core.prefix_index import TIERS_OF_KIND
from kvtier.core.workers import HolderView, WorkerName
from kvtier.replica import HolderCensus
from kvtier.types import HOLDER_TIERS, HolderKind, Trust
from kvtier_router.routing.values import WorkerReport

Json = dict[str, object]

_NAMES_COUNT_MAX = 8
"""Served names of one worker that are told."""


class Line(NamedTuple):
    """One holder; making it costs about a microsecond."""

    kind: str
    name: str
    worker: WorkerName | None
    """None for a store or a shared Redis."""
    state: str
    """As Candidate.state; `candidate` for a store that is there."""
    view: HolderView | None
    """None where no index speaks of it."""
    copies: tuple[int, int, int, int]
    block_bytes: int

    @property
    def is_degraded(self) -> bool:
        """Whether the index knows less of it than it has, or may."""
        return self.view is not None and self.view.trust is Trust.DEGRADED

    @property
    def in_trouble(self) -> bool:
        """Whether an operator should look."""
        return self.state != "candidate" or self.is_degraded

    def mentions(self, text: str) -> bool:
        """Whether one of its names has `text`, which is case-folded, in it."""
        names = [self.name, self.kind, self.state]
        if self.view is not None:
            info = self.view.info
            card = info.card
            names += [info.node, info.addresses.http, info.store, self.view.degraded_reason]
            names += [] if card is None else card.served_names
        return any(text in name.casefold() for name in names)

    def row(self, now: float, report: WorkerReport | None) -> Json:
        """All that is told of it."""
        row: Json = {"name": self.name, "kind": self.kind, "state": self.state, "dp_rank": 0,
                     "node": "", "store": "", "address": "", "models": [], "trust": "unknown",
                     "cause": "", "heard_s": None, "tiers": {}}  # fmt: skip
        if self.view is not None:
            row |= self._seen(self.view, now)
        if report is not None:
            row |= {
                "state": report.state,
                "node": report.node,
                "address": report.address,
                "models": list(report.served_names[:_NAMES_COUNT_MAX]),
                "dp_rank": report.worker.dp_rank,
                "in_flight": report.requests_in_flight,
                "waiting_tokens": report.waiting_prefill_tokens,
                "prefill_tokens_per_s": finite(report.prefill_tokens_per_s),
                "ramp": finite(report.ramp),
            }
        return row

    def _seen(self, view: HolderView, now: float) -> Json:
        info = view.info
        is_worker = info.kind is HolderKind.WORKER
        return {
            "dp_rank": info.dp_rank,
            "node": info.node,
            "store": info.store,
            "address": info.addresses.http or info.addresses.grpc,
            "models": [] if info.card is None else list(info.card.served_names[:_NAMES_COUNT_MAX]),
            "trust": view.trust.value,
            "cause": view.degraded_reason,
            "heard_s": round(max(0.0, now - view.heard_at), 1) if is_worker else None,
            "tiers": self.held(),
        }

    def held(self) -> dict[str, dict[str, int]]:
        """By tier: blocks, their bytes, and the capacity as far as it was told (0: was not)."""
        if self.view is None:
            return {}
        info = self.view.info
        capacities = {one.tier: one for one in info.capacities}
        found = {}
        for tier in TIERS_OF_KIND[info.kind]:
            capacity = capacities.get(tier)
            if capacity is None and not self.copies[tier]:
                continue
            blocks_max = 0 if capacity is None else capacity.blocks
            bytes_max = 0 if capacity is None else capacity.bytes
            found[tier.name.lower()] = {
                "blocks": self.copies[tier],
                "bytes": self.copies[tier] * self.block_bytes,
                "blocks_max": blocks_max,
                "bytes_max": bytes_max or blocks_max * self.block_bytes,
            }
        return found


def lines_of(
    names: Sequence[WorkerName],
    troubles: Mapping[WorkerName, str],
    census: Sequence[HolderCensus],
) -> list[Line]:
    """Everybody that router or index know of, those in trouble first. O(n log n)."""
    sizes = {
        one.view.info.namespace: one.view.info.block_bytes
        for one in census
        if one.view.info.kind is HolderKind.WORKER
    }  # a store does not say how large blocks are; the workers that wrote them do
    left = set(names)
    lines = []
    for view, copies in census:
        info = view.info
        worker = view.name if info.kind is HolderKind.WORKER else None
        state = "hidden" if view.is_hidden else "candidate"
        if worker is not None:
            left.discard(worker)
            state = troubles.get(worker, state)
        block_bytes = info.block_bytes or sizes.get(info.namespace, 0)
        kind = info.kind.name.lower()
        lines.append(Line(kind, info.instance, worker, state, view, copies, block_bytes))
    for worker in left:  # those that only the configuration names
        state = troubles.get(worker, "candidate")
        lines.append(Line("worker", worker.instance, worker, state, None, (0, 0, 0, 0), 0))
    lines.sort(key=lambda line: (not line.in_trouble, line.kind != "worker", line.name))
    return lines


def summary(lines: Sequence[Line]) -> Json:
    """How many there are of each kind; of workers by state; of all by trust."""
    return {
        "kinds": Counter(line.kind for line in lines),
        "states": Counter(line.state for line in lines if line.worker is not None),
        "in_trouble": sum(line.in_trouble for line in lines),
        "degraded": sum(line.is_degraded for line in lines),
    }


def tiers(lines: Sequence[Line]) -> list[Json]:
    """What each tier has over all holders. One store is a holder a namespace: its capacity counts
    once."""
    sums: dict[str, Counter[str]] = {}
    capacities: dict[tuple[str, str, object], tuple[int, int]] = {}
    for line in lines:
        for tier, held in line.held().items():
            count = sums.setdefault(tier, Counter())
            count["holders"] += 1
            count["degraded"] += line.is_degraded
            count["blocks"] += held["blocks"]
            count["bytes"] += held["bytes"]
            key = (tier, line.name, line.worker)
            before = capacities.get(key, (0, 0))
            found = held["blocks_max"], held["bytes_max"]
            capacities[key] = (max(before[0], found[0]), max(before[1], found[1]))
    for (tier, _, _), (blocks, size) in capacities.items():
        sums[tier]["blocks_max"] += blocks
        sums[tier]["bytes_max"] += size
    names = ("holders", "degraded", "blocks", "bytes", "blocks_max", "bytes_max")
    return [
        {"tier": word, **{name: sums[word][name] for name in names}}
        for word in (tier.name.lower() for tier in HOLDER_TIERS)
        if word in sums
    ]


def finite(value: float | None) -> float | None:
    """A number that JSON has, to the microsecond; None for the others."""
    return round(value, 6) if value is not None and isfinite(value) else None
