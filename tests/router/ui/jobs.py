"""Requests that have ended, as the front hands them to the history.

What must not live here: tests.
"""

from dataclasses import dataclass, field
from typing import cast

from kvtier.openai.usage import Usage
from kvtier.types import TenantId
from kvtier_router.front.calls import Api
from kvtier_router.front.relay import Job
from kvtier_router.routing.values import RouteDecision

ALICE = TenantId("alice")


@dataclass
class EndedCall:
    """What the history reads of a call."""

    api: Api = Api.CHAT
    model: str = "model"


@dataclass
class EndedTenant:
    """What it reads of a tenant."""

    tenant_id: TenantId = ALICE


@dataclass
class EndedPrompt:
    """What it reads of a prompt."""

    count: int = 100


@dataclass
class Ended:
    """What it reads of a job."""

    request_id: str = "r1"
    status: int = 200
    error: str = ""
    attempts: int = 1
    resumed: int = 0
    ttft_s: float | None = 0.05
    usage: Usage | None = None
    decision: RouteDecision | None = None
    call: EndedCall = field(default_factory=EndedCall)
    tenant: EndedTenant = field(default_factory=EndedTenant)
    prompt: EndedPrompt = field(default_factory=EndedPrompt)

    def job(self) -> Job:
        """The same, as far as anybody looks."""
        return cast("Job", self)
