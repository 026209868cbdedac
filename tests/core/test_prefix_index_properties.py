"""The native index answers as its oracle does, whatever is done to both."""

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.core.event_columns import EventKind
from kvtier.core.prefix_index import HolderSpec, LocateTerms
from kvtier.types import HOLDER_TIERS, HolderId, HolderKind, Tier
from tests.support.index_pair import Columns, Event, IndexPair, batch, rows

HOLDERS = st.integers(0, 7)
EDGE_HASHES = (0, 1, 2**64 - 1)


def chain(tree: int, fork: int, length: int) -> list[int]:
    """A chain that shares its first half with the other forks of its tree."""
    shared_blocks = length // 2
    trunk = [(tree + 1) * 1_000_003 + block for block in range(shared_blocks)]
    own = [
        (tree + 1) * 1_000_003 + (fork + 1) * 7919 + block
        for block in range(length - shared_blocks)
    ]
    return trunk + own


CHAINS = [chain(tree, fork, 24) for tree in range(3) for fork in range(3)] + [list(EDGE_HASHES)]


@st.composite
def pieces(draw: st.DrawFn) -> list[int]:
    """Blocks of one chain in order, from anywhere in it; sometimes out of order or repeated."""
    blocks = draw(st.sampled_from(CHAINS))
    start = draw(st.integers(0, len(blocks)))
    piece = blocks[start : start + draw(st.integers(0, 16))]
    return draw(st.sampled_from([piece, piece, piece, piece[::-1], piece + piece[:2]]))


specs = st.builds(
    HolderSpec,
    kind=st.sampled_from(
        [HolderKind.WORKER, HolderKind.WORKER, HolderKind.STORE, HolderKind.SHARED]
    ),
    node=st.integers(0, 1),
    namespaces=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple),
    pool=st.integers(0, 1),
    block_tokens=st.sampled_from([16, 32]),
)
events = st.tuples(
    st.sampled_from([EventKind.STORE, EventKind.STORE, EventKind.STORE, *EventKind]),
    st.sampled_from([Tier.GPU, Tier.GPU, *HOLDER_TIERS]),
    st.sampled_from([0, 1, *CHAINS[0]]),
    pieces(),
)


class PrefixIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pair = IndexPair()

    @rule(holder=HOLDERS, spec=specs)
    def add_holder(self, holder: int, spec: HolderSpec) -> None:
        self.pair.add(holder, spec)

    @rule(holder=HOLDERS)
    def remove_holder(self, holder: int) -> None:
        self.pair.remove_holder(holder)

    @rule(holder=HOLDERS)
    def hide(self, holder: int) -> None:
        self.pair.both(lambda index: index.hide(HolderId(holder)))

    @rule(holder=HOLDERS)
    def resume(self, holder: int) -> None:
        self.pair.both(lambda index: index.resume(HolderId(holder)))

    @rule(holder=HOLDERS, shard=st.integers(-1, 3), many=st.lists(events, max_size=4))
    def apply(self, holder: int, shard: int, many: list[Event]) -> None:
        """Clears with blocks, tiers that do not fit and shards that are not there are refused."""
        self.pair.both(lambda index: index.apply(HolderId(holder), shard, batch(*many)))

    @rule(data=st.data(), blocks=pieces(), parent=st.sampled_from([0, *CHAINS[1]]))
    def store(self, data: st.DataObject, blocks: list[int], parent: int) -> None:
        if self.pair.specs:
            lane = data.draw(st.sampled_from(self.pair.lanes()))
            self.pair.both(lambda index: index.store(*lane, blocks, parent))

    @rule(data=st.data(), blocks=pieces())
    def remove(self, data: st.DataObject, blocks: list[int]) -> None:
        if self.pair.specs:
            lane = data.draw(st.sampled_from(self.pair.lanes()))
            self.pair.both(lambda index: index.remove(*lane, blocks))

    @rule(
        holder=HOLDERS, tier=st.none() | st.sampled_from(HOLDER_TIERS), shard=st.none() | st.just(0)
    )
    def clear(self, holder: int, tier: Tier | None, shard: int | None) -> None:
        self.pair.both(lambda index: index.clear(HolderId(holder), tier, shard))

    @rule(holder=HOLDERS, blocks=pieces(), ticket=st.integers(0, 3), at=st.integers(0, 9))
    def predict(self, holder: int, blocks: list[int], ticket: int, at: int) -> None:
        self.pair.both(lambda index: index.predict(HolderId(holder), blocks, ticket, float(at)))

    @rule(ticket=st.integers(0, 3))
    def release(self, ticket: int) -> None:
        self.pair.both(lambda index: index.release(ticket))

    @rule(now=st.integers(0, 9))
    def expire(self, now: int) -> None:
        self.pair.both(lambda index: index.expire(float(now)))

    @rule(data=st.data(), blocks=pieces())
    def load(self, data: st.DataObject, blocks: list[int]) -> None:
        if self.pair.specs:
            lane = data.draw(st.sampled_from(self.pair.lanes()))
            source = IndexPair()
            source.add(int(lane[0]), self.pair.specs[lane[0]])
            source.both(lambda index: index.store(*lane, blocks))
            self.pair.both(lambda index: index.load(*lane, source.native.snapshot(*lane)))

    @rule(blocks=st.sampled_from(CHAINS), pool=st.integers(-1, 1))
    def match(self, blocks: list[int], pool: int) -> None:
        self.pair.match(blocks, pool)

    @rule(
        blocks=st.sampled_from(CHAINS),
        namespace=st.integers(-1, 2),
        most=st.integers(0, 3),
        turn=st.integers(0, 5),
    )
    def locate(self, blocks: list[int], namespace: int, most: int, turn: int) -> None:
        self.pair.locate(blocks, namespace, LocateTerms(most, turn))

    @invariant()
    def both_hold_the_same(self) -> None:
        self.pair.check()

    def teardown(self) -> None:
        for blocks in CHAINS:
            self.pair.match(blocks)


TestPrefixIndexMachine = PrefixIndexMachine.TestCase
TestPrefixIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def pages_long_chain(rng: random.Random, trees: list[list[int]]) -> list[int]:
    """A chain of up to five pages that forks off an earlier one, anywhere."""
    trunk = rng.choice(trees)
    kept = trunk[: rng.randrange(len(trunk) + 1)]
    return kept + [rng.getrandbits(64) for _ in range(rng.randrange(300 - min(290, len(kept))))]


@pytest.mark.parametrize("seed", range(6))
def test_long_chains_that_fork_grow_and_go_answer_as_the_oracle_does(seed: int) -> None:
    rng = random.Random(seed)
    pair = IndexPair()
    for holder in range(6):
        pair.add(holder, HolderSpec(HolderKind.WORKER, holder % 2, (0, 1)[: 1 + holder % 2], 0, 16))
    pair.add(6, HolderSpec(HolderKind.STORE, 0, (0,), 0, 16))
    pair.add(7, HolderSpec(HolderKind.SHARED, 0, (1,), 0, 16))
    trees: list[list[int]] = [[rng.getrandbits(64) for _ in range(200)]]
    for step in range(300):
        lane = rng.choice(pair.lanes())
        blocks = rng.choice(trees)
        action = rng.randrange(12)
        if action < 4:
            blocks = pages_long_chain(rng, trees)
            trees.append(blocks)
            pair.store(lane, blocks)
        elif action < 6:
            for position in range(len(blocks) // 2, min(len(blocks), len(blocks) // 2 + 40)):
                one = batch((EventKind.STORE, lane[1], blocks[position - 1], [blocks[position]]))
                pair.apply(lane, one)
        elif action < 8:
            suffix = blocks[rng.randrange(len(blocks) + 1) :][::-1]
            pair.remove(lane, suffix)
        elif action < 10:
            some = rng.sample(blocks, len(blocks) // 2)
            pair.remove(lane, some)
        elif action == 10:
            pair.clear(lane)
        else:
            pair.predict(lane[0], blocks, step % 5, float(step))
        pair.match(rng.choice(trees))
        if step % 20 == 0:
            pair.check()
    pair.check()
    for lane in pair.lanes():
        pair.clear(lane)
    pair.both(lambda index: index.expire(1e9))
    assert pair.native.stats().pages == 0


@pytest.mark.parametrize("seed", range(4))
def test_an_index_filled_from_snapshots_answers_alike(seed: int) -> None:
    rng = random.Random(seed)
    pair = IndexPair()
    for holder in range(4):
        pair.add(holder, HolderSpec(HolderKind.WORKER, holder % 2, (0, 1)[: 1 + holder % 2], 0, 16))
    pair.add(4, HolderSpec(HolderKind.STORE, 0, (0,), 0, 16))
    trees: list[list[int]] = [[rng.getrandbits(64) for _ in range(100)]]
    for _ in range(60):
        blocks = pages_long_chain(rng, trees)
        trees.append(blocks)
        lane = rng.choice(pair.lanes())
        pair.store(lane, blocks)
        if rng.random() < 0.5:
            some = rng.sample(blocks, len(blocks) // 3)
            pair.remove(lane, some)
    copy = pair.copied()
    for lane in pair.lanes():
        assert copy.digest(*lane) == pair.native.digest(*lane)
    for blocks in trees:
        query = np.array(blocks, np.uint64)
        assert rows(copy.match(query)) == rows(pair.native.match(query))


def test_a_batch_of_packed_bytes_does_what_its_arrays_do() -> None:
    pair = IndexPair()
    pair.add(0, HolderSpec(HolderKind.WORKER, 0, (0,), 0, 16))
    arrays = batch((EventKind.STORE, Tier.GPU, 0, [5, 6, 7]), (EventKind.REMOVE, Tier.GPU, 0, [6]))
    columns = (arrays.kinds, arrays.tiers, arrays.lengths, arrays.parents, arrays.hashes)
    packed = Columns(*(np.asarray(column).tobytes() for column in columns))
    pair.both(lambda index: index.apply(HolderId(0), 0, packed))
    pair.check()
    assert pair.match([5, 6, 7])[0][0] == 16
    assert pair.native.digest(HolderId(0), Tier.GPU, 0).xor == 5 ^ 7
