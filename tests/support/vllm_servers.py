"""Real vLLM servers, in the environment that `make test-vllm` makes, with our connector inside.

What must not live here: what a test expects of them, fakes of vLLM.
"""

import http.client
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.core.engine_keys import VllmScheme, vllm_digests, vllm_none_hash
from kvtier.core.frame import FrameName, KeyKind
from kvtier.types import Fingerprint
from tests.harness.ports import free_port
from tests.harness.processes import Launch, Process, ProcessRunner
from tests.harness.readiness import http_ready
from tests.harness.waiting import eventually

PYTHON = os.environ.get("KVTIER_VLLM_PYTHON", "")
WHY_NOT = "KVTIER_VLLM_PYTHON does not name a Python with vLLM: see make test-vllm"
BLOCK_TOKENS = 32
START_S = 480.0
ANSWER_S = 300.0
LOAD_MS = 10_000
LOGIT_GAP = 1e-4
"""Two tokens whose log probabilities are nearer than this may change places between runs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said: tokens, how many of the prompt it had cached, gaps of the best two."""

    tokens: tuple[int, ...]
    cached_tokens: int
    gaps: tuple[float, ...]

    def equals(self, other: "Answer") -> bool:
        """Equal tokens, up to the first where two were as good as equally likely."""
        for ours, theirs, gap in zip(self.tokens, other.tokens, self.gaps, strict=False):
            if ours != theirs:
                return gap < LOGIT_GAP
        return len(self.tokens) == len(other.tokens)


@dataclass(frozen=True, slots=True)
class VllmServer:
    process: Process
    port: int

    def complete(self, tokens: list[int], max_tokens: int = 32, **fields: Any) -> Answer:
        """Greedy completion of a prompt of tokens; fails on any status but 200."""
        body = {
            "model": "m",
            "prompt": tokens,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
        }
        reply = self.post("/v1/completions", body | fields)
        choice = reply["choices"][0]
        gaps = []
        for best in choice["logprobs"]["top_logprobs"]:
            first, *rest = sorted(best.values(), reverse=True)
            gaps.append(first - rest[0] if rest else float("inf"))
        details = reply["usage"].get("prompt_tokens_details") or {}
        return Answer(tuple(choice["token_ids"]), details.get("cached_tokens") or 0, tuple(gaps))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A call that is answered in JSON, or with nothing."""
        parsed: dict[str, Any] = json.loads(self.order(path, body) or b"{}")
        return parsed

    def order(self, path: str, body: Mapping[str, Any]) -> bytes:
        """A call; fails on any status but 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        assert reply.status == 200, text
        return text

    def forget(self) -> None:
        """Drop what it has cached itself; waits for a request that is just ending."""
        self._reset("/reset_prefix_cache")

    def forget_all(self) -> None:
        """Drop what it has cached, also elsewhere: as after a change of its weights."""
        self._reset("/reset_prefix_cache?reset_external=true")

    def _reset(self, path: str) -> None:
        # Older releases say nothing of success.
        eventually(lambda: self.post(path, {}).get("success", True) is True, 60, "a reset")

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def count(self, name: str) -> float:
        """What the connector counted of itself; it tells with a step, so a moment late."""
        return self.metric(f"vllm:kvtier_{name}_total")

    def gained(self, name: str, before: float, by: float) -> None:
        """Wait until a count has grown by so much; fails where it does not or grows by more."""
        eventually(lambda: self.count(name) - before >= by, 60, f"{name} grows by {by}")
        assert self.count(name) - before == by

    def first_token_s(self, tokens: list[int]) -> float:
        """Seconds until the first token of an answer is there."""
        began = time.monotonic()
        self.complete(tokens, max_tokens=1)
        return time.monotonic() - began

    @property
    def loaded_tokens(self) -> float:
        """Tokens of prompts that came through the connector."""
        return self.metric("vllm:external_prefix_cache_hits_total")


def launch_vllm(
    name: str,
    model: Path,
    store: str | None,
    *flags: str,
    extra: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Launch, int]:
    """How to start a server on a free port, and the port. Flags of a later place win.

    Without a store it runs without our connector. A slow machine is no fault of the connector: by
    default lookups may take long, and what is held is loaded whatever computing it would cost.
    """
    port = free_port()
    patient = {"lookup_ms": 5_000, "load_ms": LOAD_MS, "load": "always"}
    connector = {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store, "model_id": "m"}
        | patient
        | dict(extra or {}),
    }
    with_connector = [f"--kv-transfer-config={json.dumps(connector)}"] if store else []
    argv = [
        PYTHON,
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model}",
        "--served-model-name=m",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=float32",
        "--max-model-len=4096",
        "--enforce-eager",
        f"--block-size={BLOCK_TOKENS}",
        "--prefix-caching-hash-algo=sha256_cbor",
        "--enable-prompt-tokens-details",
        *with_connector,
        *flags,
    ]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        # One thread each, wherever: two that wait for each other stand still on a busy machine.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "DO_NOT_TRACK": "1",
    } | dict(environment or {})
    ready = http_ready(f"http://127.0.0.1:{port}/health")
    return Launch(name, argv, ready, START_S, variables), port


def start_vllm(runner: ProcessRunner, *launches: tuple[Launch, int]) -> list[VllmServer]:
    """Start servers side by side."""
    processes = runner.start_all([launch for launch, _ in launches])
    return [
        VllmServer(process, port) for process, (_, port) in zip(processes, launches, strict=True)
    ]


def prompt(seed: int, tokens: int, ids: range = range(1_000, 40_000)) -> list[int]:
    """Token ids that no other seed begins with."""
    rng = random.Random(seed)
    return [rng.choice(ids) for _ in range(tokens)]


def whole(tokens: Sequence[int]) -> int:
    """How many of them lie in whole blocks."""
    return len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def names_of(server: VllmServer, tokens: Sequence[int], rank: int = 0) -> list[FrameName]:
    """By which names the store has a rank's shards of a plain prompt's whole blocks."""
    (found,) = set(re.findall(r"namespace ((?:[0-9a-f]{64}(?:, )?)+)", server.process.log_text()))
    space = Fingerprint(bytes.fromhex(found.split(", ")[rank]))
    digests = vllm_digests(VllmScheme(vllm_none_hash(), BLOCK_TOKENS), tokens)
    return [FrameName(KeyKind.ENGINE_DIGEST, digest, space) for digest in digests]


def stored_by(server: VllmServer, tokens: list[int], max_tokens: int = 32, **fields: Any) -> Answer:
    """A server's answer to a prompt that it computes, once all whole blocks are in the store.

    It asks the server itself, which loads what it has forgotten.
    """
    answer = server.complete(tokens, max_tokens, **fields)
    assert answer.cached_tokens == 0

    def has_all() -> bool:
        server.forget()
        return server.complete(tokens, 1, **fields).cached_tokens >= whole(tokens)

    eventually(has_all, 120, "the blocks are in the store")
    return answer
