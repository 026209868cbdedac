"""Poison in a real Redis: whoever can write there writes what no checksum can tell from a block.

Frames find accidents. A sealed tier also finds an attacker, and a writer that turns out to be bad
is dropped from every tier at once.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import redis

from kvtier.config import Secret
from kvtier.core.checksum import checksum
from kvtier.core.frame import HEADER_BYTES, FrameHeader, parse_header
from kvtier.core.planner import WritePolicy
from kvtier.errors import FrameFault
from kvtier.ports import BlockOwner, GetStatus, PutRequest, PutStatus, RemovalCause
from kvtier.tiers.redis.config import RedisConfig, parse_url
from kvtier.tiers.redis.naming import block_key
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.values import scope_in, surround
from kvtier.tiers.scope_keys import FileScopeKeys
from kvtier.tiers.sealed import SEAL_BYTES, SealedTier
from kvtier.types import ScopeId, Tier
from kvtier.wire import blocks
from kvtier.wire import messages as pb
from kvtier_services.store.config import NvmeSection, RedisSection, StoreConfig
from kvtier_services.store.main import RunningStore
from tests.harness.processes import ProcessRunner
from tests.harness.valkey import Valkey, requires_valkey, start_valkey
from tests.harness.waiting import eventually_async
from tests.support.store_service import BLOCK, MIB, Client, a_store, names, small_store
from tests.tiers.contract import get, name_of, payload_of, put, put_of, soon

pytestmark = requires_valkey

TENANT, OTHER = "tenant", "other tenant"
BAD, GOOD = 0xBAD, 7


class Attacker:
    """Reads and writes values of a Redis, and knows how ours are made."""

    def __init__(self, server: Valkey) -> None:
        self._server = redis.Redis(port=server.port)

    def value(self, number: int) -> bytes:
        return cast(bytes, self._server.get(block_key(name_of(number))))

    def payload(self, number: int) -> bytes:
        value = self.value(number)
        return value[HEADER_BYTES:][: parse_header(value[:HEADER_BYTES]).payload_bytes]

    def forge(self, number: int, payload: bytes, writer_id: int | None = None) -> None:
        """Put other bytes under a block's name: header, checksums and scope are right for them."""
        value = self.value(number)
        head = value[:HEADER_BYTES]
        header, scope = parse_header(head), scope_in(head, value).encode()
        writer = header.writer_id if writer_id is None else writer_id
        made = FrameHeader(header.name, writer, len(payload), checksum(payload))
        before, after = surround(made, scope)
        self._server.set(block_key(name_of(number)), before + payload + after)

    def holds(self, *numbers: int) -> list[bool]:
        return [bool(self._server.exists(block_key(name_of(n)))) for n in numbers]

    def close(self) -> None:
        self._server.close()


def patient_tier(server: Valkey) -> RedisTier:
    """For servers that answer: the machine may be busy."""
    url = parse_url(server.url)
    return RedisTier(RedisConfig(url, connect_timeout_s=30.0, reply_timeout_s=30.0))


def changed(payload: bytes) -> bytes:
    """The same but for one bit in its middle."""
    middle = len(payload) // 2
    return payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]


async def test_without_seals_a_forged_value_with_a_right_checksum_is_believed(
    processes: ProcessRunner,
) -> None:
    """What the tests below would not show if the forgeries were bad ones."""
    server = start_valkey(processes)
    tier = patient_tier(server)
    attacker = Attacker(server)
    await put(tier, put_of(1), put_of(2))
    attacker.forge(1, changed(attacker.payload(1)))
    attacker.forge(2, attacker.payload(1))
    for n in (1, 2):
        result = await get(tier, name_of(n))
        assert result.payload is not None
        assert bytes(result.payload) == changed(payload_of(1))
    await tier.close()
    attacker.close()


async def test_a_sealed_value_that_was_forged_is_a_miss_is_counted_and_is_replaced(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    server = start_valkey(processes)
    tier = SealedTier(patient_tier(server), FileScopeKeys(tmp_path / "keys"))
    attacker = Attacker(server)
    owner, other = BlockOwner(GOOD, ScopeId(TENANT)), BlockOwner(GOOD, ScopeId(OTHER))
    puts = [PutRequest(name_of(n), payload_of(n), owner) for n in range(1, 7)]
    assert set(await put(tier, *puts, PutRequest(name_of(9), payload_of(9), other))) == {"stored"}
    sealed = attacker.payload(1)
    attacker.forge(1, changed(sealed))
    attacker.forge(2, sealed)  # of another block
    attacker.forge(3, sealed[:8] + payload_of(3) + bytes(SEAL_BYTES - 8))  # no seal at all
    attacker.forge(4, attacker.payload(4), writer_id=BAD)
    attacker.forge(5, attacker.payload(9))  # of another tenant: no key of this one
    forged = range(1, 6)
    statuses = [(await get(tier, name_of(n))).status for n in forged]
    assert statuses == [GetStatus.CORRUPT] * 4 + [GetStatus.MISS]
    assert tier.stats().corrupt[FrameFault.PAYLOAD_CHECKSUM] == 4
    assert tier.stats().removals[RemovalCause.CORRUPT] == 4
    assert attacker.holds(*forged, 6) == [False] * 5 + [True]
    for n in forged:
        assert await put(tier, puts[n - 1]) == [PutStatus.STORED]
    for n in range(1, 7):
        result = await get(tier, name_of(n))
        assert result.payload is not None
        assert bytes(result.payload) == payload_of(n)
    await tier.close()
    attacker.close()


def sealed_store(directory: Path, server: Valkey) -> StoreConfig:
    """All three tiers, everything written down at once, sealed below DRAM."""
    nvme = NvmeSection(
        bytes_max=64 * MIB,
        write_policy=WritePolicy.ON_SEAL,
        seal_keys_file=directory / "nvme.keys",
        deadline_ms=60_000,
    )
    shared = RedisSection(
        url=Secret(server.url),
        write_policy=WritePolicy.ON_SEAL,
        touches_min=1,
        deadline_ms=60_000,
        seal_keys_file=directory / "redis.keys",
    )
    return small_store(directory, nvme=nvme, redis=shared)


async def put_by(client: Client, writer_id: int, numbers: Sequence[int]) -> None:
    payloads = {n: payload_of(n, BLOCK) for n in numbers}
    writer = pb.BlockWriter(writer_id=writer_id, scope=TENANT)
    assert set((await client.put(payloads, writer=writer))[0]) == {"stored"}


async def written(
    running: RunningStore,
    client: Client,
    attacker: Attacker,
    writer_id: int,
    numbers: Sequence[int],
) -> None:
    """Put blocks and wait until they are in Redis too; again where its first connection failed."""
    await put_by(client, writer_id, numbers)

    async def are_there() -> bool:
        assert await running.store.settled(soon())
        missing = [n for n in numbers if attacker.holds(n) == [False]]
        if missing:
            named = pb.DropBlocksRequest(names=blocks.names_to(names(*missing)))
            await client.ask("Drop", named)
            await put_by(client, writer_id, missing)
        return not missing

    await eventually_async(are_there, 60, "the blocks are in Redis")


async def found(client: Client, numbers: Sequence[int]) -> list[int]:
    """Numbers of the blocks that some tier says it has, or that are read; none is read wrong."""
    request = pb.ContainsRequest(names=blocks.names_to(names(*numbers)), shared=True)
    tiers = (await client.ask("Contains", request)).tiers
    payloads = await client.get(numbers, BLOCK)
    for n, payload in zip(numbers, payloads, strict=True):
        assert payload in (None, payload_of(n, BLOCK))
    return [n for n, t, p in zip(numbers, tiers, payloads, strict=True) if t or p is not None]


async def test_a_store_gives_no_poison_and_its_page_says_so(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    server = start_valkey(processes)
    attacker = Attacker(server)
    config = sealed_store(tmp_path, server)
    async with a_store(config) as (running, client):
        await written(running, client, attacker, GOOD, range(1, 5))
    assert attacker.holds(1, 2, 3, 4) == [True] * 4
    attacker.forge(1, changed(attacker.payload(1)))
    attacker.forge(2, attacker.payload(3))
    alone = replace(config, nvme=NvmeSection(enabled=False))
    async with a_store(alone) as (running, client):
        poisoned = 'kvtier_corrupt_blocks_total{fault="payload_checksum",tier="redis"} 2.0'

        async def are_read() -> bool:  # its first connection may fail on a busy machine
            first, second, third, fourth = await client.get([1, 2, 3, 4], BLOCK)
            assert (first, second) == (None, None)
            page = running.metrics.render().decode()
            return (third, fourth, poisoned in page) == (
                payload_of(3, BLOCK), payload_of(4, BLOCK), True,
            )  # fmt: skip

        await eventually_async(are_read, 60, "two are given, and two counted as corrupt")
        assert attacker.holds(1, 2, 3) == [False, False, True]
    attacker.close()


async def test_dropping_a_writer_takes_its_blocks_out_of_every_tier(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    server = start_valkey(processes)
    attacker = Attacker(server)
    config = sealed_store(tmp_path, server)
    bad, good, elsewhere = range(1, 6), range(11, 14), range(21, 24)
    async with a_store(config) as (running, client):
        await written(running, client, attacker, BAD, bad)
        await written(running, client, attacker, GOOD, good)
        keys = FileScopeKeys(tmp_path / "redis.keys")  # another node's store has the same
        other = SealedTier(patient_tier(server), keys)
        owner = BlockOwner(BAD, ScopeId(TENANT))
        await put(other, *[PutRequest(name_of(n), payload_of(n, BLOCK), owner) for n in elsewhere])
        await other.close()
        assert running.store.stats().tiers[Tier.NVME].stats.blocks == len(bad) + len(good)
        assert all(attacker.holds(*bad, *good, *elsewhere))
        everything = [*bad, *good, *elsewhere]

        async def are_found() -> bool:
            return await found(client, everything) == everything

        await eventually_async(are_found, 60, "all are found")

        async def is_dropped() -> bool:  # what could not be asked must be asked again
            return not (await client.ask("Drop", pb.DropBlocksRequest(writer_id=BAD))).undone

        await eventually_async(is_dropped, 60, "every tier was asked")
        assert not any(attacker.holds(*bad, *elsewhere))
        assert await found(client, [*bad, *good, *elsewhere]) == [*good]
        assert running.store.stats().tiers[Tier.NVME].stats.blocks == len(good)
    async with a_store(config) as (_, client):

        async def good_ones_are_found() -> bool:
            there = await found(client, everything)
            assert set(there) <= set(good)
            return there == [*good]

        await eventually_async(good_ones_are_found, 60, "the other writer's are found")
    attacker.close()
