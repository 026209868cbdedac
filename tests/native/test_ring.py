"""The ring between a writer and the store: native and twin speak to each other; nasty input."""

import mmap
import random
import struct
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native
from kvtier.core.checksum import checksum
from kvtier.tiers.arena.directory import NOWHERE
from kvtier.tiers.arena.ring import (
    CONTROL_BYTES,
    RING_BYTES_MAX,
    Giver,
    PureRingGiver,
    PureRingTaker,
    RingStatus,
    Taker,
    ring_bytes_in,
)

RING = 16 << 10
SLOTS = 128 << 10
MANY = 1 << 30
LABEL = 7


def memory(size: int) -> memoryview:
    """Shared memory as the arena has it: aligned to a page."""
    return memoryview(mmap.mmap(-1, size))


def words(packed: bytes) -> list[int]:
    return [word for (word,) in struct.iter_unpack("<Q", packed)]


class Pair:
    """A giver and a taker on one ring, each a step at a time."""

    def __init__(self, giver: Giver, taker: Taker) -> None:
        self.giver, self.taker = giver, taker
        self.segment, self.slots = memory(CONTROL_BYTES + RING), memory(SLOTS)

    def carry(self, payloads: list[bytes], nowhere: frozenset[int]) -> list[int]:
        """Pass payloads through; the checksums as (given, seen, declared), one after another."""
        places, at = [], 0
        for i, payload in enumerate(payloads):
            places += [NOWHERE if i in nowhere else at, len(payload)]
            at += -(-len(payload) // 64) * 64
        given: list[int] = []
        taken: list[int] = []
        while len(taken) < 2 * len(payloads):
            checksums, status = self.giver.give(self.segment, payloads[len(given) :], LABEL, 0)
            assert status in {RingStatus.DONE, RingStatus.WAITING, RingStatus.WAKE}
            given += words(checksums)
            rest = places[len(taken) :]
            pairs, status = self.taker.take(self.segment, self.slots, rest, LABEL, MANY, 0)
            assert status in {RingStatus.DONE, RingStatus.WAITING}
            taken += words(pairs)
        for i, payload in enumerate(payloads):
            start = places[2 * i]
            if start != NOWHERE:
                assert self.slots[start : start + len(payload)] == payload
        return [word for row in zip(given, taken[::2], taken[1::2], strict=True) for word in row]


GIVERS: dict[str, Callable[[int], Giver]] = {"native": _native.RingGiver, "pure": PureRingGiver}
TAKERS: dict[str, Callable[[int], Taker]] = {"native": _native.RingTaker, "pure": PureRingTaker}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("giver", GIVERS)
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(
        st.integers(0, 300) | st.integers(900, 2100) | st.integers(0, 24_000), max_size=5
    ),
    seed=st.integers(0, 999),
    nowhere=st.frozensets(st.integers(0, 4)),
)
def test_payloads_come_out_as_they_went_in(
    giver: str, taker: str, sizes: list[int], seed: int, nowhere: frozenset[int]
) -> None:
    payloads = [random.Random(seed + size).randbytes(size) for size in sizes]
    pair = Pair(GIVERS[giver](RING), TAKERS[taker](RING))
    expected = [checksum(payload) for payload in payloads for _ in range(3)]
    assert pair.carry(payloads, nowhere) == expected
    assert pair.carry(payloads[::-1], frozenset()) == expected[::-1]  # goes on where it was


def test_both_sides_at_the_same_time_copy_more_than_the_ring_holds() -> None:
    pair = Pair(_native.RingGiver(RING), _native.RingTaker(RING))
    payloads = [random.Random(n).randbytes(40_000) for n in range(3)]
    places = [word for n in range(3) for word in (n * 40_000, 40_000)]
    taken: list[int] = []

    def take() -> None:
        while len(taken) < len(places):
            rest = places[len(taken) :]
            pairs, _ = pair.taker.take(pair.segment, pair.slots, rest, LABEL, 5000, 1000)
            taken.extend(words(pairs))

    thread = threading.Thread(target=take)
    thread.start()
    given: list[int] = []
    while len(given) < len(payloads):
        rest = payloads[len(given) :]
        checksums, _ = pair.giver.give(pair.segment, rest, LABEL, 100_000)
        given += words(checksums)
    thread.join()
    assert given == taken[::2] == taken[1::2] == [checksum(payload) for payload in payloads]
    assert pair.slots[:120_000] == b"".join(payloads)


@pytest.mark.parametrize("taker", TAKERS)
def test_a_taker_that_sleeps_is_woken_once(taker: str) -> None:
    pair = Pair(_native.RingGiver(RING), TAKERS[taker](RING))
    assert pair.taker.take(pair.segment, pair.slots, [0, 10], LABEL, MANY, 0)[1] == (
        RingStatus.WAITING
    )
    assert pair.giver.give(pair.segment, [b"x" * 10], LABEL, 0)[1] == RingStatus.WAKE
    assert pair.giver.give(pair.segment, [b"y" * 10], LABEL, 0)[1] == RingStatus.DONE


def test_a_call_takes_no_more_than_its_share() -> None:
    pair = Pair(_native.RingGiver(RING), _native.RingTaker(RING))
    pair.giver.give(pair.segment, [bytes(10_000)], LABEL, 0)
    calls = 1
    while pair.taker.take(pair.segment, pair.slots, [0, 10_000], LABEL, 1024, 0)[1] == (
        RingStatus.SLICE
    ):
        calls += 1
    assert calls == 9  # whole rounds of 1024; what is left comes with the last
    assert pair.taker.is_between


def test_a_giver_that_dribbles_does_not_hold_the_taker_for_ever() -> None:
    pair = Pair(_native.RingGiver(RING), _native.RingTaker(RING))
    is_over = threading.Event()

    def dribble() -> None:
        staged = 0
        while not is_over.wait(0.001):  # well within what is waited for the next bytes
            staged = min(staged + 1024, RING)
            struct.pack_into("<Q", pair.segment, 0, staged)

    thread = threading.Thread(target=dribble)
    thread.start()
    _, status = pair.taker.take(pair.segment, pair.slots, [0, 15_000], LABEL, MANY, 1200)
    taken = struct.unpack_from("<Q", pair.segment, 64)[0]
    is_over.set()
    thread.join()
    assert status == RingStatus.WAITING
    assert taken < 14 * 1024


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("staged", [RING + 1, 2**63, 2**64 - 1])
def test_a_counter_that_cannot_be_is_broken(taker: str, staged: int) -> None:
    pair = Pair(_native.RingGiver(RING), TAKERS[taker](RING))
    struct.pack_into("<Q", pair.segment, 0, staged)
    for size in (10, 5000):
        fresh = TAKERS[taker](RING)
        _, status = fresh.take(pair.segment, pair.slots, [0, size], LABEL, MANY, 0)
        assert status == RingStatus.BROKEN


@pytest.mark.parametrize("taker", TAKERS)
def test_a_payload_by_another_name_or_of_another_size_is_broken(taker: str) -> None:
    for size, label in ((100, LABEL + 1), (2100, LABEL)):
        pair = Pair(_native.RingGiver(RING), TAKERS[taker](RING))
        pair.giver.give(pair.segment, [b"x" * 100, b"x" * 8000], LABEL, 0)
        _, status = pair.taker.take(pair.segment, pair.slots, [0, size], label, MANY, 0)
        assert status == RingStatus.BROKEN


@pytest.mark.parametrize("taker", TAKERS)
def test_bytes_that_change_in_the_ring_are_seen_in_the_checksum(taker: str) -> None:
    for at in (0, 1030, 2999):
        pair = Pair(_native.RingGiver(RING), TAKERS[taker](RING))
        (given,) = words(pair.giver.give(pair.segment, [b"x" * 3000], LABEL, 0)[0])
        pair.segment[CONTROL_BYTES + at] ^= 1
        pairs, _ = pair.taker.take(pair.segment, pair.slots, [0, 3000], LABEL, MANY, 0)
        seen, declared = words(pairs)
        assert declared == given
        assert seen == checksum(pair.slots[:3000]) != given


def test_nothing_is_stored_outside_its_slot() -> None:
    pair = Pair(_native.RingGiver(RING), _native.RingTaker(RING))
    pair.slots[:] = b"\xee" * SLOTS
    pair.giver.give(pair.segment, [b"x" * 3000], LABEL, 0)
    pair.taker.take(pair.segment, pair.slots, [64, 3000], LABEL, MANY, 0)
    assert pair.slots[:64] == b"\xee" * 64
    assert pair.slots[64 + 3000 : 8192] == b"\xee" * (8192 - 3064)


def test_arguments_that_do_not_fit_are_refused() -> None:
    pair = Pair(_native.RingGiver(RING), _native.RingTaker(RING))
    segment, slots = pair.segment, pair.slots
    take, give = pair.taker.take, pair.giver.give
    for places in ([SLOTS, 1], [0, SLOTS + 1], [2**63, 2**63], [0], [0, 2**64 - 1], [-1, 4]):
        with pytest.raises(ValueError, match="places"):
            take(segment, slots, places, LABEL, MANY, 0)
    for bad in (segment[:-1], segment[8:], segment.toreadonly()):
        with pytest.raises(ValueError, match="segment"):
            take(bad, slots, [0, 1], LABEL, MANY, 0)
        with pytest.raises(ValueError, match="segment"):
            give(bad, [b"x"], LABEL, 0)
    with pytest.raises(ValueError, match="overlap"):
        take(segment, segment[CONTROL_BYTES:], [0, 1], LABEL, MANY, 0)
    with pytest.raises(ValueError, match="slots"):
        take(segment, slots.toreadonly(), [0, 1], LABEL, MANY, 0)
    with pytest.raises(ValueError, match="wait_us"):
        give(segment, [b"x"], LABEL, 10**9)
    with pytest.raises(TypeError, match="sources"):
        give(segment, b"x", LABEL, 0)  # type: ignore[arg-type]
    for ring_bytes in (0, 1024, RING + 1, 2**40):
        with pytest.raises(ValueError, match="ring_bytes"):
            _native.RingTaker(ring_bytes)
    assert take(segment, slots, [], LABEL, MANY, 0) == (b"", RingStatus.DONE)


def test_a_payload_that_was_begun_goes_on_as_it_was() -> None:
    pair = Pair(_native.RingGiver(RING), _native.RingTaker(RING))
    whole = bytes(2 * RING)
    assert pair.giver.give(pair.segment, [whole], LABEL, 0) == (b"", RingStatus.WAITING)
    with pytest.raises(ValueError, match="begun"):
        pair.giver.give(pair.segment, [whole[1:]], LABEL, 0)
    pair.taker.take(pair.segment, pair.slots, [0, 2 * RING], LABEL, MANY, 0)
    assert not pair.taker.is_between
    with pytest.raises(ValueError, match="begun"):
        pair.taker.take(pair.segment, pair.slots, [0, 8], LABEL, MANY, 0)


@pytest.mark.parametrize(
    ("staging_bytes", "expected"),
    [
        (0, 0),
        (CONTROL_BYTES, 0),
        (CONTROL_BYTES + RING - 1, 0),
        (CONTROL_BYTES + RING, RING),
        (CONTROL_BYTES + RING + 1500, RING + 1024),
        (1 << 40, RING_BYTES_MAX),
    ],
)
def test_a_ring_is_as_large_as_the_staging_area_has_room_for(
    staging_bytes: int, expected: int
) -> None:
    assert ring_bytes_in(staging_bytes) == expected
