"""The official client, unchanged, against a recording worker that answers as told."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import APIError, APIStatusError, OpenAI, RateLimitError

from tests.router.front.rig import Rig

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
CHUNK: dict[str, Any] = {
    "id": "c1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "mock",
}


@pytest.fixture
def client(calm: Rig) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{calm.port}/v1", api_key="sk-x", max_retries=0) as made:
        yield made


def script(rig: Rig, answer: object) -> None:
    for worker in rig.workers:
        worker.behave(scripted=answer)


def sent(rig: Rig) -> dict[str, Any]:
    """The body that a worker got last."""
    found = [item for worker in rig.workers for item in worker.recorded()]
    latest = max(found, key=lambda item: int(item["headers"]["x-request-id"].split("-")[1], 16))
    body: dict[str, Any] = latest.get("body", latest)
    return body


def chat_answer(message: dict[str, Any], **choice: object) -> dict[str, Any]:
    made = {"index": 0, "finish_reason": "stop", "message": message, **choice}
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [made],
        "usage": USAGE,
    }


def delta(**fields: object) -> dict[str, Any]:
    finish = fields.pop("finish_reason", None)
    return {**CHUNK, "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    }
]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
}


def test_a_chat_and_its_usage(client: OpenAI, calm: Rig) -> None:
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, max_completion_tokens=3, seed=4
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert sent(calm)["max_completion_tokens"] == 3
    assert sent(calm)["seed"] == 4


def test_a_streamed_chat(client: OpenAI, calm: Rig) -> None:
    stream = client.chat.completions.create(
        model="mock", messages=MESSAGES, max_tokens=3, stream=True
    )
    chunks = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_streamed_chat_with_usage(client: OpenAI, calm: Rig) -> None:
    stream = client.chat.completions.create(
        model="mock",
        messages=MESSAGES,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *_, last = list(stream)
    assert last.usage is not None
    assert last.usage.completion_tokens == 3


def test_tools_and_tool_choice(client: OpenAI, calm: Rig) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    script(calm, chat_answer(message, finish_reason="tool_calls"))
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, tools=TOOLS, tool_choice=choice
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].id == "t1"
    assert sent(calm)["tools"] == TOOLS
    assert sent(calm)["tool_choice"] == choice


def test_streamed_tool_deltas(client: OpenAI, calm: Rig) -> None:
    first = {"index": 0, "id": "t1", "type": "function"}
    script(
        calm,
        [
            delta(role="assistant", content=None),
            delta(tool_calls=[{**first, "function": {"name": "weather", "arguments": ""}}]),
            delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a":'}}]),
            delta(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
            delta(finish_reason="tool_calls"),
            {**CHUNK, "choices": [], "usage": USAGE},
            "[DONE]",
        ],
    )
    stream = client.chat.completions.create(
        model="mock", messages=MESSAGES, tools=TOOLS, stream=True
    )
    arguments = ""
    chunks = list(stream)
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            arguments += call.function.arguments or ""
    assert arguments == '{"a":1}'
    assert len(chunks) == 5


def test_a_json_schema(client: OpenAI, calm: Rig) -> None:
    script(calm, chat_answer({"role": "assistant", "content": '{"a": 1}'}))
    answer = client.chat.completions.create(model="mock", messages=MESSAGES, response_format=SCHEMA)
    assert answer.choices[0].message.content == '{"a": 1}'
    assert sent(calm)["response_format"] == SCHEMA


def test_logprobs(client: OpenAI, calm: Rig) -> None:
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    message = {"role": "assistant", "content": "a"}
    script(calm, chat_answer(message, logprobs={"content": [entry], "refusal": None}))
    answer = client.chat.completions.create(
        model="mock", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].logprob == -0.5
    assert sent(calm)["top_logprobs"] == 2


def test_three_choices(client: OpenAI, calm: Rig) -> None:
    answer = client.chat.completions.create(model="mock", messages=MESSAGES, n=3, max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["a text", ["a", "b"], [1, 2, 3], [[1, 2], [3]]])
@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_every_kind_of_prompt(
    client: OpenAI, calm: Rig, prompt: Any, stream: bool
) -> None:
    create: Callable[..., Any] = client.completions.create
    answer = create(model="mock", prompt=prompt, max_tokens=2, stream=stream)
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    assert text
    assert sent(calm)["prompt"] == prompt


@pytest.mark.parametrize("value", ["a", ["a", "b"], [1, 2], [[1, 2]]])
def test_embeddings(client: OpenAI, calm: Rig, value: Any) -> None:
    row = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    script(calm, {"object": "list", "data": [row], "model": "mock", "usage": usage})
    answer = client.embeddings.create(model="mock", input=value, encoding_format="float")
    assert answer.data[0].embedding == [0.5, 0.25]


def test_responses_and_their_successors(client: OpenAI, calm: Rig) -> None:
    answer: dict[str, Any] = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "mock",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "status": "completed",
    }
    script(calm, answer)
    first = client.responses.create(model="mock", input="a")
    follow = client.responses.create(model="mock", input="b", previous_response_id=first.id)
    assert follow.id == "resp_1"


def test_the_model_list(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mock"]
    assert client.models.retrieve("mock").owned_by == "kvtier"


@pytest.mark.parametrize(
    ("status", "error"), [(400, APIStatusError), (429, RateLimitError), (500, APIStatusError)]
)
def test_errors_of_workers_are_the_clients_own_classes(
    client: OpenAI, calm: Rig, status: int, error: type[APIError]
) -> None:
    for worker in calm.workers:
        worker.behave(status=status)
    with pytest.raises(error, match="as told"):
        client.chat.completions.create(model="mock", messages=MESSAGES)


def test_a_stream_that_breaks_raises_in_the_client(client: OpenAI, calm: Rig) -> None:
    for worker in calm.workers:
        worker.behave(cut=2)
    stream = client.chat.completions.create(
        model="mock", messages=MESSAGES, n=2, max_tokens=5, stream=True
    )
    with pytest.raises(APIError, match="the worker failed"):
        list(stream)
