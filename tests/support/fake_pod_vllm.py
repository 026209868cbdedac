"""A process that stands where a pod runs vLLM: its flags, its endpoint, its sockets; no model.

    python -m tests.support.fake_pod_vllm serve DIRECTORY FLAGS

It tells a bridge by the connector's socket what is resident (nothing), and answers requests of who
shows the API key, slowly enough to be interrupted. What must not live here: what a test expects.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zmq

from kvtier.core.identity import Pool, chain_root
from kvtier.engines.vllm.residents import FeedTerms, ResidentsFeed
from tests.support.fake_engine import EngineCache

_ANSWER_S = 0.1
_LOCK = threading.Lock()
_COUNTS = {"running": 0, "generated": 0}


class Endpoint(BaseHTTPRequestHandler):
    """What of vLLM's endpoint is asked here."""

    protocol_version = "HTTP/1.1"
    name = ""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            with _LOCK:
                page = (
                    f'vllm:num_requests_running{{engine="0"}} {_COUNTS["running"]}\n'
                    f'vllm:num_requests_waiting{{engine="0"}} 0\n'
                    f'vllm:kv_cache_usage_perc{{engine="0"}} 0.0\n'
                    f'vllm:generation_tokens_total{{engine="0"}} {_COUNTS["generated"]}\n'
                )
            self._say(200, page.encode())
        elif self.path == "/health":
            self._say(200, b"")
        elif self.path == "/v1/models" and self._is_let_in():
            self._say(200, json.dumps({"data": [{"id": self.name}]}).encode())
        else:
            self._say(401, b"{}")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._is_let_in() or asked["model"] != self.name:
            self._say(401, b"{}")
            return
        with _LOCK:
            _COUNTS["running"] += 1
        time.sleep(_ANSWER_S)
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 1}
        usage["total_tokens"] = usage["prompt_tokens"] + 1
        choice = {"index": 0, "text": "a", "finish_reason": "length"}
        answer = {"id": "x", "object": "text_completion", "model": self.name, "choices": [choice]}
        with _LOCK:
            _COUNTS["running"] -= 1
            _COUNTS["generated"] += 1
        self._say(200, json.dumps(answer | {"usage": usage}).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _is_let_in(self) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        return key is None or self.headers.get("authorization") == f"Bearer {key}"

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(arguments: list[str]) -> None:
    flags = dict(one.partition("=")[::2] for one in arguments if one.startswith("--"))
    extra = json.loads(flags["--kv-transfer-config"])["kv_connector_extra_config"]
    events: dict[str, Any] = json.loads(flags["--kv-events-config"])
    pool = Pool(extra["model_id"], extra["revision"], int(flags["--block-size"]))
    context: zmq.Context[Any] = zmq.Context()
    sockets = [context.socket(zmq.PUB), context.socket(zmq.ROUTER)]
    for one, endpoint in zip(sockets, ("endpoint", "replay_endpoint"), strict=True):
        one.bind(events[endpoint])
    folder = Path(extra["residents"])
    (folder / "namespace").write_text("ab" * 32)
    cache = EngineCache(pool, 64, "0", False)
    feed = ResidentsFeed(FeedTerms(folder, 0, chain_root(pool, None, None)), bytes)
    feed.bind(cache.slots)
    Endpoint.name = flags["--served-model-name"]
    server = ThreadingHTTPServer((flags["--host"], int(flags["--port"])), Endpoint)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        feed.step([], [])
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
