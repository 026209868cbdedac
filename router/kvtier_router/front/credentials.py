"""What the router shows to workers: a token each, never the client's.

What must not live here: tokens in logs or errors.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from kvtier.config import Secret
from kvtier.core.workers import WorkerName
from kvtier.errors import ConfigError
from kvtier.limits import TOKENS_COUNT_MAX
from kvtier.security.clock import SYSTEM, Clock
from kvtier.security.files import Watched, read


class Credentials:
    """Upstream tokens by worker, and one for the others. Follows its file."""

    def __init__(
        self, default: Secret | None = None, path: Path | None = None, clock: Clock = SYSTEM
    ) -> None:
        """`path`: TOML with `[[worker]]` tables of `name` (instance or address) and `token`."""
        self._default = _text(default) if default is not None else None
        self._source: Watched[Mapping[str, str]] | None = None
        if path is not None:
            self._source = Watched.open((path,), lambda: parse_credentials(read(path)), clock)

    def find(self, worker: WorkerName, address: str) -> str | None:
        """The token to show to a worker, by its instance, else by its address."""
        if self._source is not None:
            named = self._source.get()
            found = named.get(worker.instance) or named.get(address)
            if found is not None:
                return found
        return self._default


def parse_credentials(data: bytes) -> Mapping[str, str]:
    """Tokens by name. ConfigError, which repeats none of them, for another file."""
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        raise ConfigError("upstream tokens file: is not TOML") from None
    rows = document.get("worker")
    if set(document) != {"worker"} or not isinstance(rows, list) or len(rows) > TOKENS_COUNT_MAX:
        raise ConfigError("upstream tokens file: has exactly the array `worker`")
    found: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        match row:
            case {"name": str(name), "token": str(token)} if len(row) == 2:
                found[name] = _text(Secret(token))
            case _:
                raise ConfigError(f"upstream tokens file, worker {number}: has name and token")
    return found


def _text(secret: Secret) -> str:
    token = secret.reveal().strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("an upstream token is not of printable ASCII")
    return token
