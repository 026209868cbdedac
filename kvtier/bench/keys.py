"""How many tokens a second become prefix keys, from an array and from a list.

What must not live here: whether the keys are right (tests/core/test_keys.py).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from kvtier import _native
from kvtier.bench.report import Result
from kvtier.core.keys import prefix_keys

ROOT = bytes(range(32))
BAR_TOKENS_MILLIONS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=1 << 17, help="tokens of one prompt")
    parser.add_argument("--repeats", type=int, default=101, help="the median of so many")


def run(arguments: argparse.Namespace) -> list[Result]:
    tokens = np.random.default_rng(1).integers(0, 150_000, arguments.tokens, np.uint32)
    as_list = tokens.tolist()
    calls: dict[str, Callable[[], object]] = {
        "prefix keys, 64-token blocks, array": lambda: prefix_keys(ROOT, tokens, 64),
        "prefix keys, 16-token blocks, list": lambda: prefix_keys(ROOT, as_list, 16),
    }
    for path in _native.SHA256_PATHS:
        name = f"native chain, 16-token blocks, array, {path}"
        calls[name] = partial(_native.prefix_chain, ROOT, tokens, 16, None, path)
    barred = Result(
        "prefix keys, 16-token blocks, array",
        rate(arguments, lambda: prefix_keys(ROOT, tokens, 16)),
        "M tokens/s",
        BAR_TOKENS_MILLIONS,
    )
    return [barred] + [
        Result(name, rate(arguments, call), "M tokens/s") for name, call in calls.items()
    ]


def rate(arguments: argparse.Namespace, call: Callable[[], object]) -> float:
    """Millions of tokens a second, median over the repeats."""
    seconds = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    tokens_count = int(arguments.tokens)
    return tokens_count / statistics.median(seconds) / 1e6
