"""Each fault of the proxy: that it happens, that it is counted, that it ends."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.harness.ports import free_port
from tests.harness.proxy import (
    BUFFER_CHUNKS_MAX,
    CHUNK_BYTES_MAX,
    Admission,
    Direction,
    Faults,
    Flow,
    TcpProxy,
)
from tests.harness.waiting import eventually

TO_SERVER, TO_CLIENT = Direction.TO_SERVER, Direction.TO_CLIENT
HOLD = Faults(flow=Flow.HOLD)
SHORT_S = 0.1


class EchoServer:
    """Echoes bytes and FIN; keeps what it received per connection, in order of arrival."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.resets_count = 0
        self.closes_count = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._echo, args=(connection,)))
            self._threads[-1].start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(CHUNK_BYTES_MAX):
                    self.received += data
                    connection.sendall(data)
                self.closes_count += 1
            except OSError:
                self.resets_count += 1


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[TcpProxy]:
    with TcpProxy(echo.address, seed=7) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: TcpProxy) -> Iterator[socket.socket]:
    with connect(proxy) as connection:
        yield connection


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes, fewer only at FIN."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


def receive_on_new_connection(proxy: TcpProxy) -> bytes:
    """A reset may already show while connecting."""
    with connect(proxy) as connection:
        return connection.recv(1)


def wait_until_read(proxy: TcpProxy, size: int) -> None:
    eventually(lambda: proxy.counters(TO_SERVER).bytes_read == size, 10, f"{size} bytes are read")


def silent(connection: socket.socket) -> bool:
    """Whether nothing arrives for a short while."""
    connection.settimeout(SHORT_S)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(10)
    return False


def test_without_faults_every_byte_and_the_fin_pass_both_ways(
    proxy: TcpProxy, client: socket.socket
) -> None:
    data = bytes(range(256)) * 8192
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    assert receive(client, len(data)) == data
    sender.join()
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    there, back = proxy.counters(TO_SERVER), proxy.counters(TO_CLIENT)
    assert there.bytes_read == there.bytes_sent == len(data)
    assert back.bytes_read == back.bytes_sent == len(data)
    assert (there.bits_flipped, there.bytes_held, there.bytes_discarded) == (0, 0, 0)
    eventually(lambda: proxy.connections().open == 0, 10, "the finished connection is dropped")


def test_the_tail_reaches_a_slow_reader_after_the_server_has_closed(
    proxy: TcpProxy, client: socket.socket
) -> None:
    data = bytes(300_000)
    client.sendall(data)
    client.shutdown(socket.SHUT_WR)
    eventually(
        lambda: proxy.counters(TO_CLIENT).bytes_sent == len(data), 10, "the proxy has sent all"
    )
    eventually(lambda: proxy.connections().open == 0, 10, "the proxy has let go")
    assert receive(client, len(data) + 1) == data


def test_a_held_direction_delivers_nothing_until_it_heals_and_then_everything(
    proxy: TcpProxy, client: socket.socket, echo: EchoServer
) -> None:
    proxy.set(TO_SERVER, HOLD)
    client.sendall(b"lost?")
    eventually(lambda: proxy.counters(TO_SERVER).bytes_held == 5, 10, "the bytes are held")
    assert bytes(echo.received) == b""
    proxy.heal()
    assert receive(client, 5) == b"lost?"


def test_a_one_way_cut_leaves_the_other_direction_open(
    proxy: TcpProxy, client: socket.socket, echo: EchoServer
) -> None:
    proxy.set(TO_CLIENT, HOLD)
    client.sendall(b"hello")
    eventually(lambda: bytes(echo.received) == b"hello", 10, "the server hears it")
    eventually(lambda: proxy.counters(TO_CLIENT).bytes_held == 5, 10, "the answer is held")
    assert silent(client)
    proxy.set(TO_CLIENT, Faults())
    assert receive(client, 5) == b"hello"
    assert proxy.counters(TO_SERVER).bytes_held == 0


def test_a_held_fin_arrives_only_after_healing(
    proxy: TcpProxy, client: socket.socket, echo: EchoServer
) -> None:
    client.sendall(b"x")
    assert receive(client, 1) == b"x"
    proxy.cut()
    client.shutdown(socket.SHUT_WR)
    assert silent(client)
    assert echo.closes_count == 0
    proxy.heal()
    assert client.recv(1) == b""
    assert echo.closes_count == 1


def test_a_held_direction_is_bounded_and_the_sender_feels_it(
    proxy: TcpProxy, client: socket.socket
) -> None:
    proxy.set(TO_SERVER, HOLD)
    client.settimeout(0.5)
    with pytest.raises(TimeoutError):
        client.sendall(bytes(10 * CHUNK_BYTES_MAX * BUFFER_CHUNKS_MAX))
    chunks_in_hand = 2  # one waits for its turn, one for room
    ceiling = (BUFFER_CHUNKS_MAX + chunks_in_hand) * CHUNK_BYTES_MAX
    assert proxy.counters(TO_SERVER).bytes_read <= ceiling


def test_discarded_bytes_leave_a_hole_in_the_stream(
    proxy: TcpProxy, client: socket.socket, echo: EchoServer
) -> None:
    proxy.set(TO_SERVER, Faults(flow=Flow.DISCARD))
    client.sendall(b"gone")
    eventually(lambda: proxy.counters(TO_SERVER).bytes_discarded == 4, 10, "they are discarded")
    proxy.heal()
    client.sendall(b"here")
    assert receive(client, 4) == b"here"
    assert bytes(echo.received) == b"here"


def test_delay_is_added_and_counted(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.set(TO_SERVER, Faults(delay_s=SHORT_S))
    begin = time.monotonic()
    client.sendall(b"slow")
    assert receive(client, 4) == b"slow"
    assert time.monotonic() - begin >= SHORT_S
    assert proxy.counters(TO_SERVER).chunks_delayed == 1
    assert proxy.counters(TO_CLIENT).chunks_delayed == 0


def test_delayed_chunks_overlap_in_flight(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.set(TO_SERVER, Faults(delay_s=60))
    for read in range(1, 21):
        client.sendall(b"x")
        wait_until_read(proxy, read)
    counters = proxy.counters(TO_SERVER)
    assert (counters.chunks_delayed, counters.bytes_sent) == (20, 0)


def test_a_throttled_direction_is_slow_and_healing_frees_it_at_once(
    proxy: TcpProxy, client: socket.socket
) -> None:
    proxy.set(TO_SERVER, Faults(bytes_per_s=1.0))
    client.sendall(b"abcdef")
    assert receive(client, 1) == b"a"
    assert silent(client)
    assert proxy.counters(TO_SERVER).bytes_throttled == 1
    proxy.heal()
    assert receive(client, 5) == b"bcdef"


def test_throttled_bytes_take_the_time_of_their_rate(
    proxy: TcpProxy, client: socket.socket
) -> None:
    proxy.set(TO_CLIENT, Faults(bytes_per_s=100_000))
    begin = time.monotonic()
    client.sendall(bytes(20_000))
    assert len(receive(client, 20_000)) == 20_000
    assert time.monotonic() - begin >= 0.15


def test_one_bit_of_the_nth_byte_is_flipped_once(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.set(TO_SERVER, Faults(flip_at=3))
    client.sendall(bytes(8))
    damaged = receive(client, 8)
    assert damaged[:3] == bytes(3)
    assert damaged[3].bit_count() == 1
    assert damaged[4:] == bytes(4)
    client.sendall(bytes(8))
    assert receive(client, 8) == bytes(8)
    assert proxy.counters(TO_SERVER).bits_flipped == 1


def test_the_place_of_a_flip_counts_from_when_it_was_set(
    proxy: TcpProxy, client: socket.socket
) -> None:
    client.sendall(bytes(100))
    assert receive(client, 100) == bytes(100)
    proxy.set(TO_SERVER, Faults(flip_at=0))
    client.sendall(bytes(2))
    damaged = receive(client, 2)
    assert damaged[0] != 0
    assert damaged[1] == 0


def test_flips_with_a_probability_are_as_many_as_counted_and_repeat_with_the_seed(
    echo: EchoServer,
) -> None:
    size = 50_000
    seen = []
    for _ in range(2):
        with TcpProxy(echo.address, seed=3) as proxy, connect(proxy) as client:
            proxy.set(TO_SERVER, Faults(flip_probability=0.01))
            client.sendall(bytes(size))
            seen.append(receive(client, size))
            flips = sum(byte.bit_count() for byte in seen[-1])
            assert proxy.counters(TO_SERVER).bits_flipped == flips
            assert 300 < flips < 700
    places = [[at for at, byte in enumerate(data) if byte] for data in seen]
    assert places[0] == places[1]


def test_a_probability_of_one_flips_every_byte(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.set(TO_CLIENT, Faults(flip_probability=1.0))
    client.sendall(bytes(1000))
    assert all(byte.bit_count() == 1 for byte in receive(client, 1000))
    assert proxy.counters(TO_CLIENT).bits_flipped == 1000


def test_a_chunk_is_duplicated(proxy: TcpProxy, client: socket.socket) -> None:
    proxy.set(TO_SERVER, Faults(duplicate_probability=1.0))
    client.sendall(b"twice")
    assert receive(client, 10) == b"twicetwice"
    assert proxy.counters(TO_SERVER).chunks_duplicated == 1


def test_reset_is_an_rst_on_both_sides(
    proxy: TcpProxy, client: socket.socket, echo: EchoServer
) -> None:
    client.sendall(b"x")
    assert receive(client, 1) == b"x"
    assert proxy.reset() == 1
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    eventually(lambda: echo.resets_count == 1, 10, "the server is reset")
    assert proxy.connections().resets == 1
    with connect(proxy) as again:
        again.sendall(b"y")
        assert receive(again, 1) == b"y"


def test_a_half_close_ends_one_direction_only(
    proxy: TcpProxy, client: socket.socket, echo: EchoServer
) -> None:
    client.sendall(b"x")
    assert receive(client, 1) == b"x"
    assert proxy.half_close(TO_CLIENT) == 1
    assert client.recv(1) == b""
    client.sendall(b"still heard")
    eventually(lambda: bytes(echo.received) == b"xstill heard", 10, "the server still hears")
    eventually(lambda: proxy.counters(TO_CLIENT).bytes_discarded == 11, 10, "the echo is lost")
    assert proxy.half_close(TO_CLIENT) == 0
    assert proxy.counters(TO_CLIENT).half_closes == 1


def test_a_peers_reset_reaches_the_other_side(
    proxy: TcpProxy, client: socket.socket, echo: EchoServer
) -> None:
    client.sendall(b"x")
    assert receive(client, 1) == b"x"
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    eventually(lambda: echo.resets_count == 1, 10, "the server is reset")
    eventually(lambda: proxy.connections().open == 0, 10, "the connection is dropped")


def test_new_connections_can_be_reset_or_left_without_an_answer(
    proxy: TcpProxy, echo: EchoServer
) -> None:
    proxy.admit(Admission.RESET)
    with pytest.raises(ConnectionResetError):
        receive_on_new_connection(proxy)
    proxy.admit(Admission.SILENT)
    with connect(proxy) as ignored:
        ignored.sendall(b"anyone?")
        assert silent(ignored)
        assert bytes(echo.received) == b""
    counters = proxy.connections()
    assert (counters.accepted, counters.admission_reset, counters.admission_silent) == (2, 1, 1)


def test_a_server_that_is_not_there_shows_as_a_reset() -> None:
    with TcpProxy(("127.0.0.1", free_port())) as proxy:
        with pytest.raises(ConnectionResetError):  # by the kernel's timing, in connect or in recv
            receive_on_new_connection(proxy)
        eventually(lambda: proxy.connections().dial_failed == 1, 10, "the failure is counted")


def test_many_connections_share_the_faults_and_the_counters(proxy: TcpProxy) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(proxy)) for _ in range(50)]
        for client in clients:
            client.sendall(b"ping")
        assert [receive(client, 4) for client in clients] == [b"ping"] * 50
        assert proxy.counters(TO_SERVER).bytes_sent == 200
        assert proxy.connections().open == 50


def test_leaving_the_proxy_with_open_connections_ends_them(echo: EchoServer) -> None:
    with TcpProxy(echo.address) as proxy:
        client = connect(proxy)
        client.sendall(b"x")
        assert receive(client, 1) == b"x"
        proxy.cut()
    with client, pytest.raises(ConnectionResetError):
        client.recv(1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flip_probability": 1.1},
        {"duplicate_probability": -0.1},
        {"delay_s": -1.0},
        {"bytes_per_s": 0.0},
        {"flip_at": -1},
    ],
)
def test_impossible_faults_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Faults(**wrong)  # type: ignore[arg-type]
