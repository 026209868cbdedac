"""Whatever Python hands to a native function, it answers, or refuses with ValueError or TypeError.

A crash ends the test run; under `make sanitize` a stray read or write does too.
"""

import array
import contextlib
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native

KINDS = ("u1", "i2", "u4", "i4", ">u4", "u8", "i8", "f2", "f8", "?", "O", "c16", "U3")


@st.composite
def arrays(draw: st.DrawFn) -> object:
    """Arrays of odd kinds: strided, reversed, transposed, read-only, unaligned, empty, 0-D."""
    dtype = np.dtype(draw(st.sampled_from(KINDS)))
    rows, columns = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    found: npt.NDArray[np.generic] = np.zeros((rows, columns), dtype)
    if dtype.kind in "iu":
        found = np.full((rows, columns), draw(st.integers(0, 9)), dtype)
    shape = draw(st.sampled_from(["2-D", "flat", "strided", "reversed", "transposed", "unaligned"]))
    if shape == "flat":
        found = found.reshape(-1)
    elif shape == "strided":
        found = found.reshape(-1)[::2]
    elif shape == "reversed":
        found = found.reshape(-1)[::-1]
    elif shape == "transposed":
        found = found.T
    elif shape == "unaligned" and not dtype.hasobject:
        found = np.frombuffer(b"x" + bytes(4 * dtype.itemsize), dtype, offset=1)
    if draw(st.booleans()):
        found.flags.writeable = False
    return found


values = st.one_of(
    arrays(),
    st.binary(max_size=40),
    st.binary(max_size=40).map(bytearray),
    st.binary(max_size=40).map(lambda data: memoryview(data)),
    st.binary(max_size=40).map(lambda data: memoryview(data)[::3]),
    st.binary(min_size=32, max_size=32),
    st.lists(st.integers(-2, 12), max_size=6),
    st.lists(st.integers(0, 12), max_size=6).map(tuple),
    st.lists(st.integers(0, 9), max_size=6).map(lambda items: array.array("I", items)),
    st.lists(st.binary(max_size=9).map(bytearray), max_size=4),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.none(),
    st.booleans(),
    st.dictionaries(st.integers(-1, 3), st.binary(max_size=9), max_size=3),
    st.just(object()),
)

RESULTS: dict[str, type] = {
    "prefix_chain": tuple,
    "prefix_chain_hashes": bytes,
    "checksum": int,
    "copy_checksum": int,
    "copy_checksum_many": bytes,
    "copy_checksum_pairs": bytes,
    "gather_blocks": type(None),
    "scatter_blocks": type(None),
    "instances": list,
}


@settings(max_examples=600)
@given(
    name=st.sampled_from(sorted(RESULTS)),
    arguments=st.lists(values, min_size=1, max_size=5),
)
def test_any_arguments_are_answered_or_refused(name: str, arguments: list[object]) -> None:
    with contextlib.suppress(ValueError, TypeError):
        assert isinstance(getattr(_native, name)(*arguments), RESULTS[name])


@settings(max_examples=150)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(
                ["allocate", "allocate_up_to", "free", "quarantine", "release_quarantine"]
            ),
            values,
        ),
        max_size=8,
    )
)
def test_slot_allocator_keeps_its_counts_whatever_it_is_handed(
    calls: list[tuple[str, object]],
) -> None:
    allocator = _native.SlotAllocator(8)
    for method, argument in calls:
        with contextlib.suppress(ValueError, TypeError):
            getattr(allocator, method)(argument)
    counted = allocator.free_count + allocator.used_count + allocator.quarantined_count
    assert counted == allocator.slots_count == 8


@settings(max_examples=200)
@given(arguments=st.lists(values, min_size=3, max_size=6), calls=st.lists(values, max_size=6))
def test_words_and_scorers_answer_or_refuse_whatever_they_are_handed(
    arguments: list[object], calls: list[object]
) -> None:
    single = np.arange(128, dtype=np.uint32)
    words = _native.Words("gpt-2", 0, single, np.array([97, 98, 200], np.uint32))
    rows, ones = np.arange(2, dtype=np.uint32), np.ones(2)
    seeds = np.arange(2, dtype=np.uint64)
    scorer = _native.Scorer(rows, rows, np.ones((2, 3)), seeds, np.ones(9), [(rows, 16, 64)])
    scorer.set_speeds(ones, ones, np.ones((2, 6)), np.ones((2, 6)))
    for call in (
        lambda: _native.Words("llama-3", *arguments),  # type: ignore[arg-type]
        lambda: _native.Words(*arguments),  # type: ignore[arg-type]
        lambda: _native.Scorer(rows, rows, *arguments),  # type: ignore[arg-type]
        lambda: words.encode(*arguments[:3]),  # type: ignore[arg-type]
        lambda: words.encode("ab c", *arguments[:2]),  # type: ignore[arg-type]
        lambda: scorer.add(*arguments[:2]),  # type: ignore[arg-type]
        lambda: scorer.set_speeds(ones, *arguments[:3]),  # type: ignore[arg-type]
        lambda: scorer.decide(*calls),  # type: ignore[arg-type]
        lambda: scorer.decide(np.ones((9, 2)), *calls[:5]),  # type: ignore[arg-type]
    ):
        with contextlib.suppress(ValueError, TypeError):
            call()
    assert words.encode("ab c") == np.array([200, 32, 99], np.uint32).tobytes()


@settings(max_examples=200)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["give", "take"]), st.lists(values, min_size=3, max_size=6)),
        max_size=4,
    )
)
def test_a_ring_answers_or_refuses_whatever_it_is_handed(
    calls: list[tuple[str, list[object]]],
) -> None:
    giver, taker = _native.RingGiver(16 << 10), _native.RingTaker(16 << 10)
    segment = memoryview(mmap.mmap(-1, 20 << 10))
    for method, arguments in calls:
        given_one: list[object] = [segment, *arguments]
        with contextlib.suppress(ValueError, TypeError):
            call = giver.give if method == "give" else taker.take
            packed, status = call(*given_one)  # type: ignore[arg-type]
            assert len(packed) % 8 == 0
            assert 0 <= status <= 4
    assert giver.give(memoryview(mmap.mmap(-1, 20 << 10)), [], 0, 0) == (b"", 0)


@dataclass(slots=True)
class Two:
    first: object
    second: object


@settings(max_examples=200)
@given(
    kind=st.sampled_from([Two, int, object, 7]),
    columns=st.lists(values, max_size=3).map(tuple) | values,
    count=st.integers(-1, 12) | values,
)
def test_instances_are_made_or_refused_whatever_is_handed(
    kind: object, columns: object, count: object
) -> None:
    with contextlib.suppress(ValueError, TypeError):
        made = _native.instances(kind, columns, count)  # type: ignore[arg-type, var-annotated]
        assert len(made) == count
