"""From a request's body to what the engine runs: parsed, rendered, tokenised, checked for length.

Runs in a thread for long bodies: nothing here touches the event loop. What must not live here:
HTTP, the engine's answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvtier.core.model_card import ModelCard
from kvtier.errors import CallerError, LimitError
from kvtier.openai.errors import Fault, ModelUnknownError, ParameterError
from kvtier.openai.strict_json import parse_object
from kvtier.paged.sampling import SEED_MAX
from kvtier.text import SpecialTokens
from kvtier.text.stream import TextStream
from kvtier_services.worker.http.choices import Choice
from kvtier_services.worker.http.parameters import (
    COMPLETION_TOKENS_DEFAULT,
    ChatBody,
    Prompt,
    Terms,
    parse_chat,
    parse_completion,
)
from kvtier_services.worker.http.shapes import ChatShape, CompletionShape, Rendering, Shape
from kvtier_services.worker.http.texts import Texts
from kvtier_services.worker.requests import GenerationRequest

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Limits:
    """What of the engine a request is checked against."""

    card: ModelCard
    context_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can run: `choices` and `requests` pair up, those of a prompt in a row."""

    terms: Terms
    shape: Shape
    choices: Sequence[Choice]
    requests: Sequence[GenerationRequest]


class Prepare(Protocol):
    """`prepare_completion` or `prepare_chat`."""

    def __call__(self, body: bytes, answer_id: str, texts: Texts, limits: Limits) -> Prepared:
        """Return what runs; raise what is wrong with `body`. O(body)."""
        ...


def prepare_completion(body: bytes, answer_id: str, texts: Texts, limits: Limits) -> Prepared:
    """`Prepare` of `/v1/completions`."""
    parsed = parse_completion(parse_object(body), limits.vocab_size)
    terms = parsed.terms
    require_model(limits.card, terms.model)
    sequences = []
    for prompt in parsed.prompts:
        tokens = _prompt_tokens(prompt, terms, texts)
        echo = _prompt_text(prompt, texts) if parsed.echo else ""
        room = _room("prompt", tokens, terms, limits)
        tokens_max = terms.tokens_max or min(COMPLETION_TOKENS_DEFAULT, room)
        sequences.append(_Sequence(tokens, tokens_max, echo))
    shape = CompletionShape(_rendering(terms, texts))
    return _prepared(terms, shape, _Batch(answer_id, texts, sequences))


def prepare_chat(body: bytes, answer_id: str, texts: Texts, limits: Limits) -> Prepared:
    """`Prepare` of `/v1/chat/completions`."""
    parsed = parse_chat(parse_object(body), limits.vocab_size)
    terms = parsed.terms
    require_model(limits.card, terms.model)
    tokens = _chat_tokens(parsed, texts)
    room = _room("messages", tokens, terms, limits)
    sequences = [_Sequence(tokens, terms.tokens_max or room, "")]
    shape = ChatShape(_rendering(terms, texts))
    return _prepared(terms, shape, _Batch(answer_id, texts, sequences))


def require_model(card: ModelCard, name: str) -> None:
    """ModelUnknownError unless `card` serves the model under this name."""
    if name not in card.served_names:
        raise ModelUnknownError(f"The model {name[:128]!r} does not exist")


@dataclass(frozen=True, slots=True)
class _Sequence:
    tokens: tuple[int, ...]
    tokens_max: int
    echo: str


@dataclass(frozen=True, slots=True)
class _Batch:
    answer_id: str
    texts: Texts
    sequences: Sequence[_Sequence]


def _prompt_tokens(prompt: Prompt, terms: Terms, texts: Texts) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    ids = texts.encode(prompt, SpecialTokens.ADD, terms.scope_salt or "")
    return tuple(ids.tolist())


def _chat_tokens(chat: ChatBody, texts: Texts) -> tuple[int, ...]:
    try:
        ids = texts.encode_chat(chat.messages, chat.options, chat.terms.scope_salt or "")
    except (LimitError, ParameterError):
        raise
    except CallerError as error:  # the template's
        raise ParameterError(Fault.VALUE, "messages", str(error)) from error
    return tuple(ids.tolist())


def _prompt_text(prompt: Prompt, texts: Texts) -> str:
    return prompt if isinstance(prompt, str) else texts.decode(prompt, SpecialTokens.ADD)


def _room(param: str, tokens: tuple[int, ...], terms: Terms, limits: Limits) -> int:
    """How many tokens may follow; ParameterError where not one, or not `max_tokens`."""
    if not tokens:
        raise ParameterError(Fault.VALUE, param, f"{param} has no tokens")
    room = limits.context_tokens - len(tokens)
    asked = terms.tokens_max or 1
    if asked > room:
        raise ParameterError(
            Fault.CONTEXT,
            param if room < 1 else "max_tokens",
            f"This model's maximum context length is {limits.context_tokens} tokens; you asked for"
            f" {len(tokens) + asked} ({len(tokens)} in {param}, {asked} to generate)",
        )
    return room


def _rendering(terms: Terms, texts: Texts) -> Rendering:
    def token_text(token_id: int) -> str:
        return texts.decode([token_id], SpecialTokens.ADD)

    return Rendering(terms.logprobs_count, terms.with_token_ids, token_text)


def _prepared(terms: Terms, shape: Shape, batch: _Batch) -> Prepared:
    """Each prompt `n` times; choice i of a prompt draws with the seed + i."""
    choices: list[Choice] = []
    requests: list[GenerationRequest] = []
    for sequence in batch.sequences:
        for nth in range(terms.choices_count):
            index = len(choices)
            stream = TextStream(batch.texts.decode, terms.stops)
            choices.append(Choice(index, sequence.tokens, stream, sequence.echo))
            seed = (terms.sampling.seed + nth) % (SEED_MAX + 1)
            requests.append(
                GenerationRequest(
                    request_id=f"{batch.answer_id}-{index}",
                    prompt_tokens=sequence.tokens,
                    sampling=replace(terms.sampling, seed=seed),
                    tokens_max=sequence.tokens_max,
                    stop_token_ids=terms.stop_token_ids,
                    ignore_eos=terms.ignore_eos,
                    scope_salt=terms.scope_salt,
                    priority=terms.priority,
                    retention=terms.retention,
                    logprobs_count=terms.logprobs_count,
                )
            )
    return Prepared(terms, shape, choices, requests)
