"""The services of our compose file as plain processes: commands, variables, files as written.

What a container engine would do is done by substitution: a service's name and port become a port of
this machine, a volume or mount becomes a directory. What must not live here: what a test expects.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.harness.ports import free_port
from tests.harness.processes import kvtier_command
from tests.support.dockerfile import Dockerfile

LOOPBACK = "127.0.0.1"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True, slots=True)
class Service:
    """One service of the file."""

    name: str
    target: str
    command: tuple[str, ...] | None
    """None: the image's."""
    environment: Mapping[str, str]
    mounts: Mapping[str, str]
    """Path in the container → volume, or path beside the file."""
    read_only: frozenset[str]
    """Of the mounts' paths."""
    memory_bytes: int
    after: frozenset[str]
    """Services that must be healthy before it starts."""
    published: tuple[str, ...]
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Compose:
    """The whole file, its variables filled in."""

    folder: Path
    services: Mapping[str, Service]
    volumes: frozenset[str]


def read_compose(path: Path, variables: Mapping[str, str]) -> Compose:
    """Parse, with `${NAME:-default}` filled in; a variable without either is a KeyError."""
    document = _filled(yaml.safe_load(path.read_text(encoding="utf-8")), variables)
    services = {name: _service(name, table) for name, table in document["services"].items()}
    return Compose(path.parent, services, frozenset(document["volumes"]))


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables) for item in value]
    if not isinstance(value, str):
        return value

    def one(found: re.Match[str]) -> str:
        default = found["default"]
        return (
            variables[found["name"]] if default is None else variables.get(found["name"], default)
        )

    return _VARIABLE.sub(one, value)


def _service(name: str, table: Mapping[str, Any]) -> Service:
    mounts, read_only = {}, set()
    for entry in table["volumes"]:
        source, at, *options = entry.split(":")
        mounts[at] = source
        if "ro" in options:
            read_only.add(at)
    limit = table["mem_limit"]
    command = table.get("command")
    return Service(
        name=name,
        target=table["build"]["target"],
        command=None if command is None else tuple(map(str, command)),
        environment={key: str(value) for key, value in table.get("environment", {}).items()},
        mounts=mounts,
        read_only=frozenset(read_only),
        memory_bytes=int(limit[:-1]) * _UNITS[limit[-1]],
        after=frozenset(table.get("depends_on", {})),
        published=tuple(table.get("ports", ())),
        raw=table,
    )


@dataclass(slots=True)
class AsProcesses:
    """Where everything of the file is on this machine; writes the configuration files."""

    compose: Compose
    dockerfile: Dockerfile
    places: Mapping[str, Path]
    """Directory of each volume."""
    files: Path
    """Where to write the configuration files."""
    ports: dict[str, int] = field(default_factory=dict)
    """Of each service that listens on a port."""

    def __post_init__(self) -> None:
        for name in self.compose.services:
            self.ports[name] = free_port()
        for name in self.compose.services:
            at = self._config(name)
            self.file(name).write_text(self._put(name, at.read_text(encoding="utf-8")))

    def file(self, name: str) -> Path:
        return self.files / f"{name}.toml"

    def argv(self, name: str) -> tuple[str, ...]:
        """What the container would run."""
        service = self.compose.services[name]
        command = service.command or self.dockerfile.last(service.target, "CMD").argv
        entry = self.dockerfile.last(service.target, "ENTRYPOINT").argv
        return self._here(name, (*entry, *command))

    def health_argv(self, name: str) -> tuple[str, ...]:
        """What its image would be looked at with."""
        target = self.compose.services[name].target
        return self._here(name, self.dockerfile.last(target, "HEALTHCHECK").argv)

    def environment(self, name: str) -> dict[str, str]:
        told = self.compose.services[name].environment
        return {key: self._put(name, value) for key, value in told.items()}

    def _here(self, name: str, argv: Sequence[str]) -> tuple[str, ...]:
        assert argv[0] == "kvtier"
        return kvtier_command(*(self._put(name, argument) for argument in argv[1:]))

    def _config(self, name: str) -> Path:
        mounts = self.compose.services[name].mounts
        [source] = [source for at, source in mounts.items() if at.startswith("/etc/kvtier/")]
        return self.compose.folder / source

    def _put(self, name: str, text: str) -> str:
        """`text` of a service with addresses and paths of this machine."""
        for at, source in self.compose.services[name].mounts.items():
            place = self.places.get(source)
            text = text.replace(at, str(self.file(name) if place is None else place))
        own = self._port(name)
        text = re.sub(
            rf"\b(?:0\.0\.0\.0|127\.0\.0\.1):{own}\b", f"{LOOPBACK}:{self.ports[name]}", text
        )
        for other in self.compose.services:
            at = f"{LOOPBACK}:{self.ports[other]}"
            text = re.sub(rf"(?<![\w-]){other}:{self._port(other)}\b", at, text)
        return text

    def _port(self, name: str) -> int:
        """That a service listens on inside its container."""
        document = tomllib.loads(self._config(name).read_text(encoding="utf-8"))
        return int(document["listen"]["bind"].rpartition(":")[2])
