"""Real vLLM servers, the bridges beside them, and index, store and router, as an operator starts
them; and a client that takes their time.

What must not live here: what is measured, fakes of vLLM.
"""

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from kvtier.bench.toml_text import toml_text
from kvtier.errors import BackendError, UnavailableError
from kvtier.local.loopback import free_port

BLOCK_TOKENS: Final = 32
MODEL: Final = "m"
CLUSTER_SECRET: Final = "a secret of the cluster"  # noqa: S105 (of processes on loopback)
"""Of routers that have keys."""
_REVISION: Final = "bench"
_START_S: Final = 400.0
_END_S: Final = 15.0
_ANSWER_S: Final = 300.0
_POLL_S: Final = 0.1
_LOOK_S: Final = 5.0
_TAIL_BYTES: Final = 4000
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to."""

    ttft_s: float
    """From sending it to its first token."""
    total_s: float
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, as the engine says in its usage."""
    worker: str
    """As the router says; empty of a server itself."""
    matched: str
    """What the router expected to be there, by source; empty of a server itself."""


@dataclass(slots=True)
class Endpoint:
    """Something that speaks OpenAI HTTP. Each request has a connection of its own: beside what a
    CPU takes for a prompt nobody sees it."""

    port: int
    token: str | None = None

    def sibling(self, token: str) -> "Endpoint":
        """The same with another credential."""
        return Endpoint(self.port, token)

    def ask(self, prompt: Sequence[int], tokens_count: int, **fields: object) -> Answer:
        """A greedy streamed completion of a prompt of tokens. BackendError for any but a 200."""
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": tokens_count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        sent = json.dumps(body | fields)
        began = time.perf_counter()
        with self._answered("/v1/completions", sent) as response:
            return _streamed(response, began)

    def forget(self) -> None:
        """Have a vLLM server drop what it has cached itself."""
        with self._answered("/reset_prefix_cache", "{}"):
            pass

    @contextlib.contextmanager
    def _answered(self, path: str, body: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a POST, to be read while entered. BackendError for any but a 200."""
        headers = {"content-type": "application/json"}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        try:
            connection.request("POST", path, body, headers)
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    said = response.read()[:500]
                    raise BackendError(f"{path}: status {response.status}: {said!r}")
                yield response
        finally:
            connection.close()


def _streamed(response: http.client.HTTPResponse, began: float) -> Answer:
    first_s: float | None = None
    tokens: list[int] = []
    usage: dict[str, object] = {}
    while line := response.readline():
        if not line.startswith(_DATA) or line.startswith(_DATA + _DONE):
            continue
        chunk = json.loads(line[len(_DATA) :])
        for choice in chunk.get("choices", ()):
            ids = choice.get("token_ids") or ()
            if ids and first_s is None:
                first_s = time.perf_counter() - began
            tokens += ids
        usage = chunk.get("usage") or usage
    if first_s is None or not usage:
        raise BackendError(f"an answer without tokens or usage: {tokens} {usage}")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Answer(
        ttft_s=first_s,
        total_s=time.perf_counter() - began,
        tokens=tuple(tokens),
        prompt_tokens=int(str(usage["prompt_tokens"])),
        cached_tokens=cached or 0,
        worker=response.getheader("x-kvtier-worker") or "",
        matched=response.getheader("x-kvtier-matched-tokens") or "",
    )


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A vLLM server."""

    name: str
    blocks: int = 0
    """Of its KV pool; 0: as many as fit into 1 GiB."""
    connector: Mapping[str, object] | None = None
    """`--kv-transfer-config`."""
    has_events: bool = False
    api_key: str | None = None
    flags: tuple[str, ...] = ()


@dataclass(slots=True)
class Server(Endpoint):
    """A running vLLM server."""

    name: str = ""
    events: Mapping[str, str] = field(default_factory=dict)
    """Where it publishes, and answers for, its KV events; empty: it does not."""


def kvtier_connector(store: str) -> dict[str, object]:
    """Our connector on a store."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "model_id": MODEL},
    }


def example_connector(directory: Path) -> dict[str, object]:
    """vLLM's own ExampleConnector, which keeps its files in a directory."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


@dataclass(frozen=True, slots=True)
class Key:
    """A tenant of the router and the key that its clients show."""

    tenant: str
    token: str


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router over bridged servers."""

    name: str
    index: str
    policy: str = "cache_aware"
    keys: tuple[Key, ...] = ()
    upstream_tokens: Mapping[str, str] = field(default_factory=dict)
    """By server."""


@dataclass(slots=True)
class Router(Endpoint):
    """A running router."""

    admin_port: int = 0

    def fleet(self) -> list[dict[str, object]]:
        """Its workers as it sees them."""
        workers: list[dict[str, object]] = json.loads(self._admin("GET", "/fleet"))["workers"]
        return workers

    def route(self, prompt: Sequence[int], salt: str) -> dict[str, object]:
        """Where it would send a prompt under a scope's salt, and why; nothing is sent."""
        told = {"path": "/v1/completions", "salt": salt}
        body = json.dumps({"model": MODEL, "prompt": list(prompt), "kvtier": told})
        found: dict[str, object] = json.loads(self._admin("POST", "/route", body))
        return found

    def _admin(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=_LOOK_S)
        try:
            connection.request(method, path, body)
            with connection.getresponse() as response:
                return response.read()
        finally:
            connection.close()


class Rig:
    """Processes in a directory: what was started ends with it, children included."""

    def __init__(self, directory: Path, python: Path, model: Path) -> None:
        """`python` has vLLM and kvtier[engine]; services run with this process's own."""
        self.directory = directory
        self._python = python
        self._model = model
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []

    def index(self) -> str:
        """Start an index; its address."""
        port = free_port()
        self._service("index", "index", {"listen": {"bind": f"127.0.0.1:{port}"}})
        self._wait("index", lambda: _listens(port))
        return f"127.0.0.1:{port}"

    def store(self, dram_bytes: int) -> str:
        """Start a store without NVMe; its address for connectors of this machine."""
        data = self.directory / "store"
        port = free_port()
        table: dict[str, object] = {
            "data_dir": str(data),
            "listen": {"bind": f"127.0.0.1:{port}"},
            "dram": {"bytes_max": dram_bytes, "segments_bytes_max": 1 << 30},
            "nvme": {"enabled": False},
        }
        self._service("store", "store", table)
        self._wait("store", lambda: _listens(port))
        return f"unix:{data}/run/store.sock"

    def servers(self, *specs: ServerSpec) -> list[Server]:
        """Start vLLM servers side by side."""
        made = [self._server(spec) for spec in specs]
        for server in made:
            self._wait(server.name, server_is_up(server))
        return made

    def bridges(self, index: str, *servers: Server) -> None:
        """Start a bridge beside each server; they are in the fleet some moments later."""
        ports = []
        for server in servers:
            ports.append(free_port())
            self._service("bridge", f"bridge-{server.name}", self._bridge(index, server, ports[-1]))
        for server, port in zip(servers, ports, strict=True):
            self._wait(f"bridge-{server.name}", partial(_is_ok, port, "/live"))

    def router(self, spec: RouterSpec, workers_count: int) -> Router:
        """Start a router and wait until it has so many workers that it trusts."""
        router = Router(free_port(), admin_port=free_port())
        table: dict[str, object] = {
            "policy": spec.policy,
            "admin_bind": f"127.0.0.1:{router.admin_port}",
            "listen": {"bind": f"127.0.0.1:{router.port}"},
            "index": {"targets": [spec.index]},
        }
        if spec.keys:
            rows = "".join(map(_tenant, spec.keys))
            secret = self._secret(f"{spec.name}.secret", CLUSTER_SECRET)
            keys = self._secret(f"{spec.name}.keys.toml", rows)
            table["tenants"] = {"keys_file": str(keys), "cluster_secret_file": str(secret)}
        if spec.upstream_tokens:
            rows = "".join(
                f"[[worker]]\nname = {json.dumps(name)}\ntoken = {json.dumps(token)}\n"
                for name, token in spec.upstream_tokens.items()
            )
            path = self._secret(f"{spec.name}.tokens.toml", rows)
            table["upstream"] = {"tokens_file": str(path)}
        self._service("router", spec.name, table)
        self._wait(spec.name, lambda: _is_ok(router.port, "/health"))

        def knows_them() -> bool:
            states = [(one["state"], one["trust"]) for one in router.fleet()]
            return states.count(("candidate", "exact")) == workers_count

        self._wait(spec.name, knows_them)
        return router

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def end(self, *names: str) -> None:
        """End the processes of these names, all where none is given; youngest first. Idempotent."""
        for name, process in reversed(self._processes):
            if not names or name in names:
                _end(process)
        self._processes = [] if not names else [p for p in self._processes if p[0] not in names]

    def _server(self, spec: ServerSpec) -> Server:
        server = Server(free_port(), spec.api_key, name=spec.name)
        argv = [
            "-P",
            "-m",
            "vllm.entrypoints.openai.api_server",
            f"--model={self._model}",
            f"--served-model-name={MODEL}",
            "--host=127.0.0.1",
            f"--port={server.port}",
            "--dtype=float32",
            "--max-model-len=4096",
            "--enforce-eager",
            f"--block-size={BLOCK_TOKENS}",
            "--prefix-caching-hash-algo=sha256_cbor",
            "--enable-prompt-tokens-details",
            *spec.flags,
        ]
        if spec.blocks:
            argv.append(f"--num-gpu-blocks-override={spec.blocks}")
        if spec.api_key is not None:
            argv.append(f"--api-key={spec.api_key}")
        if spec.connector is not None:
            argv.append(f"--kv-transfer-config={json.dumps(spec.connector)}")
        if spec.has_events:
            server.events = {
                "endpoint": f"ipc://{self.directory}/{spec.name}.events",
                "replay_endpoint": f"ipc://{self.directory}/{spec.name}.replay",
            }
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
            argv.append(f"--kv-events-config={json.dumps(events | dict(server.events))}")
        threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        self._spawn(spec.name, self._python, argv, _ENVIRONMENT | threads)
        return server

    def _bridge(self, index: str, server: Server, page_port: int) -> dict[str, object]:
        return {
            "instance": server.name,
            "index": {"targets": [index]},
            "telemetry": {"metrics_bind": f"127.0.0.1:{page_port}"},
            "model": {
                "served_names": [MODEL],
                "model_id": MODEL,
                "revision": _REVISION,
                "block_tokens": BLOCK_TOKENS,
                "tokenizer_digest": "74" * 32,
            },
            "engine": {
                "http": f"127.0.0.1:{server.port}",
                "events": server.events["endpoint"],
                "replay": server.events["replay_endpoint"],
                "topic": "kv",
            },
        }

    def _service(self, command: str, name: str, table: Mapping[str, object]) -> None:
        config = self.directory / f"{name}.toml"
        config.write_text(toml_text(table), encoding="utf-8")
        child = ["-m", "kvtier.local.child", str(os.getpid()), command, "--config", str(config)]
        self._spawn(name, Path(sys.executable), child, {})

    def _spawn(
        self, name: str, python: Path, argv: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        set_ = [f"{key}={value}" for key, value in environment.items()]
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 (the caller's own interpreters)
                ["/usr/bin/env", *set_, str(python), *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append((name, process))

    def _wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        (process,) = [one for known, one in self._processes if known == name]
        end = time.monotonic() + _START_S
        while not is_ready():
            if process.poll() is not None or time.monotonic() > end:
                raise UnavailableError(f"{name} does not start:\n{self.log(name)[-_TAIL_BYTES:]}")
            time.sleep(_POLL_S)

    def _secret(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        return path


@contextlib.contextmanager
def a_rig(directory: Path | None, python: Path, model: Path) -> Iterator[Rig]:
    """A rig with a temporary directory below `directory`, the system's own where None.

    The directory is removed, unless something failed: then its logs are left, and named.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvtier-vllm-", dir=directory))
    rig = Rig(folder, python, model)
    try:
        yield rig
    except BackendError as error:
        raise BackendError(f"{error}; see the logs in {folder}") from error
    finally:
        rig.end()
    shutil.rmtree(folder, ignore_errors=True)


def server_is_up(server: Server) -> Callable[[], bool]:
    """Whether a vLLM server says that it is well."""
    return lambda: _is_ok(server.port, "/health")


def _is_ok(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LOOK_S)
    try:
        connection.request("GET", path)
        with connection.getresponse() as response:
            return response.status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(_LOOK_S)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its whole group: vLLM's engine is a child that takes another name."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _tenant(key: Key) -> str:
    digest = hashlib.sha256(key.token.encode()).hexdigest()
    return f'[[tenant]]\nid = "{key.tenant}"\n[[tenant.key]]\nsha256 = "{digest}"\n'
