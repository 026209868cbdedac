"""The page that is scraped: what it answers, and what it does to those who abuse it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import ConfigError
from kvtier.limits import METRICS_CONNECTIONS_COUNT_MAX, METRICS_HEADER_BYTES_MAX
from kvtier.telemetry import metrics_http
from kvtier.telemetry.metrics import MetricDef, MetricKind, Metrics
from kvtier.telemetry.metrics_http import Exposure, MetricsServer
from tests.harness.waiting import eventually_async

DEPTH = MetricDef(MetricKind.GAUGE, "kvtier_test_queue_count", "Queue.")


class Page:
    """A served page and the state that a test changes."""

    def __init__(self) -> None:
        self.live = True
        self.metrics = Metrics((DEPTH,))
        self.metrics.gauge(DEPTH).at().set(42)
        self.server = MetricsServer(self.metrics, lambda: self.live)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.server.port)

    async def send(self, request: bytes) -> tuple[str, bytes]:
        """The head and the body of the answer; both empty if the connection was just closed."""
        reader, writer = await self.connect()
        try:
            writer.write(request)
            answer = await asyncio.wait_for(reader.read(), 40)
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return head.decode(), body


async def closed_without_an_answer(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes, by FIN or by RST, and has sent nothing."""
    try:
        return await asyncio.wait_for(reader.read(), 40) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    page = Page()
    async with page.server:
        yield page


async def test_metrics_are_the_scrape_of_the_registry(page: Page) -> None:
    head, body = await page.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert "Content-Type: text/plain; version=0.0.4" in head
    assert f"Content-Length: {len(body)}" in head
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert families[DEPTH.name].samples[0].value == 42


async def test_live_follows_the_process(page: Page) -> None:
    head, body = await page.send(b"GET /live HTTP/1.0\r\n\r\n")
    assert (head.split("\r\n")[0], body) == ("HTTP/1.1 200 OK", b"live\n")
    page.live = False
    head, body = await page.send(b"GET /live?probe=1 HTTP/1.1\r\n\r\n")
    assert (head.split("\r\n")[0], body) == ("HTTP/1.1 503 Service Unavailable", b"not live\n")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", 404),
        (b"GET /metrics/../live HTTP/1.1", 404),
        (b"GET /debug HTTP/1.1", 404),
        (b"POST /metrics HTTP/1.1", 405),
        (b"HEAD /live HTTP/1.1", 405),
        (b"GET /metrics", 400),
        (b"GET /metrics HTTP/2.0", 400),
        (b"", 400),
        (b"\xff\x00\xfe garbage here", 400),
        (b"GET  /metrics HTTP/1.1", 400),
    ],
)
async def test_everything_else_is_refused_with_its_status(
    page: Page, request_line: bytes, status: int
) -> None:
    head, body = await page.send(request_line + b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert body == b""
    assert ("Allow: GET" in head) == (status == 405)


async def test_a_header_over_the_limit_is_refused(page: Page) -> None:
    padding = b"X: " + b"y" * METRICS_HEADER_BYTES_MAX
    head, _ = await page.send(b"GET /live HTTP/1.1\r\n" + padding + b"\r\n\r\n")
    assert head.startswith("HTTP/1.1 431 ")


async def test_a_header_that_never_ends_is_cut_off_in_time(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "METRICS_REQUEST_MS_MAX", 50)
    head, _ = await page.send(b"GET /live HTTP/1.1\r\nX: y")
    assert head.startswith("HTTP/1.1 408 ")


async def test_a_reader_that_does_not_take_its_answer_is_cut_off(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_http, "METRICS_REQUEST_MS_MAX", 50)
    rendered: list[int] = []

    def render() -> bytes:
        rendered.append(64 << 20)
        return bytes(64 << 20)

    monkeypatch.setattr(page.metrics, "render", render)
    reader, writer = await page.connect()
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")

    async def cut_off() -> bool:
        return bool(rendered) and not page.server._tasks

    await eventually_async(cut_off, 30, "the server has let go")
    received = 0
    while data := await reader.read(1 << 20):
        received += len(data)
    assert received < 64 << 20
    writer.close()


async def test_connections_beyond_the_ceiling_are_closed_and_the_others_served(page: Page) -> None:
    idle = [await page.connect() for _ in range(METRICS_CONNECTIONS_COUNT_MAX)]

    async def all_in() -> bool:
        return len(page.server._tasks) == METRICS_CONNECTIONS_COUNT_MAX

    await eventually_async(all_in, 30, "all are accepted")
    reader, writer = await page.connect()
    assert await closed_without_an_answer(reader)
    writer.close()
    assert page.server.refused_count == 1
    reader, writer = idle[0]
    writer.write(b"GET /live HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    for _, open_writer in idle:
        open_writer.close()


async def test_a_client_that_leaves_early_harms_nobody(page: Page) -> None:
    for request in (b"", b"GET /met"):
        _, writer = await page.connect()
        writer.write(request)
        writer.close()
    head, _ = await page.send(b"GET /live HTTP/1.1\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")


async def test_leaving_the_server_ends_open_connections() -> None:
    page = Page()
    async with page.server:
        reader, writer = await page.connect()
        head, _ = await page.send(b"GET /live HTTP/1.1\r\n\r\n")
        assert head.startswith("HTTP/1.1 200")
        port = page.server.port
    assert await closed_without_an_answer(reader)
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_the_page_can_be_served_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "metrics.sock")
    async with MetricsServer(Metrics(()), lambda: True, f"unix:{path}") as server:
        assert server.port == 0
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /live HTTP/1.1\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0", "example.com:0"])
def test_an_address_that_others_reach_needs_the_operators_word(bind: str) -> None:
    with pytest.raises(ConfigError, match="open to the network"):
        MetricsServer(Metrics(()), lambda: True, bind)


async def test_with_the_operators_word_the_page_is_served_to_others() -> None:
    server = MetricsServer(Metrics(()), lambda: True, "0.0.0.0:0", Exposure.NETWORK)
    async with server:
        assert server.port > 0


@pytest.mark.parametrize("bind", ["", "127.0.0.1", "127.0.0.1:x", ":80", "unix:relative"])
def test_an_address_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError):
        MetricsServer(Metrics(()), lambda: True, bind)


async def test_a_port_that_is_taken_is_an_error_of_configuration(page: Page) -> None:
    second = MetricsServer(Metrics(()), lambda: True, f"127.0.0.1:{page.server.port}")
    with pytest.raises(ConfigError, match="cannot serve metrics"):
        async with second:
            pass
