"""What outlives a bridge: taken over whole, or not at all."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.core.engine_events import EngineHash, Place
from kvtier.core.engine_holdings import UNINDEXED, ResidentRow
from kvtier.core.engine_sequence import Doubt, Position
from kvtier.errors import BackendError, UnavailableError
from kvtier.types import PrefixKey
from kvtier_services.bridge.memory import FILE, BridgeMemory, RankDelta, open_memory

IDENTITY = b"i" * 32
BYTES_MAX = 8 << 20
AT = Position(2**63 + 5, b"f" * 16, frozenset({Doubt.GAP, Doubt.OVERFLOW}))


def name(number: int) -> EngineHash:
    return EngineHash(number.to_bytes(8, "big"))


def key(number: int) -> PrefixKey:
    return PrefixKey(number.to_bytes(32, "big"))


def row(number: int, copies: int = 1, place: Place | None = None) -> ResidentRow:
    return ResidentRow(place or Place(), name(number), copies, key(number))


def gone(number: int) -> ResidentRow:
    return ResidentRow(Place(), name(number), 0, None)


def fill(directory: Path, identity: bytes = IDENTITY) -> tuple[ResidentRow, ...]:
    rows = (row(1), row(2, 3), row(1, 1, Place("CPU", "fs", 2)))
    with open_memory(directory, identity, BYTES_MAX) as memory:
        known = {name(9): key(9), name(1): key(1), name(7): UNINDEXED}
        memory.save(known, {0: RankDelta(AT, False, list(rows)), 1: RankDelta(None, True)})
        assert memory.counts.failures == 0
    return rows


def read(directory: Path, identity: bytes = IDENTITY) -> tuple[object, dict[object, object]]:
    with open_memory(directory, identity, BYTES_MAX) as memory:
        return memory.rank(0), dict(memory.known())


def change(directory: Path, statement: str) -> None:
    with sqlite3.connect(directory / FILE) as connection:
        connection.execute(statement)
    connection.close()


def test_what_was_saved_is_taken_over(tmp_path: Path) -> None:
    rows = fill(tmp_path)
    with open_memory(tmp_path, IDENTITY, BYTES_MAX) as memory:
        state = memory.rank(0)
        assert state is not None
        assert state.position == AT
        assert set(state.rows) == set(rows)
        assert memory.rank(1) is None
        assert list(memory.known()) == [
            (name(9), key(9)), (name(1), key(1)), (name(7), UNINDEXED),
        ]  # fmt: skip


def test_changes_clears_and_restarts_are_kept(tmp_path: Path) -> None:
    fill(tmp_path)
    with open_memory(tmp_path, IDENTITY, BYTES_MAX) as memory:
        assert memory.rank(0) is not None
        memory.save({name(9): None}, {0: RankDelta(AT, False, [gone(1), row(2, 2), row(5)])})
    state, known = read(tmp_path)
    assert state is not None
    assert {(one.name, one.copies) for one in state.rows} == {  # type: ignore[attr-defined]
        (name(1), 1), (name(2), 2), (name(5), 1),
    }  # fmt: skip
    assert name(9) not in known
    with open_memory(tmp_path, IDENTITY, BYTES_MAX) as memory:
        memory.save({}, {0: RankDelta(AT, True, [row(8)])})
    state, _ = read(tmp_path)
    assert [one.name for one in state.rows] == [name(8)]  # type: ignore[attr-defined]
    with open_memory(tmp_path, IDENTITY, BYTES_MAX) as memory:
        memory.save({}, {0: RankDelta(None, True)})
    assert read(tmp_path)[0] is None


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE residents SET prefix_key = zeroblob(32) WHERE copies = 3",
        "UPDATE residents SET copies = 2 WHERE copies = 3",
        "DELETE FROM residents WHERE copies = 3",
        "UPDATE positions SET seq = zeroblob(8)",
        "UPDATE positions SET doubts = ''",
        "UPDATE positions SET rank = 0, count = 2",
    ],
)
def test_a_rank_that_is_not_whole_begins_anew(tmp_path: Path, statement: str) -> None:
    fill(tmp_path)
    change(tmp_path, statement)
    with open_memory(tmp_path, IDENTITY, BYTES_MAX) as memory:
        assert memory.rank(0) is None
        assert memory.counts.discards == 1
    assert read(tmp_path)[0] is None


def test_a_known_key_with_a_flipped_bit_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path)
    change(tmp_path, "UPDATE known SET prefix_key = zeroblob(32) WHERE at = 1")
    with open_memory(tmp_path, IDENTITY, BYTES_MAX) as memory:
        assert dict(memory.known()) == {name(1): key(1), name(7): UNINDEXED}
        assert memory.counts.bad_rows == 1


def test_a_file_of_another_model_is_forgotten(tmp_path: Path) -> None:
    fill(tmp_path)
    assert read(tmp_path, b"o" * 32) == (None, {})
    assert read(tmp_path) == (None, {})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"no database" * 1000),
        lambda path: path.write_bytes(path.read_bytes()[:3000]),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 40_000),
    ],
    ids=["other", "short", "torn"],
)
def test_a_file_that_cannot_be_read_costs_memory_and_nothing_else(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    fill(tmp_path)
    spoil(tmp_path / FILE)
    state, known = read(tmp_path)
    assert state is None
    assert known == {}
    fill(tmp_path)
    assert read(tmp_path)[0] is not None


def test_a_full_file_stops_the_saving_and_not_the_bridge(tmp_path: Path) -> None:
    with open_memory(tmp_path, IDENTITY, 1 << 20) as memory:
        memory.save({name(n): key(n) for n in range(30_000)}, {})
        assert memory.counts.failures == 1
        assert not memory.is_kept
        memory.save({name(1): key(1)}, {0: RankDelta(AT, False, [row(1)])})
        assert memory.rank(0) is None


def test_a_directory_has_one_bridge(tmp_path: Path) -> None:
    with (
        open_memory(tmp_path, IDENTITY, BYTES_MAX),
        pytest.raises(UnavailableError),
        open_memory(tmp_path, IDENTITY, BYTES_MAX),
    ):
        pass
    with pytest.raises(BackendError), open_memory(tmp_path / FILE / "x", IDENTITY, BYTES_MAX):
        pass


def test_without_a_directory_nothing_is_remembered() -> None:
    with open_memory(None, IDENTITY, BYTES_MAX) as memory:
        memory.save({name(1): key(1)}, {0: RankDelta(AT, False, [row(1)])})
        assert (memory.rank(0), list(memory.known()), memory.is_kept) == (None, [], False)
        assert isinstance(memory, BridgeMemory)
