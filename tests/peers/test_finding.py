"""Who is said to have a block: what is remembered, for how long, and what is asked together."""

import asyncio

import pytest

from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import DeadlineError, UnavailableError
from kvtier.peers.finding import Finder, FinderPolicy
from kvtier.types import InstanceId
from tests.support.peer_fakes import FakeIndex, Now, begun, hash_of, place
from tests.tiers.contract import NAMESPACE, OTHER_NAMESPACE, name_of

POLICY = FinderPolicy(ask_s=30.0, found_s=2.0, absent_s=0.5)


def a_finder(index: FakeIndex, now: Now) -> Finder:
    return Finder(index, InstanceId("me"), now, policy=POLICY)


async def test_answers_are_remembered_for_a_moment_and_absence_for_a_shorter_one() -> None:
    index, now = FakeIndex({hash_of(name_of(1)): (place("a"),)}), Now()
    finder = a_finder(index, now)
    names = [name_of(1), name_of(2)]
    expected = [(place("a"),), ()]
    for later, questions in ((0.0, 1), (0.4, 1), (0.2, 2), (1.5, 4)):
        now.s += later
        assert await finder.find(names, now() + 60) == expected
        assert len([n for asked in index.questions for n in asked]) == questions + 1
    assert finder.questions == len(index.questions)


async def test_what_turned_out_wrong_is_forgotten() -> None:
    index, now = FakeIndex({hash_of(name_of(1)): (place("a"),)}), Now()
    finder = a_finder(index, now)
    assert await finder.find([name_of(1)], now() + 60) == [(place("a"),)]
    finder.forget([name_of(1)])
    assert await finder.find([name_of(1)], now() + 60) == [()]
    now.s += 0.6
    assert await finder.find([name_of(1)], now() + 60) == [(place("a"),)]


async def test_a_question_that_is_under_way_is_shared() -> None:
    index, now = FakeIndex({hash_of(name_of(1)): (place("a"),)}, gate=asyncio.Event()), Now()
    finder = a_finder(index, now)
    first = asyncio.create_task(finder.find([name_of(1)], now() + 60))
    await begun(lambda: bool(index.questions))
    second = asyncio.create_task(finder.find([name_of(1)], now() + 60))
    await asyncio.sleep(0)
    assert index.gate is not None
    index.gate.set()
    assert await first == await second == [(place("a"),)]
    assert len(index.questions) == 1


async def test_each_namespace_is_a_question_of_its_own() -> None:
    index, now = FakeIndex(), Now()
    finder = a_finder(index, now)
    await finder.find([name_of(1), name_of(1, OTHER_NAMESPACE)], now() + 60)
    assert len(index.questions) == 2


async def test_blocks_that_no_index_could_know_are_not_asked_for() -> None:
    index, now = FakeIndex(), Now()
    digest = FrameName(KeyKind.ENGINE_DIGEST, b"d" * 16, NAMESPACE)
    assert await a_finder(index, now).find([digest], now() + 60) == [()]
    assert index.questions == []


async def test_an_index_that_fails_is_an_error_and_is_asked_again_next_time() -> None:
    index, now = FakeIndex(error=UnavailableError("gone")), Now()
    finder = a_finder(index, now)
    with pytest.raises(UnavailableError):
        await finder.find([name_of(1)], now() + 60)
    index.error = None
    assert await finder.find([name_of(1)], now() + 60) == [()]


async def test_a_late_answer_is_no_answer_and_helps_the_next_one() -> None:
    index, now = FakeIndex({hash_of(name_of(1)): (place("a"),)}, gate=asyncio.Event()), Now()
    finder = a_finder(index, now)
    with pytest.raises(DeadlineError):
        await finder.find([name_of(1)], now() + 0.01)
    assert index.gate is not None
    index.gate.set()
    assert await finder.find([name_of(1)], now() + 60) == [(place("a"),)]
    assert len(index.questions) == 1


async def test_close_ends_questions_that_nobody_answers() -> None:
    index, now = FakeIndex(gate=asyncio.Event()), Now()
    finder = a_finder(index, now)
    asked = asyncio.create_task(finder.find([name_of(1)], now() + 60))
    await begun(lambda: bool(index.questions))
    await finder.close()
    with pytest.raises(UnavailableError):
        await asked
