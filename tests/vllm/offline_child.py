"""One `vllm.LLM` with our connector, as a program would have it. Run by vLLM's own Python.

    KVTIER_VLLM_PYTHON tests/vllm/offline_child.py MODEL STORE

Reads lines of JSON, each a list of a prompt's tokens and whether vLLM's own cache is emptied first,
and writes for each what came of it, with what vLLM itself has counted for it. Ends with its input.
What must not live here: our tests' modules.
"""

import json
import sys
from collections import Counter

from vllm import LLM, SamplingParams

from kvtier.local.vllm.offline import engine_kwargs

TERMS = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True}
PATIENT = {"lookup_ms": 60_000, "load_ms": 60_000, "load": "always"}
"""A slow machine is no fault of the connector."""
SOURCES = "vllm:prompt_tokens_by_source"
LOADED = "vllm:external_prefix_cache_hits"


def main(model: str, store: str) -> None:
    shared = engine_kwargs(store, model_id="m")
    shared["kv_transfer_config"]["kv_connector_extra_config"].update(PATIENT)  # type: ignore[index]
    engine = LLM(model, disable_log_stats=False, **TERMS, **shared)
    counted = counts(engine)
    ask = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for line in sys.stdin:
        prompt, forget = json.loads(line)
        if forget:
            engine.reset_prefix_cache()
        [answer] = engine.generate({"prompt_token_ids": prompt}, ask, use_tqdm=False)
        before, counted = counted, counts(engine)
        told = {
            "tokens": list(answer.outputs[0].token_ids),
            "cached": answer.num_cached_tokens,
            "counts": counted - before,
        }
        sys.stdout.write(f"\n{json.dumps(told)}\n")
        sys.stdout.flush()


def counts(engine: LLM) -> Counter[str]:
    """What vLLM has counted since its start: tokens of prompts by source, and loaded ones."""
    found: Counter[str] = Counter()
    for one in engine.get_metrics():
        if one.name in {SOURCES, LOADED}:
            found[one.labels.get("source", "loaded")] += one.value
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
