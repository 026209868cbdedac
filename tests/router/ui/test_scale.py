"""The feed with 1,000 workers and a full history: every answer is bounded, and true."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from kvtier.limits import (
    HISTORY_EVENTS_COUNT_MAX,
    HISTORY_POINTS_COUNT_MAX,
    HISTORY_REQUESTS_COUNT_MAX,
    PAGE_ROWS_COUNT_MAX,
)
from kvtier.openai.usage import Usage
from kvtier_router.front.history import History
from kvtier_router.routing import RouteAsk, Router, RoutingConfig, static_worker
from kvtier_router.ui.dashboard import Dashboard, DashboardParts
from kvtier_router.ui.feed import Gauges, Who
from kvtier_router.ui.series import POINT_S
from kvtier_router.ui.watching import NO_SIGHT
from tests.router.routing.bench import name
from tests.router.ui.jobs import Ended
from tests.support.virtual_fleet import Clock

WORKERS = 1_000
ANSWER_BYTES_MAX = 400_000


class Large:
    """A dashboard over a large fleet, after an hour of more than anybody keeps."""

    def __init__(self) -> None:
        self.clock, self.history = Clock(), History()
        workers = tuple(
            static_worker(f"w{number}", f"10.0.0.1:{1000 + number}", ["m"])
            for number in range(WORKERS)
        )
        self.router = Router(RoutingConfig(router="r", workers=workers), clock=self.clock)
        nothing = Gauges(0, 0, 0, 0, 0, {}, {}, {}, {})
        who = Who("r", "1", "cache_aware", 0, 1, (), 0.0)
        parts = DashboardParts(
            self.router, NO_SIGHT, self.history, who, lambda: nothing, self.clock, self.clock
        )
        self.dashboard = Dashboard(parts)
        decision = self.router.route(RouteAsk("m", np.arange(4096, dtype=np.uint32)))
        for number in range(HISTORY_REQUESTS_COUNT_MAX + 500):
            ended = Ended(
                request_id=f"request-{number}", decision=decision, usage=Usage(100, 10, 50)
            )
            self.history.add(ended.job(), self.clock(), 0.25)
        for number in range(HISTORY_POINTS_COUNT_MAX + 5):
            self.clock.now += POINT_S
            if number % 2:  # an event in every second look
                self.router.drain(name(number))
            self.dashboard.tick()

    def ask(self, path: str, query: str = "") -> dict[str, Any]:
        reply = asyncio.run(self.dashboard.answer(path, query))
        assert reply.status == 200
        assert len(reply.body) <= ANSWER_BYTES_MAX
        told: dict[str, Any] = json.loads(reply.body)
        return told


@pytest.fixture(scope="module")
def large() -> Large:
    return Large()


def test_the_whole_overview_is_small_and_what_is_new_is_smaller(large: Large) -> None:
    told = large.ask("feed")
    assert len(told["series"]["columns"]["at"]) == HISTORY_POINTS_COUNT_MAX
    assert sum(told["fleet"]["states"].values()) == WORKERS
    assert told["fleet"]["states"]["draining"] == (HISTORY_POINTS_COUNT_MAX + 5) // 2
    assert told["events_count"] <= HISTORY_EVENTS_COUNT_MAX
    last = f"point={told['series']['last']}&event={told['events_count']}"
    fresh = large.ask("feed", last)
    assert fresh["series"]["columns"]["at"] == fresh["events"] == []


def test_the_fleet_comes_in_pages_with_trouble_first(large: Large) -> None:
    seen: list[str] = []
    while len(seen) < WORKERS:
        page = large.ask("fleet", f"offset={len(seen)}&limit=300")
        assert page["count"] == WORKERS
        seen += [row["name"] for row in page["rows"]]
    assert len(set(seen)) == WORKERS
    troubled = large.ask("fleet", "only=trouble&limit=1000")
    assert len(troubled["rows"]) == min(troubled["count"], PAGE_ROWS_COUNT_MAX)
    assert seen[: len(troubled["rows"])] == [row["name"] for row in troubled["rows"]]
    assert {row["state"] for row in troubled["rows"]} == {"draining"}


def test_requests_come_in_pages_and_are_found_among_all_that_are_kept(large: Large) -> None:
    told = large.ask("requests", "limit=100000")
    assert (len(told["rows"]), told["kept"]) == (PAGE_ROWS_COUNT_MAX, HISTORY_REQUESTS_COUNT_MAX)
    oldest = large.ask("requests", "text=request-500")["rows"]
    assert "request-500" in {row["id"] for row in oldest}
    assert large.ask("requests", "text=request-499")["rows"][-1]["id"] != "request-499"


def test_one_request_tells_the_best_candidates_and_how_many_there_were(large: Large) -> None:
    why = large.ask("request", f"number={large.history.count}")
    assert why["candidates_count"] == WORKERS
    assert 1 <= len(why["candidates"]) <= 26
    assert sum(one["chosen"] for one in why["candidates"]) == 1
