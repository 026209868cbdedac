"""The flags of vLLM that connector and bridge need, and how they go with those of a user.

`needed` is what `serve`, `flags`, `up` and `doctor` all ask. Pure; what must not live here:
processes, files.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.engines.vllm.facts import ALGORITHM
from kvtier.errors import ConfigError

Json = Mapping[str, object]

HASH: Final = "--prefix-caching-hash-algo"
CACHING: Final = "--enable-prefix-caching"
BLOCK: Final = "--block-size"
DETAILS: Final = "--enable-prompt-tokens-details"
CONNECTOR: Final = "--kv-transfer-config"
EVENTS: Final = "--kv-events-config"
NAMES: Final = "--served-model-name"
HOST: Final = "--host"
PORT: Final = "--port"
TOPIC: Final = "kv"
BLOCK_TOKENS: Final = 32
"""Where nobody says otherwise: vLLM on CPUs wants multiples of it, on GPUs it is as good as 16."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag with its value; None: a switch."""

    name: str
    value: str | Json | None
    why: str

    def argument(self) -> str:
        """As one argument of a command."""
        if self.value is None:
            return self.name
        text = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"{self.name}={text}"

    def shell(self) -> str:
        """As it is typed."""
        if self.value is None:
            return self.name
        text = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"{self.name} {shlex.quote(text)}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the flags of one server depend on."""

    store: str
    """host:port or unix:/path."""
    events: str
    replay: str
    """ZMQ endpoints."""
    residents: str = ""
    """Folder where the connector tells the bridge what is resident; empty: it does not."""
    block_tokens: int = BLOCK_TOKENS
    model_id: str = ""
    revision: str = ""
    """Empty: the connector finds it out by itself."""
    save: str = ""
    """Empty: the connector's default."""
    names: tuple[str, ...] = ()
    """Served names; empty: vLLM's own choice."""
    extra: Json = field(default_factory=dict)
    """More of `kv_connector_extra_config`."""


def connector_config(wanted: Wanted) -> Json:
    """The value of `--kv-transfer-config`."""
    known = {
        "residents": wanted.residents,
        "model_id": wanted.model_id,
        "revision": wanted.revision,
        "save": wanted.save,
    }
    told = {name: value for name, value in known.items() if value}
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": wanted.store, **told, **wanted.extra},
    }


def events_config(wanted: Wanted) -> Json:
    """The value of `--kv-events-config`."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": TOPIC,
        "endpoint": wanted.events,
        "replay_endpoint": wanted.replay,
    }


def needed(wanted: Wanted) -> tuple[Flag, ...]:
    """The flags of a server whose blocks are shared and whose holdings the index knows."""
    flags = [
        Flag(CACHING, None, "only blocks of the prefix cache are shared"),
        Flag(HASH, ALGORITHM, "the only block hash that is equal in every process"),
        Flag(BLOCK, str(wanted.block_tokens), "engines share blocks of one size"),
        Flag(DETAILS, None, "answers say how many tokens came from a cache"),
        Flag(CONNECTOR, connector_config(wanted), "loads and saves blocks"),
        Flag(EVENTS, events_config(wanted), "the bridge hears what the engine holds"),
    ]
    if wanted.names:
        flags.append(Flag(NAMES, wanted.names[0], "the name that the router knows"))
    return tuple(flags)


# A user's flags


@dataclass(frozen=True, slots=True)
class Given:
    """One flag of a user: where it stands, and what it says."""

    at: range
    """Places of its arguments."""
    name: str
    """In dashes, without what follows a dot."""
    path: tuple[str, ...]
    """Of `--name.a.b`: a, b."""
    values: tuple[str, ...]
    text: str
    """As it was written."""


def given(arguments: Sequence[str]) -> Iterator[Given]:
    """The flags among arguments of vLLM. Every argument that begins with a dash is one."""
    starts = [at for at, argument in enumerate(arguments) if _is_flag(argument)]
    for start, end in zip(starts, [*starts[1:], len(arguments)], strict=False):
        head, equals, inline = arguments[start].partition("=")
        name, *path = head.split(".")
        values = ((inline,) if equals else ()) + tuple(arguments[start + 1 : end])
        yield Given(
            at=range(start, end),
            name=name.replace("_", "-"),
            path=tuple(path),
            values=values,
            text=shlex.join(arguments[start:end]),
        )


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """What the last flag of this name says; None where there is none."""
    found = None
    for one in given(arguments):
        if one.name == name and one.values:
            found = one.values[0]
    return found


def names_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The served names that a user gives."""
    found: tuple[str, ...] = ()
    for one in given(arguments):
        if one.name == NAMES:
            found = one.values
    return found


def combined(user: Sequence[str], ours: Sequence[Flag]) -> tuple[str, ...]:
    """A user's arguments with ours behind them, each flag once.

    JSON of both is merged. ConfigError, with both flags in it, where a user's flag says something
    else than ours, or is shortened so that vLLM would take it for one of ours.
    """
    taken: set[int] = set()
    result: list[Flag] = []
    for flag in ours:
        value = flag.value
        for one in given(user):
            if not _concerns(one, flag):
                continue
            taken |= set(one.at)
            value = _agreed(one, flag, value)
        result.append(Flag(flag.name, value, flag.why))
    rest = [argument for at, argument in enumerate(user) if at not in taken]
    return (*rest, *(flag.argument() for flag in result))


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and not argument[1:2].isdigit() and argument != "-"


def _concerns(one: Given, flag: Flag) -> bool:
    if one.name == flag.name:
        return True
    if one.name.startswith("--no-") and one.name.removeprefix("--no-") == flag.name[2:]:
        raise _contradiction(one, flag)
    if len(one.name) > 2 and flag.name.startswith(one.name):
        raise ConfigError(f"{one.text}: write {flag.name} out")
    return False


def _agreed(one: Given, flag: Flag, value: str | Json | None) -> str | Json | None:
    if value is None:
        if one.values and one.values != ("true",):
            raise _contradiction(one, flag)
        return None
    if isinstance(value, str):
        if one.values != (value,):
            raise _contradiction(one, flag)
        return value
    return _merged(value, _json_of(one), flag, one, ())


def _json_of(one: Given) -> Json:
    text = " ".join(one.values)
    if any(part.endswith("+") for part in one.path):
        raise ConfigError(f"{one.text}: write it as JSON")
    try:
        found: object = json.loads(text)
    except ValueError:
        if not one.path:
            raise ConfigError(f"{one.text}: not JSON") from None
        found = text
    for part in reversed(one.path):
        found = {part: found}
    if not isinstance(found, dict):
        raise ConfigError(f"{one.text}: not a JSON object")
    return found


def _merged(ours: Json, theirs: Json, flag: Flag, one: Given, at: tuple[str, ...]) -> Json:
    result = dict(ours)
    for key, value in theirs.items():
        known = result.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            result[key] = _merged(known, value, flag, one, (*at, key))
        elif key not in result:
            result[key] = value
        elif known != value:
            where = ".".join((*at, key))
            raise ConfigError(
                f"{one.text} contradicts {flag.name} of kvtier in {where}: "
                f"{json.dumps(value)}, not {json.dumps(known)} ({flag.why})"
            )
    return result


def _contradiction(one: Given, flag: Flag) -> ConfigError:
    return ConfigError(f"{one.text} contradicts {flag.shell()} of kvtier: {flag.why}")
