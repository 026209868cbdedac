"""Configuration: frozen dataclasses filled from TOML, then environment, then flags. Reads once.

A service derives a frozen, slotted dataclass from `Root`; nested dataclasses are its sections. The
field `bind` of the section `listen` of the service `index` is the key `listen.bind` in TOML, the
variable `KVTIER_INDEX_LISTEN_BIND` and the flag `--listen-bind` (also `--bind` where no other
field has that last name). Later sources win. Unknown keys refuse to start. A field's docstring is
its help.

What must not live here: the meaning of a service's own settings, and any reading of the environment
elsewhere. Shared sections (`ListenConfig` and the like) are in `kvtier.sections`.
"""

import argparse
import ast
import dataclasses
import difflib
import enum
import functools
import hmac
import inspect
import itertools
import json
import math
import os
import re
import textwrap
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import (
    ClassVar,
    Final,
    Generic,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_type_hints,
)

from kvtier.errors import ConfigError
from kvtier.limits import CONFIG_BYTES_MAX

PREFIX: Final = "KVTIER"
CONFIG_FLAG: Final = "--config"
PRINT_FLAG: Final = "--print-config"
MASK: Final = "***"

_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_ORCHESTRATOR: Final = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Kubernetes puts these into every container for each service; `kvtier-index` hits our prefix."""
_ORCHESTRATOR_PORT: Final = re.compile(r"(tcp|udp|sctp)://")
_REQUIRED: Final = object()


class Root:
    """Base of a service's configuration; `SECTION` is the service's part of variable names."""

    __slots__ = ()
    SECTION: ClassVar[str]


C = TypeVar("C", bound=Root)


class Secret:
    """Text that no repr, log line or format shows; `reveal()` gives it. Immutable by convention.

    A field of this type may also be given as `<field>_file`, the path of a file that holds it; it
    has no flag of its own, because every user of a machine can read command lines.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The secret itself: pass it on at once, keep no copy."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({MASK})"

    def __str__(self) -> str:
        return MASK

    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not serialised")


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of a configuration class and its names in all sources."""

    path: tuple[str, ...]
    kind: type
    """str, int, float, bool, Path, Secret or an Enum class."""
    many: bool
    optional: bool
    secret_file: bool
    """True for `<field>_file` of a Secret: the path of a file that holds the value."""
    help: str
    variable: str
    flags: tuple[str, ...]

    @property
    def key(self) -> str:
        """Dotted name in TOML, as messages show it."""
        return ".".join(self.path)

    @property
    def target(self) -> tuple[str, ...]:
        """Path of the dataclass field that this setting fills."""
        if self.secret_file:
            return (*self.path[:-1], self.path[-1].removesuffix("_file"))
        return self.path


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A configuration and where each of its values came from."""

    config: C
    origins: Mapping[str, str]
    """Dotted field → source, for the fields that are not at their default."""
    print_only: bool
    """`--print-config` was given: the service prints `describe()` and ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Section:
    """A dataclass in the tree; `fallback` is the value when nothing inside it is given."""

    config_class: type
    path: tuple[str, ...]
    optional: bool
    fallback: object


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    name: str
    kind: type
    many: bool
    optional: bool
    fallback: object
    help: str


# Loading


def load(
    config_class: type[C],
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> Loaded[C]:
    """Build the configuration from the file, then the environment, then the flags. Reads files.

    `environ` is the process's own when None; `--config FILE` among the flags replaces `toml_path`.
    Raises ConfigError, naming the key and the nearest known one, for an unknown key, a value of the
    wrong type, a missing value, or one that a class's own check refuses. `--help` exits.
    """
    table = settings(config_class)
    flags = vars(_parse_flags(config_class, table, argv))
    chosen = cast("str | None", flags.pop("config", None))
    print_only = bool(flags.pop("print_config", False))
    path = Path(chosen) if chosen is not None else toml_path
    variables = os.environ if environ is None else environ
    given: dict[tuple[str, ...], tuple[object, str]] = {}
    for source in (
        _from_toml(config_class, table, path) if path is not None else iter(()),
        _from_environment(config_class, table, variables),
        _from_flags(table, flags),
    ):
        given |= _without_doubles(source)
    config = cast("C", _build(_Section(config_class, (), False, None), given))
    origins = {".".join(target): origin for target, (_, origin) in given.items()}
    return Loaded(config=config, origins=origins, print_only=print_only)


def variables_with(added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment and `added` for a child; what the operator has set stays."""
    return {**added, **os.environ}


def settings(config_class: type[Root]) -> tuple[Setting, ...]:
    """Every leaf of a configuration class, in order of declaration, with its names."""
    leaves = list(_leaves(_Section(config_class, (), False, None)))
    names = [path[-1] for path, _ in leaves]
    table: list[Setting] = []
    for path, leaf in leaves:
        short = ("--" + path[-1].replace("_", "-"),) if names.count(path[-1]) == 1 else ()
        long = "--" + "-".join(path).replace("_", "-")
        flags = tuple(dict.fromkeys((*short, long)))
        is_secret = leaf.kind is Secret
        table.append(_setting(config_class, path, leaf, () if is_secret else flags))
        if is_secret:
            path_leaf = dataclasses.replace(leaf, kind=Path, help=f"File that holds: {leaf.help}")
            file_path = (*path[:-1], path[-1] + "_file")
            flags = tuple(flag + "-file" for flag in flags)
            table.append(_setting(config_class, file_path, path_leaf, flags, secret_file=True))
    for seen in ([s.variable for s in table], [flag for s in table for flag in s.flags]):
        if len(seen) != len(set(seen)):
            raise TypeError(f"{config_class.__name__}: two fields share a name in one source")
    return tuple(table)


def describe(loaded: Loaded[C]) -> str:
    """The effective configuration as TOML, each value with its source; secrets are masked."""
    lines: list[str] = []
    _describe(loaded.config, (), loaded.origins, lines)
    return "\n".join(lines) + "\n"


# The shape of a configuration class


def _setting(
    config_class: type[Root],
    path: tuple[str, ...],
    leaf: _Leaf,
    flags: tuple[str, ...],
    *,
    secret_file: bool = False,
) -> Setting:
    return Setting(
        path=path,
        kind=leaf.kind,
        many=leaf.many,
        optional=leaf.optional,
        secret_file=secret_file,
        help=leaf.help,
        variable="_".join((PREFIX, config_class.SECTION, *path)).upper(),
        flags=flags,
    )


def _leaves(section: _Section) -> Iterator[tuple[tuple[str, ...], _Leaf]]:
    for item in _items(section):
        if isinstance(item, _Section):
            yield from _leaves(item)
        else:
            yield (*section.path, item.name), item


def _items(section: _Section) -> Iterator[_Section | _Leaf]:
    """Fields of one section, in order. TypeError for a type that no source can give."""
    hints = get_type_hints(section.config_class)
    docs = field_docs(section.config_class)
    for field in _fields(section.config_class):
        kind, optional = _without_none(hints[field.name])
        fallback = _fallback(section, field)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield _Section(kind, (*section.path, field.name), optional, fallback)
            continue
        many = kind == tuple[str, ...]
        if many:
            kind = str
        known = kind in {str, int, float, bool, Path, Secret}
        if not (known or (isinstance(kind, type) and issubclass(kind, enum.Enum))):
            raise TypeError(f"{section.config_class.__name__}.{field.name}: no source gives {kind}")
        yield _Leaf(
            name=field.name,
            kind=cast("type", kind),
            many=many,
            optional=optional,
            fallback=fallback,
            help=docs.get(field.name, ""),
        )


def _fields(config_class: type) -> tuple[dataclasses.Field[object], ...]:
    if not dataclasses.is_dataclass(config_class):
        raise TypeError(f"{config_class.__name__} is not a dataclass")
    return dataclasses.fields(config_class)


def _without_none(hint: object) -> tuple[object, bool]:
    """The type beside None of `X | None`, and whether None was there."""
    if isinstance(hint, types.UnionType) or getattr(hint, "__origin__", None) is Union:
        rest = [part for part in get_args(hint) if part is not type(None)]
        if len(rest) == 1:
            return rest[0], True
    return hint, False


def _fallback(section: _Section, field: dataclasses.Field[object]) -> object:
    if section.fallback is not None and section.fallback is not _REQUIRED:
        return cast("object", getattr(section.fallback, field.name))
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return _REQUIRED


@functools.cache
def field_docs(config_class: type) -> Mapping[str, str]:
    """Docstrings written under the fields of a class and its bases; empty without sources."""
    docs: dict[str, str] = {}
    for base in reversed(config_class.__mro__):
        if base in {object, Root} or not dataclasses.is_dataclass(base):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:
            continue
        body = cast("ast.ClassDef", ast.parse(source).body[0]).body
        for field, below in itertools.pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                docs[field.target.id] = inspect.cleandoc(below.value.value)
    return docs


# Sources: each yields (target field, value, origin)

_Given = tuple[Setting, object, str]


def _without_doubles(source: Iterator[_Given]) -> dict[tuple[str, ...], tuple[object, str]]:
    """Values of one source by target; a secret and its file in the same source contradict."""
    found: dict[tuple[str, ...], tuple[object, str]] = {}
    for setting, value, origin in source:
        if setting.target in found:
            raise ConfigError(f"{origin}: {setting.key} is given twice, as text and as a file")
        found[setting.target] = (_read_secret(setting, value), origin)
    return found


def _read_secret(setting: Setting, value: object) -> object:
    if not setting.secret_file or value is None:
        return value
    text = read_text(cast("Path", value), setting.key).strip("\r\n")
    if not text:
        raise ConfigError(f"{setting.key}: {value} is empty")
    return Secret(text)


def read_text(path: Path, key: str) -> str:
    """Text of a small file that a setting names. ConfigError where it cannot be had."""
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{key}: {path} is larger than {CONFIG_BYTES_MAX} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {path} is not UTF-8 text") from error


def _from_toml(config_class: type[Root], table: Sequence[Setting], path: Path) -> Iterator[_Given]:
    try:
        document = tomllib.loads(read_text(path, "configuration file"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    sections = {setting.path[:depth] for setting in table for depth in range(len(setting.path))}
    by_path = {setting.path: setting for setting in table}
    for at, value in _entries(document, (), sections):
        setting = by_path.get(at)
        if setting is None:
            known = [setting.key for setting in table]
            raise ConfigError(f"{path}: {_unknown('key', '.'.join(at), known)}")
        try:
            yield setting, _parse_toml(setting, value), f"toml {path}"
        except ValueError as error:
            raise ConfigError(f"{path}: {setting.key}: {error}") from None


def _entries(
    table: Mapping[str, object], at: tuple[str, ...], sections: set[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, value in table.items():
        path = (*at, name)
        if path in sections and isinstance(value, dict):
            yield from _entries(value, path, sections)
        else:
            yield path, value


def _from_environment(
    config_class: type[Root], table: Sequence[Setting], environ: Mapping[str, str]
) -> Iterator[_Given]:
    by_name = {setting.variable: setting for setting in table}
    prefix = f"{PREFIX}_{config_class.SECTION}_".upper()
    for name, text in sorted(environ.items()):
        if not name.startswith(prefix):
            continue
        setting = by_name.get(name)
        if setting is None:
            if not _is_orchestrators(name.removeprefix(prefix), text):
                raise ConfigError(_unknown("environment variable", name, list(by_name)))
            continue
        try:
            yield setting, _parse_text(setting, text), f"env {name}"
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from None


def _is_orchestrators(rest: str, text: str) -> bool:
    """Whether Kubernetes set this variable because some service has such a name."""
    if (rest == "PORT" or rest.endswith("_PORT")) and _ORCHESTRATOR_PORT.match(text):
        return True
    return bool(_ORCHESTRATOR.fullmatch(rest))


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that a bad flag looks like any other bad setting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parse_flags(
    config_class: type[Root], table: Sequence[Setting], argv: Sequence[str]
) -> argparse.Namespace:
    parser = _Parser(
        prog=f"kvtier {config_class.SECTION}",
        description=inspect.cleandoc(config_class.__doc__ or ""),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(CONFIG_FLAG, dest="config", metavar="FILE", help="TOML file to read first")
    parser.add_argument(
        PRINT_FLAG, dest="print_config", action="store_true", help="print the result and end"
    )
    for setting in table:
        if setting.flags:
            _add_flag(parser, setting)
    known, extra = parser.parse_known_args(list(argv))
    if extra:
        name = extra[0].split("=", 1)[0]
        if not name.startswith("-"):
            raise ConfigError(f"unexpected argument {name!r}")
        flags = [flag for setting in table for flag in setting.flags]
        raise ConfigError(_unknown("flag", name, [*flags, CONFIG_FLAG, PRINT_FLAG]))
    return known


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    text = setting.help.replace("%", "%%")
    if setting.kind is bool and not setting.optional:
        action = argparse.BooleanOptionalAction
        parser.add_argument(*setting.flags, dest=setting.key, action=action, help=text)
        return
    parser.add_argument(
        *setting.flags,
        dest=setting.key,
        action="append" if setting.many else "store",
        metavar=setting.kind.__name__.upper(),
        help=text,
    )


def _from_flags(table: Sequence[Setting], flags: Mapping[str, object]) -> Iterator[_Given]:
    for setting in table:
        if setting.key not in flags:
            continue
        given = flags[setting.key]
        origin = f"flag {setting.flags[0]}"
        if isinstance(given, bool):
            yield setting, given, origin
            continue
        text = ",".join(given) if isinstance(given, list) else str(given)
        try:
            yield setting, _parse_text(setting, text), origin
        except ValueError as error:
            raise ConfigError(f"{setting.flags[0]}: {error}") from None


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown {what} {name!r}; the nearest known one is {nearest[0]!r}"


# Values


def _parse_text(setting: Setting, text: str) -> object:
    """Value of a variable or flag. ValueError says what was wrong, never a secret's text."""
    if not text and setting.optional:
        return None
    if text.encode("utf-8", "ignore").decode() != text:
        raise ValueError("is not valid text")
    if setting.many:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if setting.kind is bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{text!r} is neither true nor false")
        return word in _TRUE
    if setting.kind is int or setting.kind is float:
        try:
            number: int | float = int(text) if setting.kind is int else float(text)
        except ValueError:
            raise ValueError(f"{text!r} is no {setting.kind.__name__}") from None
        return _finite(number)
    return _parse_string(setting, text)


def _parse_toml(setting: Setting, value: object) -> object:
    """Value of a TOML entry; TOML has types, so no text becomes a number here."""
    if setting.many:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError("is not an array of strings")
        return tuple(value)
    if setting.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if setting.kind in {bool, int, float}:
        if type(value) is not setting.kind:
            raise ValueError(f"is {type(value).__name__}, not {setting.kind.__name__}")
        return _finite(value) if isinstance(value, float) else value
    if not isinstance(value, str):
        raise ValueError(f"is {type(value).__name__}, not a string")
    return _parse_string(setting, value)


def _parse_string(setting: Setting, text: str) -> object:
    if issubclass(setting.kind, enum.Enum):
        choices = {_enum_text(member): member for member in setting.kind}
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return choices[text]
    if setting.kind in {Path, Secret} and not text:
        raise ValueError("is empty")
    make = cast("Callable[[str], object]", setting.kind)
    return make(text)


def _finite(number: int | float) -> int | float:
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def _enum_text(member: enum.Enum) -> str:
    """A string enum is written as its value, any other as its name in lower case."""
    return member.value if isinstance(member.value, str) else member.name.lower()


# Building and describing


def _build(section: _Section, given: Mapping[tuple[str, ...], tuple[object, str]]) -> object:
    depth = len(section.path)
    inside = any(target[:depth] == section.path for target in given)
    if depth and not inside and section.fallback is not _REQUIRED:
        return section.fallback
    values: dict[str, object] = {}
    for item in _items(section):
        if isinstance(item, _Section):
            values[item.path[-1]] = _build(item, given)
            continue
        path = (*section.path, item.name)
        value = given[path][0] if path in given else item.fallback
        if value is _REQUIRED:
            raise ConfigError(f"{'.'.join(path)} is required and has no value")
        values[item.name] = value
    make = cast("Callable[..., object]", section.config_class)
    try:
        return make(**values)
    except ConfigError as error:
        where = f"[{'.'.join(section.path)}] " if section.path else ""
        raise ConfigError(f"{where}{error}") from error


def _describe(
    config: object, at: tuple[str, ...], origins: Mapping[str, str], lines: list[str]
) -> None:
    nested: list[tuple[tuple[str, ...], object]] = []
    for item in _items(_Section(type(config), at, False, None)):
        name = item.path[-1] if isinstance(item, _Section) else item.name
        value = cast("object", getattr(config, name))
        if isinstance(item, _Section):
            nested.append((item.path, value))
            continue
        origin = origins.get(".".join((*at, name)), "default")
        if value is None:
            lines.append(f"# {name} is not set  # {origin}")
        else:
            lines.append(f"{name} = {toml_value(value)}  # {origin}")
    for path, value in nested:
        if value is None:
            lines.append(f"\n# [{'.'.join(path)}] is not set")
            continue
        lines.append(f"\n[{'.'.join(path)}]")
        _describe(value, path, origins, lines)


def toml_value(value: object) -> str:
    """A value of a supported type as TOML text, in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, enum.Enum):
        return toml_value(_enum_text(value))
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(part) for part in value)}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
