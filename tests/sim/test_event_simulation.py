"""Event streams over a bad network, many seeds: at quiescence every index equals the truth.

The validators *ordered*, *unique*, *atomic*, *resumable* and *reliable* run after every message
(`event_world`). A failure names its seed; `tests.sim.event_runs.run(seed)` repeats it.
"""

from collections import Counter

import pytest

from kvtier.core.event_messages import Batch, Digest, SnapshotMark
from kvtier.core.events import Acceptor
from kvtier.core.publication import Publication, _Replica
from kvtier.types import Epoch
from tests.sim.event_runs import AcceptorType, run
from tests.sim.event_world import Carried, Reached

SEEDS_PER_PART = 250
PARTS = 8
MUTANT_SEEDS = range(SEEDS_PER_PART)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_index_equals_the_truth_when_the_faults_stop(part: int) -> None:
    reached: Counter[Reached] = Counter()
    for seed in range(part * SEEDS_PER_PART, (part + 1) * SEEDS_PER_PART):
        reached += run(seed)
    missing = [what for what in Reached if not reached[what]]
    assert not missing, f"never happened in these seeds, so nothing is proven about it: {missing}"


def test_the_same_seed_is_the_same_run() -> None:
    assert run(17) == run(17)


class ListensToTheDead(Acceptor[Carried]):
    def _is_dead(self, epoch: Epoch) -> bool:
        return False


class AppliesTwice(Acceptor[Carried]):
    def _is_duplicate(self, seq: int) -> bool:
        return False


class JumpsOverGaps(Acceptor[Carried]):
    def _is_ahead(self, seq: int) -> bool:
        return False


class IgnoresTheSeqOfHeartbeats(Acceptor[Carried]):
    def _note_reached(self, seq: int) -> None:
        pass


class AcceptsSnapshotsWithHoles(Acceptor[Carried]):
    def _is_next_chunk(self, number: int, expected: int) -> bool:
        return True


class SplicesWithoutWatermark(Acceptor[Carried]):
    def _splice_seq(self, mark: SnapshotMark) -> int:
        return self.applied_seq


class BelievesEveryDigest(Acceptor[Carried]):
    def _has_drifted(self, claimed: Digest | None, held: Digest | None) -> bool:
        return False


class SkipsWhatTheRingForgot(Publication):
    def _next_batch(self, cursor: _Replica) -> Batch[bytes] | None:
        cursor.next_seq = max(cursor.next_seq, self._first_in_ring())
        return super()._next_batch(cursor)


class SnapshotsWithoutSealing(Publication):
    def _begin_snapshot(self, cursor: _Replica) -> None:
        pending, self._pending = self._pending, []
        super()._begin_snapshot(cursor)
        self._pending = pending


def validator_that_fails(
    acceptor_type: AcceptorType, publication_type: type[Publication] = Publication
) -> str:
    """Name of the validator of the first failure among the seeds, or an empty text."""
    for seed in MUTANT_SEEDS:
        try:
            run(seed, acceptor_type, publication_type)
        except AssertionError as error:
            return str(error).split(": ")[1]
    return ""


@pytest.mark.parametrize(
    ("mutant", "validator"),
    [
        (ListensToTheDead, "ordered"),
        (AppliesTwice, "unique"),
        (JumpsOverGaps, "ordered"),
        (IgnoresTheSeqOfHeartbeats, "converged"),
        (AcceptsSnapshotsWithHoles, "atomic"),
        (SplicesWithoutWatermark, "ordered"),
        (BelievesEveryDigest, "converged"),
    ],
)
def test_an_index_without_one_of_its_guards_is_caught(
    mutant: type[Acceptor[Carried]], validator: str
) -> None:
    assert validator_that_fails(mutant) == validator


@pytest.mark.parametrize(
    ("mutant", "validator"),
    [(SkipsWhatTheRingForgot, "converged"), (SnapshotsWithoutSealing, "atomic")],
)
def test_a_publisher_without_one_of_its_guards_is_caught(
    mutant: type[Publication], validator: str
) -> None:
    assert validator_that_fails(Acceptor, mutant) == validator
