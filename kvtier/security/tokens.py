"""Bearer tokens: minted, kept as hashes in a TOML file, looked up, and read again when it changes.

A token is 256 random bits, so its plain SHA-256 is safe at rest: there is nothing to guess that a
slow hash would slow down, and scrypt on every call would let anyone buy our CPU with bad tokens.

What must not live here: which method a role may call, and gRPC.
"""

import datetime
import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvtier.config import toml_value
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import TOKEN_BYTES_MAX, TOKENS_COUNT_MAX
from kvtier.security import files
from kvtier.security.clock import SYSTEM, Clock
from kvtier.security.roles import Principal, new_principal

TOKEN_PREFIX: Final = "kvtier_"  # noqa: S105  (a prefix by which scanners find leaked tokens)
TOKEN_RANDOM_BYTES: Final = 32
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = frozenset({"name", "role", "sha256", "expires", "scopes", "instances"})


class Denial(StrEnum):
    """Why a caller was turned away; counted for operators, never told to the caller."""

    MISSING = "missing"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    CONTRADICTING = "contradicting"
    """Token and certificate name different principals."""
    ROLE = "role"
    NO_POLICY = "no_policy"


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One line of the tokens file. Never holds the token itself."""

    principal: Principal
    sha256: bytes
    expires_at: float
    """Seconds since 1970."""


def mint() -> str:
    """A new token. Show it once: only its hash is kept anywhere."""
    return TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_RANDOM_BYTES)


def hashed(token: str) -> bytes:
    """SHA-256 of a token, the only form in which a service knows it."""
    return hashlib.sha256(token.encode("utf-8")).digest()


# The file


def parse_entries(data: bytes) -> Mapping[bytes, TokenEntry]:
    """Entries of a tokens file by hash. ConfigError for anything that is not exactly one.

    An empty file is refused, for that is what a write in progress looks like; a set that admits
    nobody is written `token = []`.
    """
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"tokens file: {error}") from None
    rows = document.get("token")
    if set(document) != {"token"} or not isinstance(rows, list):
        raise ConfigError("tokens file: has exactly the array `token`")
    if len(rows) > TOKENS_COUNT_MAX:
        raise ConfigError(f"tokens file: {len(rows)} tokens, at most {TOKENS_COUNT_MAX}")
    entries: dict[bytes, TokenEntry] = {}
    for number, row in enumerate(rows, 1):
        entry = _entry(row, f"tokens file, token {number}")
        if entry.sha256 in entries:
            raise ConfigError(f"tokens file, token {number}: the same hash stands there twice")
        entries[entry.sha256] = entry
    return entries


def _entry(row: object, where: str) -> TokenEntry:
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: is not a table")
    unknown = sorted(set(row) - _KEYS)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}")
    digest = row.get("sha256")
    if not isinstance(digest, str) or not _HASH.fullmatch(digest):
        raise ConfigError(f"{where}: sha256 is not 64 hex digits")
    expires = row.get("expires")
    if not isinstance(expires, datetime.datetime) or expires.tzinfo is None:
        raise ConfigError(f"{where}: expires is not a date and time with an offset")
    try:
        principal = new_principal(
            _text(row, "name", where),
            _text(row, "role", where),
            _texts(row, "scopes", where),
            _texts(row, "instances", where),
        )
    except ConfigError:
        raise
    except CallerError as error:
        raise ConfigError(f"{where}: {error}") from error
    return TokenEntry(principal, bytes.fromhex(digest), expires.timestamp())


def _text(row: Mapping[str, object], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} is not a string")
    return value


def _texts(row: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    value = row.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where}: {key} is not an array of strings")
    return tuple(value)


def format_entry(entry: TokenEntry) -> str:
    """One entry as the TOML that `parse_entries` reads."""
    expires = datetime.datetime.fromtimestamp(entry.expires_at, datetime.UTC)
    return (
        "[[token]]\n"
        f"name = {toml_value(entry.principal.name)}\n"
        f"role = {toml_value(str(entry.principal.role))}\n"
        f'sha256 = "{entry.sha256.hex()}"\n'
        f"expires = {expires.strftime('%Y-%m-%dT%H:%M:%SZ')}\n"
        f"scopes = {toml_value(entry.principal.scopes)}\n"
        f"instances = {toml_value(entry.principal.instances)}\n"
    )


# The two ends


class TokenBook:
    """The tokens that a service knows; follows its file. One event loop uses it."""

    def __init__(self, path: Path, clock: Clock = SYSTEM) -> None:
        """Read the file. ConfigError where it is missing, malformed or writable by others."""

        def parse() -> Mapping[bytes, TokenEntry]:
            files.refuse_shared_writes(path)
            return parse_entries(files.read(path))

        self._clock = clock
        self.source = files.Watched.open((path,), parse, clock)

    def find(self, token: str) -> Principal | Denial:
        """Whose token this is, or why it is nobody's. O(1) in the number of tokens.

        What is looked up is the token's hash, so the time that takes tells nothing about a token;
        the comparison that decides is constant-time all the same.
        """
        if len(token) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
            return Denial.MALFORMED
        digest = hashed(token)
        entry = self.source.get().get(digest)
        if entry is None or not hmac.compare_digest(entry.sha256, digest):
            return Denial.UNKNOWN
        if self._clock.wall() >= entry.expires_at:
            return Denial.EXPIRED
        return entry.principal


class TokenSource:
    """The token that a client presents; follows its file. Any thread may ask."""

    def __init__(self, path: Path, clock: Clock = SYSTEM) -> None:
        """Read the file. ConfigError where it holds no token."""
        self.source = files.Watched.open((path,), lambda: _one_token(path), clock)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a call that presents the newest token."""
        return (("authorization", f"Bearer {self.source.get()}"),)


def _one_token(path: Path) -> str:
    try:
        token = files.read(path).decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} holds no token") from None
    if len(token) > TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise ConfigError(f"{path} holds no token")
    return token
