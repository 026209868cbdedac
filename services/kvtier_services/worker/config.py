"""Settings of a worker. What must not live here: ceilings (limits.py)."""

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from kvtier.config import Root
from kvtier.core.planner import WritePolicy
from kvtier.errors import ConfigError
from kvtier.limits import (
    BLOCK_TOKENS_MAX,
    QUEUED_REQUESTS_MAX,
    STORE_DEADLINE_MS_MAX,
    TIER_BATCH_BLOCKS_MAX,
)
from kvtier.sections import DialConfig, ListenConfig, TelemetryConfig
from kvtier.types import Role
from kvtier_services.worker.http.settings import EndpointSettings

_MIB = 1 << 20
_BYTES_MAX = 1 << 46


class Device(enum.StrEnum):
    """Where the model and its KV are."""

    CPU = "cpu"
    CUDA = "cuda"


class DTypeName(enum.StrEnum):
    """Element type of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Eviction(enum.StrEnum):
    """Which blocks of L1 go first."""

    PRIORITY = "priority"
    """By retention priority, of equals the least recently used; the only one that heeds hints."""
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class FakeSection:
    """The fake model (`--model fake`), which stands for a GPU in tests and benches."""

    prefill_tokens_per_s: float = 0.0
    """Emulated speed of prefill; 0: as fast as it goes."""
    step_ms: float = 0.0
    """Emulated time of a step besides its tokens."""
    token_bytes: int = 2048
    """KV bytes a token, a multiple of 64."""
    context_tokens: int = 131_072
    """Positions that it takes."""
    stride_bytes: int = 8
    """How far apart the hashed words of a block lie; 8: every byte counts."""
    seed: int = 0
    """Another one is another model."""

    def __post_init__(self) -> None:
        if min(self.prefill_tokens_per_s, self.step_ms) < 0:
            raise ConfigError("speeds of the fake model must not be negative")
        if self.token_bytes < 64 or self.token_bytes % 64 or self.context_tokens < 2:
            raise ConfigError("token_bytes must be a multiple of 64, context_tokens positive")


@dataclass(frozen=True, slots=True)
class ModelSection:
    """What is served."""

    model: str = "smollm2"
    """smollm2, tiny, fake, a directory, or an id on the model hub."""
    served_names: tuple[str, ...] = ()
    """Names that requests use, the first one canonical; not set: the model's."""
    device: Device = Device.CPU
    """cpu or cuda."""
    dtype: DTypeName = DTypeName.FLOAT32
    """float32, bfloat16 or float16."""
    threads: int = 0
    """Threads of compute on a CPU; 0: one a core."""
    fake: FakeSection = field(default_factory=FakeSection)
    """Speeds of the fake model."""

    def __post_init__(self) -> None:
        if not self.model or self.threads < 0:
            raise ConfigError("model must be given and threads must not be negative")


@dataclass(frozen=True, slots=True)
class CacheSection:
    """L1: the paged KV pool in the worker's own memory."""

    block_tokens: int = 16
    """Tokens of one block; workers that share blocks have the same."""
    kv_memory_bytes: int = 1 << 30
    """Memory of the pool, taken at the start."""
    eviction: Eviction = Eviction.PRIORITY
    """priority or lru."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_tokens <= BLOCK_TOKENS_MAX:
            raise ConfigError(f"block_tokens must be in 1..{BLOCK_TOKENS_MAX}")
        if not _MIB <= self.kv_memory_bytes <= _BYTES_MAX:
            raise ConfigError(f"kv_memory_bytes must be in {_MIB}..{_BYTES_MAX}")


@dataclass(frozen=True, slots=True)
class BatchSection:
    """How requests share steps."""

    step_tokens_max: int = 512
    """Tokens of one step, prefill and decode together."""
    sequences_max: int = 64
    """Requests that run at once."""
    queue_max: int = 1024
    """Requests that wait; more are turned away."""
    stall_ratio_max: float = 2.0
    """A step with prefill may take so many times as long as one that only decodes, while somebody
    decodes; measured online."""
    stall_ms_min: float = 10.0
    """What prefill may add to a step in any case."""

    def __post_init__(self) -> None:
        if self.step_tokens_max < 1 or self.sequences_max < 1:
            raise ConfigError("step_tokens_max and sequences_max must be positive")
        if not 1 <= self.queue_max <= QUEUED_REQUESTS_MAX:
            raise ConfigError(f"queue_max must be in 1..{QUEUED_REQUESTS_MAX}")
        if not 1.0 < self.stall_ratio_max < 1e6:
            raise ConfigError("stall_ratio_max must be above 1")


@dataclass(frozen=True, slots=True)
class OffloadSection:
    """L2: what goes to the store of this node, and what is loaded back."""

    store_instance: str = ""
    """Name of the store in the fleet, for the index; not set: the node's name."""
    write_policy: WritePolicy = WritePolicy.ON_SEAL
    """on_seal, on_reuse or on_evict."""
    in_flight_bytes_max: int = 128 * _MIB
    """KV that is being written, at once."""
    lookup_ms_max: int = 100
    """How long a request may wait to hear what the store has."""
    load_ms_max: int = 5_000
    """How long a request may wait for blocks, however long recomputing would take."""
    save_deadline_ms: int = 5_000
    """Of one write."""
    audit_fraction: float = 0.0
    """Part of the requests that would load, 0 to 1, which are computed whole instead: what the
    store has of them is compared with that, and dropped where it differs; 0: none."""
    audit_blocks_max: int = 64
    """Blocks that one audit compares; there is one at a time."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.audit_fraction <= 1.0:
            raise ConfigError("audit_fraction must be in 0..1")
        if not 1 <= self.audit_blocks_max <= TIER_BATCH_BLOCKS_MAX:
            raise ConfigError(f"audit_blocks_max must be in 1..{TIER_BATCH_BLOCKS_MAX}")
        if self.in_flight_bytes_max < 1:
            raise ConfigError("in_flight_bytes_max must be positive")
        for name in ("lookup_ms_max", "load_ms_max", "save_deadline_ms"):
            if not 1 <= getattr(self, name) <= STORE_DEADLINE_MS_MAX:
                raise ConfigError(f"{name} must be in 1..{STORE_DEADLINE_MS_MAX}")


@dataclass(frozen=True, slots=True)
class HotSetSection:
    """What a worker hands over to its successor, through the store."""

    write_ms_max: int = 5_000
    """Before it ends: how long what is used most may be written; 0: nothing is left."""
    write_bytes_max: int = 16 << 30
    """Before it ends: KV to write in one go, the hottest first."""
    prefetch_ms_max: int = 10_000
    """Before it is ready: how long blocks of a predecessor may be loaded; 0: none are."""
    prefetch_share_max: float = 0.5
    """Part of the pool that they may fill."""

    def __post_init__(self) -> None:
        for name in ("write_ms_max", "prefetch_ms_max"):
            if not 0 <= getattr(self, name) <= STORE_DEADLINE_MS_MAX:
                raise ConfigError(f"{name} must be in 0..{STORE_DEADLINE_MS_MAX}")
        if self.write_bytes_max < 0 or not 0.0 <= self.prefetch_share_max <= 1.0:
            raise ConfigError("write_bytes_max must not be negative, prefetch_share_max in 0..1")


@dataclass(frozen=True, slots=True)
class WorkerConfig(Root):
    """A worker: a model on a paged cache behind the OpenAI API."""

    SECTION: ClassVar[str] = "worker"

    listen: ListenConfig = field(default_factory=lambda: ListenConfig(bind="127.0.0.1:7730"))
    """Where clients and routers call (HTTP)."""
    advertise: str = ""
    """Address to tell the index, https://host:port with TLS; not set: made of the bound one."""
    instance: str | None = None
    """Name of this worker in the fleet; not set: the host's name and the port."""
    node: str | None = None
    """Name of the machine, as its store says it; not set: the host's name."""
    role: Role = Role.BOTH
    """both, prefill or decode: which half of split requests routers send here. It refuses none."""
    zone: str = ""
    """Failure or network zone, for routers."""
    model: ModelSection = field(default_factory=ModelSection)
    """What is served."""
    cache: CacheSection = field(default_factory=CacheSection)
    """L1."""
    batch: BatchSection = field(default_factory=BatchSection)
    """Steps."""
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    """What requests may cost."""
    store: DialConfig = field(default_factory=DialConfig)
    """The store of this node: one target; none: the worker has its own cache only."""
    offload: OffloadSection = field(default_factory=OffloadSection)
    """L2."""
    hot_set: HotSetSection = field(default_factory=HotSetSection)
    """What is handed over when the worker is replaced."""
    index: DialConfig = field(default_factory=DialConfig)
    """Index replicas to tell what this worker holds; none: nobody is told."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Logs, metrics and traces."""
    drain_delay_ms: int = 200
    """Time between its goodbye to the index and the first request that is refused: as long as the
    slowest router takes to hear of it."""
    drain_ms_max: int = 10_000
    """How long running requests may go on when the service is asked to stop."""

    def __post_init__(self) -> None:
        if len(self.store.targets) > 1:
            raise ConfigError("store.targets: a worker has one store")
        if self.drain_ms_max < 0 or not 0 <= self.drain_delay_ms <= STORE_DEADLINE_MS_MAX:
            raise ConfigError("drain_ms_max and drain_delay_ms must not be negative")
