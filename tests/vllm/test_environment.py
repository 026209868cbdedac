"""vLLM's own environment needs the extra `engine` and nothing else of ours."""

import subprocess

import pytest

from tests.harness.processes import clean_environment
from tests.support.vllm_servers import PYTHON, WHY_NOT

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

OTHERS = ("redis", "rocksdict", "grpc_health", "grpc_reflection")
"""Of the extras `index` and `store`."""


def run(program: str) -> str:
    argv = [PYTHON, "-P", "-c", program]
    clean = clean_environment()  # what tells the tests where vLLM is would be settings of ours
    return subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=500, env=clean
    ).stdout


def test_the_connector_is_loaded_where_only_the_extra_engine_is_installed() -> None:
    looked = "import importlib.util as u; print([n for n in {} if u.find_spec(n)])"
    assert run(looked.format(OTHERS)).strip() == "[]"
    loaded = run("import sys, kvtier.engines.vllm.connector; print(*sys.modules)").split()
    assert "kvtier.engines.vllm.connector" in loaded
    assert not {"kvtier_services", "kvtier_router", "kvtier.local"} & set(loaded)


def test_the_command_prints_its_flags_there() -> None:
    shown = run("from kvtier.local.vllm.commands import command; command(['flags', 'org/model'])")
    assert "--prefix-caching-hash-algo sha256_cbor" in shown
