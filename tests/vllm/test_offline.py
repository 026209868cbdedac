"""vLLM inside programs: what one engine computed, one in another process loads from the store.

Runs in `make test-vllm`; skipped where there is no vLLM. The engines are made of what
`kvtier.local.vllm.offline.engine_kwargs` returns, which docs/ray.md shows.
"""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.local.sessions import kill_session
from kvtier.types import Tier
from tests.harness.processes import ProcessRunner, clean_environment
from tests.harness.waiting import eventually
from tests.support import ray_cluster
from tests.support.store_cluster import MIB, StoreProcess, start_store
from tests.support.vllm_models import TOKEN_IDS, write_model_of_even_heads
from tests.support.vllm_servers import BLOCK_TOKENS, PYTHON, WHY_NOT, prompt

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)

CHILD = Path(__file__).with_name("offline_child.py")
RAY_CHILD = Path(__file__).with_name("ray_data_child.py")
RAY_PYTHON = os.environ.get("KVTIER_VLLM_RAY_PYTHON", "")
"""As PYTHON, with Ray Data beside vLLM."""
END_S = 180.0
RAY_S = 400.0
BLOCKS, REST = 40, 5
WHOLE = BLOCKS * BLOCK_TOKENS
TOKENS = prompt(1, WHOLE + REST, TOKEN_IDS)
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Program:
    """A process with an engine in it."""

    process: "subprocess.Popen[str]"
    log: Path

    def generate(self, tokens: list[int], *, forget: bool = False) -> dict[str, Any]:
        """What it generates, and what its vLLM has counted for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps([tokens, forget])}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"tokens"'):
                told: dict[str, Any] = json.loads(line)
                return told
        raise AssertionError(self.log.read_text()[-6000:])

    def end(self) -> None:
        """Let it end by itself, as a program does that has done its work."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(END_S) == 0, self.log.read_text()[-6000:]


@contextmanager
def program(model: Path, store: StoreProcess, log: Path) -> Iterator[Program]:
    with log.open("w") as errors:
        process = subprocess.Popen(
            [PYTHON, "-P", str(CHILD), str(model), store.socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=clean_environment() | VARIABLES,
            start_new_session=True,
        )
        with process:
            try:
                yield Program(process, log)
            finally:
                kill_session(process.pid)


def tiers_that_served(store: StoreProcess) -> set[str]:
    """Of what the store has handed out so far; what was read in place it hears of later."""
    counts = asyncio.run(store.stats()).counts
    return {one.name for one in counts if one.name.startswith("hits_")}


@dataclass(frozen=True, slots=True)
class Computed:
    """A store that holds what one program has computed, and what that one said."""

    model: Path
    store: StoreProcess
    first: dict[str, Any]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Computed]:
    directory = tmp_path_factory.mktemp("offline")
    model = directory / "model"
    model.mkdir()
    write_model_of_even_heads(model)
    with ProcessRunner("vllm-offline", directory) as runner:
        store = start_store(
            runner,
            directory / "store",
            dram={"bytes_max": 64 * MIB, "slab_bytes": 16 * MIB},
            nvme={"bytes_max": 64 * MIB, "write_policy": "on_seal"},
        )
        with program(model, store, directory / "first.log") as one:
            first = one.generate(TOKENS)

            def is_stored() -> bool:
                told = one.generate(TOKENS, forget=True)
                return bool(told["counts"].get("loaded") == WHOLE)

            eventually(is_stored, END_S, "all whole blocks are in the store")
            one.end()
        yield Computed(model, store, first)


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The store lives as long as the module: its fixture ends it."""


def test_an_engine_in_a_program_loads_what_one_in_another_process_computed(
    computed: Computed, tmp_path: Path
) -> None:
    assert computed.first["cached"] == 0
    assert computed.first["counts"] == {"local_compute": len(TOKENS)}
    with program(computed.model, computed.store, tmp_path / "second.log") as other:
        second = other.generate(TOKENS)
        again = other.generate(TOKENS)
        other.end()
    assert second["tokens"] == computed.first["tokens"]
    assert second["cached"] == WHOLE
    assert second["counts"] == {
        "local_compute": REST,
        "external_kv_transfer": WHOLE,
        "loaded": WHOLE,
    }
    # What it has itself it does not ask of the store again.
    assert again["tokens"] == computed.first["tokens"]
    assert again["counts"] == {"local_compute": REST, "local_cache_hit": WHOLE}
    assert tiers_that_served(computed.store) <= {"hits_dram"}


@pytest.mark.skipif(
    not RAY_PYTHON,
    reason="KVTIER_VLLM_RAY_PYTHON does not name a Python with Ray Data and vLLM: make test-vllm",
)
async def test_an_engine_of_ray_data_loads_what_a_program_computed(
    computed: Computed, tmp_path: Path
) -> None:
    """By the same `engine_kwargs`, in an actor of a Ray cluster of its own. The store has been
    started again: what it hands out is read from its disk, and counted there."""
    store = computed.store
    store.process.terminate()
    assert store.process.wait(END_S) == 0, store.process.log_tail()
    store.process.restart()
    await asyncio.to_thread(answers_by_ray, computed, tmp_path / "ray.log")
    [hits] = [one for one in (await store.tier(Tier.NVME)).gets if one.name == "hit"]
    assert hits.count >= BLOCKS


def answers_by_ray(computed: Computed, log: Path) -> None:
    folder = tempfile.mkdtemp(prefix="kvr-")  # Ray's sockets have long names
    owner = {ray_cluster.OWNER: folder}
    argv = [RAY_PYTHON, "-P", str(RAY_CHILD), str(computed.model), computed.store.socket, folder]
    with log.open("w") as errors:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=log.parent,  # Ray's workers import from where their driver was started
            env=clean_environment() | VARIABLES | ray_cluster.VARIABLES | owner,
        )
        try:
            text, _ = process.communicate(json.dumps([TOKENS]), RAY_S)
        finally:
            ray_cluster.kill_all_of(Path(folder))
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
    assert process.returncode == 0, text[-2000:] + log.read_text()[-6000:]
    assert json.loads(text.splitlines()[-1]) == [
        {"tokens": computed.first["tokens"], "prompt_tokens": len(TOKENS)}
    ]
