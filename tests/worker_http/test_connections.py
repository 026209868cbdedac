"""How many connections there may be, and how long each may be silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvtier.errors import ConfigError
from kvtier_services.worker.http.settings import EndpointSettings
from tests.harness.waiting import eventually_async
from tests.support.raw_http import RawConnection, ask, post
from tests.support.scripted_engine import MODEL, ScriptedEngine, says, served

LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "x"}).encode()


async def metric(connection: RawConnection, sample: str) -> float:
    await connection.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    page = (await connection.answer()).body.decode()
    (line,) = [line for line in page.splitlines() if line.startswith(sample)]
    return float(line.rpartition(" ")[2])


@asynccontextmanager
async def opened(port: int) -> AsyncIterator[RawConnection]:
    connection = await RawConnection.open(port)
    try:
        yield connection
    finally:
        await connection.close()


async def test_connections_beyond_the_ceiling_are_told_so_and_closed() -> None:
    async with (
        served(ScriptedEngine(), EndpointSettings(connections_max=3)) as it,
        AsyncExitStack() as stack,
    ):
        held = [await stack.enter_async_context(opened(it.port)) for _ in range(3)]
        for one in held:
            await one.send(LIVE)
            assert (await one.answer()).status == 200
        for _ in range(2):
            async with opened(it.port) as late:
                answer = await late.answer()
                assert answer.status == 429
                assert answer.error["code"] == "rate_limit_exceeded"
                assert await late.rest() == b""
        await held[0].send(LIVE)
        assert (await held[0].answer()).status == 200
        held.pop().reset()

        async def is_free() -> bool:
            try:
                return (await ask(it.port, LIVE)).status == 200
            except (ConnectionError, asyncio.IncompleteReadError):
                return False

        await eventually_async(is_free, 30, "a place is free")
        refused = 'kvtier_endpoint_connections_refused_total{reason="too_many"}'
        assert await metric(held[0], refused) >= 2


@pytest.mark.parametrize("before", [b"", LIVE])
@pytest.mark.parametrize("sent", [b"G", b"GET /live HTTP/1.1\r\nhost:"])
async def test_a_head_that_does_not_come_is_not_waited_for(before: bytes, sent: bytes) -> None:
    async with (
        served(ScriptedEngine(), EndpointSettings(head_ms_max=500)) as it,
        opened(it.port) as silent,
        opened(it.port) as other,
    ):
        await other.send(LIVE)
        assert (await other.answer()).status == 200
        if before:
            await silent.send(before)
            assert (await silent.answer()).status == 200
        await silent.send(sent)
        answer = await silent.answer()
        assert answer.status == 408
        assert answer.error["type"] == "invalid_request_error"
        assert await silent.rest() == b""
        late = 'kvtier_endpoint_connections_refused_total{reason="head_late"}'
        assert await metric(other, late) == 1


async def test_a_long_answer_and_a_kept_connection_outlive_the_heads_deadline() -> None:
    gate = asyncio.Event()
    engine = ScriptedEngine(lambda request: [gate, *says("ok")])
    async with (
        served(engine, EndpointSettings(head_ms_max=500)) as it,
        opened(it.port) as connection,
    ):
        await connection.send(post("/v1/completions", BODY))
        async with opened(it.port) as late:
            assert (await late.answer()).status == 408  # so much time has passed
        gate.set()
        assert (await connection.answer()).status == 200
        async with opened(it.port) as late:
            assert (await late.answer()).status == 408
        await connection.send(LIVE)
        assert (await connection.answer()).status == 200


@pytest.mark.parametrize(
    "wrong", [{"connections_max": 0}, {"connections_max": 1 << 20}, {"head_ms_max": 61_000}]
)
def test_ceilings_have_ceilings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        EndpointSettings(**wrong)
