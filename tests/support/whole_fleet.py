"""Two indexes, a store, three workers and a router as processes, and what clients get of them.

`w0` and `w1` serve one revision with blocks of 16 tokens, `w2` another with blocks of 32; all serve
`shared`. What must not live here: faults, what a test expects.
"""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.engines.transformers.tiny import write_byte_tokenizer
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command
from tests.harness.readiness import http_ready
from tests.router.front.rig import Answer, call
from tests.support.index_cluster import index_launch
from tests.support.store_cluster import store_launch
from tests.support.worker_cluster import MODEL, TOKEN_BYTES, worker_launch

MIB = 1 << 20
CONTEXT_TOKENS = 2048
POOL_BLOCKS = 256
"""Of w0 and w1 each."""
SHARED_SCOPE = ("red", "blue")
TENANTS = ("alice", "bob", "carol", *SHARED_SCOPE)
SECRET = "a cluster secret of thirty bytes"
_FAKE: Mapping[str, Any] = {
    "step_ms": 2.0,
    "token_bytes": TOKEN_BYTES,
    "context_tokens": CONTEXT_TOKENS,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client got, and what the router said of it."""

    answer: Answer

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def texts(self) -> list[str]:
        return [choice["text"] for choice in self.answer.json["choices"]]

    @property
    def cached(self) -> Mapping[str, int]:
        """Cached tokens by tier; those with none are left out."""
        tiers = self.answer.json["usage"]["kvtier"]["cached_tokens"]
        return {tier: count for tier, count in tiers.items() if count}

    @property
    def matched(self) -> int:
        """What the router expected to be there."""
        shown = self.answer.headers["x-kvtier-matched-tokens"]
        return sum(int(part.partition("=")[2]) for part in shown.split(",") if "=" in part)

    @property
    def worker(self) -> str:
        return self.answer.headers["x-kvtier-worker"]


@dataclass(slots=True)
class WholeFleet:
    """The processes of some tests. `start` fills it."""

    runner: ProcessRunner
    directory: Path
    flags: Sequence[str] = ()
    """More of them, of the router."""
    tokens_per_s: float = 20_000.0
    """How fast prompts are computed."""
    indexes: list[Process] = field(default_factory=list)
    store: Process = field(init=False)
    workers: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    router: Process = field(init=False)
    port: int = 0
    admin_port: int = 0

    def start(self) -> None:
        """Start everything side by side, as far as it can be."""
        runner, directory = self.runner, self.directory
        made = [index_launch(runner, name, lease_ms=3000) for name in ("index-a", "index-b")]
        told: dict[str, Any] = {"targets": [f"127.0.0.1:{port}" for _, port in made]}
        store, _ = store_launch(runner, directory / "data", index=told)
        socket = f"unix:{directory / 'data' / 'run' / 'store.sock'}"
        launches = [launch for launch, _ in made] + [store]
        for name in ("w0", "w1", "w2"):
            is_other = name == "w2"
            settings: dict[str, Any] = {
                "store": {"targets": [socket]},
                "offload": {"lookup_ms_max": 300},
                "index": told,
                "cache": {
                    "kv_memory_bytes": POOL_BLOCKS * 16 * TOKEN_BYTES,
                    "block_tokens": 32 if is_other else 16,
                },
                "model": {
                    "model": "fake",
                    "served_names": ["other" if is_other else MODEL, "shared"],
                    "fake": {
                        **_FAKE,
                        "prefill_tokens_per_s": self.tokens_per_s,
                        "seed": 1 if is_other else 0,
                    },
                },
            }
            launch, self.ports[name] = worker_launch(runner, name, **settings)
            launches.append(launch)
        started = runner.start_all([*launches, self._router(told)])
        self.indexes, self.store = started[:2], started[2]
        self.workers = dict(zip(self.ports, started[3:6], strict=True))
        self.router = started[6]

    def _router(self, told: Mapping[str, Any]) -> Launch:
        text = self.directory / "text"
        text.mkdir()
        write_byte_tokenizer(text, 1 << 20)
        (self.directory / "secret").write_text(SECRET)
        keys = self.directory / "keys.toml"
        keys.write_text("".join(map(_tenant, TENANTS)))
        keys.chmod(0o600)
        self.port, self.admin_port = free_port(), free_port()
        argv = kvtier_command(
            "router",
            f"--listen-bind=127.0.0.1:{self.port}",
            f"--admin-bind=127.0.0.1:{self.admin_port}",
            *(f"--index-targets={target}" for target in told["targets"]),
            f"--texts=*={text}",
            f"--keys-file={keys}",
            f"--cluster-secret-file={self.directory / 'secret'}",
            *self.flags,
        )
        ready = http_ready(f"http://127.0.0.1:{self.port}/ready")
        return Launch("router", argv, ready, ready_deadline_s=60.0)

    def ask(self, tenant: str, prompt: object, count: int, **fields: object) -> Asked:
        """One completion through the router, explained."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "temperature": 0, **fields}
        headers = {"authorization": f"Bearer {tenant}", "x-kvtier-explain": "1"}
        return Asked(
            call(self.port, "POST", "/v1/completions", body, headers=headers, timeout_s=60.0)
        )

    def ask_all(self, tenant: str, count: int, *rows: dict[str, object]) -> list[Asked]:
        """Several at once; each row has fields of one, its prompt among them."""
        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(lambda row: self.ask(tenant, count=count, **row), rows))

    def at(self, worker: str, prompt: Sequence[int], count: int, salt: str) -> Asked:
        """One completion of a worker itself."""
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": count, "temperature": 0}
        body["cache_salt"] = salt
        headers = {"x-kvtier-explain": "1"}
        return Asked(call(self.ports[worker], "POST", "/v1/completions", body, headers=headers))

    def metric(self, name: str, port: int | None = None) -> float:
        """The sum of all series of a metric of the router, or of the process at a port."""
        page = call(port or self.admin_port, "GET", "/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def clean_logs(self) -> None:
        """Fails where a process logged an error that nobody handled."""
        for process in (*self.indexes, self.store, *self.workers.values(), self.router):
            lines = process.log_text().splitlines()
            # What gRPC says itself of a caller whose deadline met its answer is no error of ours.
            errors = [line for line in lines if "Traceback" in line and "grpc._cython" not in line]
            assert errors == [], process.name


def _tenant(name: str) -> str:
    scope = 'scope = "team"\n' if name in SHARED_SCOPE else ""
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f'[[tenant]]\nid = "{name}"\n{scope}[[tenant.key]]\nsha256 = "{digest}"\n'
