"""Server-sent events are cut the same way however they arrive, and not a byte is lost."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CallerError, LimitError
from kvtier.openai import sse
from kvtier.openai.sse import SseEvent, SseParser

PIECES = st.sampled_from(
    [
        *(b"data: {}", b"data:x", b"data", b"event: error", b"id: 1", b": ping", b"\xef\xbb\xbf"),
        *(b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"\r\r", b"\n\r", b"data: [DONE]\n\n"),
    ]
)
STREAMS = st.lists(PIECES | st.binary(max_size=6), max_size=20).map(b"".join)


def parsed(stream: bytes, cuts: list[int]) -> tuple[list[SseEvent], bytes]:
    parser = SseParser()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found: list[SseEvent] = []
    for start, stop in pairwise(edges):
        found += parser.feed(stream[start:stop])
    return found + parser.finish(), parser.rest()


def naive(stream: bytes) -> tuple[list[SseEvent], bytes]:
    """The same, over the whole stream at once and line by line."""
    found: list[SseEvent] = []
    block = b""
    for line in re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z", stream):
        block += line
        if line in (b"\n", b"\r", b"\r\n"):
            found.append(fields(block, is_first=not found))
            block = b""
    return found, block


def fields(block: bytes, is_first: bool) -> SseEvent:
    text = block.removeprefix(b"\xef\xbb\xbf") if is_first else block
    data, name = [], b""
    for line in re.split(rb"\r\n|\n|\r", text):
        key, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if key == b"data":
            data.append(value)
        if key == b"event":
            name = value
    return SseEvent(block, b"\n".join(data) if data else None, name)


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 120), max_size=30))
def test_any_chunking_gives_the_events_of_the_whole_stream(stream: bytes, cuts: list[int]) -> None:
    assert parsed(stream, cuts) == naive(stream)


@given(stream=STREAMS)
def test_byte_by_byte_gives_the_events_of_the_whole_stream(stream: bytes) -> None:
    assert parsed(stream, list(range(len(stream)))) == naive(stream)


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 120), max_size=30))
def test_raw_events_and_the_rest_are_the_stream(stream: bytes, cuts: list[int]) -> None:
    found, rest = parsed(stream, cuts)
    assert b"".join(event.raw for event in found) + rest == stream


@given(data=st.binary(max_size=60), name=st.sampled_from([b"", b"error"]))
def test_what_is_written_is_read_back(data: bytes, name: bytes) -> None:
    [event] = SseParser().feed(sse.event(data, name))
    assert event.data is not None
    assert event.data == re.sub(rb"\r\n|\r", b"\n", data)
    assert event.name == name


def test_an_event_is_there_as_soon_as_its_blank_line_is() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    [event] = parser.feed(b"\n")
    assert (event.data, event.is_done) == (b"a", False)
    [done] = parser.feed(sse.DONE)
    assert done.is_done


def test_a_comment_is_an_event_without_data() -> None:
    [event] = SseParser().feed(sse.comment(b"keep-alive"))
    assert event.data is None


@pytest.mark.parametrize("write", [sse.comment, lambda text: sse.event(b"", text)])
def test_line_ends_cannot_be_smuggled_into_a_name_or_comment(write: object) -> None:
    assert callable(write)
    with pytest.raises(CallerError):
        write(b"x\ndata: forged")


@given(chunk_bytes=st.integers(1, 400))
def test_an_event_beyond_the_ceiling_is_refused_and_its_bytes_are_kept(chunk_bytes: int) -> None:
    parser = SseParser(event_bytes_max=100)
    stream = b"data: fits\n\n" + b"data: " + b"x" * 300 + b"\n\ndata: later\n\n"
    events, taken = [], 0
    while taken < len(stream):
        chunk = stream[taken : taken + chunk_bytes]
        taken += chunk_bytes
        try:
            events += parser.feed(chunk)
        except LimitError:
            break
    assert [event.data for event in events] == [b"fits"]
    assert events[0].raw + parser.rest() == stream[:taken]
    with pytest.raises(LimitError):
        parser.feed(b"data: more\n\n")
