"""What a foreign engine's metrics page says of its load, rank by rank. Pure; believes nothing.

No engine tells how many tokens wait, only requests. What must not live here: fetching a page, how
loads are weighed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Final

from kvtier.limits import ENGINE_RANKS_MAX

PAGE_BYTES_MAX: Final = 8 << 20
"""A real page is a hundred times smaller; nobody reads more of one."""
_COUNT_MAX: Final = 2**31
_LINE_BYTES_MAX: Final = 8 << 10
_SAMPLES_MAX: Final = 64 * ENGINE_RANKS_MAX
"""Of one name; a page with more is not read to its end."""
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class LoadNames:
    """How an engine calls what a load is made of; `usage` is a share of the KV pool."""

    running: str
    waiting: str
    usage: str
    rank: str
    """Label that tells ranks apart."""


VLLM: Final = LoadNames(
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "engine"
)
SGLANG: Final = LoadNames(
    "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage", "dp_rank"
)
_POOL: Final = "vllm:cache_config_info"
"""Where vLLM says, in labels, how many blocks a rank has and how many tokens a block."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank does; what its page does not say is 0."""

    running: int
    waiting: int
    usage: float
    """Of the KV pool, 0 to 1."""


@dataclass(frozen=True, slots=True)
class EngineLoads:
    """What a page says; `blocks` and `block_tokens` are 0 where it does not."""

    ranks: Mapping[int, RankLoad]
    blocks: int
    """Of one rank's pool."""
    block_tokens: int


def read_loads(page: bytes, names: LoadNames) -> EngineLoads | None:
    """The loads on a page; None where no rank says how many requests run.

    Raises nothing, whatever the page is: what is no number is as if it were not there. O(page) at
    the speed of a search, no more than PAGE_BYTES_MAX of it.
    """
    page = b"\n" + page[:PAGE_BYTES_MAX]
    running = _by_rank(page, names.running, names.rank)
    if not running:
        return None
    waiting = _by_rank(page, names.waiting, names.rank)
    usage = _by_rank(page, names.usage, names.rank)
    blocks = block_tokens = 0
    if names is VLLM:
        for labels, _ in _samples(page, _POOL):
            blocks = _count(labels.get("num_gpu_blocks", ""))
            block_tokens = _count(labels.get("block_size", ""))
    ranks = {
        rank: RankLoad(int(count), int(waiting.get(rank, 0.0)), min(1.0, usage.get(rank, 0.0)))
        for rank, count in running.items()
    }
    return EngineLoads(ranks, blocks, block_tokens)


def _by_rank(page: bytes, name: str, label: str) -> dict[int, float]:
    """The largest number of each rank; 0 is the rank of samples without the label."""
    found: dict[int, float] = {}
    for labels, number in _samples(page, name):
        if number is None:
            continue
        rank = _count(labels.get(label, "0"))
        if rank < ENGINE_RANKS_MAX:
            found[rank] = max(found.get(rank, 0.0), number)
    return found


def _samples(page: bytes, name: str) -> Iterator[tuple[dict[str, str], float | None]]:
    """Labels and number of every sample of one name."""
    wanted = b"\n" + name.encode()
    at = page.find(wanted)
    for _ in range(_SAMPLES_MAX):
        if at < 0:
            return
        end = page.find(b"\n", at + 1)
        line = page[at + len(wanted) : len(page) if end < 0 else end]
        if line[:1] in (b"{", b" ") and len(line) <= _LINE_BYTES_MAX:
            labels, _, number = line.decode("utf-8", "replace").rstrip("\r").rpartition(" ")
            yield dict(_LABEL.findall(labels)), _number(number)
        at = page.find(wanted, at + 1)


def _number(text: str) -> float | None:
    """A finite number within bounds; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return min(max(value, 0.0), float(_COUNT_MAX)) if isfinite(value) else None


def _count(text: str) -> int:
    is_count = text.isascii() and text.isdigit() and len(text) <= 10
    return min(int(text), _COUNT_MAX) if is_count else 0
