"""Whether a request is split: its prompt computed by one worker, its answer by another.

Both ways have a cost in the seconds of `core.scoring`, and the cheaper one is taken. What splitting
saves is above all the time of those who decode: a prompt that is computed among them holds every
one of them up, so its compute time counts once for each. What it costs is the transfer, at what the
decode worker's loads were measured to take, and the wait until the blocks are written. What must
not live here: sending anything, whether a request can be split by its form (front/splitting.py).
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final

from kvtier.core.workers import WorkerName
from kvtier.errors import ConfigError, UnavailableError
from kvtier.limits import PROMPT_TOKENS_MAX
from kvtier.types import Role
from kvtier_router.routing.comparing import Compared
from kvtier_router.routing.roster import Member
from kvtier_router.routing.router import Router
from kvtier_router.routing.values import (
    Clock,
    Knowledge,
    Policy,
    Prefilled,
    PromptKind,
    RouteAsk,
    RouteDecision,
)

HOP_S: Final = 0.003
"""One more request: connection, header, tokenising."""
TAIL_S: Final = 0.01
"""Believed of the wait for the last blocks to be written before one was seen."""
_TAIL_WEIGHT: Final = 0.1
_USED_SHARE_MIN: Final = 0.5
"""A decode worker that took less of what was prefilled cannot get at it, or had better compute."""
_REST_S_MIN, _REST_S_MAX = 10.0, 600.0
_PAIRS_COUNT_MAX: Final = 4096


class SplitMode(StrEnum):
    """When requests are split."""

    AUTO = "auto"
    """When it costs less, where there are workers with a role of their own."""
    NEVER = "never"
    ALWAYS = "always"
    """Whenever it can be done and a block is left to compute; for tests and comparisons."""


class SplitReason(StrEnum):
    """Why a request is split, or is not."""

    COST = "cost"
    ALWAYS = "always"
    CHEAPER = "cheaper"
    """Whole costs less."""
    SHORT = "short"
    """Too little is left to compute: a short prompt, or one whose worker has its beginning."""
    NO_WORKER = "no_worker"
    """Nobody takes one of the halves now."""
    SAME_WORKER = "same_worker"
    """One worker is the best for both."""
    APART = "apart"
    """The second worker cannot get at what the first one writes, or did not when it was tried."""
    BLIND = "blind"
    """No tokens of the model, no index, or a policy that goes by neither."""


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """See `SplitMode`; `tokens_min` are what must be left to compute under AUTO."""

    mode: SplitMode = SplitMode.AUTO
    tokens_min: int = 512

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_min <= PROMPT_TOKENS_MAX:
            raise ConfigError(f"split_tokens_min must be in 1..{PROMPT_TOKENS_MAX}")


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What is to be done with one request, and why. Costs are None where none decided."""

    is_split: bool
    reason: SplitReason
    whole_s: float | None = None
    split_s: float | None = None
    prefill: WorkerName | None = None
    decode: WorkerName | None = None

    def as_json(self) -> dict[str, object]:
        """For `POST /route`."""
        return {
            "split": self.is_split,
            "reason": self.reason.value,
            "whole_cost_s": _rounded(self.whole_s),
            "split_cost_s": _rounded(self.split_s),
            "prefill_worker": None if self.prefill is None else self.prefill.instance,
            "decode_worker": None if self.decode is None else self.decode.instance,
        }


@dataclass(slots=True)
class _Rest:
    until: float
    pause_s: float


class Splitter:
    """Decides, and remembers between which stores splitting was of no use."""

    def __init__(self, router: Router, policy: SplitPolicy, clock: Clock) -> None:
        self._router = router
        self._policy = policy
        self._clock = clock
        self._tail_s = {True: TAIL_S, False: TAIL_S}
        """By whether both halves have one store."""
        self._resting: dict[tuple[str, str], _Rest] = {}

    def is_on(self, served_name: str) -> bool:
        """Whether requests for a name may be split at all. O(1). NotFoundError."""
        return self._policy.mode is not SplitMode.NEVER and self._router.has_roles(served_name)

    def plan(self, ask: RouteAsk) -> SplitPlan | None:
        """What to do with a whole request; None where splitting is out of the question: it is off,
        or no worker has a role. Reserves nothing. NotFoundError for a name that nobody serves.

        O(workers), vectorised, up to three times; O(1) for a fleet without roles.
        """
        if not self.is_on(ask.served_name):
            return None
        if ask.kind is not PromptKind.TOKENS:
            return SplitPlan(False, SplitReason.BLIND)
        if len(ask.tokens) <= self._tokens_min(1):
            return SplitPlan(False, SplitReason.SHORT)
        try:
            return self._weighed(ask)
        except UnavailableError:
            return SplitPlan(False, SplitReason.NO_WORKER)

    def prefilled(self, decision: RouteDecision, tokens: int) -> Prefilled:
        """What a prefill half left, of which its worker says that `tokens` are in its store;
        nothing where that worker has left."""
        member = self._member(decision.worker)
        if member is None:
            return Prefilled(decision.worker, "", b"", decision.target.pool, 0)
        return _left_by(member, tokens)

    def is_known(self, ask: RouteAsk, prefilled: Prefilled, decode: WorkerName) -> bool:
        """Whether a worker that is to go on can find what was prefilled: it lies in its own store,
        or the index says by now where it is."""
        member = self._member(decode)
        if member is None or member.store == prefilled.store:
            return True
        wanted = prefilled.tokens - prefilled.pool.block_tokens
        return self._router.held_by(ask, decode) >= wanted

    def stored(self, prefilled: Prefilled, decode: WorkerName, wait_s: float) -> None:
        """Learn from a prefill half: how long it took from the last token computed until the
        worker that was to go on could find it."""
        if not prefilled.tokens:
            self._rest((prefilled.store, ""))
            return
        member = self._member(decode)
        together = member is None or member.store == prefilled.store
        before_s = self._tail_s[together]
        self._tail_s[together] += _TAIL_WEIGHT * (min(max(wait_s, 0.0), 10.0) - before_s)

    def used(self, prefilled: Prefilled, decision: RouteDecision, cached_tokens: int) -> None:
        """Learn from the second half: how much of its prompt its worker did not compute."""
        pair = prefilled.store, decision.target.store
        if cached_tokens < _USED_SHARE_MIN * prefilled.tokens:
            self._rest(pair)
        else:
            self._resting.pop(pair, None)
            self._resting.pop((prefilled.store, ""), None)

    # ---- parts

    def _weighed(self, ask: RouteAsk) -> SplitPlan:
        whole = self._router.compare(ask)
        if whole.knowledge is Knowledge.HASHED or not self._goes_by_cost(whole):
            return SplitPlan(False, SplitReason.BLIND)
        block_tokens = whole.pool.block_tokens
        left = len(ask.tokens) - whole.pick.reused_tokens
        if left < self._tokens_min(block_tokens + 1):
            return SplitPlan(False, SplitReason.SHORT, whole.cost_s)
        first = self._router.compare(replace(ask, stage=Role.PREFILL))
        source = first.member
        whole_blocks = len(ask.tokens) // block_tokens * block_tokens
        prefilled = _left_by(source, whole_blocks)
        second = self._router.compare(replace(ask, stage=Role.DECODE, prefilled=prefilled))
        reason = self._objection(prefilled, second)
        split_s = None
        if whole.cost_s is not None and first.cost_s is not None and second.cost_s is not None:
            tail_s = self._tail_s[second.member.store == source.store]
            split_s = first.cost_s + second.cost_s + tail_s + HOP_S
        if reason is None and self._policy.mode is SplitMode.AUTO:
            is_less = split_s is not None and whole.cost_s is not None and split_s < whole.cost_s
            reason = None if is_less else SplitReason.CHEAPER
        is_split = reason is None
        if reason is None:
            is_auto = self._policy.mode is SplitMode.AUTO
            reason = SplitReason.COST if is_auto else SplitReason.ALWAYS
        names = source.name, second.member.name
        return SplitPlan(is_split, reason, whole.cost_s, split_s, *names)

    def _goes_by_cost(self, whole: Compared) -> bool:
        return self._policy.mode is SplitMode.ALWAYS or whole.policy is Policy.CACHE_AWARE

    def _objection(self, prefilled: Prefilled, second: Compared) -> SplitReason | None:
        """Why these two cannot share the work; None where they can."""
        if second.member.name == prefilled.worker:
            return SplitReason.SAME_WORKER
        reaches = second.held_tokens >= prefilled.tokens - second.pool.block_tokens
        if not prefilled.store or not reaches:
            return SplitReason.APART
        pairs = (prefilled.store, second.member.store), (prefilled.store, "")
        if any(self._is_resting(pair) for pair in pairs):
            return SplitReason.APART
        return None

    def _member(self, worker: WorkerName) -> Member | None:
        found = self._router.roster.find(worker)
        return None if found is None or found.is_gone else found

    def _tokens_min(self, least: int) -> int:
        is_auto = self._policy.mode is SplitMode.AUTO
        return max(least, self._policy.tokens_min) if is_auto else least

    def _is_resting(self, pair: tuple[str, str]) -> bool:
        rest = self._resting.get(pair)
        return rest is not None and self._clock() < rest.until

    def _rest(self, pair: tuple[str, str]) -> None:
        """Do not try these for a while, each time for twice as long."""
        known = self._resting.get(pair)
        if known is not None and self._clock() < known.until:
            return  # one of several that were on their way
        pause_s = _REST_S_MIN if known is None else min(2 * known.pause_s, _REST_S_MAX)
        if len(self._resting) >= _PAIRS_COUNT_MAX:
            self._resting.clear()
        self._resting[pair] = _Rest(self._clock() + pause_s, pause_s)


def _left_by(member: Member, tokens: int) -> Prefilled:
    namespace = b"" if member.view is None else member.view.info.namespace
    return Prefilled(member.name, member.store, namespace, member.card.pool, tokens)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == inf else round(seconds, 6)
