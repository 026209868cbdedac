"""The tier's directory: one owner, one current generation, everything else of ours removed.

    LOCK                    locked by the process that owns the directory
    state.json              format, generation, index, sizes; replaced in one step
    generation-<16 hex>/    0700
        index-<16 hex>/     RocksDB
        segments/           <16 hex>.segment

A generation begins empty and is never repaired: where its index cannot be opened, or was written by
another format, the next one begins and the old one is deleted first, so that the cap holds. Files
that have no name of ours are left alone. What must not live here: entries, frames.
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from kvtier.core.checks import require_integer
from kvtier.errors import BackendError, CallerError, ConfigError, UnavailableError
from kvtier.limits import CONFIG_BYTES_MAX
from kvtier.tiers.nvme.layout import (
    FORMAT_VERSION,
    PAGE_BYTES,
    Geometry,
    NvmeConfig,
    geometry_of,
)

_LOG = logging.getLogger(__name__)

_LOCK: Final = "LOCK"
_STATE: Final = "state.json"
_STATE_NEW: Final = "state.json.new"
_GENERATION: Final = re.compile(r"generation-[0-9a-f]{16}")
_INDEX: Final = re.compile(r"index-[0-9a-f]{16}")
_SIZE_MAX: Final = 1 << 50
_BLOCK_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered from start to start."""

    format: int
    generation: str
    index: str
    bytes_max: int
    segment_bytes: int

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.bytes_max, self.segment_bytes)


class Home:
    """A locked directory. All calls block. Methods raise BackendError where the disk refuses."""

    def __init__(self, config: NvmeConfig) -> None:
        """Make and lock the directory, and learn or draw its state.

        Raises UnavailableError where another process owns it, ConfigError for sizes that cannot be.
        """
        self.root = config.directory
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(self.root / _LOCK)
        except OSError as error:
            _refuse(self.root, error)
        try:
            self._begin(config)
        except BaseException:
            self.close()
            raise

    def _begin(self, config: NvmeConfig) -> None:
        try:
            state = self._remembered()
            self.is_new = state is None
            if state is None:
                self._remove_generations()
                self.state = self._drawn(config)
                self.begin_generation()
            else:
                self.state = _resized(state, config)
                self._write_state()
                self._remove_generations(state.generation)
        except OSError as error:
            _refuse(self.root, error)

    @property
    def generation(self) -> Path:
        return self.root / self.state.generation

    @property
    def segments(self) -> Path:
        return self.generation / "segments"

    @property
    def index(self) -> Path:
        return self.generation / self.state.index

    def begin_generation(self) -> None:
        """Delete all that the tier has, and begin with nothing."""
        try:
            self._remove_generations()
            self.state = replace(self.state, generation=_drawn_generation(), index=_drawn_index())
            self.segments.mkdir(mode=0o700, parents=True)
            self.generation.chmod(0o700)
            self._write_state()
        except OSError as error:
            _refuse(self.root, error)

    def begin_index(self) -> Path:
        """Name the index that `adopt_index` will make the current one; nothing is there yet."""
        return self.generation / _drawn_index()

    def adopt_index(self, path: Path) -> None:
        """Make another index the current one, and delete the one before."""
        try:
            self.state = replace(self.state, index=path.name)
            self._write_state()
            self.remove_stray_indexes()
        except OSError as error:
            _refuse(self.root, error)

    def remove_stray_indexes(self) -> None:
        """Delete what a rebuild that was killed left behind."""
        for path in _matching(self.generation, _INDEX):
            if path.name != self.state.index:
                shutil.rmtree(path)

    def overhead_bytes(self) -> int:
        """What `du` says of all of the tier but its segments."""
        total = _allocated(self.root) + _allocated(self.root / _LOCK)
        total += _allocated(self.root / _STATE) + _allocated(self.generation)
        total += _allocated(self.segments)
        for folder, _, names in os.walk(self.index):
            total += _allocated(Path(folder)) + sum(_allocated(Path(folder, n)) for n in names)
        return total

    def probe(self) -> None:
        """Write and sync a page: whether the disk takes writes now, without Python's lock held."""
        path = self.generation / "probe"
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o600)
            try:
                _write_whole(descriptor, bytes(PAGE_BYTES))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                path.unlink()
        except OSError as error:
            _refuse(self.root, error)

    def close(self) -> None:
        """Unlock the directory."""
        descriptor, self._lock = self._lock, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _remembered(self) -> State | None:
        """The state of the last start; None where there is none, or none that can be used."""
        path = self.root / _STATE
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(CONFIG_BYTES_MAX)
        state = _parsed(content)
        if state is None:
            _LOG.warning("%s is not of this release or is damaged: the tier starts cold", _STATE)
            return None
        if not _is_directory(self.root / state.generation / "segments"):
            _LOG.warning("the generation that %s names is gone: the tier starts cold", _STATE)
            return None
        return state

    def _drawn(self, config: NvmeConfig) -> State:
        bytes_max = config.bytes_max
        if bytes_max is None:
            space = os.statvfs(self.root)
            bytes_max = int(config.free_share * space.f_bavail * space.f_frsize)
        geometry = geometry_of(bytes_max, config.segment_bytes)
        return State(
            FORMAT_VERSION, _drawn_generation(), _drawn_index(), bytes_max, geometry.segment_bytes
        )

    def _write_state(self) -> None:
        path = self.root / _STATE_NEW
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            _write_whole(descriptor, json.dumps(asdict(self.state), indent=1).encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        path.replace(self.root / _STATE)

    def _remove_generations(self, kept: str = "") -> None:
        for path in _matching(self.root, _GENERATION):
            if path.name != kept:
                shutil.rmtree(path)


def _resized(state: State, config: NvmeConfig) -> State:
    """The state with the sizes that are configured now; old segments stay as they are."""
    bytes_max = config.bytes_max or state.bytes_max
    segment_bytes = config.segment_bytes or state.segment_bytes
    if config.segment_bytes is None and bytes_max != state.bytes_max:
        segment_bytes = geometry_of(bytes_max, None).segment_bytes
    geometry = Geometry(bytes_max, segment_bytes)
    return replace(state, bytes_max=geometry.bytes_max, segment_bytes=geometry.segment_bytes)


def _parsed(content: bytes) -> State | None:
    try:
        fields = json.loads(content)
        state = State(**fields)
        require_integer("format", state.format, FORMAT_VERSION, FORMAT_VERSION)
        require_integer("bytes_max", state.bytes_max, 1, _SIZE_MAX)
        require_integer("segment_bytes", state.segment_bytes, 1, _SIZE_MAX)
    except (ValueError, TypeError, CallerError, RecursionError):
        return None
    if not isinstance(state.generation, str) or not _GENERATION.fullmatch(state.generation):
        return None
    if not isinstance(state.index, str) or not _INDEX.fullmatch(state.index):
        return None
    if state.segment_bytes % PAGE_BYTES:
        return None
    try:
        state.geometry  # noqa: B018 - checks the sizes
    except ConfigError:
        return None
    return state


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UnavailableError(f"{path.parent} is in use by another process") from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_whole(descriptor: int, content: bytes) -> None:
    if os.write(descriptor, content) != len(content):
        raise OSError(errno.EIO, "a short write")


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Real directories with a name of ours; a link is never one."""
    return [p for p in folder.iterdir() if pattern.fullmatch(p.name) and _is_directory(p)]


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * _BLOCK_BYTES
    except FileNotFoundError:  # RocksDB deletes as it goes
        return 0


def _drawn_generation() -> str:
    return f"generation-{secrets.token_hex(8)}"


def _drawn_index() -> str:
    return f"index-{secrets.token_hex(8)}"


def _refuse(root: Path, error: OSError) -> NoReturn:
    raise BackendError(f"{root}: {error.strerror or error}") from error
