"""Keys by scope for sealed tiers: drawn at first use, kept in one private file, erased one by one.

Erasing a key erases every block that was sealed with it, wherever copies of it lie. Keys are drawn,
not derived: what can be derived again was never erased.
What must not live here: blocks, and which tier is sealed.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from kvtier.errors import ConfigError, LimitError
from kvtier.limits import CONFIG_BYTES_MAX, SCOPE_KEYS_COUNT_MAX
from kvtier.security.files import read, refuse_shared_writes, write_private
from kvtier.types import ScopeId

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
_LABEL_BYTES: Final = 16
_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ScopeKey:
    """One key. The id is random: it says whether a block was sealed with it, and nothing else."""

    scope: ScopeId
    key_id: bytes
    key: bytes = field(repr=False)


class ScopeKeys(Protocol):
    """Where a sealed tier gets its keys. Does not block for long; called on the event loop."""

    def label(self, scope: ScopeId) -> ScopeId:
        """What stands for the scope below: always the same, and nobody else can tell whose it is.
        It outlives the key, so that what was erased can still be found and dropped."""
        ...

    def sealing_key(self, scope: ScopeId) -> ScopeKey:
        """The key to seal with, drawn if there is none. Raises LimitError past the ceiling."""
        ...

    def opening_key(self, label: ScopeId) -> ScopeKey | None:
        """The key of the scope that this label stands for; None where it was erased."""
        ...


class MemoryScopeKeys:
    """Keys that end with the process: what it sealed can be read by nobody afterwards."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._keys: dict[ScopeId, ScopeKey] = {}

    def label(self, scope: ScopeId) -> ScopeId:
        """See `ScopeKeys.label`."""
        digest = hmac.digest(self._secret, scope.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return ScopeId(digest[:_LABEL_BYTES].hex())

    def sealing_key(self, scope: ScopeId) -> ScopeKey:
        """See `ScopeKeys.sealing_key`."""
        label = self.label(scope)
        if label not in self._keys:
            if len(self._keys) >= SCOPE_KEYS_COUNT_MAX:
                raise LimitError(f"{SCOPE_KEYS_COUNT_MAX} scopes have keys")
            drawn = ScopeKey(
                scope, secrets.token_bytes(KEY_ID_BYTES), secrets.token_bytes(KEY_BYTES)
            )
            self._save({**self._keys, label: drawn})
        return self._keys[label]

    def opening_key(self, label: ScopeId) -> ScopeKey | None:
        """See `ScopeKeys.opening_key`."""
        return self._keys.get(label)

    def erase(self, scope: ScopeId) -> bool:
        """Forget the scope's key for good; False where it had none. A later put draws another."""
        label = self.label(scope)
        if label not in self._keys:
            return False
        self._save({other: key for other, key in self._keys.items() if other != label})
        return True

    def _save(self, keys: Mapping[ScopeId, ScopeKey]) -> None:
        self._keys = dict(keys)


class FileScopeKeys(MemoryScopeKeys):
    """Keys in a file that only its owner may read, replaced in one step at each change.

    Keep it on another disk than the tier, out of its backups: who has both has the blocks. A key is
    on disk before it is used, and out of the file before `erase` returns; what the file system kept
    of older contents is its own affair.
    """

    def __init__(self, path: Path) -> None:
        """Read the file, or begin one. Raises ConfigError where it is not one of these, or others
        may write it."""
        super().__init__()
        self._path = path
        if path.exists():
            refuse_shared_writes(path)
            self._secret, self._keys = _parsed(path)
        else:
            self._save({})

    def _save(self, keys: Mapping[ScopeId, ScopeKey]) -> None:
        document = {
            "label_secret": self._secret.hex(),
            "keys": {
                label: {"scope": key.scope, "id": key.key_id.hex(), "key": key.key.hex()}
                for label, key in keys.items()
            },
        }
        content = json.dumps(document, indent=1).encode()
        if len(content) > CONFIG_BYTES_MAX:
            raise LimitError(f"the keys of {len(keys)} scopes do not fit into {self._path.name}")
        write_private(self._path, content)
        super()._save(keys)


def _parsed(path: Path) -> tuple[bytes, dict[ScopeId, ScopeKey]]:
    try:
        document = json.loads(read(path))
        secret = bytes.fromhex(document["label_secret"])
        keys = {
            ScopeId(label): ScopeKey(
                ScopeId(fields["scope"]), bytes.fromhex(fields["id"]), bytes.fromhex(fields["key"])
            )
            for label, fields in document["keys"].items()
        }
        lengths = {(len(key.key_id), len(key.key)) for key in keys.values()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(f"{path} is not a file of scope keys") from None  # keys are in the cause
    if len(secret) != _SECRET_BYTES or not lengths <= {(KEY_ID_BYTES, KEY_BYTES)}:
        raise ConfigError(f"{path} is not a file of scope keys")
    return secret, keys
