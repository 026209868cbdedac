"""What shapes a block's KV: the pool and its prefix chain, and the namespace of its bytes.

Two questions, two answers. *Which tokens, of which model, for whom?* is the prefix chain: its root
hashes model id, revision, block size, scope salt and adapter, so that a router can compute it from
the model card, the tenant and the tokens alone. *Are the bytes interchangeable?* is the namespace:
the fingerprint of a `ModelSpec` adds dtype, layout, shard, codec, format and, for blocks that a
foreign engine wrote, that engine's hashing. Mismatched peers thus share prefix hashes and never a
(namespace, key) pair.

What must not live here: model cards (model_card.py), tenants and salts (scopes.py), the hashing of
tokens (keys.py, engine_keys.py), frames.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtier.core.checks import require_digest, require_integer, require_name, require_text
from kvtier.core.encoding import I64_MIN, U64_MAX, Symbol, Value, digest, encode
from kvtier.errors import CallerError, LimitError
from kvtier.limits import (
    BLOCK_TOKENS_MAX,
    EXTRAS_BYTES_MAX,
    HEAD_DIM_MAX,
    HEADS_COUNT_MAX,
    LAYERS_COUNT_MAX,
    MULTIMODAL_ITEMS_MAX,
    PAYLOAD_BYTES_MAX,
)
from kvtier.types import Fingerprint

FORMAT_VERSION: Final = 1
"""Version of the payload's format that this release writes."""

CODEC_RAW: Final = 0
"""Codec id of payloads stored as they are."""

CODEC_ID_MAX: Final = 2**32 - 1
FORMAT_VERSION_MAX: Final = 2**32 - 1
LOOKAHEAD_TOKENS_MAX: Final = 64
CACHE_GROUP_MAX: Final = 2**16 - 1
CONTENT_ID_BYTES_MIN: Final = 16

_NAMESPACE_DOMAIN: Final = "kvtier.namespace.v1"
_ROOT_DOMAIN: Final = "kvtier.chain-root.v1"
_EXTRAS_DOMAIN: Final = "kvtier.extras.v1"


class KvDtype(StrEnum):
    """Element type of keys and values as they lie in a block."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT8 = "int8"

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES: Final = {
    KvDtype.FLOAT32: 4,
    KvDtype.BFLOAT16: 2,
    KvDtype.FLOAT16: 2,
    KvDtype.FP8_E4M3: 1,
    KvDtype.FP8_E5M2: 1,
    KvDtype.INT8: 1,
}


@dataclass(frozen=True, slots=True)
class Shard:
    """The layers and KV heads that one rank holds of every block, as half-open ranges.

    A coordinate, not the writer's rank: ranks that hold the same heads (more ranks than KV heads)
    have equal shards and interchangeable bytes.
    """

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    def __post_init__(self) -> None:
        require_integer("layer_start", self.layer_start, 0, LAYERS_COUNT_MAX)
        require_integer("layer_stop", self.layer_stop, self.layer_start + 1, LAYERS_COUNT_MAX)
        require_integer("head_start", self.head_start, 0, HEADS_COUNT_MAX)
        require_integer("head_stop", self.head_stop, self.head_start + 1, HEADS_COUNT_MAX)

    @property
    def layers_count(self) -> int:
        return self.layer_stop - self.layer_start

    @property
    def heads_count(self) -> int:
        return self.head_stop - self.head_start


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """How a foreign engine names and computes the blocks that it writes.

    `hash_algorithm` and `seed` (the engine's NONE_HASH in hex, or its seed text; may be empty)
    decide what its digests mean; `format_version` is the engine's and its kernels' version, because
    an upgrade may change bytes; `lookahead_tokens` is the count that EAGLE-style hashing covers
    beyond a block; `cache_group` separates the groups of a hybrid model, whose digests are equal;
    `adapter_digest` (32 bytes) is of the adapter's weights, which engines name but do not hash.
    """

    engine: str
    format_version: str
    hash_algorithm: str
    seed: str
    lookahead_tokens: int = 0
    cache_group: int = 0
    adapter_digest: bytes | None = None

    def __post_init__(self) -> None:
        require_name("engine", self.engine)
        require_name("engine format version", self.format_version)
        require_name("hash algorithm", self.hash_algorithm)
        require_text("hash seed", self.seed)
        require_integer("lookahead_tokens", self.lookahead_tokens, 0, LOOKAHEAD_TOKENS_MAX)
        require_integer("cache_group", self.cache_group, 0, CACHE_GROUP_MAX)
        if self.adapter_digest is not None:
            require_digest("adapter digest", self.adapter_digest)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter by its weights: 32-byte digest and the generation that it was loaded as."""

    digest: bytes
    generation: int

    def __post_init__(self) -> None:
        require_digest("adapter digest", self.digest)
        require_integer("adapter generation", self.generation, 0, U64_MAX)


@dataclass(frozen=True, slots=True)
class Pool:
    """What two workers must share so that one prefix chain speaks of both."""

    model_id: str
    revision: str
    block_tokens: int

    def __post_init__(self) -> None:
        require_name("model_id", self.model_id)
        require_name("revision", self.revision)
        require_integer("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that must be equal for the bytes of two blocks to be interchangeable.

    `revision` is the digest of the weights as text; `layout` the explicit name of the order in
    which elements lie (equal shapes do not make equal layouts: with two KV heads, or as many as
    tokens, two orders have one shape); `rope_digest` the digest of rope and scaling parameters;
    `engine` is given when blocks are stored under a foreign engine's digests, None under prefix
    keys.
    """

    model_id: str
    revision: str
    kv_dtype: KvDtype
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    layout: str
    rope_digest: bytes
    shard: Shard
    codec_id: int = CODEC_RAW
    format_version: int = FORMAT_VERSION
    engine: EngineIdentity | None = None

    def __post_init__(self) -> None:
        require_name("model_id", self.model_id)
        require_name("revision", self.revision)
        if not isinstance(self.kv_dtype, KvDtype):
            raise CallerError(f"kv_dtype {self.kv_dtype!r} is not a KvDtype")
        require_integer("layers", self.layers, 1, LAYERS_COUNT_MAX)
        require_integer("kv_heads", self.kv_heads, 1, HEADS_COUNT_MAX)
        require_integer("head_dim", self.head_dim, 1, HEAD_DIM_MAX)
        require_integer("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        require_name("layout", self.layout)
        require_digest("rope_digest", self.rope_digest)
        require_integer("codec_id", self.codec_id, 0, CODEC_ID_MAX)
        require_integer("format_version", self.format_version, 1, FORMAT_VERSION_MAX)
        if not isinstance(self.shard, Shard):
            raise CallerError(f"shard is a {type(self.shard).__name__}, not a Shard")
        if self.engine is not None and not isinstance(self.engine, EngineIdentity):
            raise CallerError(f"engine is a {type(self.engine).__name__}, not an EngineIdentity")
        if self.shard.layer_stop > self.layers or self.shard.head_stop > self.kv_heads:
            raise CallerError(
                f"shard ends at layer {self.shard.layer_stop} and head {self.shard.head_stop}, "
                f"the model at {self.layers} and {self.kv_heads}"
            )
        if self.block_bytes > PAYLOAD_BYTES_MAX:
            raise LimitError(f"a block of {self.block_bytes} bytes exceeds {PAYLOAD_BYTES_MAX}")

    @property
    def pool(self) -> Pool:
        """The pool whose prefix chain names blocks of this namespace."""
        return Pool(self.model_id, self.revision, self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of keys and values of one block of this shard, before the codec.

        Multi-head, grouped-query (fewer KV heads) and multi-query attention (one KV head); a model
        with one shared latent instead of keys and values is not described by these fields.
        """
        elements = self.shard.layers_count * self.shard.heads_count * self.head_dim
        return 2 * elements * self.block_tokens * self.kv_dtype.element_bytes

    def fingerprint(self) -> Fingerprint:
        """Return the 32 bytes that name this namespace: SHA-256 of the canonical encoding."""
        return Fingerprint(digest(_NAMESPACE_DOMAIN, self._fields()))

    def _fields(self) -> dict[int, Value]:
        return {
            1: self.model_id,
            2: self.revision,
            3: Symbol(self.kv_dtype.value),
            4: self.layers,
            5: self.kv_heads,
            6: self.head_dim,
            7: self.block_tokens,
            8: self.layout,
            9: self.rope_digest,
            10: range(self.shard.layer_start, self.shard.layer_stop),
            11: range(self.shard.head_start, self.shard.head_stop),
            12: self.codec_id,
            13: self.format_version,
            14: None if self.engine is None else _engine_fields(self.engine),
        }


def _engine_fields(engine: EngineIdentity) -> dict[int, Value]:
    fields: dict[int, Value] = {
        1: engine.engine,
        2: engine.format_version,
        3: engine.hash_algorithm,
        4: engine.seed,
        5: engine.lookahead_tokens,
        6: engine.cache_group,
    }
    if (
        engine.adapter_digest is not None
    ):  # left out, not absent: older namespaces stay what they are
        fields[7] = engine.adapter_digest
    return fields


def chain_root(pool: Pool, scope_salt: str | None, adapter: AdapterRef | None) -> bytes:
    """Return the 32-byte root of the prefix chain of one pool, scope and adapter.

    `scope_salt` is the `cache_salt` of the request exactly as worker and bridge see it (hex from
    `scopes.scope_salt` where a router made it), None for a request without one. Layout, dtype,
    shard and codec are not in it: they are the namespace's.
    """
    if scope_salt is not None:
        require_text("scope salt", scope_salt)
    fields: dict[int, Value] = {
        1: pool.model_id,
        2: pool.revision,
        3: pool.block_tokens,
        4: scope_salt,
        5: None if adapter is None else {1: adapter.digest, 2: adapter.generation},
    }
    return digest(_ROOT_DOMAIN, fields)


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One image, sound or video that overlaps a block.

    `content_id` is a digest of the content, at least 128 bits: placeholder tokens are equal for all
    items, so that this id alone keeps two images apart. `offset` is where the item starts, in
    tokens from the block's start; negative when it began in an earlier block.
    """

    content_id: bytes
    offset: int

    def __post_init__(self) -> None:
        if type(self.content_id) is not bytes or len(self.content_id) < CONTENT_ID_BYTES_MIN:
            raise CallerError(f"content id is not bytes of at least {CONTENT_ID_BYTES_MIN}")
        require_integer("offset", self.offset, I64_MIN, 2**63 - 1)


def encode_extras(
    multimodal: tuple[MultimodalItem, ...] = (),
    prompt_embeds_digest: bytes | None = None,
    opaque: bytes | None = None,
) -> bytes:
    """Return what else than tokens shapes one block's KV, as bytes for `keys.prefix_keys`.

    Empty when there is nothing, as for text. The order of items does not matter. `opaque` is for
    callers with a kind of input that has no field here yet. Raises CallerError for an item given
    twice, LimitError past EXTRAS_BYTES_MAX or MULTIMODAL_ITEMS_MAX.
    """
    if not multimodal and prompt_embeds_digest is None and opaque is None:
        return b""
    if len(multimodal) > MULTIMODAL_ITEMS_MAX:
        raise LimitError(f"{len(multimodal)} items of one block exceed {MULTIMODAL_ITEMS_MAX}")
    items = sorted((item.offset, item.content_id) for item in multimodal)
    if len(set(items)) != len(items):
        raise CallerError("a multimodal item is given twice at one offset")
    if prompt_embeds_digest is not None:
        require_digest("prompt embeds digest", prompt_embeds_digest)
    fields: dict[int, Value] = {
        1: tuple(({1: content_id, 2: offset}) for offset, content_id in items),
        2: prompt_embeds_digest,
        3: opaque,
    }
    encoded = encode(_EXTRAS_DOMAIN, fields)
    if len(encoded) > EXTRAS_BYTES_MAX:
        raise LimitError(f"extras of {len(encoded)} bytes exceed {EXTRAS_BYTES_MAX}")
    return encoded
