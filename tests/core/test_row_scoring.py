"""Native scoring of rows decides as `scoring.decide` does, from columns by slot."""

from dataclasses import fields
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.costs import FREE_SOURCES, SOURCES_COUNT, SpeedTable
from kvtier.core.fallback import BoundedHash, Member
from kvtier.core.prefix_index import HolderSpec, NativePrefixIndex
from kvtier.core.row_scoring import (
    COLUMNS,
    NO_ROW,
    Counted,
    RowAsk,
    RowGroup,
    RowPick,
    Rows,
    RowScorer,
    costs_of,
)
from kvtier.core.scoring import Ask, Components, Decision, Fleet, Weights, decide
from kvtier.errors import CallerError
from kvtier.types import HolderId, HolderKind, Source, Tier

BLOCK_TOKENS = 16
AFFINITY_TOKENS = 64
NOW = 100.0
CLOSE = 1e-9


class Case:
    """A random table of workers with one request, for the native side and for its twin."""

    def __init__(self, seed: int, rows: int, *, siblings: bool) -> None:
        self.random = random = Random(seed)
        self.draw = np.random.default_rng(seed)
        self.rows, self.slots_count = rows, rows + 3
        self.slots = np.array(random.sample(range(self.slots_count), rows), np.uint32)
        self.prompt = random.choice([1, 17, 300, 2000, 40_000])
        self.hashes = self.draw.integers(1, 2**63, max(1, self.prompt // BLOCK_TOKENS), np.uint64)
        self.chain = (self.hashes, 0) if siblings else None
        self.weights = Weights(work=random.choice([0.0, 1.0, 4.0]), slack=random.choice([0.5, 2.0]))
        self.speeds = self._speeds()
        self.columns = self._columns()
        self.foreign = self.draw.integers(0, 4000, random.choice([0, rows, 2 * rows]), np.int64)
        self.holders = np.arange(rows, dtype=np.uint32)
        self.holders[self.draw.random(rows) < 0.1] = NO_ROW
        self.fixed = self._fixed()
        self.mask = self.draw.random(rows) < 0.8
        self.mask[random.randrange(rows)] = True
        self.u, self.age_s = random.random(), random.choice([0.0, 0.0, 7.0])
        self.index = self._index()

    def _some(self, count: int, most: float) -> npt.NDArray[np.float64]:
        """Many zeros, as in an idle fleet: ties are what matters."""
        values: npt.NDArray[np.float64] = np.round(self.draw.random(count) * most)
        values[self.draw.random(count) < 0.5] = 0.0
        return values

    def _speeds(self) -> SpeedTable:
        token_s = np.full(self.rows, 1e-4) * self.random.choice([1.0, 3.0])
        token_s[self.draw.random(self.rows) < 0.2] *= 2.0
        latency_s = np.full((self.rows, SOURCES_COUNT), 1e-3)
        byte_s = np.full((self.rows, SOURCES_COUNT), self.random.choice([1e-10, 1e-9, 1e-8]))
        for source in FREE_SOURCES:
            latency_s[:, source] = byte_s[:, source] = 0.0
        return SpeedTable(token_s, token_s / 32_768, latency_s, byte_s)

    def _columns(self) -> npt.NDArray[np.float64]:
        most = {"own_tokens": 4000.0, "queued_beyond": 9000.0, "own_kv_tokens": 30_000.0}
        columns = np.stack([self._some(self.slots_count, most.get(c, 9.0)) for c in COLUMNS])
        columns[COLUMNS.index("queued_at")] = NOW - self._some(self.slots_count, 1.0)
        columns[COLUMNS.index("recent_tokens")] = self._some(self.slots_count, 90_000.0)
        columns[COLUMNS.index("distrust_s")] *= self.draw.random(self.slots_count) < 0.2
        return columns

    def _fixed(self) -> tuple[npt.NDArray[np.float64], ...]:
        capacity = np.full(self.rows, self.random.choice([np.inf, 40_000.0]))
        loaded = (self.draw.random(self.rows) < 0.9).astype(np.float64)
        return capacity, np.full(self.rows, 131_072.0), loaded

    def _index(self) -> NativePrefixIndex:
        """Each worker holds a beginning of the prompt, on its own or on its node."""
        index = NativePrefixIndex(8 << 20)
        for row in range(self.rows):
            worker = HolderId(row)
            spec = HolderSpec(HolderKind.WORKER, row, (row,), 0, BLOCK_TOKENS)
            index.add_holder(worker, spec)
            store = HolderId(self.rows + row)
            index.add_holder(store, HolderSpec(HolderKind.STORE, row, (row,), 0, BLOCK_TOKENS))
            near = self.random.choice([0, 0, 1, 4, len(self.hashes)])
            far = self.random.choice([0, near, len(self.hashes) // 2, len(self.hashes)])
            index.store(worker, Tier.GPU, 0, self.hashes[:near])
            index.store(store, self.random.choice([Tier.DRAM, Tier.NVME]), 0, self.hashes[:far])
        return index

    def native(self) -> RowPick:
        capacity, width, loaded = self.fixed
        rows = self.holders.copy()
        rows[rows != NO_ROW] = np.arange(self.rows, dtype=np.uint32)[rows != NO_ROW]
        self.seeds = self.draw.integers(0, 2**63, self.rows, np.uint64)
        scorer = RowScorer(
            Rows(
                self.slots,
                self.holders,
                capacity,
                width,
                loaded.astype(np.bool_),
                self.seeds,
                [RowGroup(rows, BLOCK_TOKENS, AFFINITY_TOKENS)],
            ),
            self.weights,
        )
        scorer.begin()
        scorer.add(0, self.index.match(self.hashes))
        ask = RowAsk(self.prompt, NOW, self.age_s, self.u)
        counted = Counted(self.columns, self.foreign)
        return scorer.decide(ask, self.speeds, counted, self.mask, self.chain)

    def twin(self) -> tuple[Decision, Fleet]:
        fleet = Fleet.idle(self.rows)
        column = {name: self.columns[at][self.slots] for at, name in enumerate(COLUMNS)}
        drained = (NOW - column["queued_at"]) / self.speeds.prefill_token_s
        fleet.queued_tokens = np.maximum(column["queued_beyond"] - drained, 0.0)
        foreign = [
            float(self.foreign[holder]) if holder < len(self.foreign) else 0.0
            for holder in self.holders.tolist()
        ]
        fleet.reserved_tokens = column["own_tokens"] + np.array(foreign)
        fleet.decoding_count = column["own_decoding"] + column["other_running"]
        fleet.pinned_tokens = column["own_kv_tokens"] + column["other_kv_tokens"]
        fleet.capacity_tokens, fleet.kv_bytes_per_token, loaded = self.fixed
        fleet.adapter_loaded = loaded.astype(np.bool_)
        fleet.age_s = column["distrust_s"] + self.age_s
        fleet.recent_tokens = column["recent_tokens"]
        fleet.eligible = self.mask
        result = self.index.match(self.hashes)
        per_row = np.diff(result.run_offsets).tolist()
        rows = [int(w) for w, n in zip(result.workers, per_row, strict=True) for _ in range(n)]
        for row, source, blocks in zip(rows, result.run_sources, result.run_blocks, strict=True):
            if self.holders[row] != NO_ROW:
                fleet.held_tokens[row, int(source)] += int(blocks) * BLOCK_TOKENS
        if self.chain is not None:
            hashing = BoundedHash([Member(int(seed)) for seed in self.seeds])

            def ranks(reused: float) -> npt.NDArray[np.float64]:
                beyond = int(reused + AFFINITY_TOKENS) // BLOCK_TOKENS
                return hashing.ranks(int(self.hashes[min(beyond, len(self.hashes) - 1)]))

            fleet.ranks = ranks
        return decide(Ask(self.prompt), fleet, self.speeds, self.u, self.weights), fleet


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40), siblings=st.booleans())
@settings(max_examples=300, deadline=None)
def test_native_scoring_decides_as_its_twin(seed: int, rows: int, siblings: bool) -> None:
    case = Case(seed, rows, siblings=siblings)
    pick = case.native()
    decision, fleet = case.twin()
    row, costs = decision.chosen, decision.costs
    assert pick.row == row
    for told, known in (
        (pick.queued_tokens, fleet.queued_tokens),
        (pick.queue_s, costs.queue_s),
        (pick.load_s, costs.load_s),
        (pick.compute_s, costs.compute_s),
        (pick.ttft_s, costs.ttft_s),
        (pick.reused_tokens, costs.reused_tokens),
    ):
        assert told == pytest.approx(float(known[row]), rel=CLOSE, abs=CLOSE)
    assert list(pick.held_tokens) == fleet.held_tokens[row].tolist()
    every, held = costs_of(pick)
    assert held.tolist() == fleet.held_tokens.tolist()
    for part in fields(Components):
        mine, known = getattr(every, part.name)[case.mask], getattr(costs, part.name)[case.mask]
        assert mine == pytest.approx(known, rel=CLOSE, abs=CLOSE)
    assert np.isinf(every.total_s[~case.mask]).all()


def test_sources_and_weights_are_those_that_the_native_side_reads() -> None:
    assert [source.name for source in Source] == [
        "GPU",
        "PREDICTED",
        "DRAM",
        "NVME",
        "PEER",
        "REDIS",
    ]
    assert len(COLUMNS) == 9


def scorer_of(rows: int) -> RowScorer:
    numbers = np.arange(rows, dtype=np.uint32)
    width = np.full(rows, 1.0)
    group = RowGroup(numbers, BLOCK_TOKENS, AFFINITY_TOKENS)
    seeds = numbers.astype(np.uint64)
    return RowScorer(Rows(numbers, numbers, width, width, width > 0, seeds, [group]), Weights())


@pytest.mark.parametrize(
    ("counted", "mask", "ask"),
    [
        (Counted(np.zeros((9, 1)), np.zeros(0, np.int64)), [True, True], (9, 0.0, 0.0, 0.0)),
        (Counted(np.zeros((9, 2)), np.zeros(0, np.int64)), [True], (9, 0.0, 0.0, 0.0)),
        (Counted(np.zeros((9, 2)), np.zeros(0, np.int64)), [False, False], (9, 0.0, 0.0, 0.0)),
        (Counted(np.zeros((9, 2)), np.zeros(0, np.int64)), [True, True], (0, 0.0, 0.0, 0.0)),
        (Counted(np.zeros((9, 2)), np.zeros(0, np.int64)), [True, True], (9, 0.0, 0.0, 1.0)),
        (Counted(np.full((9, 2), np.nan), np.zeros(0, np.int64)), [True, True], (9, 0.0, 0.0, 0.0)),
        (Counted(np.zeros((9, 2), np.int64), np.zeros(0, np.int64)), [True, True], (9, 0, 0, 0)),
        (Counted(np.zeros((9, 2)), np.zeros(0, np.float64)), [True, True], (9, 0.0, 0.0, 0.0)),
    ],
    ids=["few slots", "short mask", "nobody", "no prompt", "u is 1", "nan", "ints", "float tokens"],
)
def test_what_does_not_fit_is_refused(
    counted: Counted, mask: list[bool], ask: tuple[float, float, float, float]
) -> None:
    scorer = scorer_of(2)
    speeds = SpeedTable(
        *(np.full(2, 1e-4) for _ in range(2)), *(np.zeros((2, 6)) for _ in range(2))
    )
    scorer.begin()
    with pytest.raises(CallerError):
        scorer.decide(RowAsk(*ask), speeds, counted, np.array(mask), None)


def test_speeds_of_another_table_are_refused() -> None:
    speeds = SpeedTable(
        *(np.full(3, 1e-4) for _ in range(2)), *(np.zeros((3, 6)) for _ in range(2))
    )
    counted = Counted(np.zeros((9, 2)), np.zeros(0, np.int64))
    with pytest.raises(CallerError):
        scorer_of(2).decide(RowAsk(9, 0.0, 0.0, 0.0), speeds, counted, np.ones(2, np.bool_), None)
