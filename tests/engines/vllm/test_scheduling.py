"""Scheduler side of the vLLM connector: what is loaded and saved, and what a failure leads to."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.identity import EngineIdentity, KvDtype, Pool
from kvtier.engines.vllm.facts import EngineFacts
from kvtier.engines.vllm.prefixes import PrefixHashes
from kvtier.engines.vllm.scheduling import (
    IDLE_WAIT_S,
    LOOKED_S,
    RECENT_S,
    Arrival,
    BlockNames,
    LoadOrder,
    Scheduled,
    Scheduling,
)
from kvtier.engines.vllm.settings import LoadPolicy, SavePolicy, Settings
from kvtier.engines.vllm.worth import Worth
from kvtier.types import Fingerprint

BLOCK = 32
NAMESPACES = (Fingerprint(bytes(32)),)
FACTS = EngineFacts(
    Pool("m", "r1", BLOCK), KvDtype.FLOAT32, 30, 3, 64, 1, bytes(32),
    EngineIdentity("vllm", "0.32.0", "sha256_cbor", "seed"),
)  # fmt: skip


@dataclass
class FakeAnswer:
    result: tuple[bool, ...] | None = None
    over: bool = False
    waited: list[float] = field(default_factory=list)
    arrives: Callable[[], None] | None = None
    """What happens when somebody waits."""

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        if self.arrives is not None:
            self.arrives()

    def done(self) -> bool:
        return self.over

    def held(self) -> tuple[bool, ...] | None:
        return self.result


@dataclass
class FakeStore:
    """Holds digests; answers when told to, or at once."""

    held: set[bytes] = field(default_factory=set)
    answers_at_once: bool = True
    answers: bool = True
    asked: list[BlockNames] = field(default_factory=list)
    pending: list[tuple[FakeAnswer, BlockNames]] = field(default_factory=list)

    def look(self, names: BlockNames, deadline_s: float) -> FakeAnswer:
        self.asked.append(names)
        answer = FakeAnswer()
        self.pending.append((answer, names))
        if self.answers_at_once:
            self.answer()
        return answer

    def answer(self) -> None:
        for answer, names in self.pending:
            answer.over = True
            if self.answers:
                answer.result = tuple(digest in self.held for digest in names.digests)
        self.pending.clear()

    def arrive_while_waited_for(self) -> FakeAnswer:
        """Have the one answer that is pending come then; returns it."""
        ((answer, _),) = self.pending
        answer.arrives = self.answer
        return answer


def digests(count: int, name: str = "prompt") -> list[bytes]:
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(count)]


def scheduling(store: FakeStore, save: SavePolicy = SavePolicy.PROMPT) -> Scheduling:
    return Scheduling(Settings(store="unix:/s", save=save), BLOCK, store, Worth(BLOCK, 0.0))


def arrival(names: Sequence[bytes], tokens: int, request_id: str = "r") -> Arrival:
    return Arrival(request_id, names, tokens, NAMESPACES)


def block_ids(count: int) -> list[int]:
    return [100 + i for i in range(count)]


def test_the_unbroken_run_beyond_what_the_engine_holds_is_loaded() -> None:
    names = digests(10)
    store = FakeStore(held=set(names[:7]) | {names[8]})
    side = scheduling(store)
    side.arrived(arrival(names, 10 * BLOCK + 5), now=0.0)
    assert side.matched("r", 2 * BLOCK, 0.0) == 5 * BLOCK
    side.allocated("r", block_ids(11), 5 * BLOCK)
    orders = side.step([], 0.0)
    assert orders.loads == (LoadOrder("r", tuple(names[2:7]), (102, 103, 104, 105, 106)),)
    assert side.step([], 0.0).loads == ()


def test_nothing_is_loaded_where_the_engine_holds_as_much() -> None:
    names = digests(4)
    side = scheduling(FakeStore(held=set(names[:2])))
    side.arrived(arrival(names, 4 * BLOCK), now=0.0)
    assert side.matched("r", 2 * BLOCK, 0.0) == 0
    side.allocated("r", block_ids(4), 0)
    assert side.step([], 0.0).loads == ()


def test_a_request_waits_for_the_answer_and_no_longer_than_the_deadline() -> None:
    names = digests(4)
    store = FakeStore(held=set(names), answers_at_once=False)
    side = scheduling(store)
    side.arrived(arrival(names, 4 * BLOCK), now=10.0)
    assert side.matched("r", 0, 10.0) is None
    assert side.matched("r", 0, 10.199) is None
    assert side.matched("r", 0, 10.201) == 0
    side.allocated("r", block_ids(4), 0)
    assert side.matched("r", 0, 10.21) is None  # after a preemption, say: a new lookup
    store.answer()
    assert side.matched("r", 0, 10.22) == 4 * BLOCK
    assert len(store.asked) == 2


def test_an_answer_that_came_in_time_is_used_without_waiting() -> None:
    names = digests(4)
    store = FakeStore(held=set(names), answers_at_once=False)
    side = scheduling(store)
    side.arrived(arrival(names, 4 * BLOCK), now=10.0)
    store.answer()
    assert side.matched("r", 0, 10.001) == 4 * BLOCK
    assert len(store.asked) == 1


def test_an_old_answer_is_asked_for_again() -> None:
    names = digests(4)
    store = FakeStore(held=set(names))
    side = scheduling(store)
    side.arrived(arrival(names, 4 * BLOCK), now=0.0)
    assert side.matched("r", 0, 0.0) == 4 * BLOCK
    store.held.clear()
    assert side.matched("r", 0, LOOKED_S) == 4 * BLOCK
    assert side.matched("r", 0, LOOKED_S + 0.1) == 0


def test_a_load_that_brought_nothing_makes_one_miss_and_the_blocks_are_saved_again() -> None:
    names = digests(4)
    store = FakeStore(held=set(names))
    side = scheduling(store)
    side.arrived(arrival(names, 4 * BLOCK + 1), now=0.0)
    assert side.matched("r", 0, 0.0) == 4 * BLOCK
    side.allocated("r", block_ids(5), 4 * BLOCK)
    side.step([], 0.0)
    side.loaded("r", 0, 0.01, 0.1)
    assert side.matched("r", 0, 0.1) == 0
    side.allocated("r", block_ids(5), 0)
    (save,) = side.step([Scheduled("r", 4 * BLOCK + 1, block_ids(5))], 0.2).saves
    assert save.digests == tuple(names)
    assert side.matched("r", 0, 0.3) == 4 * BLOCK  # preempted later: it may try again


def test_what_a_load_did_not_bring_is_saved_and_what_it_brought_is_not() -> None:
    names = digests(4)
    side = scheduling(FakeStore(held=set(names)))
    side.arrived(arrival(names, 4 * BLOCK), now=0.0)
    assert side.matched("r", 0, 0.0) == 4 * BLOCK
    side.allocated("r", block_ids(4), 4 * BLOCK)
    side.step([], 0.0)
    side.loaded("r", 3, 0.01, 0.1)
    (save,) = side.step([Scheduled("r", 4 * BLOCK, block_ids(4))], 0.2).saves
    assert save.digests == (names[3],)
    assert save.block_ids == (103,)


def test_blocks_are_saved_once_in_the_step_that_fills_them() -> None:
    names = digests(3)
    side = scheduling(FakeStore())
    side.arrived(arrival(names, 3 * BLOCK + 7), now=0.0)
    assert side.matched("r", 0, 0.0) == 0
    side.allocated("r", block_ids(4), 0)
    (first,) = side.step([Scheduled("r", BLOCK + 3, block_ids(2))], 0.0).saves
    assert (first.digests, first.block_ids) == ((names[0],), (100,))
    (second,) = side.step([Scheduled("r", 3 * BLOCK + 7, block_ids(4))], 0.1).saves
    assert (second.digests, second.block_ids) == (tuple(names[1:]), (101, 102))
    assert side.step([Scheduled("r", 3 * BLOCK + 8, block_ids(4))], 0.2).saves == ()


def test_two_requests_with_one_prefix_save_it_once_and_again_after_a_while() -> None:
    names = digests(2)
    side = scheduling(FakeStore())
    for request_id in ("a", "b", "c"):
        side.arrived(arrival(names, 2 * BLOCK, request_id), now=0.0)
    done = [Scheduled(r, 2 * BLOCK, block_ids(2)) for r in ("a", "b")]
    assert len(side.step(done, 0.0).saves) == 1
    late = side.step([Scheduled("c", 2 * BLOCK, block_ids(2))], RECENT_S + 0.1)
    assert len(late.saves) == 1  # the store may not have taken them


def test_generated_blocks_are_saved_under_the_policy_all_alone() -> None:
    for policy, saved in ((SavePolicy.PROMPT, 1), (SavePolicy.ALL, 2), (SavePolicy.NONE, 0)):
        names = digests(1)
        side = scheduling(FakeStore(), policy)
        side.arrived(arrival(names, BLOCK), now=0.0)
        count = sum(len(s.digests) for s in side.step([Scheduled("r", BLOCK, [100])], 0.0).saves)
        names += digests(2)[1:]  # the engine's own list grows
        step = side.step([Scheduled("r", 2 * BLOCK, [100, 101])], 1.0)
        assert count + sum(len(s.digests) for s in step.saves) == saved


def test_tokens_that_are_computed_but_not_known_yet_are_not_saved() -> None:
    names = digests(1)
    side = scheduling(FakeStore(), SavePolicy.ALL)
    side.arrived(arrival(names, BLOCK), now=0.0)
    (save,) = side.step([Scheduled("r", 2 * BLOCK, [100, 101])], 0.0).saves
    assert save.digests == (names[0],)


def test_with_nobody_answering_nothing_is_loaded_or_saved() -> None:
    names = digests(3)
    store = FakeStore(held=set(names), answers=False)
    side = scheduling(store)
    side.arrived(arrival(names, 3 * BLOCK), now=0.0)
    assert side.matched("r", 0, 0.1) == 0
    side.allocated("r", block_ids(3), 0)
    assert side.step([Scheduled("r", 3 * BLOCK, block_ids(3))], 0.1).saves == ()
    assert side.counts.lookups_unanswered == 1


def test_a_prompt_of_less_than_a_block_asks_nobody() -> None:
    store = FakeStore()
    side = scheduling(store)
    side.arrived(arrival([], BLOCK - 1), now=0.0)
    assert side.matched("r", 0, 0.0) == 0
    assert store.asked == []


def test_saves_carry_prefix_hashes_where_the_index_can_speak_of_them() -> None:
    names, tokens = digests(2), list(range(2 * BLOCK))
    hashes = PrefixHashes(bytes(32), tokens, BLOCK)
    side = scheduling(FakeStore())
    side.arrived(Arrival("r", names, len(tokens), NAMESPACES, None, hashes), now=0.0)
    (save,) = side.step([Scheduled("r", 2 * BLOCK, block_ids(2))], 0.0).saves
    assert save.prefix_hashes == tuple(hashes)


def test_a_finished_request_is_forgotten() -> None:
    side = scheduling(FakeStore())
    side.arrived(arrival(digests(2), 2 * BLOCK), now=0.0)
    side.finished("r")
    side.finished("r")
    assert not side.knows("r")
    assert side.matched("r", 0, 0.0) == 0
    assert side.step([Scheduled("r", 2 * BLOCK, block_ids(2))], 0.0).saves == ()
    side.allocated("r", block_ids(2), 2 * BLOCK)
    side.loaded("r", 0, 0.01, 0.1)
    assert side.step([], 0.0).loads == ()


@given(
    held=st.lists(st.booleans(), max_size=12),
    computed=st.integers(0, 12),
)
def test_what_is_offered_is_held_unbroken_and_within_the_prompt(
    held: list[bool], computed: int
) -> None:
    names = digests(len(held))
    store = FakeStore(held={d for d, is_held in zip(names, held, strict=True) if is_held})
    side = scheduling(store)
    side.arrived(arrival(names, len(held) * BLOCK), now=0.0)
    tokens = side.matched("r", computed * BLOCK, 0.0)
    assert tokens is not None
    blocks = tokens // BLOCK
    stop = computed + blocks
    assert all(held[computed:stop])
    assert stop >= len(held) or not held[stop]


def test_prefix_hashes_grow_with_the_tokens_and_equal_those_of_all_at_once() -> None:
    tokens = list(range(BLOCK + 5))
    growing = PrefixHashes(bytes(32), tokens, BLOCK)
    assert len(growing) == 1
    first = growing[0]
    tokens += range(500, 500 + 3 * BLOCK)
    assert len(growing) == 4
    assert growing[0] == first
    assert growing[:] == list(PrefixHashes(bytes(32), tokens, BLOCK))


def test_a_store_slower_than_computing_is_not_loaded_from_and_tried_again_later() -> None:
    names = digests(20)
    side = scheduling(FakeStore(held=set(names)))
    for number in range(6):
        now = float(number)
        side.arrived(arrival(names, 20 * BLOCK, f"r{number}"), now)
        orders = side.step([], now, tokens=2_000)
        side.stepped(orders.number, now + 0.2)  # 10,000 tokens a second: 20 blocks take 64 ms
        if side.matched(f"r{number}", 0, now + 0.2):
            side.loaded(f"r{number}", 20, 0.5, now + 0.7)
    side.arrived(arrival(names, 20 * BLOCK, "s"), 6.0)
    assert side.matched("s", 0, 6.0) == 0
    assert side.counts.loads_not_worth_it > 0
    side.arrived(arrival(names, 20 * BLOCK, "t"), 206.0)
    assert side.matched("t", 0, 206.0) == 20 * BLOCK


def test_an_engine_that_has_computed_nothing_yet_loads_however_slow_its_first_load_was() -> None:
    worth = Worth(BLOCK, 0.0)
    worth.loaded(60, 3.0, 1.0)
    assert worth.load_s(60, 1.0) > worth.compute_s(60, 1.0)
    assert worth.is_worth_it(60, 1.0)
    worth.step_begun(1, 60 * BLOCK, 2.0)
    worth.step_ended(1, 2.1)
    assert not worth.is_worth_it(60, 2.1)


def test_an_engine_that_computes_nothing_waits_for_an_answer_instead_of_going_round() -> None:
    names = digests(4)
    side = scheduling(store := FakeStore(held=set(names), answers_at_once=False))
    side.arrived(arrival(names, 4 * BLOCK), 0.0)
    answer = store.arrive_while_waited_for()
    assert side.matched("r", 0, 0.001) == 4 * BLOCK
    assert answer.waited == [IDLE_WAIT_S]


def test_an_engine_that_computes_or_has_waited_asks_again_instead() -> None:
    names = digests(4)
    side = scheduling(store := FakeStore(held=set(names), answers_at_once=False))
    side.step([], 0.0, tokens=100)
    side.arrived(arrival(names, 4 * BLOCK), 0.0)
    answer = store.arrive_while_waited_for()
    assert side.matched("r", 0, 0.001) is None
    side.step([], 0.1)
    assert side.matched("r", 0, IDLE_WAIT_S) is None
    assert answer.waited == []


def test_steps_that_overlap_are_timed_by_what_each_adds() -> None:
    worth = Worth(BLOCK, 0.0)
    for number in range(1, 21):
        worth.step_begun(number, 1_000, number * 0.1)
        worth.step_ended(number - 1, number * 0.1 + 0.05)
    assert 0.5 < worth.compute_s(1_000 // BLOCK, 2.1) / 0.1 < 2
    told = worth.compute_s(1_000 // BLOCK, 2.2)
    worth.step_ended(20, 2.15)
    worth.step_ended(20, 9.0)  # told twice
    worth.step_ended(99, 9.0)  # never begun
    assert 0.5 < worth.compute_s(1_000 // BLOCK, 2.2) / told < 2


def test_a_step_whose_end_nobody_told_is_not_taken_for_another() -> None:
    worth = Worth(BLOCK, 0.0)
    worth.step_begun(1, 1_000, 0.0)
    worth.step_begun(2, 1_000, 100.0)
    worth.step_ended(2, 100.2)
    assert worth.compute_s(1_000 // BLOCK, 100.2) < 1.0
    worth.step_ended(1, 200.0)
    assert worth.compute_s(1_000 // BLOCK, 200.0) < 1.0


def test_steps_that_compute_nothing_have_no_number_and_others_one_of_their_own() -> None:
    side = scheduling(FakeStore())
    numbers = [side.step([], 0.0, tokens).number for tokens in (0, 5, 0, 7)]
    assert numbers == [0, 1, 0, 2]


def test_what_is_held_is_loaded_whatever_it_costs_where_the_operator_says_so() -> None:
    names = digests(20)
    always = Settings(store="unix:/s", load=LoadPolicy.ALWAYS)
    side = Scheduling(always, BLOCK, FakeStore(held=set(names)), Worth(BLOCK, 0.0))
    side.loaded("slow", 20, 50.0, 0.0)
    side.arrived(arrival(names, 20 * BLOCK), 0.1)
    assert side.matched("r", 0, 0.1) == 20 * BLOCK
    assert side.counts.loads_not_worth_it == 0


def test_after_a_reset_requests_begin_anew_under_the_new_generation() -> None:
    names = digests(4)
    store = FakeStore(held=set(names))
    side = scheduling(store)
    side.arrived(arrival(names, 4 * BLOCK), 0.0)
    assert side.matched("r", 0, 0.0) == 4 * BLOCK
    fresh = replace(FACTS, generation="g2")
    side.renewed(fresh)
    store.held.clear()
    assert side.matched("r", 0, 0.1) == 0
    assert store.asked[-1].namespaces == fresh.namespaces() != FACTS.namespaces()
    side.allocated("r", block_ids(4), 0)
    (order,) = side.step([Scheduled("r", 4 * BLOCK, block_ids(4))], 0.2, 4 * BLOCK).saves
    assert order.generation == "g2"
    assert order.prefix_hashes == ()
    assert list(order.digests) == names


def test_what_is_computed_on_blocks_of_before_a_reset_is_not_saved_until_the_next_one() -> None:
    names = digests(4)
    side = scheduling(FakeStore())
    side.arrived(arrival(names, 4 * BLOCK), 0.0)
    assert len(side.step([Scheduled("r", 2 * BLOCK, block_ids(4))], 0.0, 2 * BLOCK).saves) == 1
    side.renewed(replace(FACTS, generation="g2"))
    side.save_nothing()
    assert side.matched("r", 0, 0.1) == 0
    side.arrived(arrival(digests(4, "later"), 4 * BLOCK, "later"), 0.1)
    ran = [Scheduled(name, 4 * BLOCK, block_ids(4)) for name in ("r", "later")]
    assert side.step(ran, 0.2, 6 * BLOCK).saves == ()
    side.renewed(replace(FACTS, generation="g3"))
    assert side.matched("r", 0, 0.3) == 0
    (order,) = side.step([Scheduled("r", 4 * BLOCK, block_ids(4))], 0.4, 4 * BLOCK).saves
    assert (order.generation, list(order.digests)) == ("g3", names)


def test_small_steps_say_nothing_of_prefill() -> None:
    worth = Worth(BLOCK, 0.0)
    before = worth.compute_s(10, 0.0)
    worth.step_begun(1, 8, 0.0)
    worth.step_ended(1, 5.0)
    assert worth.compute_s(10, 0.0) == before
