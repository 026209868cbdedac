"""`kvtier inspect`: what an index (here) or a store (`store.inspecting`) knows, as text or JSON.

What must not live here: calls (`kvtier.client`), and anything that changes what it looks at.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from kvtier.client import ClientConfig, IndexStats, blocking
from kvtier.client.results import HolderStats
from kvtier.config import Root, describe, load
from kvtier.errors import ConfigError, KvtierError
from kvtier.sections import DialConfig
from kvtier.types import Trust
from kvtier_services.store.inspecting import inspect_store

EVENTS: Final = ("applied", "duplicate", "gap", "fenced", "undecodable")
"""Shown always, even while they are 0; others only once they happened."""
_APPLY: Final = "apply"
"""The verdict of a message that was applied."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class InspectConfig(Root):
    """Print what each of the targets knows."""

    SECTION: ClassVar[str] = "inspect"

    dial: DialConfig = field(default_factory=lambda: DialConfig(targets=("127.0.0.1:7710",)))
    """The indexes to ask."""
    deadline_ms: int = 5_000
    """How long each of them may take to answer."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        if not 1 <= self.deadline_ms <= 600_000:
            raise ConfigError(f"deadline_ms must be in 1..600000, got {self.deadline_ms}")
        if not self.dial.targets:
            raise ConfigError("dial.targets is empty: there is nobody to ask")


def command(argv: list[str]) -> int:
    """Entry point of `kvtier inspect`."""
    what, rest = (argv[0], argv[1:]) if argv else ("", [])
    if what == "store":
        return inspect_store(rest)
    if what != "index":
        sys.stderr.write("usage: kvtier inspect index|store [--targets HOST:PORT] [--json]\n")
        return 0 if what in {"-h", "--help"} else 2
    loaded = load(InspectConfig, rest)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    return inspect_index(loaded.config, sys.stdout.write)


def inspect_index(config: InspectConfig, write: Callable[[str], object]) -> int:
    """Ask every target and write what they said; 1 where one of them did not answer.

    Raises what the only target raised, so that the command line says it in one line.
    """
    answers: dict[str, IndexStats | KvtierError] = {}
    for target in config.dial.targets:
        try:
            answers[target] = _ask(config, target)
        except KvtierError as error:
            if len(config.dial.targets) == 1:
                raise
            answers[target] = error
    now = time.monotonic()
    if config.json:
        documents = [as_json(target, answer, now) for target, answer in answers.items()]
        write(json.dumps({"indexes": documents}) + "\n")
    else:
        for target, answer in answers.items():
            write("\n".join(as_lines(target, answer, now)) + "\n")
    return int(any(isinstance(answer, KvtierError) for answer in answers.values()))


def _ask(config: InspectConfig, target: str) -> IndexStats:
    deadline_s = config.deadline_ms / 1000
    dial = replace(config.dial, targets=(target,))
    with blocking.IndexClient(dial, ClientConfig(deadline_s=deadline_s)) as client:
        return client.stats()


# ---- for programs


def as_json(target: str, answer: IndexStats | KvtierError, now: float) -> dict[str, object]:
    """One index as plain values; `now` is monotonic seconds."""
    if isinstance(answer, KvtierError):
        return {"target": target, "error": str(answer)}
    return {
        "target": target,
        "index_epoch": answer.index_epoch,
        "blocks": answer.blocks,
        "holdings": answer.holdings,
        "index_bytes": answer.index_bytes,
        "nodes": answer.nodes,
        "queried_blocks": answer.queried_blocks,
        "matched_blocks": answer.matched_blocks,
        "position": answer.position,
        "followers": answer.followers,
        "events": dict(answer.events),
        "holders": [_holder_json(holder, now) for holder in answer.holders],
    }


def _holder_json(stats: HolderStats, now: float) -> dict[str, object]:
    info = stats.view.info
    return {
        "instance": info.instance,
        "dp_rank": info.dp_rank,
        "kind": info.kind.name.lower(),
        "node": info.node,
        "state": "exact" if stats.view.trust is Trust.EXACT else "degraded",
        "reason": stats.view.degraded_reason,
        "hidden": stats.view.is_hidden,
        "silent_s": round(max(0.0, now - stats.view.heard_at), 3),
        "last_seq": stats.last_seq,
        "tiers": {
            tier.tier.name.lower(): {"blocks": tier.blocks, "bytes": tier.bytes}
            for tier in stats.tiers
        },
        "messages": _messages(stats.events),
    }


def _messages(counted: Mapping[str, int]) -> dict[str, int]:
    """What became of one holder's messages; a message carries many events."""
    renamed = {"applied" if name == _APPLY else name: count for name, count in counted.items()}
    return dict.fromkeys(EVENTS, 0) | renamed


# ---- for people


def as_lines(target: str, answer: IndexStats | KvtierError, now: float) -> Iterator[str]:
    """One index as a table."""
    if isinstance(answer, KvtierError):
        yield f"index {target}: {shown(str(answer))}"
        return
    yield (
        f"index {target}: {answer.blocks} blocks, {answer.holdings} copies, "
        f"{size(answer.index_bytes)}, position {answer.position}, {answer.followers} followers, "
        f"epoch {answer.index_epoch:016x}"
    )
    yield f"events: {_counts(answer.events)}"
    header = ("HOLDER", "KIND", "NODE", "STATE", "SILENT", "TIERS", "MESSAGES")
    rows = [header, *(_row(holder, now) for holder in answer.holders)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()


def _row(stats: HolderStats, now: float) -> Sequence[str]:
    view, info = stats.view, stats.view.info
    state = "EXACT"
    if view.trust is Trust.DEGRADED:
        state = f"DEGRADED ({view.degraded_reason})"
    tiers = (
        f"{tier.tier.name.lower()} {tier.blocks} ({size(tier.bytes) if tier.bytes else '?'})"
        for tier in stats.tiers
    )
    return (
        f"{shown(info.instance)}/{info.dp_rank}",
        info.kind.name.lower(),
        shown(info.node),
        f"{state}, hidden" if view.is_hidden else state,
        f"{max(0.0, now - view.heard_at):.1f} s",
        ", ".join(tiers),
        _counts(_messages(stats.events)),
    )


def _counts(counted: Mapping[str, int]) -> str:
    others = {name: count for name, count in counted.items() if count and name not in EVENTS}
    known = {name: counted.get(name, 0) for name in EVENTS}
    return ", ".join(f"{name} {count}" for name, count in (known | others).items())


def shown(text: str) -> str:
    """A name from outside, without characters that a terminal would obey."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def size(count: float) -> str:
    """Bytes in a unit that leaves few digits."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.4g} {_UNITS[power]}"
