"""A whole batch of many prompts, its process killed in the midst: memory, pace, every row once.

`kvtier batch` as a process, against a fleet that answers at once (`batch_mock.py`), so the pace is
that of the batch itself. Prompts of a group begin alike; groups are dealt out in turn, which is the
order that uses a cache worst. What must not live here: the fleet, figures of models.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from kvtier.batch.running import read_summary
from kvtier.bench.report import Bar, Result
from kvtier.errors import KvtierError
from kvtier.local.probes import http_json

SHARED_BYTES: Final = 640
MEMORY_MIB_MAX: Final = 512.0
WINDOW: Final = 64
_LOOK_S: Final = 0.2
_MIB: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--groups", type=int, default=2_000, help="prompts of one begin alike")
    parser.add_argument("--folder", type=Path, help="for some 3 kB a row; default: temporary")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measure. KvtierError where the batch does not do what it should."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, _fleet() as port:
        root = Path(folder)
        _write(root / "rows.jsonl", arguments.rows, arguments.groups)
        batch = _Batch(root, port)
        first = batch.until(arguments.rows // 2)
        second = batch.until(arguments.rows)
        told = http_json(f"127.0.0.1:{port}", "/counts")
        requests = cast("dict[str, int]", told)["requests"]
        require_each_once(root / "out" / "results.jsonl", arguments.rows)
        summary = read_summary(root / "out")
    again = requests - arguments.rows
    before = cast("int", summary["rows_of_earlier_runs"])
    estimates = cast("dict[str, int]", summary["estimates"])
    tokens = cast("int", summary["prompt_tokens"])
    return [
        Result("rows", arguments.rows, ""),
        Result("reading and grouping", arguments.rows / first.ready_s, "rows/s"),
        Result("sending", (arguments.rows - before) / second.sending_s, "rows/s"),
        Result("until a killed batch sends again", second.ready_s, "s"),
        Result("done when it was killed", before, "rows"),
        Result("sent again after the kill", again, "rows", WINDOW, Bar.AT_MOST),
        Result("peak memory", first.peak_mib, "MiB", MEMORY_MIB_MAX, Bar.AT_MOST),
        Result("peak memory after the kill", second.peak_mib, "MiB", MEMORY_MIB_MAX, Bar.AT_MOST),
        Result("hit rate", cast("float", summary["hit_rate"]), ""),
        Result("hit rate in the order of the input", _share(estimates, "input_order", tokens), ""),
        Result("hit rate of engines alone", _share(estimates, "engines_alone", tokens), ""),
    ]


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the batch's process."""

    ready_s: float
    """From its start to its first row."""
    sending_s: float
    peak_mib: float


class _Batch:
    """The batch, started as often as it is asked for."""

    def __init__(self, root: Path, port: int) -> None:
        self._results = root / "out" / "results.jsonl"
        self._log = root / "batch.log"
        self._argv = [
            sys.executable, "-m", "kvtier.batch", "--inputs", str(root / "rows.jsonl"),
            "--out", str(root / "out"), "--urls", f"http://127.0.0.1:{port}", "--model", "mock",
            "--window", str(WINDOW),
        ]  # fmt: skip

    def until(self, rows: int) -> Life:
        """Start it, and kill it when about so many rows are done, or wait for its end."""
        began, size = time.monotonic(), self._size()
        line_bytes, ready_s, peak = 0.0, 0.0, 0.0
        with self._log.open("ab") as log:
            process = subprocess.Popen(self._argv, stdout=log, stderr=log)  # noqa: S603 (ours)
        try:
            while process.poll() is None:
                time.sleep(_LOOK_S)
                peak = max(peak, _peak_mib(process.pid))
                if not ready_s and self._size() > size:
                    ready_s = time.monotonic() - began
                    with self._results.open("rb") as file:
                        line_bytes = len(file.readline())
                if line_bytes and size == 0 and self._size() > rows * line_bytes:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    break
        finally:
            process.kill()
            process.wait()
        if process.returncode not in {0, -signal.SIGKILL}:
            raise KvtierError(self._log.read_text(encoding="utf-8")[-2_000:])
        return Life(ready_s, time.monotonic() - began - ready_s, peak)

    def _size(self) -> int:
        return self._results.stat().st_size if self._results.exists() else 0


def _write(path: Path, rows: int, groups: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            shared = f"You are assistant {number % groups} of the house. ".ljust(80, "-")
            prompt = shared * (SHARED_BYTES // 80) + f"Question {number}: what is {number} times 7?"
            file.write(json.dumps({"custom_id": f"row-{number}", "prompt": prompt}) + "\n")


def require_each_once(results: Path, rows: int) -> None:
    """KvtierError where a row of the input is not in the results exactly once."""
    seen = bytearray(rows)
    with results.open("rb") as file:
        for line in file:
            seen[int(json.loads(line)["custom_id"].removeprefix("row-"))] += 1
    if seen.count(1) != rows:
        raise KvtierError(f"{rows - seen.count(1)} rows are not there exactly once")


def _share(estimates: dict[str, int], name: str, tokens: int) -> float:
    return estimates[f"{name}_cached_tokens"] / tokens


def _peak_mib(pid: int) -> float:
    """What the kernel says of its memory; 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    found = [line for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) * 1024 / _MIB if found else 0.0


@contextmanager
def _fleet() -> Iterator[int]:
    """The port of a fleet that answers while entered."""
    argv = [sys.executable, "-m", "kvtier.bench.batch_mock"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603 (ours)
        try:
            assert process.stderr is not None
            yield int(process.stderr.readline().removeprefix("port="))
        finally:
            process.kill()
