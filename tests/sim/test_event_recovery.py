"""Single stories of recovery in a quiet world, where the cost of each can be counted."""

from kvtier.core.event_messages import Heartbeat
from kvtier.core.events import DegradedReason, Verdict
from kvtier.types import Tier, Trust
from tests.sim.event_world import LEASE_S, Fate, Reached, World


def settled_world(indexes_count: int = 1) -> World:
    world = World(indexes_count)
    world.store(Tier.GPU, 1, 0, 5)
    world.quiesce()
    return world


def test_a_publisher_that_stalls_for_two_leases_is_hidden_and_returns_without_a_snapshot() -> None:
    world = settled_world()
    (index,) = world.indexes
    before = world.publication.stats.snapshots_begun
    world.stall_for_two_leases()
    assert index.acceptor.degraded_reasons() == {DegradedReason.HIDDEN}
    world.wake()
    world.beat(index)
    assert len(world.links[index.name].to_index) == 1
    world.deliver_to_index(index, 0, Fate.DELIVER)
    assert index.acceptor.trust is Trust.EXACT
    world.quiesce()
    assert world.publication.stats.snapshots_begun == before
    assert world.publication.stats.resends == 0
    assert world.reached[Reached.RESUME_WITHOUT_SNAPSHOT] == 1


def test_what_changed_during_a_stall_follows_as_live_batches() -> None:
    world = settled_world()
    (index,) = world.indexes
    before = world.publication.stats.snapshots_begun
    world.stall_for_two_leases()
    world.store(Tier.GPU, 2, 0, 3)
    world.quiesce()
    assert index.blocks == world.truth
    assert world.publication.stats.snapshots_begun == before


def test_a_publisher_away_for_longer_than_the_grace_period_needs_one_snapshot() -> None:
    world = settled_world()
    (index,) = world.indexes
    before = world.publication.stats.snapshots_begun
    world.stall_for_two_leases()
    world.advance(3 * LEASE_S)
    assert not index.blocks
    world.quiesce()
    assert index.blocks == world.truth
    assert world.publication.stats.snapshots_begun == before + 1


def test_one_lost_last_batch_costs_one_resend_and_no_snapshot() -> None:
    world = settled_world()
    (index,) = world.indexes
    before = world.publication.stats.snapshots_begun
    world.store(Tier.GPU, 2, 0, 3)
    world.lose_last_batch(index)
    world.quiesce()
    assert world.publication.stats.resends == 1
    assert world.publication.stats.snapshots_begun == before


def test_losing_one_index_replica_changes_nothing_at_the_other() -> None:
    world = settled_world(indexes_count=2)
    lost, other = world.indexes
    untouched = dict(other.acceptor.counts)
    world.restart_index(lost)
    world.advance(0.5)
    world.poll(world.indexes[0], 64)
    assert other.acceptor.counts == untouched
    assert other.blocks == world.truth
    world.quiesce()
    assert world.indexes[0].blocks == world.truth


def test_drift_is_repaired_by_one_snapshot() -> None:
    world = settled_world()
    (index,) = world.indexes
    before = world.publication.stats.snapshots_begun
    world.tamper(index)
    world.quiesce()
    assert index.blocks == world.truth
    assert index.acceptor.counts[Verdict.DRIFT] == 1
    assert world.publication.stats.snapshots_begun == before + 1


def test_a_quiet_world_says_nothing_but_heartbeats() -> None:
    world = settled_world()
    (index,) = world.indexes
    world.poll(index, 64)
    world.beat(index)
    (message,) = world.links[index.name].to_index
    assert isinstance(message, Heartbeat)
    assert message.digest is not None
