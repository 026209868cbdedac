"""What the page and `kvtier top` read, as plain values: overview, fleet, requests, one request.

Every answer is bounded: lists come in pages, and what costs O(workers) is remembered for a moment
however many look. What must not live here: HTTP, prompt text.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Final

from kvtier.errors import NotFoundError
from kvtier.limits import PAGE_ROWS_COUNT_MAX
from kvtier_router.front.history import History, Seen
from kvtier_router.routing.values import Candidate, ModelReport, RoutingBrain
from kvtier_router.ui.holders import Line, finite, lines_of, summary, tiers
from kvtier_router.ui.journal import Journal
from kvtier_router.ui.series import POINT_S, Counts, Series
from kvtier_router.ui.watching import IndexSight

MODELS_COUNT_MAX: Final = 200
EVENTS_COUNT_MAX: Final = 200
CANDIDATES_COUNT_MAX: Final = 25
_STEP: Final = 256
"""Requests that are looked at before others have their turn."""
REMEMBERED_S: Final = 1.0
_COUNT_NAMES: Final = tuple(one.name for one in fields(Counts))

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Who:
    """Which router, and which of its processes, speaks."""

    instance: str
    version: str
    policy: str
    process: int
    processes: int
    admin_ports: tuple[int, ...]
    """Of all processes, where they are known."""
    started_at: float
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the front counts itself."""

    running: int
    queued: int
    connections: int
    queue_refused: int
    queue_expired: int
    retries: dict[str, int]
    resumptions: dict[str, int]
    losses: dict[str, int]
    turned_away: dict[str, int]


@dataclass(frozen=True, slots=True)
class FeedParts:
    """What is read."""

    brain: RoutingBrain
    sight: IndexSight
    history: History
    series: Series
    journal: Journal
    who: Who
    gauges: Callable[[], Gauges]
    clock: Callable[[], float]
    wall: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Asked:
    """Which rows of a list are wanted."""

    limit: int
    offset: int = 0
    before: int = 0
    """Only requests numbered below; 0: all."""
    text: str = ""
    """Only rows with this in one of their names."""
    only: str = ""
    """`trouble` or `errors`: only those; else all."""


class Feed:
    """See the module. Belongs to the router's event loop."""

    def __init__(self, parts: FeedParts) -> None:
        self._parts = parts
        self._lines: list[Line] = []
        self._lines_at = float("-inf")
        self._models_known: list[ModelReport] = []
        self._models_at = float("-inf")

    # ---- overview

    def overview(self, point: int, event: int) -> Json:
        """Everything that is small. Points numbered above `point`, events above `event`."""
        parts, now = self._parts, self._parts.clock()
        lines = self._fleet(now)
        models = self._models(now)
        return {
            "router": self._router(now),
            "index": self._index(),
            "fleet": summary(lines),
            "tiers": tiers(lines),
            "models_count": len(models),
            "models": [
                {
                    "name": report.name,
                    "workers": report.workers_count,
                    "eligible": report.eligible_count,
                    "is_adapter": report.is_adapter,
                    "cause": report.cause,
                    "token_mismatches": report.token_mismatches,
                    "hit_mismatches": report.hit_mismatches,
                    "responses": report.responses,
                }
                for report in models[:MODELS_COUNT_MAX]
            ],
            "totals": asdict(parts.series.total),
            "gauges": asdict(parts.gauges()),
            "requests_kept": len(parts.history),
            "series": self._series(point, now),
            "events": self._events(event, now),
            "events_count": parts.journal.count,
        }

    def _router(self, now: float) -> Json:
        parts, who = self._parts, self._parts.who
        return {
            "instance": who.instance,
            "version": who.version,
            "policy": who.policy,
            "process": who.process,
            "processes": who.processes,
            "admin_ports": list(who.admin_ports),
            "up_s": round(now - who.started_at, 1),
            "now": round(parts.wall(), 3),
        }

    def _index(self) -> Json:
        sight = self._parts.sight
        shown: Json = {"mode": sight.mode, "targets": list(sight.targets)}
        if sight.look is not None:
            look = sight.look()
            shown |= {"trust": look.trust.value, "age_s": finite(look.age_s)}
        if sight.lag is not None:
            lag = sight.lag()
            shown |= {"target": lag.target, "position": lag.position}
            shown["epoch"] = f"{lag.index_epoch:016x}"
        return shown

    def _series(self, point: int, now: float) -> Json:
        """Columns: they are a third of the size of objects."""
        points = list(self._parts.series.after(point))
        to_wall = self._parts.wall() - now
        columns: dict[str, list[object]] = {
            "at": [round(one.ended_at + to_wall, 1) for one in points],
            "running": [one.running for one in points],
            "queued": [one.queued for one in points],
        }
        for name in _COUNT_NAMES:
            columns[name] = [getattr(one.counts, name) for one in points]
        for place, name in enumerate(("ttft_p50_s", "ttft_p95_s", "ttft_p99_s")):
            columns[name] = [
                None if one.ttft_s is None else round(one.ttft_s[place], 5) for one in points
            ]
        return {"point_s": POINT_S, "last": self._parts.series.count, "columns": columns}

    def _events(self, event: int, now: float) -> list[Json]:
        to_wall = self._parts.wall() - now
        found: list[Json] = []
        for one in self._parts.journal.after(event):
            if len(found) >= EVENTS_COUNT_MAX:
                break
            found.append(
                {
                    "number": one.number,
                    "at": round(one.at + to_wall, 3),
                    "level": one.level.value,
                    "kind": one.kind,
                    "subject": one.subject,
                    "detail": one.detail,
                }
            )
        return found

    # ---- fleet

    def fleet(self, asked: Asked) -> Json:
        """A page of holders: those in trouble first, workers before others, then by name."""
        lines = self._fleet(self._parts.clock())
        if asked.only == "trouble":
            lines = [line for line in lines if line.in_trouble]
        if asked.text:
            wanted = asked.text.casefold()
            lines = [line for line in lines if line.mentions(wanted)]
        start = max(0, asked.offset)
        page = lines[start : start + _bounded(asked.limit)]
        names = [line.worker for line in page if line.worker is not None]
        reports = {report.worker: report for report in self._parts.brain.workers(names)}
        now = self._parts.clock()
        rows = [line.row(now, None if line.worker is None else reports.get(line.worker))
                for line in page]  # fmt: skip
        return {"count": len(lines), "offset": start, "rows": rows}

    def _fleet(self, now: float) -> list[Line]:
        """A line a holder, remembered for a second. O(holders)."""
        if now - self._lines_at >= REMEMBERED_S:
            brain, census = self._parts.brain, self._parts.sight.census
            self._lines = lines_of(
                brain.worker_names(), brain.troubled(), () if census is None else census()
            )
            self._lines_at = now
        return self._lines

    def _models(self, now: float) -> list[ModelReport]:
        """Models, those in trouble first; remembered as well."""
        if now - self._models_at >= REMEMBERED_S:
            reports = self._parts.brain.models()
            self._models_known = sorted(reports, key=lambda one: (not one.cause, one.name))
            self._models_at = now
        return self._models_known

    # ---- requests

    async def requests(self, asked: Asked) -> Json:
        """A page of requests, the newest first. O(kept) where they are searched, in small steps."""
        parts = self._parts
        to_wall = parts.wall() - parts.clock()
        limit, text = _bounded(asked.limit), asked.text.casefold()
        rows: list[Json] = []
        for looked_at, seen in enumerate(parts.history.below(asked.before)):
            if looked_at % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            if asked.only == "errors" and 200 <= seen.status < 400 and not seen.error:
                continue
            if text and not _mentions(seen, text):
                continue
            rows.append(_request(seen, to_wall))
            if len(rows) >= limit:
                break
        return {"count": parts.history.count, "kept": len(parts.history), "rows": rows}

    def request(self, number: int) -> Json:
        """One request with what it was decided on. NotFoundError where it is not kept (any more).

        O(workers) native, and CANDIDATES_COUNT_MAX rows of Python.
        """
        parts = self._parts
        seen = parts.history.find(number)
        if seen is None:
            raise NotFoundError(f"request {number} is not kept")
        basis = parts.history.basis(number)
        rows: tuple[Candidate, ...] = () if basis is None else basis.rows(CANDIDATES_COUNT_MAX)
        return {
            **_request(seen, parts.wall() - parts.clock()),
            "candidates": [_without_infinity(row.as_json()) for row in rows],
            "candidates_count": 0 if basis is None else basis.rows_count,
        }


# ---- rows


def _request(seen: Seen, to_wall: float) -> Json:
    usage, told = seen.usage, seen.told
    shown: Json = {
        "number": seen.number,
        "at": round(seen.at + to_wall, 3),
        "id": seen.request_id,
        "api": seen.api.value,
        "model": seen.model,
        "tenant": seen.tenant,
        "status": seen.status,
        "error": seen.error,
        "attempts": seen.attempts,
        "resumed": seen.resumed,
        "prompt_tokens": seen.prompt_tokens,
        "ttft_s": finite(seen.ttft_s),
        "total_s": finite(seen.total_s),
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        "worker": "",
    }
    if told is not None:
        shown |= {
            "worker": told.worker.instance,
            "dp_rank": told.worker.dp_rank,
            "policy": told.policy.value,
            "knowledge": told.knowledge.value,
            "cause": told.cause,
            "matched_tokens": {
                source.name.lower(): count for source, count in told.matched_tokens.items()
            },
            "matched_count": seen.matched_tokens,
            "reused_tokens": told.reused_tokens,
            "predicted_ttft_s": finite(told.predicted_ttft_s),
            "decided_in_s": finite(told.decided_in_s),
        }
    return shown


def _mentions(seen: Seen, text: str) -> bool:
    worker = "" if seen.told is None else seen.told.worker.instance
    names: Iterable[str] = (seen.request_id, seen.model, seen.tenant, worker, seen.error)
    return str(seen.status) == text or any(text in name.casefold() for name in names)


def _without_infinity(row: Json) -> Json:
    return {
        key: None if isinstance(value, float) and not isfinite(value) else value
        for key, value in row.items()
    }


def _bounded(limit: int) -> int:
    return max(1, min(limit, PAGE_ROWS_COUNT_MAX))
