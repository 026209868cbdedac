"""What every tier promises, as tests: subclass `TierContract` (or `LocalTierContract`) with a
`backend` fixture.

    class TestMyTier(LocalTierContract):
        @pytest.fixture
        def backend(self) -> Backend: ...

A backend opens tiers and damages what they keep, behind their backs.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.core.checksum import checksum
from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import CallerError, DeadlineError, FrameFault, LimitError, UnavailableError
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.ports import (
    BlockOwner,
    BlockTier,
    ByNames,
    ByNamespace,
    ByScope,
    ByWriter,
    GetRequest,
    GetResult,
    GetStatus,
    LocalTier,
    PutRequest,
    PutStatus,
    RemovalCause,
    Selection,
    TierObserver,
)
from kvtier.types import Fingerprint, ScopeId, Tier

NAMESPACE = Fingerprint(b"n" * 32)
OTHER_NAMESPACE = Fingerprint(b"m" * 32)
BLOCK_BYTES = 4096
"""Payload of most tests; a tier of `SMALL_BYTES` holds at least `SMALL_BLOCKS` of them."""
SMALL_BYTES = 256 << 10
SMALL_BLOCKS = 8
LONG_S = 30.0


class Backend(Protocol):
    """How the suite opens and damages one kind of tier."""

    payload_bytes_max: int
    """Longest payload that a tier of SMALL_BYTES could hold at all."""

    async def open(
        self, bytes_max: int = SMALL_BYTES, observer: TierObserver | None = None
    ) -> BlockTier:
        """A new, empty tier; the test closes it (or does not: clean up after it)."""
        ...

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        """Flip a bit of the stored frame (header from bit 0, payload from bit 1024)."""
        ...

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        """Put a copy of the stored frame of `frame` where the one of `name` is stored.

        Both have payloads of one length.
        """
        ...


@dataclass
class Journal:
    """An observer that keeps the set of what can be read, as the tier tells it."""

    held: set[FrameName] = field(default_factory=set)
    removed: list[tuple[FrameName, RemovalCause]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def on_tier_stored(self, tier: Tier, names: Sequence[FrameName]) -> None:
        for name in names:
            if name in self.held:
                self.faults.append("stored twice")
            self.held.add(name)

    def on_tier_removed(self, tier: Tier, names: Sequence[FrameName], cause: RemovalCause) -> None:
        for name in names:
            if name not in self.held:
                self.faults.append("removed without being there")
            self.held.discard(name)
            self.removed.append((name, cause))


def soon() -> float:
    return time.monotonic() + LONG_S


def past() -> float:
    return time.monotonic() - 1.0


def name_of(number: int, namespace: Fingerprint = NAMESPACE) -> FrameName:
    return FrameName(KeyKind.PREFIX_KEY, number.to_bytes(32, "little"), namespace)


def payload_of(number: int, size: int = BLOCK_BYTES, version: int = 0) -> bytes:
    """Bytes that say whose they are: another number or version gives others."""
    return random.Random(number << 8 | version).randbytes(size)


def put_of(number: int, size: int = BLOCK_BYTES, version: int = 0) -> PutRequest:
    return PutRequest(name_of(number), payload_of(number, size, version), BlockOwner(7))


async def put(tier: BlockTier, *requests: PutRequest) -> list[PutStatus]:
    return [result.status for result in await tier.put_many(requests, soon())]


async def get(tier: BlockTier, name: FrameName, payload_bytes: int | None = None) -> GetResult:
    return (await tier.get_many([GetRequest(name, None, payload_bytes)], soon()))[0]


def bytes_of(result: GetResult) -> bytes | None:
    return None if result.payload is None else bytes(result.payload)


async def get_bytes(tier: BlockTier, name: FrameName) -> bytes | None:
    """What a hit gives, or None."""
    return bytes_of(await get(tier, name))


async def get_status(tier: BlockTier, name: FrameName) -> GetStatus:
    return (await get(tier, name)).status


async def holds(tier: BlockTier, *names: FrameName) -> list[bool]:
    return await tier.contains(names, soon())


class TierContract:
    """The promises of `BlockTier`."""

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError

    @pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, BLOCK_BYTES, 20_003])
    async def test_what_was_put_comes_back_whole(self, backend: Backend, size: int) -> None:
        tier = await backend.open()
        assert await put(tier, put_of(1, size)) == [PutStatus.STORED]
        into = memoryview(bytearray(size))
        requests = [GetRequest(name_of(1), into, size), GetRequest(name_of(1), None, size)]
        filled, fresh = await tier.get_many(requests, soon())
        assert filled.status is GetStatus.HIT
        assert fresh.status is GetStatus.HIT
        assert bytes(into) == bytes_of(fresh) == payload_of(1, size)
        assert filled.header is not None
        assert filled.header.name == name_of(1)
        assert filled.header.writer_id == 7
        assert filled.header.payload_bytes == size
        await tier.close()

    async def test_a_chain_of_blocks_is_put_and_read_in_one_batch(self, backend: Backend) -> None:
        tier = await backend.open()
        numbers = range(SMALL_BLOCKS)
        assert await put(tier, *map(put_of, numbers)) == [PutStatus.STORED] * SMALL_BLOCKS
        results = await tier.get_many([GetRequest(name_of(n)) for n in numbers], soon())
        assert [bytes_of(result) for result in results] == [payload_of(n) for n in numbers]
        stats = tier.stats()
        assert stats.blocks == SMALL_BLOCKS
        assert stats.bytes >= SMALL_BLOCKS * BLOCK_BYTES
        assert stats.gets[GetStatus.HIT] == stats.puts[PutStatus.STORED] == SMALL_BLOCKS
        assert stats.payload_bytes_read == stats.payload_bytes_written == SMALL_BLOCKS * BLOCK_BYTES
        await tier.close()

    async def test_a_batch_without_blocks_is_done_at_once(self, backend: Backend) -> None:
        tier = await backend.open()
        assert await tier.get_many([], soon()) == []
        assert await tier.put_many([], soon()) == []
        assert await tier.contains([], soon()) == []
        assert await tier.drop(ByNames(()), soon()) == 0
        await tier.close()

    async def test_every_kind_of_buffer_is_taken(self, backend: Backend) -> None:
        tier = await backend.open()
        array = np.arange(1024, dtype=np.float32).reshape(32, 32)
        out = np.zeros_like(array)
        await put(
            tier,
            PutRequest(name_of(1), array, BlockOwner(7)),
            PutRequest(name_of(2), memoryview(bytearray(array.tobytes())), BlockOwner(7)),
        )
        for number in (1, 2):
            out[:] = 0
            request = GetRequest(name_of(number), out.data, out.nbytes)
            (result,) = await tier.get_many([request], soon())
            assert result.is_hit
            assert np.array_equal(out, array)
        await tier.close()

    async def test_a_digest_of_a_foreign_engine_names_a_block_too(self, backend: Backend) -> None:
        tier = await backend.open()
        names = [FrameName(KeyKind.ENGINE_DIGEST, b"\x01" * n, NAMESPACE) for n in (8, 9, 32)]
        puts = [PutRequest(name, bytes([i]) * 9, BlockOwner(1)) for i, name in enumerate(names)]
        assert await put(tier, *puts) == [PutStatus.STORED] * 3
        for i, name in enumerate(names):
            assert await get_bytes(tier, name) == bytes([i]) * 9
        await tier.close()

    async def test_another_namespace_key_kind_or_codec_is_a_miss(self, backend: Backend) -> None:
        tier = await backend.open()
        await put(tier, put_of(1))
        name = name_of(1)
        others = [
            name_of(2),
            name_of(1, OTHER_NAMESPACE),
            replace(name, key_kind=KeyKind.ENGINE_DIGEST),
            replace(name, codec_id=1),
        ]
        assert await holds(tier, name, *others) == [True, False, False, False, False]
        for other in others:
            assert await get_status(tier, other) is GetStatus.MISS
        assert tier.stats().blocks == 1
        await tier.close()

    async def test_namespaces_with_the_same_keys_do_not_mix(self, backend: Backend) -> None:
        tier = await backend.open()
        names = [name_of(1), name_of(1, OTHER_NAMESPACE)]
        await put(tier, *[PutRequest(name, name.namespace * 2, BlockOwner(1)) for name in names])
        for name in names:
            assert await get_bytes(tier, name) == name.namespace * 2
        await tier.close()

    async def test_what_the_caller_does_with_its_buffers_afterwards_changes_nothing(
        self, backend: Backend
    ) -> None:
        tier = await backend.open()
        source = bytearray(payload_of(1))
        await put(tier, PutRequest(name_of(1), source, BlockOwner(7)))
        source[:] = bytes(len(source))
        first = await get(tier, name_of(1))
        assert bytes_of(first) == payload_of(1)
        if first.payload is not None and not first.payload.readonly:
            first.payload[:] = bytes(BLOCK_BYTES)
        assert await get_bytes(tier, name_of(1)) == payload_of(1)
        await tier.close()

    async def test_a_longer_buffer_is_filled_in_part_and_a_shorter_one_not_at_all(
        self, backend: Backend
    ) -> None:
        tier = await backend.open()
        await put(tier, put_of(1, 1000))
        long, short = memoryview(bytearray(1500)), memoryview(bytearray(999))
        longer, shorter = await tier.get_many(
            [GetRequest(name_of(1), long), GetRequest(name_of(1), short)], soon()
        )
        assert bytes_of(longer) == payload_of(1, 1000)
        assert long[1000:] == bytes(500)
        assert shorter.status is GetStatus.ERROR
        assert shorter.reason == "buffer_short"
        assert await get_status(tier, name_of(1)) is GetStatus.HIT
        await tier.close()

    async def test_a_block_of_another_length_than_the_namespace_says_is_never_given(
        self, backend: Backend
    ) -> None:
        tier = await backend.open()
        await put(tier, put_of(1, 1000), put_of(2, 1000))
        for number, asked in ((1, 999), (2, 1001)):
            result = await get(tier, name_of(number), asked)
            assert result.status is GetStatus.CORRUPT
            assert result.reason == FrameFault.LENGTH
            assert result.payload is None
        await tier.close()

    async def test_the_first_writer_wins_and_divergent_bytes_are_counted(
        self, backend: Backend
    ) -> None:
        tier = await backend.open()
        first = await put(tier, put_of(1))
        again = await put(tier, put_of(1), put_of(1, version=1), put_of(1, BLOCK_BYTES - 1))
        assert first == [PutStatus.STORED]
        assert again == [PutStatus.DUPLICATE, PutStatus.DIVERGENT, PutStatus.DIVERGENT]
        assert await get_bytes(tier, name_of(1)) == payload_of(1)
        assert tier.stats().divergent_puts == 2
        assert tier.stats().blocks == 1
        await tier.close()

    async def test_one_name_twice_in_a_batch_is_one_block(self, backend: Backend) -> None:
        tier = await backend.open()
        statuses = await put(tier, put_of(1), put_of(1), put_of(1, version=1))
        assert statuses == [PutStatus.STORED, PutStatus.DUPLICATE, PutStatus.DIVERGENT]
        results = await tier.get_many([GetRequest(name_of(1))] * 2, soon())
        assert [bytes_of(result) for result in results] == [payload_of(1)] * 2
        await tier.close()

    async def test_a_payload_without_its_declared_checksum_is_refused(
        self, backend: Backend
    ) -> None:
        tier = await backend.open()
        right = checksum(payload_of(1))
        wrong = replace(put_of(1), payload_checksum=right ^ 1)
        assert await put(tier, wrong) == [PutStatus.CORRUPT]
        assert await holds(tier, name_of(1)) == [False]
        assert await put(tier, replace(put_of(1), payload_checksum=right)) == [PutStatus.STORED]
        assert await put(tier, wrong) == [PutStatus.CORRUPT]
        assert tier.stats().blocks_reserved == 0
        await tier.close()

    async def test_what_can_never_fit_is_refused_and_the_rest_is_kept(
        self, backend: Backend
    ) -> None:
        tier = await backend.open()
        statuses = await put(tier, put_of(1), put_of(2, backend.payload_bytes_max + 1), put_of(3))
        assert statuses == [PutStatus.STORED, PutStatus.REFUSED, PutStatus.STORED]
        assert await holds(tier, name_of(1), name_of(2), name_of(3)) == [True, False, True]
        assert tier.stats().blocks_reserved == 0
        await tier.close()

    async def test_drop_removes_what_is_selected_and_nothing_else(self, backend: Backend) -> None:
        tier = await backend.open()
        other = name_of(2, OTHER_NAMESPACE)
        requests = [
            PutRequest(name_of(1), b"by name", BlockOwner(1)),
            PutRequest(other, b"by namespace", BlockOwner(1)),
            PutRequest(name_of(3), b"by writer", BlockOwner(2**64 - 1)),
            PutRequest(name_of(4), b"by scope", BlockOwner(1, ScopeId("tenant/../\n\0é"))),
            PutRequest(name_of(5), b"stays", BlockOwner(1, ScopeId("tenant"))),
        ]
        await put(tier, *requests)
        names = [request.name for request in requests]
        selections: list[Selection] = [
            ByNames((name_of(1), name_of(99), name_of(1))),
            ByNamespace(OTHER_NAMESPACE),
            ByWriter(2**64 - 1),
            ByScope(ScopeId("tenant/../\n\0é")),
        ]
        for i, selection in enumerate(selections):
            assert await tier.drop(selection, soon()) == 1
            expected = [position > i for position in range(len(names))]
            assert await holds(tier, *names) == expected
            assert await tier.drop(selection, soon()) == 0
        kept = await get(tier, name_of(5))
        assert bytes_of(kept) == b"stays"
        assert kept.scope == "tenant"
        assert tier.stats().removals[RemovalCause.DROPPED] == 4
        await tier.close()

    async def test_a_dropped_block_can_be_put_again(self, backend: Backend) -> None:
        tier = await backend.open()
        for version in range(3):
            assert await put(tier, put_of(1, version=version)) == [PutStatus.STORED]
            assert await get_bytes(tier, name_of(1)) == payload_of(1, version=version)
            await tier.drop(ByNames((name_of(1),)), soon())
        assert tier.stats().blocks == 0
        await tier.close()

    async def test_bytes_stay_bounded_under_churn_and_every_read_is_exact_or_a_miss(
        self, backend: Backend
    ) -> None:
        journal = Journal()
        tier = await backend.open(observer=journal)
        rng = random.Random(5)
        hits = 0
        for start in range(0, 40 * SMALL_BLOCKS, 4):
            numbers = range(start, start + 4)
            sizes = {n: rng.choice([1, 700, BLOCK_BYTES, 12_000]) for n in numbers}
            statuses = await put(tier, *[put_of(n, sizes[n]) for n in numbers])
            assert set(statuses) == {PutStatus.STORED}
            assert tier.stats().bytes <= tier.stats().bytes_max
            for n in numbers:
                result = await get(tier, name_of(n))
                assert result.status in {GetStatus.HIT, GetStatus.MISS}
                if result.is_hit:
                    hits += 1
                    assert bytes_of(result) == payload_of(n, sizes[n])
        stats = tier.stats()
        assert hits > 0
        assert stats.removals[RemovalCause.EVICTED] > 0
        assert stats.blocks == len(journal.held)
        assert not journal.faults
        assert (
            await holds(tier, *sorted(journal.held, key=lambda n: n.key)) == [True] * stats.blocks
        )
        await tier.close()

    @pytest.mark.parametrize("bit", [0, 64, 100, 256, 511, 512, 800, 832, 960, 1023, 1024, 30_001])
    async def test_a_flipped_bit_is_a_miss_and_the_copy_is_dropped_and_counted(
        self, backend: Backend, bit: int
    ) -> None:
        tier = await backend.open()
        await put(tier, put_of(1), put_of(2))
        await backend.flip(tier, name_of(1), bit)
        damaged = await get(tier, name_of(1), BLOCK_BYTES)
        assert damaged.status in {GetStatus.CORRUPT, GetStatus.MISS}
        assert damaged.payload is None
        assert await get_status(tier, name_of(1)) is GetStatus.MISS
        assert await holds(tier, name_of(1)) == [False]
        assert await get_bytes(tier, name_of(2)) == payload_of(2)
        assert sum(tier.stats().corrupt.values()) == 1
        assert tier.stats().blocks == 1
        assert await put(tier, put_of(1)) == [PutStatus.STORED]
        assert await get_status(tier, name_of(1)) is GetStatus.HIT
        await tier.close()

    async def test_a_frame_of_another_name_is_never_given(self, backend: Backend) -> None:
        tier = await backend.open()
        other = name_of(1, OTHER_NAMESPACE)
        for name, fault in ((name_of(2), FrameFault.KEY), (other, FrameFault.NAMESPACE)):
            await put(tier, put_of(1), PutRequest(name, payload_of(2), BlockOwner(7)))
            await backend.replace(tier, name_of(1), name)
            result = await get(tier, name_of(1))
            assert result.status is GetStatus.CORRUPT
            assert result.reason == fault
            assert tier.stats().corrupt[fault] == 1
            assert await get_status(tier, name_of(1)) is GetStatus.MISS
        await tier.close()

    async def test_a_corrupt_block_in_a_batch_costs_only_itself(self, backend: Backend) -> None:
        tier = await backend.open()
        numbers = range(5)
        await put(tier, *map(put_of, numbers))
        await backend.flip(tier, name_of(2), 5000)
        results = await tier.get_many([GetRequest(name_of(n)) for n in numbers], soon())
        assert [result.is_hit for result in results] == [True, True, False, True, True]
        assert results[2].reason == FrameFault.PAYLOAD_CHECKSUM
        await tier.close()

    async def test_nothing_is_done_after_the_deadline(self, backend: Backend) -> None:
        tier = await backend.open()
        await put(tier, put_of(1))
        (written,) = await tier.put_many([put_of(2)], past())
        (read,) = await tier.get_many([GetRequest(name_of(1))], past())
        assert written.status is PutStatus.TIMEOUT
        assert read.status is GetStatus.TIMEOUT
        with pytest.raises(DeadlineError):
            await tier.contains([name_of(1)], past())
        with pytest.raises(DeadlineError):
            await tier.drop(ByNames((name_of(1),)), past())
        assert await holds(tier, name_of(1), name_of(2)) == [True, False]
        assert tier.stats().blocks_reserved == 0
        await tier.close()

    @pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -float("inf")])
    async def test_a_deadline_that_is_no_time_is_refused(
        self, backend: Backend, deadline_s: float
    ) -> None:
        tier = await backend.open()
        with pytest.raises(CallerError):
            await tier.get_many([GetRequest(name_of(1))], deadline_s)
        with pytest.raises(CallerError):
            await tier.put_many([put_of(1)], deadline_s)
        with pytest.raises(CallerError):
            await tier.contains([name_of(1)], deadline_s)
        with pytest.raises(CallerError):
            await tier.drop(ByWriter(7), deadline_s)
        await tier.close()

    async def test_a_batch_past_the_ceiling_is_refused(self, backend: Backend) -> None:
        tier = await backend.open()
        count = TIER_BATCH_BLOCKS_MAX + 1
        with pytest.raises(LimitError):
            await tier.get_many([GetRequest(name_of(1))] * count, soon())
        with pytest.raises(LimitError):
            await tier.put_many([put_of(1, 1)] * count, soon())
        with pytest.raises(LimitError):
            await tier.contains([name_of(1)] * count, soon())
        assert tier.stats().blocks == 0
        await tier.close()

    async def test_a_payload_that_is_no_flat_buffer_is_refused_before_anything_is_done(
        self, backend: Backend
    ) -> None:
        tier = await backend.open()
        strided = np.zeros(100, dtype=np.uint8)[::2]
        with pytest.raises(CallerError):
            await tier.put_many([put_of(1), replace(put_of(2), payload=strided)], soon())
        assert await holds(tier, name_of(1), name_of(2)) == [False, False]
        await tier.close()

    async def test_concurrent_calls_on_one_name_never_mix_bytes(self, backend: Backend) -> None:
        journal = Journal()
        tier = await backend.open(observer=journal)
        possible = [payload_of(1, version=version) for version in range(4)]
        hits = 0
        assert await put(tier, put_of(1)) == [PutStatus.STORED]  # a tier with a disk is slower

        async def reader() -> None:
            nonlocal hits
            for _ in range(30):
                result = await get(tier, name_of(1))
                assert result.status in {GetStatus.HIT, GetStatus.MISS}
                if result.payload is not None:
                    hits += 1
                    assert bytes_of(result) in possible
                await asyncio.sleep(0)

        async def writer(version: int) -> None:
            for _ in range(30):
                (status,) = await put(tier, put_of(1, version=version))
                assert status in {PutStatus.STORED, PutStatus.DUPLICATE, PutStatus.DIVERGENT}
                await asyncio.sleep(0)

        async def dropper() -> None:
            for _ in range(30):
                await tier.drop(ByNames((name_of(1),)), soon())
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for version in range(4):
                group.create_task(writer(version))
                group.create_task(reader())
            group.create_task(dropper())
        assert hits > 0
        assert not journal.faults
        assert tier.stats().blocks == len(journal.held) <= 1
        assert tier.stats().blocks_reserved == 0
        await tier.close()

    @pytest.mark.parametrize("step", [0, 1, 2, 3, 5, 8])
    async def test_a_cancelled_call_leaves_no_reservation_and_holds_no_buffer(
        self, backend: Backend, step: int
    ) -> None:
        tier = await backend.open()
        sources = [bytearray(payload_of(n)) for n in range(4)]
        requests = [
            PutRequest(name_of(n), source, BlockOwner(7)) for n, source in enumerate(sources)
        ]
        targets = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(4)]
        tasks = [
            asyncio.ensure_future(tier.put_many(requests, soon())),
            asyncio.ensure_future(
                tier.get_many([GetRequest(name_of(n), targets[n]) for n in range(4)], soon())
            ),
        ]
        for _ in range(step):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            source[:] = bytes(len(source))
        before = [bytes(target) for target in targets]
        assert tier.stats().blocks_reserved == 0
        for n in range(4):
            result = await get(tier, name_of(n))
            assert bytes_of(result) in {None, payload_of(n)}
        statuses = await put(tier, *[put_of(n) for n in range(4)])
        assert set(statuses) <= {PutStatus.STORED, PutStatus.DUPLICATE}
        assert [bytes(target) for target in targets] == before
        await tier.close()

    async def test_a_closed_tier_says_so(self, backend: Backend) -> None:
        tier = await backend.open()
        await put(tier, put_of(1))
        await tier.close()
        await tier.close()
        with pytest.raises(UnavailableError):
            await tier.get_many([GetRequest(name_of(1))], soon())
        with pytest.raises(UnavailableError):
            await tier.put_many([put_of(1)], soon())
        with pytest.raises(UnavailableError):
            await tier.contains([name_of(1)], soon())
        with pytest.raises(UnavailableError):
            await tier.drop(ByWriter(7), soon())
        assert tier.stats().puts[PutStatus.STORED] == 1

    async def test_the_observer_hears_of_every_change(self, backend: Backend) -> None:
        journal = Journal()
        tier = await backend.open(observer=journal)
        await put(tier, put_of(1), put_of(2), put_of(1), put_of(3))
        assert journal.held == {name_of(1), name_of(2), name_of(3)}
        await backend.flip(tier, name_of(2), 2000)
        await get(tier, name_of(2))
        await tier.drop(ByNames((name_of(1),)), soon())
        assert journal.held == {name_of(3)}
        assert journal.removed == [
            (name_of(2), RemovalCause.CORRUPT),
            (name_of(1), RemovalCause.DROPPED),
        ]
        assert not journal.faults
        await tier.close()

    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["put", "get", "drop"]),
                st.integers(0, 11),
                st.integers(0, 2),
                st.sampled_from([0, 5, 900, BLOCK_BYTES, 15_000]),
            ),
            max_size=60,
        )
    )
    async def test_any_sequence_of_calls_gives_what_a_dict_gives_or_a_miss(
        self, backend: Backend, calls: list[tuple[str, int, int, int]]
    ) -> None:
        tier = await backend.open()
        model: dict[int, bytes] = {}
        for call, number, version, size in calls:
            name = name_of(number)
            if call == "put":
                (status,) = await put(tier, put_of(number, size, version))
                offered = payload_of(number, size, version)
                if status is PutStatus.STORED:
                    model[number] = offered
                else:
                    same = model[number] == offered
                    assert status is (PutStatus.DUPLICATE if same else PutStatus.DIVERGENT)
            elif call == "get":
                result = await get(tier, name)
                assert result.status in {GetStatus.HIT, GetStatus.MISS}
                if result.is_hit:
                    assert bytes_of(result) == model[number]
                else:
                    model.pop(number, None)
            else:
                count = await tier.drop(ByNames((name,)), soon())
                assert count <= (number in model)
                model.pop(number, None)
            assert tier.stats().blocks <= len(model)
            assert tier.stats().bytes <= tier.stats().bytes_max
        await tier.close()


class LocalTierContract(TierContract):
    """What a tier promises beyond that when its directory is in this process."""

    async def local(self, backend: Backend) -> LocalTier:
        tier = await backend.open()
        assert hasattr(tier, "coldest")
        return tier  # type: ignore[return-value]

    async def test_names_are_what_can_be_read(self, backend: Backend) -> None:
        tier = await self.local(backend)
        await put(tier, put_of(1), put_of(2))
        await tier.drop(ByNames((name_of(1),)), soon())
        assert tier.names() == [name_of(2)]
        await tier.close()

    async def test_the_tail_of_the_oldest_chain_is_the_coldest(self, backend: Backend) -> None:
        tier = await self.local(backend)
        await put(tier, put_of(1), put_of(2), put_of(3))
        await put(tier, put_of(4))
        await get(tier, name_of(1))
        assert tier.coldest(3) == [name_of(3), name_of(2), name_of(4)]
        assert tier.coldest(99)[3:] == [name_of(1)]
        await tier.close()

    async def test_a_pinned_block_outlives_any_churn_until_it_is_unpinned(
        self, backend: Backend
    ) -> None:
        tier = await self.local(backend)
        await put(tier, put_of(1))
        token, again = tier.pin(name_of(1)), tier.pin(name_of(1))
        assert token is not None
        assert again is not None
        tier.unpin(name_of(1), again)
        assert tier.stats().blocks_pinned == 1
        for number in range(2, 40 * SMALL_BLOCKS):
            assert await put(tier, put_of(number)) == [PutStatus.STORED]
        assert await get_bytes(tier, name_of(1)) == payload_of(1)
        assert await holds(tier, name_of(2)) == [False]
        tier.unpin(name_of(1), token)
        assert tier.stats().blocks_pinned == 0
        for number in range(1000, 1000 + 40 * SMALL_BLOCKS):
            await put(tier, put_of(number))
        assert await get_status(tier, name_of(1)) is GetStatus.MISS
        await tier.close()

    async def test_a_pin_does_not_outlive_a_drop(self, backend: Backend) -> None:
        tier = await self.local(backend)
        await put(tier, put_of(1))
        token = tier.pin(name_of(1))
        assert token is not None
        assert await tier.drop(ByNames((name_of(1),)), soon()) == 1
        assert tier.stats().blocks_pinned == 0
        await put(tier, put_of(1))
        newer = tier.pin(name_of(1))
        assert newer is not None
        tier.unpin(name_of(1), token)
        assert tier.stats().blocks_pinned == 1
        tier.unpin(name_of(1), newer)
        assert tier.pin(name_of(77)) is None
        await tier.close()

    async def test_a_tier_full_of_pinned_blocks_refuses_and_recovers(
        self, backend: Backend
    ) -> None:
        tier = await self.local(backend)
        tokens = {}
        for number in range(40 * SMALL_BLOCKS):
            (result,) = await tier.put_many([put_of(number)], soon())
            if result.status is PutStatus.REFUSED:
                break
            token = tier.pin(name_of(number))
            assert token is not None
            tokens[number] = token
        assert result.status is PutStatus.REFUSED
        assert result.reason == "full"
        assert tier.coldest(1) == []
        assert len(tokens) >= SMALL_BLOCKS
        tier.unpin(name_of(0), tokens[0])
        assert await put(tier, put_of(5000)) == [PutStatus.STORED]
        assert await get_status(tier, name_of(0)) is GetStatus.MISS
        await tier.close()
