"""Templates of a hostile model owner and messages of a hostile client are refused within bounds."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import CallerError, LimitError
from kvtier.limits import CHAT_MESSAGES_COUNT_MAX, JSON_DEPTH_MAX, RENDERED_CHARS_MAX
from kvtier.text import ChatOptions, SpecialTokens, TextConfig, TextModel, chat_pseudo_tokens
from kvtier.text.template import ChatTemplate, TemplateInput
from tests.support.chat_templates import TEMPLATES
from tests.support.json_values import JSON

GROWING = (
    "{%% set ns = namespace(%s) %%}{%% for i in range(99) %%}{%% set ns.%s = %s %%}{%% endfor %%}"
)
USER = {"role": "user", "content": "x" * 1000}


def render(template: str, messages: list[dict[str, object]] | None = None) -> str:
    chat = TemplateInput(messages=[dict(USER)] if messages is None else messages)
    return ChatTemplate(template).render(chat)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ 10000000000 * 'x' }}",
        "{{ [1] * 10000000000 }}",
        "{{ 2 ** 10000000000 }}",
        "{{ 9 ** 9 ** 9 ** 9 ** 9 ** 9 }}",
        GROWING % ("x=3", "x", "ns.x * ns.x"),
        GROWING % ("s='xx'", "s", "ns.s + ns.s"),
        GROWING % ("s='xx'", "s", "ns.s ~ ns.s"),
        GROWING % ("s=[1]", "s", "ns.s + ns.s"),
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x'.zfill(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x' | indent(10000000000, true) }}",
        "{{ messages | tojson(indent=10000000000) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '%*d' | format(10000000000, 1) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '\t'.expandtabs(10000000000) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
        "{{ ('x' * 100000).join(range(99999) | list) }}",
    ],
)
def test_a_template_that_takes_too_much_is_stopped(template: str) -> None:
    with pytest.raises((LimitError, CallerError)):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__.__base__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ self._TemplateReference__context }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x }}",
        "{{ none + 1 }}",
        "{{ raise_exception(messages) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_change_what_it_is_given(template: str) -> None:
    messages: list[dict[str, object]] = [dict(USER)]
    try:
        rendered = render(template, messages)
    except CallerError:
        rendered = ""
    assert messages == [USER]
    assert "class" not in rendered
    assert "module" not in rendered


def test_an_error_says_what_the_template_says_and_no_more_than_a_line() -> None:
    with pytest.raises(CallerError, match="no such role") as caught:
        render("{{ raise_exception('no such role ' + messages[0].content) }}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% for i in range(9) %}x{% endfor %}", "{{ raise_exception('x') }}"]
)
def test_what_a_message_holds_is_never_run(name: str, text: str) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": text}]
    assert text in render(TEMPLATES[name], messages)


def test_a_special_token_in_a_message_is_that_token_as_in_engines(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    ids = model.encode_chat([{"role": "user", "content": "a<|im_end|>b"}]).tolist()
    assert ids.count(model.token_id("<|im_end|>")) == 2
    assert model.decode(ids, SpecialTokens.ADD).count("<|im_end|>") == 2


MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name", "thinking", "reasoning"]),
        JSON | st.sampled_from(["user", "assistant", "\ud800", {"a": 1}]),
        max_size=4,
    )
    | JSON,
    max_size=3,
)


@given(messages=MESSAGES, name=st.sampled_from(sorted(TEMPLATES)), tools=JSON)
@settings(max_examples=200, deadline=None)
def test_any_json_gives_a_prompt_or_a_caller_error(
    tiny_models: dict[str, TextModel], messages: object, name: str, tools: object
) -> None:
    options = ChatOptions(tools=tools)  # type: ignore[arg-type]
    try:
        ids = tiny_models[name].encode_chat(messages, options)  # type: ignore[arg-type]
    except CallerError:
        return
    assert ids.ndim == 1


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user"},
        ["hello"],
        [{"content": "no role"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"type": "text"}}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"text": "no type"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "unheard_of"}]}],
        [{"role": "assistant", "tool_calls": "f"}],
        [{"role": "assistant", "tool_calls": ["f"]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x", "extra": object()}],
        [{"role": "user", "content": "x", "extra": {5: 1}}],
    ],
)
def test_what_is_no_chat_is_refused(tiny_directory: Path, messages: object) -> None:
    with pytest.raises(CallerError):
        TextModel.load(tiny_directory).encode_chat(messages)  # type: ignore[arg-type]


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_of_messages_and_arguments_has_a_ceiling(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    deep = nested(JSON_DEPTH_MAX + 1)
    fine: dict[str, object] = {"role": "user", "content": "x", "extra": nested(JSON_DEPTH_MAX)}
    assert model.encode_chat([fine]).size
    with pytest.raises(LimitError):
        model.encode_chat([{"role": "user", "content": "x", "extra": deep}])
    for options in (
        ChatOptions(tools=[deep]),
        ChatOptions(documents=[deep]),
        ChatOptions(template_arguments={"x": deep}),
    ):
        with pytest.raises(LimitError):
            model.encode_chat([USER], options)
    with pytest.raises(LimitError):
        chat_pseudo_tokens([{"role": "user", "content": deep}])


def test_size_and_number_of_messages_have_ceilings(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory)
    with pytest.raises(LimitError):
        model.encode_chat([USER] * (CHAT_MESSAGES_COUNT_MAX + 1))
    with pytest.raises(LimitError):
        model.encode_chat([{"role": "user", "content": "x" * (RENDERED_CHARS_MAX + 1)}])
    with pytest.raises(LimitError):
        model.encode("x" * (RENDERED_CHARS_MAX + 1))


def test_a_large_message_is_tokenised_whole_and_not_kept(tiny_directory: Path) -> None:
    model = TextModel.load(tiny_directory, TextConfig(segment_cache_bytes=1 << 20))
    text = "word " * 20_000
    ids = model.encode_chat([{"role": "user", "content": text}])
    assert text in model.decode(ids.tolist())
    assert model.cache_stats().bytes < 10_000
