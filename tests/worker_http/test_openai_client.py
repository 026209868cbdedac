"""The endpoint as the official `openai` client sees it, over a scripted engine."""

import asyncio

import pytest
from openai import APIError, APIStatusError, BadRequestError, NotFoundError, RateLimitError
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from kvtier.errors import BackendError, OverloadedError, UnavailableError
from kvtier_services.worker.requests import CachedTokens, FinishReason, GenerationRequest
from tests.support.scripted_engine import (
    BOS,
    CONTEXT_TOKENS,
    EOS,
    MODEL,
    ScriptedEngine,
    Step,
    says,
    served,
)

CACHED = CachedTokens(gpu=16, dram=32, nvme=1, redis=2, peer=3)
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


def engine_saying(text: str, finish: FinishReason = FinishReason.STOP) -> ScriptedEngine:
    return ScriptedEngine(lambda request: says(text, finish, CACHED))


async def test_a_chat_answers_with_usage_and_cached_tokens() -> None:
    async with served(engine_saying("héllo")) as it:
        answer = await it.client.chat.completions.create(model=MODEL, messages=HELLO)
        prompt = "user: hello\nassistant: "
        assert it.engine.request.prompt_tokens == (BOS, *prompt.encode())
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert (choice.message.role, choice.message.content) == ("assistant", "héllo")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt) + 1
    assert answer.usage.completion_tokens == len("héllo".encode()) + 1
    assert answer.usage.total_tokens == len(prompt) + 1 + len("héllo".encode()) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == CACHED.total
    assert "kvtier" not in (answer.usage.model_extra or {})


async def test_the_explain_header_tells_from_which_tier_tokens_came() -> None:
    async with served(engine_saying("x")) as it:
        answer = await it.client.completions.create(
            model=MODEL, prompt="p", extra_headers={"x-kvtier-explain": "1"}
        )
    assert answer.usage is not None
    assert answer.usage.model_extra == {
        "kvtier": {"cached_tokens": {"gpu": 16, "dram": 32, "nvme": 1, "redis": 2, "peer": 3}}
    }


async def test_a_chat_stream_has_a_role_then_text_then_a_reason_then_usage() -> None:
    async with served(engine_saying("añ!", FinishReason.LENGTH)) as it:
        stream = await it.client.chat.completions.create(
            model="alias/of-it",
            messages=HELLO,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.model for chunk in chunks} == {"alias/of-it"}
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert [delta.content for delta in deltas[1:]] == ["a", "ñ", "!"]
    assert all(delta.role is None for delta in deltas[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 3 + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == CACHED.total


async def test_a_stream_without_include_usage_has_none() -> None:
    async with served(engine_saying("ab")) as it:
        stream = await it.client.completions.create(model=MODEL, prompt="p", stream=True)
        chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_prompts_may_be_text_token_ids_or_lists_of_them_and_n_multiplies_them() -> None:
    def script(request: GenerationRequest) -> list[Step]:
        return says(bytes(t for t in request.prompt_tokens if t < 256).decode(), cached=CACHED)

    async with served(ScriptedEngine(script)) as it:
        create = it.client.completions.create
        assert (await create(model=MODEL, prompt=[104, 105])).choices[0].text == "hi"
        both = await create(model=MODEL, prompt=["one", "two"], n=2, seed=5)
        assert [choice.text for choice in both.choices] == ["one", "one", "two", "two"]
        assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
        seeds = [generation.request.sampling.seed for generation in it.engine.generations[1:]]
        assert seeds == [5, 6, 5, 6]
        assert both.usage is not None
        assert both.usage.prompt_tokens == 8, "each prompt counts once, with its first token"
        assert both.usage.completion_tokens == 16
        assert both.usage.prompt_tokens_details is not None
        assert both.usage.prompt_tokens_details.cached_tokens == 2 * CACHED.total
        lists = await create(model=MODEL, prompt=[[65], [66, 67]], echo=True)
        assert [choice.text for choice in lists.choices] == ["AA", "BCBC"]
        ids = {generation.request.request_id for generation in it.engine.generations}
        assert len(ids) == len(it.engine.generations)


async def test_choices_of_a_stream_mix_and_each_ends_once() -> None:
    async with served(engine_saying("abc")) as it:
        stream = await it.client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            stream=True,
            n=3,
        )
        texts, ends, roles = ["", "", ""], [0, 0, 0], [0, 0, 0]
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
            roles[choice.index] += choice.delta.role is not None
    assert texts == ["abc"] * 3
    assert ends == roles == [1, 1, 1]


async def test_every_parameter_that_is_implemented_reaches_the_engine() -> None:
    async with served(engine_saying("ok")) as it:
        await it.client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            temperature=0.5,
            top_p=0.25,
            seed=-1,
            presence_penalty=1,
            frequency_penalty=-0.5,
            logit_bias={"7": 3},
            max_completion_tokens=9,
            logprobs=True,
            top_logprobs=2,
            user="someone",
            extra_body={
                "top_k": 11,
                "min_p": 0.125,
                "stop_token_ids": [1, 2],
                "ignore_eos": True,
                "cache_salt": "salt",
                "priority": -3,
                "chat_template_kwargs": {"suffix": "!"},
                "kv_retention": {
                    "ranges": [{"start": 0, "end": 4, "priority": 90, "duration_ms": 5}],
                    "decode_priority": 1,
                },
            },
        )
        request = it.engine.request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 11)
    assert (sampling.min_p, sampling.seed) == (0.125, 2**64 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -0.5)
    assert sampling.logit_bias == ((7, 3.0),)
    assert (request.tokens_max, request.logprobs_count) == (9, 2)
    assert (request.stop_token_ids, request.ignore_eos) == (frozenset({1, 2}), True)
    assert (request.scope_salt, request.priority) == ("salt", -3)
    assert bytes(request.prompt_tokens[1:]).decode() == "user: hello\nassistant: !"
    assert request.retention is not None
    assert request.retention.decode_priority == 1
    (kept,) = request.retention.ranges
    assert (kept.start, kept.end, kept.priority, kept.duration_ms) == (0, 4, 90, 5)


async def test_defaults_are_openais_and_a_seed_is_drawn_where_none_is_given() -> None:
    async with served(engine_saying("ok")) as it:
        for _ in range(2):
            await it.client.completions.create(model=MODEL, prompt="abc")
        first, second = (generation.request for generation in it.engine.generations)
        assert (first.tokens_max, first.sampling.temperature) == (16, 1.0)
        assert first.sampling.seed != second.sampling.seed
        assert (first.logprobs_count, first.scope_salt, first.retention) == (None, None, None)
        await it.client.chat.completions.create(model=MODEL, messages=HELLO)
        chat = it.engine.request
        assert chat.tokens_max == CONTEXT_TOKENS - len(chat.prompt_tokens)
        long = [66] * (CONTEXT_TOKENS - 3)
        await it.client.completions.create(model=MODEL, prompt=long)
        assert it.engine.request.tokens_max == 3


async def test_a_stop_string_across_tokens_ends_the_text_and_the_generation() -> None:
    forever = asyncio.Event()

    def script(request: GenerationRequest) -> list[Step]:
        return [*says("one EN", finish=None), *says("D two", finish=None), forever]

    async with served(ScriptedEngine(script)) as it:
        stream = await it.client.completions.create(
            model=MODEL, prompt="p", stop=["END", "zzz"], stream=True
        )
        chunks = [chunk async for chunk in stream]
        await it.engine.generations[0].cancelled.wait()
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    async with served(engine_saying("one EN", FinishReason.LENGTH)) as it:
        answer = await it.client.completions.create(model=MODEL, prompt="p", stop="END")
    assert answer.choices[0].text == "one EN"
    assert answer.choices[0].finish_reason == "length"


async def test_chat_logprobs_list_each_token_and_its_rivals() -> None:
    async with served(engine_saying("aé")) as it:
        answer = await it.client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            logprobs=True,
            top_logprobs=2,
        )
        stream = await it.client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            logprobs=True,
            stream=True,
        )
        streamed = [chunk.choices[0].logprobs async for chunk in stream]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == ["a", "\ufffd", "\ufffd"]
    assert [token.logprob for token in logprobs.content] == [-1.0] * 3
    assert logprobs.content[0].bytes == [97]
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [
        ("a", -1.0),
        ("b", -2.0),
    ]
    tokens = [entry for each in streamed if each for entry in each.content or []]
    assert [token.token for token in tokens] == ["a", "\ufffd", "\ufffd"]
    assert all(token.top_logprobs == [] for token in tokens)


async def test_completion_logprobs_have_offsets_into_the_text() -> None:
    async with served(engine_saying("añb")) as it:
        answer = await it.client.completions.create(model=MODEL, prompt="p", logprobs=1)
        bare = await it.client.completions.create(model=MODEL, prompt="p", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "\ufffd", "\ufffd", "b"]
    assert logprobs.token_logprobs == [-1.0] * 4
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"a": -1.0}
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.top_logprobs is None


async def test_token_ids_are_returned_on_request_stop_token_included() -> None:
    async with served(engine_saying("ab")) as it:
        answer = await it.client.completions.create(
            model=MODEL, prompt="p", extra_body={"return_token_ids": True}
        )
        chat = await it.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"return_token_ids": True},
        )
    extra = answer.choices[0].model_extra or {}
    assert extra["token_ids"] == [97, 98, EOS]
    assert extra["prompt_token_ids"] == [256, ord("p")]
    sent = list(it.engine.request.prompt_tokens)
    assert (chat.model_extra or {})["prompt_token_ids"] == sent


# Errors


async def test_a_failure_before_the_first_token_has_a_status_of_its_own() -> None:
    async with served(ScriptedEngine(lambda request: [BackendError("lost the device")])) as it:
        with pytest.raises(APIStatusError) as whole:
            await it.client.completions.create(model=MODEL, prompt="p")
        assert whole.value.status_code == 503
        with pytest.raises(APIStatusError) as streamed:
            await it.client.completions.create(model=MODEL, prompt="p", stream=True)
        assert streamed.value.status_code == 503
        assert all(generation.cancelled.is_set() for generation in it.engine.generations)


async def test_a_failure_in_mid_stream_ends_in_an_error_that_the_client_raises() -> None:
    script = [*says("par", finish=None), BackendError("lost the device")]
    async with served(ScriptedEngine(lambda request: script)) as it:
        stream = await it.client.completions.create(model=MODEL, prompt="p", stream=True)
        texts = [(await anext(stream)).choices[0].text for _ in range(3)]
        with pytest.raises(APIError, match="lost the device"):
            await anext(stream)
    assert texts == ["p", "a", "r"]


async def test_a_full_engine_answers_429_and_gives_up_the_choices_it_took() -> None:
    engine = engine_saying("ok")
    engine.refusals = [OverloadedError("the queue is full")]
    async with served(engine) as it:
        with pytest.raises(RateLimitError) as refused:
            await it.client.completions.create(model=MODEL, prompt="p")
        assert refused.value.response.headers["retry-after"] == "1"

        taken = engine.submit

        def submit(request: GenerationRequest) -> object:
            if len(engine.generations) == 2:
                engine.refusals = [UnavailableError("draining")]
            return taken(request)

        engine.submit = submit  # type: ignore[method-assign,assignment]
        with pytest.raises(APIStatusError) as draining:
            await it.client.completions.create(model=MODEL, prompt="p", n=3)
        assert draining.value.status_code == 503
        assert len(engine.generations) == 2
        assert all(generation.cancelled.is_set() for generation in engine.generations)


async def test_an_unknown_model_is_404_in_openais_shape() -> None:
    async with served(engine_saying("ok")) as it:
        with pytest.raises(NotFoundError) as refused:
            await it.client.completions.create(model="gpt-5", prompt="p")
        assert refused.value.code == "model_not_found"
        with pytest.raises(NotFoundError):
            await it.client.models.retrieve("gpt-5")


@pytest.mark.parametrize(
    ("prompt", "tokens_max", "param"),
    [([65] * CONTEXT_TOKENS, None, "prompt"), ([65] * 500, 13, "max_tokens")],
)
async def test_what_does_not_fit_the_context_is_400(
    prompt: list[int], tokens_max: int | None, param: str
) -> None:
    async with served(engine_saying("ok")) as it:
        with pytest.raises(BadRequestError) as refused:
            await it.client.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens_max)
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == param
        assert str(CONTEXT_TOKENS) in refused.value.message
        assert it.engine.generations == []


async def test_models_are_listed_with_their_aliases() -> None:
    async with served(engine_saying("ok")) as it:
        models = [model async for model in it.client.models.list()]
        assert [model.id for model in models] == [MODEL, "alias/of-it"]
        one = await it.client.models.retrieve("alias/of-it")
        assert (one.id, one.object) == ("alias/of-it", "model")
        assert (one.model_extra or {})["max_model_len"] == CONTEXT_TOKENS
