"""Writes the TOML that tests give to services as configuration.

Covers what our configuration uses: tables, strings, numbers, booleans and lists of these. What must
not live here: reading TOML (the standard library does).
"""

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

TomlValue: TypeAlias = "str | int | float | bool | Sequence[TomlValue] | Mapping[str, TomlValue]"
TomlTable: TypeAlias = Mapping[str, TomlValue]


def toml_text(table: TomlTable) -> str:
    """`table` as TOML that `tomllib` reads back equal. Raises TypeError on other types."""
    return "".join(_lines(table, ()))


def _lines(table: TomlTable, path: tuple[str, ...]) -> list[str]:
    lines = [f"[{'.'.join(_string(part) for part in path)}]\n"] if path else []
    inner: list[str] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner += _lines(value, (*path, key))
        else:
            lines.append(f"{_string(key)} = {_value(value)}\n")
    return lines + inner


def _value(value: TomlValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_string(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"no TOML for {type(value).__name__}")


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped, and lone surrogates.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
