"""The surface of `import kvtier`, and what it must not pull in."""

import subprocess
import sys

import kvtier

NAMES_COUNT_MAX = 12
HEAVY = ("torch", "grpc", "google.protobuf", "redis", "rocksdict", "prometheus_client", "aiohttp")


def loaded_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    return set(result.stdout.split())


def test_the_surface_is_small_and_every_name_exists() -> None:
    assert 0 < len(kvtier.__all__) <= NAMES_COUNT_MAX
    assert all(hasattr(kvtier, name) for name in kvtier.__all__)


def test_importing_kvtier_pulls_in_nothing_heavy() -> None:
    assert not loaded_after("import kvtier") & set(HEAVY)


def test_importing_the_core_pulls_in_nothing_heavy() -> None:
    modules = loaded_after("import kvtier.core, kvtier.errors, kvtier.types, kvtier.limits")
    assert not modules & {*HEAVY, "asyncio", "kvtier_services", "kvtier_router"}
