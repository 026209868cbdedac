"""Our connector inside real vLLM servers: what one computed another loads, whatever the store does.

Runs in `make test-vllm`; skipped where there is no vLLM. The tests share two servers and a store,
and run in order: the first begins before there is a store.
"""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.types import Tier
from tests.harness.processes import Launch, ProcessRunner
from tests.harness.proxy import NO_FAULTS, Direction, Faults, Flow, TcpProxy
from tests.harness.toml_text import TomlTable
from tests.harness.waiting import eventually
from tests.support.paged_models import smollm2
from tests.support.spoiling import spoil_store
from tests.support.store_cluster import MIB, StoreProcess, store_launch
from tests.support.vllm_servers import (
    BLOCK_TOKENS,
    PYTHON,
    WHY_NOT,
    Answer,
    VllmServer,
    launch_vllm,
    names_of,
    prompt,
    start_vllm,
    stored_by,
    whole,
)

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

DRAM: TomlTable = {"bytes_max": 512 * MIB, "slab_bytes": 64 * MIB, "blocks_max": 4096}
NVME: TomlTable = {"bytes_max": 2048 * MIB, "write_policy": "on_seal"}
LATE_S = 5.0
PATIENT: TomlTable = {"lookup_ms": 60_000, "load_ms": 20_000}
"""Of B, whose store answers late."""
LOAD_S = 20.0


@dataclass(slots=True)
class Rig:
    """Two servers of one model on one store, which begins when it is asked for; B's calls to it
    pass through a proxy, its payload through shared memory."""

    a: VllmServer
    b: VllmServer
    proxy: TcpProxy
    directory: Path
    model: Path
    runner: ProcessRunner
    launch: tuple[Launch, int]
    started: StoreProcess | None = None

    @property
    def socket(self) -> str:
        return f"unix:{self.directory / 'store' / 'run' / 'store.sock'}"

    @property
    def store(self) -> StoreProcess:
        """The store, started at the first question."""
        if self.started is None:
            launch, port = self.launch
            folder = self.directory / "store" / "run"
            self.started = StoreProcess(self.runner.start(launch), port, folder)
        return self.started

    def await_tier(self, tokens: list[int], tier: Tier) -> None:
        """Wait until all whole blocks of a prompt are in a tier of the store."""
        names = names_of(self.a, tokens)

        async def tiers() -> list[frozenset[Tier]]:
            async with self.store.client(remote=True) as client:
                return await client.contains(names)

        def is_there() -> bool:
            return all(tier in found for found in asyncio.run(tiers()))

        eventually(is_there, 120, f"all blocks are in {tier.name}")

    def on_disk_only(self, tokens: list[int]) -> None:
        """Have the store start anew once the blocks of a prompt are on its disk."""
        self.await_tier(tokens, Tier.NVME)
        self.store.process.terminate()
        self.store.process.wait(60)
        self.store.process.spawn()
        self.store.process.wait_ready()


@pytest.fixture(scope="module")
def storeless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model = smollm2(tmp_path_factory).directory
    directory = tmp_path_factory.mktemp("vllm")
    socket = f"unix:{directory / 'store' / 'run' / 'store.sock'}"
    with ProcessRunner("vllm-connector", directory) as runner:
        launch, port = store_launch(runner, directory / "store", dram=DRAM, nvme=NVME)
        with TcpProxy(("127.0.0.1", port)) as proxy:
            a, b = start_vllm(
                runner,
                launch_vllm("vllm-a", model, socket),
                launch_vllm("vllm-b", model, proxy.address, extra=PATIENT),
            )
            yield Rig(a, b, proxy, directory, model, runner, (launch, port))


@pytest.fixture
def rig(storeless: Rig) -> Rig:
    """With its store, whichever test is the first to want it."""
    if not storeless.store.process.alive:  # a test that failed has left it so
        storeless.store.process.restart()
    return storeless


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The servers live as long as the module: its fixture ends them."""


def test_servers_without_a_store_serve_and_hit_within_seconds_of_its_appearance(
    storeless: Rig,
) -> None:
    tokens = prompt(10, 300)
    assert storeless.started is None
    first = storeless.a.complete(tokens)
    assert (first.cached_tokens, len(first.tokens)) == (0, 32)
    storeless.a.forget()
    assert storeless.a.complete(tokens, 1).cached_tokens == 0
    assert storeless.store.process.alive

    def hits() -> bool:
        storeless.a.forget()
        return storeless.a.complete(tokens, 1).cached_tokens == whole(tokens)

    eventually(
        hits, 10 + 10 * storeless.a.first_token_s(prompt(11, 300)), "hits after the store came"
    )
    await_hits(storeless.b, tokens)
    storeless.b.forget()
    assert storeless.b.complete(tokens).equals(first)
    eventually(lambda: storeless.b.count("loaded") > 0, 60, "B counts what it loaded")


def await_hits(server: VllmServer, tokens: list[int]) -> None:
    """Wait until a server loads a prompt: it leaves a store alone for a while that was away."""

    def hits() -> bool:
        server.forget()
        return server.complete(tokens, 1).cached_tokens == whole(tokens)

    eventually(hits, 120, f"{server.process.name} loads")


def test_a_second_server_answers_from_what_the_first_computed(rig: Rig) -> None:
    tokens = prompt(1, 2_000)
    first = stored_by(rig.a, tokens)
    before = rig.b.count("loaded"), rig.b.loaded_tokens
    second = rig.b.complete(tokens)
    assert second.cached_tokens >= 0.95 * len(tokens)
    rig.b.gained("loaded", before[0], len(tokens) // BLOCK_TOKENS)
    assert rig.b.loaded_tokens - before[1] >= 0.95 * len(tokens)
    assert second.equals(first)


def test_a_salt_keeps_requests_apart_and_equal_salts_share(rig: Rig) -> None:
    tokens = prompt(2, 200)
    stored_by(rig.a, tokens, cache_salt="one")
    assert rig.b.complete(tokens, 1, cache_salt="two").cached_tokens == 0
    assert rig.b.complete(tokens, 1).cached_tokens == 0
    assert rig.b.complete(tokens, 1, cache_salt="one").cached_tokens == whole(tokens)


def test_a_killed_server_loads_from_the_store_when_it_is_back(rig: Rig) -> None:
    tokens = prompt(3, 600)
    first = stored_by(rig.a, tokens)
    rig.a.process.restart()
    again = rig.a.complete(tokens)
    assert again.cached_tokens == whole(tokens)
    assert again.equals(first)


def test_with_the_store_gone_everything_is_computed_and_it_is_found_again(rig: Rig) -> None:
    known = prompt(4, 600)
    first = stored_by(rig.a, known)
    rig.store.process.kill()
    assert rig.b.complete(known).equals(first)
    fresh = rig.b.complete(prompt(5, 300))
    assert (fresh.cached_tokens, len(fresh.tokens)) == (0, 32)
    rig.store.process.restart()

    def hits() -> bool:
        rig.b.forget()
        return rig.b.complete(known, 1).cached_tokens == whole(known)

    eventually(hits, 10 + 10 * rig.a.first_token_s(prompt(12, 600)), "hits after it came back")
    rig.b.forget()
    assert rig.b.complete(known).equals(first)


@contextmanager
def held_up(rig: Rig, tokens: list[int]) -> Iterator[Future[Answer]]:
    """B's answer to a prompt whose load is under way, and cannot end: what the store says is held.

    Until then the store's answers are late, so that there is time to see that a load has begun.
    """
    small = prompt(tokens[0], 70)
    stored_by(rig.a, small, 1)
    rig.await_tier(small, Tier.NVME)
    rig.on_disk_only(tokens)
    await_hits(rig.b, small)
    rig.b.forget()
    ordered, ended = rig.b.count("loads_ordered"), ended_loads(rig)
    rig.proxy.set(Direction.TO_CLIENT, Faults(delay_s=LATE_S))
    try:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(rig.b.complete, tokens)
            eventually(lambda: rig.b.count("loads_ordered") > ordered, 60, "a load has begun")
            rig.proxy.set(Direction.TO_CLIENT, Faults(flow=Flow.HOLD))
            assert ended_loads(rig) == ended
            assert not answer.done()
            yield answer
    finally:
        rig.proxy.set(Direction.TO_CLIENT, NO_FAULTS)
        rig.store.process.restart()


def ended_loads(rig: Rig) -> float:
    """Blocks of loads that are over, at B."""
    return rig.b.count("loaded") + rig.b.count("not_loaded")


def cold_s(rig: Rig, seed: int) -> float:
    """Seconds of a whole answer to a prompt of 600 tokens that nobody has."""
    began = time.monotonic()
    rig.b.complete(prompt(seed, 600))
    return time.monotonic() - began


def test_a_store_that_is_killed_during_a_load_costs_only_what_it_would_have_brought(
    rig: Rig,
) -> None:
    known = prompt(6, 600)
    first = stored_by(rig.a, known)
    before = rig.b.count("not_loaded"), rig.b.count("loads_failed")
    with held_up(rig, known) as answer:
        began = time.monotonic()
        rig.store.process.kill()
        rig.proxy.reset()
        assert answer.result(300).equals(first)
        took_s = time.monotonic() - began
    assert took_s <= 3 * cold_s(rig, 60) + LOAD_S
    rig.b.gained("not_loaded", before[0], len(known) // BLOCK_TOKENS)
    rig.b.gained("loads_failed", before[1], 1)


def test_a_store_that_does_not_answer_a_load_costs_a_request_its_deadline_and_no_more(
    rig: Rig,
) -> None:
    known = prompt(7, 600)
    first = stored_by(rig.a, known)
    before = rig.b.count("not_loaded"), rig.b.count("loads_failed")
    with held_up(rig, known) as answer:
        began = time.monotonic()
        assert answer.result(300).equals(first)
        took_s = time.monotonic() - began
    assert took_s <= 3 * cold_s(rig, 70) + LOAD_S
    rig.b.gained("not_loaded", before[0], len(known) // BLOCK_TOKENS)
    rig.b.gained("loads_failed", before[1], 1)
    await_hits(rig.b, known)
    rig.b.forget()
    assert rig.b.complete(known).equals(first)


def test_blocks_that_are_corrupted_during_a_load_are_computed_and_never_used(rig: Rig) -> None:
    known = prompt(8, 600)
    first = stored_by(rig.a, known)
    before = rig.b.count("not_loaded")
    with held_up(rig, known) as answer:
        rig.await_tier(known, Tier.DRAM)
        assert spoil_store(rig.store.process.pid, rig.directory / "store") > 0
        rig.proxy.set(Direction.TO_CLIENT, NO_FAULTS)
        assert answer.result(300).equals(first)
    eventually(lambda: rig.b.count("not_loaded") > before, 60, "blocks that were not loaded")


def test_a_frozen_store_costs_a_request_a_lookup_and_no_more(rig: Rig) -> None:
    known = prompt(9, 600)
    first = stored_by(rig.a, known)
    before = rig.a.count("lookups_unanswered")
    rig.store.process.freeze()
    try:
        rig.a.forget()
        answer = rig.a.complete(known)
    finally:
        rig.store.process.thaw()
    assert answer.cached_tokens == 0
    assert answer.equals(first)
    rig.a.gained("lookups_unanswered", before, 1)


def test_after_a_reset_of_external_caches_nothing_of_before_is_used(rig: Rig) -> None:
    known = prompt(30, 300)
    first = stored_by(rig.a, known)
    await_hits(rig.b, known)
    rig.b.forget_all()
    again = rig.b.complete(known)
    assert again.cached_tokens == 0
    assert again.equals(first)
    await_hits(rig.b, known)
    assert "kvtier: reset" in rig.b.process.log_text()


def says(server: VllmServer, text: str) -> None:
    """Wait until it stands in the server's log."""
    eventually(lambda: text in server.process.log_text(), 60, text)


def test_other_engines_hit_nothing_of_ours_and_say_in_what_they_differ(rig: Rig) -> None:
    tokens = prompt(31, 300)
    stored_by(rig.a, tokens)
    flags = {
        "KV dtype bfloat16 here, float32 there": ("--dtype=bfloat16",),
        "block size 64 here": ("--block-size=64",),
        "misses only: block hash 'sha256'": ("--prefix-caching-hash-algo=sha256",),
        "revision other here": (),
    }
    for pair in (list(flags)[:2], list(flags)[2:]):
        servers = start_vllm(
            rig.runner,
            *(
                launch_vllm(
                    f"vllm-other-{list(flags).index(said)}",
                    rig.model,
                    rig.socket,
                    *flags[said],
                    extra={"revision": "other"} if "revision" in said else {},
                )
                for said in pair
            ),
        )
        try:
            for said, server in zip(pair, servers, strict=True):
                assert server.complete(tokens, 1).cached_tokens == 0
                assert server.loaded_tokens == server.count("held") == 0
                says(server, said)
        finally:
            for server in servers:
                server.process.end()
