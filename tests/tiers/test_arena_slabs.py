"""Slots and slabs of an arena: nothing is given twice, nothing is lost, classes waste little."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import CallerError
from kvtier.tiers.arena.slabs import Lengths, SlabAllocator, Slot, slot_bytes

SLAB_BYTES = 4096


@given(st.integers(0, 1 << 30))
def test_a_class_is_exact_for_fixed_lengths_and_close_for_varying_ones(payload_bytes: int) -> None:
    fixed = slot_bytes(payload_bytes, Lengths.FIXED)
    varying = slot_bytes(payload_bytes, Lengths.VARYING)
    assert payload_bytes <= fixed <= max(64, payload_bytes + 63)
    assert fixed <= varying <= max(64, payload_bytes + payload_bytes // 8 + 64)
    assert fixed % 64 == 0 == varying % 64
    assert slot_bytes(varying, Lengths.VARYING) == varying


def test_one_arena_serves_several_block_sizes_and_gets_empty_slabs_back() -> None:
    slabs = SlabAllocator(SLAB_BYTES, 3)
    small = slabs.allocate_up_to(64, 65)
    large = slabs.allocate_up_to(SLAB_BYTES, 2)
    assert (len(small), len(large)) == (65, 1)
    assert slabs.given_bytes == 3 * SLAB_BYTES
    slabs.free(small[:64])
    assert slabs.given_bytes == 2 * SLAB_BYTES
    assert len(slabs.allocate_up_to(SLAB_BYTES, 1)) == 1
    slabs.free([*small[64:], *large])


def test_a_block_takes_a_slightly_longer_slot_that_its_class_does_not_use() -> None:
    slabs = SlabAllocator(SLAB_BYTES, 8)
    held = slabs.allocate_up_to(1024, 31)
    assert slabs.allocate_up_to(960, 1) == []
    assert slabs.allocate_close(800) is None
    assert slabs.allocate_close(1088) is None
    close = slabs.allocate_close(960)
    assert close is not None
    assert close.size == 1024
    slabs.free([*held, close])
    assert slabs.given_bytes == 0
    assert slabs.allocate_close(960) is None


def test_a_block_takes_any_longer_slot_while_much_memory_is_in_slabs_and_unused() -> None:
    slabs = SlabAllocator(SLAB_BYTES, 8)
    held = slabs.allocate_up_to(1024, 29)
    longer = slabs.allocate_close(64)
    assert longer is None  # three of thirty-two are free: not much
    slabs.free(held[:2])
    longer = slabs.allocate_close(64)
    assert longer is not None
    assert longer.size == 1024


def test_a_quarantined_slot_is_nobody_s_until_it_is_released() -> None:
    slabs = SlabAllocator(SLAB_BYTES, 1)
    (slot,) = slabs.allocate_up_to(SLAB_BYTES, 1)
    slabs.quarantine(slot)
    assert slabs.quarantined_count == 1
    assert slabs.allocate_up_to(SLAB_BYTES, 1) == []
    with pytest.raises(CallerError):
        slabs.free([slot])
    slabs.release_quarantine(slot)
    assert slabs.quarantined_count == 0
    assert len(slabs.allocate_up_to(SLAB_BYTES, 1)) == 1


@pytest.mark.parametrize("size", [0, -64, SLAB_BYTES + 64])
def test_a_slot_that_fits_no_slab_is_refused(size: int) -> None:
    with pytest.raises(CallerError):
        SlabAllocator(SLAB_BYTES, 1).allocate_up_to(size, 1)


@pytest.mark.parametrize(("slab_bytes", "count"), [(0, 1), (100, 1), (4096, 0), (4096, 1 << 21)])
def test_impossible_sizes_are_refused(slab_bytes: int, count: int) -> None:
    with pytest.raises(CallerError):
        SlabAllocator(slab_bytes, count)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from([64, 128, 1024, 3008, 4096]), st.integers(0, 9))))
def test_slots_in_use_never_overlap_and_all_memory_comes_back(steps: list[tuple[int, int]]) -> None:
    slabs = SlabAllocator(SLAB_BYTES, 4)
    held: list[Slot] = []
    for size, count in steps:
        if count == 0 and held:
            slabs.free(held[: len(held) // 2 + 1])
            del held[: len(held) // 2 + 1]
        else:
            held += slabs.allocate_up_to(size, count)
        spans = sorted((slot.offset, slot.offset + slot.size) for slot in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start // SLAB_BYTES == (end - 1) // SLAB_BYTES < 4 for start, end in spans)
        assert slabs.given_bytes == SLAB_BYTES * len({slot.slab for slot in held})
    slabs.free(held)
    assert slabs.given_bytes == 0
    assert len(slabs.allocate_up_to(SLAB_BYTES, 5)) == 4
