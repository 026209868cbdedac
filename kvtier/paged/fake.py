"""A fake model whose next token is a hash of every KV byte that it reads, at a GPU's pace.

Like a model's, the KV of a token is a function of the KV before it, of the token and of its
position; unlike a model's, one wrong byte in any block that a step reads changes the next token and
all KV after it, and equal inputs give equal bytes whatever the chunks and the batch were:

    seen(c)  sum over the full blocks before token c (within each group's window) of
             mix(checksum of the block's bytes, group, number of the block)
    h(t)     mix(mix(p, token), t), where p is seen(t) at a block's border, else the first word of
             the KV of token t - 1 as it stands in the pool
    KV(t)    for each layer, K and V: a word that is a mix of h(t), layer and K or V; behind it
             random bytes of one of a few patterns, chosen by the block's first word
    next     a mix of seen(c) and a checksum of the bytes of the last, unfinished block

It stands for a GPU: bytes a token by its geometry, prefill speed by its terms. Reading and writing
are real, and counted in the time that a step takes. What must not live here: real models,
scheduling, sampling.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvtier.core.checksum import checksum
from kvtier.errors import CallerError
from kvtier.paged.attention import check_slices
from kvtier.paged.geometry import KvGeometry, window_start
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import BeforeLayer, Logits, Slice

Words: TypeAlias = npt.NDArray[np.uint64]

_WORD_BYTES: Final = 8
_U64: Final = 2**64 - 1
_PATTERNS_COUNT_MAX: Final = 16
_PATTERNS_COUNT_MIN: Final = 4
_PATTERNS_BYTES: Final = 16 << 20
"""Patterns of a block's bytes are few, so that writing KV costs what copying from a cache does."""
_MARGIN: Final = 16.0
"""Logit of the next token; all others have 0."""
_PRINTABLE: Final = range(32, 127)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTerms:
    """What the fake stands for.

    `prefill_tokens_per_s` None: as fast as it goes. A step takes at least its tokens by that speed,
    plus `step_s`; waiting in `before_layer` overlaps the emulated computing of earlier layers, as
    on a GPU. `stride_bytes` (a multiple of 8) is how far apart the words of a block lie that are
    hashed: 8 is every byte; more makes reading a long prefix cheap enough to emulate a GPU, at a
    prime number of words samples all layers and tokens. `emits` are the ids that it answers with.
    """

    vocab_size: int = 259
    context_tokens: int = 1 << 20
    emits: range = _PRINTABLE
    prefill_tokens_per_s: float | None = None
    step_s: float = 0.0
    stride_bytes: int = _WORD_BYTES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.stride_bytes < _WORD_BYTES or self.stride_bytes % _WORD_BYTES:
            raise CallerError(f"stride_bytes is {self.stride_bytes}, not a multiple of 8")
        ends = {self.emits[0], self.emits[-1]} if self.emits else {-1}
        if min(ends) < 0 or max(ends) >= self.vocab_size:
            raise CallerError(f"emits {self.emits} outside 0 .. {self.vocab_size - 1}")
        rate = self.prefill_tokens_per_s
        if self.step_s < 0 or (rate is not None and rate <= 0):
            raise CallerError(f"a step of {self.step_s} s, {rate} tokens a second")
        if not 0 <= self.seed <= _U64:
            raise CallerError(f"seed {self.seed} is no u64")


class FakeModel:
    """`ModelRunner` without a model, on pools of a CPU. Not thread-safe."""

    __slots__ = ("_geometry", "_lanes", "_patterns", "_terms", "_weights")

    def __init__(self, geometry: KvGeometry, terms: FakeTerms | None = None) -> None:
        """Raises CallerError where a token's K in one layer is no whole number of words."""
        self._geometry = geometry
        self._terms = FakeTerms() if terms is None else terms
        row_bytes = geometry.layer_token_bytes // 2
        if row_bytes % _WORD_BYTES:
            raise CallerError(f"a token's K of {row_bytes} bytes is not a multiple of 8")
        drawn = np.random.default_rng(self._terms.seed)
        row_words = row_bytes // _WORD_BYTES
        self._patterns: list[Words] = []
        self._lanes: list[Words] = []
        self._weights: list[Words] = []
        for index, group in enumerate(geometry.groups):
            lanes = 2 * len(group.layers)
            fitting = _PATTERNS_BYTES // geometry.block_bytes(index)
            count = max(_PATTERNS_COUNT_MIN, min(_PATTERNS_COUNT_MAX, fitting))
            shape = (count, lanes, geometry.block_tokens, row_words)
            self._patterns.append(_random_words(drawn, shape))
            self._lanes.append(_random_words(drawn, (lanes,)))
            block_words = geometry.block_bytes(index) // _WORD_BYTES
            sampled = -(-block_words // (self._terms.stride_bytes // _WORD_BYTES))
            # Odd, so that a change of any sampled word changes the sum.
            self._weights.append(_random_words(drawn, (sampled,)) | np.uint64(1))

    @property
    def geometry(self) -> KvGeometry:
        return self._geometry

    @property
    def vocab_size(self) -> int:
        return self._terms.vocab_size

    @property
    def context_tokens(self) -> int:
        return self._terms.context_tokens

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """None: it never stops by itself."""
        return ()

    @property
    def model_id(self) -> str:
        return "kvtier-fake"

    @property
    def revision(self) -> str:
        return f"1-{self._terms.seed}-{self._terms.stride_bytes}"

    @property
    def rope_digest(self) -> bytes:
        return bytes(32)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def step(
        self, pool: KvPool, slices: Sequence[Slice], before_layer: BeforeLayer | None = None
    ) -> torch.Tensor:
        """As `ModelRunner.step`; sleeps for what the emulated computing takes longer."""
        started = time.monotonic()
        if pool.geometry != self._geometry:
            raise CallerError("the pool has another geometry than the model")
        check_slices(pool, slices)
        tokens_count = sum(len(part.tokens) for part in slices)
        if max(part.start + len(part.tokens) for part in slices) > self.context_tokens:
            raise CallerError(f"a slice exceeds the context of {self.context_tokens} tokens")
        finished = self._wait_for_layers(started, tokens_count, before_layer)
        chosen = [self._run(pool, part) for part in slices]
        wanted = [token for token in chosen if token is not None]
        logits = torch.zeros((len(wanted), self.vocab_size))
        logits[torch.arange(len(wanted)), torch.tensor(wanted, dtype=torch.int64)] = _MARGIN
        rest = finished - time.monotonic()
        if rest > 0:
            time.sleep(rest)
        return logits

    def _wait_for_layers(
        self, started: float, tokens_count: int, before_layer: BeforeLayer | None
    ) -> float:
        """Ask for each layer; returns when the last would have been computed."""
        rate = self._terms.prefill_tokens_per_s
        total_s = self._terms.step_s + (0.0 if rate is None else tokens_count / rate)
        if before_layer is None:
            return started + total_s
        finished = started
        for layer in range(self._geometry.layers_count):
            before_layer(layer)
            finished = max(finished, time.monotonic()) + total_s / self._geometry.layers_count
        return finished

    def _run(self, pool: KvPool, part: Slice) -> int | None:
        """Write the KV of a slice; the next token where its logits are wanted."""
        block_tokens = self._geometry.block_tokens
        reader = _Reader(pool, part.tables, self._terms.stride_bytes, self._weights)
        previous = reader.first_word(part.start - 1) if part.start % block_tokens else 0
        stop = part.start + len(part.tokens)
        at = part.start
        while at < stop:
            border = min(stop, (at // block_tokens + 1) * block_tokens)
            if at % block_tokens == 0:
                previous = reader.seen(at)
            tokens = part.tokens[at - part.start : border - part.start]
            previous = self._write(pool, part.tables, at, self._draw(previous, tokens, at))
            at = border
        if part.logits is Logits.NONE:
            return None
        drawn = _mix(_mix(reader.seen(stop), reader.tail(stop)), stop)
        return self._terms.emits[drawn % len(self._terms.emits)]

    def _draw(self, previous: int, tokens: Sequence[int], start: int) -> list[int]:
        """h of consecutive tokens of one block, after the first word `previous`."""
        lane = int(self._lanes[0][0])
        drawn = []
        for position, token in enumerate(tokens, start):
            drawn.append(_mix(_mix(previous, token), position))
            previous = ((lane ^ drawn[-1]) * _PRIME_2) & _U64
        return drawn

    def _write(
        self, pool: KvPool, tables: Sequence[Sequence[int]], start: int, drawn: Sequence[int]
    ) -> int:
        """Write the KV of consecutive tokens of one block; returns the last one's first word."""
        block, offset = divmod(start, self._geometry.block_tokens)
        written = slice(offset, offset + len(drawn))
        tokens = np.array(drawn, np.uint64)
        first = 0
        for group, table in enumerate(tables):
            words = _token_words(pool, table[block], group)
            marks = (self._lanes[group][:, None] ^ tokens) * np.uint64(_PRIME_2)
            chooser = int(words[0, 0, 0]) if offset else int(marks[0, 0])
            patterns = self._patterns[group]
            words[:, written] = patterns[chooser % len(patterns)][:, written]
            words[:, written, 0] = marks
            if group == 0:
                first = int(marks[0, -1])
        return first


class _Reader:
    """Hashes of one sequence's blocks in the pool, each computed once a step.

    Asked for ever more tokens, so each group's sum slides: O(1) a block.
    """

    __slots__ = ("_blocks", "_pool", "_spans", "_step_words", "_tables", "_totals", "_weights")

    def __init__(
        self,
        pool: KvPool,
        tables: Sequence[Sequence[int]],
        stride_bytes: int,
        weights: Sequence[Words],
    ) -> None:
        self._pool = pool
        self._tables = tables
        self._step_words = stride_bytes // _WORD_BYTES
        self._weights = weights
        self._blocks: list[dict[int, int]] = [{} for _ in tables]
        self._spans = [(0, 0)] * len(tables)
        self._totals = [0] * len(tables)

    def first_word(self, position: int) -> int:
        """First word of a token's KV in the first layer of group 0."""
        block, offset = divmod(position, self._pool.geometry.block_tokens)
        return int(_token_words(self._pool, self._tables[0][block], 0)[0, offset, 0])

    def seen(self, tokens_count: int) -> int:
        """Of all full blocks of the first tokens that a query behind them can read.

        Not for fewer tokens than were asked for before.
        """
        geometry = self._pool.geometry
        stop = tokens_count // geometry.block_tokens
        for group, hashes in enumerate(self._blocks):
            start = window_start(tokens_count, geometry.groups[group].window, geometry.block_tokens)
            before, known = self._spans[group]
            fresh = range(max(start, known), stop)
            self._hash(fresh, group)
            self._totals[group] += sum(hashes[i] for i in fresh)
            self._totals[group] -= sum(hashes[i] for i in range(before, min(start, known)))
            self._spans[group] = start, stop
        return sum(self._totals) & _U64

    def tail(self, tokens_count: int) -> int:
        """Of the bytes of the last block's tokens, where it is not full; 0 where it is."""
        block, tokens = divmod(tokens_count, self._pool.geometry.block_tokens)
        if not tokens:
            return 0
        total = 0
        for group, table in enumerate(self._tables):
            words = _token_words(self._pool, table[block], group)[:, :tokens]
            total = _mix(total, checksum(np.ascontiguousarray(words)))
        return total

    def _hash(self, places: Sequence[int], group: int) -> None:
        if not places:
            return
        table, hashes = self._tables[group], self._blocks[group]
        if self._step_words == 1:
            digests = [checksum(self._pool.block_array(table[i], group)) for i in places]
        else:
            words = self._pool.storage(group).numpy().view(np.uint64)[:, :: self._step_words]
            sampled = words[[table[i] for i in places]] * self._weights[group]
            digests = sampled.sum(axis=1, dtype=np.uint64).tolist()
        for place, value in zip(places, digests, strict=True):
            hashes[place] = _mix(_mix(value, place), group)


def _token_words(pool: KvPool, block: int, group: int) -> Words:
    """A block as words `[layers * 2, block_tokens, words of a token's K]`, the pool's memory."""
    geometry = pool.geometry
    words = pool.block_array(block, group).view(np.uint64)
    lanes = 2 * len(geometry.groups[group].layers)
    return words.reshape(lanes, geometry.block_tokens, -1)


def _random_words(drawn: np.random.Generator, shape: tuple[int, ...]) -> Words:
    return drawn.integers(0, 2**64, size=shape, dtype=np.uint64, endpoint=False)


_PRIME_1: Final = 0x9E3779B185EBCA87
_PRIME_2: Final = 0xC2B2AE3D27D4EB4F
_PRIME_3: Final = 0x165667B19E3779F9


def _mix(a: int, b: int) -> int:
    """A u64 in which every bit of two u64 counts, in this order (multiply and shift, as xxHash)."""
    x = (a * _PRIME_1 + b + _PRIME_3) & _U64
    x = ((x ^ (x >> 33)) * _PRIME_2) & _U64
    x = ((x ^ (x >> 29)) * _PRIME_3) & _U64
    return x ^ (x >> 32)
