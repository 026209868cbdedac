"""`scoring.decide` for one served name, natively: every row's cost in one call of microseconds.

A `RowScorer` belongs to one table of workers: what does not change between requests is told once,
the rest lies in columns by slot that the router counts in. `scoring.decide` is its twin, which also
does what is rare: explanations, halves of split requests, other policies. What must not live here:
counting, which rows are candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier import _native
from kvtier.core.costs import SOURCES_COUNT, FloatArray, SpeedTable
from kvtier.core.prefix_index import MatchResult
from kvtier.core.scoring import BoolArray, Components, IntArray, Weights
from kvtier.errors import CallerError

COLUMNS: Final = (
    "own_tokens",
    "own_decoding",
    "own_kv_tokens",
    "queued_beyond",
    "queued_at",
    "other_running",
    "other_kv_tokens",
    "distrust_s",
    "recent_tokens",
)
"""What a router counts of each slot, in the order in which `decide` reads it: f64 each."""
NO_ROW: Final = 2**32 - 1
"""Among `RowGroup.rows` a holder without a row; among `Rows.holders` a row without a holder."""
_PARTS: Final = (
    "queue_s", "load_s", "compute_s", "decode_s", "adapter_s", "ttft_s", "total_s", "reused_tokens",
)  # fmt: skip
_NO_HASHES: Final = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Rows that share one prefix chain."""

    rows: npt.NDArray[np.uint32]
    """By holder number; NO_ROW for others' holders."""
    block_tokens: int
    affinity_tokens: int
    """Siblings that have so many tokens in common beyond what is reused meet on one worker."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What does not change from one request to the next; arrays are (rows,)."""

    slots: npt.NDArray[np.uint32]
    holders: npt.NDArray[np.uint32]
    capacity_tokens: FloatArray
    kv_bytes_per_token: FloatArray
    adapter_loaded: BoolArray
    seeds: npt.NDArray[np.uint64]
    """Of `fallback.Member`, all of weight 1."""
    groups: Sequence[RowGroup]


class RowAsk(NamedTuple):
    """One request: made for each, hence a tuple."""

    prompt_tokens: float
    now: float
    """What `queued_at` is compared with."""
    age_s: float
    """Of all that the index says, beside each row's own distrust."""
    u: float
    """Uniform in [0, 1); for who has no hashes."""


class RowPick(NamedTuple):
    """The chosen row; its parts of the cost as in `scoring.Components`."""

    row: int
    queued_tokens: float
    queue_s: float
    load_s: float
    compute_s: float
    ttft_s: float
    reused_tokens: float
    held_tokens: tuple[float, float, float, float, float, float]
    """By Source."""
    costs: bytes = b""
    """Of every row, see `costs_of`; empty where another than native scoring chose."""


def costs_of(pick: RowPick) -> tuple[Components, FloatArray]:
    """Every row's parts of the cost, as `scoring.decide` tells them, and what each holds,
    (rows, sources). Of a row that was no candidate only the latter, and an infinite total."""
    rows = np.frombuffer(pick.costs, np.float64).reshape(-1, len(_PARTS) + SOURCES_COUNT).copy()
    parts = dict(zip(_PARTS, rows.T, strict=False))
    return Components(**parts), rows[:, len(_PARTS) :]


class RowScorer:
    """See the module. Belongs to one thread; keeps the matches of one request at a time."""

    __slots__ = ("_native", "_speeds")

    def __init__(self, rows: Rows, weights: Weights) -> None:
        fixed = np.ascontiguousarray(
            np.stack(
                [rows.capacity_tokens, rows.kv_bytes_per_token, rows.adapter_loaded], axis=1
            ).astype(np.float64)
        )
        told = [float(getattr(weights, name.name)) for name in fields(Weights)]
        groups = [(group.rows, group.block_tokens, group.affinity_tokens) for group in rows.groups]
        try:
            self._native = _native.Scorer(
                rows.slots, rows.holders, fixed, rows.seeds, np.array(told), groups
            )
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error
        self._speeds: SpeedTable | None = None

    def begin(self) -> None:
        """Forget the matches of the request before."""
        self._native.begin()

    def add(self, group: int, found: MatchResult) -> None:
        """Take in what one chain's match found: a result of the native index. O(runs)."""
        self._native.add(group, found)  # type: ignore[arg-type]

    def decide(
        self,
        ask: RowAsk,
        speeds: SpeedTable,
        counted: "Counted",
        mask: BoolArray,
        chain: tuple[npt.NDArray[np.uint64], int] | None,
    ) -> RowPick:
        """Choose as `scoring.decide` does, among the rows of `mask`. O(rows).

        `chain`: hashes and number of the group by which near-ties are ranked, None where they are
        drawn. CallerError where nobody is a candidate, on columns that do not fit, or a NaN.
        """
        hashes, group = (_NO_HASHES, 0) if chain is None else chain
        try:
            if speeds is not self._speeds:
                self._native.set_speeds(
                    speeds.prefill_token_s,
                    speeds.prefill_pair_s,
                    speeds.load_latency_s,
                    speeds.load_byte_s,
                )
                self._speeds = speeds
            return RowPick._make(
                self._native.decide(counted.columns, counted.foreign, mask, ask, hashes, group)
            )
        except (ValueError, TypeError) as error:
            raise CallerError(str(error)) from error


class Counted(NamedTuple):
    """What is counted at the moment of a decision."""

    columns: FloatArray
    """(COLUMNS, slots)."""
    foreign: IntArray
    """By holder number, prefill tokens that other routers have on their way; may be too short."""
