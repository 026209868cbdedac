"""Settings of a node's store."""

import enum
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from kvtier.config import Root, Secret
from kvtier.core.planner import ScopeQuota, WritePolicy
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import NAME_BYTES_MAX
from kvtier.sections import (
    DialConfig,
    ListenConfig,
    Reach,
    TelemetryConfig,
    TlsConfig,
    parse_address,
)
from kvtier.tiers.redis.config import HostPort, RedisTls, parse_url
from kvtier.types import ScopeId, Tier

_QUOTA = re.compile(r"(dram|nvme):([0-9]{1,18}):(.+)", re.DOTALL)
_BYTES_MAX = 1 << 46
_SHARED_BYTES_MAX = 1 << 50
"""Of a disk or a Redis."""
_IN_FLIGHT_BYTES_MAX = 1 << 40
_SEGMENT_BYTES_MIN = 1 << 16
_BLOCKS_MAX = 1 << 24
_SESSIONS_MAX = 1 << 16
_TOUCHES_MAX = 1 << 20
_DEADLINE_MS_MAX = 600_000
_TTL_S_MAX = 10 * 365 * 86_400.0
_MIB = 1 << 20


def _within(name: str, value: float | None, least: float, most: float) -> None:
    """ConfigError that names the setting where its value is out of range; None is not set."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{name} must be in {least}..{most}, got {value}")


def _named(name: str, value: str | None) -> None:
    """The same for a name that others will read."""
    if value is not None and len(value.encode("utf-8", "replace")) > NAME_BYTES_MAX:
        raise ConfigError(f"{name} must be at most {NAME_BYTES_MAX} bytes long")


@dataclass(frozen=True, slots=True)
class ArenaSection:
    """DRAM: shared memory that clients of this node read in place."""

    bytes_max: int = 4 << 30
    """Preallocated at the start, and never more."""
    slab_bytes: int = 64 << 20
    """No block is longer; each block size takes slabs of its own."""
    blocks_max: int = 1 << 16
    """Blocks at once; 220 bytes each, beside bytes_max."""
    sessions_max: int = 64
    """Client processes at once."""
    segment_bytes_max: int = 1 << 30
    """Memory that one client may write into."""
    segments_bytes_max: int = 4 << 30
    """The same of all clients together."""

    def __post_init__(self) -> None:
        if not _MIB <= self.slab_bytes <= self.bytes_max <= _BYTES_MAX:
            raise ConfigError(f"want 1 MiB <= slab_bytes <= bytes_max <= {_BYTES_MAX}")
        if self.bytes_max % self.slab_bytes or self.slab_bytes % 64:
            raise ConfigError("bytes_max must be a multiple of slab_bytes, and that of 64")
        _within("blocks_max", self.blocks_max, 1, _BLOCKS_MAX)
        _within("sessions_max", self.sessions_max, 1, _SESSIONS_MAX)
        for name in ("segment_bytes_max", "segments_bytes_max"):
            _within(name, getattr(self, name), _SEGMENT_BYTES_MIN, _IN_FLIGHT_BYTES_MAX)


@dataclass(frozen=True, slots=True)
class NvmeSection:
    """The disk below DRAM."""

    enabled: bool = True
    """Off: what leaves DRAM is gone, unless a Redis takes it."""
    bytes_max: int | None = None
    """All that the tier may take on disk; not set: free_share of what was free at first start."""
    free_share: float = 0.8
    """See bytes_max."""
    write_policy: WritePolicy = WritePolicy.ON_EVICT
    """on_seal, on_reuse or on_evict."""
    touches_min: int = 1
    """A block that was used less often is not written."""
    write_bytes_per_day: int | None = None
    """Budget of writes, for the life of the device; not set: none."""
    deadline_ms: int = 2_000
    """Of one read or write."""
    seal_keys_file: Path | None = None
    """Keys to seal payloads on disk with, one a scope, drawn when needed; not set: not sealed."""

    def __post_init__(self) -> None:
        _within("bytes_max", self.bytes_max, 1, _SHARED_BYTES_MAX)
        if not 0 < self.free_share <= 1:
            raise ConfigError(f"free_share must be in (0, 1], got {self.free_share}")
        _within("touches_min", self.touches_min, 1, _TOUCHES_MAX)
        _within("write_bytes_per_day", self.write_bytes_per_day, 1, _SHARED_BYTES_MAX)
        _within("deadline_ms", self.deadline_ms, 1, _DEADLINE_MS_MAX)


@dataclass(frozen=True, slots=True)
class RedisSection:
    """A Redis that the stores of several nodes share; off unless `url` or `sentinels` is set."""

    url: Secret | None = None
    """redis://, rediss:// or unix:// address of one server."""
    sentinels: tuple[str, ...] = ()
    """host:port of each Sentinel, instead of a URL."""
    service: str = ""
    """Name of the master that the Sentinels watch."""
    username: str = ""
    """With Sentinels: of the server."""
    password: Secret | None = None
    """With Sentinels: of the server."""
    sentinel_password: Secret | None = None
    """Of the Sentinels themselves."""
    ca_file: Path | None = None
    """Authorities of the server's certificate, for rediss:// and Sentinels with TLS."""
    bytes_max: int = 1 << 40
    """What the server may hold; its own maxmemory enforces it."""
    ttl_s: float | None = None
    """Values end so long after they were written; not set: never."""
    write_policy: WritePolicy = WritePolicy.ON_EVICT
    """on_seal, on_reuse or on_evict."""
    touches_min: int = 2
    """A block that was used less often is not written."""
    deadline_ms: int = 500
    """Of one read or write."""
    seal_keys_file: Path | None = None
    """As on disk. Stores that share a Redis must share this file's content: what a store has no
    key for it takes for erased, and drops."""

    def __post_init__(self) -> None:
        if self.url is not None and self.sentinels:
            raise ConfigError("give url or sentinels, not both")
        if self.sentinels and not self.service:
            raise ConfigError("sentinels need the service that they watch")
        self._check_addresses()
        _within("bytes_max", self.bytes_max, 1, _SHARED_BYTES_MAX)
        _within("ttl_s", self.ttl_s, 0.001, _TTL_S_MAX)  # the server counts milliseconds
        _within("touches_min", self.touches_min, 1, _TOUCHES_MAX)
        _within("deadline_ms", self.deadline_ms, 1, _DEADLINE_MS_MAX)

    @property
    def enabled(self) -> bool:
        return self.url is not None or bool(self.sentinels)

    def _check_addresses(self) -> None:
        """What they say is never repeated: a URL holds a password."""
        if self.url is not None:
            tls = RedisTls(self.ca_file) if self.ca_file is not None else None
            try:
                parse_url(self.url.reveal(), tls)
            except CallerError as error:
                raise ConfigError(f"url: {error}") from None
        for sentinel in self.sentinels:
            parse_host_port(sentinel)


@dataclass(frozen=True, slots=True)
class BulkSection:
    """A channel of its own for payload between stores, beside the service's port."""

    enabled: bool = True
    """Off: payload goes through the service. Needs `listen.bind` to be host:port."""
    port: int = 0
    """On the host that `listen.bind` names, with the same TLS and tokens; 0 takes a free one."""

    def __post_init__(self) -> None:
        _within("port", self.port, 0, 65_535)


class PeerWay(enum.StrEnum):
    """How payload comes from another store. Where a way cannot be used, the one before is."""

    GRPC = "grpc"
    BULK = "bulk"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True)
class PeersSection:
    """The stores of other nodes, which are read where an index says that they have a block."""

    enabled: bool = True
    """Off: only what this node and a Redis have. Needs `index.targets`."""
    tls: TlsConfig | None = None
    """To call them with. Not set, no token_file and not insecure: as the index is called."""
    token_file: Path | None = None
    """See tls."""
    insecure: bool = False
    """Call other machines without TLS."""
    deadline_ms: int = 1_000
    """Of one read from them all."""
    ask_ms: int = 250
    """How long the index may take to say who has what."""
    transport: PeerWay = PeerWay.BULK
    """grpc, bulk or nixl, the best that both ends have being taken; nixl also serves others by it,
    needs the extra `nixl`, and is neither encrypted nor authenticated."""
    trusted_network: bool = False
    """With nixl: everybody who can open a connection to this machine may read and write the memory
    of the store. Needed off loopback; without it only processes of this machine can."""
    bytes_max: int = 256 << 20
    """Payload on its way from all of them ..."""
    peer_bytes_max: int = 64 << 20
    """... and from one."""

    def __post_init__(self) -> None:
        _within("deadline_ms", self.deadline_ms, 1, _DEADLINE_MS_MAX)
        _within("ask_ms", self.ask_ms, 1, 60_000)
        if not 1 <= self.peer_bytes_max <= self.bytes_max <= _IN_FLIGHT_BYTES_MAX:
            raise ConfigError(f"want 1 <= peer_bytes_max <= bytes_max <= {_IN_FLIGHT_BYTES_MAX}")

    def dial(self, index: DialConfig) -> DialConfig:
        """How to call a peer; without targets."""
        if self.tls is None and self.token_file is None and not self.insecure:
            return replace(index, targets=())
        return DialConfig(tls=self.tls, token_file=self.token_file, insecure=self.insecure)


@dataclass(frozen=True, slots=True)
class StoreConfig(Root):
    """The store of one node: DRAM in shared memory, NVMe, other nodes' stores, a shared Redis."""

    SECTION: ClassVar[str] = "store"

    listen: ListenConfig = field(default_factory=lambda: ListenConfig(bind="127.0.0.1:7720"))
    """Where clients of other nodes call."""
    data_dir: Path = Path("/var/lib/kvtier/store")
    """Directory of the NVMe tier; of one store at a time."""
    run_dir: Path | None = None
    """Directory of the Unix sockets, for the store's user alone; not set: `run` in data_dir."""
    instance: str | None = None
    """Name of this store in the fleet; not set: the host's name."""
    node: str | None = None
    """Name of the machine, as its workers say it; not set: the host's name."""
    zone: str = ""
    """Failure or network zone, for routers."""
    advertise: str = ""
    """Host to tell other stores; not set: that of listen.bind, or the host's name. `{dashes}` in it
    is the address of listen.bind with dashes, as Kubernetes names an endpoint."""
    index: DialConfig = field(default_factory=DialConfig)
    """Index replicas to tell what this store holds; none: nobody is told."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Logs, metrics and traces."""
    dram: ArenaSection = field(default_factory=ArenaSection)
    """Shared memory."""
    nvme: NvmeSection = field(default_factory=NvmeSection)
    """Disk."""
    redis: RedisSection = field(default_factory=RedisSection)
    """Shared Redis."""
    bulk: BulkSection = field(default_factory=BulkSection)
    """Channel for payload between stores."""
    peers: PeersSection = field(default_factory=PeersSection)
    """Other nodes' stores."""
    quotas: tuple[str, ...] = ()
    """tier:bytes:scope each, tier being dram or nvme: a ceiling and a guarantee for that scope."""
    promote_touches_min: int = 2
    """A block below DRAM comes up at this touch."""
    in_flight_bytes_max: int = 512 << 20
    """Blocks on their way between tiers."""
    staging_bytes_max: int = 512 << 20
    """Payloads on their way in from clients elsewhere."""
    drain_ms_max: int = 5_000
    """How long open calls and demotions may go on when the service is asked to stop."""

    def __post_init__(self) -> None:
        for name in ("instance", "node", "zone"):
            _named(name, getattr(self, name))
        for quota in self.quotas:
            parse_quota(quota)
        _within("promote_touches_min", self.promote_touches_min, 1, _TOUCHES_MAX)
        for name in ("in_flight_bytes_max", "staging_bytes_max"):
            _within(name, getattr(self, name), 1, _IN_FLIGHT_BYTES_MAX)
        _within("drain_ms_max", self.drain_ms_max, 0, _DEADLINE_MS_MAX)
        is_far = parse_address(self.listen.bind).reach is not Reach.LOCAL
        if is_far and self.peers.transport is PeerWay.NIXL and not self.peers.trusted_network:
            raise ConfigError(
                "peers.transport nixl off loopback wants peers.trusted_network: its traffic is not "
                "encrypted, and whoever can connect can read and write the store's memory"
            )


def parse_quota(text: str) -> ScopeQuota:
    """`tier:bytes:scope`. ConfigError, which does not repeat the scope, for anything else."""
    found = _QUOTA.fullmatch(text)
    if found is None:
        raise ConfigError("quotas: each is dram:BYTES:SCOPE or nvme:BYTES:SCOPE")
    tier, size, scope = found.groups()
    _within("quotas: the bytes", int(size), 1, _SHARED_BYTES_MAX)
    return ScopeQuota(ScopeId(scope), Tier[tier.upper()], int(size))


def parse_host_port(text: str) -> HostPort:
    """`host:port` of a Sentinel. ConfigError for anything else."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError("sentinels: want host:port of each")
    number = int(port[:6])
    _within("sentinels: a port", number, 1, 65_535)
    return HostPort(host, number)
