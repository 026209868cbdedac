"""Under a pool that is far too small, requests are preempted and resumed, and answer as ever."""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlTable
from tests.support.paged_models import smollm2
from tests.support.store_cluster import MIB, start_store
from tests.support.vllm_servers import (
    PYTHON,
    WHY_NOT,
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
POOL_BLOCKS = 40
CLIENTS = 6
TOKENS = 96
SOAK_S = 120.0


@dataclass(frozen=True, slots=True)
class Rig:
    plain: VllmServer
    """Without our connector, and with room."""
    tiny: VllmServer


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    model = smollm2(tmp_path_factory).directory
    directory = tmp_path_factory.mktemp("vllm")
    with ProcessRunner("vllm-preemption", directory) as runner:
        store = start_store(runner, directory / "store", dram=DRAM, nvme=NVME)
        plain, tiny = start_vllm(
            runner,
            launch_vllm("vllm-plain", model, None),
            launch_vllm(
                "vllm-tiny",
                model,
                store.socket,
                f"--num-gpu-blocks-override={POOL_BLOCKS}",
                "--max-model-len=1024",  # what the pool must hold of one request
            ),
        )
        yield Rig(plain, tiny)


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The servers live as long as the module: its fixture ends them."""


def test_for_two_minutes_of_preemptions_every_answer_is_that_of_an_engine_without_us(
    rig: Rig,
) -> None:
    prompts = [prompt(100 + i, 300 + 20 * i) for i in range(CLIENTS)]
    want = [rig.plain.complete(tokens, TOKENS) for tokens in prompts]
    end_s = time.monotonic() + SOAK_S
    with ThreadPoolExecutor(CLIENTS) as pool:
        for round_number in itertools.count():
            if time.monotonic() > end_s and round_number >= 2:
                break
            answers = list(pool.map(lambda tokens: rig.tiny.complete(tokens, TOKENS), prompts))
            for answer, wanted in zip(answers, want, strict=True):
                assert answer.equals(wanted), (round_number, answer, wanted)
    assert rig.tiny.metric("vllm:num_preemptions_total") > 0
    assert rig.tiny.count("loaded") > 0
    assert rig.tiny.count("saved") > 0
