"""The scripts that k8s/overlays/vllm puts beside vLLM: what is work, and what is waited for.

They run here in this process against a server that stands for vLLM; in `test_kubernetes_pods` as
probes and hooks.
"""

import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "k8s" / "overlays" / "vllm" / "scripts"
LONG_S = "60"


@dataclass(slots=True)
class Engine:
    """What the server is like."""

    tokens: list[int] = field(default_factory=lambda: [0])
    """That it has generated, look by look; the last one stays."""
    running: list[int] = field(default_factory=lambda: [0])
    """Requests, look by look; the last one stays."""
    status: int = 200
    hangs: bool = False
    asked: list[dict[str, object]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    looks: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def page(self) -> str:
        at, self.looks = self.looks, self.looks + 1
        tokens, running = (each[min(at, len(each) - 1)] for each in (self.tokens, self.running))
        return (
            f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'
            f'vllm:num_requests_running{{engine="0"}} {running}\n'
            'vllm:num_requests_waiting{engine="0"} 0\n'
        )


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        listed = json.dumps({"data": [{"id": "chat"}]})
        self._say(200, self.engine.page() if self.path == "/metrics" else listed)

    def do_POST(self) -> None:
        engine = self.engine
        engine.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        engine.keys.append(self.headers.get("authorization", ""))
        if engine.hangs:
            engine.over.wait()
        self._say(engine.status, json.dumps({"choices": [{"text": "a"}]}))

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def served(engine: Engine) -> Iterator[str]:
    kind = type("OfThisTest", (Handler,), {"engine": engine})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            engine.over.set()
            server.shutdown()
            thread.join()


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    module = script("probe")
    monkeypatch.setattr(module, "MEMORY", tmp_path / "memory")
    return module


@pytest.mark.parametrize("key", ["", "a_key"])
def test_an_engine_at_rest_is_asked_for_one_token_with_the_key(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    engine = Engine(tokens=[7])
    with served(engine) as url:
        assert [probe.main(url, LONG_S) for _ in range(2)] == [0, 0]
    assert [one["max_tokens"] for one in engine.asked] == [1, 1]
    assert engine.keys == [f"Bearer {key}" if key else ""] * 2


def test_an_engine_that_generates_is_not_asked_for_more(probe: ModuleType) -> None:
    engine = Engine(tokens=[7, 8, 30])
    with served(engine) as url:
        assert [probe.main(url, LONG_S) for _ in range(3)] == [0, 0, 0]
    assert len(engine.asked) == 1


def test_an_engine_that_answers_pages_and_computes_nothing_is_found(
    probe: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(Engine(tokens=[7], hangs=True)) as url:
        assert probe.main(url, "0.5") == 1
    assert "TimeoutError" in capsys.readouterr().err
    with served(Engine(tokens=[7], status=500)) as url:
        assert probe.main(url, LONG_S) == 1


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def drain(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("drain")
    monkeypatch.setattr(module, "time", Clock())
    return module


def test_an_end_waits_for_what_runs_and_then_for_what_is_on_its_way(drain: ModuleType) -> None:
    engine = Engine(running=[2, 1, 1, 0, 1, 0])
    with served(engine) as url:
        assert drain.main(url, LONG_S) == 0
    assert engine.looks * drain.LOOK_S == 5 * drain.LOOK_S + drain.QUIET_S


def test_an_end_waits_no_longer_than_it_is_told(drain: ModuleType) -> None:
    engine = Engine(running=[1])
    with served(engine) as url:
        assert drain.main(url, "20") == 0
    assert engine.looks * drain.LOOK_S == 20
