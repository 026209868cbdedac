"""The router between clients' connections and mock workers whose time is a recorded profile.

Index, workers and routers are processes of their own, started as an operator starts them; the parts
are in `router_*`, this module puts them together. The row of the conversation trace is left out,
with a line on standard error, where the trace is not there. `--quick` shrinks everything for a
smoke test: its figures mean nothing.
"""

import argparse
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from kvtier.bench import router_cost, router_scale, router_spread, router_streams, router_trace
from kvtier.bench.report import Result
from kvtier.bench.router_fleet import model_directory

ROOT: Final = Path(__file__).resolve().parents[2]
TRACE: Final = ROOT.parent / "shared" / "traces" / "mooncake" / "conversation_trace.jsonl"
TRACE_ROW: Final = "trace"

Row = Callable[["Inputs", bool], Awaitable[list[Result]]]
"""Measures one row; true: quickly."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files that rows need."""

    texts: Path
    """Directory of tokenizer and chat template."""
    trace: Path


_Cost = router_cost.CostSizes
_Spread = router_spread.SpreadSizes
_Scale = router_scale.ScaleSizes
_Streams = router_streams.StreamSizes
_Trace = router_trace.TraceSizes

ROWS: Final[dict[str, Row]] = {
    "cpu": lambda at, q: router_cost.cpu(at.texts, router_cost.QUICK if q else _Cost()),
    "latency": lambda at, q: router_cost.latency(at.texts, router_cost.QUICK if q else _Cost()),
    "turns": lambda at, q: router_cost.turns(at.texts, router_cost.QUICK if q else _Cost()),
    "spread": lambda _, q: router_spread.spread(router_spread.QUICK if q else _Spread()),
    TRACE_ROW: lambda at, q: router_trace.trace(
        at.trace, at.texts, router_trace.QUICK if q else _Trace()
    ),
    "slow": lambda _, q: router_spread.slow(router_spread.QUICK if q else _Spread()),
    "routers": lambda _, q: router_scale.routers(router_scale.QUICK if q else _Scale()),
    "siblings": lambda _, q: router_scale.siblings(router_scale.QUICK if q else _Scale()),
    "index-loss": lambda _, q: router_scale.index_loss(router_scale.QUICK if q else _Scale()),
    "streams": lambda _, q: router_streams.streams(router_streams.QUICK if q else _Streams()),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="tiny sizes; do not quote the figures")
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=list(ROWS), help="measure only these rows"
    )
    parser.add_argument("--model", type=Path, help="directory with tokenizer.json and template")
    parser.add_argument(
        "--trace", type=Path, default=TRACE, help="Mooncake's conversation trace, JSON lines"
    )


def run(arguments: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    with model_directory(arguments.model) as texts:
        for name in arguments.only:
            if name == TRACE_ROW and not arguments.trace.is_file():
                sys.stderr.write(f"no trace at {arguments.trace.name}: give --trace; row skipped\n")
                continue
            inputs = Inputs(texts, arguments.trace)
            begun = time.monotonic()
            results += uvloop.run(_row(name, inputs, quick=arguments.quick))
            sys.stderr.write(f"{name}: {time.monotonic() - begun:.0f} s\n")
    return results


async def _row(name: str, inputs: Inputs, *, quick: bool) -> list[Result]:
    return await ROWS[name](inputs, quick)
