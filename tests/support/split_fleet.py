"""A router over workers with roles, one or two stores and an index, as processes.

`p` computes prompts, `d` answers, `b` does both; `d` may live on a node and at a store of its own.
What must not live here: faults, what a test expects.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvtier.engines.transformers.tiny import write_byte_tokenizer
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually
from tests.router.front.rig import Answer, call, events
from tests.support.index_cluster import index_launch
from tests.support.store_cluster import store_launch
from tests.support.worker_cluster import MODEL, TOKEN_BYTES, worker_launch

MIB = 1 << 20
TENANTS = ("alice", "bob", "carol")
SECRET = "a cluster secret of thirty bytes"
ROLES = {"p": "prefill", "d": "decode", "b": "both"}


@dataclass(frozen=True, slots=True)
class SplitTerms:
    """What the fleet is like."""

    split: str = "always"
    workers: Sequence[str] = ("p", "d")
    is_apart: bool = False
    """`d` has a node and a store of its own."""
    tokens_per_s: float = 1000.0
    step_ms: float = 5.0
    tokens_min: int = 256


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client got."""

    status: int
    headers: Mapping[str, str]
    texts: list[str]
    usage: Mapping[str, Any]

    @property
    def cached(self) -> dict[str, int]:
        """Cached tokens by tier; those with none are left out."""
        tiers = self.usage["kvtier"]["cached_tokens"]
        return {tier: count for tier, count in tiers.items() if count}

    @property
    def counted_cached(self) -> int:
        """What the answer itself says was cached."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def workers(self) -> tuple[str | None, str]:
        """Who computed the prompt beforehand, and who answered."""
        return self.headers.get("x-kvtier-prefill-worker"), self.headers["x-kvtier-worker"]


@dataclass(slots=True)
class SplitFleet:
    """See the module; `start` fills it."""

    runner: ProcessRunner
    directory: Path
    terms: SplitTerms = field(default_factory=SplitTerms)
    stores: list[Process] = field(default_factory=list)
    workers: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    port: int = 0
    admin_port: int = 0
    routers: list[Process] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    """How the index is reached."""

    def start(self) -> None:
        """Start everything side by side, and wait until the router knows all workers."""
        runner, directory, terms = self.runner, self.directory, self.terms
        index, index_port = index_launch(runner, "index", lease_ms=3000)
        self.told = told = {"targets": [f"127.0.0.1:{index_port}"]}
        self._write_files()
        names = ["store-1", "store-2"][: 1 + terms.is_apart]
        stores = [
            store_launch(
                runner, directory / name, name, index=told, node=f"node-{name[-1]}",
                dram={"bytes_max": 64 * MIB, "slab_bytes": MIB, "blocks_max": 8192},
            )[0]
            for name in names
        ]  # fmt: skip
        launches = [index, *stores]
        for name in terms.workers:
            number = 1 + (terms.is_apart and name == "d")
            settings: dict[str, Any] = {
                "role": ROLES[name],
                "node": f"node-{number}",
                "store": {"targets": [f"unix:{directory}/store-{number}/run/store.sock"]},
                "offload": {"store_instance": f"store-{number}", "lookup_ms_max": 2000},
                "index": told,
                "cache": {"kv_memory_bytes": 8 * MIB},
                "model": {
                    "model": "fake",
                    "fake": {
                        "prefill_tokens_per_s": terms.tokens_per_s,
                        "step_ms": terms.step_ms,
                        "token_bytes": TOKEN_BYTES,
                    },
                },
                "batch": {"step_tokens_max": 128},
            }
            launch, self.ports[name] = worker_launch(runner, name, **settings)
            launches.append(launch)
        started = runner.start_all([*launches, self._router(terms.split)])
        self.stores = started[1 : 1 + len(stores)]
        self.workers = dict(zip(self.ports, started[1 + len(stores) : -1], strict=True))
        self.routers.append(started[-1])
        self._meet()

    @contextmanager
    def seen_by(self, split: str) -> Iterator["SplitFleet"]:
        """The same fleet through another router, that splits otherwise, while entered."""
        other = copy.copy(self)
        router = self.runner.start(other._router(split))
        self.routers.append(router)
        try:
            other._meet()
            yield other
        finally:
            router.end()

    def _meet(self) -> None:
        count = len(self.terms.workers)
        eventually(
            lambda: self.metric("kvtier_router_eligible_workers") >= count, 30, "all are known"
        )

    def _write_files(self) -> None:
        text = self.directory / "text"
        text.mkdir()
        write_byte_tokenizer(text, 1 << 20)
        (self.directory / "secret").write_text(SECRET)
        keys = self.directory / "keys.toml"
        keys.write_text("".join(map(_tenant, TENANTS)))
        keys.chmod(0o600)

    def _router(self, split: str) -> Launch:
        directory = self.directory
        self.port, self.admin_port = free_port(), free_port()
        argv = kvtier_command(
            "router",
            f"--listen-bind=127.0.0.1:{self.port}",
            f"--admin-bind=127.0.0.1:{self.admin_port}",
            *(f"--index-targets={target}" for target in self.told["targets"]),
            f"--texts=*={directory / 'text'}",
            f"--keys-file={directory / 'keys.toml'}",
            f"--cluster-secret-file={directory / 'secret'}",
            f"--split={split}",
            f"--split-tokens-min={self.terms.tokens_min}",
        )
        ready = http_ready(f"http://127.0.0.1:{self.port}/ready")
        return Launch(f"router-{split}", argv, ready, ready_deadline_s=60.0)

    def ask(self, prompt: object, count: int, tenant: str = "alice", **fields: object) -> Asked:
        """One completion through the router, explained, in one piece or as a stream."""
        body = _body(prompt, count) | fields
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {tenant}", "x-kvtier-explain": "1"}
        answer = call(self.port, "POST", "/v1/completions", body, headers=headers, timeout_s=90.0)
        return _streamed(answer) if body.get("stream") else _whole(answer)

    def stream(self, prompt: object, count: int, tenant: str = "alice") -> HTTPConnection:
        """A connection on which a streamed completion was asked for."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=90.0)
        body = json.dumps(_body(prompt, count) | {"stream": True})
        headers = {"authorization": f"Bearer {tenant}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection

    def explained(self, prompt: object) -> dict[str, Any]:
        """What the router would do with a prompt."""
        body = _body(prompt, 4) | {"kvtier": {"path": "/v1/completions"}}
        told: dict[str, Any] = call(self.admin_port, "POST", "/route", body).json
        return told

    def splits(self, outcome: str = "split", reason: str = "") -> float:
        """How many requests the router counts so."""
        page = call(self.admin_port, "GET", "/metrics").body.decode()
        wanted = (f'outcome="{outcome}"', f'reason="{reason}' if reason else "")
        lines = [one for one in page.splitlines() if one.startswith("kvtier_router_splits_total{")]
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if all(part in line for part in wanted)
        )

    def metric(self, name: str, worker: str | None = None) -> float:
        """The sum of all series of a metric of the router, or of a worker."""
        port = self.admin_port if worker is None else self.ports[worker]
        page = call(port, "GET", "/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def is_busy(self, worker: str) -> bool:
        """Whether a worker answers somebody beside whoever asks this."""
        return self.metric("kvtier_endpoint_requests_running", worker) >= 2

    def clean_logs(self) -> None:
        """Fails where a process logged an error that nobody handled."""
        for process in (*self.stores, *self.workers.values(), *self.routers):
            lines = process.log_text().splitlines()
            errors = [line for line in lines if "Traceback" in line and "grpc._cython" not in line]
            assert errors == [], process.name


def _body(prompt: object, count: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0}


def _whole(answer: Answer) -> Asked:
    told = answer.json
    texts = [choice["text"] for choice in told.get("choices", ())]
    return Asked(answer.status, answer.headers, texts, told.get("usage", {}))


def _streamed(answer: Answer) -> Asked:
    parts: dict[int, str] = {}
    usage: Mapping[str, Any] = {}
    for chunk in events(answer.body):
        if chunk == "[DONE]":
            return Asked(answer.status, answer.headers, [parts[n] for n in sorted(parts)], usage)
        for choice in chunk["choices"]:
            parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
        usage = chunk.get("usage") or usage
    raise AssertionError(f"a stream without an end: {answer.status} {answer.body[-300:]!r}")


def _tenant(name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[[tenant]]\nid = "{name}"\n[[tenant.key]]\nsha256 = "{digest}"\n'
