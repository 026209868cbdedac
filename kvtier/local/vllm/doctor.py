"""What is missing at a running vLLM server, and the exact flag that mends it. Pure.

What must not live here: asking (asking.py), the flags themselves (flags.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtier.engines.vllm.facts import ALGORITHM, VERSIONS
from kvtier.local.vllm import flags
from kvtier.local.vllm.asking import Seen
from kvtier.local.vllm.environment import is_seeded
from kvtier.local.vllm.flags import Flag, Wanted, connector_config, events_config, needed

_OFF: Final = "False"


class State(StrEnum):
    """Of one thing that was looked at."""

    OK = "ok"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """The server does not tell."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing, and what mends it."""

    what: str
    state: State
    detail: str
    mend: str = ""


def examine(seen: Seen, wanted: Wanted) -> tuple[Finding, ...]:
    """All findings, in the order in which one would mend them."""
    ours = {flag.name: flag for flag in needed(wanted)}
    return tuple(_findings(seen, wanted, ours))


def _findings(seen: Seen, wanted: Wanted, ours: Mapping[str, Flag]) -> Iterator[Finding]:
    yield _version(seen)
    yield from _cache(seen, wanted, ours)
    yield _seed(seen)
    yield _details(seen, ours)
    yield from _connector(seen, wanted, ours)
    yield from _events(seen, wanted, ours)
    yield from _refused(seen)
    yield _cached(seen)


def _version(seen: Seen) -> Finding:
    what = "version"
    if seen.version is None:
        return Finding(what, State.UNKNOWN, "/version is not answered")
    if any(seen.version == one or seen.version.startswith(f"{one}.") for one in VERSIONS):
        return Finding(what, State.OK, seen.version)
    known = ", ".join(VERSIONS)
    return Finding(
        what, State.MISSING, f"{seen.version}; the connector knows {known}", "another release"
    )


def _cache(seen: Seen, wanted: Wanted, ours: Mapping[str, Flag]) -> Iterator[Finding]:
    cache = seen.cache
    if cache is None:
        yield Finding("cache", State.UNKNOWN, "/metrics has no vllm:cache_config_info")
        return
    caching = cache.get("enable_prefix_caching", "")
    yield _judged(caching != _OFF, "prefix caching", caching, ours[flags.CACHING])
    algorithm = cache.get("prefix_caching_hash_algo", "")
    yield _judged(algorithm == ALGORITHM, "block hash", algorithm, ours[flags.HASH])
    block = cache.get("block_size", "")
    is_right = block == str(wanted.block_tokens)
    yield _judged(is_right, "block size", f"{block} tokens", ours[flags.BLOCK])


def _judged(is_right: bool, what: str, detail: str, flag: Flag) -> Finding:
    if is_right:
        return Finding(what, State.OK, detail)
    return Finding(what, State.MISSING, detail, flag.shell())


def _seed(seen: Seen) -> Finding:
    if seen.version is not None and is_seeded(seen.version):
        return Finding("hash seed", State.OK, "fixed in this release")
    return Finding(
        "hash seed",
        State.UNKNOWN,
        "this release draws one unless PYTHONHASHSEED is set, equally on all servers",
        "PYTHONHASHSEED=0",
    )


def _details(seen: Seen, ours: Mapping[str, Flag]) -> Finding:
    what = "cached tokens in answers"
    if seen.details is None:
        return Finding(what, State.UNKNOWN, seen.probe_error or "no probe was sent")
    shown = "told" if seen.details else "not told"
    return _judged(seen.details, what, shown, ours[flags.DETAILS])


def _connector(seen: Seen, wanted: Wanted, ours: Mapping[str, Flag]) -> Iterator[Finding]:
    what, flag = "connector", ours[flags.CONNECTOR]
    if seen.config is None:
        if not seen.queried_tokens:
            asked = seen.queried_tokens is not None
            state = State.MISSING if asked else State.UNKNOWN
            detail = "none was asked for the probe" if asked else _NO_DEV_MODE
            yield Finding(what, state, detail, flag.shell())
        else:
            yield Finding(what, State.OK, "one was asked for the probe; which, is not told")
        return
    config = seen.config.get("kv_transfer_config")
    if not isinstance(config, Mapping) or not config.get("kv_connector"):
        yield Finding(what, State.MISSING, "none", flag.shell())
        return
    want = connector_config(wanted)
    wrong = [
        name
        for name in ("kv_connector", "kv_connector_module_path", "kv_role")
        if config.get(name) != want[name]
    ]
    shown = ", ".join(f"{name} is {config.get(name)!r}" for name in wrong)
    yield _judged(not wrong, what, shown or str(want["kv_connector"]), flag)
    policy = config.get("kv_load_failure_policy")
    is_right = policy == want["kv_load_failure_policy"]
    yield _judged(is_right, "what becomes of failed loads", str(policy), flag)


def _events(seen: Seen, wanted: Wanted, ours: Mapping[str, Flag]) -> Iterator[Finding]:
    what, flag = "events", ours[flags.EVENTS]
    if seen.replay is not None:
        detail = f"{wanted.replay}: {seen.replay}"
        yield _judged(seen.replay == "answered", "replay", detail, flag)
    if seen.config is None:
        if seen.replay is None:
            yield Finding(what, State.UNKNOWN, f"{_NO_DEV_MODE}; or name its --replay", "")
        return
    config = seen.config.get("kv_events_config")
    if not isinstance(config, Mapping) or not config.get("enable_kv_cache_events"):
        yield Finding(what, State.MISSING, "none are published", flag.shell())
        return
    want = events_config(wanted)
    publisher = config.get("publisher")
    yield _judged(publisher == "zmq", what, f"published by {publisher}", flag)
    replay = config.get("replay_endpoint")
    yield _judged(bool(replay), "replay endpoint", str(replay), flag)
    topic = config.get("topic")
    yield _judged(topic == want["topic"], "topic of events", repr(topic), flag)


def _refused(seen: Seen) -> Iterator[Finding]:
    """What the connector serves misses only for."""
    config = seen.config or {}
    if config.get("speculative_config"):
        yield Finding(
            "speculative decoding", State.MISSING, "the connector serves misses only", "without it"
        )
    parallel = config.get("parallel_config")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size"):
        if isinstance(parallel, Mapping) and parallel.get(name, 1) != 1:
            flag = f"--{name.replace('_', '-')} 1"
            yield Finding(name, State.MISSING, "the connector serves misses only", flag)


def _cached(seen: Seen) -> Finding:
    what = "a repeated prompt"
    if seen.cached_tokens is None or not seen.details:
        return Finding(what, State.UNKNOWN, seen.probe_error or "its answer tells no cached tokens")
    state = State.OK if seen.cached_tokens > 0 else State.MISSING
    return Finding(what, state, f"{seen.cached_tokens} tokens from a cache")


_NO_DEV_MODE: Final = "it tells its configuration with VLLM_SERVER_DEV_MODE=1 only"
