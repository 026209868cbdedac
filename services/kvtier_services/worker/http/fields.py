"""A JSON object read field by field, with the errors that OpenAI's clients understand.

Null means absent everywhere, as in OpenAI's API. Types are strict: true is no number, 1.0 no
integer, "1" neither. What must not live here: which fields there are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn, TypeAlias, TypeVar

from kvtier.openai.errors import Fault, ParameterError, unknown

Json: TypeAlias = Mapping[str, object]
_Default = TypeVar("_Default", int, int | None)
NAME_SHOWN_CHARS_MAX: Final = 64
"""Of an unknown field's name in an error."""
_KINDS: Final = {
    "NoneType": "null", "bool": "a boolean", "int": "an integer", "float": "a number",
    "str": "a string", "list": "an array", "dict": "an object",
}  # fmt: skip


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    return _KINDS.get(type(value).__name__, "something else")


class Fields:
    """Typed access to one object. `where` is put before names in errors (`stream_options.`)."""

    def __init__(self, body: Json, where: str = "") -> None:
        self._body = body
        self._where = where

    def name(self, name: str) -> str:
        return self._where + name

    def get(self, name: str) -> object:
        """The value as it is; None where absent or null."""
        return self._body.get(name)

    def integer(self, name: str, default: _Default, least: int, most: int) -> int | _Default:
        """An integer of `least` to `most`, both included."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not int:
            self.refuse(name, value, "an integer")
        if not least <= value <= most:
            self.fail(name, f"must be {least} to {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A finite number of `least` to `most`, both included."""
        value = self.get(name)
        if value is None:
            return default
        return self._number(name, value, least, most)

    def _number(self, name: str, value: object, least: float, most: float) -> float:
        if type(value) is not float and type(value) is not int:
            self.refuse(name, value, "a number")
        if not least <= value <= most or not math.isfinite(value):  # before float(): 10**400
            self.fail(name, f"must be {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, value, "a boolean")
        return value

    def text(self, name: str, bytes_max: int) -> str | None:
        """A non-empty string of at most so many UTF-8 bytes."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.refuse(name, value, "a string")
        if not value or len(value) > bytes_max or len(value.encode()) > bytes_max:
            self.fail(name, f"must be a string of 1 to {bytes_max} bytes")
        return value

    def texts(self, name: str, count_max: int, chars_max: int) -> tuple[str, ...]:
        """One string or an array of strings, none of them empty."""
        value = self.get(name)
        if value is None:
            return ()
        items: Sequence[object] = [value] if isinstance(value, str) else self._array(name, value)
        if len(items) > count_max:
            self.fail(name, f"has {len(items)} strings, at most {count_max}")
        found = []
        for item in items:
            if not isinstance(item, str):
                self.refuse(name, item, "a string or an array of strings")
            if not 1 <= len(item) <= chars_max:
                self.fail(name, f"has a string that has not 1 to {chars_max} characters")
            found.append(item)
        return tuple(found)

    def integers(self, name: str, count_max: int, most: int) -> tuple[int, ...]:
        """An array of integers of 0 to `most`."""
        value = self.get(name)
        if value is None:
            return ()
        items = self._array(name, value)
        if len(items) > count_max:
            self.fail(name, f"has {len(items)} integers, at most {count_max}")
        return self.checked_integers(name, items, most)

    def checked_integers(self, name: str, items: Sequence[object], most: int) -> tuple[int, ...]:
        """`items` as integers of 0 to `most`. O(items), for they may be a long prompt."""
        if not all(type(item) is int for item in items):
            wrong = next(item for item in items if type(item) is not int)
            self.refuse(name, wrong, "an array of integers")
        found = tuple(item for item in items if type(item) is int)
        if found and (min(found) < 0 or max(found) > most):
            self.fail(name, f"has an integer that is not 0 to {most}")
        return found

    def weights(self, name: str, count_max: int, most: int) -> tuple[tuple[int, float], ...]:
        """An object from token ids (as strings) to numbers of -100 to 100."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
        if len(value) > count_max:
            self.fail(name, f"has {len(value)} entries, at most {count_max}")
        found = {}
        for key, weight in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= most):
                self.fail(name, f"has a key that is no token id of 0 to {most}")
            found[int(key)] = self._number(name, weight, -100, 100)
        return tuple(sorted(found.items()))

    def section(self, name: str) -> "Fields | None":
        """A nested object."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, value, "an object")
        return Fields(value, f"{self.name(name)}.")

    def sections(self, name: str, count_max: int) -> list["Fields"]:
        """An array of objects."""
        value = self.get(name)
        if value is None:
            return []
        items = self._array(name, value)
        if len(items) > count_max:
            self.fail(name, f"has {len(items)} objects, at most {count_max}")
        found = []
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                self.refuse(name, item, "an array of objects")
            found.append(Fields(item, f"{self.name(name)}[{i}]."))
        return found

    def only(self, *names: str) -> None:
        """Refuse fields of other names."""
        for name in self._body:
            if name not in names:
                raise unknown(self.name(name[:NAME_SHOWN_CHARS_MAX]))

    def _array(self, name: str, value: object) -> Sequence[object]:
        if not isinstance(value, list):
            self.refuse(name, value, "an array")
        return value

    def fail(self, name: str, why: str) -> NoReturn:
        raise ParameterError(Fault.VALUE, self.name(name), f"{self.name(name)} {why}")

    def refuse(self, name: str, value: object, wanted: str) -> NoReturn:
        message = f"{self.name(name)} must be {wanted}, not {kind(value)}"
        raise ParameterError(Fault.TYPE, self.name(name), message)

    def missing(self, name: str) -> NoReturn:
        raise ParameterError(Fault.MISSING, self.name(name), f"{self.name(name)} is missing")
