"""Runs of serialized batches: the native index reads them as its twin does, whatever the bytes."""

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import _native
from kvtier.core.event_columns import EventKind
from kvtier.core.naive_index import NaivePrefixIndex
from kvtier.core.prefix_index import AppliedRun, NativePrefixIndex, PrefixIndex
from kvtier.errors import CallerError
from kvtier.types import HOLDER_TIERS, HolderId, Tier
from kvtier.wire import messages as pb
from tests.native.test_any_input import values
from tests.support.index_pair import Event, IndexPair, Lane, message, store, worker

WORKER: Lane = (HolderId(0), Tier.GPU, 0)
STORE: Lane = (HolderId(1), Tier.DRAM, 0)
ROOM = 1 << 40

BLOCKS = st.lists(st.integers(1, 12), max_size=5)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.tuples(
        st.sampled_from([EventKind.STORE, EventKind.REMOVE]),
        st.sampled_from([Tier.GPU, Tier.GPU, Tier.GPU, Tier.DRAM]),
        st.integers(0, 3),
        BLOCKS,
    ),
    st.tuples(
        st.sampled_from([EventKind.CLEAR_TIER, EventKind.CLEAR_ALL]),
        st.sampled_from(HOLDER_TIERS),
        st.just(0),
        st.just([]),
    ),
)


@st.composite
def mistreated(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes, nearly always changed a little somewhere."""
    at, cut = draw(st.integers(0, len(whole))), draw(st.integers(0, 2))
    return whole[:at] + draw(st.binary(max_size=2)) + whole[at + cut :]


@st.composite
def runs(draw: st.DrawFn) -> list[bytes]:
    """Numbered messages, some of them wrong."""
    messages = []
    for number, events in enumerate(draw(st.lists(st.lists(EVENTS, max_size=3), max_size=6))):
        seq = draw(st.sampled_from([number + 1] * 9 + [number, number + 2]))
        whole = message(seq, *events)
        is_wrong = draw(st.integers(0, 5)) == 0
        messages.append(draw(mistreated(whole)) if is_wrong else whole)
    return messages


def pair() -> IndexPair:
    made = IndexPair()
    made.add(WORKER[0], worker())
    made.add(STORE[0], store())
    return made


@settings(max_examples=300)
@given(runs(), st.sampled_from([WORKER, STORE]), st.sampled_from([-1, 0, 3, 8, ROOM]))
def test_a_run_does_what_the_twin_does(messages: list[bytes], lane: Lane, room: int) -> None:
    both = pair()
    seq = 1
    for _ in range(2):  # what stopped the first run is in the way of the second, unless it is room
        run = both.apply_messages(lane, seq, messages[seq - 1 :], room)
        assert run is not None
        seq += run.messages
    both.both(lambda index: index.digest(lane[0], lane[1], 0))


def stores(*blocks: int, tier: Tier = Tier.GPU) -> Event:
    return (EventKind.STORE, tier, 0, blocks)


@pytest.fixture(params=[NativePrefixIndex, NaivePrefixIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    made: PrefixIndex = request.param()
    made.add_holder(WORKER[0], worker())
    return made


def applied(index: PrefixIndex, messages: Sequence[bytes], room: int = ROOM) -> AppliedRun:
    return index.apply_messages(WORKER[0], 0, 1, list(messages), room)


def test_a_run_is_applied_in_order_and_counted(index: PrefixIndex) -> None:
    removes = (EventKind.REMOVE, Tier.GPU, 0, [2, 9])
    run = applied(index, [message(1, stores(1, 2), stores(1)), message(2), message(3, removes)])
    assert run == AppliedRun(messages=3, events=3, stored=3, removed=1, unknown=1)
    assert index.digest(*WORKER).count == 2


NOT_APPLIED = {
    "the same number": message(1, stores(5)),
    "a later number": message(3, stores(5)),
    "a heartbeat": pb.PublishRequest(heartbeat=pb.Heartbeat(seq=2)).SerializeToString(),
    "a tier that a worker has not": message(2, stores(5), stores(6, tier=Tier.DRAM)),
    "a tier that nobody has": pb.PublishRequest(
        batch=pb.Batch(seq=2, kinds=b"\3", tiers=b"\4", lengths=bytes(4), parents=bytes(8))
    ).SerializeToString(),
    "a kind that nobody knows": pb.PublishRequest(
        batch=pb.Batch(seq=2, kinds=b"\4", tiers=b"\0", lengths=bytes(4), parents=bytes(8))
    ).SerializeToString(),
    "a clear with blocks": message(2, (EventKind.CLEAR_ALL, Tier.GPU, 0, [1])),
    "lengths that do not fit": pb.PublishRequest(
        batch=pb.Batch(seq=2, kinds=b"\0", tiers=b"\0", lengths=bytes(4), parents=bytes(7))
    ).SerializeToString(),
    "half a hash": pb.PublishRequest(batch=pb.Batch(seq=2, hashes=bytes(4))).SerializeToString(),
    "too many events": pb.PublishRequest(
        batch=pb.Batch(
            seq=2,
            kinds=b"\3" * 20_000,
            tiers=bytes(20_000),
            lengths=bytes(80_000),
            parents=bytes(160_000),
        )
    ).SerializeToString(),
    "cut short": message(2, stores(5))[:-1],
    "nothing": b"",
}


@pytest.mark.parametrize("bad", NOT_APPLIED.values(), ids=NOT_APPLIED.keys())
def test_a_run_ends_before_what_is_not_next_or_not_right(index: PrefixIndex, bad: bytes) -> None:
    run = applied(index, [message(1, stores(1)), bad, message(2, stores(7))])
    assert run == AppliedRun(messages=1, events=1, stored=1)
    assert index.digest(*WORKER).count == 1
    assert applied(index, [bad]).stored == (1 if bad == NOT_APPLIED["the same number"] else 0)


def test_a_run_ends_with_the_message_that_fills_the_room(index: PrefixIndex) -> None:
    messages = [message(number, stores(number)) for number in range(1, 6)]
    assert applied(index, messages, room=2).messages == 3
    assert applied(index, messages, room=-1).messages == 1


def test_a_long_run_goes_on_where_it_was_cut(index: PrefixIndex) -> None:
    messages = [
        message(number, stores(*range(number * 1000, number * 1000 + 500)))
        for number in range(1, 33)
    ]
    done = 0
    while done < len(messages):
        run = index.apply_messages(WORKER[0], 0, done + 1, messages[done:], ROOM)
        assert run.messages > 0
        done += run.messages
    assert index.digest(*WORKER).count == 16_000


@pytest.mark.parametrize("seq", [-1, 2**64])
def test_numbers_outside_u64_and_what_is_not_bytes_are_refused(
    index: PrefixIndex, seq: int
) -> None:
    with pytest.raises(CallerError):
        index.apply_messages(WORKER[0], 0, seq, [], ROOM)
    with pytest.raises(CallerError):
        index.apply_messages(WORKER[0], 0, 1, [bytearray(b"")], ROOM)  # type: ignore[list-item]
    with pytest.raises(CallerError):
        index.apply_messages(HolderId(7), 0, 1, [], ROOM)
    with pytest.raises(CallerError):
        index.apply_messages(WORKER[0], 1, 1, [], ROOM)


@settings(max_examples=200)
@given(st.lists(values, min_size=5, max_size=5), st.lists(st.binary(max_size=60), max_size=4))
def test_any_arguments_are_answered_or_refused(
    arguments: list[object], messages: list[bytes]
) -> None:
    made = _native.PrefixIndex(1 << 22, 4, 2, 64, 16, 16, 16, 4, 4)
    made.add_holder(0, 0, 0, [0], 0, 16)
    odd = getattr(made, "apply_messages")  # noqa: B009 - its types are what is not kept here
    with contextlib.suppress(ValueError, TypeError):
        odd(*arguments)
    with contextlib.suppress(ValueError, TypeError):
        odd(0, 0, 1, arguments[0], ROOM)
    assert made.apply_messages(0, 0, 1, messages, ROOM)[0] <= len(messages)
