"""A router over one virtual replica, on a virtual clock, for tests of the brain on its own.

What must not live here: assertions.
"""

from random import Random

from kvtier.core.identity import AdapterRef, Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.workers import OwnReservation, WorkerName
from kvtier.types import InstanceId
from kvtier_router.routing import RouteAsk, RouteDecision, Router, Usage
from kvtier_router.routing.config import RoutingConfig
from tests.support.virtual_fleet import (
    BLOCK_TOKENS,
    CARD,
    Clock,
    Hashes,
    Tokens,
    VirtualReplica,
    info_of,
    view_of,
    words,
)

PROMPT = words("prompt", 40 * BLOCK_TOKENS)


class Told:
    """A ReservationSink that remembers."""

    def __init__(self) -> None:
        self.reserved: list[OwnReservation] = []
        self.released: list[str] = []

    def tell(self, wanted: OwnReservation) -> None:
        self.reserved.append(wanted)

    def release(self, key: str) -> None:
        self.released.append(key)


class Bench:
    """A router over one virtual replica with a few workers."""

    def __init__(
        self, workers_count: int = 4, config: RoutingConfig | None = None, seed: int = 1
    ) -> None:
        self.clock = Clock()
        self.clock.now = 100.0
        self.replica = VirtualReplica(self.clock)
        for number in range(workers_count):
            self.replica.tell(view_of(number, info_of(number), heard_at=100.0))
        self.sink = Told()
        self.config = config or RoutingConfig()
        self.router = Router(self.config, self.replica, self.sink, self.clock, Random(seed).random)

    def route(self, tokens: Tokens = PROMPT, name: str = "model", **more: object) -> RouteDecision:
        return self.router.route(RouteAsk(name, tokens, **more))  # type: ignore[arg-type]

    def serve(self, tokens: Tokens = PROMPT, name: str = "model", **more: object) -> RouteDecision:
        """Route, and let it be answered as predicted."""
        decision = self.router.route(RouteAsk(name, tokens, **more))  # type: ignore[arg-type]
        decision.placement.first_token(max(decision.predicted_ttft_s, 0.001))
        decision.placement.finished(Usage(len(tokens), 10, decision.reused_tokens))
        return decision

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.replica.expire()
        self.router.tick()


def chain(
    tokens: Tokens,
    salt: str | None = None,
    adapter: AdapterRef | None = None,
    pool: Pool | None = None,
) -> Hashes:
    pool = pool or CARD.pool
    return prefix_hashes(chain_root(pool, salt, adapter), tokens, pool.block_tokens)


def name(number: int) -> WorkerName:
    return WorkerName(InstanceId(f"w{number}"), 0)
