"""Identity of a block's bytes: every field counts, and none passes for another."""

import dataclasses
import hashlib
import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.identity import (
    AdapterRef,
    EngineIdentity,
    KvDtype,
    ModelSpec,
    MultimodalItem,
    Pool,
    Shard,
    chain_root,
    encode_extras,
)
from kvtier.core.keys import prefix_keys
from kvtier.errors import CallerError, LimitError
from kvtier.limits import BLOCK_TOKENS_MAX, EXTRAS_BYTES_MAX, NAME_BYTES_MAX

ENGINE = EngineIdentity("vllm", "0.33.0", "sha256_cbor", "9bd96a48")
SPEC = ModelSpec(
    model_id="acme/tiny",
    revision="0f3c",
    kv_dtype=KvDtype.BFLOAT16,
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_tokens=16,
    layout="lbhnc",
    rope_digest=bytes(32),
    shard=Shard(0, 15, 0, 2),
    engine=ENGINE,
)
POOL = SPEC.pool
ADAPTER = AdapterRef(b"\x01" * 32, 1)

CHANGED_SPEC: dict[str, object] = {
    "model_id": "acme/tiny2",
    "revision": "0f3d",
    "kv_dtype": KvDtype.FLOAT16,
    "layers": 31,
    "kv_heads": 4,
    "head_dim": 128,
    "block_tokens": 32,
    "layout": "lbnhc",
    "rope_digest": b"\x01" + bytes(31),
    "shard": Shard(0, 15, 1, 3),
    "codec_id": 1,
    "format_version": 2,
    "engine": None,
}
CHANGED_SHARD: dict[str, int] = {
    "layer_start": 1,
    "layer_stop": 16,
    "head_start": 1,
    "head_stop": 3,
}
CHANGED_ENGINE: dict[str, object] = {
    "engine": "sglang",
    "format_version": "0.33.1",
    "hash_algorithm": "sha256",
    "seed": "4e1195df",
    "lookahead_tokens": 1,
    "cache_group": 1,
    "adapter_digest": b"a" * 32,
}
VARIANTS: dict[str, ModelSpec] = (
    {name: dataclasses.replace(SPEC, **{name: new}) for name, new in CHANGED_SPEC.items()}  # type: ignore[arg-type]
    | {
        f"shard.{name}": dataclasses.replace(
            SPEC, shard=dataclasses.replace(SPEC.shard, **{name: new})
        )
        for name, new in CHANGED_SHARD.items()
    }
    | {
        f"engine.{name}": dataclasses.replace(
            SPEC,
            engine=dataclasses.replace(ENGINE, **{name: new}),  # type: ignore[arg-type]
        )
        for name, new in CHANGED_ENGINE.items()
    }
)


def test_every_field_has_a_changed_value_to_test() -> None:
    # A new field without a changed value here fails, so that none stays out of the fingerprint.
    for described, changed in (
        (ModelSpec, CHANGED_SPEC),
        (Shard, CHANGED_SHARD),
        (EngineIdentity, CHANGED_ENGINE),
    ):
        assert {field.name for field in dataclasses.fields(described)} == set(changed)


@pytest.mark.parametrize("name", VARIANTS)
def test_changing_one_field_changes_the_fingerprint(name: str) -> None:
    assert VARIANTS[name].fingerprint() != SPEC.fingerprint()


def test_all_variants_have_fingerprints_of_their_own() -> None:
    fingerprints = {spec.fingerprint() for spec in VARIANTS.values()} | {SPEC.fingerprint()}
    assert len(fingerprints) == len(VARIANTS) + 1


def test_a_fingerprint_is_a_known_constant_of_the_fields() -> None:
    # A change of this constant makes every block stored so far a miss: raise the domain's version.
    pinned = "d29532d0bd58133b97106c4bb6c0e3636215126efd80d3721e80176ba3acadc4"
    assert SPEC.fingerprint().hex() == pinned


def test_layouts_of_equal_shape_differ_by_name() -> None:
    two_heads = dataclasses.replace(SPEC, kv_heads=2, block_tokens=2, shard=Shard(0, 30, 0, 2))
    heads_first = dataclasses.replace(two_heads, layout="lbhnc")
    tokens_first = dataclasses.replace(two_heads, layout="lbnhc")
    assert heads_first.block_bytes == tokens_first.block_bytes
    assert heads_first.fingerprint() != tokens_first.fingerprint()


@pytest.mark.parametrize(
    ("kv_heads", "heads", "expected"),
    [
        (32, (0, 32), 2 * 4 * 32 * 64 * 16 * 2),
        (8, (4, 8), 2 * 4 * 4 * 64 * 16 * 2),
        (1, (0, 1), 16384),
    ],
    ids=["multi-head", "grouped-query, half the heads", "multi-query"],
)
def test_block_bytes_are_keys_and_values_of_the_shard(
    kv_heads: int, heads: tuple[int, int], expected: int
) -> None:
    spec = dataclasses.replace(SPEC, layers=8, kv_heads=kv_heads, shard=Shard(2, 6, *heads))
    assert spec.block_bytes == expected


def test_shards_that_partition_a_model_add_up_to_its_bytes() -> None:
    whole = dataclasses.replace(SPEC, kv_heads=4, shard=Shard(0, 30, 0, 4))
    parts = [
        dataclasses.replace(whole, shard=Shard(layer, layer + 10, head, head + 2))
        for layer in (0, 10, 20)
        for head in (0, 2)
    ]
    assert sum(part.block_bytes for part in parts) == whole.block_bytes
    assert len({part.fingerprint() for part in parts}) == len(parts)


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": ""},
        {"model_id": "x" * (NAME_BYTES_MAX + 1)},
        {"model_id": "\ud800"},
        {"model_id": b"bytes"},
        {"revision": ""},
        {"kv_dtype": "bfloat16"},
        {"layers": 0},
        {"layers": True},
        {"layers": 14},  # the shard ends at 15
        {"kv_heads": 1},  # the shard ends at 2
        {"head_dim": 0},
        {"head_dim": 64.0},
        {"block_tokens": 0},
        {"block_tokens": BLOCK_TOKENS_MAX + 1},
        {"layout": ""},
        {"rope_digest": bytes(31)},
        {"rope_digest": "00" * 32},
        {"shard": None},
        {"codec_id": -1},
        {"codec_id": 2**32},
        {"format_version": 0},
        {"engine": "vllm"},
        {"head_dim": 2**16, "block_tokens": 4096},  # a block past PAYLOAD_BYTES_MAX
    ],
)
def test_a_spec_outside_its_limits_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CallerError):
        dataclasses.replace(SPEC, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("bounds", [(0, 0, 0, 1), (2, 1, 0, 1), (-1, 1, 0, 1), (0, 1, 1, 1)])
def test_an_empty_or_reversed_shard_is_refused(bounds: tuple[int, int, int, int]) -> None:
    with pytest.raises(CallerError):
        Shard(*bounds)


def test_the_chain_root_knows_pool_scope_and_adapter_and_nothing_of_bytes() -> None:
    roots = [
        chain_root(POOL, None, None),
        chain_root(dataclasses.replace(POOL, model_id="acme/tiny2"), None, None),
        chain_root(dataclasses.replace(POOL, revision="0f3d"), None, None),
        chain_root(dataclasses.replace(POOL, block_tokens=32), None, None),
        chain_root(POOL, "", None),
        chain_root(POOL, "salt", None),
        chain_root(POOL, None, ADAPTER),
        chain_root(POOL, None, dataclasses.replace(ADAPTER, generation=2)),
        chain_root(POOL, None, dataclasses.replace(ADAPTER, digest=b"\x02" * 32)),
        chain_root(POOL, "salt", ADAPTER),
    ]
    assert all(len(root) == 32 for root in roots)
    assert len(set(roots)) == len(roots)
    for name in ("kv_dtype", "layout", "shard", "codec_id", "engine", "format_version"):
        assert chain_root(VARIANTS[name].pool, None, None) == roots[0]


def test_an_adapter_never_collides_with_a_salt_of_its_bytes() -> None:
    # The untagged form of another engine let a LoRA name pass for a cache salt.
    for digest, generation in itertools.product((b"a" * 32, b"0" * 32), (0, 1)):
        adapter = AdapterRef(digest, generation)
        assert chain_root(POOL, None, adapter) != chain_root(POOL, digest.decode(), None)


def test_the_chain_root_is_a_known_constant() -> None:
    by_hand = (
        b"\x14kvtier.chain-root.v1" + b"\x05\x00"
        b"\x01\x00" + b"\x01\x01\x00\x00\x00m"
        b"\x02\x00" + b"\x01\x01\x00\x00\x00r"
        b"\x03\x00" + b"\x03\x08\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00"
        b"\x04\x00" + b"\x00\x00\x00\x00\x00"
        b"\x05\x00" + b"\x00\x00\x00\x00\x00"
    )
    root = chain_root(Pool("m", "r", 16), None, None)
    assert root == hashlib.sha256(by_hand).digest()
    assert root.hex() == "d6c1ed27007e472b1b0dcbed43a44205b6d7a39b30daa884356cd20aee6b694a"


pools = st.builds(
    Pool, st.sampled_from(["a", "ab", "b"]), st.sampled_from(["bc", "c"]), st.just(16)
)
adapters = st.none() | st.builds(AdapterRef, st.binary(min_size=32, max_size=32), st.integers(0, 3))


@given(
    st.tuples(pools, st.none() | st.text("ab", max_size=3), adapters),
    st.tuples(pools, st.none() | st.text("ab", max_size=3), adapters),
)
def test_two_chain_roots_are_equal_only_for_equal_identities(
    left: tuple[Pool, str | None, AdapterRef | None],
    right: tuple[Pool, str | None, AdapterRef | None],
) -> None:
    assert (chain_root(*left) == chain_root(*right)) == (left == right)


@pytest.mark.parametrize(
    ("digest", "generation"), [(b"", 0), (bytes(31), 0), (bytes(32), -1), (bytes(32), 2**64)]
)
def test_an_adapter_reference_is_a_digest_and_a_u64(digest: bytes, generation: int) -> None:
    with pytest.raises(CallerError):
        AdapterRef(digest, generation)


def test_text_alone_has_no_extras() -> None:
    assert encode_extras() == b""


def test_extras_tell_items_offsets_and_kinds_apart() -> None:
    content, other = b"\x01" * 16, b"\x02" * 32
    extras = [
        encode_extras(),
        encode_extras((MultimodalItem(content, 0),)),
        encode_extras((MultimodalItem(content, 1),)),
        encode_extras((MultimodalItem(content, -1),)),
        encode_extras((MultimodalItem(other, 0),)),
        encode_extras((MultimodalItem(content, 0), MultimodalItem(other, 4))),
        encode_extras(prompt_embeds_digest=other),
        encode_extras(opaque=other),
        encode_extras(opaque=b""),
        encode_extras((MultimodalItem(other, 0),), prompt_embeds_digest=other),
    ]
    assert len(set(extras)) == len(extras)


def test_the_order_of_items_does_not_matter() -> None:
    items = (MultimodalItem(b"\x01" * 16, 3), MultimodalItem(b"\x02" * 16, -2))
    assert encode_extras(items) == encode_extras(items[::-1])


def test_a_short_content_id_is_refused() -> None:
    with pytest.raises(CallerError):
        MultimodalItem(b"\x01" * 15, 0)


def test_extras_have_limits() -> None:
    item = MultimodalItem(b"\x01" * 16, 0)
    with pytest.raises(CallerError, match="twice"):
        encode_extras((item, item))
    with pytest.raises(CallerError):
        encode_extras(prompt_embeds_digest=b"short")
    with pytest.raises(LimitError):
        encode_extras(opaque=bytes(EXTRAS_BYTES_MAX))
    with pytest.raises(LimitError):
        encode_extras(tuple(MultimodalItem(b"\x01" * 16, at) for at in range(1000)))


def test_the_chain_takes_root_and_extras_as_they_are_encoded_here() -> None:
    root = chain_root(POOL, "salt", ADAPTER)
    tokens = list(range(48))
    extras = encode_extras((MultimodalItem(b"\x01" * 32, 4),))
    first = hashlib.sha256(root + struct.pack("<16I", *tokens[:16])).digest()
    second = hashlib.sha256(first + struct.pack("<16I", *tokens[16:32]) + extras).digest()
    keys = prefix_keys(root, tokens, POOL.block_tokens, {1: extras})
    assert (keys.key(0), keys.key(1)) == (first, second)
    text = prefix_keys(root, tokens, POOL.block_tokens, {0: encode_extras()})
    assert [text.key(block) == keys.key(block) for block in range(3)] == [True, False, False]
