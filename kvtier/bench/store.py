"""The store's tiers against what the machine can do, one module `store_NAME` a part.

A part has `add_arguments(parser)` and `rows(arguments) -> list[Result]`.
"""

import argparse
import importlib
from collections.abc import Callable

from kvtier.bench.report import Result

PARTS = ("arena", "nvme", "redis", "service", "down")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="measure only this; may be repeated"
    )
    for part in PARTS:
        importlib.import_module(f"kvtier.bench.store_{part}").add_arguments(parser)


def run(arguments: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    for part in arguments.part or PARTS:
        rows: Callable[[argparse.Namespace], list[Result]] = importlib.import_module(
            f"kvtier.bench.store_{part}"
        ).rows
        results += rows(arguments)
    return results
