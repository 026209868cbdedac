"""The version before this one beside this one: each service in either, in every mixture.

Nothing may fail between them: at most something is computed again. Between these two versions
frames, arena and disk are the same, so more is asked: they serve each other's blocks.
"""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from kvtier.types import Tier
from tests.harness.processes import HarnessError, Process, ProcessRunner
from tests.harness.valkey import requires_valkey, start_valkey
from tests.harness.waiting import eventually, eventually_async
from tests.support.previous_version import previous_command, why_not
from tests.support.store_cluster import StoreProcess, get, put, start_store
from tests.support.whole_fleet import Asked, WholeFleet
from tests.support.worker_cluster import Expected, prompt_of

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
EXPECTED = Expected()
END_S = 30.0
HELD = 320
PROMPT = prompt_of(1, HELD + 1)
CLIENTS = ("alice", "bob")
NUMBERS = range(40)


@pytest.fixture(scope="module")
def previous() -> str:
    """The command of the version before."""
    return str(previous_command())


def run_as(one: Process | StoreProcess, command: str) -> None:
    """End a process as an operator would, and start it in a version on the same files."""
    process = one if isinstance(one, Process) else one.process
    process.terminate()
    try:
        assert process.wait(END_S) == 0, process.log_tail()
    except HarnessError:
        # A store of that version misses the signal if it is looking after Redis at that moment.
        assert process.launch.argv[0] == str(previous_command()), process.log_tail()
        process.kill()
    process.launch = replace(process.launch, argv=(command, *process.launch.argv[1:]))
    process.restart()


@dataclass
class Mixture:
    """A fleet whose services change versions one by one."""

    fleet: WholeFleet
    commands: tuple[str, str]
    """Of this version, and of the one before."""
    others: dict[str, str] = field(default_factory=dict)
    """What the other model answered first, by tenant: nothing else is right later."""
    asked: int = 0

    def switch(self, service: str, is_previous: bool) -> None:
        fleet = self.fleet
        processes = {
            "index": fleet.indexes,
            "store": [fleet.store],
            "worker": list(fleet.workers.values()),
            "router": [fleet.router],
        }[service]
        for process in processes:  # one at a time: the others go on meanwhile
            run_as(process, self.commands[is_previous])

    def ask(self, tenant: str) -> Asked:
        told = self.fleet.ask(tenant, PROMPT, 6)
        assert told.status == 200, told.answer.body
        assert told.texts == [EXPECTED.text(PROMPT, 6)]
        self.asked += 1
        return told

    def serves(self) -> None:
        """Every answer is right, and what is known is found again, in L1 and where it was sent."""
        for tenant in CLIENTS:
            eventually(
                lambda tenant=tenant: self._is_found(self.ask(tenant)),  # type: ignore[misc]
                60,
                f"{tenant}'s prompt is known where it is sent",
            )
            told = self.fleet.ask(tenant, PROMPT, 6, model="other")
            assert told.status == 200, told.answer.body
            [text] = told.texts
            assert self.others.setdefault(tenant, text) == text

    def _is_found(self, told: Asked) -> bool:
        return told.cached.get("gpu", 0) == HELD and told.matched == HELD


def walk(bits: int) -> list[tuple[int, int]]:
    """A closed walk over all mixtures that changes one service a step: (service, its value)."""
    steps, code = [], 0
    for number in range(1, (1 << bits) + 1):
        following = (number ^ number >> 1) & ((1 << bits) - 1) if number < 1 << bits else 0
        changed = (code ^ following).bit_length() - 1
        steps.append((changed, following >> changed & 1))
        code = following
    return steps


def test_the_walk_visits_every_mixture_and_returns() -> None:
    code, seen = 0, {0}
    for changed, value in walk(4):
        assert (code >> changed & 1) != value
        code ^= 1 << changed
        seen.add(code)
    assert seen == set(range(16))
    assert code == 0


def test_every_mixture_of_services_serves_every_request(
    processes: ProcessRunner, tmp_path: Path, previous: str
) -> None:
    fleet = WholeFleet(processes, tmp_path, tokens_per_s=2_000.0)
    fleet.start()
    mixture = Mixture(fleet, (fleet.store.launch.argv[0], previous))
    mixture.serves()
    services = ("index", "store", "worker", "router")
    from_store = 0
    for changed, value in walk(len(services)):
        mixture.switch(services[changed], bool(value))
        if services[changed] == "worker":  # their L1 was empty: what they have came by the store
            from_store += bool(mixture.ask(CLIENTS[0]).cached)
        mixture.serves()
    assert from_store > 0, "blocks went from one version's worker to the other's"
    assert mixture.asked >= 16 * len(CLIENTS)
    fleet.clean_logs()


def run_in(store: StoreProcess, command: str) -> None:
    """Kill a store and start it in a version."""
    store.process.kill()
    launch = store.process.launch
    store.process.launch = replace(launch, argv=(command, *launch.argv[1:]))
    store.process.restart()


async def hits(store: StoreProcess, tier: Tier) -> int:
    return next((one.count for one in (await store.tier(tier)).gets if one.name == "hit"), 0)


async def reads_all(store: StoreProcess, tier: Tier) -> None:
    """A client beside it and one of elsewhere get what was written, the first time from a tier."""
    async with store.client(remote=True) as client:
        assert await get(client, NUMBERS) == [0] * len(NUMBERS)
    assert await hits(store, tier) >= len(NUMBERS)
    async with store.client() as client:
        assert await get(client, NUMBERS) == [0] * len(NUMBERS)


@requires_valkey
@pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "rollback"])
async def test_disk_and_redis_of_one_version_are_read_by_the_other(
    processes: ProcessRunner, tmp_path: Path, previous: str, is_upgrade: bool
) -> None:
    valkey = await asyncio.to_thread(start_valkey, processes)
    redis = {"url": valkey.url, "write_policy": "on_seal"}
    writer, beside = [
        await asyncio.to_thread(start_store, processes, tmp_path / name, name, redis=redis)
        for name in ("writer", "beside")
    ]
    current = writer.process.launch.argv[0]
    of_writer, of_reader = (previous, current) if is_upgrade else (current, previous)
    await asyncio.to_thread(run_as, writer, of_writer)
    await asyncio.to_thread(run_as, beside, of_reader)
    async with writer.client() as client:
        assert all(await put(client, NUMBERS))

    async def is_everywhere() -> bool:
        tiers = [await writer.tier(tier) for tier in (Tier.NVME, Tier.REDIS)]
        return all(tier.blocks >= len(NUMBERS) for tier in tiers)

    await eventually_async(is_everywhere, 30, "all of it is on disk and in Redis")
    await reads_all(beside, Tier.REDIS)
    await asyncio.to_thread(run_as, writer, of_reader)
    await reads_all(writer, Tier.NVME)
    writer.clean_log()
    beside.clean_log()


async def test_stores_killed_in_turns_of_versions_leave_a_disk_that_the_next_can_trust(
    processes: ProcessRunner, tmp_path: Path, previous: str
) -> None:
    store = await asyncio.to_thread(start_store, processes, tmp_path / "data")
    commands = (store.process.launch.argv[0], previous)
    held: list[int] = []
    for life in range(6):
        is_killed = life % 3 == 1
        await asyncio.to_thread(run_in if is_killed else run_as, store, commands[life % 2])
        async with store.client() as client:
            if held:
                found = dict(zip(held, await get(client, held), strict=True))
                assert set(found.values()) <= {0, None}
                held = [number for number, version in found.items() if version == 0]
                assert is_killed or len(held) == len(found), "only a kill may lose what is young"
                assert set(range(len(NUMBERS))) <= set(held), "what was old is there"
            fresh = range(life * len(NUMBERS), (life + 1) * len(NUMBERS))
            assert all(await put(client, fresh))
            held.extend(fresh)
        if life == 0:
            await asyncio.to_thread(run_as, store, commands[0])  # from here on it is old
    store.clean_log()
