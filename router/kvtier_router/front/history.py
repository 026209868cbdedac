"""The last requests of this process, for whoever looks later: what came of each, and why there.

Recording is one tuple and one append a request; nothing is computed until somebody asks. Bounded in
requests and in the rows of the decisions that are kept. What must not live here: prompts, keys,
salts, and how anything is shown (`kvtier_router.ui`).
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from kvtier.core.workers import WorkerName
from kvtier.limits import (
    HISTORY_BASES_COUNT_MAX,
    HISTORY_REQUESTS_COUNT_MAX,
    HISTORY_ROWS_COUNT_MAX,
)
from kvtier.openai.usage import Usage
from kvtier.types import Source
from kvtier_router.front.calls import Api
from kvtier_router.front.relay import Job
from kvtier_router.routing.values import Basis, Knowledge, Policy

NAME_CHARS_MAX: Final = 256
"""Of a model's name as a client wrote it: it may be of any length."""


class Told(NamedTuple):
    """A routing decision without what it holds on to."""

    worker: WorkerName
    policy: Policy
    knowledge: Knowledge
    cause: str
    matched_tokens: dict[Source, int]
    reused_tokens: int
    predicted_ttft_s: float
    decided_in_s: float


class Seen(NamedTuple):
    """One request that has ended."""

    number: int
    """From 1, in the order in which requests ended."""
    at: float
    """Monotonic seconds of its end."""
    request_id: str
    api: Api
    model: str
    tenant: str
    status: int
    """0: the client left before the answer had begun."""
    error: str
    attempts: int
    resumed: int
    prompt_tokens: int
    """As counted here."""
    ttft_s: float | None
    total_s: float
    usage: Usage | None
    """As the worker said."""
    told: Told | None
    """The last decision; None where there was none."""

    @property
    def matched_tokens(self) -> int:
        """Tokens that the chosen worker was expected to have."""
        return 0 if self.told is None else sum(self.told.matched_tokens.values())


_Raw = tuple[object, ...]
"""Fields of Seen with those of Told in it: making named tuples costs more than keeping these."""


class History:
    """See the module. One event loop uses it."""

    def __init__(self, requests_count_max: int = HISTORY_REQUESTS_COUNT_MAX) -> None:
        self._kept: deque[_Raw] = deque(maxlen=requests_count_max)
        self._bases: deque[tuple[int, Basis]] = deque()
        self._rows_count = 0
        self.count = 0
        """Requests since the start; more than are kept, in time."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, job: Job, at: float, total_s: float) -> None:
        """Keep what came of an admitted request. O(1)."""
        self.count = number = self.count + 1
        decision, call, told = job.decision, job.call, None
        if decision is not None:
            told = (
                decision.target.worker,
                decision.policy,
                decision.knowledge,
                decision.cause,
                decision.matched_tokens,
                decision.reused_tokens,
                decision.predicted_ttft_s,
                decision.decided_in_s,
            )
            basis = decision.basis
            if basis is not None:
                self._bases.append((number, basis))
                self._rows_count += basis.rows_count
                if len(self._bases) > HISTORY_BASES_COUNT_MAX or (
                    self._rows_count > HISTORY_ROWS_COUNT_MAX
                ):
                    self._let_go()
        model = call.model
        self._kept.append(
            (
                number,
                at,
                job.request_id,
                call.api,
                model if len(model) <= NAME_CHARS_MAX else model[:NAME_CHARS_MAX],
                job.tenant.tenant_id,
                job.status,
                job.error,
                job.attempts,
                job.resumed,
                job.prompt.count,
                job.ttft_s,
                total_s,
                job.usage,
                told,
            )
        )

    def refused(self, api: Api, request_id: str, status: int, error: str, at: float) -> None:
        """Keep a request that was turned away before it was admitted. O(1)."""
        self.count += 1
        self._kept.append(
            (self.count, at, request_id, api, "", "", status, error, 0, 0, 0, None, 0.0, None, None)
        )

    def newest(self, most: int) -> list[Seen]:
        """At most `most` kept requests, the newest first. O(most)."""
        return [_seen(raw) for raw in islice(reversed(self._kept), most)]

    def below(self, number: int = 0) -> Iterator[Seen]:
        """Kept requests numbered below `number` (0: all), the newest first, as they are now: what
        ends while one iterates changes nothing. O(kept) at once, cheaply."""
        kept = list(self._kept)
        skipped = 0 if number <= 0 else max(0, self.count - number + 1)
        return map(_seen, islice(reversed(kept), skipped, None))

    def find(self, number: int) -> Seen | None:
        """A kept request by its number."""
        place = number - (self.count - len(self._kept)) - 1
        return _seen(self._kept[place]) if 0 <= place < len(self._kept) else None

    def basis(self, number: int) -> Basis | None:
        """The costs that a request was decided on; None where they are not kept (any more)."""
        return next((basis for known, basis in self._bases if known == number), None)

    def _let_go(self) -> None:
        """Forget the oldest costs until the rest is within its ceilings."""
        while len(self._bases) > HISTORY_BASES_COUNT_MAX or (
            self._rows_count > HISTORY_ROWS_COUNT_MAX and len(self._bases) > 1
        ):
            self._rows_count -= self._bases.popleft()[1].rows_count


def _seen(raw: _Raw) -> Seen:
    told = raw[-1]
    return Seen._make((*raw[:-1], Told._make(told) if isinstance(told, tuple) else None))
