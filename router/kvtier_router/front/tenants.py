"""Tenants: whose API key it is, which scope, quota and class its requests have.

Keys are 256 random bits, kept as SHA-256 in a TOML file that is read again when it changes. What
must not live here: the counting of quotas (quotas.py), HTTP.
"""

import datetime
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final

from kvtier.core.checks import require_name
from kvtier.core.quotas import Quota
from kvtier.core.scopes import ScopeRules, SharedScope, scope_salt
from kvtier.errors import CallerError, ConfigError, UnauthenticatedError
from kvtier.limits import PRIORITY_CLASSES_COUNT_MAX, TENANTS_COUNT_MAX, TOKEN_BYTES_MAX
from kvtier.security.clock import SYSTEM, Clock
from kvtier.security.files import Watched, read, refuse_shared_writes
from kvtier.types import ScopeId, TenantId

ANYONE: Final = TenantId("anyone")
"""All requests of open mode."""
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_BEARER: Final = "bearer "
_TENANT_KEYS: Final = frozenset(
    {"id", "scope", "priority", "weight", "models", "key", "requests_per_s", "requests_burst"}
    | {"tokens_per_s", "tokens_burst"}
)
_KEY_KEYS: Final = frozenset({"sha256", "expires", "name"})
_SALTS_MAX: Final = 8192


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of the router."""

    tenant_id: TenantId
    scope_id: ScopeId | None
    """None in open mode: nothing separates anybody."""
    quota: Quota = field(default_factory=Quota)
    priority: int = 0
    """Index of its class; 0 goes first."""
    weight: float = 1.0
    models: frozenset[str] | None = None
    """Names that it may ask for; None for all."""


OPEN: Final = Tenant(ANYONE, None)


@dataclass(frozen=True, slots=True)
class _Key:
    tenant: Tenant
    expires_at: float


class TenantBook:
    """The tenants of a keys file, followed. One event loop uses it."""

    def __init__(
        self, path: Path | None, cluster_secret: bytes | None, clock: Clock = SYSTEM
    ) -> None:
        """`path` None is open mode. ConfigError for an unusable file, or keys without a secret."""
        if path is not None and cluster_secret is None:
            raise ConfigError("tenants need cluster_secret: it keeps their scopes apart")
        self._secret = cluster_secret
        self._clock = clock
        self._source: Watched[Mapping[bytes, _Key]] | None = None
        self._listed: Mapping[TenantId, Tenant] = {}
        self._listed_from: Mapping[bytes, _Key] | None = None
        self._salts: dict[tuple[ScopeId, str | None], str] = {}
        if path is not None:
            self._source = Watched.open((path,), lambda: _entries(path), clock)

    @property
    def is_open(self) -> bool:
        """Whether everybody is let in."""
        return self._source is None

    @property
    def reload_errors(self) -> int:
        return 0 if self._source is None else self._source.reload_errors

    @property
    def last_error(self) -> str:
        return "" if self._source is None else self._source.last_error

    def tenants(self) -> "Mapping[TenantId, Tenant]":
        """All tenants that have a key; the same object until the file changes."""
        if self._source is None:
            return {}
        entries = self._source.get()
        if entries is not self._listed_from:
            self._listed_from = entries
            self._listed = {key.tenant.tenant_id: key.tenant for key in entries.values()}
        return self._listed

    def find(self, authorization: str | None) -> Tenant:
        """Whose the request is; UnauthenticatedError, which never says why. O(1).

        What is looked up is the hash of the key, so the time that takes tells nothing of a key.
        """
        if self._source is None:
            return OPEN
        entries = self._source.get()
        if authorization is None or authorization[: len(_BEARER)].lower() != _BEARER:
            raise UnauthenticatedError("no API key: want Authorization: Bearer KEY")
        presented = authorization[len(_BEARER) :].strip()
        found = None
        if len(presented) <= TOKEN_BYTES_MAX:
            digest = hashlib.sha256(presented.encode("utf-8", "replace")).digest()
            found = entries.get(digest)
        if found is None or self._clock.wall() >= found.expires_at:
            raise UnauthenticatedError("incorrect API key")
        return found.tenant

    def salt(self, tenant: Tenant, client_salt: str | None) -> str | None:
        """The `cache_salt` that goes upstream. CallerError for a salt that is no plain text.

        In open mode what the client gave: there is nobody to be kept apart from.
        """
        if tenant.scope_id is None or self._secret is None:
            return client_salt
        known = self._salts.get((tenant.scope_id, client_salt))
        if known is not None:
            return known
        salt = scope_salt(self._secret, tenant.scope_id, client_salt)
        if len(self._salts) >= _SALTS_MAX:
            self._salts.clear()
        self._salts[tenant.scope_id, client_salt] = salt
        return salt


def _entries(path: Path) -> Mapping[bytes, _Key]:
    refuse_shared_writes(path)
    return parse_tenants(read(path))


def parse_tenants(data: bytes) -> Mapping[bytes, _Key]:
    """Keys by hash. ConfigError for anything that is not exactly a keys file."""
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"keys file: {error}") from None
    rows = document.get("tenant")
    if set(document) != {"tenant"} or not isinstance(rows, list):
        raise ConfigError("keys file: has exactly the array `tenant`")
    if len(rows) > TENANTS_COUNT_MAX:
        raise ConfigError(f"keys file: {len(rows)} tenants, at most {TENANTS_COUNT_MAX}")
    rules = _rules(rows)
    keys: dict[bytes, _Key] = {}
    for number, row in enumerate(rows, 1):
        where = f"keys file, tenant {number}"
        tenant = _tenant(row, where, rules)
        for key in _tables(row, "key", where):
            digest = _digest(key, where)
            if digest in keys:
                raise ConfigError(f"{where}: a key's hash stands there twice")
            keys[digest] = _Key(tenant, _expiry(key, where))
    return keys


def _rules(rows: list[object]) -> ScopeRules:
    """The named scopes that tenants join, and a check that no tenant stands there twice."""
    joined: dict[str, set[TenantId]] = {}
    seen: set[TenantId] = set()
    for number, row in enumerate(rows, 1):
        where = f"keys file, tenant {number}"
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: is not a table")
        tenant_id = TenantId(_text(row, "id", where))
        if tenant_id in seen:
            raise ConfigError(f"{where}: id {tenant_id!r} stands there twice")
        seen.add(tenant_id)
        if "scope" in row:
            joined.setdefault(_text(row, "scope", where), set()).add(tenant_id)
    try:
        return ScopeRules(tuple(SharedScope(n, frozenset(t)) for n, t in joined.items()))
    except CallerError as error:
        raise ConfigError(f"keys file: {error}") from None


def _tenant(row: Mapping[str, object], where: str, rules: ScopeRules) -> Tenant:
    unknown = sorted(set(row) - _TENANT_KEYS)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    tenant_id = TenantId(_text(row, "id", where))
    priority = row.get("priority", 0)
    if type(priority) is not int or not 0 <= priority < PRIORITY_CLASSES_COUNT_MAX:
        raise ConfigError(f"{where}: priority is no class")
    weight = _number(row, "weight", 1.0, where)
    if not 1e-3 <= weight <= 1e3:
        raise ConfigError(f"{where}: weight must be in 0.001 to 1000")
    models = row.get("models")
    if models is not None and not (
        isinstance(models, list) and all(isinstance(name, str) for name in models)
    ):
        raise ConfigError(f"{where}: models is not an array of strings")
    try:
        require_name("id", tenant_id)
        quota = Quota(
            requests_per_s=(requests := _number(row, "requests_per_s", inf, where)),
            requests_burst=_number(row, "requests_burst", max(1.0, requests), where),
            tokens_per_s=(tokens := _number(row, "tokens_per_s", inf, where)),
            tokens_burst=_number(row, "tokens_burst", 10 * tokens, where),
        )
        scope_id = rules.scope_of(tenant_id)
    except CallerError as error:
        raise ConfigError(f"{where}: {error}") from None
    allowed = None if models is None else frozenset(models)
    return Tenant(tenant_id, scope_id, quota, priority, weight, allowed)


def _digest(key: Mapping[str, object], where: str) -> bytes:
    unknown = sorted(set(key) - _KEY_KEYS)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} of a key")
    digest = key.get("sha256")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ConfigError(f"{where}: sha256 is not 64 hex digits")
    return bytes.fromhex(digest)


def _expiry(key: Mapping[str, object], where: str) -> float:
    expires = key.get("expires")
    if expires is None:
        return inf
    if not isinstance(expires, datetime.datetime) or expires.tzinfo is None:
        raise ConfigError(f"{where}: expires is not a date and time with an offset")
    return expires.timestamp()


def _text(row: Mapping[str, object], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: {key} is not a text")
    return value


def _number(row: Mapping[str, object], key: str, default: float, where: str) -> float:
    value = row.get(key, default)
    if type(value) not in (int, float) or not isinstance(value, int | float):
        raise ConfigError(f"{where}: {key} is not a number")
    return float(value)


def _tables(row: Mapping[str, object], key: str, where: str) -> list[Mapping[str, object]]:
    value = row.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{where}: {key} is not an array of tables")
    return value
