"""Settings of the index service. What must not live here: ceilings (limits.py)."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvtier.config import Root
from kvtier.errors import ConfigError
from kvtier.limits import INDEX_BYTES_MAX, LEASE_MS_MAX
from kvtier.sections import ListenConfig, TelemetryConfig


@dataclass(frozen=True, slots=True)
class IndexConfig(Root):
    """One index replica. Several are independent: publishers feed each of them."""

    SECTION: ClassVar[str] = "index"

    listen: ListenConfig = field(default_factory=lambda: ListenConfig(bind="127.0.0.1:7710"))
    """Where publishers, routers and stores call."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Logs, metrics and traces."""
    lease_ms: int = 3_000
    """A holder that is silent for so long is hidden from Match at once."""
    grace_ms: int = 60_000
    """A hidden holder's blocks stay for so long: if it comes back, no snapshot is needed."""
    index_bytes_max: int = 4 << 30
    """Memory of the prefix index; above it the least recently touched blocks are evicted."""
    holder_blocks_max: int = 64 << 20
    """Copies of blocks that one holder's shard may publish."""
    drain_ms_max: int = 5_000
    """How long open calls may go on when the service is asked to stop; streams end at once."""

    def __post_init__(self) -> None:
        if not 100 <= self.lease_ms <= LEASE_MS_MAX:
            raise ConfigError(f"lease_ms must be in 100..{LEASE_MS_MAX}, got {self.lease_ms}")
        if not 0 <= self.grace_ms <= LEASE_MS_MAX:
            raise ConfigError(f"grace_ms must be in 0..{LEASE_MS_MAX}, got {self.grace_ms}")
        if not 4 << 20 <= self.index_bytes_max <= INDEX_BYTES_MAX:
            raise ConfigError(
                f"index_bytes_max must be in {4 << 20}..{INDEX_BYTES_MAX}, got "
                f"{self.index_bytes_max}"
            )
        if self.holder_blocks_max < 1 or self.drain_ms_max < 0:
            raise ConfigError("holder_blocks_max and drain_ms_max must be positive")
