"""The shared Redis as a holder of its own, `redis:<id>`: who announces it, and when to look. Pure.

The blocks of a shared Redis outlive the node that wrote them, so they must not hang on any node's
event stream; and a holder's stream has one publisher (an epoch, a sequence). Hence:

- **One announcer.** The stores that share a Redis compete for a lock in it (SET NX PX, prolonged by
  compare under WATCH). Whoever holds it publishes the holder under a new epoch; an index takes a
  new epoch for everything of the old, and fences the old one. So two announcers at a time, which a
  lock with a TTL cannot exclude (one is stopped while its term ends; the server evicts the lock or
  fails over), cost a resend and never a wrong set for long.
- **It takes over whole.** Where an announcer ended without a goodbye (killed, cut off) an index
  shows what it said until the index's own lease ends, which may be long after the lock's term. A
  successor that began at once would replace that by the little it knows itself. So it first counts:
  until its census is complete, `patience_s` at most, the index shows the old list, then the new one
  in one step. Namespaces that were announced before and are empty now it says to be empty; which
  ones those were stands in the Redis (`announced`). After a goodbye an index shows nothing, nothing
  stands there, and the successor begins with what it knows, growing until its census is complete.
- **It learns by SCAN, not by being told.** The census finds what every node wrote, dead ones
  included, and what the server evicted, by one mechanism that needs no cooperation, no log that
  must be trimmed and no server setting. The announcer's own traffic is known at once; of others it
  hears within a census. (Stores could instead announce what *they* wrote: then blocks of a dead
  node leave the index, which is what this holder is for; or write a log of puts into the Redis: it
  says nothing of evictions, so the census is needed anyway.)
- **It looks when there is reason.** A census is due every `census_s`, and at once where the
  server's counters say that more than `drift_max` of what is believed may be wrong: keys evicted
  since the last census began, or found missing in the sample (EXISTS of `sample_count` random names
  every `look_s`). Another run id (restart, failover) or an empty database (FLUSHALL) clears the
  belief at once: a failover may have lost everything, and a census brings back what it did not.
- **The id** is drawn by whoever comes first and stored in the server; if the server loses it, those
  who know it put it back. Other databases of one server are other holders.

Only blocks named by prefix keys are announced: the index does not know engine digests.

What must not live here: I/O, time, epochs and sequences (kvtier.core.publication).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, TypeAlias

from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError
from kvtier.tiers.redis.belief import Belief
from kvtier.types import Fingerprint, PrefixHash

_HASH_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class HolderPolicy:
    """How often to look, and what it may cost."""

    look_s: float = 1.0
    """Between two looks: the lock, the counters, one sample."""
    sample_count: int = 64
    census_s: float = 30.0
    drift_max: float = 0.005
    """Share of the belief that may be wrong before a census is due at once."""
    lock_ttl_s: float = 5.0
    page_count: int = 512
    """Keys that the server looks at for one page of SCAN, in one go."""
    pages_per_look: int = 200
    """Of a census: 100,000 keys a second with these defaults."""
    patience_s: float = 10.0
    """A census that takes longer is not waited for: what the predecessor said is hidden by then
    (an index's lease is 3 s by default), and a part is better than nothing."""

    def __post_init__(self) -> None:
        counts = (self.sample_count, self.page_count, self.pages_per_look)
        if min(counts) < 1 or max(counts) > 1 << 16:
            raise CallerError("the counts of a HolderPolicy must be in [1, 65536]")
        if not 0 < 2 * self.look_s < self.lock_ttl_s < inf:
            raise CallerError("a HolderPolicy needs 0 < 2 * look_s < lock_ttl_s")
        if not 0 < self.census_s < inf or not 0 < self.drift_max < 1:
            raise CallerError("a HolderPolicy needs census_s > 0 and drift_max in (0, 1)")
        if not 0 <= self.patience_s < inf:
            raise CallerError("a HolderPolicy needs a finite patience_s")


class Standing(StrEnum):
    """What this store is for the holder."""

    BYSTANDER = "bystander"
    """Another store announces, or nobody yet."""
    CANDIDATE = "candidate"
    """It has the lock and its first census is not complete: what it announces is not all."""
    ANNOUNCER = "announcer"


@dataclass(frozen=True, slots=True)
class Began:
    """Publish the holder from now on, under a new epoch; what follows is all that is known."""

    holder_id: str


@dataclass(frozen=True, slots=True)
class Stored:
    """These blocks can be had from the Redis."""

    namespace: Fingerprint
    hashes: tuple[PrefixHash, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These can no longer."""

    namespace: Fingerprint
    hashes: tuple[PrefixHash, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """The first census is over: the streams say everything from here on.

    These namespaces were announced by the predecessor and have no block any more: a new epoch of
    each, without blocks, takes back what an index may still show of them.
    """

    emptied: tuple[Fingerprint, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """Publish no more, and take nothing back: another announces, or will."""


HolderEvent: TypeAlias = Began | Stored | Removed | Completed | Ended


class SharedHolder:
    """Decides who announces and when to look, over one store's belief. Every method is told `now`
    where it needs it, and nothing waits.
    """

    def __init__(self, belief: Belief, policy: HolderPolicy) -> None:
        self._belief = belief
        self._policy = policy
        self._holder_id: str | None = None
        self._term_ends_s = -inf
        self._is_complete = False
        self._announced: set[FrameName] = set()
        self._events: list[HolderEvent] = []
        self._is_announcing = False
        self._is_begun = False
        """Whether anything of this term was said."""
        self._inherited: frozenset[Fingerprint] = frozenset()
        self._took_s = -inf
        self._run_id = ""
        self._census_began_s = -inf
        self._is_counting = False
        self._evicted_then = 0
        self._evicted_now = 0
        self._missing_share = 0.0

    def standing(self) -> Standing:
        """As of the last call that was told the time."""
        if not self._is_announcing:
            return Standing.BYSTANDER
        return Standing.ANNOUNCER if self._is_complete else Standing.CANDIDATE

    @property
    def is_counting(self) -> bool:
        """Whether a census is under way."""
        return self._is_counting

    def on_lock(
        self,
        holder_id: str,
        *,
        asked_s: float,
        is_ours: bool,
        inherited: Iterable[Fingerprint] = (),
    ) -> None:
        """The lock was asked for at `asked_s`, before the question left. Mutates.

        `inherited` are the namespaces that an announcer left which said no goodbye.
        """
        if self._is_announcing and (not is_ours or holder_id != self._holder_id):
            self._end()
        self._holder_id = holder_id
        if not is_ours:
            return
        self._term_ends_s = asked_s + self._policy.lock_ttl_s
        if not self._is_announcing:
            self._is_announcing = True
            self._is_complete = self._is_begun = False
            self._inherited = frozenset(inherited)
            self._took_s = asked_s
            self._census_began_s = -inf
            self._announced = set()
            self._belief.record_changes()
            if not self._inherited:
                self._begin()

    def on_time(self, now: float) -> None:
        """End a term that was not prolonged in time, or a wait that was too long. Mutates."""
        if self._is_announcing and now >= self._term_ends_s:
            self._end()
        elif self._is_announcing and now - self._took_s >= self._policy.patience_s:
            self._begin()

    def on_server(self, run_id: str, keys_count: int, evicted_count: int) -> list[FrameName]:
        """The server's counters: return what is thereby known to be lost. Mutates."""
        is_other = bool(self._run_id) and run_id != self._run_id
        self._run_id = run_id
        self._evicted_now = evicted_count
        if is_other:
            self._evicted_then = 0
        if is_other or (keys_count == 0 and len(self._belief)):
            self._census_began_s = -inf
            return self._belief.clear()
        if keys_count < len(self._belief):
            self._missing_share = max(
                self._missing_share, 1.0 - keys_count / max(1, len(self._belief))
            )
        return []

    def on_sampled(self, asked: int, missing: int) -> None:
        """Of a random sample so many were missing (and are removed already). Mutates."""
        if asked:
            self._missing_share = max(self._missing_share, missing / asked)

    def is_census_due(self, now: float) -> bool:
        """Whether to begin one now: only the one that announces does."""
        if not self._is_announcing or self._is_counting:
            return False
        evicted = self._evicted_now - self._evicted_then
        drift_max = self._policy.drift_max
        return (
            now - self._census_began_s >= self._policy.census_s
            or evicted > drift_max * len(self._belief)
            or self._missing_share > drift_max
        )

    def begin_census(self, now: float) -> None:
        """A SCAN begins. Mutates."""
        self._is_counting = True
        self._census_began_s = now
        self._evicted_then = self._evicted_now
        self._missing_share = 0.0
        self._belief.begin_census()

    def end_census(self) -> list[FrameName]:
        """The SCAN is complete: return what is lost. Mutates."""
        self._is_counting = False
        lost = self._belief.end_census()
        if self._is_announcing and not self._is_complete:
            self._is_complete = True
            self._begin()
            self._publish_changes()
            emptied = self._inherited - self._belief.namespaces()
            self._events.append(Completed(tuple(sorted(emptied))))
        return lost

    def abandon_census(self) -> None:
        """The SCAN broke off; another is due at once. Mutates."""
        self._is_counting = False
        self._census_began_s = -inf
        self._belief.abandon_census()

    def poll(self) -> list[HolderEvent]:
        """What to publish, in order: the net changes since the last call. Mutates; O(changes)."""
        if self._is_begun:
            self._publish_changes()
        events, self._events = self._events, []
        return events

    def _begin(self) -> None:
        if not self._is_begun:
            assert self._holder_id is not None
            self._is_begun = True
            self._events.append(Began(self._holder_id))

    def _publish_changes(self) -> None:
        changed = [n for n in self._belief.take_changes() if n.key_kind is KeyKind.PREFIX_KEY]
        stored = [n for n in changed if n in self._belief and n not in self._announced]
        removed = [n for n in changed if n not in self._belief and n in self._announced]
        self._announced.update(stored)
        self._announced.difference_update(removed)
        for namespace, hashes in _by_namespace(removed).items():
            self._events.append(Removed(namespace, hashes))
        for namespace, hashes in _by_namespace(stored).items():
            self._events.append(Stored(namespace, hashes))

    def _end(self) -> None:
        self._is_announcing = self._is_complete = False
        self._term_ends_s = -inf
        self._announced = set()
        self._belief.stop_recording()
        if not self._is_begun:
            return
        self._is_begun = False
        # What was not polled yet is of no use to anybody: the successor says everything.
        unsaid = [event for event in self._events if isinstance(event, Began | Ended)][:1]
        self._events = [] if unsaid and isinstance(unsaid[0], Began) else [Ended()]


def prefix_hash(name: FrameName) -> PrefixHash:
    """What the index knows the block by: the first 8 bytes of its prefix key."""
    return PrefixHash(int.from_bytes(name.key[:_HASH_BYTES], "little"))


def _by_namespace(names: Iterable[FrameName]) -> dict[Fingerprint, tuple[PrefixHash, ...]]:
    found: dict[Fingerprint, list[PrefixHash]] = {}
    for name in names:
        found.setdefault(name.namespace, []).append(prefix_hash(name))
    return {namespace: tuple(hashes) for namespace, hashes in found.items()}
