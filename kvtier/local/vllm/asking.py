"""What a running vLLM server tells: its HTTP pages, two probe requests, its ZMQ replay.

What must not live here: what is made of it (doctor.py).
"""

import http.client
import json
import random
import re
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvtier.errors import ConfigError

_ANSWER_S: Final = 10.0
_PROBE_S: Final = 300.0
_LOOK_S: Final = 0.25
_BODY_BYTES_MAX: Final = 8 << 20
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_REPLAY_MS: Final = 3_000
_END_SEQ: Final = (-1).to_bytes(8, "big", signed=True)
_FRAMES_MAX: Final = 1 << 20
_PROBE_TOKENS_MAX: Final = 1_024
_PROBE_BLOCKS: Final = 2
_UNKNOWN_BLOCK: Final = 128

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Seen:
    """What was told; fields that nobody told are None. As JSON it is what tests have recorded."""

    version: str | None = None
    names: tuple[str, ...] = ()
    cache: Mapping[str, str] | None = None
    """Labels of `vllm:cache_config_info`."""
    config: Json | None = None
    """Of `/server_info`, which is served with VLLM_SERVER_DEV_MODE=1 only."""
    details: bool | None = None
    """Whether answers say how many tokens came from a cache."""
    cached_tokens: int | None = None
    """Of the second of two equal prompts."""
    queried_tokens: int | None = None
    """Tokens that a connector was asked for, of both prompts."""
    probe_error: str | None = None
    replay: str | None = None
    """answered, silent; None: it was not asked."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is."""

    host: str
    port: int
    is_https: bool
    key: str = ""

    def ask(self, path: str, body: Json | None = None, timeout_s: float = _ANSWER_S) -> bytes:
        """Body of a 200. OSError and HTTPException where there is none."""
        kind = http.client.HTTPSConnection if self.is_https else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                headers["Content-Type"] = "application/json"
                connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            found = answer.read(_BODY_BYTES_MAX)
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            text = found[:200].decode("utf-8", "replace")
            raise http.client.HTTPException(f"{path}: status {answer.status}: {text}")
        return found

    def is_healthy(self) -> bool:
        """Whether it takes requests."""
        try:
            self.ask("/health")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def until_healthy(self, stop: threading.Event) -> None:
        """Block until it takes requests, or `stop` is set."""
        while not self.is_healthy() and not stop.wait(_LOOK_S):
            pass


def parse_url(url: str, key: str = "") -> Server:
    """Read `http://host:port`, with or without `/v1`; `host:port` too. ConfigError."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port is None:
        raise ConfigError(f"{url!r} is not http://host:port")
    return Server(parts.hostname, port, parts.scheme == "https", key)


def look_at(server: Server, *, probe: bool = True) -> Seen:
    """Ask it everything but its ZMQ sockets. OSError or HTTPException where it is not there."""
    server.ask("/health")
    page = server.ask("/metrics").decode("utf-8", "replace")
    models = _object(_asked(server, "/v1/models")).get("data")
    listed = models if isinstance(models, list) else []
    names = tuple(str(one["id"]) for one in listed if isinstance(one, dict) and "id" in one)
    version = _object(_asked(server, "/version")).get("version")
    config = _object(_asked(server, "/server_info?config_format=json")).get("vllm_config")
    seen = Seen(
        version=version if isinstance(version, str) else None,
        names=names,
        cache=labels(page, "vllm:cache_config_info"),
        config=config if isinstance(config, dict) else None,
    )
    return _probed(server, seen) if probe and names else seen


def labels(page: str, metric: str) -> Mapping[str, str] | None:
    """Labels of the first sample of a metric; None where the page has none. Pure."""
    for line in page.splitlines():
        if line.startswith(f"{metric}{{"):
            return dict(_LABEL.findall(line))
    return None


def ask_replay(endpoint: str) -> str:
    """Ask for all that an engine remembers: `answered` or `silent`. ConfigError without pyzmq."""
    try:
        import zmq
    except ImportError:
        raise ConfigError("--replay needs the package pyzmq") from None
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{endpoint}: {error}") from None
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        for _ in range(_FRAMES_MAX):
            if not socket.poll(_REPLAY_MS):
                return "silent"
            if _END_SEQ in socket.recv_multipart():
                return "answered"
    return "silent"


def _probed(server: Server, seen: Seen) -> Seen:
    """Two equal prompts, which nobody sent before."""
    block = (seen.cache or {}).get("block_size", "")
    tokens = int(block) if block.isdigit() else _UNKNOWN_BLOCK
    count = min(_PROBE_BLOCKS * tokens + 1, _PROBE_TOKENS_MAX)
    draw = random.Random()  # noqa: S311 (no secret: a prompt that is new)
    prompt = [draw.randrange(10, 200) for _ in range(count)]
    body = {"model": seen.names[0], "prompt": prompt, "max_tokens": 1, "temperature": 0}
    before = _queried(server)
    try:
        answers = [_object(server.ask("/v1/completions", body, _PROBE_S)) for _ in range(2)]
    except (OSError, http.client.HTTPException) as error:
        return replace(seen, probe_error=str(error) or type(error).__name__)
    usage = answers[-1].get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    after = _queried(server)
    return replace(
        seen,
        details=isinstance(details, dict),
        cached_tokens=cached if isinstance(cached, int) else 0,
        queried_tokens=None if before is None or after is None else after - before,
    )


def _queried(server: Server) -> int | None:
    page = _asked(server, "/metrics").decode("utf-8", "replace")
    found = re.findall(r"^vllm:external_prefix_cache_queries_total\{[^}]*\} (\S+)$", page, re.M)
    return round(sum(map(float, found))) if found else None


def _asked(server: Server, path: str) -> bytes:
    try:
        return server.ask(path)
    except (OSError, http.client.HTTPException):
        return b""


def _object(text: bytes) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
