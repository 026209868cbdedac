"""Notices what happens to fleet, index and models by comparing once a second, and writes it down.

Nothing tells it: so routing stays as it is, and what comes and goes within a second is not seen.
What must not live here: counting requests (`series`), anything O(blocks).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvtier.core.fleet import HolderInfo, HolderKey
from kvtier.core.workers import HolderView, WorkerName
from kvtier.replica import HolderCensus, ReplicaLag, ReplicaLook
from kvtier.types import HolderId, HolderKind, Trust
from kvtier_router.routing.values import RoutingBrain
from kvtier_router.ui.journal import Journal, Level

MODELS_S: Final = 5.0
"""Between two looks at the models, which cost more."""
_STARTING_S: Final = 10.0
"""Who is met within so long of the first was there already: told as one event."""
_BUSY: Final = "busy"
_TROUBLES: Final = {
    "draining": (Level.INFO, "worker drains", "worker takes requests again"),
    "breaker": (Level.BAD, "breaker opened", "breaker closed"),
    "ejected": (Level.BAD, "worker ejected", "worker readmitted"),
}


@dataclass(frozen=True, slots=True)
class IndexSight:
    """What can be seen of the index; each part is None where there is none of it."""

    mode: str
    """embedded, remote, or none."""
    targets: tuple[str, ...] = ()
    look: Callable[[], ReplicaLook] | None = None
    lag: Callable[[], ReplicaLag] | None = None
    census: Callable[[], tuple[HolderCensus, ...]] | None = None


NO_SIGHT: Final = IndexSight("none")


class _Known(NamedTuple):
    """A holder as it was a second ago."""

    info: HolderInfo
    is_hidden: bool
    trust: Trust


class Watcher:
    """See the module. Belongs to one event loop."""

    def __init__(self, brain: RoutingBrain, sight: IndexSight, journal: Journal) -> None:
        self._brain = brain
        self._sight = sight
        self._journal = journal
        self._holders: dict[HolderKey, _Known] = {}
        self._picture: Mapping[HolderId, HolderView] | None = None
        self._first_at: float | None = None
        self._troubles: dict[WorkerName, str] = {}
        self._is_fresh = False
        self._was_followed = False
        self._epoch = 0
        self._target = ""
        self._causes: dict[str, str] = {}
        self._models_at = float("-inf")

    def tick(self, now: float) -> None:
        """Look at everything once. O(holders), about a microsecond each."""
        if self._sight.look is not None:
            look = self._sight.look()
            self._compare_index(look, now)
            self._compare_holders(look, now)
        self._compare_troubles(now)
        if now - self._models_at >= MODELS_S:
            self._models_at = now
            self._compare_models(now)

    # ---- the index

    def _compare_index(self, look: ReplicaLook, now: float) -> None:
        is_fresh = look.trust is Trust.EXACT
        if is_fresh != self._is_fresh:
            if is_fresh:
                kind = "index returned" if self._was_followed else "index followed"
                self._journal.note(now, Level.GOOD, kind, self._followed())
                self._was_followed = True
            else:
                self._journal.note(
                    now, Level.BAD, "index lost", self._target,
                    "routing goes on with what was known; its credit fades",
                )  # fmt: skip
            self._is_fresh = is_fresh
        if self._sight.lag is None or not is_fresh:
            return
        lag = self._sight.lag()
        if self._epoch and lag.index_epoch != self._epoch:
            self._journal.note(
                now, Level.WARNING, "index replaced", lag.target, "another index, or restarted"
            )
        self._epoch, self._target = lag.index_epoch, lag.target

    def _followed(self) -> str:
        return self._sight.lag().target if self._sight.lag is not None else ""

    # ---- holders

    def _compare_holders(self, look: ReplicaLook, now: float) -> None:
        is_same_picture = look.holders is self._picture
        self._picture = look.holders
        known, current = self._holders, dict[HolderKey, _Known]()
        joined: list[HolderView] = []
        for view in look.holders.copy().values():
            key, info = view.info.key, view.info
            before = known.get(key)
            current[key] = _Known(info, view.is_hidden, view.trust)
            if before is None:
                joined.append(view)
            elif before.info is not info or before[1:] != (view.is_hidden, view.trust):
                self._changed(before, view, is_same_picture, now)
        self._joined(joined, now)
        for key in known.keys() - current.keys():
            self._journal.note(now, Level.BAD, f"{_word(key.kind)} left", _name(known[key].info))
        self._holders = current

    def _joined(self, views: list[HolderView], now: float) -> None:
        if not views:
            return
        if self._first_at is None:
            self._first_at = now
        if now - self._first_at < _STARTING_S and len(views) > 2:
            self._journal.note(now, Level.INFO, "holders found", f"{len(views)} holders")
            return
        for view in views:
            where = f"on {view.info.node}" if view.info.node else ""
            self._journal.note(
                now, Level.GOOD, f"{_word(view.info.kind)} joined", _name(view.info), where
            )

    def _changed(self, before: _Known, view: HolderView, is_same: bool, now: float) -> None:
        word, name = _word(view.info.kind), _name(view.info)
        if before.info is not view.info and (is_same or before.info != view.info):
            detail = "" if before.info == view.info else "and describes itself anew"
            self._journal.note(now, Level.WARNING, f"{word} restarted", name, detail)
        if before.is_hidden != view.is_hidden:
            if view.is_hidden:
                self._journal.note(now, Level.BAD, f"{word} fell silent", name, "its lease ran out")
            else:
                self._journal.note(now, Level.GOOD, f"{word} was heard again", name)
        if before.trust is not view.trust:
            if view.trust is Trust.DEGRADED:
                reason = view.degraded_reason
                self._journal.note(now, Level.WARNING, f"{word} is DEGRADED", name, reason)
            else:
                self._journal.note(now, Level.GOOD, f"{word} is EXACT again", name)

    # ---- workers and models as this router sees them

    def _compare_troubles(self, now: float) -> None:
        before, current = self._troubles, self._brain.troubled()
        for worker in before.keys() | current.keys():
            old, new = before.get(worker, ""), current.get(worker, "")
            if old == new or _BUSY in (old, new):  # an overload passes within seconds
                continue
            name = _shown(worker)
            if new:
                level, kind, _ = _TROUBLES.get(new, (Level.WARNING, new, ""))
                self._journal.note(now, level, kind, name)
            else:
                kind = _TROUBLES.get(old, (Level.GOOD, "", f"no longer {old}"))[2]
                self._journal.note(now, Level.GOOD, kind, name)
        self._troubles = current

    def _compare_models(self, now: float) -> None:
        causes = {report.name: report.cause for report in self._brain.models()}
        for name, cause in causes.items():
            before = self._causes.get(name, "")
            if cause and not before:
                self._journal.note(now, Level.WARNING, "model is DEGRADED", name, cause)
            elif before and not cause:
                self._journal.note(now, Level.GOOD, "model is EXACT again", name)
        self._causes = causes


def _word(kind: HolderKind) -> str:
    return "shared Redis" if kind is HolderKind.SHARED else kind.name.lower()


def _name(info: HolderInfo) -> str:
    return f"{info.instance}/{info.dp_rank}" if info.dp_rank else str(info.instance)


def _shown(worker: WorkerName) -> str:
    return f"{worker.instance}/{worker.dp_rank}" if worker.dp_rank else str(worker.instance)
