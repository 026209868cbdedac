"""Runs inside vLLM's Python: our connector's own view of requests that no small model can serve.

Prints JSON: per case, the names under which the store is asked for a request's blocks; null where
it is not asked at all. What must not live here: what a test expects of them.
"""

import json
import logging
import sys
from types import SimpleNamespace as Fake
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.engines.vllm.connector import KvtierConnector

BLOCK_TOKENS = 32


class FullAttentionSpec(Fake):
    """Named as vLLM's, which is how it is recognised."""


class Asked:
    """A store that notes for what it is asked, and knows nothing."""

    def __init__(self) -> None:
        self.names: Any = None

    def look(self, names: Any, deadline_s: float) -> "Asked":
        self.names = names
        return self

    def wait(self, seconds: float) -> None:
        """Nothing comes."""

    def done(self) -> bool:
        return True

    def held(self) -> None:
        return None


def connector() -> KvtierConnector:
    """The scheduler's half, of an engine with LoRA and a store that is not there."""
    model = Fake(
        model="m",
        revision=None,
        dtype="torch.float32",
        hf_text_config=Fake(to_dict=dict),
        get_total_num_kv_heads=lambda: 4,
        get_head_size=lambda: 64,
    )
    config = Fake(
        kv_transfer_config=Fake(
            kv_connector_extra_config={"store": "unix:/nowhere/s.sock", "revision": "r"},
            kv_load_failure_policy="recompute",
        ),
        cache_config=Fake(
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256_cbor",
            cache_dtype="auto",
            prefix_match_unit=None,
        ),
        parallel_config=Fake(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        speculative_config=None,
        lora_config=Fake() if "--lora" in sys.argv else None,
        model_config=model,
    )
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS)
    caches = Fake(
        kv_cache_groups=[Fake(kv_cache_spec=spec, layer_names=["a.0", "a.1"])],
        hash_block_size=BLOCK_TOKENS,
    )
    return KvtierConnector(config, KVConnectorRole.SCHEDULER, caches)


def item(digest: str) -> MultiModalFeatureSpec:
    """An image whose placeholder is tokens 8 to 72."""
    return MultiModalFeatureSpec(None, "image", digest, PlaceholderRange(8, 64), digest)


def main() -> None:
    """See the module."""
    logging.disable(logging.CRITICAL)
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
    ours = connector()
    cases: dict[str, dict[str, Any]] = {
        "text": {},
        "image one": {"mm_features": [item("1" * 64)]},
        "image one again": {"mm_features": [item("1" * 64)]},
        "image two": {"mm_features": [item("2" * 64)]},
        "image one, salted": {"mm_features": [item("1" * 64)], "cache_salt": "s"},
        "image named by its sender": {"mm_features": [item("holiday")]},
        "salt": {"cache_salt": "name"},
    }
    if "--lora" in sys.argv:
        adapter = LoRARequest("name", 1, sys.argv[sys.argv.index("--lora") + 1])
        cases["adapter"] = {"lora_request": adapter}
    found: dict[str, Any] = {
        "requires_kv_delivery": ours.requires_kv_delivery,
        "shares": ours._scheduling is not None,
    }
    for name, fields in cases.items():
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(100)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=hasher,
            **fields,
        )
        asked = Asked()
        if ours._scheduling is not None:
            ours._scheduling.store = asked
        ours.on_new_request(request)
        found[name] = asked.names and [
            [space.hex() + digest.hex() for digest in asked.names.digests]
            for space in asked.names.namespaces
        ]
    ours.shutdown()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
