"""From logits to the next token: greedy, temperature, min-p, top-k, top-p, penalties, log-probs.

A draw is a function of the request's own logits, terms, seed and position and of nothing else:
neither of its neighbours in the batch nor of what was drawn before it, so that a request that was
preempted and computed again goes on as if nothing had happened. For this the random number is a
hash of (seed, position), and rows are computed one by one. What must not live here: stop
conditions, state of a request, random generators.
"""

import hashlib
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvtier.errors import BackendError, CallerError, LimitError
from kvtier.limits import LOGIT_BIASES_COUNT_MAX

SEED_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTerms:
    """How one request's tokens are drawn.

    Biases and penalties change the logits first; then temperature (0 is greedy), min-p, top-k and
    top-p in this order, each on what the one before left. `top_k` 0 and `top_p` 1 keep everything.
    Penalties count generated tokens only, as OpenAI has it. `seed` is a u64.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0.0, math.inf)
        _require("top_p", self.top_p, 0.0, 1.0)
        _require("min_p", self.min_p, 0.0, 1.0)
        _require("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _require("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        if self.top_k < 0:
            raise CallerError(f"top_k is {self.top_k}, must be 0 (off) or more")
        if not 0 <= self.seed <= SEED_MAX:
            raise CallerError(f"seed is {self.seed}, must be 0 to {SEED_MAX}")
        if len(self.logit_bias) > LOGIT_BIASES_COUNT_MAX:
            raise LimitError(f"{len(self.logit_bias)} biases exceed {LOGIT_BIASES_COUNT_MAX}")
        for token_id, bias in self.logit_bias:
            _require("a logit bias", bias, -math.inf, math.inf)
            if token_id < 0:
                raise CallerError(f"logit_bias names the token {token_id}")

    @property
    def changes_logits(self) -> bool:
        """Whether biases or penalties come before everything else."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of a batch: the terms and what the request generated so far, its prompt left out.

    The length of `generated` is the position of this draw. `logprobs_count` None: no log-probs.
    """

    terms: SamplingTerms
    generated: Sequence[int]
    logprobs_count: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; log-probabilities are of the model itself, before all terms (as in vLLM)."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, most likely first, of equals the lower id."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Draw one token a row of `logits`, float [draws, vocab] on any device. Mutates nothing.

    Greedy rows take the highest logit, of equals the lowest id. Raises BackendError where a row has
    no finite maximum: the model is broken, not the request. O(vocab) a row, O(vocab log vocab)
    for top-p of a flat distribution.
    """
    if logits.dim() != 2 or logits.shape[0] != len(draws):
        raise CallerError(f"logits of shape {list(logits.shape)} for {len(draws)} draws")
    if not draws:
        return []
    highest, greedy = logits.max(dim=-1)
    if not bool(torch.isfinite(highest).all()):
        raise BackendError("the model computed logits that are not numbers")
    token_ids: list[int] = greedy.tolist()
    sampled = []
    for i, draw in enumerate(draws):
        if draw.terms.temperature > 0 or draw.terms.changes_logits:
            token_ids[i] = _pick(distribution(logits[i], draw.terms, draw.generated), draw)
        sampled.append(_with_logprobs(logits[i], token_ids[i], draw.logprobs_count))
    return sampled


def distribution(logits: Tensor, terms: SamplingTerms, generated: Sequence[int]) -> Tensor:
    """Return the weights, float64 [vocab], in whose proportion the next token is drawn. Pure.

    They are not normalised; the largest is 1. A greedy distribution has a single weight.
    """
    adjusted = _adjusted(logits.double(), terms, generated)
    best = int(adjusted.argmax())
    if terms.temperature == 0:
        return torch.zeros_like(adjusted).index_fill_(
            0, torch.tensor([best], device=adjusted.device), 1.0
        )
    weights = torch.exp((adjusted - adjusted[best]) / terms.temperature)
    if terms.min_p > 0:
        weights = torch.where(weights >= terms.min_p, weights, 0.0)
    if 0 < terms.top_k < weights.numel():
        weights = _largest(weights, torch.topk(weights, terms.top_k).values, terms.top_k)
    if terms.top_p < 1:
        weights = _nucleus(weights, terms.top_p)
    return weights


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for one draw: 53 bits of a hash of seed and position. Pure."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _pick(weights: Tensor, draw: Draw) -> int:
    """Invert the cumulative distribution, in the order of token ids."""
    cumulative = weights.cumsum(0)
    point = uniform(draw.terms.seed, len(draw.generated)) * float(cumulative[-1])
    at = int(torch.searchsorted(cumulative, point, right=True))
    if at < weights.numel():
        return at
    return int(weights.nonzero()[-1])  # the product was rounded up to the whole sum


def _adjusted(logits: Tensor, terms: SamplingTerms, generated: Sequence[int]) -> Tensor:
    if not terms.changes_logits:
        return logits
    changes: defaultdict[int, float] = defaultdict(float)
    if terms.presence_penalty or terms.frequency_penalty:
        for token_id, count in Counter(generated).items():
            changes[token_id] -= terms.presence_penalty + terms.frequency_penalty * count
    for token_id, bias in terms.logit_bias:
        changes[token_id] += bias
    if not changes:
        return logits
    if max(changes) >= logits.numel():
        raise CallerError(f"token {max(changes)} is beyond the vocabulary of {logits.numel()}")
    where = torch.tensor(list(changes), device=logits.device)
    by = torch.tensor(list(changes.values()), dtype=logits.dtype, device=logits.device)
    return logits.index_add(0, where, by)


def _nucleus(weights: Tensor, share: float) -> Tensor:
    """Keep the fewest largest weights whose sum reaches `share` of all (at least one).

    Weights that together cannot make up the rest are left out before sorting: usually nearly all.
    """
    total = float(weights.sum())
    descending = _descending(weights[weights >= (1 - share) * total / weights.numel()])
    count = int((descending.cumsum(0) < share * total).sum()) + 1
    return _largest(weights, descending, min(count, descending.numel()))


def _descending(values: Tensor) -> Tensor:
    """Sorted, largest first. On a CPU numpy's vectorised sort is ten times as fast as torch's."""
    if values.device.type != "cpu":
        return values.sort(descending=True).values
    return torch.from_numpy(np.sort(values.numpy())[::-1].copy())


def _largest(weights: Tensor, descending: Tensor, count: int) -> Tensor:
    """Keep exactly the `count` largest weights, of equals those with the lowest ids."""
    return torch.where(_largest_mask(weights, descending, count), weights, 0.0)


def _largest_mask(values: Tensor, descending: Tensor, count: int) -> Tensor:
    edge = descending[count - 1]
    above = values > edge
    level = values == edge
    return above | (level & (level.cumsum(0) <= count - above.sum()))


def _with_logprobs(logits: Tensor, token_id: int, count: int | None) -> Sampled:
    if count is None:
        return Sampled(token_id)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = float(logprobs[token_id])
    count = min(count, logprobs.numel())
    if count == 0:
        return Sampled(token_id, chosen)
    mask = _largest_mask(logprobs, torch.topk(logprobs, count).values, count)
    ids = mask.nonzero().flatten().tolist()
    top = sorted(zip(ids, logprobs[mask].tolist(), strict=True), key=lambda pair: -pair[1])
    return Sampled(token_id, chosen, tuple(top))


def _require(what: str, value: float, least: float, most: float) -> None:
    if not math.isfinite(value) or not least <= value <= most:
        raise CallerError(f"{what} is {value}, must be a number of {least} to {most}")
