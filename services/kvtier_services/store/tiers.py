"""What is built of the configuration: the tiers of a store, and the planner's ceilings for them.

What must not live here: the service, what moves.
"""

from dataclasses import dataclass
from math import inf
from pathlib import Path

from kvtier.core.planner import Block, PlannerConfig, TierConfig
from kvtier.errors import BackendError
from kvtier.peers import PeerTier
from kvtier.ports import BlockOwner
from kvtier.store import StoreTier, TieredStore, TieredStoreConfig, TierWatch, held_block
from kvtier.tiers.arena.landing import ArenaLanding
from kvtier.tiers.arena.tier import ArenaConfig, ArenaShape
from kvtier.tiers.nvme.layout import NvmeConfig
from kvtier.tiers.nvme.tier import HeldBlock, NvmeTier
from kvtier.tiers.redis.config import (
    Login,
    RedisConfig,
    RedisTls,
    SentinelGroup,
    Server,
    parse_url,
)
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.scope_keys import FileScopeKeys
from kvtier.tiers.sealed import SEAL_BYTES, SealedLocalTier, SealedTier
from kvtier.types import ScopeId, Tier
from kvtier_services.store.arena import GovernedArena, RawPins
from kvtier_services.store.config import (
    ArenaSection,
    NvmeSection,
    PeersSection,
    RedisSection,
    StoreConfig,
    parse_host_port,
    parse_quota,
)

DRAM_SHARE = 0.97
"""Of the arena's bytes, for the planner: the rest is what slots round up, and slabs that are
neither full nor free."""
DRAM_HIGH, DRAM_LOW = 0.95, 0.90
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """The tiers of one store, DRAM first, and what they found in themselves."""

    arena: GovernedArena
    tiers: tuple[StoreTier, ...]
    nvme: NvmeTier | None
    redis: RedisTier | None
    nvme_keys: FileScopeKeys | None
    redis_keys: FileScopeKeys | None
    peers: PeerTier | None = None

    def erase(self, scope: ScopeId) -> None:
        """Erase the keys of a scope: what was sealed with them nobody reads any more."""
        for keys in (self.nvme_keys, self.redis_keys):
            if keys is not None:
                keys.erase(scope)

    def restore(self, store: TieredStore, watch: TierWatch) -> None:
        """Take what the disk had into the books, and have it announced."""
        if self.nvme is not None:
            found = self.nvme.inventory()
            watch.found(Tier.NVME, [one.name for one in found])
            keys = self.nvme_keys
            blocks = (_held(one) if keys is None else _unsealed(one, keys) for one in found)
            store.restore(Tier.NVME, (block for block in blocks if block is not None))


def _held(one: HeldBlock) -> Block:
    return held_block(one.name, one.payload_bytes, one.owner)


def _unsealed(one: HeldBlock, keys: FileScopeKeys) -> Block | None:
    """As it was put; None for one that nobody can open any more."""
    key = keys.opening_key(one.owner.scope)
    if key is None or one.payload_bytes < SEAL_BYTES:
        return None
    owner = BlockOwner(one.owner.writer_id, key.scope)
    return held_block(one.name, one.payload_bytes - SEAL_BYTES, owner)


async def open_tiers(
    config: StoreConfig, watch: TierWatch, peers: PeerTier | None = None
) -> BuiltTiers:
    """Attach or start cold. Raises what the tiers raise where one cannot be had at all."""
    nvme_keys, redis_keys = _keys(config.nvme.seal_keys_file), _keys(config.redis.seal_keys_file)
    redis = new_redis(config.redis, watch) if config.redis.enabled else None
    nvme = await NvmeTier.open(nvme_config(config), watch) if config.nvme.enabled else None
    try:
        arena = new_arena(config.dram, watch)
    except BackendError:
        if nvme is not None:
            await nvme.close()
        raise
    tiers = [StoreTier(arena, RawPins(arena), landing=ArenaLanding(arena))]
    if nvme is not None and nvme_keys is None:
        tiers.append(StoreTier(nvme, nvme, nvme.checksum_of))
    elif nvme is not None and nvme_keys is not None:
        tiers.append(StoreTier(SealedLocalTier(nvme, nvme_keys), nvme))
    if peers is not None:
        tiers.append(StoreTier(peers))
    if redis is not None:
        tiers.append(StoreTier(redis if redis_keys is None else SealedTier(redis, redis_keys)))
    return BuiltTiers(arena, tuple(tiers), nvme, redis, nvme_keys, redis_keys, peers)


def _keys(path: Path | None) -> FileScopeKeys | None:
    return None if path is None else FileScopeKeys(path)


def new_arena(section: ArenaSection, watch: TierWatch) -> GovernedArena:
    """Shared memory, preallocated: BackendError where there is not that much."""
    config = ArenaConfig(section.bytes_max, section.slab_bytes, section.blocks_max)
    return GovernedArena(config, ArenaShape(observer=watch))


def nvme_config(config: StoreConfig) -> NvmeConfig:
    """The disk's directory, and how much of it."""
    section = config.nvme
    return NvmeConfig(config.data_dir / "nvme", section.bytes_max, section.free_share)


def new_redis(section: RedisSection, watch: TierWatch) -> RedisTier:
    """The shared Redis. Connects nothing yet. ConfigError for what cannot be meant."""
    config = RedisConfig(_server(section), bytes_max=section.bytes_max, ttl_s=section.ttl_s)
    return RedisTier(config, watch)


def _server(section: RedisSection) -> Server:
    tls = RedisTls(section.ca_file) if section.ca_file is not None else None
    if section.url is not None:
        return parse_url(section.url.reveal(), tls)
    return SentinelGroup(
        section.service,
        tuple(parse_host_port(text) for text in section.sentinels),
        Login(section.username, section.password),
        Login("", section.sentinel_password),
        tls=tls,
    )


def store_config(config: StoreConfig, tiers: BuiltTiers) -> TieredStoreConfig:
    """Ceilings of the planner and of what carries it out."""
    known = {
        Tier.DRAM: lambda: _dram(config.dram),
        Tier.NVME: lambda: _nvme(config.nvme, tiers.nvme.stats().bytes_max if tiers.nvme else 1),
        Tier.PEER: lambda: _peers(config.peers),
        Tier.REDIS: lambda: _redis(config.redis),
    }
    planner = PlannerConfig(
        tiers=tuple(known[one.blocks.tier]() for one in tiers.tiers),
        quotas=tuple(parse_quota(text) for text in config.quotas),
        promote_touches_min=config.promote_touches_min,
    )
    return TieredStoreConfig(
        planner=planner,
        in_flight_bytes_max=config.in_flight_bytes_max,
        drain_s=max(0.001, config.drain_ms_max / 1000),
    )


def _dram(section: ArenaSection) -> TierConfig:
    return TierConfig(
        Tier.DRAM,
        int(section.bytes_max * DRAM_SHARE),
        high_share=DRAM_HIGH,
        low_share=DRAM_LOW,
    )


def _nvme(section: NvmeSection, bytes_max: int) -> TierConfig:
    # The tier makes its own room, by whole segments: the planner must not drop block by block.
    return TierConfig(
        Tier.NVME,
        bytes_max,
        high_share=1.0,
        low_share=1.0,
        deadline_s=section.deadline_ms / 1000,
        write_policy=section.write_policy,
        touches_min=section.touches_min,
        write_bytes_per_day=section.write_bytes_per_day or inf,
        write_burst_bytes=(section.write_bytes_per_day or inf) / _DAY_S * 3600,
    )


def _peers(section: PeersSection) -> TierConfig:
    # Nothing is ever held there: the capacity means nothing.
    return TierConfig(Tier.PEER, section.bytes_max, deadline_s=section.deadline_ms / 1000)


def _redis(section: RedisSection) -> TierConfig:
    # As the tier above: the server evicts by itself.
    return TierConfig(
        Tier.REDIS,
        section.bytes_max,
        high_share=1.0,
        low_share=1.0,
        deadline_s=section.deadline_ms / 1000,
        write_policy=section.write_policy,
        touches_min=section.touches_min,
    )
