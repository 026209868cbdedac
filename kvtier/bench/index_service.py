"""The index as a service: what it applies, answers and survives, over its real wire.

Every server and publisher is a process of its own. The parts are in `index_service_*`; this module
puts them together. `--quick` shrinks everything for a smoke test: its figures mean nothing.
"""

import argparse
import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

from kvtier.bench import (
    index_service_apply,
    index_service_match,
    index_service_recovery,
    index_service_soak,
)
from kvtier.bench.report import Result

Part: TypeAlias = Callable[[bool], Coroutine[None, None, list[Result]]]
"""Measures one part; true: quickly."""

PARTS: dict[str, Part] = {
    "apply": lambda quick: index_service_apply.run(
        index_service_apply.QUICK if quick else index_service_apply.ApplySizes()
    ),
    "match": lambda quick: index_service_match.run(
        index_service_match.QUICK if quick else index_service_match.MatchSizes()
    ),
    "recovery": lambda quick: index_service_recovery.run(
        index_service_recovery.QUICK if quick else index_service_recovery.RecoverySizes()
    ),
    "soak": lambda quick: index_service_soak.run(
        index_service_soak.QUICK if quick else index_service_soak.SoakSizes()
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny sizes; do not quote the figures")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="measure only these"
    )


def run(arguments: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    for name in arguments.parts:
        results += asyncio.run(PARTS[name](arguments.quick))
    return results
