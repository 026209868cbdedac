"""The same world as the seeded simulation, steered by hypothesis, so that failures shrink."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvtier.types import Tier
from tests.sim.event_world import TIERS, Fate, Index, World

tiers = st.sampled_from(TIERS)
names = st.integers(1, 3).flatmap(lambda chain: st.integers(chain * 100 + 1, chain * 100 + 8))
fates = st.sampled_from([Fate.DELIVER, Fate.DELIVER, Fate.DROP, Fate.DUPLICATE])
which = st.integers(0, 1)


class EventStreams(RuleBasedStateMachine):
    """One publisher, two index replicas. The validators of `event_world` are the invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(indexes_count=2)

    def _index(self, number: int) -> Index:
        return self.world.indexes[number]

    @rule(tier=tiers, chain=st.integers(1, 3), start=st.integers(0, 3), length=st.integers(1, 8))
    def store(self, tier: Tier, chain: int, start: int, length: int) -> None:
        self.world.store(tier, chain, start, length)

    @rule(tier=tiers, gone=st.lists(names, min_size=1, max_size=4))
    def remove(self, tier: Tier, gone: list[int]) -> None:
        self.world.remove(tier, gone)

    @rule(tier=st.none() | tiers)
    def clear(self, tier: Tier | None) -> None:
        self.world.clear(tier)

    @rule(number=which, messages_max=st.integers(1, 8))
    def poll(self, number: int, messages_max: int) -> None:
        self.world.poll(self._index(number), messages_max)

    @rule(number=which, position=st.integers(0, 7), fate=fates)
    def deliver_to_index(self, number: int, position: int, fate: Fate) -> None:
        self.world.deliver_to_index(self._index(number), position, fate)

    @rule(number=which, position=st.integers(0, 7), fate=fates)
    def deliver_to_publisher(self, number: int, position: int, fate: Fate) -> None:
        self.world.deliver_to_publisher(self._index(number), position, fate)

    @rule(tenths=st.integers(1, 20))
    def pass_time(self, tenths: int) -> None:
        self.world.advance(tenths / 10)
        for index in self.world.indexes:
            self.world.beat(index)

    @rule(number=which)
    def lose_last_batch(self, number: int) -> None:
        if not self.world.stalled:
            self.world.lose_last_batch(self._index(number))

    @rule(becomes_zombie=st.booleans())
    def restart_publisher(self, becomes_zombie: bool) -> None:
        self.world.restart_publisher(becomes_zombie)

    @rule(number=which)
    def restart_index(self, number: int) -> None:
        self.world.restart_index(self._index(number))

    @rule(number=which)
    def reconnect(self, number: int) -> None:
        self.world.reconnect(self._index(number))

    @rule(number=which)
    def tamper(self, number: int) -> None:
        self.world.tamper(self._index(number))

    @rule()
    def stall(self) -> None:
        self.world.stall_for_two_leases()

    @precondition(lambda self: self.world.stalled)
    @rule()
    def wake(self) -> None:
        self.world.wake()

    @precondition(lambda self: self.world.zombies)
    @rule(number=which)
    def zombie_speaks(self, number: int) -> None:
        self.world.zombie_speaks(self._index(number))

    @rule()
    def settle(self) -> None:
        """Quiet in the middle of it all; the faults go on afterwards from a known good state."""
        self.world.quiesce()

    def teardown(self) -> None:
        self.world.quiesce()


EventStreams.TestCase.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, derandomize=True
)
TestEventStreams = EventStreams.TestCase
