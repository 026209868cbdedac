"""Real vLLM servers behind bridge and router: whose blocks are whose, and what routing is worth.

Runs in `make test-vllm` unless that has a budget of time: three servers at once want 12 GB and, on
two cores, a minute to start. Skipped where there is no vLLM.
"""

import os
from collections.abc import Iterator

import pytest

from kvtier.bench.vllm_processes import BLOCK_TOKENS, Rig
from kvtier.bench.vllm_turns import RATIO_MIN, TurnsFleet, compare
from kvtier.errors import BackendError
from tests.harness.waiting import eventually
from tests.support.vllm_fleet import BLUE, RED, SIZES, salt_of, vllm_fleet
from tests.support.vllm_servers import PYTHON, WHY_NOT, prompt

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)
if "KVTIER_VLLM_BUDGET_S" in os.environ:
    pytest.skip("three servers at once are too much for a budget of time", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)
SHOWN_S = 60.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TurnsFleet, Rig]]:
    with vllm_fleet(tmp_path_factory) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: tuple[TurnsFleet, Rig]) -> TurnsFleet:
    return running[0]


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The servers live as long as the module: its fixture ends them."""


def promised(fleet: TurnsFleet, tokens: list[int], salt: str) -> int:
    """What the index says of a prompt, in GPU memory of the best server."""
    matched = fleet.routed.route(tokens, salt)["matched_tokens"]
    assert isinstance(matched, dict)
    return int(matched.get("gpu", 0))


def test_two_routed_servers_hit_what_one_with_all_their_cache_hits(fleet: TurnsFleet) -> None:
    compared = compare(fleet, SIZES)
    said = f"{compared.one.hit=} {compared.routed.hit=} {compared.round_robin.hit=}"
    assert compared.ratio >= RATIO_MIN, f"{said} {compared.routed.workers}"
    assert compared.round_robin.hit < compared.routed.hit, said
    assert set(compared.routed.workers) == {"a", "b"}


def test_tenants_meet_in_no_cache_and_a_second_turn_is_predicted_and_hit(fleet: TurnsFleet) -> None:
    red, blue = fleet.routed.sibling(RED.token), fleet.routed.sibling(BLUE.token)
    tokens = prompt(1, 8 * BLOCK_TOKENS + 5)
    first = red.ask(tokens, 4)
    assert first.cached_tokens == 0
    held = 8 * BLOCK_TOKENS
    eventually(lambda: promised(fleet, tokens, salt_of(RED)) == held, SHOWN_S, "the index knows")
    assert promised(fleet, tokens, salt_of(BLUE)) == 0
    other = blue.ask(tokens, 4)
    assert other.cached_tokens == 0
    assert other.matched == "none"
    second = red.ask([*tokens, *first.tokens, *prompt(2, 40)], 4)
    assert (second.cached_tokens, second.worker) == (held, first.worker)
    assert second.matched.startswith(f"gpu={held}")


def test_a_clients_own_salt_keeps_its_requests_apart(fleet: TurnsFleet) -> None:
    red = fleet.routed.sibling(RED.token)
    tokens = prompt(3, 4 * BLOCK_TOKENS + 5)
    held = 4 * BLOCK_TOKENS
    assert red.ask(tokens, 4, cache_salt="mine").cached_tokens == 0
    assert red.ask(tokens, 4).cached_tokens == 0
    assert red.ask(tokens, 4, cache_salt="mine").cached_tokens == held


def test_a_tenants_salt_at_the_server_itself_is_the_one_that_the_router_sends(
    fleet: TurnsFleet,
) -> None:
    red = fleet.routed.sibling(RED.token)
    tokens = prompt(4, 4 * BLOCK_TOKENS + 5)
    first = red.ask(tokens, 4)
    server = next(server for server in fleet.halves if server.name == first.worker)
    assert server.ask(tokens, 4).cached_tokens == 0
    assert server.ask(tokens, 4, cache_salt=salt_of(RED)).cached_tokens == 4 * BLOCK_TOKENS


def test_servers_take_the_credential_that_the_router_has_for_them_and_no_other(
    running: tuple[TurnsFleet, Rig],
) -> None:
    fleet, rig = running
    for server in fleet.halves:
        for wrong in (RED.token, "sk-of-one"):
            with pytest.raises(BackendError, match="status 401"):
                server.sibling(wrong).ask(prompt(5, 40), 4)
    with pytest.raises(BackendError, match="status 401"):
        fleet.routed.sibling("sk-of-a").ask(prompt(5, 40), 4)
    assert fleet.routed.sibling(BLUE.token).ask(prompt(5, 40), 4).worker in ("a", "b")
    said = rig.log("router-cache_aware")
    assert "sk-of-" not in said
