"""A worker's publishing half as a process of its own: embeds `kvtier.publisher`, obeys its test.

    python -m tests.support.publisher_process SPEC.json

It listens on a Unix socket for commands, one JSON object a line, and answers each with one. What it
holds it also keeps in a plain multiset: the truth that an index has to arrive at. What must not
live here: expectations.
"""

import base64
import dataclasses
import json
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.core.event_messages import FenceReason
from kvtier.publisher import Publisher, PublisherConfig
from kvtier.sections import DialConfig, TlsConfig
from kvtier.types import HOLDER_TIERS, Tier
from tests.support.corpus import U64, Corpus, worker

CHAIN_BLOCKS_MAX = 64
CHURN_CHAINS = 200


class Holdings:
    """What the worker holds: told to the publisher and kept as the truth, one lock around both."""

    def __init__(self, publisher: Publisher, corpus: Corpus, seed: int) -> None:
        self._publisher = publisher
        self._corpus = corpus
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._truth: dict[Tier, Counter[int]] = {tier: Counter() for tier in HOLDER_TIERS}
        self.steps = 0

    def store(self, tier: Tier, hashes: U64, parent: int = 0) -> None:
        with self._lock:
            self._store(tier, hashes, parent)

    def remove(self, tier: Tier, hashes: U64) -> None:
        with self._lock:
            self._remove(tier, hashes)

    def clear(self) -> None:
        with self._lock:
            self._publisher.clear()
            self._truth = {tier: Counter() for tier in HOLDER_TIERS}

    def step(self) -> None:
        """Change something at random: grow a chain, drop its tail, or a block out of its middle."""
        with self._lock:
            self.steps += 1
            chain = self._corpus.hashes(self._dice.randrange(CHURN_CHAINS), CHAIN_BLOCKS_MAX)
            held = self._truth[Tier.GPU]
            begin = next((i for i, one in enumerate(chain.tolist()) if one not in held), len(chain))
            action = self._dice.random()
            if begin == 0 or action < 0.55:
                end = min(len(chain), begin + self._dice.randint(1, 16))
                parent = int(chain[begin - 1]) if begin else 0
                self._store(Tier.GPU, chain[begin:end], parent)
            elif action < 0.75:
                self._remove(Tier.GPU, chain[self._dice.randrange(begin) : begin])
            elif action < 0.9:
                at = self._dice.randrange(begin)
                self._remove(Tier.GPU, chain[at : at + 1])
            else:
                self._store(Tier.GPU, chain[:begin])

    def truth(self) -> dict[str, str]:
        """Tier -> every copy's hash, sorted, as base64 of packed u64."""
        with self._lock:
            return {
                str(int(tier)): base64.b64encode(
                    np.sort(np.fromiter(held.elements(), np.uint64)).astype("<u8").tobytes()
                ).decode()
                for tier, held in self._truth.items()
            }

    def _store(self, tier: Tier, hashes: U64, parent: int = 0) -> None:
        if len(hashes):
            self._publisher.store(tier, parent, hashes)
            self._truth[tier].update(hashes.tolist())

    def _remove(self, tier: Tier, hashes: U64) -> None:
        held = self._truth[tier]
        there = [one for one in hashes.tolist() if held[one] > 0]
        if there:
            self._publisher.remove(tier, np.array(there, np.uint64))
            held.subtract(there)
            self._truth[tier] = +held


class Churn:
    """Steps in the background, until stopped."""

    def __init__(self, step: Callable[[], None], pause_s: float) -> None:
        self._step = step
        self._pause_s = pause_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="churn", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._pause_s):
            self._step()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()


class Listener:
    """Remembers what the publisher said needs a decision."""

    def __init__(self) -> None:
        self.fences: list[str] = []
        self.refusals: list[str] = []

    def fenced(self, reason: FenceReason) -> None:
        self.fences.append(reason.value)

    def refused(self, target: str, reason: str) -> None:
        self.refusals.append(f"{target}: {reason}")


class Commands:
    """One method a command; what it returns is the answer."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._corpus = Corpus(spec["block_tokens"], spec["salt"], spec["seed"])
        self._listener = Listener()
        paths = {key: Path(path) for key, path in spec["tls"].items()}
        token = spec["token_file"]
        dial = DialConfig(
            targets=tuple(spec["targets"]),
            tls=TlsConfig(**paths) if paths else None,
            token_file=Path(token) if token else None,
            insecure=spec["insecure"],
        )
        info = worker(spec["instance"], spec["block_tokens"], spec["shard"], spec["shards_count"])
        config = PublisherConfig(**spec["config"])
        self.publisher = Publisher(info, dial, config, self._listener)
        self.holdings = Holdings(self.publisher, self._corpus, spec["seed"])
        self._churn: Churn | None = None

    def ping(self) -> bool:
        return True

    def fill(self, chains: int, blocks: int) -> bool:
        """Hold so many whole chains, numbered from 0."""
        for chain in range(chains):
            self.holdings.store(Tier.GPU, self._corpus.hashes(chain, blocks))
        return True

    def store(self, chain: int, begin: int, end: int, tier: int = 0) -> bool:
        """Blocks `begin` to `end` of a chain appeared, under the block before them."""
        hashes = self._corpus.hashes(chain, end)
        parent = int(hashes[begin - 1]) if begin else 0
        self.holdings.store(Tier(tier), hashes[begin:], parent)
        return True

    def remove(self, chain: int, begin: int, end: int, tier: int = 0) -> bool:
        self.holdings.remove(Tier(tier), self._corpus.hashes(chain, end)[begin:])
        return True

    def clear(self) -> bool:
        self.holdings.clear()
        return True

    def steps(self, count: int) -> bool:
        for _ in range(count):
            self.holdings.step()
        return True

    def churn(self, pause_s: float) -> bool:
        self._churn = Churn(self.holdings.step, pause_s)
        return True

    def quiet(self) -> int:
        """End the churn; returns the steps made so far."""
        if self._churn is not None:
            self._churn.stop()
            self._churn = None
        return self.holdings.steps

    def truth(self) -> dict[str, str]:
        return self.holdings.truth()

    def flush(self, deadline_s: float) -> bool:
        return self.publisher.flush(deadline_s)

    def restart(self) -> int:
        return int(self.publisher.restart())

    def stats(self) -> dict[str, Any]:
        told = {"fences": self._listener.fences, "refusals": self._listener.refusals}
        return dataclasses.asdict(self.publisher.stats()) | told | {"steps": self.holdings.steps}


def serve(listener: socket.socket, commands: Commands) -> None:
    """Answer one connection after another until told to close."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as lines:
            for line in lines:
                asked = json.loads(line)
                name = asked.pop("do")
                if name == "close":
                    commands.quiet()
                    commands.publisher.close()
                    lines.write(b"true\n")
                    return
                answer = getattr(commands, name)(**asked)
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    commands = Commands(spec)
    with commands.publisher, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        Path(spec["control"]).unlink(missing_ok=True)
        listener.bind(spec["control"])
        listener.listen(8)
        serve(listener, commands)


if __name__ == "__main__":
    main()
