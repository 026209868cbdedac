"""Request bodies are read strictly: what is odd is refused, and nothing brings the process down."""

import gc
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CallerError, LimitError
from kvtier.limits import JSON_DEPTH_MAX
from kvtier.openai.strict_json import parse_object

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=st.dictionaries(st.text(), VALUES, max_size=6), ascii_only=st.booleans())
def test_every_object_is_read_as_it_was_written(value: dict[str, object], ascii_only: bool) -> None:
    try:
        body = json.dumps(value, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(CallerError):
            parse_object(body)
    else:
        assert parse_object(body) == value


@given(body=st.binary(max_size=60))
def test_any_bytes_give_an_object_or_a_caller_error(body: bytes) -> None:
    with suppress(CallerError):  # anything else fails the test
        assert isinstance(parse_object(body), dict)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"{",
        b'{"a":1}x',
        b"{'a':1}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":-1e999}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\\ud800"}',
        b'{"\\uDFFF":1}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\x00"}',
        '{"a":1}'.encode("utf-16"),
    ],
)
def test_odd_bodies_are_refused_with_400(body: bytes) -> None:
    with pytest.raises(CallerError) as caught:
        parse_object(body)
    assert caught.value.http_status == 400


def test_surrogate_pairs_and_backslashes_before_u_are_read() -> None:
    assert parse_object(rb'{"a":"\ud83d\ude00","b":"\\ud800"}') == {"a": "😀", "b": r"\ud800"}


def test_the_last_of_equal_keys_counts() -> None:
    assert parse_object(b'{"a":1,"a":2}') == {"a": 2}


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth_has_a_ceiling(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"

    def nested(depth: int) -> bytes:
        inner = opening * (depth - 1) + b"1" + closing * (depth - 1)
        return b'{"top":' + inner + b',"more":[' + b"[]," * JSON_DEPTH_MAX + b"[]]}"

    assert "top" in parse_object(nested(JSON_DEPTH_MAX))
    for depth in (JSON_DEPTH_MAX + 1, 100_000):
        with pytest.raises(LimitError):
            parse_object(nested(depth))


def test_size_has_a_ceiling() -> None:
    assert parse_object(b'{"a":1}', bytes_max=7) == {"a": 1}
    with pytest.raises(LimitError):
        parse_object(b'{"a":1}', bytes_max=6)


@pytest.mark.parametrize("piece", [b"[],", b'{"a":0},', b"0.5,", b'"ab",', b"1,"])
def test_the_number_of_values_has_a_ceiling(piece: bytes) -> None:
    body = b'{"a":[' + piece * ((32 << 20) // len(piece)) + b"0]}"
    with pytest.raises(LimitError):
        parse_object(body)


def test_a_million_of_token_ids_and_long_texts_of_code_are_read() -> None:
    ids = list(range(1_000_000))
    assert parse_object(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}
    code = "if (a[i] > 1e5) { f(x, y); }\n" * 100_000
    assert parse_object(json.dumps({"prompt": code}).encode()) == {"prompt": code}


@pytest.mark.parametrize("number", [b"1e999", b"-1E+400", b"9" * 400 + b".0", b"9" * 250 + b"e99"])
def test_a_float_that_is_none_is_refused_in_long_bodies_too(number: bytes) -> None:
    filler = b"0.5," * 100_000
    with pytest.raises(CallerError):
        parse_object(b'{"a":[' + filler + number + b"]}")
    assert len(parse_object(b'{"a":[' + filler + b"1e99]}")) == 1
    assert gc.isenabled()
