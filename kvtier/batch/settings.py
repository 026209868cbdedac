"""Settings of a batch. What must not live here: what they do."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from kvtier.config import Root
from kvtier.errors import ConfigError
from kvtier.limits import BATCH_LOOKAHEAD_MAX, BATCH_SORT_BYTES_MAX, BATCH_WINDOW_MAX

_MIB = 1 << 20


class Order(StrEnum):
    """In which order rows are sent."""

    GROUPED = "grouped"
    """By shared prefix; the first of each group alone, the others once it is answered."""
    INPUT = "input"
    """As they stand in the input."""


@dataclass(frozen=True, slots=True)
class EstimateSection:
    """The caches that estimates in the summary are made for."""

    workers: int = 2
    """Engines behind the router."""
    worker_tokens: int = 1 << 18
    """KV tokens that fit into one engine's own cache."""
    store_tokens: int = 1 << 22
    """KV tokens that fit into all stores together."""
    token_bytes: float = 4.0
    """Bytes of text a token."""

    def __post_init__(self) -> None:
        if min(self.workers, self.worker_tokens) < 1 or self.store_tokens < 0:
            raise ConfigError("workers and worker_tokens must be positive")
        if not 0.1 <= self.token_bytes <= 100.0:
            raise ConfigError("token_bytes must be in 0.1..100")
        if self.workers > 4096 or self.worker_tokens + self.store_tokens > 1 << 40:
            raise ConfigError("estimates are for at most 4096 workers and 2^40 tokens")


@dataclass(frozen=True, slots=True)
class BatchConfig(Root):
    """Many prompts through a router, grouped by shared prefix; started again, it goes on."""

    SECTION: ClassVar[str] = "batch"

    inputs: tuple[str, ...] = ()
    """Files: .parquet, or JSON lines with `prompt` or `messages`, or of OpenAI's batch API."""
    out: Path | None = None
    """Directory of results, journal and what is needed to go on; made where it is not there."""
    urls: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Routers, or any OpenAI endpoint, without /v1; the next one is tried where one fails."""
    model: str = ""
    """For rows that name none; not set: the first that the router serves."""
    body: str = "{}"
    """JSON object: fields for every row that has none of that name, such as max_tokens."""
    api_key_file: Path | None = None
    """File with the API key of the router."""
    order: Order = Order.GROUPED
    """grouped or input."""
    window: int = 64
    """Requests under way at once; so many at most are computed again after a crash."""
    lookahead: int = 1024
    """Rows that may wait for the first of their group while others are sent."""
    sort_memory_bytes: int = 128 * _MIB
    """Memory for grouping; more rows are sorted in parts on disk."""
    answer_s_max: float = 600.0
    """Of one request."""
    outage_s_max: float = 300.0
    """Nothing was answered for so long: the job ends, to be started again."""
    estimate: EstimateSection = field(default_factory=EstimateSection)
    """What the summary compares with."""

    def __post_init__(self) -> None:
        if not 1 <= self.window <= BATCH_WINDOW_MAX:
            raise ConfigError(f"window must be in 1..{BATCH_WINDOW_MAX}, got {self.window}")
        if not self.window <= self.lookahead <= BATCH_LOOKAHEAD_MAX:
            raise ConfigError(f"lookahead must be in window..{BATCH_LOOKAHEAD_MAX}")
        if not _MIB <= self.sort_memory_bytes <= BATCH_SORT_BYTES_MAX:
            raise ConfigError(f"sort_memory_bytes must be in {_MIB}..{BATCH_SORT_BYTES_MAX}")
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ConfigError("urls are http://HOST:PORT or https://HOST:PORT")
        if min(self.answer_s_max, self.outage_s_max) <= 0:
            raise ConfigError("answer_s_max and outage_s_max must be positive")
