"""The planner under any sequence of events, against books kept by hand from its own actions."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.eviction import LruPolicy, Policy, PriorityPolicy, S3FifoConfig, S3FifoPolicy
from kvtier.core.planner import (
    Action,
    Block,
    BlockKey,
    Cancel,
    Demote,
    Drop,
    Fetch,
    Join,
    Outcome,
    PinId,
    Planner,
    PlannerConfig,
    Promote,
    Reason,
    Reuse,
    ScopeQuota,
    Selection,
    Serve,
    Skip,
    TierConfig,
    TransferId,
    Verdict,
    Wanted,
    Write,
    WritePolicy,
)
from kvtier.types import Fingerprint, InstanceId, ScopeId, Tier

DRAM, NVME, REDIS = Tier.DRAM, Tier.NVME, Tier.REDIS
DAY_BYTES = 40.0
SCOPES = [ScopeId("a"), ScopeId("b"), ScopeId("c")]
BLOCKS = [
    Block(
        BlockKey(Fingerprint(bytes([i % 2]) * 32), bytes([i]) * 32),
        1 + i % 5,
        SCOPES[i % 3],
        InstanceId(f"w{i % 2}"),
        Reuse.PREDICTED if i % 4 == 0 else Reuse.UNKNOWN,
    )
    for i in range(14)
]
SIZES = {b.key: b.size_bytes for b in BLOCKS}
SCOPE_OF = {b.key: b.scope_id for b in BLOCKS}
QUOTAS = (ScopeQuota(SCOPES[0], DRAM, 6), ScopeQuota(SCOPES[0], NVME, 9))


def make_policy(name: str) -> Policy[BlockKey]:
    if name == "s3fifo":
        return S3FifoPolicy(S3FifoConfig(capacity_blocks=6, small_ratio=0.3))
    return LruPolicy() if name == "lru" else PriorityPolicy()


def make_planner(name: str, nvme_writes: WritePolicy, redis_writes: WritePolicy) -> Planner:
    tiers = (
        TierConfig(DRAM, 16, high_share=0.9, low_share=0.7),
        TierConfig(
            NVME,
            25,
            high_share=0.9,
            low_share=0.7,
            write_policy=nvme_writes,
            write_bytes_per_day=DAY_BYTES,
            queued_bytes_max=12,
        ),
        TierConfig(REDIS, 20, write_policy=redis_writes),
    )
    config = PlannerConfig(
        tiers, QUOTAS, flights_max=5, demotions_max=4, touches_tracked_max=8, touch_half_life_s=50.0
    )
    return Planner(config, lambda tier, size: make_policy(name), 0.0)


class Shell:
    """Carries out actions on paper and checks each of them as it does."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.now = 0.0
        self.held: dict[Tier, set[BlockKey]] = {DRAM: set(), NVME: set(), REDIS: set()}
        self.live: dict[TransferId, Write | Fetch | Promote | Demote] = {}
        self.ended: list[TransferId] = []
        self.doomed: set[BlockKey] = set()
        self.pins: list[tuple[PinId, float, set[BlockKey]]] = []
        self.disk_bytes = 0
        self.log: list[Action] = []

    def target(self, transfer: Write | Fetch | Promote | Demote) -> Tier | None:
        if isinstance(transfer, Fetch):
            return None
        return transfer.target if isinstance(transfer, Demote) else DRAM

    def flights(self, key: BlockKey) -> list[Write | Fetch | Promote | Demote]:
        return [t for t in self.live.values() if t.key == key and not isinstance(t, Demote)]

    def carry_out(self, actions: list[Action]) -> None:
        self.log += actions
        for action in actions:
            match action:
                case Drop(key, tier, reason):
                    # Corrupt bytes and those of an emptied tier are of no use to a demotion.
                    assert reason in (Reason.CORRUPT, Reason.TIER_LOST) or not any(
                        isinstance(t, Demote) and t.key == key and t.source is tier
                        for t in self.live.values()
                    ), "a block was dropped before its demotion was written"
                    if reason not in (Reason.SELECTED, Reason.CORRUPT, Reason.TIER_LOST):
                        assert key in self.held[tier]
                        assert tier is not DRAM or key not in self.pinned()
                    self.held[tier].discard(key)
                case Write() | Fetch() | Promote():
                    assert not self.flights(action.key), "two flights of one key"
                    assert action.key not in self.doomed
                    self.live[action.transfer_id] = action
                case Demote(transfer_id, key, source, target):
                    assert key in self.held[source]
                    assert source < target
                    assert not any(
                        isinstance(t, Demote) and t.key == key for t in self.live.values()
                    )
                    self.live[transfer_id] = action
                    self.disk_bytes += SIZES[key] if target is NVME else 0
                case Cancel(transfer_id, key):
                    assert self.live[transfer_id].key == key
                    self.doomed.add(key)
                case Serve(key):
                    assert key in self.held[DRAM]
                    assert key not in self.doomed
                case Join(key):
                    assert self.flights(key)
                case Skip():
                    pass
        self.check()

    def end(self, transfer_id: TransferId, outcome: Outcome, started: bool) -> None:
        transfer = self.live.pop(transfer_id)
        target = self.target(transfer)
        if isinstance(transfer, Demote):
            if started:
                self.planner.started(transfer_id)
            elif outcome is Outcome.CANCELLED and transfer.target is NVME:
                self.disk_bytes -= SIZES[transfer.key]
        if outcome is Outcome.DONE and target is not None:
            self.held[target].add(transfer.key)
        if outcome is Outcome.MISSING and not isinstance(transfer, Write):
            self.held[transfer.source].discard(transfer.key)
        if not any(t.key == transfer.key for t in self.live.values()):
            self.doomed.discard(transfer.key)
        self.carry_out(self.planner.report(transfer_id, outcome, self.now))
        self.ended.append(transfer_id)

    def pinned(self) -> set[BlockKey]:
        """Keys that a live pin holds. A pin loses a key for good when that leaves DRAM."""
        for _, _, keys in self.pins:
            keys &= self.held[DRAM]
        return set().union(*(keys for _, _, keys in self.pins))

    def expire_pins(self) -> None:
        self.pins = [p for p in self.pins if p[1] > self.now]

    def check(self) -> None:
        planner = self.planner
        for tier, capacity in ((DRAM, 16), (NVME, 25), (REDIS, 20)):
            usage = planner.usage(tier)
            reserved = [t.key for t in self.live.values() if self.target(t) is tier]
            assert usage.resident_bytes == sum(SIZES[k] for k in self.held[tier])
            assert usage.blocks_count == len(self.held[tier])
            assert usage.reserved_bytes == sum(SIZES[k] for k in reserved)
            assert usage.resident_bytes + usage.reserved_bytes <= capacity
            assert 0 <= usage.leaving_bytes <= usage.resident_bytes
            for quota in QUOTAS:
                if quota.tier is tier:
                    mine = [k for k in self.held[tier] if SCOPE_OF[k] == quota.scope_id]
                    mine += [k for k in reserved if SCOPE_OF[k] == quota.scope_id]
                    used = planner.quota_used_bytes(quota.scope_id, tier)
                    assert used == sum(SIZES[k] for k in mine) <= quota.bytes_max
        assert self.disk_bytes <= DAY_BYTES * (1 + self.now / 86_400) + 1e-6
        assert planner.transfers_count == len(self.live)
        assert len([t for t in self.live.values() if not isinstance(t, Demote)]) <= 5
        assert len([t for t in self.live.values() if isinstance(t, Demote)]) <= 4
        known = set().union(*self.held.values(), {t.key for t in self.live.values()})
        assert planner.blocks_count == len(known)
        assert planner.pinned_bytes == sum(SIZES[k] for k in self.pinned()) <= 8


INDEX = st.integers(0, len(BLOCKS) - 1)
CHAIN = st.lists(INDEX, min_size=1, max_size=4)
COMMON = st.one_of(
    st.tuples(st.just("put"), CHAIN),
    st.tuples(st.just("put"), CHAIN),
    st.tuples(st.just("read"), CHAIN, st.sets(st.sampled_from([NVME, REDIS]), max_size=1)),
    st.tuples(st.just("done"), st.integers(0, 30)),
    st.tuples(st.just("done"), st.integers(0, 30)),
    st.tuples(st.just("touch"), CHAIN),
)
RARE = st.one_of(
    st.tuples(st.just("prefetch"), CHAIN),
    st.tuples(st.just("end"), st.integers(0, 30), st.sampled_from(Outcome), st.booleans()),
    st.tuples(st.just("again"), st.integers(0, 30), st.sampled_from(Outcome)),
    st.tuples(st.just("drop"), INDEX, st.sampled_from([0, 0, 0, 1, 2, 3])),
    st.tuples(
        st.just("verdict"),
        st.sampled_from([DRAM, NVME, REDIS]),
        st.sampled_from([Verdict.OPEN, Verdict.OPEN, Verdict.READ_ONLY, Verdict.DOWN]),
    ),
    st.tuples(st.just("vanish"), INDEX, st.sampled_from([NVME, REDIS])),
    st.tuples(st.just("lose"), st.sampled_from([DRAM, NVME, REDIS])),
    st.tuples(st.just("restore"), CHAIN, st.sampled_from([NVME, REDIS])),
    st.tuples(st.just("pin"), CHAIN, st.integers(1, 3000)),
    st.tuples(st.just("unpin"), st.integers(0, 10)),
    st.tuples(st.just("wait"), st.integers(1, 2000)),
)
STEP = COMMON | COMMON | RARE


def selection(i: int, kind: int) -> Selection:
    block = BLOCKS[i]
    return [
        Selection(keys=frozenset({block.key})),
        Selection(namespace=block.key.namespace, scope_id=block.scope_id),
        Selection(scope_id=block.scope_id),
        Selection(writer_id=block.writer_id),
    ][kind]


def take(shell: Shell, step: tuple[object, ...]) -> None:
    """One event; what it does to the paper books first where the tier itself acts."""
    planner, now = shell.planner, shell.now
    match step:
        case ("put", list(chain)):
            shell.carry_out(planner.put([BLOCKS[i] for i in chain], now))
        case ("read", list(chain), set(hinted)):
            wanted = [Wanted(BLOCKS[i], frozenset(hinted)) for i in chain]
            shell.carry_out(planner.read(wanted, now))
        case ("prefetch", list(chain)):
            shell.carry_out(planner.prefetch([Wanted(BLOCKS[i]) for i in chain], now))
        case ("touch", list(chain)):
            shell.carry_out(planner.touch([BLOCKS[i].key for i in chain], now))
        case ("end", int(i), Outcome() as outcome, bool(started)) if shell.live:
            shell.end(sorted(shell.live)[i % len(shell.live)], outcome, started)
        case ("done", int(i)) if shell.live:
            shell.end(sorted(shell.live)[i % len(shell.live)], Outcome.DONE, True)
        case ("again", int(i), Outcome() as outcome) if shell.ended:
            assert planner.report(shell.ended[i % len(shell.ended)], outcome, now) == []
            shell.check()
        case ("drop", int(i), int(kind)):
            shell.carry_out(planner.drop(selection(i, kind)))
        case ("verdict", Tier() as tier, Verdict() as verdict):
            planner.set_verdict(tier, verdict)
        case ("vanish", int(i), Tier() as tier):
            shell.held[tier].discard(BLOCKS[i].key)
            planner.vanished([BLOCKS[i].key], tier)
            shell.check()
        case ("lose", Tier() as tier):
            shell.held[tier].clear()
            planner.tier_lost(tier)
            shell.check()
        case ("restore", list(chain), Tier() as tier):
            shell.held[tier] |= {BLOCKS[i].key for i in chain}
            shell.carry_out(planner.restored([BLOCKS[i] for i in dict.fromkeys(chain)], tier, now))
        case ("pin", list(chain), int(seconds)):
            pinned = planner.pin([BLOCKS[i].key for i in chain], 50, float(seconds), now)
            assert set(pinned.keys) <= shell.held[DRAM]
            shell.expire_pins()
            shell.pins.append((pinned.pin_id, now + seconds, set(pinned.keys)))
            shell.check()
        case ("unpin", int(i)) if shell.pins:
            pin_id, _, _ = shell.pins.pop(i % len(shell.pins))
            planner.unpin(pin_id)
            planner.unpin(pin_id)
            shell.check()
        case ("wait", int(seconds)):
            shell.now += seconds
            shell.expire_pins()
            shell.carry_out(planner.tick(shell.now))
        case _:
            pass


@settings(max_examples=200, deadline=None)
@given(
    policy=st.sampled_from(["lru", "s3fifo", "priority"]),
    nvme_writes=st.sampled_from(WritePolicy),
    redis_writes=st.sampled_from(WritePolicy),
    steps=st.lists(STEP, min_size=30, max_size=80),
)
def test_books_budgets_quotas_and_holds_are_kept_whatever_happens(
    policy: str,
    nvme_writes: WritePolicy,
    redis_writes: WritePolicy,
    steps: list[tuple[object, ...]],
) -> None:
    shell = Shell(make_planner(policy, nvme_writes, redis_writes))
    for step in steps:
        take(shell, step)
    # Once every transfer has ended and every block is dropped, nothing is left.
    while shell.live:
        shell.end(min(shell.live), Outcome.CANCELLED, True)
    for scope_id in SCOPES:
        shell.carry_out(shell.planner.drop(Selection(scope_id=scope_id)))
    assert not any(shell.held.values())
    assert shell.planner.blocks_count == shell.planner.transfers_count == 0
    assert shell.planner.pinned_bytes == 0


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(STEP, min_size=30, max_size=80))
def test_same_events_give_the_same_actions(steps: list[tuple[object, ...]]) -> None:
    logs = []
    for _ in range(2):
        shell = Shell(make_planner("priority", WritePolicy.ON_REUSE, WritePolicy.ON_EVICT))
        for step in steps:
            take(shell, step)
        logs.append(shell.log)
    assert logs[0] == logs[1]


def random_step(rng: random.Random) -> tuple[object, ...]:
    """Mostly traffic over a skewed choice of blocks, now and then a fault."""
    start = min(rng.randrange(11), rng.randrange(11))
    chain = list(range(start, start + rng.randint(1, 3)))
    i = rng.randrange(31)
    common: list[tuple[object, ...]] = [
        ("put", chain),
        ("read", chain, set(rng.sample([NVME, REDIS], rng.randint(0, 1)))),
        ("read", chain, set()),
        ("done", i),
        ("done", i),
        ("done", i),
        ("touch", chain),
        ("wait", rng.randint(1, 900)),
    ]
    rare: list[tuple[object, ...]] = [
        ("prefetch", chain),
        ("end", i, rng.choice(list(Outcome)), rng.random() < 0.5),
        ("again", i, rng.choice(list(Outcome))),
        ("drop", start, 0),
        ("drop", start, rng.randrange(4)),
        ("verdict", rng.choice([NVME, REDIS]), rng.choice([Verdict.READ_ONLY, Verdict.DOWN])),
        ("verdict", NVME, Verdict.OPEN),
        ("verdict", REDIS, Verdict.OPEN),
        ("vanish", start, rng.choice([NVME, REDIS])),
        ("restore", chain, NVME),
        ("pin", chain, rng.randint(1, 3000)),
        ("unpin", i),
    ]
    if rng.random() < 0.003:
        return ("lose", rng.choice([DRAM, NVME, REDIS]))
    return rng.choice(rare if rng.random() < 0.2 else common)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "priority"])
@pytest.mark.parametrize("nvme_writes", WritePolicy)
def test_books_are_kept_over_a_long_run_in_which_everything_happens(
    policy: str, nvme_writes: WritePolicy
) -> None:
    rng = random.Random(f"{policy} {nvme_writes.value}")
    shell = Shell(make_planner(policy, nvme_writes, WritePolicy.ON_EVICT))
    for _ in range(8_000):
        take(shell, random_step(rng))
    seen = Counter(type(action) for action in shell.log)
    assert min(seen[kind] for kind in (Write, Serve, Fetch, Promote, Join, Demote, Drop)) > 20
    reasons = {action.reason for action in shell.log if isinstance(action, Drop)}
    assert reasons >= {Reason.COPY_ELSEWHERE, Reason.SELECTED, Reason.CORRUPT}
