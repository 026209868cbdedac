"""Every parameter of OpenAI's API is implemented or refused: none is silently ignored.

The list is that of the installed `openai` client, so a new parameter of a newer client fails here
until somebody decides what becomes of it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from kvtier.errors import CallerError
from kvtier.openai.errors import Fault, ParameterError
from kvtier_services.worker.http.fields import Fields
from kvtier_services.worker.http.parameters import (
    CHAT_PARAMETERS,
    COMPLETION_PARAMETERS,
    Delivery,
    Parameter,
    Standing,
    Terms,
    parse_chat,
    parse_completion,
)

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 300
OPENAI_COMPLETION = {
    *completion_create_params.CompletionCreateParamsBase.__annotations__,
    *completion_create_params.CompletionCreateParamsStreaming.__annotations__,
}
OPENAI_CHAT = {
    *chat_create_params.CompletionCreateParamsBase.__annotations__,
    *chat_create_params.CompletionCreateParamsStreaming.__annotations__,
}
BEYOND_OPENAI = {
    "top_k", "min_p", "stop_token_ids", "ignore_eos", "cache_salt", "priority",
    "return_token_ids", "kv_retention",
}  # fmt: skip
BEYOND_OPENAI_CHAT = {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
COMPLETION: dict[str, object] = {"model": "m", "prompt": "p"}
CHAT: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

Body = dict[str, object]


def parse(body: Mapping[str, object]) -> Terms:
    if "messages" in body:
        return parse_chat(body, VOCAB_SIZE).terms
    return parse_completion(body, VOCAB_SIZE).terms


def refusal(body: Mapping[str, object]) -> ParameterError:
    with pytest.raises(ParameterError) as refused:
        parse(body)
    return refused.value


def rows(standing: Standing) -> list[Any]:
    tables: list[tuple[Body, Mapping[str, Parameter]]] = [
        (COMPLETION, COMPLETION_PARAMETERS),
        (CHAT, CHAT_PARAMETERS),
    ]
    return [
        pytest.param(body, name, parameter, id=f"{'chat' if body is CHAT else 'completion'}-{name}")
        for body, table in tables
        for name, parameter in table.items()
        if parameter.standing is standing
    ]


def test_the_tables_have_every_parameter_of_the_openai_client_and_no_stray_ones() -> None:
    assert set(COMPLETION_PARAMETERS) == OPENAI_COMPLETION | BEYOND_OPENAI
    assert set(CHAT_PARAMETERS) == OPENAI_CHAT | BEYOND_OPENAI | BEYOND_OPENAI_CHAT


@pytest.mark.parametrize("table", [COMPLETION_PARAMETERS, CHAT_PARAMETERS])
def test_the_page_of_the_endpoint_names_every_parameter_with_its_standing(
    table: Mapping[str, Parameter],
) -> None:
    page = (ROOT / "docs" / "openai_endpoint.md").read_text(encoding="utf-8")
    column = 2 if table is COMPLETION_PARAMETERS else 3
    said = {}
    for row in re.findall(r"^\|.*\|$", page, re.MULTILINE):
        cells = [cell.strip() for cell in row.split("|")]
        for name in re.findall(r"`(\w+)`", cells[1]):
            said[name] = cells[column]
    words = {Standing.UNSUPPORTED: "refused"}
    for name, parameter in table.items():
        if name in BEYOND_OPENAI | BEYOND_OPENAI_CHAT:
            assert f"`{name}`" in page
        else:
            assert words.get(parameter.standing, parameter.standing.value) in said[name], name


@pytest.mark.parametrize(("body", "name", "parameter"), rows(Standing.UNSUPPORTED))
def test_what_is_not_implemented_answers_unsupported_parameter(
    body: Body, name: str, parameter: Parameter
) -> None:
    values: list[object] = ["something", 1, True, {"type": "json_object"}, ["x"], [{}]]
    for value in values:
        if any(type(value) is type(each) and value == each for each in parameter.neutral):
            continue
        error = refusal({**body, name: value})
        assert (error.fault, error.param) == (Fault.UNSUPPORTED, name)
        assert error.http_status == 400


@pytest.mark.parametrize(("body", "name", "parameter"), rows(Standing.UNSUPPORTED))
def test_values_that_ask_for_nothing_are_taken(body: Body, name: str, parameter: Parameter) -> None:
    values: list[object] = [None, *parameter.neutral]
    for value in values:
        assert parse({**body, name: value}).model == "m"


@pytest.mark.parametrize(
    ("body", "name", "parameter"), rows(Standing.IMPLEMENTED) + rows(Standing.ADVISORY)
)
def test_what_is_taken_is_also_read_for_a_wrong_type_is_refused_by_name(
    body: Body, name: str, parameter: Parameter
) -> None:
    wrong: object = {"a": {}} if name not in {"chat_template_kwargs"} else 7
    error = refusal({**body, name: wrong})
    assert error.param is not None
    assert error.param.split(".")[0] == name
    assert error.http_status == 400


@pytest.mark.parametrize(
    ("body", "name", "parameter"), rows(Standing.IMPLEMENTED) + rows(Standing.ADVISORY)
)
def test_null_means_absent(body: Body, name: str, parameter: Parameter) -> None:
    if name in body:
        assert refusal({**body, name: None}).fault is Fault.MISSING
    else:
        assert parse({**body, name: None}).delivery is Delivery.WHOLE


@pytest.mark.parametrize("body", [COMPLETION, CHAT])
def test_unknown_names_are_refused(body: Body) -> None:
    error = refusal({**body, "tempreature": 0.1})
    assert (error.fault, error.param) == (Fault.UNKNOWN, "tempreature")
    assert len(refusal({**body, "x" * 10_000: 1}).param) < 100


BAD_COMMON: list[tuple[str, object]] = [
    ("model", ""), ("model", 7), ("model", "x" * 2000),
    ("n", 0), ("n", -1), ("n", 10**6), ("n", 1.0), ("n", True), ("n", "1"), ("n", 10**400),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", float("nan")),
    ("temperature", float("inf")), ("temperature", "0"), ("temperature", True),
    ("temperature", 10**400),
    ("top_p", -0.1), ("top_p", 1.1), ("top_p", []), ("min_p", 1.5),
    ("top_k", -2), ("top_k", 1.5), ("top_k", 2**40),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("seed", 1.5),
    ("presence_penalty", 2.5), ("frequency_penalty", -2.5),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5), ("max_tokens", 2**40),
    ("stop", 7), ("stop", ""), ("stop", [""]), ("stop", [7]), ("stop", ["x"] * 17),
    ("stop", "x" * 257), ("stop", {"a": "b"}),
    ("stop_token_ids", [-1]), ("stop_token_ids", [VOCAB_SIZE]), ("stop_token_ids", [1.0]),
    ("stop_token_ids", 7), ("stop_token_ids", [1] * 1025),
    ("logit_bias", []), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"300": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "2"}),
    ("logit_bias", {"٣": 1}), ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {str(i): 0 for i in range(1025)}),
    ("stream", "yes"), ("stream", 1), ("ignore_eos", 1), ("return_token_ids", "no"),
    ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "s" * 2000), ("cache_salt", "é" * 600),
    ("priority", 1.5), ("priority", 2**63), ("user", 5),
    ("stream_options", {"include_usage": True}),  # without stream
    ("kv_retention", []), ("kv_retention", {"ranges": [7]}), ("kv_retention", {"ranges": {}}),
    ("kv_retention", {"ranges": [{"priority": 101}]}), ("kv_retention", {"decode_priority": -1}),
    ("kv_retention", {"ranges": [{"start": 3, "end": 3}]}),
    ("kv_retention", {"ranges": [{"start": -1}]}),
    ("kv_retention", {"ranges": [{"duration_ms": 0}]}),
    ("kv_retention", {"ranges": [{"end": 5}, {"start": 4}]}),
    ("kv_retention", {"ranges": [{}, {"start": 4}]}),
    ("kv_retention", {"ranges": [{"start": i, "end": i + 1} for i in range(257)]}),
    ("kv_retention", {"decode_duration_ms": True}),
]  # fmt: skip
BAD_COMPLETION: list[tuple[str, object]] = [
    ("prompt", 7), ("prompt", []), ("prompt", [[]]), ("prompt", [-1]), ("prompt", [VOCAB_SIZE]),
    ("prompt", [1, "a"]), ("prompt", ["a", 1]), ("prompt", ["a", [1]]), ("prompt", [[1], "a"]),
    ("prompt", [1.5]), ("prompt", [True]), ("prompt", [None]), ("prompt", {}),
    ("prompt", ["x"] * 129), ("prompt", [[2**70]]),
    ("logprobs", True), ("logprobs", -1), ("logprobs", 21), ("echo", 1),
    ("best_of", 0), ("best_of", "1"),
]  # fmt: skip
BAD_CHAT: list[tuple[str, object]] = [
    ("messages", "hello"), ("messages", {}),
    ("logprobs", 1), ("top_logprobs", 2), ("top_logprobs", -1), ("top_logprobs", 21),
    ("max_completion_tokens", 0), ("max_completion_tokens", -1),
    ("chat_template_kwargs", []), ("add_generation_prompt", "x"), ("continue_final_message", 1),
    ("prompt_cache_retention", "48h"), ("prompt_cache_retention", 24),
    ("prompt_cache_key", ""), ("safety_identifier", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [(body, *row) for body in (COMPLETION, CHAT) for row in BAD_COMMON]
    + [(COMPLETION, *row) for row in BAD_COMPLETION]
    + [(CHAT, *row) for row in BAD_CHAT],
)
def test_values_that_mean_nothing_are_refused_by_name(body: Body, name: str, value: object) -> None:
    error = refusal({**body, name: value})
    assert error.param is not None
    assert error.param.replace("[", ".").split(".")[0] == name
    assert error.http_status == 400
    assert len(str(error)) < 300, "an error does not repeat what it was sent"


@pytest.mark.parametrize("name", ["a_b", "x\r\ny: z"])
def test_unknown_options_of_options_are_refused(name: str) -> None:
    body = {**COMPLETION, "stream": True, "stream_options": {name: 1}}
    assert refusal(body).fault is Fault.UNKNOWN
    assert refusal({**COMPLETION, "kv_retention": {name: 1}}).fault is Fault.UNKNOWN


def test_combinations_that_are_not_implemented_or_contradict_are_refused() -> None:
    echo = refusal({**COMPLETION, "echo": True, "logprobs": 1})
    assert (echo.fault, echo.param) == (Fault.UNSUPPORTED, "echo")
    best = refusal({**COMPLETION, "n": 2, "best_of": 3})
    assert (best.fault, best.param) == (Fault.UNSUPPORTED, "best_of")
    assert refusal({**COMPLETION, "prompt": ["a"] * 65, "n": 2}).param == "n"
    assert refusal({**CHAT, "max_tokens": 1, "max_completion_tokens": 2}).param == "max_tokens"
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert refusal({**CHAT, **both}).param == "continue_final_message"
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert refusal({**CHAT, **options}).fault is Fault.UNSUPPORTED


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]},
            "messages[1].content[1]",
        ),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, "messages[1].audio"),
    ],
)
def test_what_only_media_models_understand_is_refused(message: Body, param: str) -> None:
    first = {"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}
    error = refusal({**CHAT, "messages": [first, message]})
    assert (error.fault, error.param) == (Fault.UNSUPPORTED, param)


def test_values_at_the_edges_are_taken() -> None:
    terms = parse({**COMPLETION, "temperature": 0, "top_p": 0, "top_k": -1, "seed": -(2**63)})
    assert (terms.sampling.temperature, terms.sampling.top_p, terms.sampling.top_k) == (0, 0, 0)
    assert terms.sampling.seed == 2**63
    assert parse({**COMPLETION, "n": 2, "best_of": 2}).choices_count == 2
    assert parse({**COMPLETION, "stop": ["x" * 256] * 16}).stops == ("x" * 256,) * 16
    assert parse({**CHAT, "max_tokens": 3, "max_completion_tokens": 3}).tokens_max == 3
    assert parse({**CHAT, "logprobs": True}).logprobs_count == 0
    assert parse({**COMPLETION, "logprobs": 20}).logprobs_count == 20
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert parse({**CHAT, **stream}).delivery is Delivery.STREAM_WITH_USAGE
    stream = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert parse({**CHAT, **stream}).delivery is Delivery.STREAM


def test_openais_retention_becomes_a_priority_with_a_duration_and_ours_wins() -> None:
    kept = parse({**CHAT, "prompt_cache_retention": "24h"}).retention
    assert kept is not None
    (span,) = kept.ranges
    assert (span.start, span.end, span.duration_ms) == (0, None, 86_400_000)
    assert span.priority > 35
    assert parse({**CHAT, "prompt_cache_retention": "in_memory"}).retention is None
    ours = {"prompt_cache_retention": "24h", "kv_retention": {"decode_priority": 2}}
    retention = parse({**CHAT, **ours}).retention
    assert retention is not None
    assert (retention.ranges, retention.decode_priority) == ((), 2)


def test_every_refusal_of_fields_is_a_callers_error() -> None:
    assert issubclass(ParameterError, CallerError)
    with pytest.raises(ParameterError, match=r"outer\.inner"):
        Fields({"inner": 1}, "outer.").flag("inner", False)
