"""The README's module map names every package of the tree, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOTS = {
    "kvtier": ROOT / "kvtier",
    "kvtier_services": ROOT / "services" / "kvtier_services",
    "kvtier_router": ROOT / "router" / "kvtier_router",
}
NOT_PACKAGES = {"kvtier.native"}
"""Folders with sources of another language that have a line all the same."""


def mapped() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## Module map", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([\w.]+)` \| \S.*\|$", section, re.MULTILINE)


def packages() -> set[str]:
    found = set(NOT_PACKAGES)
    for name, folder in ROOTS.items():
        for path in folder.rglob("__init__.py"):
            parts = path.parent.relative_to(folder).parts
            if not any(part.startswith("_") for part in parts):
                found.add(".".join([name, *parts]))
    return found


def test_every_package_has_exactly_one_line_in_the_module_map() -> None:
    lines = mapped()
    assert sorted(lines) == sorted(set(lines))
    assert set(lines) == packages()
