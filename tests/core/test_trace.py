"""Trace rows: what is accepted and what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.trace import TraceRow, parse_trace_row
from kvtier.errors import CallerError

GOOD = {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}


def test_mooncake_row_is_parsed() -> None:
    assert parse_trace_row(json.dumps(GOOD)) == TraceRow(3000.0, 600, 7, (0, 5))


def test_bailian_row_is_parsed_with_its_conversation() -> None:
    line = json.dumps(GOOD | {"chat_id": 9, "parent_chat_id": -1, "turn": 1, "type": "text"})
    assert parse_trace_row(line.encode()) == TraceRow(3000.0, 600, 7, (0, 5), 9, -1, 1, "text")


@pytest.mark.parametrize(
    "changed",
    [
        {"timestamp": "1"},
        {"timestamp": True},
        {"timestamp": -1},
        {"timestamp": float("inf")},
        {"timestamp": float("nan")},
        {"input_length": -1},
        {"input_length": 1.5},
        {"input_length": 2**63},
        {"output_length": None},
        {"hash_ids": None},
        {"hash_ids": [1, "2"]},
        {"hash_ids": [1, True]},
        {"turn": "first"},
        {"type": 3},
    ],
)
def test_row_with_a_wrong_field_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(CallerError):
        parse_trace_row(json.dumps(GOOD | changed))


@pytest.mark.parametrize("line", ["", "{", "[]", "3", b"\xff\xfe\xfa", "[" * 100_000])
def test_line_that_is_no_object_is_refused(line: str | bytes) -> None:
    with pytest.raises(CallerError):
        parse_trace_row(line)


@given(st.text(max_size=40) | st.binary(max_size=40))
def test_any_line_gives_a_row_or_a_caller_error(line: str | bytes) -> None:
    try:
        row = parse_trace_row(line)
    except CallerError:
        return
    assert isinstance(row, TraceRow)
