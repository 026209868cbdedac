"""What must not share KV does not: adapters, salts and embeddings, in a real server on one store.

A server that has forgotten its own cache is as good as a second one: what it hits then, the store
has.
"""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.harness.processes import ProcessRunner
from tests.harness.toml_text import TomlTable
from tests.harness.waiting import eventually
from tests.support.store_cluster import MIB, start_store
from tests.support.vllm_models import CONTEXT_TOKENS, TOKEN_IDS, write_model_of_even_heads
from tests.support.vllm_servers import (
    PYTHON,
    WHY_NOT,
    VllmServer,
    launch_vllm,
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
RANK = 8
NAME = "one name"
"""Of an adapter, and of a salt."""


def write_adapter(directory: Path, seed: int, model: Path) -> None:
    """A LoRA of random weights, strong enough to change answers; in place of what was there."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = hidden // config["num_attention_heads"]
    widths = {"q_proj": hidden, "v_proj": head * config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, RANK, generator=generator) * 0.1
    directory.mkdir(exist_ok=True)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
        "base_model_name_or_path": "m",
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
    save_file(tensors, directory / "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Rig:
    server: VllmServer
    model: Path
    adapter: Path
    """Of the adapter that is there from the start."""

    def load(self, name: str, path: Path) -> None:
        self.server.order("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    def unload(self, name: str) -> None:
        self.server.order("/v1/unload_lora_adapter", {"lora_name": name})


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("vllm")
    model = directory / "model"
    model.mkdir()
    write_model_of_even_heads(model)
    adapter = directory / "adapter"
    write_adapter(adapter, 1, model)
    with ProcessRunner("vllm-isolation", directory) as runner:
        store = start_store(runner, directory / "store", dram=DRAM, nvme=NVME)
        launch = launch_vllm(
            "vllm-lora",
            model,
            store.socket,
            f"--max-model-len={CONTEXT_TOKENS}",
            "--enable-lora",
            f"--max-lora-rank={RANK}",
            "--max-loras=2",
            f"--lora-modules={json.dumps({'name': NAME, 'path': str(adapter)})}",
            "--enable-prompt-embeds",
            environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        )
        (server,) = start_vllm(runner, launch)
        yield Rig(server, model, adapter)


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The servers live as long as the module: its fixture ends them."""


def test_an_adapter_and_a_salt_of_the_same_text_share_nothing(rig: Rig) -> None:
    tokens = prompt(1, 200, TOKEN_IDS)
    adapted = stored_by(rig.server, tokens, model=NAME)
    rig.server.forget()
    salted = rig.server.complete(tokens, cache_salt=NAME)
    assert salted.cached_tokens == 0
    rig.server.forget()
    base = rig.server.complete(tokens)
    assert base.cached_tokens == 0
    assert salted.equals(base)
    assert not adapted.equals(base)
    rig.server.forget()
    again = rig.server.complete(tokens, model=NAME)
    assert again.cached_tokens == whole(tokens)
    assert again.equals(adapted)


def test_an_adapter_of_the_same_name_with_other_weights_shares_nothing(
    rig: Rig, tmp_path: Path
) -> None:
    tokens = prompt(2, 200, TOKEN_IDS)
    first, second = tmp_path / "first", tmp_path / "second"
    write_adapter(first, 2, rig.model)
    write_adapter(second, 3, rig.model)
    rig.load("moved", first)
    before = stored_by(rig.server, tokens, model="moved")
    rig.unload("moved")
    rig.load("moved", second)
    rig.server.forget()
    other = stored_by(rig.server, tokens, model="moved")
    assert not other.equals(before)
    rig.unload("moved")
    rig.load("moved", first)
    rig.server.forget()
    again = rig.server.complete(tokens, model="moved")
    assert again.cached_tokens == whole(tokens)
    assert again.equals(before)
    rig.unload("moved")


def test_an_adapter_whose_files_change_in_place_is_served_misses(rig: Rig, tmp_path: Path) -> None:
    tokens = prompt(3, 200, TOKEN_IDS)
    folder = tmp_path / "adapter"
    write_adapter(folder, 4, rig.model)
    rig.load("changed", folder)
    before = stored_by(rig.server, tokens, model="changed")
    rig.unload("changed")
    write_adapter(folder, 5, rig.model)
    rig.load("changed", folder)
    rig.server.forget()
    after = rig.server.complete(tokens, model="changed")
    assert after.cached_tokens == 0
    assert not after.equals(before)
    assert "files changed under a running engine" in rig.server.process.log_text()
    rig.unload("changed")


def embeddings(seed: int, tokens: int, hidden: int) -> str:
    """A prompt of random embeddings, as a request carries it."""
    file = io.BytesIO()
    torch.save(torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)), file)
    return base64.b64encode(file.getvalue()).decode()


def test_prompts_of_embeddings_of_one_length_share_nothing(rig: Rig) -> None:
    hidden = json.loads((rig.model / "config.json").read_text())["hidden_size"]

    def cached(seed: int) -> int:
        body = {"model": "m", "prompt_embeds": embeddings(seed, 100, hidden), "max_tokens": 4}
        usage = rig.server.post("/v1/completions", body | {"temperature": 0})["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def is_found() -> bool:
        rig.server.forget()
        return cached(1) == 96

    assert cached(1) == 0
    eventually(is_found, 60, "the same embeddings are found")
    rig.server.forget()
    assert cached(2) == 0
    rig.server.forget()
    assert cached(1) == 96
