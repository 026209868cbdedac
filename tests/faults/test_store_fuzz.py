"""Whatever comes over the store's gRPC: an answer or the caller's error, and the process goes on.

Requests are made from the descriptors of the service, so a field or method that is added is in it.
KVTIER_FUZZ_EXAMPLES=100000 runs it for longer, with other requests each time.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import grpc
import psutil
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.limits import NAME_BYTES_MAX, PAYLOAD_BYTES_MAX, TIER_BATCH_BLOCKS_MAX
from kvtier.wire import blocks, rpc
from kvtier.wire import messages as pb
from tests.harness.processes import ProcessRunner
from tests.support.store_cluster import BLOCK, MIB, StoreProcess, described, start_store
from tests.tiers.contract import NAMESPACE, OTHER_NAMESPACE, name_of

FEW: Final = 300
EXAMPLES: Final = int(os.environ.get("KVTIER_FUZZ_EXAMPLES", "0")) or FEW
RSS_GROWTH_BYTES_MAX: Final = 64 * MIB
CALL_S: Final = 60.0
METHODS: Final = rpc.methods(rpc.STORE)
REFUSALS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""What is the caller's fault, or a ceiling; UNAVAILABLE only where another store was asked for."""

LONG_TEXT: Final = "s" * MIB
TEXTS: Final = [
    "", "tenant", "/", "../../etc/passwd", "a\0b", "a\r\nb: c", "\u202e\ufeff\U0001f4a9",
    "x" * NAME_BYTES_MAX, "x" * (NAME_BYTES_MAX + 1), LONG_TEXT,
]  # fmt: skip
EDGES: Final = [0, 1, 2, 63, 255, 4096, 2**31 - 1, 2**31, 2**32 - 1]
WIDE: Final = [*EDGES, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
LENGTHS: Final = [
    0, 1, 8, 64, 4095, 4096, BLOCK, MIB, MIB + 1, PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX + 1, 2**63,
    2**64 - 1,
]  # fmt: skip
KEYS: Final = [name_of(n).key for n in range(6)]
CHUNKS: Final = [bytes(n) for n in (0, 1, 4095, 4096, 40_000, BLOCK, MIB, 5 * MIB)]


SOUND: Final[dict[str, list[Any]]] = {
    "namespace": [NAMESPACE],
    "lengths": [8, 4096],
    "ttl_ms": [50, 60_000],
    "deadline_ms": [0, 1000],
    "payload_bytes": [0, 4096],
    "key_kind": [0, 1],
    "key_bytes": [0, 32],
    "priority": [0, 100],
    "priority_plus_one": [0, 101],
    "store": [""],
    "scope": TEXTS[:8],
}
"""Of each field that is checked, values that are taken."""


def columns(field: FieldDescriptor, count: int) -> st.SearchStrategy[bytes]:
    """A column of a message about so many blocks; at times of other ones, or of no numbers."""
    if field.name == "keys":
        some = keys_of(count)
        many = st.just(bytes(32 * (TIER_BATCH_BLOCKS_MAX + 1)))
        return st.one_of(some, some, some, st.binary(max_size=70), many)
    if field.name == "namespace":
        return st.sampled_from([NAMESPACE, OTHER_NAMESPACE, b"", bytes(31), bytes(32), bytes(33)])
    packed = numbers_of(LENGTHS if field.name == "lengths" else WIDE, count)
    return st.one_of(packed, packed, packed, st.just(b""), st.binary(max_size=20))


def keys_of(count: int) -> st.SearchStrategy[bytes]:
    """Keys of so many blocks, some perhaps twice."""
    return st.lists(st.sampled_from(KEYS), min_size=count, max_size=count).map(b"".join)


def numbers_of(values: list[int], count: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(values), min_size=count, max_size=count).map(blocks.u64s)


def scalars(field: FieldDescriptor, count: int, *, sound: bool) -> st.SearchStrategy[Any]:
    """Values of a field: those that are taken, or any that fit into it."""
    is_column = field.type == FieldDescriptor.TYPE_BYTES
    if sound and is_column and field.name != "namespace":
        return keys_of(count) if field.name == "keys" else numbers_of(SOUND["lengths"], count)
    if sound and field.name in SOUND:
        return st.sampled_from(SOUND[field.name])
    if is_column:
        return columns(field, count)
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.sampled_from(TEXTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    return st.sampled_from(WIDE if field.type == FieldDescriptor.TYPE_UINT64 else EDGES)


@st.composite
def filled(draw: st.DrawFn, descriptor: Descriptor, count: int, sound: bool) -> Any:
    """A message about `count` blocks: with every field and taken, or with any and perhaps not."""
    made = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not sound and not draw(st.booleans()):
            continue
        if sound and field.name == "reservation_ids" and descriptor is pb.PutHead.DESCRIPTOR:
            continue  # else it is no direct put
        if field.message_type is not None:
            getattr(made, field.name).CopyFrom(draw(filled(field.message_type, count, sound)))
        else:
            setattr(made, field.name, draw(scalars(field, count, sound=sound)))
    return made


@st.composite
def put_streams(draw: st.DrawFn) -> list[bytes]:
    """A head and chunks; at times exactly what the head declares, at times in any order."""
    count, sound = draw(st.integers(0, 4)), draw(st.booleans())
    head = draw(filled(pb.PutHead.DESCRIPTOR, count, sound))
    chunks = draw(st.lists(st.sampled_from(CHUNKS), max_size=4))
    if sound:
        head.checksums = b""  # of nobody knows what
        whole = bytes(sum(blocks.u64s_from("lengths", head.lengths)))
        chunks = [whole] if whole else []
    parts = [pb.PutBlocksRequest(head=head), *[pb.PutBlocksRequest(data=one) for one in chunks]]
    if draw(st.integers(0, 9)) == 0:
        parts = draw(st.permutations([*parts, parts[0]]))
    return [part.SerializeToString() for part in parts]


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A method and the bytes of its requests."""
    name = draw(st.sampled_from(sorted(METHODS)))
    if draw(st.integers(0, 9)) == 0:
        return name, draw(st.lists(st.binary(max_size=200), min_size=1, max_size=2))
    if name == "Put":
        return name, draw(put_streams())
    descriptor = rpc.STORE.methods_by_name[name].input_type
    count, sound = draw(st.integers(0, 4)), draw(st.booleans())
    return name, [draw(filled(descriptor, count, sound)).SerializeToString()]


def outcome(channel: grpc.Channel, name: str, sent: Sequence[bytes]) -> grpc.StatusCode:
    """Make the call and take its first answer; how it ended, OK for an answer."""
    method = METHODS[name]
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
    }
    make: Any = kinds[method.client_streams, method.server_streams]
    call = make(method.path, bytes, method.parse_response)
    try:
        answer = call(iter(sent) if method.client_streams else sent[0], timeout=CALL_S)
        if method.server_streams:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as refused:
        error = refused
    else:
        return grpc.StatusCode.OK
    code: grpc.StatusCode = error.code()
    is_other = code is grpc.StatusCode.UNAVAILABLE and "another store" in str(error.details())
    assert code in REFUSALS or is_other, f"{name}: {error}"
    return code


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    directory = tmp_path_factory.mktemp("fuzz")
    with ProcessRunner("store-fuzz", directory) as runner:
        yield start_store(
            runner, directory / "data", nvme={"enabled": False}, staging_bytes_max=8 * MIB
        )


@pytest.fixture(scope="module")
def channel(store: StoreProcess) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{store.port}", options=options) as made:
        yield made


def put_and_got(channel: grpc.Channel, number: int) -> bool:
    """Whether a block goes in and comes out as it was."""
    payload = described(number)
    names = blocks.names_to([name_of(number)])
    head = pb.PutHead(names=names, lengths=blocks.u64s([BLOCK]))
    parts: Iterable[bytes] = [
        pb.PutBlocksRequest(head=head).SerializeToString(),
        pb.PutBlocksRequest(data=payload).SerializeToString(),
    ]
    put = channel.stream_unary(METHODS["Put"].path, bytes, METHODS["Put"].parse_response)
    get = channel.unary_stream(METHODS["Get"].path, bytes, METHODS["Get"].parse_response)
    is_stored = put(iter(parts), timeout=CALL_S).statuses == b"\0"
    asked = pb.GetBlocksRequest(names=names).SerializeToString()
    return is_stored and b"".join(m.data for m in get(asked, timeout=CALL_S)) == payload


def rss(store: StoreProcess) -> int:
    size: int = psutil.Process(store.process.pid).memory_info().rss
    return size


def test_any_request_is_answered_or_the_callers_error_in_bounded_memory(
    store: StoreProcess, channel: grpc.Channel
) -> None:
    assert put_and_got(channel, 1000)
    before = rss(store)
    seen: dict[grpc.StatusCode, set[str]] = {}

    @settings(max_examples=EXAMPLES, derandomize=EXAMPLES == FEW)
    @given(requests())
    def any_request(request: tuple[str, list[bytes]]) -> None:
        seen.setdefault(outcome(channel, *request), set()).add(request[0])

    any_request()
    assert seen[grpc.StatusCode.OK] == METHODS.keys(), "each method was answered at least once"
    assert len(seen[grpc.StatusCode.INVALID_ARGUMENT]) > len(METHODS) // 2
    assert rss(store) - before < RSS_GROWTH_BYTES_MAX
    assert put_and_got(channel, 1001)
    store.clean_log()


def head_of(count: int, length: int) -> list[bytes]:
    """A Put that declares so many blocks of such a length, and the first chunk of it."""
    names = pb.BlockNames(namespace=NAMESPACE, keys=bytes(32 * count))
    head = pb.PutHead(names=names, lengths=blocks.u64s([length] * count))
    parts = [pb.PutBlocksRequest(head=head), pb.PutBlocksRequest(data=bytes(BLOCK))]
    return [part.SerializeToString() for part in parts]


@pytest.mark.parametrize(
    ("count", "length"),
    [
        (1, 2**63),
        (1, 2**64 - 1),
        (TIER_BATCH_BLOCKS_MAX, PAYLOAD_BYTES_MAX),
        (TIER_BATCH_BLOCKS_MAX + 1, 0),
        (1, PAYLOAD_BYTES_MAX + 1),
        (1, BLOCK + 1),
        (2, BLOCK // 4),
    ],
)
def test_more_or_less_than_is_declared_is_refused_before_memory_is_taken(
    store: StoreProcess, channel: grpc.Channel, count: int, length: int
) -> None:
    before = rss(store)
    assert outcome(channel, "Put", head_of(count, length)) in REFUSALS
    assert rss(store) - before < RSS_GROWTH_BYTES_MAX
    assert put_and_got(channel, 2000 + count % 1000 + length % 1000)


def endless(first: bytes, chunk: bytes, sent: list[int]) -> Iterator[bytes]:
    """Ten million chunks; counts those that were taken off it."""
    yield first
    data = pb.PutBlocksRequest(data=chunk).SerializeToString()
    for n in range(10_000_000):
        sent[0] = n
        yield data


@pytest.mark.parametrize("chunk_bytes", [0, 1, 4095])
def test_ten_million_chunks_end_at_the_first_that_is_too_small(
    store: StoreProcess, channel: grpc.Channel, chunk_bytes: int
) -> None:
    sent = [0]
    first = head_of(TIER_BATCH_BLOCKS_MAX, PAYLOAD_BYTES_MAX)[0]
    stream = endless(first, bytes(chunk_bytes), sent)
    put = channel.stream_unary(METHODS["Put"].path, bytes, METHODS["Put"].parse_response)
    with pytest.raises(grpc.RpcError) as refused:
        put(stream, timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sent[0] < 100_000
    assert put_and_got(channel, 5000 + chunk_bytes)
    store.clean_log()
