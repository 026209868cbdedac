"""Puts the operator's view together: one object that a router makes, ticks and asks for pages.

What must not live here: any of its parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier_router.front.history import History
from kvtier_router.routing.values import RoutingBrain
from kvtier_router.ui.feed import Feed, FeedParts, Gauges, Who
from kvtier_router.ui.journal import Journal, Level
from kvtier_router.ui.pages import Pages
from kvtier_router.ui.series import Series
from kvtier_router.ui.watching import IndexSight, Watcher
from kvtier_router.web.values import Reply

WATCH_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class DashboardParts:
    """What it looks at."""

    brain: RoutingBrain
    sight: IndexSight
    history: History
    who: Who
    gauges: Callable[[], Gauges]
    clock: Callable[[], float]
    wall: Callable[[], float]


class Dashboard:
    """See the module. Belongs to the router's event loop."""

    def __init__(self, parts: DashboardParts) -> None:
        now = parts.clock()
        self._parts = parts
        self._journal = Journal()
        self._series = Series(parts.history, now)
        self._watcher = Watcher(parts.brain, parts.sight, self._journal)
        self._due_at = now
        feed = Feed(
            FeedParts(
                brain=parts.brain,
                sight=parts.sight,
                history=parts.history,
                series=self._series,
                journal=self._journal,
                who=parts.who,
                gauges=parts.gauges,
                clock=parts.clock,
                wall=parts.wall,
            )
        )
        self._pages = Pages(feed)
        who = parts.who
        process = f"process {who.process + 1} of {who.processes}" if who.processes > 1 else ""
        self._journal.note(now, Level.INFO, "router started", who.instance, process)

    def tick(self) -> None:
        """Watch, at most once a second; call it often."""
        now = self._parts.clock()
        if now < self._due_at:
            return
        self._due_at = now + WATCH_S
        gauges = self._parts.gauges()
        self._series.take(now, gauges.running, gauges.queued)
        self._watcher.tick(now)

    async def answer(self, path: str, query: str) -> Reply:
        """See Pages."""
        return await self._pages.answer(path, query)
