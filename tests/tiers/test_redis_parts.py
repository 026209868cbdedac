"""The Redis tier's parts that do no I/O: keys, values, replies, URLs, error replies."""

import random
import re
from dataclasses import replace

import hiredis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.config import Secret
from kvtier.core.checksum import checksum
from kvtier.core.frame import FrameHeader, FrameName, KeyKind
from kvtier.errors import CallerError, FrameFault, LimitError
from kvtier.limits import NAME_BYTES_MAX
from kvtier.ports import GetRequest, GetStatus
from kvtier.tiers.redis.config import (
    HostPort,
    Login,
    RedisConfig,
    RedisTls,
    SentinelGroup,
    SingleServer,
    UnixPath,
    parse_url,
)
from kvtier.tiers.redis.naming import KEY_BYTES, block_key, name_of_key, pattern
from kvtier.tiers.redis.replies import ErrorReply, Reply, ReplyFormatError, ReplyReader, Sink
from kvtier.tiers.redis.troubles import Trouble, classify
from kvtier.tiers.redis.values import (
    ValueSink,
    encode_scope,
    fault_of,
    scope_in,
    surround,
    value_bytes,
)
from kvtier.types import Fingerprint, ScopeId
from tests.tiers.contract import NAMESPACE, OTHER_NAMESPACE, name_of, payload_of

names = st.one_of(
    st.builds(
        FrameName,
        st.just(KeyKind.PREFIX_KEY),
        st.binary(min_size=32, max_size=32),
        st.binary(min_size=32, max_size=32).map(Fingerprint),
        st.integers(0, 2**32 - 1),
    ),
    st.builds(
        FrameName,
        st.just(KeyKind.ENGINE_DIGEST),
        st.binary(min_size=8, max_size=32),
        st.binary(min_size=32, max_size=32).map(Fingerprint),
        st.integers(0, 2**32 - 1),
    ),
)


@given(names)
def test_a_key_has_one_form_and_gives_its_name_back(name: FrameName) -> None:
    key = block_key(name)
    assert len(key) == KEY_BYTES == len(pattern()) == len(pattern(name.namespace))
    assert re.fullmatch(rb"kvtier:1:[0-9a-f]{140}", key)
    assert name_of_key(key) == name


@given(names, names)
def test_two_names_never_share_a_key(one: FrameName, other: FrameName) -> None:
    assert (block_key(one) == block_key(other)) == (one == other)


def test_names_that_differ_in_little_have_keys_of_their_own() -> None:
    name = FrameName(KeyKind.ENGINE_DIGEST, b"\1" * 8, NAMESPACE)
    others = [
        replace(name, key=b"\1" * 8 + b"\0"),
        replace(name, key=b"\1" * 32),
        replace(name, codec_id=1),
        replace(name, namespace=OTHER_NAMESPACE),
        FrameName(KeyKind.PREFIX_KEY, b"\1" * 32, NAMESPACE),
    ]
    assert len({block_key(n) for n in [name, *others]}) == 6


@given(st.binary(max_size=200))
def test_a_key_that_is_not_ours_names_nothing(key: bytes) -> None:
    assert name_of_key(key) is None
    assert name_of_key(b"kvtier:1:" + key) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key.upper(),
        lambda key: key + b"0",
        lambda key: key[:-1],
        lambda key: key + b"\n",
        lambda key: key.replace(b":1:", b":2:"),
        lambda key: key[:73] + b"03" + key[75:],  # a key kind that does not exist
        lambda key: key[:75] + b"21" + key[77:],  # 33 bytes of key
        lambda key: key[:75] + b"1f" + key[77:],  # 31: then its last byte must be zero
    ],
)
def test_a_key_that_is_almost_ours_names_nothing(change: object) -> None:
    key = block_key(FrameName(KeyKind.PREFIX_KEY, b"\xff" * 32, NAMESPACE))
    assert name_of_key(key) is not None
    assert name_of_key(change(key)) is None  # type: ignore[operator]


def value_of(number: int, size: int, scope: str = "") -> bytes:
    payload = payload_of(number, size)
    header = FrameHeader(name_of(number), 7, size, checksum(payload))
    head, tail = surround(header, encode_scope(ScopeId(scope)))
    return head + payload + tail


@pytest.mark.parametrize("scope", ["", "tenant", "a/../\n\0é", "x" * NAME_BYTES_MAX])
@pytest.mark.parametrize("size", [0, 1, 4096])
def test_a_value_gives_payload_and_scope_back(scope: str, size: int) -> None:
    value = value_of(1, size, scope)
    assert len(value) == value_bytes(size, scope.encode())
    assert fault_of(GetRequest(name_of(1)), value) is None
    assert scope_in(value[:128], value[-1036:]) == scope
    with pytest.raises(LimitError):
        encode_scope(ScopeId("x" * (NAME_BYTES_MAX + 1)))
    with pytest.raises(CallerError):
        encode_scope(ScopeId("\ud800"))


def test_every_flipped_bit_of_a_value_is_found() -> None:
    value = value_of(1, 100, "tenant")
    for bit in range(8 * len(value)):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert fault_of(GetRequest(name_of(1)), bytes(damaged)) is not None, bit


def test_every_truncation_and_extension_of_a_value_is_found() -> None:
    value = value_of(1, 100, "tenant")
    for length in range(len(value)):
        assert fault_of(GetRequest(name_of(1)), value[:length]) is not None, length
    for more in (1, 12, 5000):
        assert fault_of(GetRequest(name_of(1)), value + bytes(more)) is not None


def test_a_value_of_another_block_is_not_given() -> None:
    for other, fault in (
        (name_of(2), FrameFault.KEY),
        (name_of(1, OTHER_NAMESPACE), FrameFault.NAMESPACE),
        (replace(name_of(1), codec_id=3), FrameFault.CODEC),
    ):
        found = fault_of(GetRequest(other), value_of(1, 100))
        assert found is not None
        assert found.fault is fault


# Replies: hiredis is the twin.


class Collector:
    """A sink that keeps the bytes, in pieces of odd sizes, or discards them."""

    def __init__(self, piece: int) -> None:
        self.left_bytes = 0
        self.taken = bytearray()
        self.is_finished = False
        self._piece = piece
        self._room = memoryview(bytearray(0))

    def begin(self, value_bytes: int) -> None:
        self.left_bytes = value_bytes

    def room(self) -> memoryview | None:
        if not self._piece:
            return None
        self._room = memoryview(bytearray(min(self._piece, self.left_bytes)))
        return self._room

    def advance(self, count: int) -> None:
        self.left_bytes -= count
        self.taken += self._room[:count]

    def finish(self) -> None:
        self.is_finished = True


def fed(reader: ReplyReader, stream: bytes, dice: random.Random) -> list[Reply]:
    replies: list[Reply] = []
    while stream:
        room = reader.room()
        count = min(len(stream), room.nbytes, dice.choice([1, 2, 3, 7, 100, 5000]))
        room[:count] = stream[:count]
        stream = stream[count:]
        replies += reader.received(count)
    return replies


reply_bytes = st.one_of(
    st.binary(max_size=40).map(lambda text: b"+" + re.sub(rb"[\r\n]", b"", text) + b"\r\n"),
    st.from_regex(r"-(ERR|OOM) [a-z ]{0,30}\r\n", fullmatch=True).map(str.encode),
    st.integers(-(2**63), 2**63 - 1).map(lambda number: b":%d\r\n" % number),
    st.just(b"$-1\r\n"),
    st.binary(max_size=300).map(lambda bulk: b"$%d\r\n%b\r\n" % (len(bulk), bulk)),
    st.integers(0, 30_000).map(lambda n: b"$%d\r\n%b\r\n" % (n, random.Random(n).randbytes(n))),
)


def as_hiredis(reply: Reply) -> object:
    if isinstance(reply, Collector):
        return bytes(reply.taken)
    return str(reply) if isinstance(reply, ErrorReply) else reply


@settings(max_examples=60, deadline=None)
@given(st.lists(reply_bytes, max_size=12), st.integers(0, 2**32))
def test_any_replies_cut_anywhere_read_as_hiredis_reads_them(parts: list[bytes], seed: int) -> None:
    dice = random.Random(seed)
    reader = ReplyReader(scratch_bytes=512)
    sinks: list[Sink | None] = [
        Collector(dice.choice([1, 10, 4096])) if len(part) > 200 else None for part in parts
    ]
    reader.expect(sinks)
    twin = hiredis.Reader()
    twin.feed(b"".join(parts))
    expected = [twin.gets() for _ in parts]
    replies = fed(reader, b"".join(parts), dice)
    assert [as_hiredis(reply) for reply in replies] == [
        str(e) if isinstance(e, hiredis.ReplyError) else e for e in expected
    ]
    assert reader.is_idle


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_any_garbage_is_refused_or_waited_for_in_constant_memory(junk: bytes, seed: int) -> None:
    reader = ReplyReader(scratch_bytes=64)
    reader.expect([Collector(0), None] * 20)
    try:
        fed(reader, junk, random.Random(seed))
    except ReplyFormatError:
        return
    assert reader.room().nbytes > 0


@pytest.mark.parametrize(
    "stream",
    [
        b"!1\r\n",
        b"*1\r\n:1\r\n",
        b":x\r\n",
        b":\r\n",
        b"$-2\r\n",
        b"$99999999999999999999999\r\n",
        b"$9223372036854775807\r\n",
        b"$3\r\nabcde",
        b"+" + b"x" * 70_000,
    ],
)
def test_what_is_no_reply_is_refused(stream: bytes) -> None:
    reader = ReplyReader()
    reader.expect([None])
    with pytest.raises(ReplyFormatError):
        fed(reader, stream, random.Random(1))


def test_a_reply_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ReplyFormatError):
        fed(ReplyReader(), b"+OK\r\n", random.Random(1))


@pytest.mark.parametrize("size", [0, 1, 63, 70_000])
def test_a_value_arrives_in_the_callers_memory_however_it_is_cut(size: int) -> None:
    value = value_of(1, size, "tenant")
    stream = b"$%d\r\n%b\r\n" % (len(value), value)
    for seed in range(20):
        into = memoryview(bytearray(size))
        sink = ValueSink(GetRequest(name_of(1), into, size))
        reader = ReplyReader(scratch_bytes=256)
        reader.expect([sink, None])
        assert fed(reader, stream + b":1\r\n", random.Random(seed)) == [sink, 1]
        result = sink.result()
        assert result is not None
        assert result.status is GetStatus.HIT
        assert bytes(into) == payload_of(1, size)
        assert result.scope == "tenant"


# URLs and errors


def test_urls_say_where_the_server_is() -> None:
    assert parse_url("redis://h") == SingleServer(HostPort("h", 6379))
    assert parse_url("redis://u:p%40ss@h:1/3") == SingleServer(
        HostPort("h", 1), Login("u", Secret("p@ss")), 3
    )
    assert parse_url("rediss://h").tls == RedisTls()
    assert parse_url("unix:///run/s?db=2") == SingleServer(UnixPath("/run/s"), database=2)
    assert parse_url("redis://[::1]:7").place == HostPort("::1", 7)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:1",
        "http://h",
        "redis://",
        "redis://h:99999",
        "redis://h/x",
        "redis://h/1/2",
        "redis://h?db=1",
        "unix://h/p",
        "unix://",
        "unix:///p?x=1",
        "redis://h#f",
        "redis://secret@h:0",
    ],
)
def test_other_urls_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(CallerError) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_tls_files_need_a_tls_url() -> None:
    with pytest.raises(CallerError):
        parse_url("redis://h", RedisTls())


def test_no_password_shows_in_a_configuration() -> None:
    config = RedisConfig(parse_url("redis://u:hunter2@h"))
    assert "hunter2" not in repr(config)
    group = SentinelGroup("s", (HostPort("h", 1),), Login("u", Secret("hunter2")))
    assert "hunter2" not in repr(group)


@pytest.mark.parametrize(
    "changes",
    [
        {"connections_max": 0},
        {"value_bytes_max": 0},
        {"reply_timeout_s": 0.0},
        {"reply_timeout_s": float("inf")},
        {"connect_timeout_s": float("nan")},
        {"ttl_s": 0.0},
        {"ttl_s": float("inf")},
        {"names_max": 0},
    ],
)
def test_a_bound_that_bounds_nothing_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(CallerError):
        replace(RedisConfig(parse_url("redis://h")), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "trouble"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", Trouble.OUT_OF_MEMORY),
        ("READONLY You can't write against a read only replica.", Trouble.READ_ONLY),
        ("LOADING server is loading the dataset in memory", Trouble.LOADING),
        ("NOAUTH Authentication required.", Trouble.UNAUTHENTICATED),
        ("WRONGPASS invalid username-password pair", Trouble.WRONG_PASSWORD),
        ("ERR invalid password", Trouble.WRONG_PASSWORD),
        ("NOPERM User x has no permissions", Trouble.FORBIDDEN),
        ("MASTERDOWN Link with MASTER is down", Trouble.MASTER_DOWN),
        ("MOVED 3999 127.0.0.1:6381", Trouble.CLUSTER),
        ("ASK 3999 127.0.0.1:6381", Trouble.CLUSTER),
        ("CLUSTERDOWN Hash slot not served", Trouble.CLUSTER),
        ("CROSSSLOT Keys in request don't hash", Trouble.CLUSTER),
        ("BUSY Redis is busy running a script", Trouble.BUSY),
        ("MISCONF Errors writing to the AOF file", Trouble.DISK_REFUSED),
        ("NOREPLICAS Not enough good replicas to write.", Trouble.DISK_REFUSED),
        ("ERR max number of clients reached", Trouble.CROWDED),
        ("ERR syntax error", Trouble.REFUSED),
        ("", Trouble.REFUSED),
    ],
)
def test_error_replies_are_told_apart(message: str, trouble: Trouble) -> None:
    assert classify(message) is trouble
