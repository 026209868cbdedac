"""What a fleet on Ray is: the table `[ray]`, and a section a service for its own loader.

What must not live here: nodes, actors.
"""

import argparse
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, cast

from kvtier.config import CONFIG_FLAG, Loaded, Root, read_text
from kvtier.errors import ConfigError
from kvtier.limits import LOCAL_ROUTERS_COUNT_MAX, LOCAL_WORKERS_COUNT_MAX
from kvtier.local.settings import Table, load_named, toml_text

SECTIONS: Final = ("index", "store", "worker", "router")
_TABLE: Final = "ray"


@dataclass(frozen=True, slots=True)
class RayConfig(Root):
    """A fleet on a Ray cluster: a store and workers on each node, index and routers on the head."""

    SECTION: ClassVar[str] = "ray"

    model: str = "smollm2"
    """smollm2, tiny, fake, a directory that each node has, or an id on the model hub."""
    namespace: str = "kvtier"
    """Of the actors in Ray; one fleet each."""
    workers_per_node: int = 1
    """Workers on each node that has `worker_resource`."""
    worker_cpus: float = 1.0
    """Of Ray's CPUs, for each worker."""
    worker_gpus: float = 0.0
    """Of Ray's GPUs, for each worker; it sees no others."""
    worker_resource: str = ""
    """Name of a custom resource, one for each worker; nodes without it have none."""
    service_cpus: float = 0.0
    """Of Ray's CPUs, for each store, index and router."""
    routers: int = 1
    """On the head node, each on a port of its own."""
    router_port: int = 0
    """Of the first router; 0: a free one, remembered."""
    data_dir: Path = Path(".local/share/kvtier-ray")
    """On every node: blocks, logs, sockets; relative to the home directory."""
    insecure: bool = False
    """Let nodes talk without TLS and tokens: for networks that nobody else is in."""
    ready_s_max: float = 600.0
    """How long one process may take until it serves."""
    silent_s_max: float = 60.0
    """A process that does not answer its probe for so long is killed, and started again."""
    log_bytes_max: int = 8 << 20
    """Of one log file; the last full one is kept beside it."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers_per_node <= LOCAL_WORKERS_COUNT_MAX:
            raise ConfigError(f"workers_per_node must be 1 to {LOCAL_WORKERS_COUNT_MAX}")
        if not 1 <= self.routers <= LOCAL_ROUTERS_COUNT_MAX:
            raise ConfigError(f"routers must be 1 to {LOCAL_ROUTERS_COUNT_MAX}")
        if min(self.worker_cpus, self.worker_gpus, self.service_cpus) < 0:
            raise ConfigError("cpus and gpus must not be negative")
        if min(self.ready_s_max, self.silent_s_max, self.log_bytes_max) <= 0:
            raise ConfigError("ready_s_max, silent_s_max, log_bytes_max must be positive")
        if not self.model or not self.namespace or not 0 <= self.router_port <= 65_535:
            raise ConfigError("model and namespace must be given, router_port in 0..65535")


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet as it was asked for."""

    loaded: Loaded[RayConfig]
    sections: Mapping[str, Table]

    @property
    def config(self) -> RayConfig:
        """The table `[ray]` with variables and flags applied."""
        return self.loaded.config


def read_fleet(argv: Sequence[str]) -> Fleet:
    """Read `--config FILE`, the variables KVTIER_RAY_... and the other flags. ConfigError."""
    file, rest = _file_of(argv)
    document = {} if file is None else _parsed(file)
    tables = {name: cast("Table", document.get(name, {})) for name in (_TABLE, *SECTIONS)}
    with tempfile.TemporaryDirectory(prefix="kvtier-") as folder:
        made = Path(folder) / "ray.toml"
        made.write_text(toml_text(tables.pop(_TABLE)), encoding="utf-8")
        where = "[ray]" if file is None else f"{file}: [ray]"
        return Fleet(load_named(RayConfig, made, where, rest), tables)


def document_of(argv: Sequence[str]) -> tuple[str, list[str]]:
    """The text of the file that `--config` names, empty without one, and the other flags: what
    another machine needs to read the same fleet. ConfigError."""
    file, rest = _file_of(argv)
    return "" if file is None else read_text(file, "fleet file"), rest


def on_this_node(data_dir: Path) -> Path:
    """The data directory, absolute; of this machine's home."""
    return Path.home() / data_dir.expanduser()


def _file_of(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """What `--config` names, and the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(CONFIG_FLAG, dest="file")
    known, rest = parser.parse_known_args(list(argv))
    return None if known.file is None else Path(cast("str", known.file)), rest


def _parsed(file: Path) -> dict[str, object]:
    try:
        document = tomllib.loads(read_text(file, "fleet file"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    for name, value in document.items():
        if name not in (_TABLE, *SECTIONS) or not isinstance(value, dict):
            raise ConfigError(f"{file}: {name}: want tables [ray] and {', '.join(SECTIONS)}")
    return document
