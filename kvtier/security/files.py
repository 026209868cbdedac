"""Credential files: read whole, watched by their stat, written private and in one step.

What must not live here: what the bytes mean.
"""

import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from kvtier.errors import ConfigError
from kvtier.limits import CONFIG_BYTES_MAX
from kvtier.security.clock import SYSTEM, Clock

POLL_S: Final = 1.0
"""How long a changed file may go unnoticed."""
PRIVATE_FILE: Final = 0o600
PRIVATE_FOLDER: Final = 0o700
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH

T = TypeVar("T")
_Stamp = tuple[tuple[int, int, int] | None, ...]


def read(path: Path) -> bytes:
    """Bytes of a credential file. ConfigError where it is missing, too large or not a file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a regular file")
            data = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {CONFIG_BYTES_MAX} bytes")
    return data


def refuse_shared_writes(path: Path) -> None:
    """ConfigError where users beside the owner may change a file that grants access."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if mode & _WRITABLE_BY_OTHERS:
        raise ConfigError(f"{path} can be written by others (mode {stat.S_IMODE(mode):o})")


def write_private(path: Path, data: bytes) -> None:
    """Replace a file in one step; only its owner may read it. Creates no folder."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        descriptor = os.open(temporary, flags, PRIVATE_FILE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner may enter, or close an existing one to others."""
    try:
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        path.chmod(PRIVATE_FOLDER)
    except OSError as error:
        raise ConfigError(f"cannot create {path}: {error.strerror}") from error


@dataclass(slots=True)
class Watched(Generic[T]):
    """A value made from files, made again when they change; a broken change keeps the old value.

    The first load happens in `open` and must succeed. Between polls `get` costs one clock reading.
    A file system that hangs hangs the caller, so credentials belong on a local disk.
    """

    paths: tuple[Path, ...]
    parse: Callable[[], T]
    clock: Clock
    value: T
    reload_errors: int
    """Changes that were refused since the start."""
    last_error: str
    """Why the newest change was refused; empty where it was not."""
    _stamp: _Stamp
    _polled_at: float

    @classmethod
    def open(
        cls, paths: Sequence[Path], parse: Callable[[], T], clock: Clock = SYSTEM
    ) -> "Watched[T]":
        """Load for the first time. Raises the ConfigError of `parse`."""
        stamp = _stamp(paths)
        return cls(
            paths=tuple(paths),
            parse=parse,
            clock=clock,
            value=parse(),
            reload_errors=0,
            last_error="",
            _stamp=stamp,
            _polled_at=clock.monotonic(),
        )

    def get(self) -> T:
        """The value of the newest files that were good. Looks at them at most once a POLL_S."""
        now = self.clock.monotonic()
        if now - self._polled_at >= POLL_S:
            self._polled_at = now
            self._reload()
        return self.value

    def _reload(self) -> None:
        stamp = _stamp(self.paths)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.value = self.parse()
            self.last_error = ""
        except ConfigError as error:
            self.reload_errors += 1
            self.last_error = str(error)


def _stamp(paths: Sequence[Path]) -> _Stamp:
    return tuple(_stamp_of(path) for path in paths)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
