"""vLLM servers with bridges behind routers, for tests: started once, with their logs on failure.

What must not live here: what a test expects of them, how processes are started
(`kvtier.bench.vllm_processes`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.bench.vllm_processes import CLUSTER_SECRET, Key, Rig
from kvtier.bench.vllm_turns import TurnsFleet, TurnSizes, start
from kvtier.core.scopes import private_scope, scope_salt
from kvtier.types import TenantId
from tests.support.paged_models import smollm2
from tests.support.vllm_servers import PYTHON

RED, BLUE = Key("red", "sk-of-red"), Key("blue", "sk-of-blue")
SIZES = TurnSizes()
"""A working set of three quarters of the pools: one pool has it all, half of it does not. Half a
pool holds the longest prompt that the servers take, else they do not start."""


@contextmanager
def vllm_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TurnsFleet, Rig]]:
    """Three servers, two of them behind two routers, each of which wants a key of a tenant."""
    model = smollm2(tmp_path_factory).directory
    rig = Rig(tmp_path_factory.mktemp("fleet"), Path(PYTHON), model)
    try:
        fleet = start(rig, SIZES, (RED, BLUE))
        fleet.routed.token = fleet.in_turn.token = RED.token
        yield fleet, rig
    finally:
        rig.end()


def salt_of(key: Key) -> str:
    """The `cache_salt` that the routers give to a tenant's requests."""
    return scope_salt(CLUSTER_SECRET.encode(), private_scope(TenantId(key.tenant)), None)
