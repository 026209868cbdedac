"""One try at one worker: who is held back by a slow reader, and how an answer in one piece ends."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, IncompleteRead
from typing import cast

from kvtier_router.front.attempt import Attempt, AttemptPlan, Streamed
from kvtier_router.front.streams import PlainFilter
from kvtier_router.web.server import Exchange
from kvtier_router.web.upstream import Upstream, UpstreamLimits, request_bytes
from kvtier_router.web.values import Headers
from tests.router.front.rig import Rig

DEADLINE_S = 30.0
STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    b'data: {"choices": []}\n\ndata: [DONE]\n\n'
)


class Client:
    """A client's connection: whether it is full, and whom it tells when that changes."""

    def __init__(self, *, under_pressure: bool) -> None:
        self.under_pressure = under_pressure
        self.on_pressure: Callable[[bool], None] | None = None


class Reader:
    """An exchange that remembers what it was sent."""

    def __init__(self, client: Client) -> None:
        self.connection = client
        self.started = False
        self.sent = b""

    def start(self, status: int, headers: Headers) -> None:
        self.started = True

    def send(self, data: bytes) -> None:
        self.sent += data


async def test_a_stream_that_goes_on_for_a_slow_reader_begins_held_back() -> None:
    """The client was too slow for the worker that died; the next one must not flood it."""
    answered = asyncio.Event()

    async def worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(STREAM)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        answered.set()

    server = await asyncio.start_server(worker, "127.0.0.1", 0)
    clock = asyncio.get_running_loop().time
    upstream = Upstream(UpstreamLimits(), clock)
    client = Client(under_pressure=True)
    reader = Reader(client)
    plan = AttemptPlan(lambda: PlainFilter(wants_usage=True, keeps=False), True, (), lambda _: None)
    attempt = Attempt(cast("Exchange", reader), plan, clock)
    try:
        origin = upstream.origin(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connection = await upstream.connection(origin)
        attempt.attach(connection)
        connection.send(request_bytes("GET", "/", [("host", "w")], b""), attempt)
        await asyncio.wait_for(answered.wait(), DEADLINE_S)
        for _ in range(10):  # turns of the loop in which it could have been read
            await asyncio.sleep(0)
        assert reader.sent == b""
        assert not attempt.outcome.done()
        assert client.on_pressure is not None
        client.on_pressure(False)
        outcome = await asyncio.wait_for(attempt.outcome, DEADLINE_S)
        assert isinstance(outcome, Streamed)
        assert reader.sent.endswith(b"data: [DONE]\n\n")
        assert client.on_pressure is None
    finally:
        attempt.abort()
        upstream.close()
        server.close()


@contextmanager
def broken_worker(head: bytes, body: bytes) -> Iterator[int]:
    """A worker that answers every request with a part of an answer, and ends. Its port."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while b"\r\n\r\n" not in connection.recv(1 << 16):
                    pass
                connection.sendall(head + b"\r\n\r\n" + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_long_answer_in_one_piece_whose_worker_dies_is_cut_and_has_no_event_in_it(
    rig: Rig,
) -> None:
    rig.start_workers(1)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 4000000"
    body = b"[" + b"1," * (1 << 20)
    with broken_worker(head, body) as port:
        rig.start_router(f"--static-workers=broken=127.0.0.1:{port} broken")
        connection = HTTPConnection("127.0.0.1", rig.port, timeout=DEADLINE_S)
        wanted = '{"model": "broken", "prompt": "a"}'
        connection.request("POST", "/v1/completions", wanted, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        got, is_cut = b"", False
        try:
            while part := response.read(1 << 16):
                got += part
        except IncompleteRead as error:
            got, is_cut = got + error.partial, True
        except OSError:
            is_cut = True
        connection.close()
    assert is_cut
    assert got == body[: len(got)]
    assert len(got) > 1 << 20
