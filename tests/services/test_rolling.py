"""Workers are replaced one after another while conversations go on, and nobody notices.

Everything is judged by tokens and counts, nothing by time. A window is WINDOW requests that ended
one after another, wherever it begins: less than the 10 s that are promised, so it forgives less.
The workers write to the store only what must leave L1 (`on_evict`), and their pools have room: what
a successor finds there was handed over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness.processes import ProcessRunner
from tests.support.rolling_fleet import (
    HANDS_NOTHING_OVER,
    HANDS_OVER,
    SLOTS,
    TAKES_OVER_ONLY,
    WINDOW,
    WORKERS,
    Conversations,
    RollingFleet,
    Sample,
    busiest,
    hit_rate,
    prompt_of,
    worst_window,
)

pytestmark = pytest.mark.timeout(600)
KEPT = 0.9
"""Of the steady hit rate, in every window."""


@dataclass(slots=True)
class Seen:
    """What a part of the scenario showed."""

    steady: float = 0.0
    """Hit rate before anything happened."""
    samples: Sequence[Sample] = ()
    """From the first signal to a window after the last successor was ready."""
    queued: float = 0.0
    """Blocks of the first one's hot set that were written because it was to end."""
    prefetched: list[float] = field(default_factory=list)
    """Blocks that each successor loaded before it was ready."""
    tiers: dict[str, int] = field(default_factory=dict)
    """From where a successor had tokens of a prompt that its predecessor answered last."""
    prompt_tokens: int = 0
    recovered: float = 0.0
    """Hit rate of the last window."""
    kept: float = 0.0
    """Of the conversations that the one which ended had answered last, the one that lost most:
    how much of what it had was cached when it went on."""


@dataclass(slots=True)
class Scenario:
    handed_over: Seen = field(default_factory=Seen)
    not_handed_over: Seen = field(default_factory=Seen)
    killed: Seen = field(default_factory=Seen)
    failures: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    directory = tmp_path_factory.mktemp("rolling")
    with ProcessRunner("test_rolling", directory) as runner:
        yield played(RollingFleet(runner, Path(directory)))


def played(fleet: RollingFleet) -> Scenario:
    """One fleet, three parts; each has conversations of its own, of which no store knows."""
    fleet.start(HANDS_OVER)
    seen = Scenario()
    with Conversations(fleet.port, topic=0).going_on() as talk:
        seen.handed_over = all_replaced(fleet, talk)
    seen.failures += failures_of(talk)
    with Conversations(fleet.port, topic=1).going_on() as talk:
        seen.not_handed_over = one_replaced(fleet, talk)
        seen.failures += failures_of(talk)
        seen.killed = one_killed(fleet, talk)
    seen.failures += failures_of(talk)
    fleet.clean_logs()
    return seen


def all_replaced(fleet: RollingFleet, talk: Conversations) -> Seen:
    """Every worker ends and comes back; the first by a preStop hook, the others by SIGTERM."""
    seen, begin = steady(talk)
    for name in WORKERS:
        last = next(s for s in reversed(talk.samples) if s.worker == name)
        if name == WORKERS[0]:
            fleet.drain(name)
            seen.queued = fleet.metric(
                'kvtier_worker_hot_set_blocks_total{outcome="queued"}', fleet.ports[name]
            )
        assert "hot set left" in fleet.end(name)
        fleet.replace(name, TAKES_OVER_ONLY)
        seen.prefetched.append(
            fleet.metric(
                'kvtier_worker_prefetched_blocks_total{outcome="loaded"}', fleet.ports[name]
            )
        )
    prompt = prompt_of(last.slot, last.turn, talk.topic)
    seen.prompt_tokens, seen.tiers = len(prompt), fleet.tiers(name, prompt)
    finish(seen, talk, begin)
    return seen


def one_replaced(fleet: RollingFleet, talk: Conversations) -> Seen:
    """The busiest ends, and neither it nor its successor is told to hand anything over."""
    seen, begin = steady(talk)
    name = busiest(talk.samples[-WINDOW:])
    assert "hot set left" not in fleet.end(name).rpartition("draining")[2]
    ended = len(talk.samples)
    fleet.replace(name, HANDS_NOTHING_OVER)
    finish(seen, talk, begin)
    seen.kept = kept_of(talk.samples[:ended], talk.samples[ended:], name)
    return seen


def one_killed(fleet: RollingFleet, talk: Conversations) -> Seen:
    """The busiest dies in the midst of its work."""
    seen, begin = steady(talk)
    name = busiest(talk.samples[-WINDOW:])
    fleet.workers[name].kill()
    fleet.replace(name, HANDS_OVER)
    finish(seen, talk, begin)
    return seen


def steady(talk: Conversations) -> tuple[Seen, int]:
    """Wait until every conversation has begun and gone on for two windows."""
    begin = talk.after(3 * SLOTS)
    end = talk.after(2 * WINDOW)
    return Seen(steady=hit_rate(talk.samples[begin:end])), end


def finish(seen: Seen, talk: Conversations, begin: int) -> None:
    talk.after(SLOTS)
    end = talk.after(WINDOW)
    seen.samples = talk.samples[begin:end]
    seen.recovered = hit_rate(talk.samples[end - WINDOW : end])


def kept_of(before: Sequence[Sample], after: Sequence[Sample], name: str) -> float:
    """Of the conversations that `name` had answered last, the one that has lost most: what was
    cached when it went on, of what it had. Others may have been elsewhere a turn before."""
    last = {sample.slot: sample for sample in before}
    following = {sample.slot: sample for sample in reversed(after)}
    own = [slot for slot in following if slot in last and last[slot].worker == name]
    assert own, "the one that ended had answered nobody last"
    return min(following[slot].cached_tokens / last[slot].prompt_tokens for slot in own)


def failures_of(talk: Conversations) -> list[str]:
    return [sample.failure for sample in talk.samples if sample.failure]


def test_replacing_all_workers_under_load_keeps_the_hit_rate_in_every_window(
    scenario: Scenario,
) -> None:
    seen = scenario.handed_over
    assert {sample.worker for sample in seen.samples} == set(WORKERS)
    assert worst_window(seen.samples) >= KEPT * seen.steady


def test_what_is_hot_was_written_before_the_goodbye_and_loaded_before_the_welcome(
    scenario: Scenario,
) -> None:
    seen = scenario.handed_over
    assert seen.queued > 0
    assert min(seen.prefetched) > 0


def test_a_successor_has_what_its_predecessor_answered_last_in_its_own_memory(
    scenario: Scenario,
) -> None:
    seen = scenario.handed_over
    assert seen.tiers["gpu"] >= KEPT * seen.prompt_tokens


def test_without_the_hand_over_a_conversation_is_computed_again(scenario: Scenario) -> None:
    assert scenario.not_handed_over.kept < 0.5 * KEPT


def test_no_request_and_no_stream_failed_whatever_was_replaced_or_killed(
    scenario: Scenario,
) -> None:
    assert scenario.failures == []


def test_the_hit_rate_recovers_after_a_worker_was_killed(scenario: Scenario) -> None:
    seen = scenario.killed
    assert seen.recovered >= KEPT * seen.steady
