"""The parts of the NVMe tier that decide without I/O, against naive twins; and its threads."""

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError, ConfigError, OverloadedError, UnavailableError
from kvtier.limits import NVME_JOBS_MAX
from kvtier.tiers.nvme.lanes import AbandonedError, Call, Lane
from kvtier.tiers.nvme.layout import (
    NvmeConfig,
    Place,
    geometry_of,
    pack_name,
    pack_place,
    unpack_name,
    unpack_place,
)
from kvtier.tiers.nvme.ledger import Ledger
from kvtier.types import Fingerprint, ScopeId
from tests.harness.waiting import eventually
from tests.support.nvme_directory import MIB

U64 = st.integers(0, 2**64 - 1)
NAMES = st.one_of(
    st.builds(
        FrameName,
        st.just(KeyKind.PREFIX_KEY),
        st.binary(min_size=32, max_size=32),
        st.binary(min_size=32, max_size=32).map(Fingerprint),
        st.integers(0, 2**32 - 1),
    ),
    st.builds(
        FrameName,
        st.just(KeyKind.ENGINE_DIGEST),
        st.binary(min_size=8, max_size=32),
        st.binary(min_size=32, max_size=32).map(Fingerprint),
        st.integers(0, 2**32 - 1),
    ),
)
PLACES = st.builds(Place, U64, U64, U64, U64, U64, st.text(max_size=100).map(ScopeId))


@given(NAMES)
def test_a_packed_name_is_unpacked_to_itself(name: FrameName) -> None:
    assert unpack_name(pack_name(name)) == name
    assert pack_name(name).startswith(name.namespace)


@given(NAMES, NAMES)
def test_different_names_are_packed_differently(one: FrameName, other: FrameName) -> None:
    assert (pack_name(one) == pack_name(other)) == (one == other)


@given(PLACES)
def test_a_packed_place_is_unpacked_to_itself(place: Place) -> None:
    assert unpack_place(pack_place(place)) == place


@given(st.binary(max_size=120))
def test_any_bytes_are_a_name_and_a_place_or_a_callers_error(content: bytes) -> None:
    for unpack in (unpack_name, unpack_place):
        try:
            unpack(content)
        except CallerError:
            continue


@given(st.integers(1 << 20, 1 << 50))
def test_a_tier_of_any_size_has_few_segments_and_room_for_moves(bytes_max: int) -> None:
    try:
        geometry = geometry_of(bytes_max, None)
    except ConfigError:
        assert bytes_max < 2 * MIB
        return
    assert 3 <= geometry.segments_max(0) <= 256
    assert geometry.segments_max(0) * geometry.segment_bytes + geometry.index_bytes <= bytes_max
    assert geometry.segments_max(bytes_max) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"bytes_max": 0},
        {"segment_bytes": 4096},
        {"readers_count": 0},
        {"free_share": 0.0},
        {"free_share": float("nan")},
        {"kept_share": 0.9},
        {"save_s": 2.0},
        {"save_s": float("nan")},
        {"stall_s": 0.0},
        {"unsaved_bytes_max": 1 << 40},
    ],
)
def test_a_setting_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(CallerError):
        NvmeConfig(Path("nowhere"), **change)  # type: ignore[arg-type]


# The ledger


@dataclass
class NaiveLedger:
    """All blocks in one list, in the order in which they would go."""

    blocks: list[tuple[bytes, int]] = field(default_factory=list)
    touched: list[bytes] = field(default_factory=list)
    pinned: set[bytes] = field(default_factory=set)

    def forget(self, key: bytes) -> None:
        self.blocks = [one for one in self.blocks if one[0] != key]
        self.touched = [other for other in self.touched if other != key]

    def coldest(self, count: int) -> list[bytes]:
        cold = [key for key, _ in self.blocks if key not in self.touched]
        order = dict(self.blocks)
        warm = sorted(self.touched, key=lambda key: order[key])
        return [key for key in cold + warm if key not in self.pinned][:count]


def place_in(segment: int, size: int = 100) -> Place:
    return Place(segment, 0, size, 0, 0, ScopeId(""))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "touch", "pin", "unpin", "roll"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    ),
    max_size=50,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_the_ledger_orders_blocks_as_a_plain_list_does(
    steps: list[tuple[str, list[int]]],
) -> None:
    ledger, naive = Ledger(), NaiveLedger()
    segment = 1
    ledger.open_shelf(segment)
    for step, numbers in steps:
        keys = [bytes([number]) for number in numbers]
        held = [key for key in keys if key in ledger]
        if step == "roll":
            segment += 1
            ledger.open_shelf(segment)
        elif step == "add":
            ledger.add([(key, place_in(segment)) for key in keys])
            for key in reversed(keys):
                naive.forget(key)
                naive.blocks.append((key, segment))
        elif step == "remove":
            for key in keys:
                assert (ledger.remove(key) is not None) == (key in {k for k, _ in naive.blocks})
                naive.forget(key)
                naive.pinned.discard(key)
        elif step == "touch":
            ledger.touch(keys)
            for key in reversed(held):
                naive.touched = [other for other in naive.touched if other != key] + [key]
        elif step == "pin":
            for key in held:
                ledger.pin(key)
                naive.pinned.add(key)
        else:
            for key in keys:
                ledger.unpin(key)
                naive.pinned.discard(key)
        assert len(ledger) == len(naive.blocks)
        assert ledger.coldest(99) == naive.coldest(99)
        assert ledger.coldest(2) == naive.coldest(2)
        for number in range(1, segment + 1):
            expected = [key for key, at in naive.blocks if at == number]
            assert ledger.blocks(number) == expected
            assert ledger.live_count(number) == len(expected)


def test_the_oldest_segment_goes_and_what_was_read_of_it_moves_on_within_its_share() -> None:
    ledger = Ledger()
    for segment in (1, 2):
        ledger.open_shelf(segment)
        ledger.add([(bytes([segment, n]), place_in(segment, 64)) for n in range(10)])
    ledger.touch([bytes([1, n]) for n in range(5)])
    keeping = ledger.choose(active_id=2, pinned_bytes_max=0, kept_bytes_max=2 * 192)
    assert keeping is not None
    assert keeping.segment_id == 1
    assert keeping.kept == (bytes([1, 0]), bytes([1, 1]))
    assert keeping.kept_bytes == 2 * 192


def test_a_segment_with_too_much_pinned_is_passed_over() -> None:
    ledger = Ledger()
    for segment in (1, 2, 3):
        ledger.open_shelf(segment)
        ledger.add([(bytes([segment, n]), place_in(segment, 64)) for n in range(4)])
    for n in range(3):
        ledger.pin(bytes([1, n]))
    ledger.pin(bytes([2, 0]))
    keeping = ledger.choose(active_id=3, pinned_bytes_max=2 * 192, kept_bytes_max=0)
    assert keeping is not None
    assert keeping.segment_id == 2
    assert keeping.kept == (bytes([2, 0]),)
    assert ledger.choose(active_id=3, pinned_bytes_max=100, kept_bytes_max=0) is None


# Threads


async def test_an_abandoned_call_waits_for_the_thread_that_is_inside_and_keeps_others_out() -> None:
    lane, call = Lane("test", 1), Call()
    entered, go = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        with call.touching():
            entered.set()
            go.wait(10)
            done.append("left")
        with call.touching():
            done.append("again")

    future = lane.submit(work)
    await asyncio.to_thread(entered.wait, 40)
    abandoning = asyncio.create_task(call.abandon())
    await asyncio.sleep(0)
    abandoning.cancel()  # it waits all the same
    await asyncio.sleep(0)
    assert not abandoning.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await abandoning
    assert done == ["left"]
    with pytest.raises(AbandonedError):
        await future
    assert await lane.close(10)


async def test_a_call_that_nobody_is_inside_is_abandoned_at_once() -> None:
    call = Call()
    await call.abandon()
    with pytest.raises(AbandonedError), call.touching():
        raise AssertionError


async def test_a_lane_passes_results_and_errors_on_and_bounds_what_waits() -> None:
    lane = Lane("test", 1)
    assert await lane.submit(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await lane.submit(lambda: 1 // 0)
    go, begun = threading.Event(), threading.Event()

    def block() -> bool:
        begun.set()
        return go.wait(10)

    first = lane.submit(block)
    await asyncio.to_thread(begun.wait, 40)
    waiting = [lane.submit(go.is_set) for _ in range(NVME_JOBS_MAX)]
    with pytest.raises(OverloadedError):
        lane.submit(go.is_set)
    go.set()
    assert await first
    assert all(await asyncio.gather(*waiting))
    assert await lane.close(10)
    with pytest.raises(UnavailableError):
        lane.submit(go.is_set)


async def test_a_lane_with_a_stuck_thread_is_left_behind() -> None:
    lane = Lane("test", 1)
    go, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go.wait(10)

    future = lane.submit(block)
    await asyncio.to_thread(begun.wait, 40)
    assert not await lane.close(0.05)
    go.set()
    await future
    eventually(lambda: "test-0" not in {t.name for t in threading.enumerate()}, 30, "it ends")
