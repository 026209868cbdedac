"""The bridge's books of one engine rank, held against a pool of physical blocks."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.engine_events import (
    AllCleared,
    BlockExtras,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Place,
    Unindexed,
)
from kvtier.core.engine_holdings import (
    Appeared,
    Change,
    Emptied,
    EngineHoldings,
    HoldingsTerms,
    KnownKeys,
    Reports,
    Vanished,
)
from kvtier.core.identity import AdapterRef, MultimodalItem, Pool, chain_root, encode_extras
from kvtier.core.keys import prefix_hashes
from kvtier.engines.events import DecodePolicy, Dialect, decode
from kvtier.errors import CallerError
from kvtier.types import PrefixKey, Tier
from tests.support import engine_wire as wire
from tests.support.fake_engine import EngineCache, Prompt

POOL = Pool("model", "rev", 4)
POLICY = DecodePolicy(Dialect.VLLM, 4)
CPU = Place("CPU")
REF = AdapterRef(b"a" * 32, 1)


class Told:
    """An index that believes every change: copies per (tier, prefix hash)."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Tier, int]] = Counter()

    def take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Appeared(tier, _, hashes):
                    self.copies.update((tier, one) for one in hashes.tolist())
                case Vanished(tier, hashes):
                    for one in hashes.tolist():
                        assert self.copies[tier, one] > 0, "removed what was never told"
                        self.copies[tier, one] -= 1
                case Emptied(None):
                    self.copies.clear()
                case Emptied(tier):
                    for key in [key for key in self.copies if key[0] is tier]:
                        del self.copies[key]

    def gpu(self) -> Counter[int]:
        return Counter({one: count for (tier, one), count in self.copies.items()
                        if count and tier is Tier.GPU})  # fmt: skip


def new(known: KnownKeys | None = None, **terms: object) -> EngineHoldings:
    made = HoldingsTerms(POOL, {"ad": REF}, **terms)  # type: ignore[arg-type]
    return EngineHoldings(made, known if known is not None else KnownKeys(1 << 12))


def name(number: int) -> EngineHash:
    return EngineHash(number.to_bytes(8, "big"))


def stored(
    names: Iterable[int], parent: int | None, tokens: Iterable[int], **more: object
) -> BlocksStored:
    return BlocksStored(
        place=more.pop("place", Place()),  # type: ignore[arg-type]
        hashes=tuple(map(name, names)),
        parent=None if parent is None else name(parent),
        tokens=np.array(list(tokens), np.uint32),
        block_tokens=4,
        **more,  # type: ignore[arg-type]
    )


def removed(*names: int, place: Place | None = Place()) -> BlocksRemoved:  # noqa: B008 (frozen)
    return BlocksRemoved(place, tuple(map(name, names)))


def chain(tokens: Iterable[int], salt: str | None = None) -> list[int]:
    return [int(one) for one in prefix_hashes(chain_root(POOL, salt, None), list(tokens), 4)]


def told(holdings: EngineHoldings, *events: object) -> Told:
    index = Told()
    for event in events:
        index.take(holdings.apply(event))  # type: ignore[arg-type]
    return index


def test_blocks_get_the_keys_that_a_router_computes_from_the_tokens() -> None:
    holdings = new()
    index = told(holdings, stored([1, 2], None, range(8)), stored([3], 2, range(8, 12)))
    assert index.gpu() == Counter(chain(range(12)))
    (appeared,) = holdings.apply(stored([4], 3, range(12, 16)))
    assert isinstance(appeared, Appeared)
    assert appeared.parent == chain(range(12))[-1]


def test_two_copies_are_told_once_and_vanish_with_the_second() -> None:
    index = told(new(), *[stored([1], None, range(4))] * 2, removed(1))
    assert index.gpu() == Counter(chain(range(4)))
    index = told(new(), *[stored([1], None, range(4))] * 2, removed(1), removed(1), removed(1))
    assert index.gpu() == Counter()


def test_a_report_of_what_is_resident_is_not_a_copy_where_reports_repeat() -> None:
    events = [stored([1, 2], None, range(8)), stored([1, 2], None, range(8)), removed(1)]
    assert told(new(reports=Reports.REPEATS), *events).gpu() == Counter(chain(range(8))[1:])
    assert told(new(), *events).gpu() == Counter(chain(range(8)))


def test_a_salt_and_an_adapter_make_other_chains() -> None:
    plain = told(new(), stored([1], None, range(4))).gpu()
    salted = told(new(), stored([1], None, range(4), salt="t")).gpu()
    adapted = told(new(), stored([1], None, range(4), adapter="ad")).gpu()
    assert len(plain | salted | adapted) == 3
    assert salted == Counter(chain(range(4), "t"))


def test_an_adapter_without_a_digest_is_counted_and_so_is_what_lies_behind_it() -> None:
    holdings = new()
    behind = stored([2], 1, range(4, 8))
    index = told(holdings, stored([1], None, range(4), adapter="other"), behind)
    assert index.gpu() == Counter()
    assert holdings.counts.unindexed == {Unindexed.ADAPTER_UNKNOWN: 1, Unindexed.DEPENDENT: 1}
    assert holdings.residents_count == 0


def test_an_image_is_known_by_its_digest_and_by_nothing_else() -> None:
    def shown(identifier: str) -> tuple[Counter[int], Counter[Unindexed]]:
        holdings = new()
        extras = {1: BlockExtras(((identifier, -2),))}
        index = told(holdings, stored([1, 2], None, range(8), extras=extras))
        return index.gpu(), holdings.counts.unindexed

    one, other = "ab" * 32, "cd" * 32
    encoded = {1: encode_extras((MultimodalItem(bytes.fromhex(one), -2),))}
    expected = prefix_hashes(chain_root(POOL, None, None), list(range(8)), 4, encoded)
    assert shown(one)[0] == Counter(expected.tolist())
    assert shown(one)[0] != shown(other)[0]
    for nobody in ("my-image", "", "zz" * 32):
        assert shown(nobody) == (Counter(), {Unindexed.EXTRAS: 2})


def test_groups_and_owners_are_counted_apart() -> None:
    place = Place("GPU", "", 1)
    index = told(new(), stored([1], None, range(4)), stored([1], None, range(4), place=place))
    assert index.gpu() == Counter(chain(range(4)) * 2)
    holdings = new()
    index = told(
        holdings, stored([1], None, range(4)), stored([1], None, range(4), place=place), removed(1)
    )
    assert index.gpu() == Counter(chain(range(4)))


def test_a_group_without_whole_prefixes_does_not_spoil_the_hash_for_another() -> None:
    windowed = stored([1], None, range(4), unindexed=Unindexed.ATTENTION, place=Place("GPU", "", 1))
    index = told(new(), windowed, stored([1], None, range(4)), stored([2], 1, range(4, 8)))
    assert index.gpu() == Counter(chain(range(8)))


def test_blocks_of_another_size_are_left_out() -> None:
    holdings = EngineHoldings(HoldingsTerms(Pool("model", "rev", 16)), KnownKeys(8))
    assert holdings.apply(stored([1], None, range(4))) == []
    assert holdings.counts.unindexed == {Unindexed.BLOCK_TOKENS: 1}


def test_a_block_behind_an_unseen_one_is_told_as_soon_as_that_is_known() -> None:
    holdings = new()
    index = told(holdings, stored([3], 2, range(8, 12)), stored([2], 1, range(4, 8)))
    assert index.gpu() == Counter()
    assert holdings.counts.unindexed == {Unindexed.UNRESOLVED: 2}
    index.take(holdings.apply(stored([1], None, range(4))))
    assert index.gpu() == Counter(chain(range(12)))
    assert holdings.pending_tokens == 0


def test_a_block_that_left_while_it_waited_is_not_told() -> None:
    index = told(new(), stored([2], 1, range(4, 8)), removed(2), stored([1], None, range(4)))
    assert index.gpu() == Counter(chain(range(4)))


def test_what_waits_is_bounded_and_the_oldest_gives_way() -> None:
    holdings = new(pending_tokens_max=8)
    told(holdings, *(stored([10 + n], 100 + n, range(4)) for n in range(5)))
    assert holdings.pending_tokens == 8
    assert holdings.counts.overflows == 3
    assert holdings.residents_count == 2


def test_residents_are_bounded() -> None:
    holdings = new(residents_max=2)
    index = told(holdings, stored([1, 2, 3], None, range(12)))
    assert index.gpu() == Counter(chain(range(12))[:2])
    assert (holdings.residents_count, holdings.counts.overflows) == (2, 1)


def test_a_parent_need_not_be_resident() -> None:
    known = KnownKeys(64)
    told(new(known), stored([1], None, range(4)))
    index = told(new(known), stored([2], 1, range(4, 8)))
    assert index.gpu() == Counter(chain(range(8))[1:])


def test_keys_are_bounded_and_the_least_lately_used_goes_first() -> None:
    known = KnownKeys(2)
    told(new(known), stored([1, 2], None, range(8)), stored([3], 1, range(4)))
    assert [known.find(name(n)) is not None for n in (1, 2, 3)] == [True, False, True]
    assert known.take_fresh()[name(2)] is None
    with pytest.raises(CallerError):
        KnownKeys(0)


def test_a_clear_empties_the_gpu_and_a_restart_everything() -> None:
    holdings = new()
    on_cpu = stored([9], None, range(4), place=CPU)
    index = told(holdings, stored([1], None, range(4)), on_cpu, stored([5], 4, range(4)))
    assert not holdings.uses_only_gpu()
    index.take(holdings.apply(AllCleared()))
    assert index.gpu() == Counter()
    assert holdings.residents_count == 1
    index.take(holdings.apply(stored([1], None, range(4))))
    assert index.gpu() == Counter(chain(range(4)))
    index.take(holdings.restart())
    assert (index.gpu(), holdings.residents_count, holdings.pending_tokens) == (Counter(), 0, 0)


def test_blocks_that_move_to_the_host_and_back_vanish_and_appear() -> None:
    holdings = new()
    there = BlocksMoved(Place(), CPU, (name(1),))
    index = told(holdings, stored([1], None, range(4)), there)
    assert index.gpu() == Counter()
    index.take(holdings.apply(BlocksMoved(CPU, Place(), (name(1), name(7)))))
    assert index.gpu() == Counter(chain(range(4)))
    assert holdings.counts.unknown_removals == 1
    index.take(holdings.apply(removed(1, place=None)))
    assert (index.gpu(), holdings.residents_count) == (Counter(), 0)


def test_after_a_loss_a_block_that_is_stored_again_has_one_copy() -> None:
    holdings = new()
    index = told(holdings, *[stored([1], None, range(4))] * 3)
    holdings.doubt()  # perhaps it was removed and stored since
    index.take(holdings.apply(stored([1], None, range(4))))
    index.take(holdings.apply(removed(1)))
    assert index.gpu() == Counter()


def test_a_hash_that_comes_to_stand_for_other_tokens_is_told_anew() -> None:
    holdings = new()
    index = told(holdings, stored([1], None, range(4)), stored([1], None, range(4, 8)))
    assert index.gpu() == Counter(chain(range(4, 8)))
    assert holdings.counts.contradictions == 1


PROMPTS = st.builds(
    Prompt,
    tokens=st.lists(st.integers(0, 1), min_size=0, max_size=24).map(tuple),
    salt=st.sampled_from([None, None, "s"]),
)
ADAPTED = st.builds(
    lambda tokens, known: Prompt(tokens, None, "ad" if known else "x", REF if known else None),
    st.lists(st.integers(0, 1), min_size=4, max_size=12).map(tuple),
    st.booleans(),
)
STEPS = st.lists(
    st.tuples(st.just("run"), PROMPTS | ADAPTED)
    | st.tuples(st.just("twice"), PROMPTS)
    | st.tuples(st.just("evict"), st.integers(0, 4))
    | st.tuples(st.just("clear"), st.none())
    | st.tuples(st.just("disk"), st.none()),
    max_size=25,
)


@settings(max_examples=120, deadline=None)
@given(steps=STEPS, int_hashes=st.booleans())
def test_an_index_knows_what_the_engine_holds_after_any_history(
    steps: list[tuple[str, object]], int_hashes: bool
) -> None:
    engine = EngineCache(POOL, 8, int_hashes=int_hashes)
    known = KnownKeys(1 << 12)
    holdings, index = new(known), Told()
    rows: dict[object, object] = {}
    keys: dict[EngineHash, bytes] = {}
    for what, argument in steps:
        events: list[object] = []
        if what == "run" or what == "twice":
            assert isinstance(argument, Prompt)
            events = engine.run(argument, side_by_side=what == "twice")
        elif what == "evict":
            assert isinstance(argument, int)
            events = engine.evict(argument)
        elif what == "clear":
            events = engine.clear()
        batch = decode(POLICY, wire.encoded(*events))
        assert not batch.faults
        for event in batch.events:
            index.take(holdings.apply(event))
        is_cleared, changed = holdings.take_rows()
        rows = {} if is_cleared else rows
        rows |= {(row.place, row.name): row for row in changed}
        for one, key in known.take_fresh().items():
            assert key is not None
            keys[one] = key
        if what == "disk":  # another bridge goes on where this one was
            known = KnownKeys(1 << 12)
            known.restore(keys.items())  # type: ignore[arg-type]
            holdings, index = new(known), Told()
            index.take(holdings.restore(rows.values()))  # type: ignore[arg-type]
        assert index.gpu() == engine.held()


NAMES = st.integers(1, 5)
PLACES = st.sampled_from([Place(), Place("GPU", "", 1), CPU])
ANY_STORED = st.builds(
    lambda names, parent, start, place, adapter, salt, unindexed, extras: BlocksStored(
        place, tuple(map(name, names)), None if parent is None else name(parent),
        np.arange(start, start + 4 * len(names), dtype=np.uint32), 4, adapter, salt, extras,
        unindexed,
    ),
    st.lists(NAMES, max_size=4),
    st.none() | NAMES,
    st.integers(0, 2),
    PLACES,
    st.sampled_from([None, None, "ad", "other"]),
    st.sampled_from([None, "", "s"]),
    st.sampled_from([None, None, None, *Unindexed]),
    st.dictionaries(
        st.integers(0, 5),
        st.sampled_from([BlockExtras((("ab" * 16, 0),)), BlockExtras((("x", 2**70),))]),
        max_size=1,
    ),
)  # fmt: skip
ANY_EVENT = (
    ANY_STORED
    | st.builds(
        lambda names, place: BlocksRemoved(place, tuple(map(name, names))),
        st.lists(NAMES, max_size=4), st.none() | PLACES,
    )
    | st.builds(
        lambda names, one, other: BlocksMoved(one, other, tuple(map(name, names))),
        st.lists(NAMES, max_size=3), PLACES, PLACES,
    )
    | st.just(AllCleared())
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    events=st.lists(ANY_EVENT, max_size=14),
    residents_max=st.integers(1, 6),
    pending_tokens_max=st.sampled_from([0, 8, 1000]),
    reports=st.sampled_from(Reports),
)
def test_whatever_an_engine_says_an_index_knows_what_the_books_say(
    events: list[object], residents_max: int, pending_tokens_max: int, reports: Reports
) -> None:
    holdings = new(
        residents_max=residents_max, pending_tokens_max=pending_tokens_max, reports=reports
    )
    index = Told()
    for event in events:
        index.take(holdings.apply(event))  # type: ignore[arg-type]
        books = Told()
        books.take(holdings.held())
        assert index.gpu() == books.gpu()
        assert holdings.residents_count <= residents_max
        assert holdings.pending_tokens <= pending_tokens_max
    index.take(holdings.restart())
    assert (index.gpu(), holdings.residents_count) == (Counter(), 0)


def test_a_hash_of_a_block_names_it_and_nothing_behind_it_until_its_key_is_known() -> None:
    prompt = Prompt(tuple(range(24)))
    cache = EngineCache(POOL, 16, int_hashes=False)
    cache.run(Prompt(prompt.tokens[:8]))
    behind = cache.run(prompt)  # four blocks behind two that nobody told of
    table = cache.table(prompt)
    assert table.keys is not None
    hashes = [int(one) for one in table.keys.hashes]
    names = [EngineHash(digest) for digest in table.digests]
    known = KnownKeys(100)
    holdings, index = EngineHoldings(HoldingsTerms(POOL), known), Told()
    for event in decode(POLICY, wire.encoded(*behind)).events:
        index.take(holdings.apply(event))
    assert (holdings.unresolved_count, +index.copies) == (4, Counter())
    assert set(holdings.unresolved()) == set(names[2:])

    index.take(holdings.learn(dict(zip(names[2:4], hashes[2:4], strict=True))))
    assert set(+index.copies) == {(Tier.GPU, one) for one in hashes[2:4]}
    assert holdings.unresolved_count == 2
    assert known.find(names[2]) == hashes[2].to_bytes(8, "little")
    assert holdings.learn({EngineHash(b"x" * 32): 1}) == []

    # The head is computed anew: every key is known now, and nothing is told twice.
    cache = EngineCache(POOL, 16, int_hashes=False)
    for event in decode(POLICY, wire.encoded(*cache.run(Prompt(prompt.tokens[:8])))).events:
        index.take(holdings.apply(event))
    assert index.copies == Counter({(Tier.GPU, one): 1 for one in hashes})
    assert (holdings.unresolved_count, holdings.counts.contradictions) == (0, 0)
    assert known.find(names[3]) == table.keys.key(3)
    rows = {row.name: row.key for row in holdings.take_rows()[1]}
    assert rows == {name: table.keys.key(n) for n, name in enumerate(names)}


def test_a_parent_of_which_only_a_hash_is_known_names_nothing_behind_it() -> None:
    known = KnownKeys(10)
    known.learn(EngineHash(b"p" * 8), PrefixKey(b"h" * 8))
    holdings = EngineHoldings(HoldingsTerms(POOL), known)
    tokens = np.arange(4, dtype=np.uint32)
    stored = BlocksStored(Place(), (EngineHash(b"c" * 8),), EngineHash(b"p" * 8), tokens, 4)
    assert holdings.apply(stored) == []
    assert holdings.unresolved_count == 1
    assert holdings.apply(BlocksRemoved(Place(), (EngineHash(b"c" * 8),))) == []
    assert holdings.unresolved_count == 0


def test_a_hash_does_not_replace_the_key_that_it_is_of() -> None:
    known = KnownKeys(10)
    name, key = EngineHash(b"n" * 32), PrefixKey(b"k" * 32)
    known.learn(name, key)
    known.learn(name, PrefixKey(key[:8]))
    assert known.find(name) == key
    known.learn(name, PrefixKey(b"other hash"[:8]))
    assert known.find(name) == b"other hash"[:8]
