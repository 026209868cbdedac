"""`kvtier inspect store`: bytes, blocks, hit rates and times of each tier, for people or as JSON.

What must not live here: calls (`kvtier.client`), and anything that changes what it looks at.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from kvtier.client.store_link import Pauses, StoreLink
from kvtier.config import Root, describe, load
from kvtier.errors import ConfigError, KvtierError
from kvtier.sections import DialConfig
from kvtier.types import Tier
from kvtier.wire import messages as pb

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS: Final = ("gets", "puts", "removals", "corrupt", "calls", "call_us")
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InspectStoreConfig(Root):
    """Print what each of the stores holds and did."""

    SECTION: ClassVar[str] = "inspect_store"

    dial: DialConfig = field(default_factory=lambda: DialConfig(targets=("127.0.0.1:7720",)))
    """The stores to ask."""
    deadline_ms: int = 5_000
    """How long each of them may take to answer."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        if not 1 <= self.deadline_ms <= 600_000:
            raise ConfigError(f"deadline_ms must be in 1..600000, got {self.deadline_ms}")
        if not self.dial.targets:
            raise ConfigError("dial.targets is empty: there is nobody to ask")


def inspect_store(argv: list[str]) -> int:
    """Entry point of `kvtier inspect store`; 1 where a store did not answer.

    Raises what the only target raised, so that the command line says it in one line.
    """
    loaded = load(InspectStoreConfig, argv)
    if loaded.print_only:
        sys.stdout.write(describe(loaded))
        return 0
    return asyncio.run(inspect(loaded.config, sys.stdout.write))


async def inspect(config: InspectStoreConfig, write: Callable[[str], object]) -> int:
    """Ask every target and write what they said; 1 where one of them did not answer."""
    documents: list[Document] = []
    for target in config.dial.targets:
        try:
            documents.append({"target": target, **as_json(await _ask(config, target))})
        except KvtierError as error:
            if len(config.dial.targets) == 1:
                raise
            documents.append({"target": target, "error": str(error)})
    if config.json:
        write(json.dumps({"stores": documents}) + "\n")
    else:
        for document in documents:
            write("\n".join(as_lines(document)) + "\n")
    return int(any("error" in document for document in documents))


async def _ask(config: InspectStoreConfig, target: str) -> pb.StoreStatsResponse:
    link = StoreLink(replace(config.dial, targets=(target,)), Pauses())
    try:
        answer: pb.StoreStatsResponse = await link.ask(
            "Stats", pb.StoreStatsRequest(), config.deadline_ms / 1000
        )
    finally:
        await link.close()
    return answer


def as_json(answer: pb.StoreStatsResponse) -> Document:
    """One store as plain values. Rates and times are None where nothing was asked."""
    return {
        "instance": answer.instance,
        "store_epoch": answer.store_epoch,
        "uptime_s": answer.uptime_ms / 1000,
        "tiers": {_word(tier.tier): _tier_json(tier) for tier in answer.tiers},
        "quotas": [
            {
                "scope": quota.scope,
                "tier": _word(quota.tier),
                "used_bytes": quota.used_bytes,
                "bytes_max": quota.bytes_max,
            }
            for quota in answer.quotas
        ],
        "counts": {count.name: count.count for count in answer.counts},
    }


def _tier_json(tier: pb.StoreTierStats) -> Document:
    counted = {what: {one.name: one.count for one in getattr(tier, what)} for what in _COUNTS}
    calls, micros = counted.pop("calls"), counted.pop("call_us")
    gets = sum(counted["gets"].values())
    return {
        "state": tier.verdict,
        "blocks": tier.blocks,
        "bytes": tier.bytes,
        "bytes_max": tier.bytes_max,
        "blocks_pinned": tier.blocks_pinned,
        "blocks_reserved": tier.blocks_reserved,
        "breaker_opened": tier.tripped,
        "drops_pending": tier.drops_pending,
        "bytes_read": tier.bytes_read,
        "bytes_written": tier.bytes_written,
        "hit_rate": counted["gets"].get("hit", 0) / gets if gets else None,
        "mean_ms": {what: micros.get(what, 0) / n / 1000 for what, n in calls.items()},
        **counted,
    }


def as_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """One store as a table."""
    if "error" in document:
        yield f"store {document['target']}: {shown(document['error'])}"
        return
    yield (
        f"store {document['target']}: {shown(document['instance'])}, up "
        f"{document['uptime_s']:.0f} s, epoch {document['store_epoch']:016x}"
    )
    header = ("TIER", "STATE", "BLOCKS", "BYTES", "OF", "PINNED", "HIT RATE", "GET", "PUT",
              "EVICTED", "CORRUPT")  # fmt: skip
    rows: list[Sequence[str]] = [header]
    rows += [_row(word, tier) for word, tier in document["tiers"].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()
    for quota in document["quotas"]:
        yield (
            f"quota {shown(quota['scope'])} {quota['tier']}: {size(quota['used_bytes'])} of "
            f"{size(quota['bytes_max'])}"
        )
    counts = document["counts"]
    if counts:
        yield "counts: " + ", ".join(f"{shown(name)} {n}" for name, n in sorted(counts.items()))


def _row(word: str, tier: Mapping[str, Any]) -> Sequence[str]:
    times = tier["mean_ms"]
    rate = tier["hit_rate"]
    return (
        word,
        tier["state"],
        str(tier["blocks"]),
        size(tier["bytes"]),
        size(tier["bytes_max"]),
        str(tier["blocks_pinned"]),
        "-" if rate is None else f"{100 * rate:.1f} %",
        f"{times['get']:.2f} ms" if "get" in times else "-",
        f"{times['put']:.2f} ms" if "put" in times else "-",
        str(tier["removals"].get("evicted", 0)),
        str(sum(tier["corrupt"].values())),
    )


def _word(tier: int) -> str:
    return Tier(tier).name.lower() if tier in set(Tier) else str(tier)


def shown(text: str) -> str:
    """A name from outside, without characters that a terminal would obey."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def size(count: float) -> str:
    """Bytes in a unit that leaves few digits."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.4g} {_UNITS[power]}"
