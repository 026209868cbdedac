"""Settings of the routing brain. What must not live here: files, ceilings (limits.py), HTTP."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final

from kvtier.core.checks import require_integer, require_name, require_text
from kvtier.core.costs import BookPolicy
from kvtier.core.health import BreakerPolicy, OutlierPolicy
from kvtier.core.model_card import ModelCard
from kvtier.core.scoring import Weights
from kvtier.core.workers import WorkerName
from kvtier.errors import ConfigError, LimitError
from kvtier.limits import CARD_NAMES_COUNT_MAX, HOLDERS_COUNT_MAX
from kvtier.types import InstanceId, Role
from kvtier_router.routing.values import Policy

UNKNOWN_DIGEST: Final = b"\0" * 32
"""Stands for the tokenizer of a static worker: nothing is compared with it."""


@dataclass(frozen=True, slots=True)
class NameTarget:
    """One thing that a name may mean: a served name or adapter, of one revision or of any."""

    served_name: str
    revision: str | None = None
    share: float | None = None
    """Part of the requests; None for all targets of a rule: they compete on cost."""

    def __post_init__(self) -> None:
        require_name("served_name", self.served_name)
        if self.share is not None and not (isfinite(self.share) and self.share >= 0):
            raise ConfigError(f"share must be finite and not negative, got {self.share!r}")


@dataclass(frozen=True, slots=True)
class NameRule:
    """An alias (one target) or a canary (several, with shares). Takes the place of what workers
    say of `name`; revisions that no target names get nothing."""

    name: str
    targets: tuple[NameTarget, ...]

    def __post_init__(self) -> None:
        require_name("name", self.name)
        if not self.targets:
            raise ConfigError(f"name {self.name!r} has no target")
        shares = [target.share for target in self.targets if target.share is not None]
        if shares and (len(shares) != len(self.targets) or not sum(shares) > 0):
            raise ConfigError(f"name {self.name!r}: all targets have a share or none, not all 0")


@dataclass(frozen=True, slots=True)
class StaticWorker:
    """A worker that the configuration names. One that an index knows as well, by name or by
    address, is taken from the index."""

    name: WorkerName
    address: str
    card: ModelCard
    node: str = ""
    store: str = ""
    role: Role = Role.BOTH
    capacity_tokens: float = inf

    def __post_init__(self) -> None:
        require_name("instance", self.name.instance)
        require_integer("dp_rank", self.name.dp_rank, 0, HOLDERS_COUNT_MAX)
        require_name("address", self.address)
        require_text("node", self.node)
        require_text("store", self.store)
        if not self.capacity_tokens > 0:
            raise ConfigError(f"capacity_tokens must be positive, got {self.capacity_tokens!r}")


def static_worker(
    name: str, address: str, served_names: Sequence[str], block_tokens: int = 16
) -> StaticWorker:
    """A worker of which no more is known than its address and what it serves."""
    card = ModelCard(
        served_names=tuple(served_names),
        model_id=served_names[0] if served_names else "",
        revision="unknown",
        tokenizer_digest=UNKNOWN_DIGEST,
        chat_template_digest=None,
        block_tokens=block_tokens,
    )
    return StaticWorker(WorkerName(InstanceId(name)), address, card)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How requests are placed. The defaults are meant to be kept."""

    router: str = "router"
    """Name of this router in reservations; unique among routers."""
    policy: Policy = Policy.CACHE_AWARE
    rules: tuple[NameRule, ...] = ()
    workers: tuple[StaticWorker, ...] = ()
    weights: Weights = field(default_factory=Weights)
    speeds: BookPolicy = field(default_factory=BookPolicy)
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)
    outlier: OutlierPolicy = field(default_factory=OutlierPolicy)
    ramp_s: float = 30.0
    """Slow start of a worker that joined or came back."""
    stale_s_max: float = 180.0
    """When an index has been silent for so long, hashing takes the place of what it said."""
    kept_s: float = 3.0
    """Blocks of a request whose prefill is done are believed for so long without an event; must
    exceed the replica's lag_s_max and what events take."""
    kept_stale_s: float = 300.0
    """The same while no index is followed."""
    release_s: float = 0.1
    """The index is told this long after the first token, so that events may overtake."""
    affinity_tokens: int = 64
    """How much of a prompt hashing looks at first."""
    hash_bound: float = 1.25
    """No worker carries more than this times its share under hashing."""
    overload_s: float = 1.0
    """A worker that said it is overloaded is left alone for so long, if it did not say how long."""
    placement_s_max: float = 3600.0
    """A placement that nobody ends is forgotten."""
    distrust_s: float = 60.0
    """What a DEGRADED holder is said to hold counts as knowledge of this age."""
    mismatch_share_max: float = 0.01
    """More responses than this with another prompt_tokens make a model DEGRADED."""
    hit_mismatch_share_max: float = 0.05
    """The same for responses that found nothing cached where a prefix was promised: eviction
    between choice and prefill makes some of those in good health."""

    def __post_init__(self) -> None:
        require_name("router", self.router)
        for name in ("ramp_s", "stale_s_max", "kept_s", "kept_stale_s", "release_s", "overload_s"):
            value = float(getattr(self, name))
            if not (isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be finite and not negative, got {value!r}")
        if not 0 < self.placement_s_max < inf or self.affinity_tokens < 1:
            raise ConfigError("placement_s_max and affinity_tokens must be positive")
        if not 1 <= self.hash_bound < inf:
            raise ConfigError(f"hash_bound must be >= 1 and finite, got {self.hash_bound!r}")
        if len(self.rules) > CARD_NAMES_COUNT_MAX or len(self.workers) > HOLDERS_COUNT_MAX:
            raise LimitError("too many rules or workers")
        if len({rule.name for rule in self.rules}) != len(self.rules):
            raise ConfigError("two rules have one name")
        if len({worker.name for worker in self.workers}) != len(self.workers):
            raise ConfigError("two workers have one name")
