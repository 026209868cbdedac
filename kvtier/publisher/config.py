"""Settings of a publisher. What must not live here: ceilings (limits.py), where they come from
(config.py)."""

from dataclasses import dataclass, field

from kvtier.core.publication import PublicationConfig
from kvtier.errors import CallerError
from kvtier.limits import PUBLISHER_QUEUE_BLOCKS_MAX


def _publication() -> PublicationConfig:
    return PublicationConfig(batch_blocks_max=8192)


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """How much is gathered, queued and retried. Intervals of the lease come from the index."""

    coalesce_s: float = 0.005
    """How long the first change waits for company. Each message costs about 0.1 ms of CPU a
    replica, so this also bounds what a trickle of changes costs."""
    queue_blocks_max: int = 1 << 18
    """Blocks (and changes) between the engine and the publishing thread. Above it the engine's
    own call does the thread's work instead of waiting or dropping."""
    publication: PublicationConfig = field(default_factory=_publication)
    digest_interval_s: float = 10.0
    """A heartbeat carries the digests this often, and the first one of each stream."""
    load_interval_s: float = 0.25
    """A changed load is sent at most this often, without waiting for the next heartbeat."""
    heartbeat_s: float = 1.0
    """Until an index says otherwise in its Welcome."""
    silence_s: float = 3.0
    """A stream on which nothing is heard for so long is given up (at least three heartbeats)."""
    reconnect_s_min: float = 0.05
    reconnect_s_max: float = 1.0
    """Doubles from the one to the other, with jitter of a half."""
    refused_retry_s: float = 30.0
    """After a refusal or a denial, which only an operator can end."""
    close_s: float = 2.0
    """How long `close` waits for acknowledgements."""

    def __post_init__(self) -> None:
        if not 1 <= self.queue_blocks_max <= PUBLISHER_QUEUE_BLOCKS_MAX:
            raise CallerError(
                f"queue_blocks_max: want 1 .. {PUBLISHER_QUEUE_BLOCKS_MAX}, "
                f"got {self.queue_blocks_max}"
            )
        for name in (
            "coalesce_s", "digest_interval_s", "load_interval_s", "heartbeat_s", "silence_s",
            "reconnect_s_min", "refused_retry_s", "close_s",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < float("inf"):
                raise CallerError(f"{name}: want a finite duration, got {getattr(self, name)}")
        if not 0 < self.reconnect_s_min <= self.reconnect_s_max < float("inf"):
            raise CallerError("reconnect_s_min, reconnect_s_max: want 0 < min <= max")
