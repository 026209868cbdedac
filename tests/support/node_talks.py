"""Who asks a fleet of machines: conversations, one turn at a time or going on all the time.

What must not live here: the fleet, faults, what a test expects.
"""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from tests.harness.waiting import eventually
from tests.support.node_fleet import CALL_S, QUIET_S, NodeFleet, Told
from tests.support.worker_cluster import BLOCK_TOKENS

T = TypeVar("T")


class Talk:
    """One conversation: each turn is what was said before, the answer, and more."""

    def __init__(self, fleet: NodeFleet, topic: str, tokens_count: int = 320) -> None:
        self._fleet = fleet
        self._dice = random.Random(topic)
        self.tokens = [self._dice.randrange(256) for _ in range(tokens_count)]

    def turn(self) -> Told:
        """Ask; what came of it."""
        told = self._fleet.ask(self.tokens)
        if told.is_answer:
            self.tokens += map(ord, told.text)
            self.tokens += [self._dice.randrange(256) for _ in range(2 * BLOCK_TOKENS)]
        return told


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What each of them returns."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(one) for one in calls]]


def answered(told: Sequence[Told]) -> Sequence[Told]:
    """The same; fails unless all were answered, and rightly."""
    for one in told:
        assert one.is_answer, (one.status, one.body)
        assert one.is_right, one
    return told


def tokens_from(told: Sequence[Told], tier: str) -> int:
    """How many tokens came from a tier."""
    return sum(one.cached.get(tier, 0) for one in told)


class Clients:
    """Conversations that go on all the time; `told` grows in the order in which answers came."""

    def __init__(self, fleet: NodeFleet, count: int) -> None:
        self.told: list[Told] = []
        self._fleet = fleet
        self._ended = [0] * count
        """How many requests of each have ended, and how many of those were answered."""
        self._answered = [0] * count
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._go_on, args=(number,)) for number in range(count)
        ]

    @contextmanager
    def going_on(self) -> Iterator["Clients"]:
        """Ask until this is left."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(CALL_S)

    def heard(self, *, answers: bool) -> None:
        """Wait until each client was told something about a request that it made after now; with
        `answers` until it was answered."""
        counts = self._answered if answers else self._ended
        goals = [count + 2 for count in counts]  # one may be under way

        def have_heard() -> bool:
            assert all(thread.is_alive() for thread in self._threads), "a client has ended"
            return all(count >= goal for count, goal in zip(counts, goals, strict=True))

        eventually(have_heard, QUIET_S, f"each client was {'answered' if answers else 'told'}")

    def _go_on(self, number: int) -> None:
        for topic in itertools.count():
            talk = Talk(self._fleet, f"client {number} {topic}", 10 * BLOCK_TOKENS)
            for _ in range(4):
                if self._stop.is_set():
                    return
                told = talk.turn()
                self.told.append(told)
                self._ended[number] += 1
                self._answered[number] += told.is_answer
