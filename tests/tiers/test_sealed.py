"""Sealed tiers: the contract over memory and over NVMe, and what the seal itself promises."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core.frame import FrameName
from kvtier.errors import ConfigError
from kvtier.ports import (
    BlockOwner,
    BlockTier,
    ByScope,
    GetRequest,
    GetStatus,
    LocalTier,
    PutRequest,
    PutStatus,
    RemovalCause,
    TierObserver,
)
from kvtier.tiers.memory import MemoryConfig, MemoryTier
from kvtier.tiers.nvme.tier import NvmeTier
from kvtier.tiers.scope_keys import FileScopeKeys, MemoryScopeKeys
from kvtier.tiers.sealed import SEAL_BYTES, SealedLocalTier, SealedTier
from kvtier.types import ScopeId
from tests.support.nvme_directory import small
from tests.tiers.contract import (
    BLOCK_BYTES,
    SMALL_BYTES,
    Backend,
    Journal,
    LocalTierContract,
    bytes_of,
    get,
    get_bytes,
    get_status,
    name_of,
    payload_of,
    put,
    put_of,
    soon,
)
from tests.tiers.test_memory import MemoryBackend
from tests.tiers.test_nvme import BYTES_MAX, NvmeBackend

SCOPE, OTHER_SCOPE = ScopeId("tenant-of-this-test"), ScopeId("another-tenant")


class SealedBackend:
    """Opens and damages the tier below."""

    def __init__(self, below: MemoryBackend | NvmeBackend, bytes_max: int) -> None:
        self._below = below
        self._bytes_max = bytes_max
        self._inner: dict[int, LocalTier] = {}
        self.payload_bytes_max = below.payload_bytes_max - SEAL_BYTES

    async def open(
        self, bytes_max: int = SMALL_BYTES, observer: TierObserver | None = None
    ) -> SealedLocalTier:
        inner = await self._below.open(max(bytes_max, self._bytes_max), observer)
        tier = SealedLocalTier(inner, MemoryScopeKeys())
        self._inner[id(tier)] = inner
        return tier

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        await self._below.flip(self._inner[id(tier)], name, bit)

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        await self._below.replace(self._inner[id(tier)], name, frame)


class TestSealedMemory(LocalTierContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return SealedBackend(MemoryBackend(), SMALL_BYTES)


class TestSealedNvme(LocalTierContract):
    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncIterator[Backend]:
        below = NvmeBackend(tmp_path)
        yield SealedBackend(below, BYTES_MAX)
        await below.close()


def memory(observer: TierObserver | None = None) -> MemoryTier:
    return MemoryTier(MemoryConfig(1 << 20), observer=observer)


def owned(number: int, scope: ScopeId = SCOPE, version: int = 0) -> PutRequest:
    return replace(put_of(number, version=version), owner=BlockOwner(7, scope))


async def sealed_payload(inner: MemoryTier, name: FrameName) -> bytes:
    found = await get_bytes(inner, name)
    assert found is not None
    return found


async def test_nothing_in_clear_says_what_is_kept_or_for_whom(tmp_path: Path) -> None:
    keys = FileScopeKeys(tmp_path / "keys")
    inner = await NvmeTier.open(small(tmp_path / "tier"))
    tier = SealedLocalTier(inner, keys)
    plain = b"prompt of the tenant " * 200
    await put(tier, PutRequest(name_of(1), plain, BlockOwner(7, SCOPE)))
    result = await get(tier, name_of(1))
    assert bytes_of(result) == plain
    assert result.scope == SCOPE
    await tier.close()
    files = [path for path in (tmp_path / "tier").rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        assert b"prompt of" not in content
        assert SCOPE.encode() not in content


async def test_the_same_bytes_are_sealed_differently_each_time() -> None:
    inner = memory()
    tier = SealedTier(inner, MemoryScopeKeys())
    await put(tier, owned(1))
    first = await sealed_payload(inner, name_of(1))
    assert len(first) == BLOCK_BYTES + SEAL_BYTES
    assert await put(tier, owned(1), owned(1, version=1)) == [
        PutStatus.DUPLICATE,
        PutStatus.DIVERGENT,
    ]
    assert tier.stats().divergent_puts == 1
    other = SealedTier(memory(), MemoryScopeKeys())
    await put(other, PutRequest(name_of(1), payload_of(1), BlockOwner(7, SCOPE)))
    assert first != payload_of(1)


async def test_an_erased_key_erases_its_scope_and_no_other() -> None:
    keys, journal = MemoryScopeKeys(), Journal()
    inner = memory(journal)
    tier = SealedTier(inner, keys)
    await put(tier, owned(1), owned(2, OTHER_SCOPE), owned(3))
    assert keys.erase(SCOPE)
    assert not keys.erase(SCOPE)
    assert await get_status(tier, name_of(1)) is GetStatus.MISS
    assert await get_bytes(tier, name_of(2)) == payload_of(2)
    assert journal.held == {name_of(2), name_of(3)}
    assert await tier.drop(ByScope(SCOPE), soon()) == 1
    assert journal.held == {name_of(2)}
    assert await put(tier, owned(1, version=1)) == [PutStatus.STORED]
    assert await get_bytes(tier, name_of(1)) == payload_of(1, version=1)


async def test_what_an_erased_key_sealed_does_not_stand_in_the_way_of_a_new_put() -> None:
    keys = MemoryScopeKeys()
    tier = SealedTier(memory(), keys)
    await put(tier, owned(1))
    keys.erase(SCOPE)
    assert await put(tier, owned(1, version=1)) == [PutStatus.STORED]
    assert await get_bytes(tier, name_of(1)) == payload_of(1, version=1)


async def test_a_block_under_another_name_or_scope_does_not_open() -> None:
    keys = MemoryScopeKeys()
    inner = memory()
    tier = SealedTier(inner, keys)
    await put(tier, owned(1), owned(9, OTHER_SCOPE))
    payload = await sealed_payload(inner, name_of(1))
    right = BlockOwner(7, keys.label(SCOPE))
    moved = [
        PutRequest(name_of(2), payload, right),
        PutRequest(name_of(3), payload, BlockOwner(7, keys.label(OTHER_SCOPE))),
        PutRequest(name_of(4), payload, BlockOwner(8, keys.label(SCOPE))),
        PutRequest(name_of(5), payload, BlockOwner(7, ScopeId("nobody's"))),
        PutRequest(name_of(6), b"short", right),
    ]
    await put(inner, *moved)
    into = memoryview(bytearray(BLOCK_BYTES))
    for request, expected in zip(
        moved, ["corrupt", "miss", "corrupt", "miss", "corrupt"], strict=True
    ):
        (result,) = await tier.get_many([GetRequest(request.name, into)], soon())
        assert result.status == expected
        assert result.payload is None
        assert bytes(into) == bytes(BLOCK_BYTES)
        assert await inner.contains([request.name], soon()) == [False]
    assert tier.stats().removals[RemovalCause.CORRUPT] == 3
    assert await get_bytes(tier, name_of(1)) == payload_of(1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 8 * (100 + SEAL_BYTES) - 1))
async def test_a_forged_bit_with_a_right_checksum_does_not_open(bit: int) -> None:
    keys = MemoryScopeKeys()
    inner = memory()
    tier = SealedTier(inner, keys)
    await put(tier, PutRequest(name_of(1), payload_of(1, 100), BlockOwner(7, SCOPE)))
    payload = bytearray(await sealed_payload(inner, name_of(1)))
    payload[bit // 8] ^= 1 << bit % 8
    await put(inner, PutRequest(name_of(2), bytes(payload), BlockOwner(7, keys.label(SCOPE))))
    assert await get_status(tier, name_of(2)) in {GetStatus.CORRUPT, GetStatus.MISS}


async def test_a_large_batch_is_sealed_and_opened_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.tiers.sealed._GROUP_BYTES", 2 * BLOCK_BYTES)
    tier = SealedTier(memory(), MemoryScopeKeys())
    numbers = range(7)
    assert await put(tier, *map(put_of, numbers)) == [PutStatus.STORED] * 7
    results = await tier.get_many(
        [GetRequest(name_of(n), None, BLOCK_BYTES) for n in numbers], soon()
    )
    assert [bytes_of(result) for result in results] == [payload_of(n) for n in numbers]


# Keys


def test_a_label_names_nobody_and_outlives_the_key() -> None:
    keys = MemoryScopeKeys()
    label = keys.label(SCOPE)
    assert SCOPE not in label
    assert label != keys.label(OTHER_SCOPE)
    assert label != MemoryScopeKeys().label(SCOPE)
    keys.sealing_key(SCOPE)
    keys.erase(SCOPE)
    assert keys.label(SCOPE) == label
    assert keys.opening_key(label) is None


def test_keys_in_a_file_outlive_the_process_and_an_erased_one_is_not_in_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    keys = FileScopeKeys(path)
    drawn = keys.sealing_key(SCOPE)
    keys.sealing_key(ScopeId(""))
    assert path.stat().st_mode & 0o777 == 0o600
    again = FileScopeKeys(path)
    assert again.opening_key(keys.label(SCOPE)) == drawn
    assert again.erase(SCOPE)
    assert drawn.key.hex() not in path.read_text()
    later = FileScopeKeys(path)
    assert later.opening_key(keys.label(SCOPE)) is None
    assert later.sealing_key(SCOPE).key_id != drawn.key_id


def test_a_key_is_not_in_what_is_printed_of_it() -> None:
    drawn = MemoryScopeKeys().sealing_key(SCOPE)
    assert drawn.key.hex() not in repr(drawn)
    assert repr(drawn.key) not in repr(drawn)


@pytest.mark.parametrize(
    "content", ["", "null", "[]", '{"keys": {}}', '{"label_secret": "00", "keys": {}}']
)
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        FileScopeKeys(path)


def test_a_file_with_a_short_key_or_for_all_to_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = FileScopeKeys(path)
    keys.sealing_key(SCOPE)
    path.chmod(0o622)
    with pytest.raises(ConfigError):
        FileScopeKeys(path)
    path.chmod(0o600)
    document = json.loads(path.read_text())
    document["keys"][keys.label(SCOPE)]["key"] = "00"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError):
        FileScopeKeys(path)
