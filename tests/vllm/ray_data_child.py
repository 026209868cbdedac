"""Prompts through Ray Data's vLLM processor with our connector. Run by a Python with both.

    KVTIER_VLLM_RAY_PYTHON tests/vllm/ray_data_child.py MODEL STORE FOLDER

Reads a JSON list of prompts (lists of tokens) from standard input, and writes a JSON list of what
came of them as its last line. FOLDER is for Ray's own files. What must not live here: our tests'
modules.
"""

import json
import sys
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

from kvtier.local.vllm.offline import engine_kwargs

TERMS = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True}
PATIENT = {"lookup_ms": 60_000, "load_ms": 60_000, "load": "always"}
"""A slow machine is no fault of the connector."""


def asked(row: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    return {"tokenized_prompt": list(row["ids"]), "sampling_params": sampling}


def answered(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["generated_tokens"], "prompt_tokens": row["num_input_tokens"]}


def main(model: str, store: str, folder: str) -> None:
    ray.init(
        address="local", num_cpus=2, num_gpus=0, include_dashboard=False, _temp_dir=folder,
        object_store_memory=80_000_000, _node_ip_address="127.0.0.1",
    )  # fmt: skip
    shared = engine_kwargs(store, model_id="m")
    shared["kv_transfer_config"]["kv_connector_extra_config"].update(PATIENT)  # type: ignore[index]
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={**shared, **TERMS},
        log_engine_metrics=False,  # which wants Ray Serve
        batch_size=1,
        placement_group_config={"bundle_per_worker": {"CPU": 1}},  # no GPU
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
    )
    processor = build_processor(config, preprocess=asked, postprocess=answered)
    prompts = json.load(sys.stdin)
    rows = processor(ray.data.from_items([{"ids": prompt} for prompt in prompts])).take_all()
    told = [{name: _plain(value) for name, value in row.items()} for row in rows]
    sys.stdout.write(f"\n{json.dumps(told)}\n")
    sys.stdout.flush()
    ray.shutdown()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    main(*sys.argv[1:])
