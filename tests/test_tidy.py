"""Style as a test: what style.md and ARCHITECTURE.md ask for and a tool can see."""

import ast
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("kvtier", "services", "router")
    for path in (ROOT / folder).rglob("*.py")
    if "_pb" not in path.parts
)
FILE_LINES_MAX = 660
BLOB_BYTES_MAX = 500_000

BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.load", "__import__"}
PRINTERS = {"kvtier/cli.py", "kvtier/bench/report.py"}
ENVIRONMENT_READERS = {"kvtier/config.py"}
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}
WALL_CLOCK_READERS = {
    "kvtier/security/clock.py": "certificates and tokens expire by wall time",
    "services/kvtier_services/worker/http/app.py": "answers say when they were created",
    "kvtier/text/clock.py": "chat templates print the date",
}
BROAD = {"Exception", "BaseException"}
BROAD_MARK = "outermost edge"


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression, or an empty string."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(parts)])
    return ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules ask of one file, found in one walk over its tree."""

    imports: frozenset[str]
    calls: frozenset[str]
    attributes: frozenset[str]
    broad_excepts: tuple[int, ...]
    """Lines of those that neither raise again nor say that they stand at an outermost edge."""
    mutable_defaults: tuple[int, ...]
    """Lines of functions that have one."""
    has_docstring: bool
    lines_count: int


@cache
def facts(path: Path) -> Facts:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    lines = text.splitlines()
    imports, calls, attributes = set[str](), set[str](), set[str]()
    excepts, defaults = list[int](), list[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                imports |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                imports |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            case ast.Call():
                calls.add(dotted(node.func))
            case ast.Attribute():
                attributes.add(dotted(node))
            case ast.ExceptHandler() if is_broad(node, lines):
                excepts.append(node.lineno)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if has_mutable_default(node):
                defaults.append(node.lineno)
    return Facts(
        frozenset(imports),
        frozenset(calls),
        frozenset(attributes),
        tuple(excepts),
        tuple(defaults),
        ast.get_docstring(tree) is not None,
        text.count("\n"),
    )


def is_broad(handler: ast.ExceptHandler, lines: Sequence[str]) -> bool:
    caught = {dotted(handler.type)} if handler.type is not None else {"BaseException"}
    if isinstance(handler.type, ast.Tuple):
        caught = {dotted(item) for item in handler.type.elts}
    reraises = any(isinstance(inner, ast.Raise) for inner in handler.body)
    return bool(caught & BROAD) and not reraises and BROAD_MARK not in lines[handler.lineno - 1]


def has_mutable_default(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    defaults = [*function.args.defaults, *(d for d in function.args.kw_defaults if d is not None)]
    return any(isinstance(d, ast.List | ast.Dict | ast.Set) for d in defaults)


def offending(rule: Callable[[str, Facts], object]) -> dict[str, object]:
    """What a rule finds, by file; empty where all keep it."""
    found = {relative(path): rule(relative(path), facts(path)) for path in SOURCES}
    return {path: what for path, what in found.items() if what}


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


def test_sources_were_found() -> None:
    assert len(SOURCES) > 10


def test_nothing_deserialises_or_runs_code_from_outside() -> None:
    def rule(_: str, file: Facts) -> object:
        return {name.split(".")[0] for name in file.imports} & BANNED_MODULES | (
            file.calls & BANNED_CALLS
        )

    assert offending(rule) == {}


def test_only_the_command_line_prints() -> None:
    assert offending(lambda path, file: path not in PRINTERS and "print" in file.calls) == {}


def test_the_environment_is_read_in_one_file() -> None:
    readers = {"os.environ", "os.getenv", "os.environb"}
    assert (
        offending(lambda path, file: path not in ENVIRONMENT_READERS and file.attributes & readers)
        == {}
    )


def test_wall_clocks_are_read_only_where_a_reason_is_given() -> None:
    def rule(path: str, file: Facts) -> object:
        if path in WALL_CLOCK_READERS or path.startswith("kvtier/bench/"):
            return None
        return {name for name in file.attributes if name.endswith(tuple(WALL_CLOCKS))}

    assert offending(rule) == {}


def test_broad_excepts_stand_only_at_an_outermost_edge() -> None:
    assert offending(lambda _, file: file.broad_excepts) == {}


def test_defaults_are_immutable() -> None:
    assert offending(lambda _, file: file.mutable_defaults) == {}


def test_every_module_says_what_it_is_and_fits_a_sitting() -> None:
    assert offending(lambda _, file: not file.has_docstring) == {}
    assert offending(lambda _, file: file.lines_count > FILE_LINES_MAX and file.lines_count) == {}


UNIMPORTED = {
    "kvtier.core.naive_index": "the oracle of the prefix index, shipped beside it",
    "kvtier.core.engine_keys": "public: foreign engines' hashes; the bridge will import it",
    "kvtier.core.replay": "public: simulate a policy on a trace",
    "kvtier.engines.vllm.connector": "loaded by vLLM, by name",
    "kvtier.local.converting": "a process of its own, started by name",
    "kvtier.local.vllm.offline": "public: programs that have vLLM inside call it",
}
"""Modules that nothing of ours imports, each with the reason why it stands all the same."""


def modules() -> dict[str, Path]:
    """Every module of the three packages by its dotted name, packages themselves left out."""
    roots = {ROOT / "kvtier": ["kvtier"], ROOT / "services": [], ROOT / "router": []}
    found = {}
    for path in SOURCES:
        for folder, prefix in roots.items():
            if path.is_relative_to(folder) and path.name not in {"__init__.py", "__main__.py"}:
                parts = [*prefix, *path.relative_to(folder).with_suffix("").parts]
                found[".".join(parts)] = path
    return found


def test_no_module_is_dead_and_no_excuse_is_stale() -> None:
    used = {name for path in SOURCES for name in facts(path).imports}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    used |= set(re.findall(r'^[\w-]+ = "([\w.]+):\w+"$', project, re.MULTILINE))
    dead = {
        name
        for name in modules()
        if name not in used and not name.startswith("kvtier.bench.")  # loaded by name
    }
    assert dead == set(UNIMPORTED)


def test_tracked_files_are_small_and_name_no_machine() -> None:
    paths = tracked()
    assert len(paths) > len(SOURCES)
    assert [relative(path) for path in paths if path.stat().st_size > BLOB_BYTES_MAX] == []
    machine = re.compile(rb"/work/(?:main|wt|shared)|/root/|\.library|/opt/wheels")
    found = {}
    for path in paths:
        content = path.read_bytes()
        if path != Path(__file__) and b"\0" not in content[:4096]:
            found[relative(path)] = machine.findall(content)
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "field", "shown"),
    [
        ("import pickle\nfrom os import path", "imports", {"pickle", "os", "os.path"}),
        ("torch.load(x)\nprint(1)", "calls", {"torch.load", "print"}),
        ("os.environ['A']\na().b.c", "attributes", {"os.environ", ""}),
        ("try:\n  x\nexcept (ValueError, Exception):\n  y", "broad_excepts", {3}),
        ("try:\n  x\nexcept:\n  y", "broad_excepts", {3}),
        ("try:\n  x\nexcept Exception:\n  raise", "broad_excepts", set()),
        ("try:\n  x\nexcept Exception:  # outermost edge: why\n  y", "broad_excepts", set()),
        ("async def f(*, a={}): ...", "mutable_defaults", {1}),
        ("def f(a=(), b=[1]): ...", "mutable_defaults", {1}),
    ],
)
def test_the_rules_see_what_they_forbid(
    tmp_path: Path, text: str, field: str, shown: set[object]
) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert set(getattr(facts(path), field)) == shown
    assert not facts(path).has_docstring
