"""The publisher against an index that keeps count, restarts, forgets, lies and dies."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from kvtier.core.event_messages import FenceReason
from kvtier.core.events import Verdict
from kvtier.core.fleet import HolderInfo
from kvtier.core.model_card import ModelCard
from kvtier.core.publication import PublicationConfig
from kvtier.errors import CallerError, ConfigError, UnavailableError
from kvtier.publisher import Load, Publisher, PublisherConfig, StreamState
from kvtier.sections import DialConfig
from kvtier.types import Epoch, Fingerprint, HolderKind, InstanceId, NodeId, Tier
from kvtier.wire import messages as pb
from tests.harness.ports import free_port
from tests.harness.waiting import eventually
from tests.support.scripted_index import Blocks, ScriptedIndex, empty, remove_one

DEADLINE_S = 45.0
CARD = ModelCard(("tiny",), "org/tiny", "r1", b"t" * 32, None, 16)
FAST = PublisherConfig(
    coalesce_s=0.001,
    heartbeat_s=0.05,
    silence_s=3.0,
    digest_interval_s=0.0,
    load_interval_s=0.01,
    reconnect_s_min=0.005,
    reconnect_s_max=0.05,
    refused_retry_s=0.05,
)


def worker(instance: str = "w0") -> HolderInfo:
    return HolderInfo(
        kind=HolderKind.WORKER,
        instance=InstanceId(instance),
        node=NodeId("n0"),
        namespace=Fingerprint(b"n" * 32),
        card=CARD,
    )


def hashes(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


class Engine:
    """Makes changes and remembers what is held: the oracle of these tests."""

    def __init__(self, publisher: Publisher, seed: int = 0) -> None:
        self.publisher = publisher
        self.blocks: Blocks = empty()
        self._random = random.Random(seed)

    def change(self) -> None:
        dice = self._random.random()
        tier = self._random.choice((Tier.GPU, Tier.DRAM))
        held = self.blocks[tier]
        if dice < 0.7 or not held:
            start = self._random.randrange(1, 5000)
            chain = list(range(start, start + self._random.randrange(1, 40)))
            self.publisher.store(tier, start - 1, np.array(chain, np.uint64))
            held.update(chain)
        elif dice < 0.995:
            gone = self._random.sample(sorted(held), min(len(held), 30))
            self.publisher.remove(tier, np.array(gone, np.uint64))
            for name in gone:
                remove_one(held, name)
        else:
            self.publisher.clear(tier)
            held.clear()

    def changes(self, count: int) -> None:
        for _ in range(count):
            self.change()


@pytest.fixture
def index() -> Iterator[ScriptedIndex]:
    made = ScriptedIndex().start()
    yield made
    made.stop()


@pytest.fixture
def other_index() -> Iterator[ScriptedIndex]:
    made = ScriptedIndex().start()
    yield made
    made.stop()


def publisher_for(*targets: str, config: PublisherConfig = FAST, instance: str = "w0") -> Publisher:
    return Publisher(worker(instance), DialConfig(targets=targets), config)


def expect(index: ScriptedIndex, blocks: Blocks, instance: str = "w0") -> None:
    eventually(lambda: index.blocks(instance) == blocks, DEADLINE_S, "the index equals the engine")


def state(publisher: Publisher, number: int = 0) -> StreamState:
    return publisher.stats().streams[number].state


# ---- what is published


def test_what_an_engine_stores_and_removes_reaches_the_index(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:
        publisher.store(Tier.GPU, 0, hashes(1, 2, 3))
        publisher.store(Tier.DRAM, 3, [4, 5])
        publisher.remove(Tier.GPU, hashes(3))
        assert publisher.flush(DEADLINE_S)
        expected = empty()
        expected[Tier.GPU].update([1, 2])
        expected[Tier.DRAM].update([4, 5])
        assert index.blocks("w0") == expected
        publisher.clear(Tier.GPU)
        expected[Tier.GPU].clear()
        assert publisher.flush(DEADLINE_S)
        assert index.blocks("w0") == expected
        publisher.clear()
        assert publisher.flush(DEADLINE_S)
        assert index.blocks("w0") == empty()


def test_a_hello_describes_the_holder(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:
        eventually(lambda: index.hellos, DEADLINE_S, "a Hello arrives")
        hello = index.hellos[0]
        assert hello.epoch == publisher.epoch
        assert (hello.instance, hello.node, hello.card.model_id) == ("w0", "n0", "org/tiny")


def test_changes_made_before_the_start_are_published(index: ScriptedIndex) -> None:
    publisher = publisher_for(index.target)
    publisher.store(Tier.GPU, 0, hashes(7, 8))
    with publisher:
        assert publisher.flush(DEADLINE_S)
        assert index.blocks("w0")[Tier.GPU] == {7: 1, 8: 1}


def test_many_small_changes_travel_in_few_messages(index: ScriptedIndex) -> None:
    patient = replace(FAST, coalesce_s=0.05)
    with publisher_for(index.target, config=patient) as publisher:
        eventually(lambda: state(publisher) is StreamState.LIVE, DEADLINE_S, "connected")
        for number in range(2000):
            publisher.store(Tier.GPU, number, hashes(number + 1))
        assert publisher.flush(DEADLINE_S)
        assert index.blocks("w0")[Tier.GPU].total() == 2000
        assert publisher.stats().batches_sealed < 200


def test_engine_threads_may_publish_at_the_same_time(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:

        def run(number: int) -> None:
            base = number * 1_000_000
            for step in range(300):
                publisher.store(Tier.GPU, 0, hashes(base + step + 1))
                if step % 2:
                    publisher.remove(Tier.GPU, hashes(base + step + 1))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert publisher.flush(DEADLINE_S)
        left = {number * 1_000_000 + step + 1 for number in range(4) for step in range(0, 300, 2)}
        assert set(index.blocks("w0")[Tier.GPU]) == left


# ---- an index that goes away


def test_an_engine_works_on_while_the_index_is_down_and_it_catches_up(
    index: ScriptedIndex,
) -> None:
    with publisher_for(index.target) as publisher:
        engine = Engine(publisher)
        engine.changes(300)
        assert publisher.flush(DEADLINE_S)
        index.stop()
        engine.changes(300)
        index.start()
        engine.changes(300)
        expect(index, engine.blocks)
        assert publisher.stats().streams[0].failures >= 1


def restart_without_memory(index: ScriptedIndex, publisher: Publisher) -> None:
    seen = index.batches_count
    eventually(lambda: index.batches_count > seen, DEADLINE_S, "batches")
    index.stop()
    index.forget()
    made = publisher.stats().changes
    eventually(
        lambda: publisher.stats().changes > made + 100, DEADLINE_S, "the engine goes on alone"
    )
    index.start()


def test_an_engine_never_stops_while_the_index_restarts_without_memory(
    index: ScriptedIndex,
) -> None:
    with publisher_for(index.target) as publisher:
        engine = Engine(publisher)
        stop = threading.Event()

        def hammer() -> None:
            while not stop.is_set():
                engine.changes(20)

        thread = threading.Thread(target=hammer)
        thread.start()
        try:
            for _ in range(3):
                restart_without_memory(index, publisher)
        finally:
            stop.set()
            thread.join()
        expect(index, engine.blocks)
        assert index.snapshot_chunks_count > 0


def test_a_reconnect_in_the_same_epoch_needs_no_snapshot(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:
        engine = Engine(publisher)
        engine.changes(50)
        assert publisher.flush(DEADLINE_S)
        before = index.snapshot_chunks_count
        index.stop()
        engine.changes(50)
        index.start()
        expect(index, engine.blocks)
        assert index.snapshot_chunks_count == before
        assert index.hellos[-1].epoch == index.hellos[0].epoch


def test_a_lost_batch_is_repaired_by_sending_it_again(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:
        engine = Engine(publisher)
        engine.changes(10)
        assert publisher.flush(DEADLINE_S)
        chunks = index.snapshot_chunks_count
        lost: list[int] = []

        def lose_one(request: pb.PublishRequest) -> bool:
            if request.HasField("batch") and not lost:
                lost.append(request.batch.seq)
                return True
            return False

        index.script.lose = lose_one
        engine.changes(10)
        expect(index, engine.blocks)
        assert index.lost_count == 1
        assert publisher.stats().resends >= 1
        assert index.snapshot_chunks_count == chunks


def test_a_replica_that_falls_behind_the_ring_gets_a_snapshot(index: ScriptedIndex) -> None:
    small = replace(FAST, publication=PublicationConfig(ring_batches_max=4, batch_blocks_max=64))
    with publisher_for(index.target, config=small) as publisher:
        engine = Engine(publisher)
        engine.changes(20)
        assert publisher.flush(DEADLINE_S)
        chunks = index.snapshot_chunks_count
        index.stop()
        engine.changes(400)
        index.start()
        expect(index, engine.blocks)
        assert publisher.stats().ring_overflows >= 1
        assert index.snapshot_chunks_count > chunks


def test_a_full_queue_makes_the_engine_do_the_work_and_loses_nothing() -> None:
    tight = replace(FAST, queue_blocks_max=64)
    index = ScriptedIndex().start()
    try:
        publisher = publisher_for(index.target, config=tight)
        engine = Engine(publisher)
        engine.changes(500)  # nobody empties the queue: the publishing thread does not run
        stats = publisher.stats()
        assert stats.queue_overflows > 0
        assert stats.queued_blocks <= 64 + 40
        with publisher:
            engine.changes(100)
            expect(index, engine.blocks)
    finally:
        index.stop()


def test_one_dead_replica_does_not_hold_up_the_other(index: ScriptedIndex) -> None:
    dead = f"127.0.0.1:{free_port()}"
    with publisher_for(dead, index.target) as publisher:
        engine = Engine(publisher)
        engine.changes(200)
        expect(index, engine.blocks)
        stats = publisher.stats().streams[0]
        assert stats.target == dead
        assert stats.welcomed == 0
        assert not publisher.flush(0.05)


def test_two_replicas_hold_the_same(index: ScriptedIndex, other_index: ScriptedIndex) -> None:
    with publisher_for(index.target, other_index.target) as publisher:
        engine = Engine(publisher)
        engine.changes(100)
        other_index.stop()
        engine.changes(100)
        expect(index, engine.blocks)
        other_index.start()
        expect(other_index, engine.blocks)


def test_an_index_that_falls_silent_is_left_and_found_again(index: ScriptedIndex) -> None:
    index.script.heartbeat_ms = 10
    impatient = replace(FAST, silence_s=0.1)
    with publisher_for(index.target, config=impatient) as publisher:
        engine = Engine(publisher)
        engine.changes(10)
        assert publisher.flush(DEADLINE_S)
        index.script.is_mute = True
        eventually(lambda: publisher.stats().streams[0].failures, DEADLINE_S, "silence is noticed")
        assert "heard" in publisher.stats().streams[0].last_error
        engine.changes(10)
        index.script.is_mute = False
        expect(index, engine.blocks)


def test_drift_is_found_by_the_digest_and_repaired(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:
        engine = Engine(publisher)
        engine.changes(20)
        assert publisher.flush(DEADLINE_S)
        index.damage("w0")
        expect(index, engine.blocks)
        assert index.counts("w0")[Verdict.DRIFT] >= 1


# ---- heartbeats


def test_heartbeats_carry_the_latest_load(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:
        publisher.set_load(Load(running_requests=3, prefill_tokens_per_s=1.5))
        publisher.set_load(Load(running_requests=4, prefill_tokens_per_s=2.5))
        beat = eventually(
            lambda: [b for b in index.heartbeats if b.load.running_requests],
            DEADLINE_S,
            "a load arrives",
        )[0]
        assert (beat.load.running_requests, beat.load.prefill_tokens_per_s) == (4, 2.5)


def test_heartbeats_go_on_while_the_engine_hogs_the_interpreter(index: ScriptedIndex) -> None:
    with publisher_for(index.target) as publisher:
        eventually(lambda: index.heartbeats, DEADLINE_S, "the first heartbeat")
        before = len(index.heartbeats)
        end = time.monotonic() + DEADLINE_S
        spun = 0
        while len(index.heartbeats) < before + 5 and time.monotonic() < end:
            spun += sum(range(1000))  # never blocks: only the switch interval lets others run
        assert len(index.heartbeats) >= before + 5
        assert publisher.stats().streams[0].failures == 0
        assert sys.getswitchinterval() < 0.1


def test_the_index_sets_the_pace_of_heartbeats(index: ScriptedIndex) -> None:
    slow = replace(FAST, heartbeat_s=3600.0)
    with publisher_for(index.target, config=slow):
        eventually(lambda: len(index.heartbeats) >= 3, DEADLINE_S, "heartbeats of the Welcome")


# ---- the end of an epoch


class Listener:
    def __init__(self) -> None:
        self.fences: list[FenceReason] = []
        self.refusals: list[tuple[str, str]] = []

    def fenced(self, reason: FenceReason) -> None:
        self.fences.append(reason)

    def refused(self, target: str, reason: str) -> None:
        self.refusals.append((target, reason))


def replaced_by_a_twin(index: ScriptedIndex, use: Callable[[Publisher, Listener], None]) -> None:
    """Run `use` with a publisher that was fenced because a twin took its place."""
    listener = Listener()
    publisher = Publisher(worker(), DialConfig(targets=(index.target,)), FAST, listener)
    with publisher:
        publisher.store(Tier.GPU, 0, hashes(1, 2, 3))
        assert publisher.flush(DEADLINE_S)
        with publisher_for(index.target) as twin:
            twin.store(Tier.GPU, 0, hashes(9))
            assert twin.flush(DEADLINE_S)
            eventually(lambda: listener.fences, DEADLINE_S, "the old epoch is fenced")
        use(publisher, listener)


def test_a_fenced_publisher_stops_and_tells_its_owner_once(index: ScriptedIndex) -> None:
    def look(publisher: Publisher, listener: Listener) -> None:
        publisher.store(Tier.GPU, 3, hashes(4))
        assert listener.fences == [FenceReason.DEAD_EPOCH]
        assert publisher.stats().is_fenced
        assert state(publisher) is StreamState.FENCED
        assert index.blocks("w0")[Tier.GPU] == {9: 1}

    replaced_by_a_twin(index, look)


def test_a_fenced_publisher_comes_back_with_all_it_holds_when_asked(index: ScriptedIndex) -> None:
    def come_back(publisher: Publisher, listener: Listener) -> None:
        old = publisher.epoch
        publisher.store(Tier.GPU, 3, hashes(4))
        assert publisher.restart() not in (old, Epoch(0))
        publisher.store(Tier.GPU, 4, hashes(5))
        expected = empty()
        expected[Tier.GPU].update([1, 2, 3, 4, 5])
        expect(index, expected)
        assert not publisher.stats().is_fenced
        assert len(listener.fences) == 1

    replaced_by_a_twin(index, come_back)


def test_a_refusal_is_loud_and_tried_again(index: ScriptedIndex) -> None:
    index.script.refuse = "block_tokens: known as 16, said to be 32"
    listener = Listener()
    with Publisher(worker(), DialConfig(targets=(index.target,)), FAST, listener) as publisher:
        eventually(lambda: len(listener.refusals) >= 2, DEADLINE_S, "refused twice")
        assert listener.refusals[0] == (index.target, index.script.refuse)
        assert publisher.stats().streams[0].last_error == index.script.refuse
        index.script.refuse = ""
        publisher.store(Tier.GPU, 0, hashes(1))
        assert publisher.flush(DEADLINE_S)


def test_a_denied_publisher_says_so_and_tries_again_slowly(index: ScriptedIndex) -> None:
    index.script.deny = grpc.StatusCode.UNAUTHENTICATED
    listener = Listener()
    patient = replace(FAST, refused_retry_s=3600.0)
    with Publisher(worker(), DialConfig(targets=(index.target,)), patient, listener) as publisher:
        eventually(lambda: listener.refusals, DEADLINE_S, "denied")
        eventually(lambda: state(publisher) is StreamState.REFUSED, DEADLINE_S, "refused")
        assert "UNAUTHENTICATED" in listener.refusals[0][1]
        # grpc.aio sometimes hides a status behind a failed write; such an attempt is repeated.
        stats = publisher.stats().streams[0]
        assert (stats.refusals, stats.opened) == (1, stats.failures)


def test_close_flushes_and_says_goodbye(index: ScriptedIndex) -> None:
    slow = replace(FAST, coalesce_s=5.0)
    publisher = publisher_for(index.target, config=slow).start()
    eventually(lambda: state(publisher) is StreamState.LIVE, DEADLINE_S, "connected")
    publisher.store(Tier.GPU, 0, hashes(1, 2))
    publisher.close()
    assert index.blocks("w0")[Tier.GPU] == {1: 1, 2: 1}
    assert index.goodbyes == ["closed"]
    assert state(publisher) is StreamState.CLOSED
    publisher.close()


def test_close_does_not_wait_for_a_dead_index() -> None:
    publisher = publisher_for(f"127.0.0.1:{free_port()}").start()
    publisher.store(Tier.GPU, 0, hashes(1))
    publisher.close()
    assert state(publisher) is StreamState.CLOSED


# ---- wrong use


@pytest.mark.parametrize("parent", [-1, 2**64])
def test_a_parent_outside_u64_is_refused(parent: int) -> None:
    with pytest.raises(CallerError, match="parent"):
        publisher_for().store(Tier.GPU, parent, hashes(1))


@pytest.mark.parametrize("wrong", [[-1], [2**64], ["x"], np.ones(2), np.ones((2, 2), np.uint64)])
def test_hashes_that_are_not_u64_are_refused(wrong: list[int]) -> None:
    publisher = publisher_for()
    with pytest.raises(CallerError, match="hashes"):
        publisher.store(Tier.GPU, 0, wrong)
    with pytest.raises(CallerError, match="hashes"):
        publisher.remove(Tier.GPU, wrong)
    assert publisher.stats().changes == 0


def test_a_tier_that_does_not_exist_is_refused() -> None:
    tier: Tier = 7  # type: ignore[assignment]
    with pytest.raises(CallerError, match="tier"):
        publisher_for().store(tier, 0, hashes(1))


def test_a_publisher_without_targets_only_keeps_count() -> None:
    with publisher_for() as publisher:
        publisher.store(Tier.GPU, 0, hashes(1, 2))
        assert publisher.flush(DEADLINE_S)
        assert publisher.stats().copies_count == 2


def test_a_missing_token_file_is_an_error_of_configuration(tmp_path: Path) -> None:
    dial = DialConfig(targets=("127.0.0.1:1",), token_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="none"):
        Publisher(worker(), dial)


def test_a_closed_publisher_is_not_started_again(index: ScriptedIndex) -> None:
    publisher = publisher_for(index.target).start()
    publisher.close()
    with pytest.raises(CallerError, match="closed"):
        publisher.start()
    with pytest.raises(UnavailableError):
        publisher.flush(1.0)


@pytest.mark.parametrize("change", [{"queue_blocks_max": 0}, {"reconnect_s_min": 2.0}])
def test_settings_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(CallerError):
        replace(PublisherConfig(), **change)  # type: ignore[arg-type]
