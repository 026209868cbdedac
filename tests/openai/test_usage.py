"""Usage is read from every shape of answer, and can be taken out of a stream again."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.openai import sse
from kvtier.openai.sse import SseEvent, SseParser
from kvtier.openai.usage import Usage, usage_of, without_usage

CHOICES = [{"index": 0, "delta": {"content": 'é 😀 "usage"'}}]


def one(data: bytes) -> SseEvent:
    [event] = SseParser().feed(sse.event(data))
    return event


def encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}, Usage(7, 2, None)),
        (
            {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}},
            Usage(7, 0, 4),
        ),
        (
            {
                "prompt_tokens": 7,
                "prompt_tokens_details": {"cached_tokens": 0, "reused_tokens": 4},
            },
            Usage(7, 0, 0, 4),
        ),
        (
            {"input_tokens": 3, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 0}},
            Usage(3, 1, 0),
        ),
        ({"prompt_tokens": 7, "prompt_tokens_details": None}, Usage(7, 0, None)),
        ({"prompt_tokens": -1}, None),
        ({"prompt_tokens": True}, None),
        (None, None),
        ("much", None),
    ],
)
def test_usage_is_read(usage: object, expected: Usage | None) -> None:
    assert usage_of(encoded({"choices": [], "usage": usage})) == expected


def test_usage_of_a_finished_response_is_read_from_its_event() -> None:
    event = {"type": "response.completed", "response": {"usage": {"input_tokens": 5}}}
    assert usage_of(encoded(event)) == Usage(5, 0, None)


@given(body=st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_an_answer_that_is_no_json_has_no_usage(body: bytes) -> None:
    assert usage_of(body + b'"usage"') is None


def test_an_event_with_nothing_but_usage_goes_away() -> None:
    data = encoded({"choices": [], "usage": {"prompt_tokens": 1}})
    assert without_usage(one(data)) == b""


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 1, "completion_tokens": 1}])
def test_usage_beside_choices_is_taken_out_and_nothing_else(usage: object) -> None:
    data = encoded({"id": "x", "choices": CHOICES, "usage": usage})
    [left] = SseParser().feed(without_usage(one(data)))
    assert left.data is not None
    assert json.loads(left.data) == {"id": "x", "choices": CHOICES}


@pytest.mark.parametrize(
    "data", [b"[DONE]", b'{"choices":[{"delta":{"content":"usage"}}]}', b'{"usage', b"[1]"]
)
def test_an_event_without_usage_stays_as_it_is(data: bytes) -> None:
    event = one(data)
    assert without_usage(event) == event.raw


def test_content_that_ends_like_usage_is_not_touched() -> None:
    data = encoded({"choices": [{"text": '"usage":null}'}]})
    event = one(data)
    assert without_usage(event) == event.raw
