"""The two halves of the connector between vLLM's own classes: failures, preemptions, refusals.

Scheduler and workers are joined by what they tell each other, as vLLM joins them; the engine that
would be between them is all that is missing.
"""

from typing import Any

import pytest

from tests.support.vllm_servers import PYTHON, WHY_NOT

if not PYTHON:
    pytest.skip(WHY_NOT, allow_module_level=True)

pytestmark = pytest.mark.timeout(300)

ALL_OF_IT = [96, True]
"""Three blocks, loaded asynchronously."""
NOTHING = [0, False]
NOT_KEPT = [False, None]
"""Said at a request's end: its blocks may go."""
UNUSED = {"failed": ["r"], "invalid": [2, 5, 7]}
"""A load of which no block is in place."""


@pytest.fixture
def halves(asked: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = asked["halves"]
    return found


def test_a_load_that_brings_nothing_is_one_miss_and_may_be_tried_after_a_preemption(
    halves: dict[str, Any],
) -> None:
    assert halves["a load that brings nothing"] == {"offered": ALL_OF_IT, "ends": [UNUSED]}
    assert halves["asked again"] == NOTHING
    assert halves["asked after a preemption"] == ALL_OF_IT
    assert halves["at its end"] == NOT_KEPT


def test_blocks_that_were_given_to_others_at_a_preemption_are_saved_as_they_were_computed(
    halves: dict[str, Any],
) -> None:
    assert halves["saved of what was computed"] == [0, 1, 2]


def test_of_two_ranks_the_one_that_loaded_less_decides(halves: dict[str, Any]) -> None:
    assert halves["two ranks of which one lacks blocks"] == {
        "offered": ALL_OF_IT,
        "ends": [{"failed": [], "invalid": []}, {"failed": [], "invalid": [2, 7]}],
    }
    assert halves["what both have"] == [32, True]


def test_caches_of_an_unknown_layout_get_no_block_and_the_log_says_why(
    halves: dict[str, Any],
) -> None:
    found = halves["an unknown layout"]
    assert found["ends"] == [UNUSED]
    (said,) = found["said"]
    assert said.startswith("kvtier serves this engine misses only: caches of shapes")


def test_blocks_of_prompts_or_generated_ones_too_or_none_are_saved(halves: dict[str, Any]) -> None:
    saved = {policy: halves[f"saved by {policy}"] for policy in ("prompt", "all", "none")}
    assert saved == {"prompt": [0, 1, 2], "all": [0, 1, 2, 3], "none": []}


def test_a_reset_while_blocks_are_in_use_fails_and_nothing_is_saved_of_what_is_computed_on_them(
    halves: dict[str, Any],
) -> None:
    """Weights that were changed under them have made none of them whole."""
    found = {
        state: tuple(
            halves[f"{what} a pool that is {state}"]
            for what in ("reset of", "said of", "saved after a reset of")
        )
        for state in ("empty", "in use")
    }
    assert found == {"empty": (True, 1, [0, 1, 2]), "in use": (False, 2, [])}


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("failures end requests", 'set "kv_load_failure_policy": "recompute"'),
        ("sha256", "start with --prefix-caching-hash-algo sha256_cbor"),
        ("a hash of a random seed", "start with --prefix-caching-hash-algo sha256_cbor"),
        ("a sliding window", "only full attention is supported"),
        ("a release of next year", "vLLM 0.99.0 is not one of"),
    ],
)
def test_an_engine_that_cannot_be_verified_is_served_misses_only_and_both_halves_say_why(
    asked: dict[str, Any], case: str, reason: str
) -> None:
    found = asked["refused"][case]
    assert len(found["said"]) == 2
    for said in found["said"]:
        assert said.startswith("kvtier serves this engine misses only: ")
        assert reason in said
    assert (found["offered"], found["orders"], found["at its end"]) == (NOTHING, 0, NOT_KEPT)
    assert found["a load all the same"] == UNUSED
