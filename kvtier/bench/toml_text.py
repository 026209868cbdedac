"""TOML of a bench's own services. What must not live here: reading it (`kvtier.config` does)."""

import json
from collections.abc import Mapping


def toml_text(table: Mapping[str, object], path: str = "") -> str:
    """TOML of numbers, truths, texts, lists of texts and tables."""
    lines = [f"[{path}]"] if path else []
    tables = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            tables.append(toml_text(value, f"{path}.{key}" if path else key))
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join([*lines, *tables]) + "\n"
