"""Order and recovery of an engine's messages, held against a world in which anything gets lost."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.engine_sequence import (
    Action,
    Apply,
    AskReplay,
    Doubt,
    Lost,
    Position,
    Restarted,
    SequenceConfig,
    SequenceTracker,
)
from kvtier.errors import CallerError
from kvtier.types import Trust

ALONE = SequenceConfig(has_replay=False)


class World:
    """An engine, a lossy subscription, and a tracker whose actions are carried out."""

    def __init__(self, ring: int = 1000, config: SequenceConfig | None = None) -> None:
        self.config = config or SequenceConfig(held_batches_max=8)
        self.tracker = SequenceTracker(self.config)
        self.now = 0.0
        self.life = 0
        self.log: list[bytes] = []
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self.asked: int | None = None
        self.is_up = False
        self.applied: list[bytes] = []
        """Since the last restart that the tracker noticed."""
        self.lost: list[Doubt] = []
        self.forgotten = 0

    def is_exact(self) -> bool:
        return self.tracker.trust is Trust.EXACT

    def publish(self, *, heard: bool = True) -> None:
        seq = len(self.log)
        payload = f"{self.life}:{seq}".encode()
        self.log.append(payload)
        if len(self.ring) == self.ring.maxlen:
            self.forgotten += 1
        self.ring.append((seq, payload))
        if heard and self.is_up:
            self.act(self.tracker.live(seq, payload, self.now))

    def connect(self) -> None:
        self.is_up = True
        self.act(self.tracker.connected(self.now))

    def disconnect(self) -> None:
        self.is_up = False
        self.asked = None
        self.tracker.disconnected()

    def restart_engine(self) -> None:
        self.disconnect()
        self.life += 1
        self.log, self.forgotten = [], 0
        self.ring.clear()

    def restart_bridge(self) -> None:
        self.tracker = SequenceTracker(self.config, self.tracker.position())
        if self.tracker.applied_seq < 0:
            self.applied = []
        self.asked = None
        if self.is_up:
            self.connect()

    def serve(self) -> None:
        """Answer what was asked for last, whole."""
        asked, self.asked = self.asked, None
        if asked is None:
            return
        for seq, payload in list(self.ring):
            if seq >= asked and self.asked is None:
                self.act(self.tracker.replayed(seq, payload, self.now))
        if self.asked is None:
            self.act(self.tracker.replay_ended(self.now))

    def wait(self) -> None:
        self.now += self.config.replay_timeout_s
        self.act(self.tracker.tick(self.now))

    def settle(self) -> None:
        for _ in range(20):
            if self.asked is None:
                return
            self.serve()
        raise AssertionError("replays never end")

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(_, payload):
                    self.applied.append(payload)
                case AskReplay(from_seq):
                    self.asked = from_seq
                case Restarted():
                    self.applied = []
                case Lost(doubt):
                    self.lost.append(doubt)


def joined(count: int, ring: int = 1000, config: SequenceConfig | None = None) -> World:
    """A world in which `count` messages were heard."""
    world = World(ring, config)
    world.connect()
    world.settle()
    for _ in range(count):
        world.publish()
    world.settle()
    return world


def test_a_late_joiner_gets_what_it_missed_and_is_exact() -> None:
    world = World()
    for _ in range(5):
        world.publish()
    world.connect()
    assert not world.is_exact()
    world.publish()
    assert world.applied == []
    world.settle()
    assert world.applied == world.log
    assert world.is_exact()


def test_a_silent_engine_is_exact_once_it_has_nothing_to_replay() -> None:
    world = joined(0)
    assert (world.tracker.trust, world.applied) == (Trust.EXACT, [])


def test_a_gap_is_mended_by_a_replay_from_the_last_message() -> None:
    world = joined(3)
    world.publish(heard=False)
    world.publish()
    assert world.asked == 2
    assert len(world.applied) == 3
    world.publish()
    world.settle()
    assert world.applied == world.log
    assert (world.tracker.trust, world.tracker.counts.gaps, world.lost) == (Trust.EXACT, 1, [])


def test_a_gap_that_the_ring_has_forgotten_stays_said() -> None:
    world = joined(3, ring=2)
    for _ in range(4):
        world.publish(heard=False)
    world.publish()
    world.settle()
    assert world.applied == [*world.log[:3], *world.log[-2:]]
    assert world.lost == [Doubt.GAP]
    assert world.tracker.doubts == {Doubt.GAP}
    world.publish()
    assert not world.is_exact()
    world.tracker.cleared()
    assert world.is_exact()


def test_a_ring_that_has_just_forgotten_the_last_message_proves_nothing() -> None:
    world = joined(3, ring=2)
    world.disconnect()
    world.publish()
    world.publish()
    world.connect()
    world.settle()
    assert world.applied == world.log
    assert world.lost == [Doubt.UNVERIFIED]
    assert world.tracker.doubts == {Doubt.UNVERIFIED}


def test_a_message_that_waited_for_a_replay_of_another_life_is_of_the_one_before() -> None:
    world = joined(2)
    world.act(world.tracker.live(5, b"0:5", world.now))
    assert len(world.applied) == 2
    world.life, world.log = 1, []
    world.ring.clear()
    world.is_up = False  # the subscription has not noticed yet
    world.publish()
    world.publish()
    world.settle()
    assert world.applied == [b"1:0", b"1:1"]
    assert (world.tracker.trust, world.tracker.counts.restarts) == (Trust.EXACT, 1)


def test_a_replay_with_a_hole_in_it_is_asked_for_again_from_the_hole() -> None:
    world = joined(2)
    world.publish(heard=False)
    world.publish(heard=False)
    world.publish()
    world.act(world.tracker.replayed(1, b"0:1", world.now))
    world.act(world.tracker.replayed(2, b"0:2", world.now))
    assert world.tracker.replayed(4, b"0:4", world.now) == [AskReplay(2)]
    assert len(world.applied) == 3
    world.asked = 2
    world.settle()
    assert (world.applied, world.tracker.trust) == (world.log, Trust.EXACT)


def test_a_restarted_engine_is_noticed_by_its_number() -> None:
    world = joined(5)
    world.restart_engine()
    world.connect()
    world.publish()
    world.settle()
    assert world.applied == world.log == [b"1:0"]
    assert (world.tracker.trust, world.tracker.counts.restarts) == (Trust.EXACT, 1)


@pytest.mark.parametrize("published", [4, 5, 6, 9])
def test_a_restarted_engine_is_noticed_although_its_numbers_fit(published: int) -> None:
    world = joined(5)
    world.restart_engine()
    for _ in range(published):
        world.publish()
    world.connect()
    world.settle()
    world.publish()
    assert world.applied == world.log
    assert world.is_exact()


def test_a_restart_whose_beginning_is_forgotten_is_a_gap() -> None:
    world = joined(2, ring=3)
    world.restart_engine()
    for _ in range(20):
        world.publish()
    world.connect()
    world.settle()
    assert world.tracker.doubts == {Doubt.GAP}


def test_another_bridge_goes_on_where_the_last_one_was() -> None:
    world = joined(4, ring=3)
    world.restart_bridge()
    world.settle()
    assert (world.applied, world.tracker.trust) == (world.log, Trust.EXACT)
    world.is_up = False
    world.publish()
    world.publish()
    world.is_up = True
    world.restart_bridge()
    world.settle()
    assert (world.applied, world.tracker.trust, world.lost) == (world.log, Trust.EXACT, [])


def test_another_bridge_that_slept_longer_than_the_ring_says_so() -> None:
    world = joined(4, ring=3)
    world.is_up = False
    for _ in range(10):
        world.publish()
    world.is_up = True
    world.restart_bridge()
    world.settle()
    assert world.lost == [Doubt.GAP]
    assert world.tracker.position() == Position(13, _print_of(world), frozenset({Doubt.GAP}))
    world.restart_bridge()
    world.settle()
    assert world.tracker.doubts == {Doubt.GAP}


def _print_of(world: World) -> bytes:
    position = world.tracker.position()
    assert position is not None
    return position.fingerprint


def test_a_replay_that_never_comes_is_asked_for_again_and_then_given_up() -> None:
    world = joined(2)
    world.publish(heard=False)
    world.publish()
    for _ in range(world.config.replay_attempts_max):
        assert world.asked == 1
        assert world.tracker.deadline() is not None
        world.wait()
    assert world.applied == [b"0:0", b"0:1", b"0:3"]
    assert world.tracker.doubts == {Doubt.GAP}
    assert world.tracker.deadline() is None


def test_live_messages_that_wait_are_bounded() -> None:
    world = joined(1)
    world.publish(heard=False)
    for _ in range(world.config.held_batches_max + 1):
        world.publish()
    assert world.tracker.doubts == {Doubt.GAP}
    assert len(world.applied) == 2 + world.config.held_batches_max


def test_live_messages_that_wait_are_bounded_in_bytes() -> None:
    world = joined(1, config=SequenceConfig(held_bytes_max=100))
    world.publish(heard=False)
    world.act(world.tracker.live(2, b"x" * 60, world.now))
    assert Doubt.GAP not in world.tracker.doubts
    world.act(world.tracker.live(3, b"y" * 60, world.now))
    assert world.tracker.doubts == {Doubt.GAP}
    assert world.applied[1:] == [b"x" * 60, b"y" * 60]


def test_a_message_that_comes_twice_is_applied_once() -> None:
    world = joined(2)
    world.act(world.tracker.live(1, b"0:1", 0.0))
    assert (len(world.applied), world.tracker.counts.duplicates) == (2, 1)


def test_without_replays_the_first_number_decides() -> None:
    fresh = World(config=ALONE)
    fresh.connect()
    assert not fresh.is_exact()
    fresh.publish()
    assert fresh.is_exact()
    late = World(config=ALONE)
    late.publish()
    late.connect()
    late.publish()
    assert late.tracker.doubts == {Doubt.GAP}


def test_without_replays_a_number_that_runs_backwards_is_a_restart() -> None:
    world = joined(3, config=ALONE)
    world.restart_engine()
    world.connect()
    world.publish()
    assert (world.applied, world.tracker.trust) == (world.log, Trust.EXACT)


def test_without_replays_numbers_that_go_on_after_a_break_prove_nothing() -> None:
    world = joined(3, config=ALONE)
    world.disconnect()
    world.connect()
    world.publish()
    assert world.applied == world.log
    assert world.tracker.doubts == {Doubt.UNVERIFIED}


def test_what_cannot_be_read_stays_said_until_the_engine_is_empty() -> None:
    world = joined(1)
    world.tracker.doubt(Doubt.UNDECODABLE)
    world.publish()
    assert world.tracker.doubts == {Doubt.UNDECODABLE}
    world.restart_engine()
    world.connect()
    world.settle()
    world.publish()
    assert world.is_exact()


def test_settings_out_of_bounds_are_refused() -> None:
    for settings_ in ({"replay_timeout_s": 0}, {"held_batches_max": 0}, {"held_bytes_max": 0}):
        with pytest.raises(CallerError):
            SequenceConfig(**settings_)  # type: ignore[arg-type]


OPERATIONS = st.lists(
    st.sampled_from(
        ["publish", "publish", "publish", "drop", "serve", "serve", "disconnect", "connect",
         "restart_engine", "restart_bridge", "wait"]
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(operations=OPERATIONS, ring=st.integers(1, 6) | st.just(1000))
def test_exact_is_only_said_where_everything_was_applied(operations: list[str], ring: int) -> None:
    world = World(ring)
    for operation in operations:
        match operation:
            case "drop":
                world.publish(heard=False)
            case "connect" if world.is_up:
                pass
            case _:
                getattr(world, operation)()
    if not world.is_up:
        world.connect()
    world.settle()
    world.publish()
    world.settle()
    if world.is_exact():
        assert world.applied == world.log
    assert world.is_exact() or world.lost
    if ring == 1000 and "wait" not in operations and not world.lost:
        assert world.is_exact()
