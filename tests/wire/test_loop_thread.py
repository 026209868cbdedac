"""The loop on a thread of its own, and tasks that do not want to end."""

import asyncio
import logging
import threading

import pytest

from kvtier.errors import UnavailableError
from kvtier.telemetry.logs import EventLog
from kvtier.wire.loop_thread import LoopThread, end, raise_if_cancelled, spawn

DEADLINE_S = 45.0


async def stubborn(cancellations: list[int], swallowed_max: int) -> None:
    """Swallows its first cancellations, as grpc.aio may."""
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancellations.append(1)
            if len(cancellations) > swallowed_max:
                raise


async def test_a_task_that_swallows_cancellations_is_ended_all_the_same() -> None:
    cancellations: list[int] = []
    task = asyncio.create_task(stubborn(cancellations, 2))
    await asyncio.sleep(0)
    await end([task])
    assert task.cancelled()
    assert len(cancellations) == 3


async def test_ending_nothing_and_what_has_ended_is_nothing() -> None:
    done = asyncio.create_task(asyncio.sleep(0))
    await done
    await end([])
    await end([done])
    assert not done.cancelled()


async def test_a_loop_notices_that_its_cancellation_was_swallowed() -> None:
    rounds = 0

    async def loop() -> None:
        nonlocal rounds
        while True:
            raise_if_cancelled()
            rounds += 1
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rounds == 1


async def test_the_failure_of_a_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    with caplog.at_level(logging.ERROR, "kvtier.test"):
        task = spawn(fail(), EventLog("kvtier.test"))
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == ["a task failed"]


def test_work_runs_on_the_threads_own_loop() -> None:
    thread = LoopThread("test")
    thread.start()
    thread.start()
    try:

        async def name() -> str:
            return threading.current_thread().name

        assert thread.submit(name()).result(DEADLINE_S) == "test"
        called = threading.Event()
        thread.soon(called.set)
        assert called.wait(DEADLINE_S)
    finally:
        thread.stop()


def test_stopping_ends_what_runs_and_refuses_what_comes_later() -> None:
    thread = LoopThread("test")
    thread.start()
    cancellations: list[int] = []
    running = thread.submit(stubborn(cancellations, 1))
    started = thread.submit(asyncio.sleep(0))
    started.result(DEADLINE_S)
    thread.stop()
    thread.stop()
    assert running.cancelled()
    assert not thread.is_running
    thread.soon(cancellations.append, 1)
    with pytest.raises(UnavailableError, match="test"):
        thread.submit(asyncio.sleep(0))
    assert len(cancellations) == 2
