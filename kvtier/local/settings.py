"""What a cluster is: the table `[cluster]`, and a section a service for its own loader.

One TOML file describes a cluster. Sections are merged over what `plan.py` chooses and read by the
service's own configuration class: every key of a service works here, and unknown ones refuse.
What must not live here: ports, processes.
"""

import argparse
import difflib
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Final, TypeVar, cast

from kvtier.config import CONFIG_FLAG, Loaded, Root, describe, load, read_text, toml_value
from kvtier.errors import ConfigError
from kvtier.limits import LOCAL_ROUTERS_COUNT_MAX, LOCAL_WORKERS_COUNT_MAX
from kvtier.sections import parse_address

Table = Mapping[str, object]
C = TypeVar("C", bound=Root)

EMBEDDED: Final = "embedded"
CLUSTER: Final = "cluster"
SECTIONS: Final = ("index", "store", "worker", "router", "vllm")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_USER_INFO: Final = re.compile(r"(?<=//)[^@/]*@")
_MIB: Final = 1 << 20


class Engine(StrEnum):
    """What the workers are."""

    KVTIER = "kvtier"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class ClusterConfig(Root):
    """A whole cluster on this machine: index, store, workers and router, supervised."""

    SECTION: ClassVar[str] = "up"

    workers: int = 2
    """Workers, each with the model in its memory."""
    routers: int = 1
    """Routers, each on a port of its own: clients that try the next one lose nothing with one."""
    engine: Engine = Engine.KVTIER
    """kvtier, or vllm: which servers the workers are."""
    vllm_python: Path | None = None
    """A Python with vLLM and kvtier[engine]; not set: the one that runs this."""
    model: str = "smollm2"
    """smollm2, tiny, fake, a directory, or an id on the model hub."""
    redis: str = ""
    """Address of a Redis to keep blocks in, or `embedded` for one of the cluster's own."""
    redis_bytes_max: int = 1 << 30
    """Memory of the embedded Redis."""
    bind: str | None = None
    """Where clients call; port 0: a free one, remembered; not set: 127.0.0.1:8000 if it is free."""
    data_dir: Path | None = None
    """Blocks, logs and state; not set: .local/share/kvtier in the home directory."""
    ready_s_max: float = 600.0
    """How long one process may take until it serves."""
    log_bytes_max: int = 8 * _MIB
    """Of one log file; the last full one is kept beside it."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= LOCAL_WORKERS_COUNT_MAX:
            raise ConfigError(f"workers must be 1 to {LOCAL_WORKERS_COUNT_MAX}, got {self.workers}")
        if not 1 <= self.routers <= LOCAL_ROUTERS_COUNT_MAX:
            raise ConfigError(f"routers must be 1 to {LOCAL_ROUTERS_COUNT_MAX}, got {self.routers}")
        if not self.model:
            raise ConfigError("model must be given")
        if self.engine is Engine.VLLM and self.model in {"tiny", "fake"}:
            raise ConfigError(f"vLLM cannot serve {self.model}: give smollm2, a directory or an id")
        if self.redis and self.redis != EMBEDDED and "://" not in self.redis:
            raise ConfigError("redis is `embedded` or redis://, rediss:// or unix://")
        if self.bind is not None:
            parse_address(self.bind)
        if min(self.ready_s_max, self.log_bytes_max, self.redis_bytes_max) <= 0:
            raise ConfigError("ready_s_max, log_bytes_max, redis_bytes_max must be positive")

    @property
    def directory(self) -> Path:
        """The data directory, absolute."""
        chosen = self.data_dir or Path.home() / ".local" / "share" / "kvtier"
        return chosen.expanduser().absolute()


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster as it was asked for."""

    loaded: Loaded[ClusterConfig]
    sections: Mapping[str, Table]
    """What the file says of each service; empty tables where it says nothing."""
    file: Path | None

    @property
    def config(self) -> ClusterConfig:
        """The table `[cluster]` with variables and flags applied."""
        return self.loaded.config

    def where(self, section: str) -> str:
        """How messages name a section."""
        return f"[{section}]" if self.file is None else f"{self.file}: [{section}]"


def read_cluster(argv: Sequence[str], defaults: Table | None = None) -> Cluster:
    """Read `--config FILE`, the variables KVTIER_UP_... and the other flags of `kvtier up`.

    `defaults` stand below the file's table `[cluster]`. ConfigError for what is wrong in the file's
    outline or in its table `[cluster]`; the services' sections are read by `plan`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(CONFIG_FLAG, dest="file")
    known, rest = parser.parse_known_args(list(argv))
    file = None if known.file is None else Path(cast("str", known.file))
    document = {} if file is None else _parsed(file)
    _check_outline(document, file)
    sections = {name: cast("Table", document.get(name, {})) for name in SECTIONS}
    table = merged(defaults or {}, cast("Table", document.get(CLUSTER, {})))
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        made = Path(folder) / "cluster.toml"
        made.write_text(toml_text(table), encoding="utf-8")
        where = "[cluster]" if file is None else f"{file}: [cluster]"
        loaded = load_named(ClusterConfig, made, where, rest)
    return Cluster(loaded, sections, file)


def load_named(
    config_class: type[C], path: Path, where: str, argv: Sequence[str] = ()
) -> Loaded[C]:
    """`load` of a file that we wrote, with messages that name the place it came from."""
    try:
        loaded = load(config_class, [*argv, CONFIG_FLAG, str(path)])
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(path), where)) from None
    origins = {key: text.replace(str(path), where) for key, text in loaded.origins.items()}
    return replace(loaded, origins=origins)


def shown(cluster: Cluster) -> str:
    """The table `[cluster]` as it is in effect, with the source of each value; secrets masked."""
    safe = replace(cluster.config, redis=without_login(cluster.config.redis))
    return f"[{CLUSTER}]\n{describe(replace(cluster.loaded, config=safe))}"


def without_login(url: str) -> str:
    """A URL with user and password masked. Pure."""
    return _USER_INFO.sub("***@", url)


def merged(below: Table, above: Table) -> dict[str, object]:
    """Both tables in one, the second winning key by key, at any depth. Pure."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if isinstance(value, Mapping) and isinstance(under, Mapping):
            result[key] = merged(under, value)
        else:
            result[key] = value
    return result


def toml_text(table: Table) -> str:
    """A table as TOML; None is left out. Pure."""
    lines: list[str] = []
    _write(table, (), lines)
    return "\n".join(lines) + "\n"


def _write(table: Table, at: tuple[str, ...], lines: list[str]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    for key, value in table.items():
        if key not in inner and value is not None:
            plain = tuple(value) if isinstance(value, list) else value
            lines.append(f"{_key(key)} = {toml_value(plain)}")
    for key, value in inner.items():
        path = (*at, key)
        lines.append(f"\n[{'.'.join(_key(part) for part in path)}]")
        _write(value, path, lines)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def _parsed(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(read_text(file, "cluster file"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def _check_outline(document: Table, file: Path | None) -> None:
    known = (CLUSTER, *SECTIONS)
    for name, value in document.items():
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{file}: unknown section {name!r}; the nearest is [{nearest}]")
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: {name} is a table: [{name}]")
