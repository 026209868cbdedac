"""The slot allocator: native, twin and wrapper agree in every reachable state; nasty input."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier import _native, limits
from kvtier.core.slots import PureSlotAllocator, RawSlotAllocator, SlotAllocator
from kvtier.errors import CallerError, LimitError

SLOTS = 12
some_slots = st.lists(st.integers(0, SLOTS + 1), max_size=4)


class NativeFollowsTwin(RuleBasedStateMachine):
    """Runs each call, good or bad, on both and compares result, refusal and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.native: RawSlotAllocator = _native.SlotAllocator(SLOTS)
        self.twin: RawSlotAllocator = PureSlotAllocator(SLOTS)
        self.held: list[int] = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        found = self.native.allocate(count)
        assert found == self.twin.allocate(count)
        self.held += np.frombuffer(found or b"", np.uint32).tolist()

    @rule(count=st.integers(0, SLOTS + 3))
    def allocate_up_to(self, count: int) -> None:
        found = self.native.allocate_up_to(count)
        assert found == self.twin.allocate_up_to(count)
        self.held += np.frombuffer(found, np.uint32).tolist()

    @rule(name=st.sampled_from(["free", "quarantine", "release_quarantine"]), slots=some_slots)
    def move_any(self, name: str, slots: list[int]) -> None:
        self.move(name, slots)

    @precondition(lambda self: self.held)
    @rule(name=st.sampled_from(["free", "quarantine"]), data=st.data())
    def move_held(self, name: str, data: st.DataObject) -> None:
        self.move(name, data.draw(st.lists(st.sampled_from(self.held), unique=True, max_size=6)))

    def move(self, name: str, slots: list[int]) -> None:
        outcomes = []
        for allocator in (self.native, self.twin):
            try:
                getattr(allocator, name)(slots)
                outcomes.append("moved")
            except ValueError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1]
        if outcomes[0] == "moved":
            self.held = [slot for slot in self.held if slot not in slots]

    @invariant()
    def counts_agree(self) -> None:
        for name in ("slots_count", "free_count", "used_count", "quarantined_count"):
            assert getattr(self.native, name) == getattr(self.twin, name)


TestNativeFollowsTwin = NativeFollowsTwin.TestCase
TestNativeFollowsTwin.settings = settings(max_examples=60, stateful_step_count=30)


def test_slots_are_unique_ascending_at_first_and_last_in_first_out_later() -> None:
    allocator = SlotAllocator(6)
    first = allocator.allocate(4)
    assert first is not None
    assert first.tolist() == [0, 1, 2, 3]
    allocator.free([2, 0])
    again = allocator.allocate(3)
    assert again is not None
    assert again.tolist() == [0, 2, 4]


def test_too_large_a_request_takes_nothing() -> None:
    allocator = SlotAllocator(3)
    assert allocator.allocate(4) is None
    assert allocator.free_count == 3
    assert allocator.allocate_up_to(4).tolist() == [0, 1, 2]
    assert allocator.allocate_up_to(1).tolist() == []
    assert allocator.allocate(1) is None
    none = allocator.allocate(0)
    assert none is not None
    assert none.tolist() == []


@pytest.mark.parametrize(
    ("slots", "why"),
    [
        ([2], "slot 2 is free, not used"),
        ([0, 0], "slot 0 is free, not used"),
        ([0, 3], "slot 3 is foreign, not used"),
        ([0, 2**64 - 1], "slot 18446744073709551615 is foreign, not used"),
        ([0, 1, 2], "slot 2 is free, not used"),
    ],
)
def test_bad_free_is_refused_and_frees_nothing(slots: list[int], why: str) -> None:
    allocator = SlotAllocator(3)
    allocator.allocate(2)
    with pytest.raises(CallerError, match=why):
        allocator.free(slots)
    assert (allocator.used_count, allocator.free_count) == (2, 1)
    allocator.free([0, 1])
    with pytest.raises(CallerError, match="slot 1 is free"):
        allocator.free([1])


def test_quarantined_slot_returns_only_by_release() -> None:
    allocator = SlotAllocator(2)
    allocator.allocate(2)
    allocator.quarantine([1])
    assert (allocator.used_count, allocator.quarantined_count) == (1, 1)
    with pytest.raises(CallerError, match="slot 1 is quarantined, not used"):
        allocator.free([1])
    with pytest.raises(CallerError, match="slot 1 is quarantined, not used"):
        allocator.quarantine([1])
    with pytest.raises(CallerError, match="slot 0 is used, not quarantined"):
        allocator.release_quarantine([0])
    assert allocator.allocate(1) is None
    allocator.release_quarantine(np.array([1], np.uint32))
    released = allocator.allocate(1)
    assert released is not None
    assert released.tolist() == [1]


def test_what_was_allocated_can_be_given_back_as_it_came() -> None:
    allocator = SlotAllocator(100_000)
    slots = allocator.allocate(100_000)
    assert slots is not None
    assert len(np.unique(slots)) == 100_000
    assert allocator.free_count == 0
    allocator.free(slots)
    assert allocator.free_count == allocator.slots_count == 100_000


def test_bad_counts_and_slots_are_caller_errors() -> None:
    for count in (-1, 1.5, "3", None, True):
        with pytest.raises(CallerError, match="slots_count: "):
            SlotAllocator(count)  # type: ignore[arg-type]
        with pytest.raises(CallerError, match="count: "):
            SlotAllocator(3).allocate(count)  # type: ignore[arg-type]
        with pytest.raises(CallerError, match="count: "):
            SlotAllocator(3).allocate_up_to(count)  # type: ignore[arg-type]
    for slots in (None, 3, "1", [1.5], [-1], np.array([0.0]), np.array([[0]]), [2**64]):
        with pytest.raises(CallerError, match="slots: "):
            SlotAllocator(3).free(slots)  # type: ignore[arg-type]
    with pytest.raises(LimitError, match="slots_count: "):
        SlotAllocator(limits.SLOTS_COUNT_MAX + 1)
    assert SlotAllocator(0).allocate(1) is None


def test_allocator_that_was_never_initialised_is_refused_not_used() -> None:
    raw = _native.SlotAllocator.__new__(_native.SlotAllocator)
    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError):
        raw.allocate(1)
