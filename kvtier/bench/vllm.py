"""Real vLLM servers on the CPU, with and without kvtier: what it costs, saves, and what routing is
worth.

Needs a Python with vLLM and `kvtier[engine]` (`--vllm-python`; `make test-vllm` makes one) and
SmolLM2. What is compared takes turns; every row checks what the engine itself says was cached. Each
part starts its own servers, some minutes for each on two cores. `--quick` is a smoke test.
What must not live here: measurements (`vllm_*`).
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtier.bench import vllm_misses, vllm_turns
from kvtier.bench.report import Bar, Result
from kvtier.bench.vllm_processes import Rig, a_rig
from kvtier.engines.transformers.sources import resolve
from kvtier.errors import ConfigError

Part = Callable[[Rig, bool], list[Result]]
"""Measures one row; true: quickly."""


def _turns(rig: Rig, is_quick: bool) -> list[Result]:
    sizes = vllm_turns.QUICK if is_quick else vllm_turns.TurnSizes()
    compared = vllm_turns.compare(vllm_turns.start(rig, sizes), sizes)
    rig.end()
    return vllm_turns.results(compared, sys.stderr.write)


def _misses(rig: Rig, is_quick: bool) -> list[Result]:
    return vllm_misses.misses(rig, vllm_misses.QUICK if is_quick else vllm_misses.MissSizes())


def _hits(rig: Rig, is_quick: bool) -> list[Result]:
    return vllm_misses.hits(rig, vllm_misses.QUICK if is_quick else vllm_misses.MissSizes())


def _example(rig: Rig, is_quick: bool) -> list[Result]:
    sizes = vllm_misses.QUICK if is_quick else vllm_misses.MissSizes()
    return vllm_misses.example(rig, sizes, rig.directory / "example")


ROWS: Final[dict[str, Part]] = {
    "misses": _misses,
    "hits": _hits,
    "example": _example,
    "turns": _turns,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny sizes; do not quote the figures")
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=list(ROWS), help="measure only these rows"
    )
    parser.add_argument(
        "--vllm-python", type=Path, help="a Python with vLLM and kvtier[engine]; required"
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, or a model directory")
    parser.add_argument("--directory", type=Path, default=None, help="for logs, sockets, files")


def run(arguments: argparse.Namespace) -> list[Result]:
    python: Path | None = arguments.vllm_python
    if python is None or not os.access(python, os.X_OK):
        raise ConfigError(f"--vllm-python {python} is no program: see make test-vllm")
    model = resolve(arguments.model).directory
    results = [_load_average("load average before")]
    for name in arguments.only:
        begun = time.monotonic()
        with a_rig(arguments.directory, python, model) as rig:
            results += ROWS[name](rig, arguments.quick)
        sys.stderr.write(f"{name}: {time.monotonic() - begun:.0f} s\n")
    return [*results, _load_average("load average after")]


def _load_average(name: str) -> Result:
    """Of the last minute: beyond what the bench itself needs, figures are noisy."""
    return Result(name, os.getloadavg()[0], "processes", None, Bar.AT_MOST)
