"""Our connector inside real vLLM servers: what one computed another loads, whatever the store does.

Runs in `make test-vllm`; skipped where there is no vLLM.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlTable
from tests.harness.waiting import eventually
from tests.support.paged_models import smollm2
from tests.support.store_cluster import MIB, StoreProcess, start_store
from tests.support.vllm_servers import (
    BLOCK_TOKENS,
    PYTHON,
    WHY_NOT,
    Answer,
    VllmServer,
    launch_vllm,
    prompt,
    start_vllm,
)

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

DRAM: TomlTable = {"bytes_max": 512 * MIB, "slab_bytes": 64 * MIB, "blocks_max": 4096}
NVME: TomlTable = {"bytes_max": 2048 * MIB, "write_policy": "on_seal"}


@dataclass(frozen=True, slots=True)
class Rig:
    """Two servers of one model on one store."""

    a: VllmServer
    b: VllmServer
    store: StoreProcess
    directory: Path
    model: Path
    runner: ProcessRunner


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model = smollm2(tmp_path_factory).directory
    directory = tmp_path_factory.mktemp("vllm")
    with ProcessRunner("vllm-connector", directory) as runner:
        store = start_store(runner, directory / "store", dram=DRAM, nvme=NVME)
        a, b = start_vllm(
            runner, *(launch_vllm(name, model, store.socket) for name in ("vllm-a", "vllm-b"))
        )
        yield Rig(a, b, store, directory, model, runner)


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The servers live as long as the module: its fixture ends them."""


def stored_by_a(rig: Rig, tokens: list[int]) -> Answer:
    """A's answer to a prompt that it computes, once all whole blocks are in the store."""
    answer = rig.a.complete(tokens)
    assert answer.cached_tokens == 0
    wanted = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS

    def has_all() -> bool:
        """B would load it: ask as B would, without computing anything else."""
        rig.a.forget()
        return rig.a.complete(tokens, max_tokens=1).cached_tokens >= wanted

    eventually(has_all, 60, "A's blocks are in the store")
    return answer


def test_a_second_server_answers_from_what_the_first_computed(rig: Rig) -> None:
    tokens = prompt(1, 2_000)
    first = stored_by_a(rig, tokens)
    before = rig.b.loaded_tokens
    second = rig.b.complete(tokens)
    assert second.cached_tokens >= 0.95 * len(tokens)
    assert rig.b.loaded_tokens - before >= 0.95 * len(tokens)
    assert second.equals(first)


def test_a_salt_keeps_requests_apart_and_equal_salts_share(rig: Rig) -> None:
    tokens = prompt(2, 200)
    rig.a.complete(tokens, cache_salt="one")
    time.sleep(1)
    assert rig.b.complete(tokens, cache_salt="two").cached_tokens == 0
    assert rig.b.complete(tokens).cached_tokens == 0

    def is_shared() -> bool:
        rig.b.forget()
        return rig.b.complete(tokens, 1, cache_salt="one").cached_tokens == 192

    eventually(is_shared, 30, "the salt's own blocks are found")


def test_a_killed_server_loads_from_the_store_when_it_is_back(rig: Rig) -> None:
    tokens = prompt(3, 600)
    first = stored_by_a(rig, tokens)
    rig.a.process.restart()
    again = rig.a.complete(tokens)
    assert again.cached_tokens == 576
    assert again.equals(first)


def test_with_the_store_gone_everything_is_computed_and_it_is_found_again(rig: Rig) -> None:
    known = prompt(4, 600)
    first = stored_by_a(rig, known)
    rig.store.process.kill()
    assert rig.b.complete(known).equals(first)
    fresh = rig.b.complete(prompt(5, 300))
    assert (fresh.cached_tokens, len(fresh.tokens)) == (0, 32)
    rig.store.process.restart()

    def hits() -> bool:
        rig.b.forget()
        return rig.b.complete(known, 1).cached_tokens == 576

    eventually(hits, 10, "hits after the store came back")
    rig.b.forget()
    assert rig.b.complete(known).equals(first)


def test_a_frozen_store_costs_a_request_its_deadline_and_no_more(rig: Rig) -> None:
    known = prompt(6, 600)
    first = stored_by_a(rig, known)
    rig.store.process.restart()  # DRAM is empty: what follows must come from the frozen process
    rig.store.process.freeze()
    try:
        rig.b.forget()
        answer = rig.b.complete(known)
    finally:
        rig.store.process.thaw()
    assert answer.cached_tokens == 0
    assert answer.equals(first)


def test_corrupt_blocks_are_recomputed_and_counted(rig: Rig) -> None:
    known = prompt(7, 600)
    first = stored_by_a(rig, known)
    rig.store.process.kill()
    segments = [p for p in (rig.directory / "store").rglob("*.seg") if p.stat().st_size]
    assert segments
    for path in segments:
        with path.open("r+b") as file:
            for at in range(4096 + 777, path.stat().st_size, 64 << 10):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0x10]))
    rig.store.process.restart()
    before = rig.b.loaded_tokens
    rig.b.forget()
    answer = rig.b.complete(known)
    assert answer.equals(first)
    assert rig.b.loaded_tokens == before or answer.cached_tokens < 576


def test_a_tiny_pool_preempts_and_every_answer_stays_what_it_was(rig: Rig) -> None:
    prompts = [prompt(100 + i, 300 + 20 * i) for i in range(6)]
    want = [rig.a.complete(tokens, 96) for tokens in prompts]
    (tiny,) = start_vllm(
        rig.runner,
        launch_vllm("vllm-tiny", rig.model, rig.store.socket, "--num-gpu-blocks-override=40"),
    )
    try:
        for _ in range(2):
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda tokens: tiny.complete(tokens, 96), prompts))
            for answer, wanted in zip(answers, want, strict=True):
                assert answer.equals(wanted)
        assert tiny.metric("vllm:num_preemptions_total") > 0
        assert tiny.loaded_tokens > 0
    finally:
        tiny.process.end()


def test_another_engine_hits_nothing_of_ours(rig: Rig) -> None:
    tokens = prompt(8, 300)
    stored_by_a(rig, tokens)
    others = start_vllm(
        rig.runner,
        launch_vllm("vllm-bf16", rig.model, rig.store.socket, "--dtype=bfloat16"),
        launch_vllm("vllm-rev", rig.model, rig.store.socket, extra={"revision": "other"}),
    )
    try:
        for other in others:
            assert other.complete(tokens).cached_tokens == 0
            assert other.loaded_tokens == 0
    finally:
        for other in others:
            other.process.end()


def test_an_engine_whose_hash_cannot_be_shared_says_so_and_serves(rig: Rig) -> None:
    launch = launch_vllm("vllm-pickle", rig.model, rig.store.socket, hash_algorithm="sha256")
    (other,) = start_vllm(rig.runner, launch)
    try:
        tokens = prompt(9, 200)
        assert other.complete(tokens).cached_tokens == 0
        assert "misses only: block hash 'sha256'" in other.process.log_text()
        other.forget()
        assert other.complete(tokens).cached_tokens == 0
    finally:
        other.process.end()


def test_a_server_without_a_store_serves_and_hits_once_there_is_one(rig: Rig) -> None:
    directory = rig.directory / "late"
    directory.mkdir()
    socket = f"unix:{directory / 'run' / 'store.sock'}"
    (late,) = start_vllm(rig.runner, launch_vllm("vllm-late", rig.model, socket))
    try:
        tokens = prompt(10, 300)
        first = late.complete(tokens)
        assert first.cached_tokens == 0
        start_store(rig.runner, directory, "store-late", dram=DRAM, nvme=NVME)

        def hits() -> bool:
            late.forget()
            return late.complete(tokens, 1).cached_tokens == 288

        eventually(hits, 10, "hits once the store is there")
        late.forget()
        assert late.complete(tokens).equals(first)
    finally:
        late.process.end()
