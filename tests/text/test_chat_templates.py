"""Chats are rendered and tokenised as transformers' `apply_chat_template` does it."""

from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from kvtier.errors import CallerError, ConfigError
from kvtier.text import ChatOptions, Ending, TextConfig, TextModel
from tests.support.chat_templates import CHATML, SPECIAL_TOKENS, TEMPLATES
from tests.support.json_values import JSON
from tests.support.text_models import byte_level_bpe, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, object]

TEXTS = st.one_of(
    st.sampled_from(
        [
            *(
                "",
                " ",
                "\n",
                " padded \n",
                "{{ 7 * 7 }}",
                "{% raw %}",
                "{# no #}",
                "{{ messages }}",
            ),
            *("</think>answer", "<think>\nhm\n</think>\n\nyes", "<tool_response>x</tool_response>"),
            *("<script>'&\"</script>", "tab\tand\rcarriage", "日本語 😀", "%s %d {0}", "None"),
            *SPECIAL_TOKENS,
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=30),
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["search", "run_it"]),
                    "arguments": st.dictionaries(TEXTS, JSON, max_size=3),
                }
            ),
        },
        optional={"id": st.just("call_1")},
    ),
    min_size=1,
    max_size=2,
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS},
    optional={
        "reasoning_content": TEXTS | st.none(),
        "thinking": TEXTS,
        "reasoning": TEXTS,
        "tool_calls": CALLS,
        "name": st.none(),
    },
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "system", "tool", "skip", "stop"]), "content": TEXTS}
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}) | st.just({"type": "image"}),
    max_size=3,
)
WITH_PARTS = st.fixed_dictionaries({"role": st.just("user"), "content": PARTS})
CONVERSATIONS = st.lists(OTHERS | ANSWERS, min_size=1, max_size=6)
TOOLS = st.none() | st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["search", "run_it"]),
                    "description": TEXTS,
                    "parameters": st.fixed_dictionaries(
                        {
                            "type": st.just("object"),
                            "properties": st.dictionaries(
                                st.sampled_from(["a", "b", "ünï"]),
                                st.just({"type": "string"}) | st.just({}),
                            ),
                        }
                    ),
                }
            ),
        }
    ),
    max_size=2,
)
ARGUMENTS = st.fixed_dictionaries(
    {"date_string": st.just("26 Jul 2024")},
    optional={
        "enable_thinking": st.booleans(),
        "add_vision_id": st.booleans(),
        "reasoning_effort": st.sampled_from(["low", "high"]),
        "eos_token": st.just("<over>"),
    },
)
DOCUMENTS = st.none() | st.lists(st.fixed_dictionaries({"title": TEXTS, "text": TEXTS}), max_size=2)
OPTIONS = st.builds(
    ChatOptions,
    tools=TOOLS,
    documents=DOCUMENTS,
    template_arguments=ARGUMENTS,
    ending=st.sampled_from(Ending),
)


@cache
def both(name: str) -> "tuple[TextModel, PreTrainedTokenizerFast]":
    from transformers import PreTrainedTokenizerFast

    template = TEMPLATES[name]
    with TemporaryDirectory() as folder:
        directory = write_model(Path(folder), byte_level_bpe(), template)
        return TextModel.load(directory), PreTrainedTokenizerFast.from_pretrained(folder)


def theirs(
    name: str, messages: list[Message], options: ChatOptions
) -> tuple[str, list[int]] | type[Exception]:
    """What transformers makes of a chat, or the class of its refusal."""
    tokenizer = both(name)[1]

    def applied(tokenize: bool) -> object:
        return tokenizer.apply_chat_template(
            messages,
            tools=options.tools,
            documents=options.documents,
            add_generation_prompt=options.ending is Ending.GENERATION_PROMPT,
            continue_final_message=options.ending is Ending.CONTINUED,
            tokenize=tokenize,
            return_dict=False,
            **options.template_arguments,
        )

    try:
        text, ids = applied(tokenize=False), applied(tokenize=True)
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        return type(error)
    assert isinstance(text, str)
    assert isinstance(ids, list)
    return text, ids


def ours(
    name: str, messages: list[Message], options: ChatOptions
) -> tuple[str, list[int]] | type[Exception]:
    model = both(name)[0]
    try:
        text = model.render_chat(messages, options)
    except CallerError as error:
        return type(error)
    return text, model.encode_chat(messages, options).tolist()


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=CONVERSATIONS, options=OPTIONS)
@settings(max_examples=50, deadline=None)
def test_chats_are_what_transformers_makes_of_them(
    name: str, messages: list[Message], options: ChatOptions
) -> None:
    expected = theirs(name, messages, options)
    found = ours(name, messages, options)
    if isinstance(expected, tuple):
        assert found == expected
    else:
        assert found is CallerError


@pytest.mark.parametrize("name", ["parts", "gemma"])
@given(messages=st.lists(OTHERS | WITH_PARTS, min_size=1, max_size=4), options=OPTIONS)
@settings(max_examples=40, deadline=None)
def test_content_in_parts_reaches_templates_that_take_it(
    name: str, messages: list[Message], options: ChatOptions
) -> None:
    expected = theirs(name, messages, options)
    found = ours(name, messages, options)
    if isinstance(expected, tuple):
        assert found == expected
    else:
        assert found is CallerError


def test_the_templates_are_a_dozen_and_differ() -> None:
    assert len(set(TEMPLATES.values())) >= 12


PLAIN = TextConfig()


def loaded(tmp_path: Path, template: str, config: TextConfig = PLAIN) -> TextModel:
    return TextModel.load(write_model(tmp_path, byte_level_bpe(), template), config)


def user(content: object) -> list[Message]:
    return [{"role": "user", "content": content}]


def test_parts_become_one_text_for_a_template_that_takes_text(tmp_path: Path) -> None:
    model = loaded(tmp_path, CHATML)
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert model.render_chat(user(parts)) == model.render_chat(user("one\ntwo"))


def test_an_image_is_refused_by_a_template_that_takes_text(tmp_path: Path) -> None:
    model = loaded(tmp_path, CHATML)
    with pytest.raises(CallerError, match="takes text"):
        model.render_chat(user([{"type": "image_url", "image_url": {"url": "data:,"}}]))


def test_image_parts_of_the_api_have_the_name_that_templates_know() -> None:
    model = both("parts")[0]
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    rendered = model.render_chat(user([image, {"type": "text", "text": "what is it?"}]))
    assert "<|vision_start|><|image_pad|><|vision_end|>what is it?" in rendered


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"b": 1, "a": "é"}', '{"b": 1, "a": "é"}'),
        ("{}", "{}"),
        ("", "{}"),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_tool_call_arguments_come_as_the_text_that_the_api_has(arguments: str, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages: list[Message] = [
        *user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    before = repr(messages)
    rendered = both("qwen_with_tools")[0].render_chat(messages)
    assert f'<tool_call>\n{{"name": "f", "arguments": {shown}}}\n</tool_call>' in rendered
    assert repr(messages) == before


def test_an_empty_list_of_tool_calls_is_no_tool_call() -> None:
    messages: list[Message] = [*user("hi"), {"role": "assistant", "content": "x", "tool_calls": []}]
    assert "x</s>" in both("mistral")[0].render_chat(messages)


def test_templates_print_the_date_of_the_clock_that_they_are_given(tmp_path: Path) -> None:
    config = TextConfig(now=lambda: datetime(2031, 2, 3))  # noqa: DTZ001 (local, as templates take it)
    rendered = loaded(tmp_path, TEMPLATES["llama_3"], config).render_chat(user("hi"))
    assert "Today Date: 03 Feb 2031" in rendered


def test_a_request_with_tools_gets_the_template_for_tools(tmp_path: Path) -> None:
    templates = {"default": "plain{{ messages[0].content }}", "tool_use": "tools{{ tools }}"}
    directory = write_model(tmp_path, byte_level_bpe(), templates)
    model = TextModel.load(directory)
    assert model.render_chat(user("x")) == "plainx"
    assert model.render_chat(user("x"), ChatOptions(tools=[])) == "tools[]"


def test_templates_in_files_of_their_own_go_before_those_in_the_configuration(
    tmp_path: Path,
) -> None:
    write_model(tmp_path, byte_level_bpe(), None, {"chat_template": "configured"})
    assert TextModel.load(tmp_path).render_chat(user("x")) == "configured"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert TextModel.load(tmp_path).render_chat(user("x")) == "from a file"
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("for tools")
    model = TextModel.load(tmp_path)
    assert model.render_chat(user("x"), ChatOptions(tools=[{}])) == "for tools"


def test_a_model_without_a_template_has_no_chats(tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path, byte_level_bpe(), None))
    assert not model.has_chat_template
    assert model.digests.chat_template is None
    with pytest.raises(CallerError, match="no chat template"):
        model.render_chat(user("x"))


@pytest.mark.parametrize("template", ["{% for %}", "{{", "{% unknown %}", "{{ x | nope }}"])
def test_a_broken_template_is_refused_when_it_is_read(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError):
        loaded(tmp_path, template)


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "add_generation_prompt"])
def test_template_arguments_cannot_replace_the_chat(tmp_path: Path, name: str) -> None:
    model = loaded(tmp_path, CHATML)
    with pytest.raises(CallerError, match=name):
        model.render_chat(user("x"), ChatOptions(template_arguments={name: []}))
