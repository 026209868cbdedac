"""Who may call what: roles, principals and the policy table. Pure; denies by default.

What must not live here: how a caller proves who it is, and any service's own table.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Protocol
from urllib.parse import parse_qsl, quote, urlsplit

from kvtier.errors import CallerError, ForbiddenError
from kvtier.limits import GRANTS_COUNT_MAX, NAME_BYTES_MAX
from kvtier.types import InstanceId, ScopeId

SCHEME: Final = "kvtier"
EVERYTHING: Final = "*"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class AccessRole(StrEnum):
    """What a process is in the cluster; decides which methods it may call."""

    ROUTER = "router"
    WORKER = "worker"
    STORE = "store"
    BRIDGE = "bridge"
    INDEX = "index"
    OPERATOR = "operator"
    LOCAL = "local"
    """Anyone, on a port that asks for no credentials. Never granted by a token or certificate."""


GRANTABLE: Final = frozenset(AccessRole) - {AccessRole.LOCAL}
_ALL_SCOPES: Final = frozenset({AccessRole.ROUTER, AccessRole.OPERATOR, AccessRole.LOCAL})


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(
        name.startswith(pattern[:-1]) if pattern.endswith(EVERYTHING) else name == pattern
        for pattern in patterns
    )


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that has proved who it is. A pattern is an exact name, or a prefix and `*`."""

    name: str
    role: AccessRole
    scopes: tuple[str, ...]
    """Tenant scopes it may speak for."""
    instances: tuple[str, ...]
    """Instance ids that it may publish as."""

    def may_speak_for(self, scope_id: ScopeId) -> bool:
        return _matches(self.scopes, scope_id)

    def may_publish_as(self, instance_id: InstanceId) -> bool:
        return _matches(self.instances, instance_id)

    def require_scope(self, scope_id: ScopeId) -> None:
        """ForbiddenError, without the scope's name, unless it may speak for the scope."""
        if not self.may_speak_for(scope_id):
            raise ForbiddenError(f"{self.role} {self.name} may not speak for this scope")

    def require_instance(self, instance_id: InstanceId) -> None:
        """ForbiddenError unless it may publish as this instance."""
        if not self.may_publish_as(instance_id):
            raise ForbiddenError(f"{self.role} {self.name} may not publish as this instance")


ANYONE: Final = Principal("local", AccessRole.LOCAL, (EVERYTHING,), (EVERYTHING,))
"""The caller of a port without credentials: it may do all that the policy knows at all."""


def new_principal(
    name: str, role: str, scopes: Sequence[str] = (), instances: Sequence[str] = ()
) -> Principal:
    """A principal with the defaults of its role. CallerError for what may not be granted.

    Without patterns, routers and operators speak for every scope, all others for none, and everyone
    publishes only as the instance that has its own name.
    """
    if not _NAME.fullmatch(name):
        raise CallerError(f"name {name[:80]!r} is not letters, digits, dot, dash or underscore")
    if role not in GRANTABLE:
        raise CallerError(f"role {role[:80]!r} is none of {', '.join(sorted(GRANTABLE))}")
    access_role = AccessRole(role)
    for what, patterns in (("scopes", scopes), ("instances", instances)):
        if len(patterns) > GRANTS_COUNT_MAX:
            raise CallerError(f"{what}: {len(patterns)} patterns, at most {GRANTS_COUNT_MAX}")
        for pattern in patterns:
            size = len(pattern.encode("utf-8", "surrogatepass"))
            odd = "*" in pattern[:-1] or any("\ud800" <= char <= "\udfff" for char in pattern)
            if odd or not 0 < size <= NAME_BYTES_MAX:
                raise CallerError(f"{what}: {pattern[:80]!r} is neither a name nor a prefix and *")
    every = (EVERYTHING,) if access_role in _ALL_SCOPES else ()
    return Principal(name, access_role, tuple(scopes) or every, tuple(instances) or (name,))


def to_uri(principal: Principal) -> str:
    """`kvtier://role/name?scope=…&instance=…`: how a certificate carries a principal."""
    granted = [("scope", pattern) for pattern in principal.scopes]
    granted += [("instance", pattern) for pattern in principal.instances]
    query = "&".join(f"{key}={quote(pattern, safe='')}" for key, pattern in granted)
    return f"{SCHEME}://{principal.role}/{principal.name}?{query}"


def from_uri(uri: str) -> Principal:
    """Inverse of `to_uri`; absent patterns mean the role's defaults. CallerError for other text."""
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise CallerError(f"{uri[:80]!r} is not a URI") from error
    if parts.scheme != SCHEME or parts.fragment or not parts.path.startswith("/"):
        raise CallerError(f"{uri[:80]!r} is not {SCHEME}://role/name")
    granted: dict[str, list[str]] = {"scope": [], "instance": []}
    try:
        fields = (
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True, max_num_fields=256)
            if parts.query
            else []
        )
    except ValueError as error:
        raise CallerError(f"{uri[:80]!r} has a malformed query") from error
    for key, pattern in fields:
        if key not in granted:
            raise CallerError(f"{uri[:80]!r} has an unknown field {key[:80]!r}")
        granted[key].append(pattern)
    return new_principal(parts.path[1:], parts.netloc, granted["scope"], granted["instance"])


# Policy

HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
_HEALTH: Final = "/grpc.health.v1.Health/"
_REFLECTION: Final = (
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)
PUBLIC: Final = frozenset({HEALTH_CHECK})
"""Liveness: the only methods that answer without credentials, in every service."""


class MethodLike(Protocol):
    @property
    def name(self) -> str: ...


class ServiceLike(Protocol):
    """What the policy reads of a protobuf `ServiceDescriptor`."""

    @property
    def full_name(self) -> str: ...

    @property
    def methods(self) -> Sequence[MethodLike]: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """Method path (`/package.Service/Method`) → roles that may call it. Unlisted means denied."""

    methods: Mapping[str, frozenset[AccessRole]]

    @classmethod
    def of(cls, methods: Mapping[str, Iterable[AccessRole]]) -> "Policy":
        """A table with the entries given, and those for health and reflection beside them.

        CallerError for a path that is none, or a method that nobody may call.
        """
        table = {
            f"{_HEALTH}Watch": GRANTABLE,
            f"{_HEALTH}List": GRANTABLE,
            **{path: frozenset({AccessRole.OPERATOR}) for path in _REFLECTION},
        }
        for path, roles in methods.items():
            if not re.fullmatch(r"/[\w.]+/\w+", path, re.ASCII) or path.startswith("/grpc."):
                raise CallerError(f"{path!r} is not /package.Service/Method of a service of ours")
            table[path] = frozenset(roles)
            if not table[path] or AccessRole.LOCAL in table[path]:
                raise CallerError(f"{path}: name the roles that may call it; local is implied")
        return cls(MappingProxyType(table))

    def allows(self, principal: Principal, method: str) -> bool:
        """Whether the principal may call the method; False for every method that is not listed."""
        roles = self.methods.get(method)
        if roles is None:
            return False
        return principal.role in roles or principal.role is AccessRole.LOCAL


def paths(services: Iterable[ServiceLike]) -> frozenset[str]:
    """Every method path of the services."""
    return frozenset(
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    )


def without_policy(policy: Policy, services: Iterable[ServiceLike]) -> tuple[str, ...]:
    """Methods of the services that no role may call for want of an entry, sorted."""
    return tuple(sorted(paths(services) - policy.methods.keys() - PUBLIC))


def without_method(policy: Policy, services: Iterable[ServiceLike]) -> tuple[str, ...]:
    """Entries of ours that name no method of the services: a typo or a leftover, sorted."""
    ours = {path for path in policy.methods if not path.startswith("/grpc.")}
    return tuple(sorted(ours - paths(services)))
