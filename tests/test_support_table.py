"""The support table in docs/vllm.md says what tests have shown, and nothing else."""

import ast
import json
from pathlib import Path

import pytest

from tests.support.engine_support import CLAIMS, ROOT, Claim, Kind, Shown, rendered

KNOWN = [
    Shown(**one)
    for one in json.loads((ROOT / "docs" / "measurements" / "support.json").read_text())
]


def functions(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, kinds)
    }


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.engine} {claim.feature}")
def test_every_test_that_shows_a_feature_exists(claim: Claim) -> None:
    path, _, name = claim.test.partition("::")
    assert name in functions(ROOT / path)


def test_every_cell_has_a_test_that_claims_it() -> None:
    claimed = {(one.engine, one.feature, one.kind.value, one.test) for one in CLAIMS}
    known = {(one.engine, one.feature, one.kind, one.test) for one in KNOWN}
    assert known <= claimed
    recorded = {(one.engine, one.version) for one in CLAIMS if one.version}
    told = {(one.engine, one.version) for one in KNOWN if one.kind == Kind.RECORDED}
    assert told == recorded


def test_the_page_shows_the_table_of_what_is_known() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert f"-->\n{rendered(KNOWN)}<!-- end of support -->" in page


def test_a_feature_of_several_tests_needs_all_of_them() -> None:
    both = [claim for claim in CLAIMS if claim.feature.startswith("store killed")]
    assert len(both) > 1
    shown = [
        Shown(one.engine, "1.0", one.feature, one.kind.value, one.test) for one in both
    ]  # fmt: skip
    row = f"| {both[0].feature} | "
    assert f"{row}real engine |" in rendered(shown)
    assert f"{row}no |" in rendered(shown[1:])
