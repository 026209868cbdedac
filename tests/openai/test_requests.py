"""Views of requests give typed values, or say which parameter is wrong."""

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CallerError, LimitError
from kvtier.openai.errors import Fault, ParameterError
from kvtier.openai.requests import (
    ChatRequest,
    CompletionRequest,
    RequestView,
    ResponseRequest,
    StreamOptions,
    ToolChoice,
    parse,
)
from tests.support.json_values import JSON

MESSAGES: list[object] = [{"role": "user", "content": "hi"}]
ACCESSORS: dict[str, tuple[type[RequestView], Callable[[RequestView], object]]] = {
    f"{view.__name__}.{name}": (view, member.fget)
    for view in (RequestView, ChatRequest, CompletionRequest, ResponseRequest)
    for name, member in vars(view).items()
    if isinstance(member, property) and member.fget is not None
}
PARAMS = [
    *("model", "messages", "tools", "tool_choice", "prompt", "stream", "stream_options", "n"),
    *("max_tokens", "max_completion_tokens", "cache_salt", "user", "previous_response_id"),
    *("priority", "documents", "chat_template_kwargs", "add_generation_prompt", "suffix", "echo"),
]


def test_a_chat_request_says_what_routing_needs() -> None:
    request = parse(
        ChatRequest,
        b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,'
        b'"stream_options":{"include_usage":true},"n":2,"max_tokens":5,"max_completion_tokens":7,'
        b'"cache_salt":"s","user":"u","tools":[{"type":"function"}],"seed":1}',
    )
    assert request.model == "m"
    assert request.messages == MESSAGES
    assert request.stream
    assert request.stream_options == StreamOptions(include_usage=True)
    assert (request.choices_count, request.completion_tokens_max) == (2, 7)
    assert (request.cache_salt, request.user) == ("s", "u")
    assert request.tools == [{"type": "function"}]
    assert request.tool_choice is ToolChoice.AUTO
    assert request.given("seed") == 1


def read_all(request: ChatRequest) -> None:
    _ = [request.model, request.messages, request.choices_count, request.stream]
    _ = [request.completion_tokens_max, request.tools, request.tool_choice, request.user]


def test_null_means_absent() -> None:
    request = ChatRequest({"model": "m", "stream": None, "n": None, "tools": None, "user": None})
    assert not request.stream
    assert request.choices_count == 1
    assert request.tools is None
    assert request.completion_tokens_max is None
    assert request.add_generation_prompt
    assert request.tool_choice is ToolChoice.NONE


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice.NONE),
        ("auto", ToolChoice.AUTO),
        ("required", ToolChoice.REQUIRED),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice.NAMED),
    ],
)
def test_tool_choices_are_understood(choice: object, expected: ToolChoice) -> None:
    assert ChatRequest({"tool_choice": choice}).tool_choice is expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_prompts_come_in_every_shape(prompt: object, expected: list[object]) -> None:
    assert CompletionRequest({"prompt": prompt}).prompts == expected


@pytest.mark.parametrize(
    "prompt", [None, [], {}, 5, [[]], [1, "a"], [True], [-1], [2**32], [1.5], ["a", 1], [["a"]]]
)
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(ParameterError) as caught:
        _ = CompletionRequest({"prompt": prompt}).prompts
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("body", "fault", "param"),
    [
        ({}, Fault.MISSING, "model"),
        ({"model": ""}, Fault.MISSING, "model"),
        ({"model": 5}, Fault.TYPE, "model"),
        ({"model": "m"}, Fault.MISSING, "messages"),
        ({"model": "m", "messages": []}, Fault.MISSING, "messages"),
        ({"model": "m", "messages": ["x"]}, Fault.TYPE, "messages"),
        ({"model": "m", "messages": [{}]}, Fault.TYPE, "messages[0].role"),
        ({"model": "m", "messages": MESSAGES, "n": 0}, Fault.VALUE, "n"),
        ({"model": "m", "messages": MESSAGES, "n": True}, Fault.TYPE, "n"),
        ({"model": "m", "messages": MESSAGES, "max_tokens": -1}, Fault.VALUE, "max_tokens"),
        ({"model": "m", "messages": MESSAGES, "max_tokens": 1.5}, Fault.TYPE, "max_tokens"),
        ({"model": "m", "messages": MESSAGES, "stream": "yes"}, Fault.TYPE, "stream"),
        ({"model": "m", "messages": MESSAGES, "tools": {}}, Fault.TYPE, "tools"),
        ({"model": "m", "messages": MESSAGES, "tool_choice": "f"}, Fault.VALUE, "tool_choice"),
        ({"model": "m", "messages": MESSAGES, "user": "x" * 5000}, Fault.VALUE, "user"),
    ],
)
def test_a_wrong_parameter_is_named(body: dict[str, object], fault: Fault, param: str) -> None:
    request = ChatRequest(body)
    with pytest.raises(ParameterError) as caught:
        read_all(request)
    assert (caught.value.fault, caught.value.param) == (fault, param)


@given(
    accessor=st.sampled_from(sorted(ACCESSORS)),
    body=st.dictionaries(st.sampled_from(PARAMS), JSON, max_size=4),
)
def test_any_body_gives_a_value_or_a_caller_error_and_stays_as_it_is(
    accessor: str, body: dict[str, object]
) -> None:
    view, read = ACCESSORS[accessor]
    before = repr(body)
    with suppress(CallerError):  # anything else fails the test
        read(view(body))
    assert repr(body) == before


def test_numbers_and_integers_have_ranges() -> None:
    request = ChatRequest({"temperature": 1, "top_p": 1.5, "top_k": 3, "seed": "x"})
    assert request.number("temperature", 0, 2) == 1.0
    assert request.integer("top_k", 1, 5) == 3
    for wrong in (
        lambda: request.number("top_p", 0, 1),
        lambda: request.integer("top_k", 4, 5),
        lambda: request.integer("seed", 0, 1),
        lambda: request.number("seed", 0, 1),
    ):
        with pytest.raises(ParameterError):
            wrong()


def test_a_parameter_that_is_not_implemented_is_refused_by_name() -> None:
    request = ChatRequest({"model": "m", "n": 1, "frequency_penalty": 0, "logit_bias": None})
    request.refuse_others({"model"}, {"n": 1, "frequency_penalty": 0})
    refused: list[dict[str, object]] = [
        {"logit_bias": {"1": 2}},
        {"frequency_penalty": 0.5},
        {"n": True},
    ]
    for body in refused:
        with pytest.raises(ParameterError) as caught:
            ChatRequest(body).refuse_others({"model"}, {"n": 1, "frequency_penalty": 0})
        assert caught.value.fault is Fault.UNSUPPORTED
        assert caught.value.param == next(iter(body))


def test_counts_have_ceilings() -> None:
    with pytest.raises(LimitError):
        _ = ChatRequest({"messages": MESSAGES * 20_000}).messages
    with pytest.raises(LimitError):
        _ = CompletionRequest({"prompt": ["x"] * 5000}).prompts


def test_a_response_request_names_what_it_goes_on_from() -> None:
    assert ResponseRequest({"previous_response_id": "resp_1"}).previous_response_id == "resp_1"
