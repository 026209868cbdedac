"""The block frame: any accident to its bytes is a miss, and nothing else passes."""

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.checksum import checksum
from kvtier.core.frame import (
    HEADER_BYTES,
    FrameExpectation,
    FrameHeader,
    FrameName,
    KeyKind,
    encode_header,
    frame_names,
    header_of,
    parse_header,
    payload_of,
    verify,
    verify_copied,
)
from kvtier.errors import CallerError, FrameError, FrameFault
from kvtier.limits import PAYLOAD_BYTES_MAX
from kvtier.types import Fingerprint

NAMESPACE = Fingerprint(bytes(range(100, 132)))
NAME = FrameName(KeyKind.PREFIX_KEY, bytes(range(32)), NAMESPACE, codec_id=3)
PAYLOAD = bytes(range(48, 64))
WRITER_ID = 0x1122334455667788


def framed(name: FrameName, payload: bytes) -> bytes:
    return encode_header(header_of(name, WRITER_ID, payload)) + payload


def expectation(name: FrameName, payload: bytes) -> FrameExpectation:
    return FrameExpectation(name, len(payload))


FRAME = framed(NAME, PAYLOAD)
EXPECTED = expectation(NAME, PAYLOAD)


def fault(frame: bytes, expected: FrameExpectation = EXPECTED) -> FrameFault:
    with pytest.raises(FrameError) as caught:
        verify(frame, expected)
    return caught.value.fault


def resealed(offset: int, form: str, *values: int | bytes) -> bytes:
    """FRAME with fields of its header replaced and the header checksum made to fit."""
    header = bytearray(FRAME[:HEADER_BYTES])
    struct.pack_into(form, header, offset, *values)
    struct.pack_into("<Q", header, 120, checksum(bytes(header[:120])))
    return bytes(header) + PAYLOAD


def test_the_bytes_are_those_of_the_table() -> None:
    by_hand = (
        b"\x89KVTIER\n"
        + struct.pack("<HHHH", 1, 128, 1, 32)
        + struct.pack("<II", 3, 0)
        + struct.pack("<Q", WRITER_ID)
        + bytes(range(32))
        + NAMESPACE
        + struct.pack("<QQ", 16, checksum(PAYLOAD))
        + bytes(8)
    )
    assert by_hand + struct.pack("<Q", checksum(by_hand)) + PAYLOAD == FRAME
    assert HEADER_BYTES % 64 == 0


def test_what_was_framed_is_verified_and_read_without_a_copy() -> None:
    buffer = bytearray(FRAME)
    header = verify(buffer, EXPECTED)
    assert header == FrameHeader(NAME, WRITER_ID, len(PAYLOAD), checksum(PAYLOAD))
    payload = payload_of(buffer)
    assert payload == PAYLOAD
    buffer[HEADER_BYTES] ^= 1
    assert payload[0] == PAYLOAD[0] ^ 1


@pytest.mark.parametrize("length", [8, 16, 20, 32])
def test_an_engine_digest_of_its_own_length_names_a_frame(length: int) -> None:
    name = FrameName(KeyKind.ENGINE_DIGEST, b"\x07" * length, NAMESPACE)
    assert verify(framed(name, PAYLOAD), expectation(name, PAYLOAD)).name == name


def test_an_engine_digest_never_passes_for_a_prefix_key_or_a_longer_digest() -> None:
    digest = dataclasses.replace(NAME, key_kind=KeyKind.ENGINE_DIGEST)
    assert fault(FRAME, expectation(digest, PAYLOAD)) is FrameFault.KEY
    short = dataclasses.replace(digest, key=b"\x07" * 16)
    padded = dataclasses.replace(digest, key=b"\x07" * 16 + bytes(16))
    assert fault(framed(short, PAYLOAD), expectation(padded, PAYLOAD)) is FrameFault.KEY


@pytest.mark.parametrize("payload", [b"", b"x", PAYLOAD], ids=["empty", "one byte", "16 bytes"])
def test_every_flipped_bit_of_a_small_frame_is_detected(payload: bytes) -> None:
    frame, expected = framed(NAME, payload), expectation(NAME, payload)
    assert verify(frame, expected).payload_bytes == len(payload)
    for at in range(len(frame)):
        for bit in range(8):
            altered = bytearray(frame)
            altered[at] ^= 1 << bit
            with pytest.raises(FrameError):
                verify(altered, expected)


def test_every_wrong_byte_of_a_small_frame_is_detected() -> None:
    for at in range(len(FRAME)):
        for difference in (0xFF, 0x55, 0xAA, FRAME[at]):
            if difference:
                altered = bytearray(FRAME)
                altered[at] ^= difference
                with pytest.raises(FrameError):
                    verify(altered, EXPECTED)


@pytest.mark.parametrize("payload", [b"", PAYLOAD], ids=["empty", "16 bytes"])
def test_every_truncation_of_a_small_frame_is_short(payload: bytes) -> None:
    frame, expected = framed(NAME, payload), expectation(NAME, payload)
    for length in range(len(frame)):
        assert fault(frame[:length], expected) is FrameFault.SHORT


@pytest.mark.parametrize("tail", [b"\0", b"x", FRAME, bytes(4096)])
def test_bytes_after_a_frame_are_a_wrong_length(tail: bytes) -> None:
    assert fault(FRAME + tail) is FrameFault.LENGTH
    assert fault(FRAME + tail, FrameExpectation(NAME, None)) is FrameFault.LENGTH


def test_every_swap_of_headers_and_bodies_is_detected() -> None:
    others = {
        "key": dataclasses.replace(NAME, key=bytes(32)),
        "namespace": dataclasses.replace(NAME, namespace=Fingerprint(bytes(32))),
        "codec": dataclasses.replace(NAME, codec_id=4),
    }
    body = bytes(reversed(PAYLOAD))
    assert fault(FRAME[:HEADER_BYTES] + body) is FrameFault.PAYLOAD_CHECKSUM
    for name, other in others.items():
        frame = framed(other, body)
        assert fault(frame) is FrameFault(name)
        assert fault(frame[:HEADER_BYTES] + PAYLOAD) is FrameFault(name)
        crossed = FRAME[:HEADER_BYTES] + frame[HEADER_BYTES:]
        assert fault(crossed) is FrameFault.PAYLOAD_CHECKSUM
        assert fault(crossed, expectation(other, body)) is FrameFault(name)


def test_a_header_of_another_length_is_refused_with_any_body() -> None:
    longer = framed(NAME, PAYLOAD + b"!")
    assert fault(longer) is FrameFault.LENGTH
    assert fault(longer[:HEADER_BYTES] + PAYLOAD, FrameExpectation(NAME, None)) is FrameFault.SHORT


def test_a_reader_that_knows_no_length_takes_the_declared_one() -> None:
    for payload in (b"", PAYLOAD, PAYLOAD * 7):
        header = verify(framed(NAME, payload), FrameExpectation(NAME, None))
        assert header.payload_bytes == len(payload)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (resealed(0, "8s", b"\x89KVTIER\r"), FrameFault.MAGIC),
        (resealed(8, "<H", 2), FrameFault.VERSION),
        (resealed(8, "<H", 0xFFFF), FrameFault.VERSION),
        (resealed(10, "<H", 64), FrameFault.HEADER_FIELD),
        (resealed(12, "<H", 0), FrameFault.HEADER_FIELD),
        (resealed(12, "<H", 3), FrameFault.HEADER_FIELD),
        (resealed(14, "<H", 31), FrameFault.HEADER_FIELD),
        (resealed(12, "<HH", 2, 7), FrameFault.HEADER_FIELD),
        (resealed(12, "<HH", 2, 33), FrameFault.HEADER_FIELD),
        (resealed(12, "<HH", 2, 31), FrameFault.HEADER_FIELD),  # a byte of the key is padding
        (resealed(12, "<HH", 1, 0xFFFF), FrameFault.HEADER_FIELD),
        (resealed(20, "<I", 1), FrameFault.HEADER_FIELD),
        (resealed(112, "<Q", 1), FrameFault.HEADER_FIELD),
        (resealed(96, "<Q", PAYLOAD_BYTES_MAX + 1), FrameFault.LENGTH),
        (resealed(96, "<Q", 2**63), FrameFault.LENGTH),
        (resealed(96, "<Q", 2**64 - 1), FrameFault.LENGTH),
        (resealed(96, "<Q", 17), FrameFault.LENGTH),
        (resealed(104, "<Q", 0), FrameFault.PAYLOAD_CHECKSUM),
        (FRAME[:120] + bytes(8) + PAYLOAD, FrameFault.HEADER_CHECKSUM),
        (b"", FrameFault.SHORT),
        (bytes(len(FRAME)), FrameFault.MAGIC),
        (b"\xff" * len(FRAME), FrameFault.MAGIC),
    ],
)
def test_each_fault_is_named(frame: bytes, expected: FrameFault) -> None:
    assert fault(frame) is expected


def test_a_fault_says_no_key() -> None:
    with pytest.raises(FrameError) as caught:
        verify(FRAME, expectation(dataclasses.replace(NAME, key=b"\xab" * 32), PAYLOAD))
    assert "abab" not in str(caught.value)
    assert NAME.key.hex() not in str(caught.value)


def test_a_frame_of_a_future_version_is_a_miss_whatever_follows_its_version() -> None:
    future = FRAME[:8] + struct.pack("<H", 2) + bytes(range(200))
    assert fault(future) is FrameFault.VERSION


def test_a_payload_that_was_checksummed_by_its_copy_is_not_read_again() -> None:
    header = FRAME[:HEADER_BYTES]
    found = verify_copied(header, len(PAYLOAD), checksum(PAYLOAD), EXPECTED)
    assert found == verify(FRAME, EXPECTED)
    for copied, computed, expected in (
        (len(PAYLOAD), checksum(PAYLOAD) ^ 1, FrameFault.PAYLOAD_CHECKSUM),
        (len(PAYLOAD) - 1, checksum(PAYLOAD), FrameFault.SHORT),
        (len(PAYLOAD) + 1, checksum(PAYLOAD), FrameFault.LENGTH),
    ):
        with pytest.raises(FrameError) as caught:
            verify_copied(header, copied, computed, EXPECTED)
        assert caught.value.fault is expected


@given(st.binary(max_size=5000), st.data())
def test_a_burst_of_wrong_bytes_is_detected(payload: bytes, data: st.DataObject) -> None:
    frame, expected = framed(NAME, payload), expectation(NAME, payload)
    start = data.draw(st.integers(0, len(frame) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=64))
    altered = (frame[:start] + noise + frame[start + len(noise) :])[: len(frame)]
    if altered == frame:
        assert verify(altered, expected).payload_bytes == len(payload)
    else:
        assert fault(altered, expected)


@given(st.binary(max_size=300), st.integers(0, 300), st.integers(0, 300))
def test_moved_bytes_are_detected(payload: bytes, start: int, stop: int) -> None:
    frame, expected = framed(NAME, payload), expectation(NAME, payload)
    altered = frame[:start] + frame[stop:]
    if altered != frame:
        assert fault(altered, expected)


def _whole(data: bytes) -> bytes:
    return data


def _after_magic(data: bytes) -> bytes:
    return FRAME[:10] + data


def _with_checksum(data: bytes) -> bytes:
    checked = (FRAME[:10] + data + bytes(110))[:120]
    return checked + struct.pack("<Q", checksum(checked)) + data


@pytest.mark.parametrize("shape", [_whole, _after_magic, _with_checksum])
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes_are_a_header_or_a_frame_error(
    shape: Callable[[bytes], bytes], data: bytes
) -> None:
    raw = shape(data)
    try:
        header = parse_header(raw)
    except FrameError:
        return
    assert encode_header(header) == raw[:HEADER_BYTES]


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


@given(names, names, st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_a_frame_is_verified_for_its_own_name_only(
    name: FrameName, other: FrameName, payload: bytes, writer_id: int
) -> None:
    frame = encode_header(header_of(name, writer_id, payload)) + payload
    assert verify(frame, expectation(name, payload)).writer_id == writer_id
    assert parse_header(frame).name == name
    if other != name:
        assert fault(frame, expectation(other, payload))


def test_payloads_of_any_buffer_are_taken_in_place() -> None:
    array = np.arange(8, dtype=np.float16).reshape(2, 4)
    raw = array.tobytes()
    for payload in (array, memoryview(raw), bytearray(raw)):
        header = header_of(NAME, WRITER_ID, payload)
        assert (header.payload_bytes, header.payload_checksum) == (16, checksum(raw))
    frame = np.frombuffer(framed(NAME, raw), dtype=np.uint8)
    assert payload_of(frame) == raw
    assert verify(frame, expectation(NAME, raw)).name == NAME
    empty = np.zeros((0, 4), dtype=np.float16)
    assert header_of(NAME, WRITER_ID, empty) == header_of(NAME, WRITER_ID, b"")


@pytest.mark.parametrize(
    "buffer",
    ["text", None, 7, [1, 2], memoryview(FRAME)[::2], np.arange(300, dtype=np.uint8)[::2]],
)
def test_what_is_no_contiguous_buffer_is_the_callers_error(buffer: object) -> None:
    with pytest.raises(CallerError):
        parse_header(buffer)  # type: ignore[arg-type]
    with pytest.raises(CallerError):
        verify(buffer, EXPECTED)  # type: ignore[arg-type]
    with pytest.raises(CallerError):
        header_of(NAME, WRITER_ID, buffer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"key_kind": 1},
        {"key": bytes(31)},
        {"key": bytearray(32)},
        {"key_kind": KeyKind.ENGINE_DIGEST, "key": bytes(7)},
        {"key_kind": KeyKind.ENGINE_DIGEST, "key": bytes(33)},
        {"namespace": b""},
        {"codec_id": -1},
        {"codec_id": 2**32},
    ],
)
def test_a_name_that_no_header_can_hold_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CallerError):
        dataclasses.replace(NAME, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"writer_id": -1},
        {"writer_id": True},
        {"writer_id": 2**64},
        {"payload_bytes": PAYLOAD_BYTES_MAX + 1},
        {"payload_bytes": -1},
        {"payload_checksum": 2**64},
    ],
)
def test_a_header_outside_its_fields_is_refused(change: dict[str, object]) -> None:
    header = parse_header(FRAME)
    with pytest.raises(CallerError):
        dataclasses.replace(header, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("payload_bytes", [-1, PAYLOAD_BYTES_MAX + 1, True, 1.0])
def test_an_expectation_that_no_frame_can_meet_is_refused(payload_bytes: object) -> None:
    with pytest.raises(CallerError, match="payload_bytes"):
        FrameExpectation(NAME, payload_bytes)  # type: ignore[arg-type]


def test_names_made_at_once_are_the_names_made_one_by_one() -> None:
    keys = bytes(range(96))
    namespace = Fingerprint(b"n" * 32)
    for kind, size in ((KeyKind.PREFIX_KEY, 32), (KeyKind.ENGINE_DIGEST, 16)):
        single = [
            FrameName(kind, keys[at : at + size], namespace, 7) for at in range(0, len(keys), size)
        ]
        assert frame_names(kind, keys, size, namespace, 7) == single
        assert list(map(hash, frame_names(kind, keys, size, namespace, 7))) == list(
            map(hash, single)
        )
    assert frame_names(KeyKind.PREFIX_KEY, b"", 32, namespace) == []


@pytest.mark.parametrize("size", [0, -1, 7, 31, 33, 95])
def test_names_of_no_whole_keys_are_refused(size: int) -> None:
    with pytest.raises(CallerError):
        frame_names(KeyKind.PREFIX_KEY, bytes(96), size, Fingerprint(b"n" * 32))
