"""A seeded driver for `event_world`: the same seed is the same run, on every machine."""

import random
from collections import Counter
from collections.abc import Callable

from kvtier.core.events import Acceptor, AcceptorConfig
from kvtier.core.publication import Publication
from tests.sim.event_world import TIERS, Carried, Fate, Index, Reached, World

AcceptorType = Callable[[AcceptorConfig], Acceptor[Carried]]

REORDER_WINDOW = 8
STEPS = 250


class Run:
    """One seed: some kind of weather, `STEPS` steps in it, then quiet."""

    def __init__(
        self,
        seed: int,
        acceptor_type: AcceptorType = Acceptor,
        publication_type: type[Publication] = Publication,
    ) -> None:
        self.rng = random.Random(seed)
        self.world = World(self.rng.choice((1, 1, 2)), acceptor_type, publication_type)
        self.drop = self.rng.choice((0.0, 0.05, 0.3))
        self.duplicate = self.rng.choice((0.0, 0.05, 0.3))
        self.window = self.rng.choice((1, 1, 3, REORDER_WINDOW))
        self.faults = self.rng.choice((0.0, 0.02, 0.08))
        self.stall_left = 0

    def go(self) -> Counter[Reached]:
        """Raises AssertionError with the validator's name; returns what the run has reached."""
        for _ in range(STEPS):
            if self.rng.random() < self.faults:
                self._fault()
            else:
                self._step()
            self.stall_left -= 1
            if self.stall_left == 0:
                self.world.wake()
        if self.rng.random() < 0.5:
            self.world.wake()
            self.world.lose_last_batch(self._index())
        self.world.quiesce()
        return self.world.reached

    def _index(self) -> Index:
        return self.rng.choice(self.world.indexes)

    def _fate(self) -> Fate:
        draw = self.rng.random()
        if draw < self.drop:
            return Fate.DROP
        return Fate.DUPLICATE if draw < self.drop + self.duplicate else Fate.DELIVER

    def _step(self) -> None:
        rng, world = self.rng, self.world
        draw = rng.random()
        if draw < 0.2:
            self._engine()
        elif draw < 0.35:
            world.poll(self._index(), rng.choice((1, 3, 64)))
        elif draw < 0.65:
            world.deliver_to_index(self._index(), rng.randrange(self.window), self._fate())
        elif draw < 0.85:
            world.deliver_to_publisher(self._index(), rng.randrange(self.window), self._fate())
        elif draw < 0.95:
            world.advance(rng.choice((0.1, 0.5)))
            for index in world.indexes:
                world.beat(index)
        else:
            world.zombie_speaks(self._index())

    def _engine(self) -> None:
        rng, world = self.rng, self.world
        draw = rng.random()
        tier = rng.choice(TIERS)
        if draw < 0.6:
            world.store(tier, rng.randrange(1, 4), rng.choice((0, 0, 2, 4)), rng.randrange(1, 9))
        elif draw < 0.94:
            held = sorted(name for place, name in world.truth if place == tier)
            names = rng.sample(held, min(len(held), rng.randrange(1, 5)))
            world.remove(tier, names or [rng.randrange(1, 1000)])
        else:
            world.clear(rng.choice((tier, tier, None)))

    def _fault(self) -> None:
        rng, world = self.rng, self.world
        match rng.randrange(7):
            case 0:
                world.restart_publisher(becomes_zombie=rng.random() < 0.6)
            case 1:
                world.restart_index(self._index())
            case 2:
                world.reconnect(self._index())
            case 3 | 4:
                world.tamper(self._index())
            case 5:
                world.stall_for_two_leases()
                self.stall_left = rng.randrange(1, 10)
            case _:
                world.advance(rng.choice((1.0, 12.0)))


def run(
    seed: int,
    acceptor_type: AcceptorType = Acceptor,
    publication_type: type[Publication] = Publication,
) -> Counter[Reached]:
    """Run one seed; the message of a failure names it."""
    try:
        return Run(seed, acceptor_type, publication_type).go()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
