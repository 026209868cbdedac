"""A fleet whose workers are replaced one by one, and conversations that go on meanwhile.

An index, a store, three workers with the fake model and a router, as processes. What must not live
here: which worker goes when, what a test expects.
"""

import json
import random
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any

from kvtier.engines.transformers.tiny import write_byte_tokenizer
from tests.harness.ports import free_port
from tests.harness.processes import (
    Launch,
    Process,
    ProcessRunner,
    clean_environment,
    kvtier_command,
)
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually
from tests.router.front.rig import call, events
from tests.support.index_cluster import index_launch
from tests.support.store_cluster import store_launch
from tests.support.worker_cluster import MODEL, worker_launch

MIB = 1 << 20
TOKEN_BYTES = 256
WORKERS = ("w0", "w1", "w2")
SLOTS = 24
"""Conversations at once; each has one request under way at most."""
CLIENTS = 6
WINDOW = 36
"""Requests of one window: one and a half of each conversation, a second or two of this load. A
window by time would hold more of them on a faster machine, and so forgive more."""
_SHARED_TOKENS = 64
_OWN_TOKENS = 448
_TURN_TOKENS = 32
_CONTEXT_TOKENS = 1 << 14
_ANSWER_TOKENS = 4
_THINKS_S = 0.1
"""A client's pause before it asks again: what the load costs, not what anybody waits for."""
_WAIT_S = 120.0

HANDS_OVER: dict[str, Any] = {"write_ms_max": 20_000, "prefetch_ms_max": 20_000}
TAKES_OVER_ONLY: dict[str, Any] = {"write_ms_max": 0, "prefetch_ms_max": 20_000}
HANDS_NOTHING_OVER: dict[str, Any] = {"write_ms_max": 0, "prefetch_ms_max": 0}


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request came to."""

    prompt_tokens: int
    cached_tokens: int
    worker: str = ""
    """Who answered."""
    slot: int = -1
    turn: int = -1
    failure: str = ""
    """Why it failed; empty: it did not."""


def hit_rate(samples: Sequence[Sample]) -> float:
    """Cached tokens of all prompt tokens."""
    return sum(s.cached_tokens for s in samples) / max(1, sum(s.prompt_tokens for s in samples))


def worst_window(samples: Sequence[Sample], size: int = WINDOW) -> float:
    """The lowest hit rate of any `size` requests that ended one after another."""
    assert len(samples) >= size, "too few requests for a window"
    return min(hit_rate(samples[at : at + size]) for at in range(len(samples) - size + 1))


def prompt_of(slot: int, turn: int, topic: int = 0) -> list[int]:
    """A conversation at a turn: what some share, its own beginning, and what was said since.

    Those of another topic have no block in common with it.
    """
    shared, own = random.Random(f"shared {topic} {slot % 3}"), random.Random(f"{topic} {slot}")
    tokens = [shared.randrange(256) for _ in range(_SHARED_TOKENS)]
    said = min(_OWN_TOKENS + turn * _TURN_TOKENS, _CONTEXT_TOKENS - _SHARED_TOKENS - 64)
    return tokens + [own.randrange(256) for _ in range(said)]


class Conversations:
    """Clients that go on asking; `samples` grows in the order in which answers ended."""

    def __init__(self, port: int, topic: int = 0) -> None:
        self.topic = topic
        self.samples: list[Sample] = []
        self._port = port
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(range(client, SLOTS, CLIENTS),))
            for client in range(CLIENTS)
        ]

    @contextmanager
    def going_on(self) -> Iterator["Conversations"]:
        """Ask until this is left."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(_WAIT_S)

    def after(self, count: int) -> int:
        """Wait until so many more requests have ended; returns how many have in all."""
        goal = len(self.samples) + count
        eventually(lambda: len(self.samples) >= goal, _WAIT_S, f"{count} more answers")
        return len(self.samples)

    def _ask_on(self, slots: Sequence[int]) -> None:
        for turn in count():
            for slot in slots:
                if self._stop.wait(_THINKS_S):
                    return
                self.samples.append(replace(self._ask(slot, turn), slot=slot, turn=turn))

    def _ask(self, slot: int, turn: int) -> Sample:
        prompt, streams = prompt_of(slot, turn, self.topic), (slot + turn) % 2 > 0
        body: dict[str, object] = {
            "model": MODEL, "prompt": prompt, "max_tokens": _ANSWER_TOKENS, "temperature": 0,
        }  # fmt: skip
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            answer = call(self._port, "POST", "/v1/completions", body, timeout_s=_WAIT_S)
        except (OSError, HTTPException) as error:
            return Sample(0, 0, failure=type(error).__name__)
        if answer.status != 200:
            return Sample(0, 0, failure=f"{answer.status} {answer.body[:200]!r}")
        worker = answer.headers["x-kvtier-worker"]
        if not streams:
            return _sample(json.loads(answer.body)["usage"], worker)
        told = events(answer.body)
        if not told or told[-1] != "[DONE]" or any("error" in one for one in told[:-1]):
            return Sample(0, 0, failure=f"a broken stream: {answer.body[-200:]!r}")
        usage = next(one["usage"] for one in reversed(told[:-1]) if one.get("usage"))
        return _sample(usage, worker)


def _sample(usage: Any, worker: str) -> Sample:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Sample(usage["prompt_tokens"], cached, worker)


def busiest(samples: Sequence[Sample]) -> str:
    """The worker that answered most of them."""
    return Counter(sample.worker for sample in samples).most_common(1)[0][0]


@dataclass(slots=True)
class RollingFleet:
    """The processes. `start` fills it."""

    runner: ProcessRunner
    directory: Path
    write_policy: str = "on_evict"
    """Of the workers: with this one the store has nothing, as long as their pools have room."""
    workers: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    others: list[Process] = field(default_factory=list)
    port: int = 0
    admin_port: int = 0
    _told: dict[str, Any] = field(default_factory=dict)
    _lives: int = 0

    def start(self, hot_set: dict[str, Any]) -> None:
        """Start all of them side by side."""
        index, index_port = index_launch(self.runner, "index", lease_ms=3000)
        self._told = {"targets": [f"127.0.0.1:{index_port}"]}
        dram = {"bytes_max": 128 * MIB, "slab_bytes": MIB, "blocks_max": 1 << 16}
        store, _ = store_launch(
            self.runner,
            self.directory / "data",
            index=self._told,
            dram=dram,
        )
        self.ports = {name: free_port() for name in WORKERS}
        launches = [self._worker(name, hot_set) for name in WORKERS]
        started = self.runner.start_all([index, store, self._router(), *launches])
        self.others = started[:3]
        self.workers = dict(zip(WORKERS, started[3:], strict=True))

    def replace(self, name: str, hot_set: dict[str, Any]) -> None:
        """Start a successor of a worker that has ended, under its name and address."""
        self.workers[name] = self.runner.start(self._worker(name, hot_set))

    def end(self, name: str) -> str:
        """Ask a worker to end as Kubernetes does, and wait; returns what it logged."""
        process = self.workers[name]
        process.terminate()
        assert process.wait(60.0) == 0, process.log_tail()
        return process.log_text()

    def drain(self, name: str) -> None:
        """What a preStop hook does."""
        url = f"http://127.0.0.1:{self.ports[name]}"
        argv = kvtier_command("worker", "drain", url)
        ended = subprocess.run(
            argv, env=clean_environment(), capture_output=True, timeout=90, check=False
        )
        assert ended.returncode == 0, ended.stderr

    def tiers(self, name: str, prompt: list[int]) -> dict[str, int]:
        """From where a worker itself has how many tokens of a prompt."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        headers = {"x-kvtier-explain": "1"}
        answer = call(self.ports[name], "POST", "/v1/completions", body, headers, _WAIT_S)
        assert answer.status == 200, answer.body
        cached: dict[str, int] = answer.json["usage"]["kvtier"]["cached_tokens"]
        return {tier: tokens for tier, tokens in cached.items() if tokens}

    def metric(self, name: str, port: int) -> float:
        """The sum of all series whose line begins so, of the process at a port."""
        page = call(port, "GET", "/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def clean_logs(self) -> None:
        """Fails where a process logged an error that nobody handled."""
        for process in (*self.others, *self.workers.values()):
            errors = [
                line
                for line in process.log_text().splitlines()
                if "Traceback" in line and "grpc._cython" not in line
            ]
            assert errors == [], process.name

    def _worker(self, name: str, hot_set: dict[str, Any]) -> Launch:
        self._lives += 1
        settings: dict[str, Any] = {
            "instance": name,
            "listen": {"bind": f"127.0.0.1:{self.ports[name]}"},
            "store": {"targets": [f"unix:{self.directory / 'data' / 'run' / 'store.sock'}"]},
            "index": self._told,
            "cache": {"kv_memory_bytes": 96 * MIB},
            "drain_ms_max": 20_000,
            "offload": {"lookup_ms_max": 2000, "write_policy": self.write_policy},
            "hot_set": hot_set,
            "model": {
                "model": "fake",
                "fake": {
                    "prefill_tokens_per_s": 1500.0,
                    "step_ms": 2.0,
                    "token_bytes": TOKEN_BYTES,
                    "context_tokens": _CONTEXT_TOKENS,
                },
            },
        }
        launch, _ = worker_launch(self.runner, f"{name}.{self._lives}", **settings)
        ready = http_ready(f"http://127.0.0.1:{self.ports[name]}/health")
        return Launch(launch.name, launch.argv, ready=ready, ready_deadline_s=90.0)

    def _router(self) -> Launch:
        text = self.directory / "text"
        text.mkdir()
        write_byte_tokenizer(text, 1 << 20)
        self.port, self.admin_port = free_port(), free_port()
        argv = kvtier_command(
            "router",
            f"--listen-bind=127.0.0.1:{self.port}",
            f"--admin-bind=127.0.0.1:{self.admin_port}",
            f"--index-targets={self._told['targets'][0]}",
            f"--texts=*={text}",
        )
        ready = http_ready(f"http://127.0.0.1:{self.port}/ready")
        return Launch("router", argv, ready, ready_deadline_s=90.0)
