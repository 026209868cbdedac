"""What a chat costs on its way to token ids: new, known, and as the twentieth turn of a long one.

Request bodies are parsed, rendered and encoded as a router does it, on one thread; turns of both
kinds alternate, so that the machine's other work falls on both.
What must not live here: whether the tokens are right (tests/text).
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.bench.report import Bar, Result
from kvtier.openai.requests import ChatRequest, parse
from kvtier.text import TextModel

TURN_RATIO_MAX = 2.0
PROSE = (
    "the quick brown fox jumps over a lazy dog and then writes some code in python about caching "
    "prefixes of large language models because their keys and values are costly to compute"
)
WORDS = PROSE.split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NEW_WORDS_SHARE = 0.05
"""Of words never met before: names, numbers, misspellings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="directory with tokenizer.json and template")
    parser.add_argument("--repeats", type=int, default=101, help="the median of so many")
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> list[Result]:
    from kvtier.bench.router_fleet import model_directory  # which writes prose of this module

    with model_directory(arguments.model) as directory:
        model = TextModel.load(directory)
    rng = random.Random(arguments.seed)

    def encoded(body: bytes) -> float:
        return seconds(lambda: model.encode_chat(parse(ChatRequest, body).messages))

    history = [
        {"role": role, "content": prose(rng, 1000)}
        for _ in range(19)
        for role in ("user", "assistant")
    ]
    encoded(body_of(history))
    new, known, long = [], [], []
    for _ in range(arguments.repeats):
        first = body_of([{"role": "user", "content": prose(rng, 2000)}])
        last = body_of([*history, {"role": "user", "content": prose(rng, 2000)}])
        new.append(encoded(first))
        long.append(encoded(last))
        known.append(encoded(first))
    new_us, known_us, long_us = (statistics.median(each) * 1e6 for each in (new, known, long))
    return [
        Result("2 KB chat, new", new_us, "us"),
        Result("2 KB chat, known", known_us, "us"),
        Result("2 KB new after 38 KB of history", long_us, "us"),
        Result("turn 20 against turn 1", long_us / new_us, "ratio", TURN_RATIO_MAX, Bar.AT_MOST),
    ]


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this process for one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def body_of(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()


def prose(rng: random.Random, chars: int) -> str:
    """Text of `chars` characters: known words and some that nobody has met."""
    text = ""
    while len(text) < chars:
        is_new = rng.random() < NEW_WORDS_SHARE
        word = "".join(rng.choices(LETTERS, k=rng.randint(4, 9))) if is_new else rng.choice(WORDS)
        text += f"{word} "
    return text[:chars]
