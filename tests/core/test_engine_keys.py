"""Engines' block hashes: every vector read from an engine, and rules that vectors do not show."""

import hashlib
from collections.abc import Callable, Sequence

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.cbor import Cbor, canonical_cbor
from kvtier.core.engine_keys import (
    SglangUnit,
    VllmAlgorithm,
    VllmItem,
    VllmRequest,
    VllmScheme,
    sglang_digests,
    sglang_event_seed,
    sglang_storage_seed,
    sglang_wire,
    trtllm_digests,
    trtllm_root,
    trtllm_salt_id,
    trtllm_v1_hashes,
    trtllm_wire_first_8,
    trtllm_wire_low_64,
    vllm_digests,
    vllm_none_hash,
    vllm_wire,
)
from kvtier.errors import CallerError, LimitError

NONE_HASH = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"
SCHEME = VllmScheme(vllm_none_hash(), 16)
TOKENS = list(range(32))


def oracle(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


# --- canonical CBOR ---

cbor_values: st.SearchStrategy[Cbor] = st.recursive(
    st.none() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=30).map(tuple),
    max_leaves=20,
)


@given(cbor_values)
def test_cbor_is_that_of_an_independent_writer(value: Cbor) -> None:
    assert canonical_cbor(value) == cbor2.dumps(value, canonical=True)


@pytest.mark.parametrize("edge", [23, 24, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1])
def test_cbor_integers_take_the_shortest_head(edge: int) -> None:
    assert canonical_cbor((edge, -edge)) == cbor2.dumps((edge, -edge), canonical=True)


@pytest.mark.parametrize("value", [True, 1.0, [1], {}, 2**64, -(2**64) - 1, "\ud800", (1, {2})])
def test_what_no_engine_hashes_has_no_cbor(value: object) -> None:
    with pytest.raises(CallerError):
        canonical_cbor(value)  # type: ignore[arg-type]


def test_cbor_nested_without_end_is_refused_before_the_stack_ends() -> None:
    nested: Cbor = ()
    for _ in range(100_000):
        nested = (nested,)
    with pytest.raises(LimitError, match="nested"):
        canonical_cbor(nested)


# --- vLLM ---


def test_the_bytes_of_a_first_block_are_as_written_down() -> None:
    assert canonical_cbor("vllm-none-hash") == bytes.fromhex("6e766c6c6d2d6e6f6e652d68617368")
    block = bytes.fromhex("835820" + NONE_HASH + "90000102030405060708090a0b0c0d0e0ff6")
    assert canonical_cbor((vllm_none_hash(), tuple(range(16)), None)) == block


@pytest.mark.parametrize(
    ("seed", "algorithm", "expected"),
    [
        ("vllm-none-hash", VllmAlgorithm.SHA256_CBOR, NONE_HASH),
        (
            "0",
            VllmAlgorithm.SHA256_CBOR,
            "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
        ),
        (
            "vllm-none-hash",
            VllmAlgorithm.SHA256,
            "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
        ),
    ],
)
def test_vllm_none_hash_vectors(seed: str, algorithm: VllmAlgorithm, expected: str) -> None:
    assert vllm_none_hash(seed, algorithm).hex() == expected


def test_vllm_sha256_cbor_vectors() -> None:
    first, second = vllm_digests(SCHEME, TOKENS)
    assert first.hex() == "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749"
    assert second.hex() == "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c"
    assert vllm_wire(first) == 2233398808101521225
    assert vllm_wire(second) == 17911472383915781900


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            VllmRequest(cache_salt="tenant-a"),
            "4e31e1ced73eb044a95997f0109d0ddab3d9145878214f1a0ee37c048b397859",
        ),
        (
            VllmRequest(lora=("ad1", "/p/ad1")),
            "a682e9d342f5e23e9e1284f9d859b62a6803680dc49c2401a5f9c5fa1496a228",
        ),
    ],
)
def test_vllm_salt_and_lora_vectors(request_: VllmRequest, expected: str) -> None:
    assert vllm_digests(SCHEME, TOKENS, request_)[0].hex() == expected


def test_vllm_sha256_of_pickles_vectors() -> None:
    none_hash = vllm_none_hash(algorithm=VllmAlgorithm.SHA256)
    scheme = VllmScheme(none_hash, 16, algorithm=VllmAlgorithm.SHA256)
    first, second = vllm_digests(scheme, TOKENS)
    assert (first.hex()[:8], first.hex()[-4:]) == ("fe8fa5dd", "4798")
    assert (second.hex()[:8], second.hex()[-4:]) == ("8be7aaa3", "4629")
    assert vllm_wire(first) == 3262291359910021016
    assert vllm_wire(second) == 7142137847444424233


@pytest.mark.parametrize(
    ("tokens", "body"),
    [
        ([7], b"K\x07\x85"),
        ([7, 8], b"K\x07K\x08\x86"),
        ([7, 8, 9], b"K\x07K\x08K\x09\x87"),
        ([255, 256, 65535, 65536], b"(K\xffM\x00\x01M\xff\xffJ\x00\x00\x01\x00t"),
        ([2**31 - 1, 2**31], b"J\xff\xff\xff\x7f\x8a\x05\x00\x00\x00\x80\x00\x86"),
        ([2**32 - 1], b"\x8a\x05\xff\xff\xff\xff\x00\x85"),
    ],
)
def test_vllm_sha256_writes_the_opcodes_of_protocol_5(tokens: list[int], body: bytes) -> None:
    none_hash = bytes(range(32))
    scheme = VllmScheme(none_hash, len(tokens), algorithm=VllmAlgorithm.SHA256)
    body = b"C\x20" + none_hash + b"\x94" + body + b"\x94N\x87\x94."
    frame = b"\x80\x05\x95" + len(body).to_bytes(8, "little") + body
    assert vllm_digests(scheme, tokens) == [hashlib.sha256(frame).digest()]


def test_vllm_sha256_of_more_than_text_is_refused() -> None:
    scheme = VllmScheme(bytes(32), 16, algorithm=VllmAlgorithm.SHA256)
    with pytest.raises(CallerError, match="sha256_cbor"):
        vllm_digests(scheme, TOKENS, VllmRequest(cache_salt="tenant-a"))


def test_vllm_hashes_lora_in_every_block_and_salt_in_the_first() -> None:
    request = VllmRequest(
        lora=("ad1", "/p/ad1"),
        cache_salt="s",
        items=(VllmItem("img", 10, 12), VllmItem("late", 40, 2)),
        prompt_embeds_digests=(None, b"\x05" * 32),
    )
    lora, none_hash = ("lora", "ad1", "/p/ad1"), vllm_none_hash()
    extra_0 = (lora, ("mm", "img", 10), ("cache_salt", "s"))
    first = oracle((none_hash, tuple(range(16)), extra_0))
    extra_1 = (lora, ("mm", "img", -6), ("prompt_embeds", b"\x05" * 32))
    second = oracle((first, tuple(range(16, 32)), extra_1))
    assert vllm_digests(SCHEME, TOKENS, request) == [first, second]


def test_vllm_lookahead_covers_the_next_tokens_and_waits_for_them() -> None:
    scheme = VllmScheme(vllm_none_hash(), 16, lookahead_tokens=2)
    item = VllmItem("img", 17, 1)
    first = oracle((vllm_none_hash(), tuple(range(16)), ((("mm", "img", 17),), 16, 17)))
    assert vllm_digests(scheme, TOKENS, VllmRequest(items=(item,))) == [first]
    assert vllm_digests(scheme, TOKENS[:17]) == []
    plain = oracle((vllm_none_hash(), tuple(range(16)), (None, 16, 17)))
    assert vllm_digests(scheme, TOKENS[:18]) == [plain]


def test_an_empty_vllm_salt_is_no_salt() -> None:
    assert vllm_digests(SCHEME, TOKENS, VllmRequest(cache_salt="")) == vllm_digests(SCHEME, TOKENS)


def test_a_vllm_lora_named_like_a_salt_does_not_collide() -> None:
    salted = vllm_digests(SCHEME, TOKENS, VllmRequest(cache_salt="x"))
    adapted = vllm_digests(SCHEME, TOKENS, VllmRequest(lora=("x", "x")))
    assert salted[0] != adapted[0]


def test_a_16_byte_digest_has_a_vllm_wire_hash_too() -> None:
    assert vllm_wire(bytes(15) + b"\x09") == 9
    with pytest.raises(CallerError):
        vllm_wire(b"short")


# --- SGLang ---


def test_sglang_vectors() -> None:
    first, second = sglang_digests(TOKENS, 16)
    assert (first.hex()[:8], first.hex()[-4:]) == ("5d85718e", "0cea")
    assert (second.hex()[:8], second.hex()[-4:]) == ("4681c010", "901a")
    assert sglang_wire(first) == 6738917275443968386
    assert sglang_wire(second) == 5080553031686747138


def test_sglang_wire_hashes_are_signed() -> None:
    assert sglang_wire(b"\xff" * 32) == -1


def test_a_sglang_page_with_a_token_above_u32_is_wide_and_only_that_page() -> None:
    narrow = hashlib.sha256(b"\x01\0\0\0\x02\0\0\0").digest()
    wide = hashlib.sha256(
        narrow + b"\xff" + bytes([3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0])
    )
    assert sglang_digests([1, 2, 3, 2**32], 2) == [narrow, wide.digest()]


def test_sglang_bigrams_are_pairs_and_pages_overlap_by_a_token() -> None:
    words = [1, 2, 2, 3, 3, 4, 4, 5]
    first = hashlib.sha256(np.array(words[:4], dtype="<u4").tobytes()).digest()
    second = hashlib.sha256(first + np.array(words[4:], dtype="<u4").tobytes()).digest()
    bigrams = SglangUnit.BIGRAM
    assert sglang_digests([1, 2, 3, 4, 5], 2, unit=bigrams) == [first, second]
    assert sglang_digests([1, 2, 3, 4], 2, unit=bigrams) == [first]
    with pytest.raises(CallerError, match="bigram"):
        sglang_digests([1, 2, 2**32], 2, unit=bigrams)


def test_a_sglang_salt_seeds_the_chain_of_events() -> None:
    seed = hashlib.sha256(b"sglang-cache-salt-v1\x00tenant-a").digest()
    assert sglang_event_seed("tenant-a") == seed
    page = hashlib.sha256(seed + np.arange(16, dtype="<u4").tobytes()).digest()
    assert sglang_digests(TOKENS[:16], 16, seed) == [page]


def test_a_sglang_storage_seed_tells_absent_from_empty() -> None:
    tag = b"sglang-cache-namespace-v1"
    assert sglang_storage_seed(None, None) is None
    salted = tag + b"\x00" + b"\x01\x02\0\0\0\0\0\0\0ab"
    assert sglang_storage_seed(None, "ab") == hashlib.sha256(salted).digest()
    empty = tag + b"\x01" + bytes(8) + b"\x00"
    assert sglang_storage_seed("", None) == hashlib.sha256(empty).digest()
    parts = [None, "", "a", "ab", "b"]
    seeds = {sglang_storage_seed(left, right) for left in parts for right in parts}
    assert len(seeds) == len(parts) ** 2


# --- TensorRT-LLM ---


def test_trtllm_v2_vectors() -> None:
    root = trtllm_root()
    assert (root.hex()[:8], root.hex()[-4:]) == ("6e340b9c", "a01d")
    (block,) = trtllm_digests(root, TOKENS[:16], 16)
    assert (block.hex()[:8], block.hex()[-4:]) == ("089aec1b", "1103")
    assert trtllm_wire_first_8(block) == 620067499581158139
    assert trtllm_wire_low_64(block) == 1774424038958436611


def test_a_trtllm_root_hashes_a_mask_and_what_is_present() -> None:
    salt_id = trtllm_salt_id("tenant-a")
    assert salt_id == int.from_bytes(hashlib.sha256(b"tenant-a").digest()[:8], "little")
    lora, salt = (7).to_bytes(8, "little"), salt_id.to_bytes(8, "little")
    assert trtllm_root(7) == hashlib.sha256(b"\x01" + lora).digest()
    assert trtllm_root(None, salt_id) == hashlib.sha256(b"\x02" + salt).digest()
    assert trtllm_root(7, salt_id) == hashlib.sha256(b"\x03" + lora + salt).digest()
    with pytest.raises(CallerError):
        trtllm_root(-1)


def test_a_trtllm_multimodal_token_is_its_digest() -> None:
    root, content = trtllm_root(), b"\x07" * 32
    expected = hashlib.sha256(root + b"\x01\0\0\0" + content).digest()
    assert trtllm_digests(root, [1, content, 3], 2) == [expected]
    with pytest.raises(CallerError):
        trtllm_digests(root, [1, b"short"], 2)


def test_trtllm_v1_vectors() -> None:
    assert trtllm_v1_hashes(TOKENS, 16) == [9203973037320463276, 2390151628341984051]


# --- all chains ---

CHAINS: dict[str, Callable[[Sequence[int]], Sequence[bytes | int]]] = {
    "vllm": lambda tokens: vllm_digests(SCHEME, tokens),
    "sglang": lambda tokens: sglang_digests(tokens, 16),
    "trtllm": lambda tokens: trtllm_digests(trtllm_root(), tokens, 16),
    "trtllm v1": lambda tokens: trtllm_v1_hashes(tokens, 16),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.data())
def test_a_token_changes_its_block_and_all_after_it_and_none_before(
    chain: Callable[[Sequence[int]], Sequence[bytes | int]], tokens: list[int], data: st.DataObject
) -> None:
    hashes = chain(tokens)
    assert len(hashes) == len(tokens) // 16
    assert chain(np.array(tokens, dtype=np.uint32)) == hashes  # type: ignore[arg-type]
    if hashes:
        at = data.draw(st.integers(0, 16 * len(hashes) - 1))
        changed = list(tokens)
        changed[at] ^= 1
        others = chain(changed)
        assert [a == b for a, b in zip(hashes, others, strict=True)] == [
            block < at // 16 for block in range(len(hashes))
        ]


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("bad", [-1, 2**64, 1.5, "1", None, True])
def test_what_is_not_a_token_is_refused(
    chain: Callable[[Sequence[int]], Sequence[bytes | int]], bad: object
) -> None:
    with pytest.raises(CallerError):
        chain([0] * 15 + [bad])  # type: ignore[list-item]


def test_parameters_of_a_chain_are_checked() -> None:
    with pytest.raises(CallerError):
        VllmScheme(b"short", 16)
    with pytest.raises(CallerError):
        VllmScheme(bytes(32), 0)
    with pytest.raises(CallerError):
        sglang_digests(TOKENS, 0)
    with pytest.raises(CallerError):
        sglang_digests(TOKENS, 16, b"short")
    with pytest.raises(CallerError):
        trtllm_digests(b"short", TOKENS, 16)
    with pytest.raises(CallerError):
        trtllm_v1_hashes(TOKENS, 0)
    with pytest.raises(CallerError):
        sglang_wire(b"short")
