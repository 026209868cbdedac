"""Canonical encoding: one value, one encoding, and no field that can pass for another."""

import hashlib
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.encoding import Symbol, Value, decode, digest, encode
from kvtier.errors import CallerError, LimitError
from kvtier.limits import ENCODING_BYTES_MAX, ENCODING_DEPTH_MAX

DOMAIN = "kvtier.test.v1"

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ranges = st.tuples(st.integers(0, 2**64 - 2), st.integers(1, 2**32)).map(
    lambda pair: range(pair[0], min(pair[0] + pair[1], 2**64 - 1))
)
scalars: st.SearchStrategy[Value] = st.one_of(
    st.none(),
    texts,
    st.binary(max_size=12),
    st.integers(-(2**63), 2**64 - 1),
    ranges,
    st.builds(Symbol, texts),
)


def _deeper(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    return st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.integers(1, 2**16 - 1), inner, max_size=3),
    )


values: st.SearchStrategy[Value] = st.recursive(scalars, _deeper, max_leaves=6)
records: st.SearchStrategy[Mapping[int, Value]] = st.dictionaries(
    st.integers(1, 5), values, max_size=4
)


@given(records)
def test_what_was_encoded_is_decoded(fields: Mapping[int, Value]) -> None:
    assert decode(DOMAIN, encode(DOMAIN, fields)) == fields


@given(records, records)
def test_two_sets_of_fields_are_equal_bytes_only_if_they_are_equal(
    left: Mapping[int, Value], right: Mapping[int, Value]
) -> None:
    assert (encode(DOMAIN, left) == encode(DOMAIN, right)) == (left == right)


@given(records, st.data())
def test_an_altered_encoding_is_refused_or_means_something_else(
    fields: Mapping[int, Value], data: st.DataObject
) -> None:
    message = bytearray(encode(DOMAIN, fields))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    try:
        altered = decode(DOMAIN, bytes(message))
    except CallerError:
        return
    assert altered != fields
    assert encode(DOMAIN, altered) == bytes(message)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_or_are_canonical(tail: bytes) -> None:
    message = encode(DOMAIN, {})[:-2] + tail
    try:
        fields = decode(DOMAIN, message)
    except CallerError:
        return
    assert encode(DOMAIN, fields) == message


@given(records)
def test_every_truncation_and_every_extra_byte_is_refused(fields: Mapping[int, Value]) -> None:
    message = encode(DOMAIN, fields)
    for length in range(len(message)):
        with pytest.raises(CallerError):
            decode(DOMAIN, message[:length])
    with pytest.raises(CallerError):
        decode(DOMAIN, message + b"\0")


DIFFERENT: list[tuple[Mapping[int, Value], Mapping[int, Value]]] = [
    ({1: "ab", 2: "c"}, {1: "a", 2: "bc"}),
    ({1: "x", 2: None}, {1: None, 2: "x"}),
    ({1: "x", 2: None}, {1: "x"}),
    ({1: ""}, {1: None}),
    ({1: ""}, {1: b""}),
    ({1: "red"}, {1: Symbol("red")}),
    ({1: ()}, {1: None}),
    ({1: ()}, {1: {}}),
    ({1: ("a", "b")}, {1: ("ab",)}),
    ({1: (("a",), "b")}, {1: ("a", ("b",))}),
    ({1: ("a", "b")}, {1: ("b", "a")}),
    ({1: 2**64 - 1}, {1: -1}),
    ({1: range(1, 4)}, {1: range(1, 5)}),
    ({1: "\u00e9"}, {1: "e\u0301"}),  # composed and decomposed: not normalised
    ({1: "x"}, {2: "x"}),
]


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_look_alikes_have_different_encodings(
    left: Mapping[int, Value], right: Mapping[int, Value]
) -> None:
    assert left != right
    assert encode(DOMAIN, left) != encode(DOMAIN, right)


def test_the_order_of_a_mapping_does_not_matter() -> None:
    assert encode(DOMAIN, {1: "a", 2: "b"}) == encode(DOMAIN, {2: "b", 1: "a"})


def test_domains_never_share_an_encoding_nor_a_reader() -> None:
    assert encode("ab", {}) != encode("a", {})
    with pytest.raises(CallerError, match="domain"):
        decode("a", encode("ab", {}))


def test_the_bytes_are_those_of_the_table() -> None:
    message = encode("d", {2: 7, 1: "hi"})
    assert message == (
        b"\x01d" + b"\x02\x00"
        b"\x01\x00" + b"\x01\x02\x00\x00\x00hi"
        b"\x02\x00" + b"\x03\x08\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00"
    )
    assert digest("d", {2: 7, 1: "hi"}) == hashlib.sha256(message).digest()


@pytest.mark.parametrize(
    "value",
    [
        True,
        1.5,
        ["list"],
        bytearray(b"x"),
        2**64,
        -(2**63) - 1,
        range(3, 3),
        range(0, 8, 2),
        range(-1, 3),
        "\ud800",
        object(),
    ],
)
def test_what_has_no_encoding_is_refused(value: object) -> None:
    with pytest.raises(CallerError):
        encode(DOMAIN, {1: value})  # type: ignore[dict-item]


@pytest.mark.parametrize("tag", [0, -1, 2**16, "1", True])
def test_a_field_tag_is_a_u16_that_is_not_zero(tag: object) -> None:
    with pytest.raises(CallerError):
        encode(DOMAIN, {tag: "x"})  # type: ignore[dict-item]


@pytest.mark.parametrize("domain", ["", "é", "x" * 256, None, b"x"])
def test_a_domain_is_short_ascii(domain: object) -> None:
    with pytest.raises(CallerError):
        encode(domain, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [None, 5, [1], {"a": 1, 1: 2}])
def test_fields_are_a_mapping_by_tag(fields: object) -> None:
    with pytest.raises(CallerError):
        encode(DOMAIN, fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [bytearray, memoryview, list])
def test_only_bytes_are_decoded(kind: Callable[[bytes], object]) -> None:
    with pytest.raises(CallerError):
        decode(DOMAIN, kind(encode(DOMAIN, {1: b"x"})))  # type: ignore[arg-type]


def test_depth_and_size_are_bounded() -> None:
    nested: Value = "leaf"
    for _ in range(ENCODING_DEPTH_MAX):
        nested = (nested,)
    assert decode(DOMAIN, encode(DOMAIN, {1: nested})) == {1: nested}
    with pytest.raises(LimitError):
        encode(DOMAIN, {1: (nested,)})
    with pytest.raises(LimitError):
        encode(DOMAIN, {1: bytes(ENCODING_BYTES_MAX + 1)})
    half = bytes(ENCODING_BYTES_MAX // 2)
    with pytest.raises(LimitError):
        encode(DOMAIN, {1: half, 2: half})
    with pytest.raises(LimitError):
        decode(DOMAIN, bytes(ENCODING_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "tail",
    [
        b"\x02\x00\x02\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00",  # descending
        b"\x02\x00\x01\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00",  # twice
        b"\x01\x00\x01\x00\x04\x08\x00\x00\x00" + bytes(8),  # i64 that is not negative
        b"\x01\x00\x01\x00\x00\x01\x00\x00\x00x",  # absent with content
        b"\x01\x00\x01\x00\x01\x01\x00\x00\x00\xff",  # not UTF-8
        b"\x01\x00\x01\x00\x05\x10\x00\x00\x00" + bytes(16),  # empty range
        b"\x01\x00\x01\x00\x63\x00\x00\x00\x00",  # unknown type
        b"\x01\x00\x01\x00\x02\xff\xff\xff\xff",  # a length past the end
    ],
)
def test_encodings_that_encode_never_writes_are_refused(tail: bytes) -> None:
    prefix = encode(DOMAIN, {})[:-2]
    with pytest.raises(CallerError):
        decode(DOMAIN, prefix + tail)
