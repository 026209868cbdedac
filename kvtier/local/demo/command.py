"""`kvtier demo`: see `kvtier.local.demo`.

What must not live here: the phases.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, UnavailableError
from kvtier.local.cluster import RunningCluster, running
from kvtier.local.demo import report
from kvtier.local.demo.chats import CHATS, system_prompt
from kvtier.local.demo.client import Asking, ask
from kvtier.local.demo.judging import PhaseResult, judged
from kvtier.local.demo.phases import Demo, Terms
from kvtier.local.models import text_directory
from kvtier.local.settings import Cluster, merged, read_cluster
from kvtier.text import TextModel

_ABOUT: Final = """Runs several users' chats over a shared system prompt on a cluster of this
machine, in phases: cold, repeated, after restarts of workers and store, on another worker, cache
off. Other flags are those of `kvtier up`."""
_BLOCK_TOKENS: Final = 16
_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for."""

    cluster: Cluster
    out: Path
    tokens_max: int
    asking: Asking = ask
    """How the cluster is asked."""


def command(argv: list[str]) -> int:
    """Entry point: exit status 1 where an answer differs or a phase missed the tier it names."""
    parser = argparse.ArgumentParser(prog="kvtier demo", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--out", default="kvtier-demo", help="directory of demo.json, demo.png")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    told, rest = parser.parse_known_args(argv)
    if told.tokens < 1:
        raise ConfigError(f"--tokens must be positive, got {told.tokens}")
    with _directory(rest) as flags:
        wish = Wish(demo_cluster(flags), Path(told.out), told.tokens)
        if wish.cluster.config.workers < 2:
            raise ConfigError("the demo needs two workers")
        return asyncio.run(demonstrate(wish))


async def demonstrate(wish: Wish) -> int:
    """Run the demo on a cluster of its own, print and write what it came to; the exit status."""
    main = asyncio.current_task()
    assert main is not None
    asked = asyncio.Event()

    def stop() -> None:
        if not asked.is_set():
            asked.set()
            main.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    started_at = time.monotonic()
    try:
        async with running(wish.cluster) as cluster:
            try:
                results = judged(await _phases(wish, cluster))
            except asyncio.CancelledError:
                cluster.supervisor.kill()  # nobody waits for the answer that is under way
                raise
    except asyncio.CancelledError:
        if not asked.is_set():
            raise
        return _INTERRUPTED
    return concluded(wish, results, time.monotonic() - started_at)


async def _phases(wish: Wish, cluster: RunningCluster) -> list[PhaseResult]:
    directory = text_directory(wish.cluster.config.model)
    if directory is None or not cluster.models:
        raise UnavailableError("the demo needs a model whose tokenizer is on this machine")
    text = await asyncio.to_thread(TextModel.load, directory)
    system = system_prompt(lambda prompt: len(text.encode(prompt)))
    terms = Terms(cluster.models[0], system, wish.tokens_max, wish.asking)
    turns = len(CHATS[0].questions)
    _say(
        f"\n{len(CHATS)} users, {turns} turns each, over a shared system prompt of "
        f"{len(text.encode(system))} tokens, on {cluster.models[0]}\n"
    )
    return await Demo(cluster, terms, lambda name: _say(f"phase: {name}")).run()


def concluded(wish: Wish, results: Sequence[PhaseResult], took_s: float) -> int:
    """Print and write the results; the exit status."""
    model = wish.cluster.config.model
    wish.out.mkdir(parents=True, exist_ok=True)
    shown = report.as_json(results, model) | {"took_s": took_s}
    (wish.out / "demo.json").write_text(json.dumps(shown, indent=1), encoding="utf-8")
    sys.stdout.write(f"\n{report.table(results)}\n")
    try:
        report.plot(results, f"kvtier demo, {model}", wish.out / "demo.png")
    except ConfigError as error:
        _say(str(error))
    complaints = [found for one in results if (found := one.complaint())]
    for complaint in complaints:
        sys.stdout.write(f"FAILED  {complaint}\n")
    sys.stdout.write(f"{took_s:.0f} s; written to {wish.out}: demo.json, demo.png\n")
    return 1 if complaints else 0


@contextlib.contextmanager
def _directory(flags: Sequence[str]) -> Iterator[list[str]]:
    """The flags with a data directory; one that ends with the demo where none is given."""
    if any(flag == "--data-dir" or flag.startswith("--data-dir=") for flag in flags):
        yield list(flags)
        return
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-", ignore_cleanup_errors=True) as made:
        yield [*flags, "--data-dir", made]


def demo_cluster(flags: Sequence[str]) -> Cluster:
    """The cluster of the flags, with what suits one request at a time."""
    cluster = read_cluster(flags, {"bind": "127.0.0.1:0"})
    threads = len(os.sched_getaffinity(0))
    worker = merged({"model": {"threads": threads}}, cluster.sections["worker"])
    worker = merged(worker, {"cache": {"block_tokens": _BLOCK_TOKENS}})
    # A phase restarts workers to empty them: nothing must be brought back before it asks.
    worker = merged(worker, {"hot_set": {"prefetch_ms_max": 0}})
    return replace(cluster, sections={**cluster.sections, "worker": worker})


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
