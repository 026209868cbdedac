"""What one unit of each kind of work costs, as `kvtier bench` measured it.

The defaults were measured on two hyperthreads of one server core; `measured` puts figures of the
reader's own machine in their place, from what `kvtier bench NAME --json` prints there.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.errors import CallerError

REPORT_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Costs a unit. Rates are of one core."""

    index_block_bytes: float = 17.2
    """Memory of the index a block held."""
    index_blocks_per_cpu_s: float = 6.7e6
    """Events applied by the service, coalesced as a busy fleet's are."""
    event_bytes: float = 8.5
    """On the wire, a block that appears or goes."""
    router_request_us: float = 785.0
    """CPU of a 2 KB chat with tokenisation, choice, relaying."""
    router_turn_us: float = 845.0
    """The same with text that the router has not seen before."""
    arena_get_bytes_per_s: float = 11.0e9
    """A worker's verified reads, one thread."""
    arena_put_bytes_per_s: float = 8.0e9
    """A worker's writes, the writer's and the store's copies together, one thread each."""
    nvme_write_bytes_per_s: float = 0.7e9
    """Sustained, with flush; of the disk, not of a core."""
    nvme_read_bytes_per_s: float = 1.1e9
    """Cold; of the disk."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise CallerError(f"{name}: want a number above 0, got {value!r}")


_SOURCES: dict[tuple[str, str], tuple[str, float]] = {
    ("index", "memory, 1 M blocks held once"): ("index_block_bytes", 1.0),
    ("index-service", "events applied, 8 publishers, 8,192 blocks a message"): (
        "index_blocks_per_cpu_s",
        1e6,
    ),
    ("router", "CPU of a 2 KB chat, 256 sessions"): ("router_request_us", 1.0),
    ("router", "CPU of a 2 KB chat, all text new"): ("router_turn_us", 1.0),
    ("store", "arena get 32 x 2048 KiB"): ("arena_get_bytes_per_s", 1e9),
    ("store", "arena put 32 x 2048 KiB"): ("arena_put_bytes_per_s", 1e9),
    ("store", "nvme put 2048 KiB"): ("nvme_write_bytes_per_s", 1e9),
    ("store", "nvme get 2048 KiB, 1 thread, cold"): ("nvme_read_bytes_per_s", 1e9),
}
"""Which row of which bench gives which field, times what."""


def measured(paths: Iterable[Path], costs: UnitCosts | None = None) -> UnitCosts:
    """Costs with the figures of bench reports in place of defaults.

    CallerError for a file that is no report, and for one that has no row of use here.
    """
    costs = costs or UnitCosts()
    for path in paths:
        found = _rows(path)
        if not found:
            wanted = ", ".join(sorted({bench for bench, _ in _SOURCES}))
            raise CallerError(f"{path}: no row that sizing uses; those are of the benches {wanted}")
        costs = replace(costs, **found)
    return costs


def _rows(path: Path) -> dict[str, float]:
    try:
        if path.stat().st_size > REPORT_BYTES_MAX:
            raise CallerError(f"{path}: above {REPORT_BYTES_MAX} bytes, no bench's report")
        report = json.loads(path.read_text(encoding="utf-8"))
        bench = report["bench"]
        rows = {str(row["name"]): float(row["value"]) for row in report["results"]}
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CallerError(f"{path}: not what `kvtier bench NAME --json` prints") from None
    return {
        field: rows[name] * factor
        for (of_bench, name), (field, factor) in _SOURCES.items()
        if of_bench == bench and name in rows
    }
