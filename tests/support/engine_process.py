"""A foreign engine as a process of its own: speaks vLLM's ZMQ protocol, obeys its test.

    python -m tests.support.engine_process SPEC.json

Per rank a publisher as vLLM 0.33.0 has one (`ZmqEventPublisher`): PUB for events, ROUTER for its
ring of the last ones, both served by one thread that sends, then keeps, and answers between. It
listens on a Unix socket for commands, one JSON object a line. What must not live here: a model, our
decoders.
"""

import base64
import json
import queue
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from kvtier.core.identity import AdapterRef, Pool, chain_root
from kvtier.engines.vllm.residents import NO_KEYS, FeedTerms, ResidentsFeed
from tests.support import engine_wire as wire
from tests.support.fake_engine import EngineCache, Prompt

END = (-1).to_bytes(8, "big", signed=True)
_IDLE_S = 0.02


class Rank:
    """One rank: its blocks and its publisher."""

    def __init__(self, context: "zmq.Context[Any]", spec: dict[str, Any], number: int) -> None:
        pool = Pool(spec["model_id"], spec["revision"], spec["block_tokens"])
        self.cache = EngineCache(pool, spec["blocks"], spec["seed"], spec["int_hashes"])
        self._number = number
        self._is_old = spec["is_old"]
        self._topic = spec["topic"].encode()
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=spec["ring"])
        self._events = context.socket(zmq.PUB)
        self._events.bind(f"tcp://127.0.0.1:{spec['events_port'] + number}")
        self._replay = context.socket(zmq.ROUTER)
        self._replay.bind(f"tcp://127.0.0.1:{spec['replay_port'] + number}")
        self._queue: queue.Queue[tuple[bytes, bool, threading.Event]] = queue.Queue()
        self._next_seq = 0
        self._requests_count = 0
        self._root = chain_root(pool, None, None)
        self._folder = spec["residents"]
        self.feed: ResidentsFeed | None = None
        self.tell()
        threading.Thread(target=self._run, daemon=True).start()

    def tell(self) -> None:
        """Begin to tell bridges what is resident, as our connector does inside vLLM."""
        if self._folder:
            terms = FeedTerms(Path(self._folder), self._number, self._root)
            self.feed = ResidentsFeed(terms, bytes)
            self.feed.bind(self.cache.slots)

    def run(self, prompt: Prompt, *, twice: bool) -> list[Any]:
        """One request, from its arrival to its end."""
        events = self.cache.run(prompt, side_by_side=twice)
        if self.feed is not None:
            table = self.cache.table(prompt)
            self._requests_count += 1
            name = str(self._requests_count)
            self.feed.arrived(name, table.digests, table.keys or NO_KEYS)
            self.feed.allocated(name, table.slots)
            self.feed.step([(name, table.slots)], [])
            self.feed.finished(name, table.slots)
        return events

    def step(self, handed_out: Sequence[int] = ()) -> None:
        """A step without requests of ours."""
        if self.feed is not None:
            self.feed.step([], [handed_out])

    def publish(self, events: list[Any], *, heard: bool) -> None:
        """One batch; returns once it is sent, or, unless `heard`, lost on its way."""
        said = [wire.as_old(event) for event in events] if self._is_old else events
        self.publish_raw(wire.encoded(*said, ts=time.time(), dp_rank=self._number), heard=heard)

    def publish_raw(self, payload: bytes, *, heard: bool) -> None:
        done = threading.Event()
        self._queue.put((payload, heard, done))
        assert done.wait(40)

    def _run(self) -> None:
        while True:
            if self._replay.poll(0):
                self._answer()
            try:
                payload, heard, done = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            if heard:
                self._events.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])
            self._ring.append((seq, payload))
            done.set()

    def _answer(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3:
            return
        client, _, start = frames
        topic = [] if self._is_old else [self._topic]
        no_topic = [] if self._is_old else [b""]
        for seq, payload in self._ring:
            if seq >= int.from_bytes(start, "big"):
                number = seq.to_bytes(8, "big")
                self._replay.send_multipart([client, b"", *topic, number, payload])
        self._replay.send_multipart([client, b"", *no_topic, END, b""])


class Commands:
    """One method a command; what it returns is the answer."""

    def __init__(self, spec: dict[str, Any]) -> None:
        context: zmq.Context[Any] = zmq.Context()
        self._ranks = [Rank(context, spec, number) for number in range(spec["ranks"])]
        self._block_tokens = spec["block_tokens"]
        self._adapters = {
            name: AdapterRef(bytes.fromhex(digest), generation)
            for name, (digest, generation) in spec["adapters"].items()
        }

    def ping(self) -> bool:
        return True

    def run(self, chain: int, blocks: int, rank: int = 0, **more: Any) -> bool:
        """Compute a prompt of so many blocks. `more`: salt, adapter, twice, heard."""
        tokens = tuple(1000 * chain + n for n in range(blocks * self._block_tokens))
        adapter = more.get("adapter")
        ref = None if adapter is None else self._adapters.get(adapter)
        prompt = Prompt(tokens, more.get("salt"), adapter, ref)
        one = self._ranks[rank]
        events = one.run(prompt, twice=more.get("twice", False))
        one.publish(events, heard=more.get("heard", True))
        return True

    def evict(self, count: int, rank: int = 0, heard: bool = True) -> bool:
        one = self._ranks[rank]
        one.publish(one.cache.evict(count), heard=heard)
        one.step(range(len(one.cache.slots)))
        return True

    def clear(self, rank: int = 0) -> bool:
        one = self._ranks[rank]
        one.publish(one.cache.clear(), heard=True)
        one.step()
        return True

    def tell(self, on: bool, rank: int = 0) -> bool:
        """End, or begin, to tell bridges what is resident."""
        one = self._ranks[rank]
        if one.feed is not None:
            one.feed.close()
            one.feed = None
        if on:
            one.tell()
        return True

    def churn(self, seed: int, blocks: int, rank: int = 0) -> int:
        """Compute prompts, some of them longer ones of before, until so many blocks were stored.
        Now and then a message is lost. How many blocks it were."""
        rng = random.Random(seed)
        one = self._ranks[rank]
        stored = 0
        while stored < blocks:
            chain, length = rng.randrange(10_000), rng.randint(1, 40)
            tokens = tuple(100_000 * chain + n for n in range(length * self._block_tokens))
            salt = rng.choice([None, None, None, "tenant"])
            events = one.run(Prompt(tokens, salt), twice=rng.random() < 0.05)
            stored += sum(len(e.block_hashes) for e in events if isinstance(e, wire.BlockStored))
            one.publish(events, heard=rng.random() > 0.01)
        return stored

    def say(self, payload: str, rank: int = 0) -> bool:
        """Publish any bytes."""
        self._ranks[rank].publish_raw(base64.b64decode(payload), heard=True)
        return True

    def truth(self, rank: int = 0) -> list[int]:
        """What is held: prefix hashes, sorted."""
        return sorted(self._ranks[rank].cache.held())


def serve(listener: socket.socket, commands: Commands) -> None:
    """Answer one connection after another, for ever."""
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb") as lines:
            for line in lines:
                asked = json.loads(line)
                answer = getattr(commands, asked.pop("do"))(**asked)
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    commands = Commands(spec)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        Path(spec["control"]).unlink(missing_ok=True)
        listener.bind(spec["control"])
        listener.listen(8)
        serve(listener, commands)


if __name__ == "__main__":
    main()
