"""What a connector says of its slots: frames cut anywhere, and books held against a naive pool."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.engine_events import EngineHash
from kvtier.core.engine_holdings import Appeared, Change, KnownKeys, Vanished
from kvtier.core.engine_residents import (
    NO_BYTES,
    ROW,
    SYNCED_FRAME,
    Frame,
    FrameReader,
    Hello,
    Rows,
    SlotBooks,
    SlotState,
    Synced,
    held_rows,
    hello_frame,
    rows_frames,
)
from kvtier.errors import CallerError
from kvtier.limits import ENGINE_FEED_ROWS_MAX, ENGINE_RESIDENTS_MAX
from kvtier.types import PrefixKey

SLOTS = 6
HELLO = Hello(b"l" * 16, 3, SLOTS, b"r" * 32)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def key(number: int) -> PrefixKey:
    return PrefixKey((number + 1).to_bytes(32, "little"))


def row(slot: int, number: int | None, state: SlotState = SlotState.KEYED) -> bytes:
    if number is None:
        return ROW.pack(slot, SlotState.EMPTY, NO_BYTES, NO_BYTES)
    named = key(number) if state is SlotState.KEYED else NO_BYTES
    return ROW.pack(slot, state, digest(number), named)


def rows(content: Mapping[int, int | None]) -> Rows:
    return Rows(b"".join(row(slot, number) for slot, number in content.items()))


def told(into: set[int], changes: list[Change]) -> None:
    """An index that insists on being told only what it does not know."""
    for change in changes:
        match change:
            case Appeared(_, _, hashes):
                assert not into & set(hashes.tolist())
                into |= set(hashes.tolist())
            case Vanished(_, hashes):
                assert set(hashes.tolist()) <= into
                into -= set(hashes.tolist())
            case _:
                raise AssertionError(change)


# ---- frames


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.lists(st.integers(1, 200), min_size=1, max_size=30),
)
def test_frames_come_out_whole_however_the_stream_is_cut(
    numbers: list[int], cuts: list[int]
) -> None:
    packed = b"".join(row(number % SLOTS, number) for number in numbers)
    stream = hello_frame(HELLO) + rows_frames(packed) + SYNCED_FRAME
    reader = FrameReader()
    frames: list[Frame] = []
    at = 0
    for cut in [*cuts, len(stream)]:
        frames += reader.take(stream[at : at + cut])
        at += cut
    assert frames[0] == HELLO
    assert b"".join(frame.packed for frame in frames if isinstance(frame, Rows)) == packed
    assert isinstance(frames[-1], Synced)


def test_a_large_pool_is_told_in_frames_of_bounded_size() -> None:
    count = 2 * ENGINE_FEED_ROWS_MAX + 1
    frames = FrameReader().take(rows_frames(row(0, 1) * count))
    assert [len(frame) for frame in frames if isinstance(frame, Rows)] == [
        ENGINE_FEED_ROWS_MAX, ENGINE_FEED_ROWS_MAX, 1,
    ]  # fmt: skip


def test_only_slots_that_hold_something_are_told_at_first() -> None:
    table = row(0, None) + row(1, 7) + row(2, None) + row(3, 8, SlotState.UNKNOWN)
    assert held_rows(table) == row(1, 7) + row(3, 8, SlotState.UNKNOWN)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff" * 20,
        b"\x00\x00\x00\x00\x09",
        b"\x01\x00\x00\x00\x03x",
        b"\x05\x00\x00\x00\x02aaaaa",
        b"\x00\x00\x00\x00\x02",
        hello_frame(HELLO).replace(b"kvtR", b"http"),
        hello_frame(Hello(b"l" * 16, 300, 1, b"r" * 32)),
        hello_frame(Hello(b"l" * 16, 0, 0, b"r" * 32)),
        hello_frame(Hello(b"l" * 16, 0, ENGINE_RESIDENTS_MAX + 1, b"r" * 32)),
    ],
)
def test_bytes_that_are_no_frames_are_refused(nonsense: bytes) -> None:
    with pytest.raises(CallerError):
        FrameReader().take(nonsense)


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_refused(noise: bytes) -> None:
    reader = FrameReader()
    try:
        frames = reader.take(noise)
    except CallerError:
        return
    assert all(isinstance(frame, Hello | Rows | Synced) for frame in frames)


# ---- books


@given(
    st.lists(
        st.dictionaries(st.integers(0, SLOTS - 1), st.none() | st.integers(0, 4), min_size=1),
        max_size=20,
    )
)
def test_an_index_knows_just_what_the_slots_hold(steps: list[dict[int, int | None]]) -> None:
    books = SlotBooks(SLOTS, KnownKeys(100))
    pool: dict[int, int] = {}
    index: set[int] = set()
    for step in steps:
        books.take(rows(step))
        for slot, number in step.items():
            pool.pop(slot, None)
            if number is not None:
                pool[slot] = number
        told(index, books.settle())
        assert index == {int.from_bytes(key(number)[:8], "little") for number in pool.values()}
        assert (books.held_count, books.copies_count) == (len(pool), len(pool))
    at_once: set[int] = set()
    told(at_once, books.held())
    assert at_once == index


def test_a_row_that_is_said_twice_counts_once_and_two_slots_are_two_copies() -> None:
    books = SlotBooks(SLOTS, KnownKeys(100))
    for _ in range(2):
        books.take(rows({0: 1, 1: 1}))
    assert books.copies_count == 2
    assert len(books.settle()) == 1
    books.take(rows({0: None}))
    assert books.settle() == []
    books.take(rows({1: None}))
    (gone,) = books.settle()
    assert isinstance(gone, Vanished)


def test_a_digest_without_key_is_resolved_by_what_is_known_or_learnt_later() -> None:
    known = KnownKeys(100)
    known.learn(EngineHash(digest(1)), key(1))
    books = SlotBooks(SLOTS, known)
    books.take(Rows(b"".join(row(n, n, SlotState.UNKNOWN) for n in (1, 2, 3))))
    index: set[int] = set()
    told(index, books.settle())
    assert index == {2}
    assert books.unknown() == [digest(2), digest(3)]
    books.take(rows({3: None}))
    books.learn({EngineHash(digest(2)): 77, EngineHash(digest(3)): 78, EngineHash(digest(9)): 79})
    told(index, books.settle())
    assert (index, books.unknown_count) == ({2, 77}, 0)


def test_chains_that_no_key_names_are_held_and_not_told() -> None:
    books = SlotBooks(SLOTS, KnownKeys(100))
    books.take(Rows(row(0, 1, SlotState.NAMELESS)))
    assert books.settle() == []
    assert (books.held_count, books.unknown_count, books.nameless_count) == (1, 0, 1)


def test_keys_outlive_the_slots_that_brought_them() -> None:
    known = KnownKeys(100)
    books = SlotBooks(SLOTS, known)
    books.take(rows({0: 1}))
    books.take(rows({0: None}))
    assert known.find(EngineHash(digest(1))) == key(1)
    assert list(known.take_fresh()) == [digest(1)]


@pytest.mark.parametrize(
    "bad", [ROW.pack(SLOTS, 1, NO_BYTES, NO_BYTES), ROW.pack(0, 9, NO_BYTES, NO_BYTES)]
)
def test_rows_of_slots_or_states_that_there_are_not_are_refused(bad: bytes) -> None:
    with pytest.raises(CallerError):
        SlotBooks(SLOTS, KnownKeys(100)).take(Rows(bad))
