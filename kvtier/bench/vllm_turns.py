"""Conversations of several turns on two vLLM servers behind a router, against one server with as
much cache as both together, and against round robin.

Sessions share a short beginning, take their turns in an order drawn by a seed, and several are
under way at once; every turn sends all that was said so far, with the engine's own answers in it.
The figure is the part of all prompt tokens that the engine itself says it had cached. What must not
live here: processes.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Final

from kvtier.bench.report import Bar, Result
from kvtier.bench.vllm_processes import (
    BLOCK_TOKENS,
    Answer,
    Endpoint,
    Key,
    Rig,
    Router,
    RouterSpec,
    Server,
    ServerSpec,
)

RATIO_MIN: Final = 0.95
_VOCABULARY: Final = range(1_000, 40_000)


@dataclass(frozen=True, slots=True)
class TurnSizes:
    """How much is said, and how much cache there is for it."""

    sessions: int = 12
    turns: int = 6
    shared_tokens: int = 64
    turn_tokens: int = 92
    answer_tokens: int = 4
    clients: int = 6
    blocks: int = 288
    """Of the one server; two have half each."""
    seed: int = 1

    @property
    def wanted_blocks(self) -> int:
        """What all sessions fill at their ends."""
        turns_tokens = self.turns * (self.turn_tokens + self.answer_tokens)
        return (self.shared_tokens + self.sessions * turns_tokens) // BLOCK_TOKENS


QUICK: Final = TurnSizes(sessions=4, turns=3, clients=2, blocks=64)


@dataclass(frozen=True, slots=True)
class Turns:
    """What one way of serving the conversations came to."""

    answers: tuple[Answer, ...]

    @property
    def hit(self) -> float:
        """Cached prompt tokens of all prompt tokens."""
        prompt_tokens = sum(answer.prompt_tokens for answer in self.answers)
        return sum(answer.cached_tokens for answer in self.answers) / prompt_tokens

    @property
    def workers(self) -> dict[str, int]:
        """Answers by worker."""
        names = [answer.worker for answer in self.answers]
        return {name: names.count(name) for name in sorted(set(names))}


@dataclass(frozen=True, slots=True)
class Compared:
    """All three ways, in one run."""

    one: Turns
    routed: Turns
    round_robin: Turns

    @property
    def ratio(self) -> float:
        """Hit of two routed servers against that of one."""
        return self.routed.hit / self.one.hit


@dataclass(frozen=True, slots=True)
class TurnsFleet:
    """One server, and two behind two routers."""

    one: Server
    halves: tuple[Server, ...]
    routed: Router
    in_turn: Router


def start(rig: Rig, sizes: TurnSizes, keys: tuple[Key, ...] = ()) -> TurnsFleet:
    """Start the processes. Every server wants a credential of its own, which only the routers know;
    with `keys` the routers want one as well."""
    index = rig.index()
    half = sizes.blocks // 2
    one, *halves = rig.servers(
        ServerSpec("one", sizes.blocks, api_key="sk-of-one"),
        ServerSpec("a", half, has_events=True, api_key="sk-of-a"),
        ServerSpec("b", half, has_events=True, api_key="sk-of-b"),
    )
    rig.bridges(index, *halves)
    tokens = {server.name: server.token or "" for server in halves}
    routers = [
        rig.router(
            RouterSpec(f"router-{policy}", index, policy, keys, tokens), workers_count=len(halves)
        )
        for policy in ("cache_aware", "round_robin")
    ]
    return TurnsFleet(one, tuple(halves), *routers)


def compare(fleet: TurnsFleet, sizes: TurnSizes) -> Compared:
    """Hold the conversations three times, each with tokens of its own."""
    one = talk(fleet.one, sizes, "one")
    routed = talk(fleet.routed, sizes, "routed")
    for server in fleet.halves:
        server.forget()
    in_turn = talk(fleet.in_turn, sizes, "in turn")
    return Compared(one, routed, in_turn)


def talk(endpoint: Endpoint, sizes: TurnSizes, label: str) -> Turns:
    """Hold all conversations with `endpoint`; `label` makes their tokens unlike any other's."""
    plan = _Plan(sizes, label)
    with ThreadPoolExecutor(sizes.clients) as pool:
        clients = [pool.submit(_client, endpoint, plan) for _ in range(sizes.clients)]
        answers = [answer for client in clients for answer in client.result()]
    return Turns(tuple(answers))


class _Plan:
    """Which session speaks next; a session has one turn under way at most. Any thread."""

    def __init__(self, sizes: TurnSizes, label: str) -> None:
        self.sizes = sizes
        self._dice = random.Random(f"{sizes.seed} {label}")
        shared = self.words(sizes.shared_tokens)
        self._said = [list(shared) for _ in range(sizes.sessions)]
        self._left = [sizes.turns] * sizes.sessions
        self._free = list(range(sizes.sessions))
        self._lock = Lock()

    def words(self, count: int) -> list[int]:
        return [self._dice.choice(_VOCABULARY) for _ in range(count)]

    def begin(self) -> tuple[int, Sequence[int]] | None:
        """A session and what it sends; None where no session has anything left to say."""
        with self._lock:
            if not self._free:
                return None
            session = self._free.pop(self._dice.randrange(len(self._free)))
            self._said[session] += self.words(self.sizes.turn_tokens)
            return session, tuple(self._said[session])

    def end(self, session: int, answer: Sequence[int]) -> None:
        with self._lock:
            self._said[session] += answer
            self._left[session] -= 1
            if self._left[session]:
                self._free.append(session)


def _client(endpoint: Endpoint, plan: _Plan) -> list[Answer]:
    """One turn after the other, whoever's it is, until nobody has anything to say."""
    answers = []
    while (begun := plan.begin()) is not None:
        session, prompt = begun
        answers.append(endpoint.ask(prompt, plan.sizes.answer_tokens))
        plan.end(session, answers[-1].tokens)
    return answers


def results(compared: Compared, tell: Callable[[str], object]) -> list[Result]:
    """The rows; who served how much is told beside them."""
    one, routed, in_turn = compared.one.hit, compared.routed.hit, compared.round_robin.hit
    tell(f"turns: {compared.routed.workers} routed, {compared.round_robin.workers} in turn\n")
    return [
        Result("prefix hit, one server", one, "of tokens"),
        Result("prefix hit, two servers routed", routed, "of tokens"),
        Result("prefix hit, two servers in turn", in_turn, "of tokens"),
        Result("hit of two routed / of one", compared.ratio, "ratio", RATIO_MIN, Bar.AT_LEAST),
        Result("hit of two in turn / of one", in_turn / one, "ratio"),
    ]
