"""Whatever JSON comes: a request that can run, or the caller's error, and nothing else."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import CallerError
from kvtier_services.worker.http.parameters import CHAT_PARAMETERS, COMPLETION_PARAMETERS
from kvtier_services.worker.http.preparing import (
    Limits,
    Prepare,
    prepare_chat,
    prepare_completion,
)
from kvtier_services.worker.http.shapes import encoded
from tests.support.scripted_engine import CARD, CONTEXT_TOKENS, MODEL, VOCAB_SIZE, ByteTexts

LIMITS = Limits(CARD, CONTEXT_TOKENS, VOCAB_SIZE)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["none", "auto", "text", "24h", "user", "content", "role"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "tool"]),
            "content": st.one_of(st.text(max_size=5), VALUES),
        },
        optional={"tool_calls": VALUES, "name": VALUES, "audio": VALUES},
    ),
    max_size=3,
)
SENSIBLE = {
    "model": st.just(MODEL),
    "prompt": st.one_of(st.text(max_size=5), st.lists(st.integers(0, 299), max_size=5)),
    "messages": MESSAGES,
}


def bodies(names: list[str], required: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    """Sensible values of `required`, nearly always, and anything for the rest."""
    sound = {name: SENSIBLE[name] for name in required}
    rest = st.dictionaries(st.sampled_from(names), VALUES, max_size=2)
    both = st.tuples(st.fixed_dictionaries(sound), rest).map(lambda pair: {**pair[1], **pair[0]})
    either = st.one_of(both, both, both, rest)
    return either.map(lambda body: json.dumps(body).encode())


def check(prepare: Prepare, body: bytes) -> None:
    try:
        prepared = prepare(body, "id", ByteTexts(), LIMITS)
    except CallerError:
        return  # 4xx, all of them
    assert len(prepared.requests) == len(prepared.choices) >= 1
    for request in prepared.requests:
        assert len(request.prompt_tokens) + request.tokens_max <= CONTEXT_TOKENS
    for choice in prepared.choices:
        assert encoded(prepared.shape.whole(choice, []))


@settings(max_examples=200)
@given(bodies(list(COMPLETION_PARAMETERS), ("model", "prompt")))
def test_any_completions_body_runs_or_is_the_callers_error(body: bytes) -> None:
    check(prepare_completion, body)


@settings(max_examples=200)
@given(bodies(list(CHAT_PARAMETERS), ("model", "messages")))
def test_any_chat_body_runs_or_is_the_callers_error(body: bytes) -> None:
    check(prepare_chat, body)


def test_every_callers_error_is_a_4xx() -> None:
    waiting = [CallerError]
    while waiting:
        kind = waiting.pop()
        assert 400 <= kind.http_status < 500
        waiting += kind.__subclasses__()


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_are_the_callers_error(body: bytes) -> None:
    check(prepare_chat, body)
    check(prepare_completion, body)
