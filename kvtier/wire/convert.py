"""Between wire messages and the core's values. Malformed messages raise CallerError, nothing else.

Columns are viewed, not copied: the arrays of a batch live as long as the message's bytes. What must
not live here: RPCs, and decisions on what the values mean.
"""

import struct
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.encoding import encode
from kvtier.core.event_columns import EventBatch, EventKind, PackedBatch
from kvtier.core.fleet import Addresses, HolderInfo, TierCapacity
from kvtier.core.identity import Pool
from kvtier.core.model_card import Adapter, ModelCard
from kvtier.errors import CallerError, LimitError
from kvtier.limits import BATCH_BLOCKS_MAX, BATCH_EVENTS_MAX, MATCH_BLOCKS_MAX, PROMPT_TOKENS_MAX
from kvtier.types import (
    HOLDER_TIERS,
    Fingerprint,
    HolderKind,
    InstanceId,
    NodeId,
    Role,
    Tier,
    Trust,
)
from kvtier.wire import messages as pb

_U32: Final[np.dtype[np.uint32]] = np.dtype("<u4")
_U64: Final[np.dtype[np.uint64]] = np.dtype("<u8")
TIERS_COUNT: Final = len(HOLDER_TIERS)
_TIERS: Final = bytes(HOLDER_TIERS)
_KINDS: Final = bytes(EventKind)
_WITH_BLOCKS: Final = bytes([EventKind.STORE, EventKind.REMOVE])
_UNPACK_U32: Final = tuple(struct.Struct(f"<{count}I").unpack for count in range(65))

_KIND_FROM: Final = {
    pb.HOLDER_KIND_WORKER: HolderKind.WORKER,
    pb.HOLDER_KIND_STORE: HolderKind.STORE,
    pb.HOLDER_KIND_SHARED: HolderKind.SHARED,
}
_KIND_TO: Final = {ours: theirs for theirs, ours in _KIND_FROM.items()}
_ROLE_FROM: Final = {
    pb.ROLE_UNSPECIFIED: Role.BOTH,
    pb.ROLE_PREFILL: Role.PREFILL,
    pb.ROLE_DECODE: Role.DECODE,
    pb.ROLE_BOTH: Role.BOTH,
}
_ROLE_TO: Final = {
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.BOTH: pb.ROLE_BOTH,
}
_TRUST_TO: Final = {Trust.EXACT: pb.TRUST_EXACT, Trust.DEGRADED: pb.TRUST_DEGRADED}


def u64_column(what: str, column: bytes, count_max: int) -> npt.NDArray[np.uint64]:
    """View packed little-endian u64 as an array; CallerError for a broken or over-long column."""
    _check_column(what, column, _U64.itemsize, count_max)
    return np.frombuffer(column, dtype=_U64)


def u32_column(what: str, column: bytes, count_max: int) -> npt.NDArray[np.uint32]:
    """View packed little-endian u32 as an array; CallerError for a broken or over-long column."""
    _check_column(what, column, _U32.itemsize, count_max)
    return np.frombuffer(column, dtype=_U32)


def _check_column(what: str, column: bytes, item_bytes: int, count_max: int) -> None:
    if len(column) % item_bytes:
        raise CallerError(f"{what}: {len(column)} bytes are not a multiple of {item_bytes}")
    if len(column) > count_max * item_bytes:
        raise LimitError(f"{what}: {len(column) // item_bytes} exceed {count_max}")


def packed_from(message: pb.Batch) -> PackedBatch:
    """The columns of a batch, checked against each other. O(events), no loop for small batches."""
    batch = PackedBatch(
        message.kinds, message.tiers, message.lengths, message.parents, message.hashes
    )
    kinds, tiers, lengths, parents, hashes = batch
    count = len(kinds)
    if count > BATCH_EVENTS_MAX:
        raise LimitError(f"kinds: {count} events exceed {BATCH_EVENTS_MAX}")
    if len(hashes) > BATCH_BLOCKS_MAX * 8 or len(hashes) % 8:
        _check_column("hashes", hashes, 8, BATCH_BLOCKS_MAX)
    if len(tiers) != count or len(lengths) != 4 * count or len(parents) != 8 * count:
        raise CallerError(
            f"columns: {len(tiers)} tiers, {len(lengths)} bytes of lengths and {len(parents)} of "
            f"parents do not fit {count} kinds"
        )
    blocks_count = _sum_u32(lengths, count)
    if blocks_count * 8 != len(hashes):
        raise CallerError(f"lengths: sum up to {blocks_count} of {len(hashes) // 8} hashes")
    # What is left when every known value is deleted is unknown.
    if kinds.translate(None, _KINDS) or tiers.translate(None, _TIERS):
        raise CallerError("kinds or tiers: a value that this version does not know")
    if kinds.translate(None, _WITH_BLOCKS) and _clears_blocks(batch):
        raise CallerError("lengths: a clear has no blocks")
    return batch


def _clears_blocks(batch: PackedBatch) -> bool:
    kinds = np.frombuffer(batch.kinds, np.uint8)
    return bool(np.frombuffer(batch.lengths, _U32)[kinds > EventKind.REMOVE].any())


def _sum_u32(column: bytes, count: int) -> int:
    if count < len(_UNPACK_U32):  # numpy's own cost is several microseconds
        return sum(_UNPACK_U32[count](column))
    return int(np.frombuffer(column, _U32).sum(dtype=np.uint64))


def packed_to(batch: PackedBatch, seq: int = 0) -> pb.Batch:
    kinds, tiers, lengths, parents, hashes = batch
    return pb.Batch(
        seq=seq, kinds=kinds, tiers=tiers, lengths=lengths, parents=parents, hashes=hashes
    )


def batch_from(message: pb.Batch) -> EventBatch:
    """As `packed_from`, as arrays over the message's memory."""
    return packed_from(message).unpacked()


def batch_to(batch: EventBatch, seq: int) -> pb.Batch:
    return pb.Batch(
        seq=seq,
        kinds=batch.kinds.tobytes(),
        tiers=batch.tiers.tobytes(),
        lengths=batch.lengths.astype(_U32, copy=False).tobytes(),
        parents=batch.parents.astype(_U64, copy=False).tobytes(),
        hashes=batch.hashes.astype(_U64, copy=False).tobytes(),
    )


def card_from(message: pb.ModelCard) -> ModelCard:
    return ModelCard(
        served_names=tuple(message.served_names),
        model_id=message.model_id,
        revision=message.revision,
        tokenizer_digest=message.tokenizer_digest,
        chat_template_digest=message.chat_template_digest or None,
        block_tokens=message.block_tokens,
        adapters=tuple(
            Adapter(adapter.name, adapter.digest or None, adapter.generation)
            for adapter in message.adapters
        ),
    )


def card_to(card: ModelCard) -> pb.ModelCard:
    return pb.ModelCard(
        served_names=card.served_names,
        model_id=card.model_id,
        revision=card.revision,
        tokenizer_digest=card.tokenizer_digest,
        chat_template_digest=card.chat_template_digest or b"",
        block_tokens=card.block_tokens,
        adapters=[
            pb.Adapter(name=one.name, digest=one.digest or b"", generation=one.generation)
            for one in card.adapters
        ],
    )


def info_from(message: pb.Hello) -> HolderInfo:
    """What a Hello says of its holder, without epoch and sequence."""
    kind = _KIND_FROM.get(message.kind)
    role = _ROLE_FROM.get(message.role)
    if kind is None or role is None:
        raise CallerError(f"kind {message.kind} or role {message.role} is not known here")
    shard = message.shard if message.HasField("shard") else pb.Shard(index=0, count=1)
    return HolderInfo(
        kind=kind,
        instance=InstanceId(message.instance),
        node=NodeId(message.node),
        namespace=Fingerprint(message.namespace_fingerprint),
        card=card_from(message.card) if message.HasField("card") else None,
        dp_rank=message.dp_rank,
        shard_index=shard.index,
        shards_count=shard.count,
        zone=message.zone,
        store=message.store,
        addresses=Addresses(
            http=message.addresses.http, grpc=message.addresses.grpc, bulk=message.addresses.bulk
        ),
        role=role,
        engine=message.engine,
        engine_version=message.engine_version,
        capacities=tuple(_capacity_from(capacity) for capacity in message.capacities),
        block_bytes=message.block_bytes,
    )


def _capacity_from(message: pb.TierCapacity) -> TierCapacity:
    if message.tier >= TIERS_COUNT:
        raise CallerError(f"tier {message.tier} is not known here")
    return TierCapacity(Tier(message.tier), message.blocks, message.bytes)


def hello_to(info: HolderInfo, epoch: int, seq: int, trust: Trust = Trust.EXACT) -> pb.Hello:
    return pb.Hello(
        epoch=epoch,
        seq=seq,
        kind=_KIND_TO[info.kind],
        instance=info.instance,
        dp_rank=info.dp_rank,
        node=info.node,
        zone=info.zone,
        store=info.store,
        addresses=pb.Addresses(
            http=info.addresses.http, grpc=info.addresses.grpc, bulk=info.addresses.bulk
        ),
        role=_ROLE_TO[info.role],
        engine=info.engine,
        engine_version=info.engine_version,
        shard=pb.Shard(index=info.shard_index, count=info.shards_count),
        card=None if info.card is None else card_to(info.card),
        namespace_fingerprint=info.namespace,
        capacities=[
            pb.TierCapacity(tier=one.tier, blocks=one.blocks, bytes=one.bytes)
            for one in info.capacities
        ],
        block_bytes=info.block_bytes,
        protocol_version_max=PROTOCOL_VERSION,
        trust=trust_to(trust),
    )


PROTOCOL_VERSION: Final = 1
"""What this release speaks; a peer with a lower one is answered with the lower one."""


def pool_name(pool: Pool) -> bytes:
    """How a pool is named on the wire: opaque, equal for equal pools."""
    return encode("kvtier.pool.v1", {1: pool.model_id, 2: pool.revision, 3: pool.block_tokens})


def trust_to(trust: Trust) -> pb.Trust.ValueType:
    return _TRUST_TO[trust]


def trust_from(message: int) -> Trust:
    return Trust.EXACT if message == pb.TRUST_EXACT else Trust.DEGRADED


def said_trust_from(message: int) -> Trust:
    """What a publisher says of itself; one that says nothing knows no doubt."""
    return Trust.DEGRADED if message == pb.TRUST_DEGRADED else Trust.EXACT


def query_hashes(message: pb.MatchQuery) -> npt.NDArray[np.uint64]:
    return u64_column("hashes", message.hashes, MATCH_BLOCKS_MAX)


def query_tokens(message: pb.MatchQuery) -> npt.NDArray[np.uint32]:
    return u32_column("tokens", message.tokens, PROMPT_TOKENS_MAX)
