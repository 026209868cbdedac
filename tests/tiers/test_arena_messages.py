"""What client and server of an arena say: every message survives, any other bytes are refused."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.eviction import Retention
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError
from kvtier.ports import BlockOwner, PutRequest, PutResult, PutStatus
from kvtier.tiers.arena import messages
from kvtier.tiers.arena.holdings import Wanted
from kvtier.tiers.arena.messages import (
    BlockToCommit,
    Granted,
    Hello,
    Kind,
    LeasedBlock,
    Welcome,
)
from kvtier.types import Fingerprint, ScopeId

u64 = st.integers(0, 2**64 - 1)
names = st.builds(
    lambda key, namespace, codec: FrameName(
        KeyKind.ENGINE_DIGEST, key, Fingerprint(namespace), codec
    ),
    st.binary(min_size=8, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**32 - 1),
)
scopes = st.text(st.characters(exclude_categories=["Cs"]), max_size=40).map(ScopeId)
retentions = st.builds(
    Retention, st.integers(0, 100), st.none() | st.floats(0, 1e9, allow_nan=False)
)
wanted = st.builds(Wanted, names, u64, st.builds(BlockOwner, u64, scopes), retentions)
commits = st.builds(BlockToCommit, wanted, u64, st.none() | u64, u64)
results = st.builds(PutResult, st.sampled_from(PutStatus), st.sampled_from(["", "full", "x" * 255]))


def body_of(message: bytes, kind: Kind) -> tuple[int, int, bytes]:
    head, body = messages.head_of(message)
    assert head.kind is kind
    return head.count, head.tag, body


@given(st.lists(commits, max_size=8), st.integers(0, 2**32 - 1))
def test_commits_survive(blocks: list[BlockToCommit], tag: int) -> None:
    count, seen, body = body_of(messages.pack_commit(tag, blocks), Kind.COMMIT)
    assert seen == tag
    assert messages.parse_commit(count, body) == blocks


@given(st.lists(commits, max_size=8), st.integers(0, 2**32 - 1))
def test_announced_blocks_survive(blocks: list[BlockToCommit], tag: int) -> None:
    requests = [
        PutRequest(b.wanted.name, b"", b.wanted.owner, b.payload_checksum, b.wanted.retention)
        for b in blocks
    ]
    offsets = [block.segment_offset for block in blocks]
    sizes = [block.wanted.payload_bytes for block in blocks]
    count, seen, body = body_of(messages.pack_begin(tag, requests, offsets, sizes), Kind.BEGIN)
    assert seen == tag
    assert messages.parse_commit(count, body) == [
        BlockToCommit(block.wanted, block.segment_offset, block.payload_checksum)
        for block in blocks
    ]


@given(st.lists(wanted, max_size=8), st.integers(0, 2**32 - 1))
def test_reservations_survive(blocks: list[Wanted], ttl_ms: int) -> None:
    count, _, body = body_of(messages.pack_reserve(1, ttl_ms, blocks), Kind.RESERVE)
    assert messages.parse_reserve(count, body) == (ttl_ms, blocks)


@given(st.lists(results, max_size=8), u64)
def test_answers_survive(answers: list[PutResult], number: int) -> None:
    count, _, body = body_of(messages.pack_results(2, answers), Kind.ANSWER)
    assert messages.parse_results(count, body) == answers
    granted = [Granted(number, answer) for answer in answers]
    count, _, body = body_of(messages.pack_granted(2, granted), Kind.ANSWER)
    assert messages.parse_granted(count, body) == granted


@given(st.lists(names, max_size=4), st.lists(st.none() | st.tuples(*[u64] * 5), max_size=8))
def test_leases_survive(
    asked: list[FrameName], given_back: list[tuple[int, int, int, int, int] | None]
) -> None:
    count, _, body = body_of(messages.pack_lease(3, 17, asked), Kind.LEASE)
    assert messages.parse_lease(count, body) == (17, asked)
    leased = [None if one is None else LeasedBlock(5, *one) for one in given_back]
    count, _, body = body_of(messages.pack_leased(3, leased), Kind.ANSWER)
    assert messages.parse_leased(count, body) == leased


@given(st.lists(st.tuples(u64, u64), max_size=8))
def test_ids_and_pairs_survive(pairs: list[tuple[int, int]]) -> None:
    count, _, body = body_of(messages.pack_pairs(Kind.TOUCH, pairs), Kind.TOUCH)
    assert messages.parse_pairs(count, body) == pairs
    ids = [first for first, _ in pairs]
    count, _, body = body_of(messages.pack_ids(Kind.ABORT, 4, ids), Kind.ABORT)
    assert messages.parse_ids(count, body) == ids


def test_greetings_survive() -> None:
    _, _, body = body_of(messages.pack_hello(Hello(1, 2**40)), Kind.HELLO)
    assert messages.parse_hello(body) == Hello(1, 2**40)
    _, _, body = body_of(messages.pack_welcome(Welcome(1, 2**64 - 1, 5)), Kind.WELCOME)
    assert messages.parse_welcome(body) == Welcome(1, 2**64 - 1, 5)


PARSERS: list[Callable[[int, bytes], object]] = [
    messages.parse_commit,
    messages.parse_reserve,
    messages.parse_results,
    messages.parse_granted,
    messages.parse_lease,
    messages.parse_leased,
    messages.parse_ids,
    messages.parse_pairs,
    lambda _, body: messages.parse_hello(body),
    lambda _, body: messages.parse_welcome(body),
]


@given(st.sampled_from(PARSERS), st.integers(0, 2**16 - 1), st.binary(max_size=600))
def test_any_bytes_parse_or_are_a_caller_error(
    parse: Callable[[int, bytes], object], count: int, body: bytes
) -> None:
    try:
        parse(count, body)
    except CallerError:
        return
    assert count * 2 <= len(body) or parse in PARSERS[-2:]


@given(st.lists(commits, min_size=1, max_size=3), st.integers(1, 200))
def test_a_message_cut_short_or_followed_by_more_is_refused(
    blocks: list[BlockToCommit], cut: int
) -> None:
    message = messages.pack_commit(1, blocks)
    head, body = messages.head_of(message)
    for damaged in (body[:-cut], body + bytes(cut)):
        with pytest.raises(CallerError):
            messages.parse_commit(head.count, damaged)


def test_what_is_too_much_for_a_message_is_refused() -> None:
    with pytest.raises(CallerError):
        messages.pack_ids(Kind.ABORT, 1, range(messages.ITEMS_COUNT_MAX + 1))
    long = Wanted(
        FrameName(KeyKind.PREFIX_KEY, b"k" * 32, Fingerprint(b"n" * 32)),
        1,
        BlockOwner(1, ScopeId("s" * (messages.SCOPE_BYTES_MAX + 1))),
    )
    with pytest.raises(CallerError):
        messages.pack_reserve(1, 1, [long])


@pytest.mark.parametrize("message", [b"", b"\x01", b"\xff" * 8, b"\x00" * 8])
def test_a_head_that_is_none_is_refused(message: bytes) -> None:
    with pytest.raises(CallerError):
        messages.head_of(message)
