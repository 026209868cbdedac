"""A worker that has stopped keeps its connections: it is found by asking for its health."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from kvtier.errors import ConfigError
from kvtier_router.front.silence import Silence, SilenceConfig
from kvtier_router.web.upstream import (
    Loss,
    ResponseHead,
    Upstream,
    UpstreamError,
    UpstreamLimits,
    request_bytes,
)
from tests.harness.waiting import eventually_async

QUICK = SilenceConfig(asked_after_ms=20, health_ms_max=50, asked_times=2)
PATIENT = replace(QUICK, health_ms_max=10_000)
"""For a worker that answers: the machine may be busy."""
BEGUN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n"


@dataclass
class Listener:
    """A worker that takes everything; what it answers is the test's."""

    answers_health: bool = False
    begins_streams: bool = False
    healths: int = 0
    port: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            self.healths += 1
            if self.answers_health:
                writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
        elif self.begins_streams:
            writer.write(BEGUN)


@asynccontextmanager
async def listening(
    *, answers_health: bool = False, begins_streams: bool = False
) -> AsyncIterator[Listener]:
    listener = Listener(answers_health, begins_streams)
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()
        for writer in listener.writers:
            writer.transport.abort()


class Heard:
    def __init__(self) -> None:
        self.body = b""
        self.ended = False
        self.error: UpstreamError | None = None

    def on_head(self, head: ResponseHead) -> None: ...
    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.ended = True

    def on_lost(self, error: UpstreamError) -> None:
        self.error = error


async def ask(upstream: Upstream, listener: Listener) -> Heard:
    origin = upstream.origin(f"127.0.0.1:{listener.port}")
    connection = await upstream.connection(origin)
    heard = Heard()
    connection.send(request_bytes("POST", "/v1/completions", [("host", "w")], b"{}"), heard)
    return heard


async def watch(silence: Silence, times: int) -> None:
    """As the router's loop does, in quicker time."""
    for _ in range(times):
        silence._look_at = 0.0
        silence.watch()
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("streams", [False, True])
async def test_what_waits_for_a_hidden_worker_that_says_nothing_is_lost(streams: bool) -> None:
    upstream = Upstream(UpstreamLimits(), time.monotonic)
    async with listening(begins_streams=streams) as listener:
        heard = await ask(upstream, listener)
        silence = Silence(upstream, lambda: [f"127.0.0.1:{listener.port}"], QUICK, time.monotonic)

        async def is_lost() -> bool:
            await watch(silence, 1)
            return heard.error is not None

        await eventually_async(is_lost, 30, "the request is given up")
        assert heard.error is not None
        assert heard.error.loss is Loss.TIMEOUT
        assert heard.body == (b"data: 1\n\n" if streams else b"")
        assert listener.healths == QUICK.asked_times
        assert silence.lost == 1
        await silence.close()
    upstream.close()


async def test_a_hidden_worker_that_answers_anything_keeps_its_requests() -> None:
    upstream = Upstream(UpstreamLimits(), time.monotonic)
    async with listening(answers_health=True) as listener:
        heard = await ask(upstream, listener)
        silence = Silence(upstream, lambda: [f"127.0.0.1:{listener.port}"], PATIENT, time.monotonic)

        async def was_asked_often() -> bool:
            await watch(silence, 1)
            return listener.healths > 3

        await eventually_async(was_asked_often, 30, "it was asked")
        assert (heard.error, silence.lost) == (None, 0)
        await silence.close()
    upstream.close()


async def test_a_worker_that_the_index_hears_is_not_asked() -> None:
    upstream = Upstream(UpstreamLimits(), time.monotonic)
    async with listening() as listener:
        heard = await ask(upstream, listener)
        silence = Silence(upstream, list, QUICK, time.monotonic)
        await watch(silence, 10)
        assert (listener.healths, heard.error) == (0, None)
        await silence.close()
    upstream.close()


async def test_a_client_that_reads_too_slowly_does_not_make_its_worker_silent() -> None:
    upstream = Upstream(UpstreamLimits(), time.monotonic)
    async with listening(begins_streams=True) as listener:
        heard = await ask(upstream, listener)

        async def has_begun() -> bool:
            return bool(heard.body)

        await eventually_async(has_begun, 30, "the stream begins")
        (connection,) = upstream.busy
        connection.pause(True)
        silence = Silence(upstream, lambda: [f"127.0.0.1:{listener.port}"], QUICK, time.monotonic)
        await watch(silence, 10)
        assert (listener.healths, heard.error) == (0, None)
        await silence.close()
    upstream.close()


def test_settings_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match="asked_times"):
        SilenceConfig(asked_times=0)
