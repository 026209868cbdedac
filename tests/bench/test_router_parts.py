"""The parts that the router bench relies on: engines in profile time, their caches, the client."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bench.router_engine import Engine, EngineShape, PrefixCache, Run, Work
from kvtier.bench.router_http import Connection, post
from kvtier.bench.router_load import Ask, ChatShape, Outcome, Pieces, chat_numbers, hit_rate
from kvtier.bench.router_mock import MockSpec, Worker
from kvtier.bench.router_profile import decode_s, prefill_s
from kvtier.bench.router_trace import TraceSizes, read_asks

CHAINS = [[chain * 100 + depth for depth in range(8)] for chain in range(4)]
for number, chain in enumerate(CHAINS[1:], start=1):
    chain[: number + 1] = CHAINS[0][: number + 1]  # they share beginnings, as chats do


class NaiveCache:
    """The same rules over a list: least recently used first, tails before heads."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.held: list[int] = []

    def insert(self, chain: Sequence[int]) -> tuple[list[int], list[int]]:
        gained = [block for block in chain if block not in self.held]
        self.held = [block for block in self.held if block not in chain] + list(chain)[::-1]
        cut = max(0, len(self.held) - self.blocks_max)
        lost, self.held = self.held[:cut], self.held[cut:]
        return gained, lost


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.sampled_from(CHAINS), st.integers(0, 8)), max_size=30),
)
def test_a_cache_holds_and_tells_what_its_naive_twin_does(
    blocks_max: int, steps: list[tuple[list[int], int]]
) -> None:
    cache, naive = PrefixCache(blocks_max), NaiveCache(blocks_max)
    for chain, length in steps:
        runs, lost = cache.insert(chain[:length])
        assert ([block for _, run in runs for block in run], lost) == naive.insert(chain[:length])
        assert len(cache) == len(naive.held)
        for other in CHAINS:
            leading = next((n for n, b in enumerate(other) if b not in naive.held), len(other))
            assert cache.match(other) == leading


def test_what_appears_is_told_with_the_block_before_it() -> None:
    cache = PrefixCache(100)
    assert cache.insert([1, 2, 3])[0] == [(0, [1, 2, 3])]
    assert cache.insert([1, 2, 3, 4])[0] == [(3, [4])]
    assert cache.insert([5, 2, 6])[0] == [(0, [5]), (2, [6])]


def test_the_profile_grows_with_work() -> None:
    assert prefill_s(1) == pytest.approx(0.0165)
    assert prefill_s(100) < prefill_s(1000) < prefill_s(10_000)
    assert decode_s(0.0) < decode_s(0.5) < decode_s(1.0)


async def _worked(shape: EngineShape, prompts: list[tuple[int, list[int]]]) -> list[int]:
    """Cached tokens of each request, all submitted at once, when all are done."""
    told: list[Run] = []
    engine = Engine(shape, lambda runs, _: told.extend(runs))
    done: asyncio.Queue[Work] = asyncio.Queue()
    works = [
        Work(tokens, chain, 2, lambda _: None, lambda _: None, done.put_nowait)
        for tokens, chain in prompts
    ]
    for work in works:
        engine.submit(work)
    async with asyncio.timeout(20):
        for _ in works:
            await done.get()
    assert engine.prompt_tokens == sum(tokens for tokens, _ in prompts)
    assert {block for _, run in told for block in run} == {b for _, chain in prompts for b in chain}
    return [work.cached_tokens for work in works]


def test_a_prompt_hits_what_an_earlier_one_left() -> None:
    shape = EngineShape(cache_blocks=100, time_scale=0.01)
    prompts = [(64, [1, 2, 3, 4]), (64, [1, 2, 3, 4]), (64, [1, 2, 9, 8]), (70, [7])]
    assert asyncio.run(_worked(shape, prompts)) == [0, 63, 32, 0]


def test_a_worker_answers_reports_usage_and_survives_what_is_no_json() -> None:
    async def scenario() -> None:
        worker = Worker(MockSpec(("w0",), cache_blocks=100, time_scale=0.01), "w0", None)
        await worker.open()
        connection = Connection(worker.port)
        body = {"model": "mock", "prompt": list(range(40)), "max_tokens": 2}
        for cached in (0, 32):
            reply = await connection.request(post("/v1/completions", json.dumps(body).encode()))
            usage = json.loads(reply.body)["usage"]
            assert usage["prompt_tokens"] == 40
            assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        reply = await connection.request(post("/v1/completions", json.dumps(streamed).encode()))
        assert reply.body.count(b"data: ") == 3
        assert b'"cached_tokens": 32' in reply.body
        assert b"data: [DONE]\n\n" in reply.body
        assert (await connection.request(post("/v1/completions", b"no"))).status == 200
        assert worker.stray == 1
        connection.close()
        worker.close()

    asyncio.run(scenario())


def test_prompts_share_exactly_the_pieces_that_they_name_alike() -> None:
    pieces = Pieces(16)
    one, other = (
        pieces.prompt(Ask(0.0, numbers, 40)).split(",") for numbers in ((1, 2, 3), (1, 2, 4))
    )
    assert len(one) == len(other) == 40
    assert one[:32] == other[:32]
    assert one[32:] != other[32:]


def test_a_turn_of_a_chat_begins_with_the_whole_turn_before() -> None:
    shape = ChatShape(chats_per_s=1, turns=3, turn_pieces=2, think_s=1, groups=2)
    first, second = chat_numbers(shape, 5, 0), chat_numbers(shape, 5, 1)
    assert second[: len(first)] == first
    assert len(second) == len(first) + 2
    assert chat_numbers(shape, 7, 0)[0] == first[0]
    assert chat_numbers(shape, 6, 0)[0] != first[0]


def test_hits_are_weighed_by_tokens_and_failures_are_left_out() -> None:
    outcomes = [
        Outcome(0, "w0", 100, 50, 0.1),
        Outcome(0, "w1", 300, 0, 0.1),
        Outcome(0, "", 600, 0, 0.0, "status 503"),
    ]
    assert hit_rate(outcomes) == 0.125
    assert hit_rate([]) == 0.0


def test_the_trace_is_sped_up_to_its_time_and_keeps_its_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at * 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, at]}
        for at in range(50)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    asks = read_asks(path, TraceSizes(seconds=10.0, rate=4.0))
    assert len(asks) == 40
    assert asks == sorted(asks, key=lambda ask: ask.at)
    assert asks[-1].at == pytest.approx(10.0)
    plain = [ask for ask in asks if ask.pieces[0] == 0]
    assert {ask.tokens_count for ask in plain} == {44}
    assert all(10 / 3 < ask.at < 20 / 3 for ask in asks if ask not in plain)
