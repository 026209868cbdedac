"""Every parameter of OpenAI's completions and chat completions, and what becomes of it.

The two tables are the promise: a parameter is implemented, or advisory (the answer does not depend
on it, by OpenAI's own definition), or it answers 400 `unsupported_parameter`; so does any name that
is not in the table. None is silently ignored. What must not live here: tokenizers, engines.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from kvtier.core.eviction.retention import PRIORITY_DEFAULT, PRIORITY_MAX, RetentionPlan, TokenRange
from kvtier.limits import (
    COMPLETION_CHOICES_MAX,
    LOGIT_BIASES_COUNT_MAX,
    LOGPROBS_COUNT_MAX,
    NAME_BYTES_MAX,
    PROMPT_TOKENS_MAX,
    RETENTION_RANGES_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_COUNT_MAX,
    STOP_TOKENS_COUNT_MAX,
)
from kvtier.openai.errors import unknown, unsupported
from kvtier.paged.sampling import SEED_MAX, SamplingTerms
from kvtier.text import ChatOptions
from kvtier.text.template import Ending
from kvtier_services.worker.http.fields import NAME_SHOWN_CHARS_MAX, Fields, Json, kind

COMPLETION_TOKENS_DEFAULT: Final = 16
"""`max_tokens` of a completion that does not say, as OpenAI has it."""
_TEXT_PARTS: Final = ("text", "input_text", "output_text", "refusal")
_INT64_MAX: Final = 2**63 - 1
_DURATION_MS_MAX: Final = 30 * 86_400_000
_EXTENDED: Final = RetentionPlan((TokenRange(0, None, 80, 86_400_000),))
"""What OpenAI's `prompt_cache_retention` "24h" asks for, as a priority with a duration."""


class Standing(StrEnum):
    """What becomes of a parameter."""

    IMPLEMENTED = "implemented"
    ADVISORY = "advisory"
    """Checked and taken: it names the caller or hints at routing; the answer stays the same."""
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Parameter:
    """`neutral`: values of an unsupported parameter that ask for nothing, and so are taken."""

    standing: Standing
    neutral: tuple[object, ...] = ()


def _all(standing: Standing, names: str) -> dict[str, Parameter]:
    return {name: Parameter(standing) for name in names.split()}


def _unsupported(**neutral: tuple[object, ...]) -> dict[str, Parameter]:
    return {name: Parameter(Standing.UNSUPPORTED, values) for name, values in neutral.items()}


_COMMON: Final = {
    **_all(
        Standing.IMPLEMENTED,
        "model n stream stream_options stop seed temperature top_p presence_penalty"
        " frequency_penalty logit_bias logprobs max_tokens"
        # beyond OpenAI, with the names and the meaning that vLLM gives them
        " top_k min_p stop_token_ids ignore_eos cache_salt priority return_token_ids"
        # ours
        " kv_retention",
    ),
    **_all(Standing.ADVISORY, "user"),
}
COMPLETION_PARAMETERS: Final[Mapping[str, Parameter]] = {
    **_COMMON,
    **_all(Standing.IMPLEMENTED, "prompt echo best_of"),
    **_unsupported(suffix=("",)),
}
CHAT_PARAMETERS: Final[Mapping[str, Parameter]] = {
    **_COMMON,
    **_all(
        Standing.IMPLEMENTED,
        "messages top_logprobs max_completion_tokens prompt_cache_retention"
        # as in vLLM
        " chat_template_kwargs add_generation_prompt continue_final_message",
    ),
    **_all(Standing.ADVISORY, "safety_identifier prompt_cache_key"),
    **_unsupported(
        audio=(),
        function_call=("none",),
        functions=([],),
        metadata=({},),
        modalities=(["text"],),
        moderation=(),
        parallel_tool_calls=(True, False),  # says how tools are called, and there are none
        prediction=(),
        prompt_cache_options=({},),
        reasoning_effort=(),
        response_format=({"type": "text"},),
        service_tier=("auto", "default"),
        store=(False,),
        tool_choice=("none", "auto"),
        tools=([],),
        verbosity=(),
        web_search_options=(),
    ),
}


class Delivery(Enum):
    """How the answer goes out."""

    WHOLE = "whole"
    STREAM = "stream"
    STREAM_WITH_USAGE = "stream_with_usage"


class Logprobs(Enum):
    """How a body asks for log-probabilities."""

    NUMBER = "number"
    FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What both kinds of request say about their answer. `sampling.seed` is that of choice 0."""

    model: str
    choices_count: int
    sampling: SamplingTerms
    tokens_max: int | None
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    logprobs_count: int | None
    delivery: Delivery
    scope_salt: str | None
    priority: int
    retention: RetentionPlan | None
    with_token_ids: bool
    user: str | None


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionBody:
    terms: Terms
    prompts: tuple[Prompt, ...]
    echo: bool


@dataclass(frozen=True, slots=True)
class ChatBody:
    terms: Terms
    messages: Sequence[Mapping[str, object]]
    options: ChatOptions


def parse_completion(body: Json, vocab_size: int) -> CompletionBody:
    """Read a completions body; ParameterError names the first parameter that is wrong.

    Pure, but for the seed that is drawn where none is given.
    """
    fields = _known(body, COMPLETION_PARAMETERS)
    terms = _terms(fields, vocab_size, Logprobs.NUMBER)
    echo = fields.flag("echo", False)
    if echo and terms.logprobs_count is not None:
        raise unsupported("echo", "together with logprobs")
    if fields.integer("best_of", terms.choices_count, 1, COMPLETION_CHOICES_MAX) != (
        terms.choices_count
    ):
        raise unsupported("best_of", "with another value than n")
    prompts = _prompts(fields, vocab_size)
    if len(prompts) * terms.choices_count > COMPLETION_CHOICES_MAX:
        fields.fail("n", f"times the prompts must be at most {COMPLETION_CHOICES_MAX}")
    return CompletionBody(terms, prompts, echo)


def parse_chat(body: Json, vocab_size: int) -> ChatBody:
    """Read a chat completions body, as `parse_completion`. Messages are the template's to check."""
    fields = _known(body, CHAT_PARAMETERS)
    terms = _terms(fields, vocab_size, Logprobs.FLAG)
    messages = fields.get("messages")
    if messages is None:
        fields.missing("messages")
    if not isinstance(messages, list):
        fields.refuse("messages", messages, "an array")
    _refuse_media(messages)
    for name in ("safety_identifier", "prompt_cache_key"):
        fields.text(name, NAME_BYTES_MAX)
    return ChatBody(terms, messages, _chat_options(fields))


def _known(body: Json, table: Mapping[str, Parameter]) -> Fields:
    """Refuse what is not implemented, before anything else is looked at."""
    for name, value in body.items():
        parameter = table.get(name)
        if parameter is None:
            raise unknown(name[:NAME_SHOWN_CHARS_MAX])
        if parameter.standing is not Standing.UNSUPPORTED or value is None:
            continue
        if not any(type(value) is type(each) and value == each for each in parameter.neutral):
            raise unsupported(name)
    return Fields(body)


def _terms(fields: Fields, vocab_size: int, logprobs: Logprobs) -> Terms:
    model = fields.text("model", NAME_BYTES_MAX)
    if model is None:
        fields.missing("model")
    return Terms(
        model=model,
        choices_count=fields.integer("n", 1, 1, COMPLETION_CHOICES_MAX),
        sampling=_sampling(fields, vocab_size),
        tokens_max=_tokens_max(fields),
        stops=fields.texts("stop", STOP_STRINGS_COUNT_MAX, STOP_STRING_CHARS_MAX),
        stop_token_ids=frozenset(
            fields.integers("stop_token_ids", STOP_TOKENS_COUNT_MAX, vocab_size - 1)
        ),
        ignore_eos=fields.flag("ignore_eos", False),
        logprobs_count=_logprobs_count(fields, logprobs),
        delivery=_delivery(fields),
        scope_salt=fields.text("cache_salt", NAME_BYTES_MAX),
        priority=fields.integer("priority", 0, -_INT64_MAX, _INT64_MAX),
        retention=_retention(fields),
        with_token_ids=fields.flag("return_token_ids", False),
        user=fields.text("user", NAME_BYTES_MAX),
    )


def _sampling(fields: Fields, vocab_size: int) -> SamplingTerms:
    seed = fields.integer("seed", None, -_INT64_MAX - 1, SEED_MAX)
    top_k = fields.integer("top_k", 0, -1, 2**31 - 1)  # -1: off, as in vLLM
    return SamplingTerms(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=max(top_k, 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=secrets.randbits(64) if seed is None else seed % (SEED_MAX + 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=fields.weights("logit_bias", LOGIT_BIASES_COUNT_MAX, vocab_size - 1),
    )


def _tokens_max(fields: Fields) -> int | None:
    old = fields.integer("max_tokens", None, 1, PROMPT_TOKENS_MAX)
    new = fields.integer("max_completion_tokens", None, 1, PROMPT_TOKENS_MAX)
    if old is not None and new is not None and old != new:
        fields.fail("max_tokens", "and max_completion_tokens contradict each other")
    return new if new is not None else old


def _logprobs_count(fields: Fields, form: Logprobs) -> int | None:
    if form is Logprobs.NUMBER:
        return fields.integer("logprobs", None, 0, LOGPROBS_COUNT_MAX)
    wanted = fields.flag("logprobs", False)
    count = fields.integer("top_logprobs", None, 0, LOGPROBS_COUNT_MAX)
    if count is not None and not wanted:
        fields.fail("top_logprobs", "needs logprobs to be true")
    return (count or 0) if wanted else None


def _delivery(fields: Fields) -> Delivery:
    stream = fields.flag("stream", False)
    options = fields.section("stream_options")
    if options is None:
        return Delivery.STREAM if stream else Delivery.WHOLE
    if not stream:
        fields.fail("stream_options", "needs stream to be true")
    options.only("include_usage", "include_obfuscation")
    if options.flag("include_obfuscation", False):
        raise unsupported("stream_options.include_obfuscation")
    wanted = options.flag("include_usage", False)
    return Delivery.STREAM_WITH_USAGE if wanted else Delivery.STREAM


def _retention(fields: Fields) -> RetentionPlan | None:
    """How long and how dearly the KV is kept: ours is TensorRT-LLM's KvCacheRetentionConfig."""
    span = fields.get("prompt_cache_retention")
    if span not in (None, "in_memory", "in-memory", "24h"):
        fields.fail("prompt_cache_retention", 'must be "in_memory" or "24h"')
    hint = fields.section("kv_retention")
    if hint is None:
        return _EXTENDED if span == "24h" else None
    hint.only("ranges", "decode_priority", "decode_duration_ms")
    ranges = []
    for each in hint.sections("ranges", RETENTION_RANGES_MAX):
        each.only("start", "end", "priority", "duration_ms")
        start = each.integer("start", 0, 0, PROMPT_TOKENS_MAX)
        end = each.integer("end", None, start + 1, PROMPT_TOKENS_MAX)
        priority = each.integer("priority", PRIORITY_DEFAULT, 0, PRIORITY_MAX)
        ranges.append(TokenRange(start, end, priority, _duration(each, "duration_ms")))
    _refuse_overlaps(fields, ranges)
    priority = hint.integer("decode_priority", PRIORITY_DEFAULT, 0, PRIORITY_MAX)
    return RetentionPlan(tuple(ranges), priority, _duration(hint, "decode_duration_ms"))


def _duration(fields: Fields, name: str) -> int | None:
    return fields.integer(name, None, 1, _DURATION_MS_MAX)


def _refuse_overlaps(fields: Fields, ranges: list[TokenRange]) -> None:
    reached: float = 0
    for each in sorted(ranges, key=lambda each: each.start):
        if each.start < reached:
            fields.fail("kv_retention", "has ranges that overlap")
        reached = math.inf if each.end is None else each.end


def _prompts(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    """A text, token ids, or an array of either."""
    value = fields.get("prompt")
    if value is None:
        fields.missing("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        fields.refuse("prompt", value, "a string or an array")
    if not value:
        fields.fail("prompt", "is empty")
    if not isinstance(value[0], str | list):
        return (_token_ids(fields, value, vocab_size),)
    if len(value) > COMPLETION_CHOICES_MAX:
        fields.fail("prompt", f"has {len(value)} prompts, at most {COMPLETION_CHOICES_MAX}")
    prompts: list[Prompt] = []
    for each in value:
        if type(each) is not type(value[0]):
            fields.fail("prompt", f"mixes {kind(value[0])} and {kind(each)}")
        prompts.append(each if isinstance(each, str) else _token_ids(fields, each, vocab_size))
    return tuple(prompts)


def _token_ids(fields: Fields, items: Sequence[object], vocab_size: int) -> tuple[int, ...]:
    if not items:
        fields.fail("prompt", "has no tokens")
    if len(items) > PROMPT_TOKENS_MAX:
        fields.fail("prompt", f"has {len(items)} tokens, at most {PROMPT_TOKENS_MAX}")
    return fields.checked_integers("prompt", items, vocab_size - 1)


def _refuse_media(messages: Sequence[object]) -> None:
    """Refuse what a template would only leave a mark of: the model has no eyes and ears."""
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        if message.get("audio") is not None:
            raise unsupported(f"messages[{at}].audio")
        content = message.get("content")
        for part_at, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") not in _TEXT_PARTS:
                raise unsupported(f"messages[{at}].content[{part_at}]", "only text is taken")


def _chat_options(fields: Fields) -> ChatOptions:
    continued = fields.flag("continue_final_message", False)
    prompted = fields.flag("add_generation_prompt", not continued)
    if continued and prompted:
        fields.fail("continue_final_message", "contradicts add_generation_prompt")
    ending = (
        Ending.CONTINUED if continued else Ending.GENERATION_PROMPT if prompted else Ending.CLOSED
    )
    variables = fields.get("chat_template_kwargs")
    if variables is None:
        variables = {}
    if not isinstance(variables, dict):
        fields.refuse("chat_template_kwargs", variables, "an object")
    return ChatOptions(template_arguments=variables, ending=ending)
