"""The pages "from llm-d" and "from LMCache": every setting of ours that they name exists.

In a table's column `kvtier` each code span must be of a form that is checked; in prose, every span
that looks like ours is. What they say of the others is not checked here.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from kvtier.cli import commands
from kvtier.config import Root, Setting, _parse_toml, load, settings
from kvtier.engines.vllm.settings import Settings
from kvtier.local.vllm.commands import command as vllm_command
from kvtier.local.vllm.settings import VllmConfig
from kvtier_router.config import RouterConfig
from kvtier_router.front.tenants import _TENANT_KEYS
from kvtier_router.metrics import DEFINITIONS as ROUTER
from kvtier_services.bridge.config import BridgeConfig
from kvtier_services.index.config import IndexConfig
from kvtier_services.store.config import StoreConfig
from kvtier_services.store.metrics import DEFINITIONS as STORE
from kvtier_services.worker.config import WorkerConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("from_llm_d.md", "from_lmcache.md")
CONFIGS: dict[str, type[Root]] = {
    "index": IndexConfig,
    "store": StoreConfig,
    "router": RouterConfig,
    "worker": WorkerConfig,
    "bridge": BridgeConfig,
    "vllm": VllmConfig,
}
KNOWN: dict[str, dict[str, Setting]] = {
    name: {setting.key: setting for setting in settings(config)} for name, config in CONFIGS.items()
}
OTHER: dict[str, set[str]] = {
    "connector": {field.name for field in fields(Settings)},
    "tenants": set(_TENANT_KEYS),
}
METRICS = {definition.name for definition in (*ROUTER, *STORE)}
VERBS = {
    "vllm": {"serve", "flags", "doctor"},
    "inspect": {"index", "store"},
    "tokens": {"diff"},
    "worker": {"drain"},
}
"""Words that may stand behind a command."""
_SETTING = re.compile(r"(?P<of>[a-z]+): (?P<key>[a-z_.]+)(?: = (?P<value>.+))?")
_COMMAND = re.compile(r"kvtier (?P<name>[a-z]+)(?: (?P<rest>.+))?")
_SPAN = re.compile(r"`([^`\n]+)`")
_FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table with a column `kvtier`."""

    theirs: str
    ours: str
    differs: str


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    return _FENCED.sub("", text_of(page))


def rows(page: str) -> Iterator[Row]:
    for line in prose_of(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and not line.startswith("|---") and cells[1] != "kvtier":
            assert len(cells) == 3, line
            yield Row(*cells)


def fault(span: str) -> str:
    """Why a code span is nothing of ours; empty where it is."""
    setting = _SETTING.fullmatch(span)
    if setting is not None:
        return _fault_of_setting(setting["of"], setting["key"], setting["value"])
    command = _COMMAND.fullmatch(span)
    if command is not None:
        return _fault_of_command(command["name"], command["rest"] or "")
    if span.startswith("kvtier_"):
        return "" if span in METRICS else "no metric"
    if span.startswith("KVTIER_"):
        named = {setting.variable for known in KNOWN.values() for setting in known.values()}
        return "" if span in named else "no variable"
    return "neither a setting, nor a command, a metric or a variable"


def _fault_of_setting(of: str, key: str, value: str | None) -> str:
    if of in OTHER:
        return "" if key in OTHER[of] and value is None else f"{of} has no {key}"
    if of not in KNOWN:
        return f"no service {of}"
    if key not in KNOWN[of]:
        return f"{of} has no {key}"
    if value is not None:
        try:
            _parse_toml(KNOWN[of][key], tomllib.loads(f"value = {value}")["value"])
        except ValueError as error:
            return str(error)
    return ""


def _fault_of_command(name: str, rest: str) -> str:
    if name not in commands():
        return f"no command {name}"
    words = rest.split()
    if words and words[0] not in VERBS.get(name, set()):
        return f"kvtier {name} has no {words[0]}"
    known = {flag for setting in KNOWN.get(name, {}).values() for flag in setting.flags}
    unknown = [word for word in words if word.startswith("--") and word not in known]
    return f"kvtier {name} has no {', '.join(unknown)}" if unknown else ""


@pytest.mark.parametrize("page", PAGES)
def test_the_column_of_ours_names_what_exists_or_says_none(page: str) -> None:
    found = list(rows(page))
    assert len(found) >= 50
    faults = []
    for row in found:
        spans = _SPAN.findall(row.ours)
        if row.ours != "none":
            assert spans, row
            assert not _SPAN.sub("", row.ours).strip(" ,"), row
        faults += [f"{row.theirs}: {span}: {why}" for span in spans if (why := fault(span))]
    assert faults == []


@pytest.mark.parametrize("page", PAGES)
def test_whatever_looks_like_ours_elsewhere_exists_too(page: str) -> None:
    ours = re.compile(rf"({'|'.join([*KNOWN, *OTHER])}): [a-z_.]+.*|kvtier[ _].+|KVTIER_.+")
    spans = [span for span in _SPAN.findall(prose_of(page)) if ours.fullmatch(span)]
    assert len(spans) > 60
    assert [f"{span}: {why}" for span in spans if (why := fault(span))] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_shown_are_read_by_their_services(page: str, tmp_path: Path) -> None:
    shown = [body for kind, body in _FENCED.findall(text_of(page)) if kind == "toml"]
    assert shown
    for body in shown:
        lines = [line.removeprefix("   ") for line in body.splitlines()]
        name = lines[0].removeprefix("# ").removesuffix(".toml")
        path = tmp_path / f"{name}.toml"
        path.write_text("\n".join(lines))
        load(CONFIGS[name], ["--config", str(path)], {})


@pytest.mark.parametrize("page", PAGES)
def test_the_way_back_names_what_goes_back_and_only_what_exists(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each flag that the way in changes in an engine, a rollback says how it goes back."""
    (back,) = re.findall(r"^## Rollback\n(.+)", text_of(page), re.MULTILINE | re.DOTALL)
    assert "\n## " not in back
    flags = {span for span in _SPAN.findall(back) if span.startswith("--")}
    assert {"--kv-transfer-config", "--block-size", "--prefix-caching-hash-algo"} <= flags
    assert vllm_command(["flags", "org/model", "--store=unix:/run/kvtier/store.sock"]) == 0
    printed = capsys.readouterr().out
    assert [flag for flag in flags if flag not in printed] == []


def test_what_the_pages_say_of_names_in_other_forms_is_so() -> None:
    """`router: split` as a flag and a variable, and one of the store, as the introductions say."""
    split, dram = KNOWN["router"]["split"], KNOWN["store"]["dram.bytes_max"]
    assert "--split" in split.flags
    assert split.variable == "KVTIER_ROUTER_SPLIT"
    assert "--dram-bytes-max" in dram.flags
    assert dram.variable == "KVTIER_STORE_DRAM_BYTES_MAX"


def test_a_name_that_is_none_is_found() -> None:
    for span in (
        "router: splitt", "router: split = \"sometimes\"", "printer: split", "kvtier fly",
        "kvtier vllm sing", "kvtier index --no-such-flag", "connector: savee", "kvtier_router_x",
        "KVTIER_ROUTER_X", "tenants: colour", "--split",
    ):  # fmt: skip
        assert fault(span), span
