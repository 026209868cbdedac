"""One vLLM server put together: its model, its command line, its environment, its bridge.

What must not live here: processes (serving.py), the flags themselves (flags.py).
"""

import dataclasses
import enum
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import load
from kvtier.engines.vllm.facts import files_digest
from kvtier.errors import ConfigError
from kvtier.local.loopback import LOOPBACK
from kvtier.local.settings import Table, toml_text
from kvtier.local.vllm import flags
from kvtier.local.vllm.environment import VllmEnvironment, fetched
from kvtier.local.vllm.flags import Wanted, combined, names_of, needed, value_of
from kvtier.local.vllm.settings import VllmConfig
from kvtier.sections import parse_address

STORE: Final = "unix:/var/lib/kvtier/store/run/store.sock"
"""Of a `kvtier store` that was told nothing."""
RUN_DIR: Final = Path("/run/kvtier")
VLLM_PORT: Final = 8000
_ANY: Final = frozenset({"0.0.0.0", "::", "[::]", ""})  # noqa: S104 (looked for, not bound)
_SEED: Final = "0"
_RANKS: Final = ("--data-parallel-size", "-dp")


@dataclass(frozen=True, slots=True)
class Model:
    """What is served, and by which names its blocks are shared."""

    target: str
    """As vLLM is told it."""
    directory: Path | None
    """Where tokenizer and chat template are."""
    model_id: str
    revision: str
    """Empty: not known."""
    commit: str = ""
    """Of a model of the hub."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """Everything that a server's processes need."""

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    """Added to its environment."""
    address: str
    """host:port at which it is reached from here."""
    bridge: Table | None
    """Configuration of the bridge; None: there is none."""


def wanted_of(config: VllmConfig, model: Model, run_dir: Path) -> Wanted:
    """What the flags of this server depend on. Pure."""
    given = value_of(config.flags, flags.BLOCK)
    told = int(given) if given is not None and given.isdigit() else None
    return Wanted(
        store=config.store or STORE,
        events=f"ipc://{run_dir / 'events'}",
        replay=f"ipc://{run_dir / 'replay'}",
        residents=str(run_dir) if config.bridge else "",
        block_tokens=config.block_tokens or told or flags.BLOCK_TOKENS,
        model_id=model.model_id,
        revision=model.revision,
        save=config.save.value,
        names=() if names_of(config.flags) else (model.model_id,),
    )


def arguments_of(config: VllmConfig, model: Model, run_dir: Path) -> tuple[str, ...]:
    """All flags of vLLM but the model. ConfigError for contradictions between ours and a user's."""
    user = list(config.flags)
    if config.bind is not None:
        for name in (flags.HOST, flags.PORT):
            if value_of(user, name) is not None:
                raise ConfigError(f"give bind, or {name} among the flags of vLLM, not both")
        place = parse_address(config.bind)
        user += [f"{flags.HOST}={place.host}", f"{flags.PORT}={place.port}"]
    elif value_of(user, flags.HOST) is None:
        user.append(f"{flags.HOST}={LOOPBACK}")
    if config.kv_memory_bytes is not None:
        user.append(f"--kv-cache-memory-bytes={config.kv_memory_bytes}")
    if config.eager:
        user.append("--enforce-eager")
    if model.commit and value_of(user, "--revision") is None:
        user.append(f"--revision={model.commit}")
    return combined(user, needed(wanted_of(config, model, run_dir)))


def model_of(config: VllmConfig, environment: VllmEnvironment | None) -> Model:
    """Look at what is to be served: hashes weights, or asks the hub where `environment` is given.

    ConfigError without a model; UnavailableError where the hub does not have it.
    """
    if not config.model:
        raise ConfigError("a model must be given: a directory, or an id on the model hub")
    directory = Path(config.model).expanduser()
    if directory.is_dir():
        directory = directory.resolve()
        weights = sorted(directory.glob("*.safetensors"))
        files = [*weights, *directory.glob("config.json")]
        revision = config.revision or (files_digest(files) if weights else "")
        return Model(str(directory), directory, config.model_id or directory.name, revision)
    name = config.model_id or config.model
    if environment is None:
        return Model(config.model, None, name, config.revision)
    found = fetched(environment, config.model, config.revision)
    return Model(config.model, found, name, found.name, commit=found.name)


def assembled(config: VllmConfig, environment: VllmEnvironment, run_dir: Path) -> Assembled:
    """Put a server together; looks at its model. ConfigError, UnavailableError."""
    environment.check()
    model = model_of(config, environment)
    arguments = arguments_of(config, model, run_dir)
    address = _address(arguments)
    bridge = None
    if config.bridge:
        bridge = _bridge(config, environment, model, arguments, run_dir)
    return Assembled(
        argv=(*environment.server(model.target), *arguments),
        variables=variables_of(config, environment),
        address=address,
        bridge=bridge,
    )


def variables_of(config: VllmConfig, environment: VllmEnvironment) -> dict[str, str]:
    """What a server's environment needs beyond what is there."""
    found: dict[str, str] = {}
    if environment.needs_seed:
        found["PYTHONHASHSEED"] = _SEED
    if config.cpus:
        found["VLLM_CPU_OMP_THREADS_BIND"] = config.cpus
        if config.cpus != "nobind":
            found["OMP_NUM_THREADS"] = str(_cpus_count(config.cpus))
    return found


def check_bridge(table: Table, folder: Path) -> Path:
    """Write a bridge's configuration and read it as the bridge will. ConfigError."""
    try:
        from kvtier_services.bridge.config import BridgeConfig
    except ImportError as error:
        raise ConfigError(
            f"the bridge needs kvtier[bridge] ({error}): install it, or go without (--no-bridge)"
        ) from error
    path = folder / "bridge.toml"
    path.touch(0o600)
    path.write_text(toml_text(table), encoding="utf-8")
    load(BridgeConfig, toml_path=path)
    return path


def _bridge(
    config: VllmConfig,
    environment: VllmEnvironment,
    model: Model,
    arguments: tuple[str, ...],
    run_dir: Path,
) -> Table:
    for name in _RANKS:
        if value_of(arguments, name) not in {None, "1"}:
            raise ConfigError(
                f"{name}: several ranks have no Unix sockets for their events; start the bridge "
                "by hand over tcp, and this with --no-bridge"
            )
    if value_of(arguments, "--ssl-certfile") is not None:
        raise ConfigError("--ssl-certfile: bridge and router call vLLM in plain HTTP (--no-bridge)")
    wanted = wanted_of(config, model, run_dir)
    tokenizer = Path(value_of(arguments, "--tokenizer") or "").expanduser()
    directory = tokenizer if tokenizer.name and tokenizer.is_dir() else model.directory
    if not config.advertise and (value_of(arguments, flags.HOST) or "") in _ANY:
        raise ConfigError("it listens on all interfaces: tell routers which one (--advertise)")
    address = config.advertise or _address(arguments)
    instance = config.instance or f"{socket.gethostname()}:{address.rpartition(':')[2]}"
    return {
        "model": {
            "model_id": model.model_id,
            "revision": model.revision,
            "served_names": list(names_of(arguments)),
            "block_tokens": wanted.block_tokens,
            "directory": None if directory is None else str(directory),
            "adapters": list(config.adapters),
        },
        "engine": {
            "kind": "vllm",
            "version": environment.version,
            "http": address,
            "events": wanted.events,
            "replay": wanted.replay,
            "topic": flags.TOPIC,
            "residents": wanted.residents,
        },
        "memory": {"data_dir": str(config.data_dir or run_dir / "bridge")},
        "instance": instance,
        "node": config.node,
        "zone": config.zone,
        "store": config.store_instance or config.node or socket.gethostname(),
        "index": _plain(config.index),
        "telemetry": _plain(config.telemetry),
    }


def _plain(section: object) -> object:
    """A section of a configuration as a table."""
    if dataclasses.is_dataclass(section) and not isinstance(section, type):
        names = [one.name for one in dataclasses.fields(section)]
        return {name: _plain(getattr(section, name)) for name in names}
    if isinstance(section, enum.Enum):
        return section.value
    return str(section) if isinstance(section, Path) else section


def _address(arguments: tuple[str, ...]) -> str:
    host = value_of(arguments, flags.HOST) or LOOPBACK
    port = value_of(arguments, flags.PORT) or str(VLLM_PORT)
    if host in _ANY:
        host = LOOPBACK
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _cpus_count(text: str) -> int:
    total = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ConfigError(f"cpus: {text!r} is not like 0-3,8")
        total += int(last or first) - int(first) + 1
    if total < 1 or total > (os.cpu_count() or 1):
        raise ConfigError(f"cpus: {text!r}: this machine has {os.cpu_count()}")
    return total
