"""What an operator writes into `kv_connector_extra_config` of `--kv-transfer-config`.

What must not live here: what the engine says of itself (facts.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.sections import DialConfig, TlsConfig, parse_address


class SavePolicy(StrEnum):
    """Which blocks are written to the store, each as soon as it is whole."""

    PROMPT = "prompt"
    """Blocks whose tokens are all of the prompt."""
    ALL = "all"
    """Blocks of generated tokens too: the next turn of a chat begins with them."""
    NONE = "none"
    """Nothing: this engine only reads."""


class LoadPolicy(StrEnum):
    """Which of the blocks that the store has are loaded."""

    WORTH = "worth"
    """Where that is faster than computing them, by what this engine measures of both."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one connector; every field may stand in `kv_connector_extra_config`."""

    store: str
    """host:port or unix:/path of this node's store."""
    model_id: str = ""
    """By which name blocks of this model are shared; the served path where empty."""
    revision: str = ""
    """Digest or version of the weights; computed from the files where empty."""
    save: SavePolicy = SavePolicy.PROMPT
    load: LoadPolicy = LoadPolicy.WORTH
    lookup_ms: int = 200
    """How long a request waits to hear what the store has; past it, a miss."""
    load_ms: int = 2_000
    """Deadline of a load; past it, the rest is recomputed."""
    staging_bytes: int = 256 << 20
    """Memory for blocks on their way to the store; where it is full, blocks are not saved."""
    residents: str = ""
    """Folder of the sockets at which bridges are told what is resident; empty: none."""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    token_file: str = ""
    insecure: bool = False
    """Send the token to a store on another machine without TLS."""

    def dial(self) -> DialConfig:
        """How the store is called. ConfigError for half a pair of files."""
        tls = None
        if self.ca_file or self.cert_file or self.key_file:
            tls = TlsConfig(_path(self.cert_file), _path(self.key_file), _path(self.ca_file))
        return DialConfig((self.store,), tls, _path(self.token_file), self.insecure)


def settings_from(extra: Mapping[str, object]) -> Settings:
    """Read them, strictly: an unknown name or a wrong type is a ConfigError that names it."""
    known = {field.name: field for field in fields(Settings)}
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ConfigError(f"kv_connector_extra_config: unknown {', '.join(map(repr, unknown))}")
    if "store" not in extra:
        raise ConfigError("kv_connector_extra_config: store is missing (unix:/path or host:port)")
    values = {name: _checked(name, value) for name, value in extra.items()}
    read = Settings(**values)  # type: ignore[arg-type]  # checked by name above
    parse_address(read.store)
    return read


def _checked(name: str, value: object) -> object:
    want = {"insecure": bool, "lookup_ms": int, "load_ms": int, "staging_bytes": int}.get(name, str)
    if type(value) is not want:
        raise ConfigError(f"kv_connector_extra_config: {name} is not of type {want.__name__}")
    if type(value) is int and value <= 0:
        raise ConfigError(f"kv_connector_extra_config: {name} is not positive")
    policies: dict[str, type[SavePolicy] | type[LoadPolicy]] = {
        "save": SavePolicy,
        "load": LoadPolicy,
    }
    policy = policies.get(name)
    if policy is None:
        return value
    try:
        return policy(str(value))
    except ValueError:
        allowed = ", ".join(policy)
        raise ConfigError(f"kv_connector_extra_config: {name} is none of {allowed}") from None


def _path(text: str) -> Path | None:
    return Path(text) if text else None
