"""What an engine inside a program is given, without vLLM."""

import pytest

from kvtier.errors import CallerError
from kvtier.local.vllm.offline import engine_kwargs


def test_an_engine_in_a_program_gets_the_flags_of_a_server_as_arguments() -> None:
    told = engine_kwargs("unix:/run/kvtier/store.sock", model_id="m", revision="r")
    connector = told.pop("kv_transfer_config")
    assert told == {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "block_size": 32,
    }
    assert connector == {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": "unix:/run/kvtier/store.sock",
            "model_id": "m",
            "revision": "r",
        },
    }


def test_what_is_no_address_of_a_store_is_refused() -> None:
    with pytest.raises(CallerError):
        engine_kwargs("/run/kvtier/store.sock")
