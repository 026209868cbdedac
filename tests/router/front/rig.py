"""Routers and mock workers as processes, and a thin HTTP client to break them with."""

import json
import socket
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner, kvtier_command, python_module
from tests.harness.readiness import http_ready, tcp_ready
from tests.support.text_models import byte_level_bpe, write_model

KEY = "kvtier_test_key_0123456789"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def text_model(directory: Path) -> Path:
    """A small model directory with tokenizer and chat template."""
    return write_model(directory / "text", byte_level_bpe())


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Answer:
    """One request on a connection of its own; a body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} if data is not None else {}
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path, data, sent | (headers or {}))
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


def events(body: bytes) -> list[Any]:
    """Data of the events of a stream; [DONE] as text."""
    found: list[Any] = []
    for block in body.split(b"\n\n"):
        if block.startswith(b"data: "):
            data = block[6:]
            found.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return found


def text_of(chunks: list[Any]) -> str:
    """The text of all choices of a stream's chunks."""
    parts = []
    for chunk in chunks:
        for choice in chunk.get("choices", ()) if isinstance(chunk, dict) else ():
            parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(parts)


@dataclass
class Worker:
    """A mock worker's process."""

    process: Process
    port: int

    def behave(self, **behaviour: object) -> None:
        """Say what goes wrong from now on."""
        assert call(self.port, "POST", "/behave", behaviour).status == 200

    def recorded(self) -> list[Any]:
        requests: list[Any] = self.state()["requests"]
        return requests

    def state(self) -> Any:
        return call(self.port, "GET", "/recorded").json

    def last(self) -> Any:
        return self.recorded()[-1]


@dataclass
class Rig:
    """The processes of one test."""

    runner: ProcessRunner
    directory: Path
    workers: list[Worker] = field(default_factory=list)
    port: int = 0
    admin_port: int = 0
    router: Process | None = None

    def start_workers(self, count: int, token_ms: float = 0.0) -> list[Worker]:
        text = self.directory / "text"
        if not text.exists():
            text_model(self.directory)
        launches, ports = [], []
        for number in range(count):
            port = free_port()
            ports.append(port)
            argv = python_module(
                "tests.router.front.mock_worker", str(port), str(text), str(token_ms)
            )
            name = f"worker{len(self.workers) + number}"
            ready = http_ready(f"http://127.0.0.1:{port}/v1/models")
            launches.append(Launch(name, argv, ready, directory=ROOT))
        started = self.runner.start_all(launches)
        self.workers += [Worker(p, port) for p, port in zip(started, ports, strict=True)]
        return self.workers[-count:]

    def start_router(self, *arguments: str, brain: str = "fake", scheme: str = "http") -> None:
        """A router over all workers of the rig, with more flags; `real` is `kvtier router`."""
        # Each process of a router has an admin port of its own, from the first one on.
        self.port, self.admin_port = free_port(), free_port(4)
        flags = [
            f"--listen-bind=127.0.0.1:{self.port}",
            f"--admin-bind=127.0.0.1:{self.admin_port}",
            f"--texts=*={self.directory / 'text'}",
        ]
        for number, worker in enumerate(self.workers):
            flags.append(f"--static-workers=w{number}=127.0.0.1:{worker.port} mock")
        if brain == "real":
            argv = kvtier_command("router", *flags, *arguments)
        else:
            argv = python_module("tests.router.front.router_process", *flags, *arguments)
        ready = http_ready(f"http://127.0.0.1:{self.port}/health")
        if scheme == "https":
            ready = tcp_ready(self.port)
        self.router = self.runner.start(Launch("router", argv, ready, directory=ROOT))

    def call(self, method: str, path: str, body: object = None, **options: Any) -> Answer:
        return call(self.port, method, path, body, **options)

    def chat(self, **fields: object) -> Answer:
        body = {"model": "mock", "messages": [{"role": "user", "content": "say it"}], **fields}
        return self.call("POST", "/v1/chat/completions", body)

    def complete(self, **fields: object) -> Answer:
        body = {"model": "mock", "prompt": "the quick brown fox", **fields}
        return self.call("POST", "/v1/completions", body)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def metric(self, name: str) -> float:
        """The sum of all series of a metric, or one series by its name with labels."""
        page = call(self.admin_port, "GET", "/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
