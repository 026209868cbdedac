"""The routing brain: which worker a request goes to, and what is learnt from how it went.

No HTTP and no configuration files here: the front of `kvtier_router` relays, limits and retries.
"""

from kvtier_router.routing.config import RoutingConfig, StaticWorker, static_worker
from kvtier_router.routing.router import Router
from kvtier_router.routing.values import (
    FailureKind,
    Placement,
    Policy,
    RouteAsk,
    RouteDecision,
    RoutingBrain,
    Usage,
)

__all__ = [
    "FailureKind",
    "Placement",
    "Policy",
    "RouteAsk",
    "RouteDecision",
    "Router",
    "RoutingBrain",
    "RoutingConfig",
    "StaticWorker",
    "Usage",
    "static_worker",
]
