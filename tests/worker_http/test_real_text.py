"""The endpoint over a real tokenizer and chat template, and a scripted engine that speaks them."""

import pytest
from openai import BadRequestError

from kvtier.text import ChatOptions, SpecialTokens, TextModel
from kvtier_services.worker.requests import (
    CachedTokens,
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    TokenDelta,
)
from tests.support.scripted_engine import CONTEXT_TOKENS, MODEL, ScriptedEngine, Step, served
from tests.support.text_models import byte_level_bpe, write_model

ANSWER = "it's gone; 日本語 😀 and   spaces"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(write_model(tmp_path_factory.mktemp("model"), byte_level_bpe()))


def engine_of(texts: TextModel) -> ScriptedEngine:
    def script(request: GenerationRequest) -> list[Step]:
        ids = [int(i) for i in texts.encode(ANSWER, SpecialTokens.OMIT)]
        steps: list[Step] = [
            TokenDelta((GeneratedToken(i),), None, None if at else CachedTokens())
            for at, i in enumerate(ids)
        ]
        end = texts.token_id("</s>")
        assert end is not None
        return [*steps, TokenDelta((GeneratedToken(end),), FinishReason.STOP)]

    return ScriptedEngine(script, vocab_size=texts.vocabulary_size, context_tokens=CONTEXT_TOKENS)


async def test_a_chat_is_rendered_by_the_models_template_and_its_answer_decoded(
    texts: TextModel,
) -> None:
    async with served(engine_of(texts), texts=texts) as it:
        answer = await it.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [{"type": "text", "text": "hé"}]}]
        )
        rendered = texts.encode_chat([{"role": "user", "content": "hé"}], ChatOptions())
        assert it.engine.request.prompt_tokens == tuple(rendered.tolist())
        stream = await it.client.completions.create(
            model=MODEL, prompt="the quick", stream=True, stop=["  s"]
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert it.engine.request.prompt_tokens == tuple(texts.encode("the quick").tolist())
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(rendered)
    assert text == ANSWER[: ANSWER.index("  s")]


async def test_what_a_template_refuses_is_the_fault_of_the_messages(texts: TextModel) -> None:
    async with served(engine_of(texts), texts=texts) as it:
        with pytest.raises(BadRequestError) as refused:
            await it.client.chat.completions.create(model=MODEL, messages=[])
        assert refused.value.param == "messages"
