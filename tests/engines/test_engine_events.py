"""Decoding of foreign engines' events: both shapes, three engines, and whatever bytes come."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import limits
from kvtier.core import engine_keys
from kvtier.core.engine_events import (
    AllCleared,
    BlockExtras,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineHash,
    EventFault,
    Place,
    Unindexed,
)
from kvtier.engines.events import (
    DecodePolicy,
    Dialect,
    HiddenSalts,
    decode,
    decode_trtllm_json,
)
from tests.support import engine_wire as wire

VLLM = DecodePolicy(Dialect.VLLM, 16)
SGLANG = DecodePolicy(Dialect.SGLANG, 16)
TRTLLM = DecodePolicy(Dialect.TRTLLM, 16, HiddenSalts.ASSUME_NONE)
TOKENS = list(range(16))
B0, B1 = 2233398808101521225, 17911472383915781900
"""vLLM's wire hashes of tokens 0..15 and 16..31 (sha256_cbor, default seed)."""


def name(wire_hash: int) -> EngineHash:
    return EngineHash(wire_hash.to_bytes(8, "big", signed=wire_hash < 0))


def only(batch: EngineBatch) -> Any:
    assert not batch.faults
    (event,) = batch.events
    return event


def stored_of(policy: DecodePolicy, payload: bytes) -> BlocksStored:
    event = only(decode(policy, payload))
    assert isinstance(event, BlocksStored)
    return event


# ---- vLLM


def test_the_bytes_of_a_clear_of_vllm_0_33_are_read() -> None:
    payload = bytes.fromhex(
        "93cb3ff00000000000009181a474797065b0416c6c426c6f636b73436c6561726564c0"
    )
    assert payload == wire.encoded(wire.AllBlocksCleared())
    assert decode(VLLM, payload) == EngineBatch((AllCleared(),))


def test_a_stored_map_of_vllm_names_blocks_tokens_and_place() -> None:
    payload = wire.encoded(wire.stored([B0, B1], None, range(32)), dp_rank=3)
    batch = decode(VLLM, payload)
    assert batch.dp_rank == 3
    event = only(batch)
    assert event.hashes == (name(B0), name(B1))
    assert event.parent is None
    assert event.tokens.tolist() == list(range(32))
    assert (event.place, event.block_tokens) == (Place("GPU", "", 0), 16)
    assert (event.adapter, event.salt, dict(event.extras), event.unindexed) == (
        None,
        None,
        {},
        None,
    )


def test_arrays_of_old_say_the_same_as_maps() -> None:
    old = wire.encoded(
        wire.OldBlockStored([B1], B0, TOKENS, 16, None, "GPU", None, [None]),
        wire.OldBlockRemoved([B0], "GPU"),
        wire.OldAllBlocksCleared(),
    )
    new = wire.encoded(wire.stored([B1], B0, TOKENS), wire.removed([B0]), wire.AllBlocksCleared())
    one, other = decode(VLLM, old), decode(VLLM, new)
    assert one.events[1:] == other.events[1:] == (
        BlocksRemoved(Place(), (name(B0),)), AllCleared(),
    )  # fmt: skip
    for batch in (one, other):
        event = batch.events[0]
        assert isinstance(event, BlocksStored)
        assert (event.hashes, event.parent) == ((name(B1),), name(B0))
        assert event.unindexed is None


def test_a_batch_of_two_items_has_no_rank() -> None:
    batch = decode(VLLM, wire.raw([1, [{"type": "AllBlocksCleared"}]]))
    assert batch == EngineBatch((AllCleared(),), {}, None)


def test_arrays_without_extra_keys_hide_salts_and_are_not_indexed() -> None:
    payload = wire.encoded(wire.OldestBlockStored([B0], None, TOKENS, 16, None))
    assert stored_of(VLLM, payload).unindexed is Unindexed.SALT_UNSEEN
    trusting = DecodePolicy(Dialect.VLLM, 16, HiddenSalts.ASSUME_NONE)
    assert stored_of(trusting, payload).unindexed is None


def test_a_salt_is_told_from_an_adapters_name_of_the_same_text() -> None:
    salted = stored_of(VLLM, wire.encoded(wire.stored([B0], None, TOKENS, extra_keys=[["x"]])))
    assert (salted.adapter, salted.salt, salted.unindexed) == (None, "x", None)
    adapted = stored_of(
        VLLM,
        wire.encoded(wire.stored([B0], None, TOKENS, lora_name="x", lora_id=1, extra_keys=[["x"]])),
    )
    assert (adapted.adapter, adapted.salt, adapted.unindexed) == ("x", None, None)
    both = wire.stored([B0], None, TOKENS, lora_name="x", lora_id=1, extra_keys=[["x", "x"]])
    event = stored_of(VLLM, wire.encoded(both))
    assert (event.adapter, event.salt, event.unindexed) == ("x", "x", None)


def test_a_text_that_is_neither_adapter_nor_first_blocks_salt_is_not_indexed() -> None:
    keys = [["salt"], ["what?"]]
    event = stored_of(VLLM, wire.encoded(wire.stored([B0, B1], None, range(32), extra_keys=keys)))
    assert event.unindexed is Unindexed.EXTRAS


def test_multimodal_items_and_embeddings_are_kept_by_block() -> None:
    keys = [None, [["ab" * 32, -4], ["cd" * 32, 9], b"e" * 32]]
    event = stored_of(VLLM, wire.encoded(wire.stored([B0, B1], None, range(32), extra_keys=keys)))
    assert dict(event.extras) == {
        1: BlockExtras((("ab" * 32, -4), ("cd" * 32, 9)), b"e" * 32),
    }
    assert event.unindexed is None


def test_an_adapter_with_a_number_but_no_name_is_not_indexed() -> None:
    event = stored_of(VLLM, wire.encoded(wire.stored([B0], None, TOKENS, lora_id=1)))
    assert event.unindexed is Unindexed.ADAPTER_UNSEEN


@pytest.mark.parametrize(
    ("kind", "unindexed"),
    [
        ("full_attention", None),
        ("mla_attention", None),
        ("sliding_window", Unindexed.ATTENTION),
        ("mamba", Unindexed.ATTENTION),
        ("of_next_year", Unindexed.ATTENTION),
    ],
)
def test_only_groups_of_whole_prefixes_are_indexed(kind: str, unindexed: Unindexed | None) -> None:
    event = wire.stored([B0], None, TOKENS, kv_cache_spec_kind=kind, group_idx=2)
    read = stored_of(VLLM, wire.encoded(event))
    assert (read.unindexed, read.place.group) == (unindexed, 2)


def test_tokens_that_span_skipped_blocks_are_not_indexed() -> None:
    event = stored_of(VLLM, wire.encoded(wire.stored([B1], None, range(48))))
    assert event.unindexed is Unindexed.LENGTHS


def test_a_placeholder_of_an_offloading_connector_is_not_indexed() -> None:
    event = wire.stored([B0], None, [], block_size=0, medium="CPU", ownership="fs")
    read = stored_of(VLLM, wire.encoded(event))
    assert (read.unindexed, read.place) == (Unindexed.NO_TOKENS, Place("CPU", "fs", 0))


def test_blocks_on_another_machine_are_not_in_the_engines_memory() -> None:
    for locality, medium in (("REMOTE", "REMOTE"), ("LOCAL", "GPU"), (None, "GPU")):
        event = wire.stored([B0], None, TOKENS, locality=locality)
        assert stored_of(VLLM, wire.encoded(event)).place.medium == medium


def test_full_digests_on_the_wire_are_names_too() -> None:
    digest = bytes(range(32))
    event = stored_of(VLLM, wire.encoded(wire.stored([digest], None, TOKENS)))
    assert event.hashes == (digest,)


def test_one_bad_event_does_not_lose_its_batch() -> None:
    payload = wire.encoded(
        wire.removed([B0]),
        {"type": "BlockStored", "block_hashes": "gibberish"},
        {"type": "BlockTeleported"},
        7,
        {"type": "BlockRemoved"},
        wire.removed([B1]),
    )
    batch = decode(VLLM, payload)
    assert [event.hashes for event in batch.events if isinstance(event, BlocksRemoved)] == [
        (name(B0),), (name(B1),),
    ]  # fmt: skip
    assert batch.faults == {
        EventFault.FIELD: 2, EventFault.UNKNOWN_TYPE: 1, EventFault.SHAPE: 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_hashes", [True]),
        ("block_hashes", [1.5]),
        ("block_hashes", [b"short"]),
        ("parent_block_hash", "no hash"),
        ("token_ids", [1.5] * 16),
        ("token_ids", [-1] * 16),
        ("token_ids", [2**32] * 16),
        ("token_ids", ["1"] * 16),
        ("token_ids", [[1, 2, 3]] * 16),
        ("block_size", -1),
        ("block_size", limits.BLOCK_TOKENS_MAX + 1),
        ("block_size", True),
        ("medium", 7),
        ("medium", "x" * (limits.NAME_BYTES_MAX + 1)),
        ("lora_name", b"bytes"),
        ("extra_keys", "text"),
        ("extra_keys", [7]),
        ("group_idx", -1),
    ],
)
def test_a_field_that_is_wrong_is_a_fault_of_its_event_alone(field: str, value: object) -> None:
    good: dict[str, object] = {
        "type": "BlockStored", "block_hashes": [B0], "parent_block_hash": None,
        "token_ids": TOKENS, "block_size": 16, "lora_id": None, "medium": "GPU",
    }  # fmt: skip
    batch = decode(VLLM, wire.raw([1.0, [good | {field: value}, good], None]))
    assert batch.faults == {EventFault.FIELD: 1}
    assert len(batch.events) == 1


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        (b"", EventFault.MALFORMED),
        (b"\xc1", EventFault.MALFORMED),
        (b"\xdd\xff\xff\xff\xff", EventFault.MALFORMED),
        (b"\x91" * 3000, EventFault.MALFORMED),
        (b"\x81\x90\x01", EventFault.MALFORMED),
        (wire.raw({"type": "BlockRemoved"}), EventFault.SHAPE),
        (wire.raw([1.0]), EventFault.SHAPE),
        (wire.raw(["now", []]), EventFault.SHAPE),
        (b"\0" * (limits.ENGINE_PAYLOAD_BYTES_MAX + 1), EventFault.TOO_LARGE),
        (wire.raw([1.0, [0] * (limits.ENGINE_EVENTS_MAX + 1)]), EventFault.TOO_LARGE),
    ],
)
def test_a_payload_that_is_no_batch_is_one_fault(payload: bytes, fault: EventFault) -> None:
    assert decode(VLLM, payload) == EngineBatch((), {fault: 1})


def test_text_that_is_no_utf8_spoils_one_event_only() -> None:
    bad = wire.raw({"type": "BlockRemoved", "block_hashes": [B0], "medium": "GPU"})
    assert bad.count(b"GPU") == 1
    payload = b"\x92" + wire.raw(1.0) + b"\x92" + bad.replace(b"GPU", b"\xff\xfeU") + bad
    batch = decode(VLLM, payload)
    assert (len(batch.events), dict(batch.faults)) == (1, {EventFault.FIELD: 1})


# ---- SGLang


def test_pages_of_sglang_have_signed_names_and_salts() -> None:
    hashes = [engine_keys.sglang_wire(one) for one in engine_keys.sglang_digests(range(64), 16)]
    assert hashes[:2] == [6738917275443968386, 5080553031686747138]
    event = wire.SglangBlockStored(hashes, None, list(range(64)), 16, None, "GPU", "tenant-a")
    read = stored_of(SGLANG, wire.encoded(event))
    assert read.hashes == tuple(map(name, hashes))
    assert (read.salt, read.unindexed) == ("tenant-a", None)
    negative = stored_of(SGLANG, wire.encoded(wire.SglangBlockStored([-2], -1, TOKENS, 16, None)))
    assert (negative.hashes, negative.parent) == ((b"\xff" * 7 + b"\xfe",), b"\xff" * 8)


def test_bigrams_of_sglang_stand_for_their_first_tokens() -> None:
    pairs = [[token, token + 1] for token in range(16)]
    event = stored_of(SGLANG, wire.encoded(wire.SglangBlockStored([5], None, pairs, 16, None)))
    assert event.tokens.tolist() == TOKENS
    assert event.unindexed is None


def test_arrays_of_sglang_without_a_salt_hide_it() -> None:
    old = wire.encoded(wire.OldestBlockStored([B0], None, TOKENS, 16, None, "GPU"))
    assert stored_of(SGLANG, old).unindexed is Unindexed.SALT_UNSEEN
    newer = wire.raw([1.0, [["BlockStored", [B0], None, TOKENS, 16, None, "GPU", "s"]]])
    event = stored_of(SGLANG, newer)
    assert (event.salt, event.unindexed) == ("s", None)


# ---- TensorRT-LLM


def trt_block(block_hash: object, tokens: list[int], **more: object) -> dict[str, object]:
    listed = [{"type": "unique_token", "token_id": one, "token_extra_id": 0} for one in tokens]
    block = {"type": "stored_block", "block_hash": block_hash, "tokens": listed,
             "cache_level": 0, "priority": 35}  # fmt: skip
    return block | more


def polled(*datas: dict[str, object], **more: object) -> bytes:
    events = [{"event_id": n, "data": data, "window_size": 4096} | more
              for n, data in enumerate(datas)]  # fmt: skip
    return json.dumps(events).encode()


def test_a_poll_of_tensorrt_is_numbered_and_keeps_its_levels() -> None:
    h0, h1 = engine_keys.trtllm_v1_hashes(list(range(32)), 16)
    assert (h0, h1) == (9203973037320463276, 2390151628341984051)
    body = polled(
        {"type": "created", "num_blocks_per_cache_level": [8, 0]},
        {"type": "stored", "parent_hash": None,
         "blocks": [trt_block(h0, TOKENS), trt_block(h1, list(range(16, 32))),
                    trt_block(7, [1, 2, 3])]},
        {"type": "updated", "block_hash": h1,
         "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1}},
        {"type": "updated", "block_hash": h1, "priority": {"old_value": 35, "new_value": 80}},
        {"type": "removed", "block_hashes": [h0, h1]},
        attention_dp_rank=1,
    )  # fmt: skip
    batches = decode_trtllm_json(TRTLLM, body)
    assert [one.number for one in batches] == [0, 1, 2, 3, 4]
    assert {one.batch.dp_rank for one in batches} == {1}
    assert not any(one.batch.faults for one in batches)
    created, kept, moved, prioritised, gone = (one.batch.events for one in batches)
    assert created == prioritised == ()
    first, second = kept
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (first.hashes, first.parent) == ((name(h0),), None)
    assert (second.hashes, second.parent) == ((name(h1),), name(h0))
    assert second.tokens.tolist() == list(range(16, 32))
    assert moved == (BlocksMoved(Place("GPU"), Place("CPU"), (name(h1),)),)
    assert gone == (BlocksRemoved(None, (name(h0), name(h1))),)


def test_hex_names_salts_and_images_of_tensorrt_are_seen() -> None:
    (digest,) = engine_keys.trtllm_digests(engine_keys.trtllm_root(), TOKENS, 16)
    assert digest.hex().startswith("089aec1b")
    body = polled(
        {"type": "stored", "parent_hash": None,
         "blocks": [trt_block(digest.hex(), TOKENS, cache_salt="s")]},
        {"type": "stored", "parent_hash": None,
         "blocks": [trt_block(1, TOKENS, mm_keys=[["ab", 0]])]},
    )  # fmt: skip
    one, other = (only(numbered.batch) for numbered in decode_trtllm_json(TRTLLM, body))
    assert (one.hashes, one.salt, one.unindexed) == ((digest,), "s", None)
    assert other.unindexed is Unindexed.EXTRAS


def test_another_window_of_tensorrt_is_left_out() -> None:
    policy = DecodePolicy(Dialect.TRTLLM, 16, window_tokens=512)
    body = polled(
        {"type": "stored", "parent_hash": None, "blocks": [trt_block(1, TOKENS)]},
        {"type": "removed", "block_hashes": [1]},
    )
    assert [one.batch for one in decode_trtllm_json(policy, body)] == [EngineBatch()] * 2


def test_adapters_of_tensorrt_cannot_be_told_apart() -> None:
    policy = DecodePolicy(Dialect.TRTLLM, 16, HiddenSalts.ASSUME_NONE, has_adapters=True)
    body = polled({"type": "stored", "parent_hash": None, "blocks": [trt_block(1, TOKENS)]})
    (numbered,) = decode_trtllm_json(policy, body)
    assert only(numbered.batch).unindexed is Unindexed.ADAPTER_UNSEEN


def test_the_stream_of_tensorrt_hides_salts() -> None:
    event = wire.stored([7], None, TOKENS)
    payload = wire.encoded(event, dp_rank=0)
    strict = DecodePolicy(Dialect.TRTLLM, 16)
    assert stored_of(strict, payload).unindexed is Unindexed.SALT_UNSEEN
    assert stored_of(TRTLLM, payload).unindexed is None


def test_a_poll_that_is_no_json_is_one_fault() -> None:
    for body in (b"", b"[" * 100_000, b"{", b"\xff"):
        (numbered,) = decode_trtllm_json(TRTLLM, body)
        assert numbered.batch.faults == {EventFault.MALFORMED: 1}
    (numbered,) = decode_trtllm_json(TRTLLM, b"[[]]")
    assert numbered.batch.faults == {EventFault.SHAPE: 1}


# ---- whatever comes


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=40)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=12,
)  # fmt: skip
NAMES = st.sampled_from(list(wire.BlockStored.__struct_fields__))
EVENTS = (
    st.dictionaries(NAMES, VALUES).map(lambda fields: {"type": "BlockStored"} | fields)
    | st.dictionaries(NAMES, VALUES).map(lambda fields: {"type": "BlockRemoved"} | fields)
    | st.lists(VALUES, max_size=9).map(lambda items: ["BlockStored", *items])
    | VALUES
)
POLICIES = st.sampled_from([VLLM, SGLANG, TRTLLM])


@settings(max_examples=150, deadline=None)
@given(policy=POLICIES, payload=st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_a_fault(policy: DecodePolicy, payload: bytes) -> None:
    batch = decode(policy, payload)
    assert batch.events or batch.faults or msgspec.msgpack.decode(payload)[1] == []
    for numbered in decode_trtllm_json(TRTLLM, payload):
        assert isinstance(numbered.batch, EngineBatch)


@settings(max_examples=150, deadline=None)
@given(policy=POLICIES, events=st.lists(EVENTS, max_size=5))
def test_every_event_is_read_or_counted(policy: DecodePolicy, events: list[Any]) -> None:
    batch = decode(policy, wire.raw([1.0, events, None]))
    assert len(batch.events) + sum(batch.faults.values()) == len(events)


@settings(max_examples=100, deadline=None)
@given(data=st.dictionaries(
    st.sampled_from(["type", "blocks", "parent_hash", "block_hashes", "block_hash", "cache_level"]),
    st.sampled_from(["stored", "removed", "updated", "created"])
    | st.recursive(
        st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.text(max_size=34),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["tokens", "block_hash", "cache_level", "token_id", "old_value",
                             "new_value", "cache_salt", "mm_keys"]), inner, max_size=4),
        max_leaves=10),
))  # fmt: skip
def test_polled_events_of_any_content_raise_nothing(data: dict[str, Any]) -> None:
    for numbered in decode_trtllm_json(TRTLLM, polled(data)):
        assert sum(numbered.batch.faults.values()) <= 1
