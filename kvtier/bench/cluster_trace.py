"""Traces for `kvtier bench cluster`: from rows of a file to requests with token ids.

Formats, told apart by their first line: Mooncake's JSON lines (milliseconds, blocks of 512 tokens),
Bailian's (`chat_id`; seconds, blocks of 16) and Azure's CSV (lengths and arrivals alone: no two of
its prompts share a token). What must not live here: sending.
"""

import csv
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Final

from kvtier.core.trace import BAILIAN_BLOCK_TOKENS, MOONCAKE_BLOCK_TOKENS, parse_trace_row
from kvtier.errors import CallerError

STAMP_S: Final = 3.0
"""Mooncake rounds arrivals to it; they are spread over it at random."""
_FIRST_TOKEN: Final = 32
_TOKENS_COUNT: Final = 68
"""32 .. 99: letters to a byte-level tokenizer and in every vocabulary, and short on the wire."""
_NUMBER_TOKENS: Final = 6
"""A block begins with its number in that many digits, so that no two blocks begin alike."""
NUMBERS_MAX: Final = _TOKENS_COUNT**_NUMBER_TOKENS
_MOONCAKE_MS: Final = 1_000.0
_AZURE_TIME: Final = "%Y-%m-%d %H:%M:%S.%f"
_AZURE_DIGITS: Final = 6
_SEED: Final = 11


@dataclass(frozen=True, slots=True)
class Shaping:
    """How a trace is fitted to what it is replayed against."""

    requests_max: int
    speed: float = 1.0
    """Trace seconds a second."""
    token_scale: int = 1
    """Tokens of the trace that one token stands for."""
    prompt_tokens_max: int = 1 << 20
    """Longer prompts are cut; a cut prompt still shares what it shared."""
    output_tokens_max: int = 1 << 20

    def __post_init__(self) -> None:
        if self.requests_max < 1 or self.token_scale < 1 or not 0 < self.speed < float("inf"):
            raise CallerError("requests, speed and token scale must be positive")
        if min(self.prompt_tokens_max, self.output_tokens_max) < 1:
            raise CallerError("the longest prompt and the longest answer have at least one token")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a replay."""

    at: float
    """Seconds after the first one."""
    pieces: tuple[int, ...]
    """Numbers of its token blocks; equal numbers are equal tokens."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, ready to be sent."""

    asks: tuple[Ask, ...]
    piece_tokens: int
    note: str
    """What was done to the trace, in one line, for whoever reads the figures."""

    @property
    def prompt_tokens(self) -> int:
        return sum(ask.prompt_tokens for ask in self.asks)

    def ideal_hit(self) -> float:
        """Share of prompt tokens that a cache without bounds could give. Pure; O(pieces).

        Request by request: a request finds what those before it brought, whole pieces only.
        """
        known: set[int] = set()
        found = 0
        for ask in self.asks:
            run = 0
            for piece in ask.pieces:
                if piece not in known:
                    break
                run += 1
            found += min(run * self.piece_tokens, ask.prompt_tokens)
            known.update(ask.pieces)
        return found / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row in seconds and tokens of the trace."""

    at: float
    input_tokens: int
    output_tokens: int
    pieces: tuple[int, ...]


@dataclass(slots=True)
class Blocks:
    """Token ids of numbered blocks, each made once. Not for several threads."""

    piece_tokens: int
    _made: dict[int, list[int]] = field(default_factory=dict)

    def prompt(self, ask: Ask) -> list[int]:
        """The token ids of a request."""
        tokens: list[int] = []
        for number in ask.pieces:
            tokens += self._block(number)
        return tokens[: ask.prompt_tokens]

    def _block(self, number: int) -> list[int]:
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = block_tokens(number, self.piece_tokens)
        return found


def block_tokens(number: int, count: int) -> list[int]:
    """The `count` tokens of a block: its number, then noise that the number seeds. Pure."""
    digits = []
    rest = number
    for _ in range(min(_NUMBER_TOKENS, count)):
        rest, digit = divmod(rest, _TOKENS_COUNT)
        digits.append(_FIRST_TOKEN + digit)
    rng = random.Random(number)
    noise = rng.choices(range(_FIRST_TOKEN, _FIRST_TOKEN + _TOKENS_COUNT), k=count - len(digits))
    return digits + noise


def read_replay(path: Path, shaping: Shaping) -> Replay:
    """Read the first rows of a trace. CallerError, with the line, for what is not one."""
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            file.seek(0)
            if first.startswith("TIMESTAMP,"):
                return _azure(file, shaping)
            return _json_lines(file, '"chat_id"' in first, shaping)
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise CallerError(f"{path} is no text") from None


def _json_lines(file: Iterable[str], is_bailian: bool, shaping: Shaping) -> Replay:
    block = BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS
    unit = 1.0 if is_bailian else _MOONCAKE_MS
    piece_tokens = block // shaping.token_scale
    if block % shaping.token_scale or piece_tokens < _NUMBER_TOKENS:
        raise CallerError(
            f"blocks of {block} tokens cannot stand for {shaping.token_scale} times fewer: "
            f"the scale must divide {block} and leave {_NUMBER_TOKENS} tokens"
        )
    rows = []
    for number, line in enumerate(islice(file, shaping.requests_max), 1):
        try:
            row = parse_trace_row(line)
        except CallerError as error:
            raise CallerError(f"line {number}: {error}") from None
        if len(row.hash_ids) != ceil(row.input_tokens / block) or not row.hash_ids:
            raise CallerError(
                f"line {number}: {len(row.hash_ids)} hash_ids do not make {row.input_tokens} tokens"
            )
        if not all(0 <= piece < NUMBERS_MAX for piece in row.hash_ids):
            raise CallerError(f"line {number}: hash_ids are 0 to {NUMBERS_MAX - 1}")
        rows.append(_Row(row.timestamp / unit, row.input_tokens, row.output_tokens, row.hash_ids))
    note = f"{'Bailian' if is_bailian else 'Mooncake'} trace"
    if not is_bailian:
        rng = random.Random(_SEED)
        ats = sorted(row.at + rng.uniform(0, STAMP_S) for row in rows)
        rows = [
            _Row(at, row.input_tokens, row.output_tokens, row.pieces)
            for at, row in zip(ats, rows, strict=True)
        ]
        note += f", arrivals spread over the {STAMP_S:g} s that its stamps are rounded to"
    return _shaped(rows, piece_tokens, note, shaping)


def _azure(file: Iterable[str], shaping: Shaping) -> Replay:
    rows = []
    piece_tokens = max(_NUMBER_TOKENS, MOONCAKE_BLOCK_TOKENS // shaping.token_scale)
    number = 0
    for line, row in enumerate(islice(csv.DictReader(file), shaping.requests_max), 2):
        try:
            at = datetime.strptime(_microseconds(row["TIMESTAMP"]), _AZURE_TIME).timestamp()  # noqa: DTZ007 (only differences count)
            given, made = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise CallerError(f"line {line}: no row of an Azure trace: {error}") from None
        if given < 1 or made < 0:
            raise CallerError(f"line {line}: lengths must be positive")
        count = ceil(ceil(given / shaping.token_scale) / piece_tokens)
        rows.append(_Row(at, given, made, tuple(range(number, number + count))))
        number += count
    return _shaped(rows, piece_tokens, "Azure trace, whose prompts share nothing", shaping)


def _microseconds(stamp: str) -> str:
    """A stamp with 100 ns digits, cut to what can be parsed. Pure."""
    whole, _, part = stamp.partition(".")
    return f"{whole}.{part[:_AZURE_DIGITS] or '0'}"


def _shaped(rows: Sequence[_Row], piece_tokens: int, note: str, shaping: Shaping) -> Replay:
    if not rows:
        raise CallerError("the trace has no rows")
    start = min(row.at for row in rows)
    asks = []
    for row in sorted(rows, key=lambda row: row.at):
        tokens = ceil(row.input_tokens / shaping.token_scale)
        prompt = max(1, min(tokens, shaping.prompt_tokens_max))
        output = ceil(row.output_tokens / shaping.token_scale)
        asks.append(
            Ask(
                at=(row.at - start) / shaping.speed,
                pieces=row.pieces[: ceil(prompt / piece_tokens)],
                prompt_tokens=prompt,
                output_tokens=max(1, min(output, shaping.output_tokens_max)),
            )
        )
    if shaping.speed != 1:
        note += f"; {shaping.speed:g} times as fast"
    if shaping.token_scale != 1:
        note += f"; a token stands for {shaping.token_scale}"
    return Replay(tuple(asks), piece_tokens, note)
