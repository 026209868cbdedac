"""Settings of the router. What must not live here: what they do."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from kvtier.config import Root, Secret
from kvtier.errors import ConfigError
from kvtier.limits import PROMPT_TOKENS_MAX
from kvtier.sections import DialConfig, Reach, TelemetryConfig, TlsConfig, parse_address
from kvtier_router.front.loads import LoadsConfig
from kvtier_router.front.silence import SilenceConfig
from kvtier_router.routing.splitting import SplitMode
from kvtier_router.routing.values import Policy
from kvtier_router.web.upstream import UpstreamLimits
from kvtier_router.web.values import HttpLimits

_PROCESSES_MAX = 64


class IndexMode(StrEnum):
    """How the index is asked."""

    EMBEDDED = "embedded"
    """A replica in this process: microseconds."""
    REMOTE = "remote"
    """The service itself, up to `match_ms_max` a request: for fleets too large to hold."""


@dataclass(frozen=True, slots=True)
class HttpTlsConfig:
    """PEM files of the router. Both are read again when they change.

    There are no authorities of clients: those identify themselves by API keys.
    """

    cert_file: Path | None = None
    """Own certificate with its chain."""
    key_file: Path | None = None
    """Private key of that certificate."""

    def __post_init__(self) -> None:
        if self.cert_file is None or self.key_file is None:
            raise ConfigError("cert_file and key_file are both required to listen with TLS")

    def files(self) -> TlsConfig:
        """The same in the form that every listener's TLS is made of."""
        return TlsConfig(self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class HttpListenConfig:
    """The public listener."""

    bind: str = "127.0.0.1:8000"
    """host:port or [address]:port; port 0 takes a free one."""
    tls: HttpTlsConfig | None = None
    """Certificate of the router; clients identify themselves by API keys."""
    insecure: bool = False
    """Accept callers from other machines without TLS or without API keys."""

    def __post_init__(self) -> None:
        if self.bind.startswith("unix:"):
            raise ConfigError("listen.bind is host:port")
        parse_address(self.bind)


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """Who may call, and what separates them. Open to everybody where no keys are given."""

    keys_file: Path | None = None
    """TOML with `[[tenant]]` tables; read again when it changes."""
    cluster_secret: Secret | None = None
    """At least 16 bytes, the same at every router: keeps the scopes of tenants apart."""

    def __post_init__(self) -> None:
        if self.keys_file is not None and self.cluster_secret is None:
            raise ConfigError("tenants.keys_file needs tenants.cluster_secret")
        if self.cluster_secret is not None and len(self.secret() or b"") < 16:
            raise ConfigError("tenants.cluster_secret has less than 16 bytes")

    def secret(self) -> bytes | None:
        """The bytes of the cluster's secret."""
        if self.cluster_secret is None:
            return None
        return self.cluster_secret.reveal().strip().encode()


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """How workers are called."""

    limits: UpstreamLimits = field(default_factory=UpstreamLimits)
    """Times."""
    silence: SilenceConfig = field(default_factory=SilenceConfig)
    """When a worker that has stopped is given up."""
    loads: LoadsConfig = field(default_factory=LoadsConfig)
    """When workers of whose load nobody tells are asked."""
    bearer: Secret | None = None
    """Bearer token for workers without one of their own."""
    tokens_file: Path | None = None
    """TOML with `[[worker]]` tables of name (instance or address) and token."""
    ca_file: Path | None = None
    """Authorities of workers with https addresses; the system's where it is not set."""


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The queue in front of the workers."""

    classes: int = 3
    """Priority classes; 0 goes first."""
    running_requests_max: int = 2048
    """Of one process; others wait."""
    queued_requests_max: int = 1024
    """Of one class."""
    tenant_queued_requests_max: int = 256
    """Of one tenant in one class."""
    wait_ms_max: int = 30_000
    """A request that waited for so long is answered with 504."""

    def __post_init__(self) -> None:
        if min(self.queued_requests_max, self.tenant_queued_requests_max, self.wait_ms_max) < 1:
            raise ConfigError("ceilings of the queue must be positive")


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """How requests are tried."""

    attempts_max: int = 3
    """Workers that one request may be sent to, one after the other."""
    retry_ratio: float = 0.1
    """Retries may be this part of all requests, and `retry_burst` at once."""
    retry_burst: int = 20
    """See retry_ratio."""
    shows_decision: bool = True
    """Response headers name worker, matched tokens per tier and decision time."""
    request_ms_max: int = 3_600_000
    """One request with all its attempts."""
    prompt_tokens_max: int = 1 << 20
    """A longer prompt is refused here."""
    session_header: str = "x-session-id"
    """Names the session under the policy `session`."""

    def __post_init__(self) -> None:
        if self.attempts_max < 1 or self.retry_burst < 1 or self.prompt_tokens_max < 1:
            raise ConfigError("attempts_max, retry_burst, prompt_tokens_max must be positive")
        if not 0 <= self.retry_ratio <= 1 or self.request_ms_max < 1:
            raise ConfigError("retry_ratio is in 0..1 and request_ms_max positive")


@dataclass(frozen=True, slots=True)
class GossipConfig:
    """Small datagrams among routers: what tenants used, and which workers are drained.

    They are authenticated by the cluster's secret and name no tenant; the processes of one router
    need no setting for it.
    """

    bind: str | None = None
    """host:port for datagrams of other routers; process i takes port + i."""
    peers: tuple[str, ...] = ()
    """host:port of every process of every other router."""

    def __post_init__(self) -> None:
        for text in (*self.peers, *(() if self.bind is None else (self.bind,))):
            if text.startswith("unix:"):
                raise ConfigError("gossip addresses are host:port")
            parse_address(text)
        if self.peers and self.bind is None:
            raise ConfigError("gossip.peers needs gossip.bind")


@dataclass(frozen=True, slots=True)
class RouterConfig(Root):
    """All settings of `kvtier router`."""

    SECTION: ClassVar[str] = "router"

    listen: HttpListenConfig = field(default_factory=HttpListenConfig)
    """The public listener."""
    admin_bind: str | None = "127.0.0.1:8001"
    """Admin pages: loopback or unix:/path only; empty: none. Process i takes port + i."""
    instance: str | None = None
    """Name of this router in the fleet; not set: the host's name and process id."""
    workers: int = 1
    """Processes that share the port; each has a brain of its own."""
    policy: Policy = Policy.CACHE_AWARE
    """cache_aware, round_robin, least_loaded, random or session."""
    split: SplitMode = SplitMode.AUTO
    """auto, never or always: whether a prompt is computed by a prefill worker before a decode
    worker answers. auto: where workers have roles, when it costs less."""
    split_tokens_min: int = 512
    """auto: how many tokens must be left to compute."""
    static_workers: tuple[str, ...] = ()
    """`NAME=ADDRESS MODEL [MODEL ...]` each: workers that no index tells of."""
    names: tuple[str, ...] = ()
    """`NAME=TARGET[@@REVISION][*SHARE] [TARGET ...]` each: an alias, or a canary with shares."""
    texts: tuple[str, ...] = ()
    """`NAME=DIRECTORY` each: tokenizer and chat template of a served name; `*` for all others."""
    index: DialConfig = field(default_factory=DialConfig)
    """Index replicas; none: affinity by hashing."""
    index_mode: IndexMode = IndexMode.EMBEDDED
    """embedded or remote."""
    match_ms_max: int = 5
    """Deadline of a match by the remote index; past it the prompt is hashed."""
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    """API keys."""
    gossip: GossipConfig = field(default_factory=GossipConfig)
    """Other routers."""
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    """Calls of workers."""
    http: HttpLimits = field(default_factory=HttpLimits)
    """What a client may cost."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    """Waiting."""
    relay: RelayConfig = field(default_factory=RelayConfig)
    """Trying."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Logs, metrics and traces."""
    drain_delay_ms: int = 0
    """Between `/ready` saying no and the listener closing: time for load balancers to notice."""
    drain_ms_max: int = 30_000
    """How long answers under way may go on when the router is asked to stop."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _PROCESSES_MAX:
            raise ConfigError(f"workers must be 1 to {_PROCESSES_MAX}")
        if self.admin_bind and parse_address(self.admin_bind).reach is Reach.NETWORK:
            raise ConfigError(f"admin_bind {self.admin_bind} is reachable from other machines")
        if self.gossip.peers and self.tenants.cluster_secret is None:
            raise ConfigError("gossip.peers needs tenants.cluster_secret")
        if self.split is SplitMode.ALWAYS and self.index_mode is IndexMode.REMOTE:
            raise ConfigError("split = always needs index_mode embedded")
        if not 1 <= self.split_tokens_min <= PROMPT_TOKENS_MAX:
            raise ConfigError(f"split_tokens_min must be in 1..{PROMPT_TOKENS_MAX}")
        if not 1 <= self.match_ms_max <= 10_000:
            raise ConfigError("match_ms_max must be 1 to 10000")
        if self.drain_delay_ms < 0 or self.drain_ms_max < 0:
            raise ConfigError("drain_delay_ms and drain_ms_max must not be negative")


def check_listen(config: RouterConfig) -> None:
    """Refuse a listener that others can reach without TLS and keys. Pure; ConfigError."""
    listen = config.listen
    if listen.insecure or parse_address(listen.bind).reach is Reach.LOCAL:
        return
    missing = []
    if listen.tls is None:
        missing.append("listen.tls.cert_file and key_file")
    if config.tenants.keys_file is None:
        missing.append("tenants.keys_file")
    if missing:
        raise ConfigError(
            f"bind {listen.bind} is reachable from other machines without {' and '.join(missing)}: "
            "set them, bind a loopback address, or set listen.insecure"
        )


def pairs(texts: tuple[str, ...], name: str) -> list[tuple[str, str]]:
    """`NAME=VALUE` entries. ConfigError for others."""
    found = []
    for text in texts:
        left, equals, right = text.partition("=")
        if not equals or not left.strip() or not right.strip():
            raise ConfigError(f"{name}: {text!r} is not NAME=VALUE")
        found.append((left.strip(), right.strip()))
    return found
