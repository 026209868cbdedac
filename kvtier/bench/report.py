"""What every bench shares: results with bars, the machine's description, JSON and table output.

What must not live here: any measurement.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType

BENCHES = (
    "keys",
    "index",
    "copy",
    "store",
    "index-service",
    "text",
    "router",
    "worker",
    "cluster",
    "vllm",
    "peers",
    "batch",
)
"""Names of benches; a `-` in a name is a `_` in the name of its module."""


class Bar(Enum):
    """How a value is held against its bar."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One figure. `bar` None: informative only, always ok."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    kind: Bar = Bar.AT_LEAST
    interval: tuple[float, float] | None = None
    """Where the value lies with 95 % confidence, where that was computed."""

    @property
    def ok(self) -> bool:
        if self.bar is None:
            return True
        return self.value >= self.bar if self.kind is Bar.AT_LEAST else self.value <= self.bar

    def as_json(self) -> dict[str, object]:
        bar = None if self.bar is None else f"{self.kind.value} {self.bar:g}"
        told: dict[str, object] = {
            "name": self.name,
            "value": round(self.value, 6),
            "unit": self.unit,
            "bar": bar,
            "ok": self.ok,
        }
        if self.interval is not None:
            told["interval"] = [round(end, 6) for end in self.interval]
        return told


def machine() -> dict[str, object]:
    """What ran the bench: CPU model, cores usable, memory, Python, kernel."""
    model = platform.processor() or platform.machine()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": model,
        "cores": cores,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def print_table(bench: str, results: Sequence[Result]) -> None:
    width = max((len(result.name) for result in results), default=0)
    sys.stdout.write(f"kvtier bench {bench}\n")
    for result in results:
        bar = "" if result.bar is None else f"{result.kind.value} {result.bar:g}"
        mark = "" if result.bar is None else ("ok" if result.ok else "MISSED")
        line = (
            f"{result.name:<{width}}  {result.value:>12.4g} {result.unit:<12} {bar:<10} {mark:<7}"
        )
        if result.interval is not None:
            low, high = result.interval
            line += f" 95 %: {low:.4g} .. {high:.4g}"
        sys.stdout.write(line.rstrip() + "\n")


def module(bench: str) -> ModuleType:
    """The module of a bench, imported now."""
    return importlib.import_module(f"kvtier.bench.{bench.replace('-', '_')}")


def _kill_children() -> None:
    """End what was just being started when the signal came, and so is nobody's yet."""
    told = ""
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended has none
            told += children.read_text(encoding="ascii")
    for pid in map(int, told.split()):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def command(argv: list[str]) -> int:
    """`kvtier bench NAME [--json] [options]`; exit status 1 when a bar is missed.

    Raises KeyboardInterrupt at SIGTERM too.
    """
    parser = argparse.ArgumentParser(prog="kvtier bench", description="measure one part of kvtier")
    subparsers = parser.add_subparsers(dest="bench", required=True)
    name = next((word for word in argv if not word.startswith("-")), None)
    for bench in BENCHES:
        subparser = subparsers.add_parser(bench)
        subparser.add_argument("--json", action="store_true", help="print one JSON object")
        if bench == name:  # only the bench that is asked for is imported
            module(bench).add_arguments(subparser)
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], list[Result]] = module(arguments.bench).run
    # As Ctrl-C does it: what a bench has started ends with it.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = run(arguments)
    except KeyboardInterrupt:
        _kill_children()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if arguments.json:
        document = {
            "bench": arguments.bench,
            "machine": machine(),
            "results": [result.as_json() for result in results],
        }
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        print_table(arguments.bench, results)
    return 0 if all(result.ok for result in results) else 1
