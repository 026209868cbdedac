"""Scopes: whose blocks a request may share, and the salt that keeps scopes apart.

Tenants are private by default; an operator may let tenants join a named shared scope. The salt of a
scope is keyed by the cluster's secret, so that nobody outside can compute another tenant's prefix
hashes, and it is all that workers and bridges ever see of a scope.

What must not live here: authentication of tenants, configuration files, where the secret comes
from.
"""

import hmac
from dataclasses import dataclass
from typing import Final

from kvtier.core.checks import require_name, require_text
from kvtier.core.encoding import encode
from kvtier.errors import CallerError, LimitError
from kvtier.limits import SHARED_SCOPES_COUNT_MAX
from kvtier.types import ScopeId, TenantId

CLUSTER_SECRET_BYTES_MIN: Final = 16

_SALT_DOMAIN: Final = "kvtier.scope-salt.v1"
_PRIVATE: Final = "tenant:"
_SHARED: Final = "shared:"


def private_scope(tenant_id: TenantId) -> ScopeId:
    """Return the scope that is this tenant's alone.

    Private and shared scopes live in domains of their own: a tenant named like a shared scope, or
    like a whole scope id, has still a scope of its own.
    """
    require_name("tenant_id", tenant_id)
    return ScopeId(_PRIVATE + tenant_id)


def shared_scope(name: str) -> ScopeId:
    """Return the scope that an operator named `name` and lets tenants join."""
    require_name("scope name", name)
    return ScopeId(_SHARED + name)


@dataclass(frozen=True, slots=True)
class SharedScope:
    """An operator's decision: these tenants see each other's blocks under this name."""

    name: str
    tenants: frozenset[TenantId]

    def __post_init__(self) -> None:
        require_name("scope name", self.name)
        for tenant_id in self.tenants:
            require_name("tenant_id", tenant_id)


class ScopeRules:
    """Which scope each tenant's requests live in; immutable.

    Raises CallerError when a name is given twice or a tenant joins two scopes: a request has one
    scope, and nobody should have to guess which.
    """

    __slots__ = ("_scope_by_tenant",)

    def __init__(self, shared: tuple[SharedScope, ...] = ()) -> None:
        if len(shared) > SHARED_SCOPES_COUNT_MAX:
            raise LimitError(f"{len(shared)} shared scopes exceed {SHARED_SCOPES_COUNT_MAX}")
        names = [scope.name for scope in shared]
        if len(set(names)) != len(names):
            raise CallerError("a shared scope is named twice")
        scope_by_tenant: dict[TenantId, ScopeId] = {}
        for scope in shared:
            for tenant_id in scope.tenants:
                if tenant_id in scope_by_tenant:
                    raise CallerError(
                        f"tenant {tenant_id!r} is in {scope.name!r} and in "
                        f"{scope_by_tenant[tenant_id].removeprefix(_SHARED)!r}"
                    )
                scope_by_tenant[tenant_id] = shared_scope(scope.name)
        self._scope_by_tenant = scope_by_tenant

    def scope_of(self, tenant_id: TenantId) -> ScopeId:
        """Return the shared scope that the tenant joined, else its private one."""
        joined = self._scope_by_tenant.get(tenant_id)
        return private_scope(tenant_id) if joined is None else joined


def scope_salt(cluster_secret: bytes, scope_id: ScopeId, client_salt: str | None) -> str:
    """Return the `cache_salt` of a request: 64 hex digits, HMAC-SHA-256 keyed by the secret.

    `client_salt` is what the client asked for to divide its own scope further, None when it asked
    for nothing (which is not the same as an empty salt). Raises CallerError for a secret of less
    than CLUSTER_SECRET_BYTES_MIN bytes.
    """
    if type(cluster_secret) is not bytes or len(cluster_secret) < CLUSTER_SECRET_BYTES_MIN:
        raise CallerError(f"cluster secret is not bytes of at least {CLUSTER_SECRET_BYTES_MIN}")
    if not scope_id:
        raise CallerError("scope_id is empty")
    if client_salt is not None:
        require_text("client salt", client_salt)
    message = encode(_SALT_DOMAIN, {1: scope_id, 2: client_salt})
    return hmac.new(cluster_secret, message, "sha256").hexdigest()
