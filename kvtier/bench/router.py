"""The router between real clients' connections and mock workers whose time is a recorded profile.

Index, workers and routers are processes of their own, started as an operator starts them; the parts
are in `router_*`, this module puts them together. Rows that need the conversation trace are left
out, with a line on standard error, where it is not there. `--quick` shrinks everything for a smoke
test: its figures mean nothing.
"""

import argparse
from pathlib import Path

import uvloop

from kvtier.bench import router_cost
from kvtier.bench.report import Result
from kvtier.bench.router_fleet import model_directory

ROWS = tuple(router_cost.ROWS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny sizes; do not quote the figures")
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=list(ROWS), help="measure only these rows"
    )
    parser.add_argument("--model", type=Path, help="directory with tokenizer.json and template")


def run(arguments: argparse.Namespace) -> list[Result]:
    with model_directory(arguments.model) as texts:
        results: list[Result] = []
        for name in arguments.only:
            results += uvloop.run(measure(name, texts, quick=arguments.quick))
        return results


async def measure(name: str, texts: Path, *, quick: bool) -> list[Result]:
    """One row."""
    sizes = router_cost.QUICK if quick else router_cost.CostSizes()
    return await router_cost.ROWS[name](texts, sizes)
