"""What the connector sees of vLLM's pool, held against the pool; the socket to bridges."""

import contextlib
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.engine_holdings import Appeared, KnownKeys
from kvtier.core.engine_residents import FrameReader, Hello, Rows, SlotBooks, SlotState, Synced
from kvtier.core.identity import Pool, chain_root
from kvtier.engines.vllm.residents import (
    NO_KEYS,
    SWEEP_BLOCKS_MIN,
    SWEEP_STEPS,
    FeedTerms,
    ResidentsFeed,
    SlotTable,
)
from kvtier.limits import ENGINE_FEED_CLIENTS_MAX
from tests.harness.waiting import eventually
from tests.support.fake_engine import EngineCache, Prompt, Slot

POOL = Pool("model", "rev", 4)
ROOT = chain_root(POOL, None, None)


@dataclass
class Engine:
    """A pool and a connector that sees its steps."""

    blocks: int = 12
    cache: EngineCache = field(init=False)
    table: SlotTable = field(init=False)
    books: SlotBooks = field(init=False)
    requests: int = 0

    def __post_init__(self) -> None:
        self.cache = EngineCache(POOL, self.blocks)
        self.table = SlotTable(self.cache.slots, bytes)
        self.books = SlotBooks(self.blocks, KnownKeys(1_000))

    def run(self, prompt: Prompt, *, side_by_side: bool = False) -> None:
        self.cache.run(prompt, side_by_side=side_by_side)
        seen = self.cache.table(prompt)
        self.requests += 1
        name = str(self.requests)
        self.table.arrived(name, seen.digests, seen.keys or NO_KEYS)
        self.table.follow(name, seen.slots)
        self.table.handed_out(seen.slots)
        self.table.end_step()
        self.table.finished(name, seen.slots)

    def listen(self) -> set[int]:
        """What a bridge that was told all changes would tell its index."""
        self.books.take(Rows(self.table.rows(self.table.take_changed())))
        self.books.settle()
        return hashes_of(self.books)


def prompt(chain: int, blocks: int, salt: str | None = None) -> Prompt:
    return Prompt(tuple(100 * chain + n for n in range(4 * blocks)), salt)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 5), st.sampled_from(["run", "twice", "clear"])),
        max_size=15,
    )
)
def test_what_is_told_is_what_the_pool_holds_after_every_step(
    steps: list[tuple[int, int, str]],
) -> None:
    engine = Engine()
    for chain, blocks, what in steps:
        if what == "clear":
            engine.cache.clear()
            engine.table.end_step()
        else:
            engine.run(prompt(chain, blocks), side_by_side=what == "twice")
        assert engine.listen() == set(engine.cache.held())
        assert engine.books.unknown_count == 0


def test_changes_that_nobody_listened_to_are_told_as_they_are_in_the_end() -> None:
    engine = Engine(blocks=4)
    for chain in range(6):
        engine.run(prompt(chain, 3))
    assert len(engine.table.take_changed()) == 4
    engine.books.take(Rows(engine.table.held()))
    assert engine.listen() == set(engine.cache.held())


def test_a_request_is_followed_as_its_blocks_fill_and_after_it_moved() -> None:
    slots = [Slot() for _ in range(8)]
    table = SlotTable(slots, bytes)
    digests = [bytes([n]) * 32 for n in range(4)]

    @dataclass
    class Keys:
        def __len__(self) -> int:
            return 4

        def key(self, at: int) -> bytes:
            return bytes([at + 1]) * 32

    def fill(slot: int, number: int) -> None:
        slots[slot].block_hash = digests[number]

    def keyed() -> dict[int, bytes]:
        table.end_step()
        found = Rows(table.held()).each()
        return {slot: key for slot, state, _, key in found if state == SlotState.KEYED}

    table.arrived("r", digests, Keys())
    fill(5, 0)
    table.follow("r", [5, 6])
    assert keyed() == {5: b"\x01" * 32}
    fill(6, 1)
    table.follow("r", [5, 6, 7])
    assert keyed() == {5: b"\x01" * 32, 6: b"\x02" * 32}
    for slot in (5, 6):  # preempted, and resumed in other blocks
        slots[slot].block_hash = None
    fill(1, 0)
    fill(2, 1)
    fill(3, 2)
    table.follow("r", [1, 2, 3])
    table.handed_out([5, 6])
    assert keyed() == {1: b"\x01" * 32, 2: b"\x02" * 32, 3: b"\x03" * 32}


def test_a_block_whose_request_was_not_seen_is_told_without_a_key_until_one_is() -> None:
    engine = Engine()
    one = prompt(1, 3)
    engine.cache.run(one)
    engine.table.end_step()
    assert engine.listen() == set()
    assert engine.books.unknown_count == 3
    engine.run(one)
    assert engine.listen() == set(engine.cache.held())
    assert engine.books.unknown_count == 0


def test_a_reset_of_a_large_pool_is_noticed_by_the_next_step_that_meets_it() -> None:
    engine = Engine(blocks=40 * SWEEP_BLOCKS_MIN)
    for chain in range(40):
        engine.run(prompt(chain, 30))
    assert len(engine.listen()) == 1_200
    engine.cache.clear()
    for _ in range(SWEEP_STEPS):
        engine.table.end_step()
        if not engine.listen():
            return
    raise AssertionError(f"{len(engine.listen())} blocks are still told")


def test_resets_one_after_the_other_are_each_noticed_by_the_step_of_the_request_that_follows() -> (
    None
):
    """After which an engine may rest: what is not seen then stays shown."""
    engine = Engine(blocks=200)
    for chain in range(4):
        engine.run(prompt(chain, 30))
        engine.run(prompt(10 + chain, 30))
        engine.cache.clear()
        engine.run(prompt(20 + chain, 2))
        assert engine.listen() == set(engine.cache.held())


def test_a_prompt_without_name_is_told_as_such() -> None:
    engine = Engine()
    engine.run(Prompt(tuple(range(8)), None, "adapter", None))
    assert engine.listen() == set()
    assert (engine.books.held_count, engine.books.unknown_count) == (2, 0)


# ---- the socket


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[ResidentsFeed]:
    made = ResidentsFeed(FeedTerms(tmp_path / "run", 2, ROOT), bytes)
    yield made
    made.close()


class Bridge:
    """One that listens, with books of its own."""

    def __init__(self, path: Path, blocks: int = 8) -> None:
        self.books = SlotBooks(blocks, KnownKeys(10_000))
        self.hello: Hello | None = None
        self._reader = FrameReader()
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(20)
        self.connection.connect(str(path))

    def __enter__(self) -> "Bridge":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def listen(self) -> "Bridge":
        """Take what comes until all is told."""
        while True:
            data = self.connection.recv(1 << 16)
            assert data, "the feed ended"
            is_synced = False
            for frame in self._reader.take(data):
                match frame:
                    case Hello():
                        self.hello = frame
                    case Rows():
                        self.books.take(frame)
                    case Synced():
                        self.books.settle()
                        is_synced = True
            if is_synced:
                return self

    def knows(self, held: Iterable[int]) -> None:
        """Listen until the books are right."""
        wanted = set(held)
        eventually(lambda: hashes_of(self.listen().books) == wanted, 30, f"{len(wanted)} told")


def hashes_of(books: SlotBooks) -> set[int]:
    """What an index is to know."""
    found: set[int] = set()
    for change in books.held():
        assert isinstance(change, Appeared)
        found |= set(change.hashes.tolist())
    return found


def step(feed: ResidentsFeed, cache: EngineCache, one: Prompt, name: str) -> None:
    cache.run(one)
    seen = cache.table(one)
    feed.arrived(name, seen.digests, seen.keys or NO_KEYS)
    feed.allocated(name, seen.slots)
    feed.step([(name, seen.slots)], [seen.slots])
    feed.finished(name, seen.slots)


def test_a_bridge_is_told_all_at_first_and_then_what_changes(
    feed: ResidentsFeed, tmp_path: Path
) -> None:
    cache = EngineCache(POOL, 8)
    feed.bind(cache.slots)
    step(feed, cache, prompt(1, 3), "a")
    path = tmp_path / "run" / "residents-2.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with Bridge(path) as bridge:
        hello = bridge.listen().hello
        assert hello is not None
        assert (hello.rank, hello.slots, hello.root) == (2, 8, ROOT)
        assert hashes_of(bridge.books) == set(cache.held())
        step(feed, cache, prompt(2, 7), "b")
        bridge.knows(cache.held())


def test_bridges_beyond_the_ceiling_are_turned_away_and_the_others_go_on(
    feed: ResidentsFeed, tmp_path: Path
) -> None:
    cache = EngineCache(POOL, 8)
    feed.bind(cache.slots)
    path = tmp_path / "run" / "residents-2.sock"
    with contextlib.ExitStack() as stack:
        few = [stack.enter_context(Bridge(path)) for _ in range(ENGINE_FEED_CLIENTS_MAX)]
        for bridge in few:
            bridge.listen()
        with Bridge(path) as late:
            assert late.connection.recv(1) == b""
        few.pop().connection.close()
        step(feed, cache, prompt(1, 2), "a")
        for bridge in few:
            bridge.knows(cache.held())


def test_a_bridge_that_does_not_read_holds_up_nobody(feed: ResidentsFeed, tmp_path: Path) -> None:
    blocks = 4_000
    cache = EngineCache(POOL, blocks)
    feed.bind(cache.slots)
    path = tmp_path / "run" / "residents-2.sock"
    with Bridge(path, blocks) as lazy, Bridge(path, blocks) as eager:
        lazy.listen()
        eager.listen()
        for chain in range(60):  # much more than a socket's buffers hold
            step(feed, cache, prompt(chain, 200), str(chain))
        eager.knows(cache.held())
        lazy.knows(cache.held())


def test_a_folder_that_others_may_write_to_gets_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    feed = ResidentsFeed(FeedTerms(folder, 0, ROOT), bytes)
    feed.bind([Slot()])
    assert not feed.is_on
    feed.step([], [])
    assert list(folder.iterdir()) == []
    feed.close()


def test_the_socket_of_a_dead_engine_is_taken_over_and_a_live_one_s_is_not(
    feed: ResidentsFeed, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "residents-2.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    feed.bind([Slot()])
    assert feed.is_on
    second = ResidentsFeed(FeedTerms(path.parent, 2, ROOT), bytes)
    second.bind([Slot()])
    assert not second.is_on
    second.close()
    with Bridge(path, 1) as bridge:
        assert bridge.listen().hello is not None


def test_a_pool_that_is_not_as_expected_ends_the_feed_and_not_the_engine(
    feed: ResidentsFeed, tmp_path: Path
) -> None:
    @dataclass
    class Strange:
        @property
        def block_hash(self) -> bytes:
            raise AttributeError("block_hash")

    blocks: Sequence[Strange] = [Strange()]
    feed.bind(blocks)
    path = tmp_path / "run" / "residents-2.sock"
    with Bridge(path, 1) as bridge:
        bridge.listen()
        feed.step([], [[0]])
        assert not feed.is_on
        while bridge.connection.recv(100):
            pass
    feed.step([], [[0]])
