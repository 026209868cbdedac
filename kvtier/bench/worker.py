"""The worker with a real model, and with a fake one that stands for a GPU, against plain figures.

Time to first token is measured over HTTP between processes (`kvtier store`, `kvtier worker`), steps
inside this one. What is compared takes turns, figures are medians of neighbours' ratios with their
95 % intervals, and every row checks which tier served and that the tokens are the same.
What must not live here: measurements (`worker_*`).
"""

import argparse
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from kvtier.bench import worker_generate, worker_steps, worker_throttled, worker_ttft
from kvtier.bench.report import Bar, Result
from kvtier.bench.worker_processes import Node, a_node
from kvtier.bench.worker_steps import StepSizes
from kvtier.bench.worker_ttft import TtftSizes
from kvtier.engines.transformers.runner import TransformersRunner

ROWS = {
    "l1": "ttft",
    "dram": "ttft",
    "load": "ttft",
    "nvme": "ttft",
    "gpu": "gpu",
    "throttled": "throttled",
    "misses": "misses",
    "generate": "generate",
    "stall": "stall",
    "waste": "generate",
}
"""Rows by name, and the part that measures each."""

Part: TypeAlias = Callable[[Node], list[Result]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny sizes; do not quote the figures")
    parser.add_argument(
        "--only", action="append", choices=list(ROWS), help="measure only this row; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=None, help="of every comparison")
    parser.add_argument(
        "--threads", type=int, default=0, help="of compute of each worker; 0: one a core"
    )
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")


def run(arguments: argparse.Namespace) -> list[Result]:
    rows = arguments.only or list(ROWS)
    results = [_load_average("load average before")]
    for part in _parts(rows, _sizes(arguments)):
        with a_node(arguments.directory) as node:
            results += part(node)
    return [*results, _load_average("load average after")]


def _sizes(arguments: argparse.Namespace) -> tuple[TtftSizes, StepSizes]:
    is_quick: bool = arguments.quick
    threads = arguments.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    ttft = worker_ttft.QUICK if is_quick else TtftSizes()
    ttft = dataclasses.replace(ttft, threads=threads)
    steps = worker_steps.QUICK if is_quick else StepSizes()
    rounds: int | None = arguments.rounds
    if rounds is None:
        return ttft, steps
    return (
        dataclasses.replace(ttft, rounds=rounds, gpu_rounds=rounds),
        dataclasses.replace(steps, bursts=rounds, stalls=rounds),
    )


def _parts(rows: list[str], sizes: tuple[TtftSizes, StepSizes]) -> list[Part]:
    ttft, steps = sizes
    wanted = {ROWS[row] for row in rows}
    parts: dict[str, Part] = {
        "ttft": lambda node: worker_ttft.smollm2_rows(node, ttft, with_nvme="nvme" in rows),
        "gpu": lambda node: worker_ttft.gpu_rows(node, ttft),
        "throttled": lambda node: worker_throttled.throttled_rows(node, ttft),
        "misses": lambda node: worker_steps.misses_rows(node, _runner(steps), steps),
        "generate": lambda _: worker_generate.generate_rows(_runner(steps), steps),
        "stall": lambda _: worker_steps.stall_rows(_runner(steps), steps),
    }
    return [part for name, part in parts.items() if name in wanted]


def _runner(sizes: StepSizes) -> TransformersRunner:
    return worker_steps.open_runner(sizes.model)


def _load_average(name: str) -> Result:
    """Of the last minute: beyond what the bench itself needs, figures are noisy."""
    return Result(name, os.getloadavg()[0], "processes", None, Bar.AT_MOST)
