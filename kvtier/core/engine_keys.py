"""The block hashes of vLLM, SGLang and TensorRT-LLM, so that an outsider can recompute them.

Each engine names a block by a digest chained over its tokens, and publishes a 64-bit piece of it;
engines take different pieces, so a wire hash means nothing without its engine. Stores keep foreign
blocks under the full digest, in a namespace that names engine, algorithm and seed.

    engine           chain                                              on the wire, big-endian
    vLLM             SHA-256 of canonical CBOR (`sha256_cbor`) or of    last 8 bytes, u64
                     a pickle (`sha256`) of (parent, tokens, extras)
    SGLang           SHA-256 of parent and u32 little-endian tokens     first 8 bytes, i64
    TensorRT-LLM V2  the same, from a root that hashes LoRA id and      first or last 8 bytes, u64
                     salt id
    TensorRT-LLM V1  a 64-bit mix, not cryptographic                    itself

All of this is pure Python, O(tokens), and checked against byte vectors taken from the engines (vLLM
0.33.0, SGLang 0.5.23, TensorRT-LLM 1.4.0rc4). What must not live here: our own chain (keys.py),
engines' events and their decoding.
"""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import pairwise
from typing import Final

from kvtier.core.cbor import Cbor, canonical_cbor
from kvtier.core.checks import DIGEST_BYTES, require_digest, require_integer, require_text
from kvtier.core.encoding import U64_MAX
from kvtier.errors import CallerError, LimitError
from kvtier.limits import BLOCK_TOKENS_MAX, PROMPT_TOKENS_MAX, TOKEN_ID_MAX

VLLM_DEFAULT_SEED: Final = "vllm-none-hash"


# --- vLLM ---


class VllmAlgorithm(StrEnum):
    """vLLM's `prefix_caching_hash_algo`, those of its values that are SHA-256.

    SHA256 hashes a pickle: equal contents do not always pickle to equal bytes, so it is computed
    for text-only blocks alone. Engines that share blocks should all run with SHA256_CBOR.
    """

    SHA256_CBOR = "sha256_cbor"
    SHA256 = "sha256"


def vllm_none_hash(
    seed: str = VLLM_DEFAULT_SEED, algorithm: VllmAlgorithm = VllmAlgorithm.SHA256_CBOR
) -> bytes:
    """Return the digest that stands for the parent of a first block.

    The seed is the engine's PYTHONHASHSEED as text where that is set, else a constant since August
    2026; older engines draw it at random, so it must be learned in a handshake.
    """
    require_text("seed", seed)
    return _vllm_digest(algorithm, seed)


@dataclass(frozen=True, slots=True)
class VllmScheme:
    """What engines must share to give equal digests.

    `none_hash` is the parent of all chains; `lookahead_tokens` the count of tokens beyond a block
    that its digest covers too, under EAGLE or MTP.
    """

    none_hash: bytes
    block_tokens: int
    lookahead_tokens: int = 0
    algorithm: VllmAlgorithm = VllmAlgorithm.SHA256_CBOR

    def __post_init__(self) -> None:
        require_digest("none_hash", self.none_hash)
        require_integer("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        require_integer("lookahead_tokens", self.lookahead_tokens, 0, BLOCK_TOKENS_MAX)


@dataclass(frozen=True, slots=True)
class VllmItem:
    """A multimodal item of a request: identifier, first token and count of tokens."""

    identifier: str
    start: int
    tokens_count: int


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """What else than tokens vLLM hashes of a request.

    `lora` is (name, path): the path is hashed and never published. `cache_salt` enters the first
    block only, an empty one not at all. `prompt_embeds_digests` holds, per block, the SHA-256 of
    the bytes of its slice of prompt embeddings; shorter than the blocks means none.
    """

    lora: tuple[str, str] | None = None
    cache_salt: str | None = None
    items: tuple[VllmItem, ...] = ()
    prompt_embeds_digests: tuple[bytes | None, ...] = ()


PLAIN_REQUEST: Final = VllmRequest()


def vllm_digests(
    scheme: VllmScheme, tokens: Sequence[int], request: VllmRequest = PLAIN_REQUEST
) -> list[bytes]:
    """Return the 32-byte digests of the full blocks of a request, in order.

    A block whose lookahead tokens are not there yet has no digest. Raises CallerError for tokens
    that are not u32 and, under SHA256, for a block that is more than text; LimitError past
    PROMPT_TOKENS_MAX.
    """
    checked = _checked_tokens(tokens, TOKEN_ID_MAX)
    size, lookahead = scheme.block_tokens, scheme.lookahead_tokens
    digests: list[bytes] = []
    parent = scheme.none_hash
    for start in range(0, len(checked) - size - lookahead + 1, size):
        stop = start + size
        extra: Cbor = _vllm_extra(request, start, stop + lookahead, len(digests))
        if lookahead:
            extra = (extra, *checked[stop : stop + lookahead])
        parent = _vllm_digest(scheme.algorithm, (parent, checked[start:stop], extra))
        digests.append(parent)
    return digests


def vllm_wire(digest: bytes) -> int:
    """Return what vLLM's events carry of a digest: its last 8 bytes, big-endian, u64."""
    return _last_8(digest)


def _vllm_extra(request: VllmRequest, start: int, stop: int, block: int) -> Cbor:
    """Extras of tokens `start` to `stop`: LoRA, items, salt, embeds, in this order, or None."""
    found: list[Cbor] = []
    if request.lora is not None:
        found.append(("lora", *request.lora))
    found += [
        ("mm", item.identifier, item.start - start)
        for item in request.items
        if item.start < stop and item.start + item.tokens_count > start
    ]
    if start == 0 and request.cache_salt:
        found.append(("cache_salt", request.cache_salt))
    embeds = request.prompt_embeds_digests
    if block < len(embeds) and embeds[block] is not None:
        found.append(("prompt_embeds", embeds[block]))
    return tuple(found) if found else None


def _vllm_digest(algorithm: VllmAlgorithm, value: Cbor) -> bytes:
    if algorithm is VllmAlgorithm.SHA256_CBOR:
        return hashlib.sha256(canonical_cbor(value)).digest()
    body = _pickled(value) + b"."
    frame = b"\x80\x05\x95" + len(body).to_bytes(8, "little") + body
    return hashlib.sha256(frame).digest()


def _pickled(value: Cbor) -> bytes:
    """Protocol 5 opcodes of a seed, or of a block without extras: nothing in it repeats."""
    match value:
        case str():
            raw = value.encode("utf-8")
            if len(raw) < 256:
                return b"\x8c" + bytes([len(raw)]) + raw + b"\x94"
            return b"X" + len(raw).to_bytes(4, "little") + raw + b"\x94"
        case (bytes() as parent, tuple() as tokens, None):
            numbers = b"".join(map(_pickled_token, tokens))
            few = {1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(tokens))
            items = numbers + few if few is not None else b"(" + numbers + b"t"
            head = b"C" + bytes([len(parent)]) + parent + b"\x94"
            return head + items + b"\x94N\x87\x94"
    raise CallerError("vLLM's sha256 is computed for blocks of text only: use sha256_cbor")


def _pickled_token(token: Cbor) -> bytes:
    assert isinstance(token, int)
    for opcode, size, most in ((b"K", 1, 2**8), (b"M", 2, 2**16), (b"J", 4, 2**31)):
        if token < most:
            return opcode + token.to_bytes(size, "little")
    return b"\x8a\x05" + token.to_bytes(5, "little")


# --- SGLang ---


class SglangUnit(Enum):
    """What a page is a run of."""

    TOKEN = 1
    BIGRAM = 2
    """Pairs of adjacent tokens (EAGLE): a page of n covers n + 1 tokens, pages overlap by one."""


def sglang_digests(
    tokens: Sequence[int],
    page_tokens: int,
    seed: bytes | None = None,
    unit: SglangUnit = SglangUnit.TOKEN,
) -> list[bytes]:
    """Return the 32-byte digests of the full pages of `tokens`, in order.

    `seed` is what the first page is chained to: `sglang_event_seed` or `sglang_storage_seed` where
    a request is namespaced, else None. A page with a token above u32 is hashed in a wide form, a
    marker and u64; for bigrams no such form is known and CallerError is raised.
    """
    require_integer("page_tokens", page_tokens, 1, BLOCK_TOKENS_MAX)
    if seed is not None:
        require_digest("seed", seed)
    checked = _checked_tokens(tokens, U64_MAX)
    overlap = unit.value - 1
    digests: list[bytes] = []
    prior = b"" if seed is None else seed
    for start in range(0, len(checked) - page_tokens - overlap + 1, page_tokens):
        page = checked[start : start + page_tokens + overlap]
        prior = hashlib.sha256(prior + _sglang_page(page, unit)).digest()
        digests.append(prior)
    return digests


def sglang_event_seed(cache_salt: str) -> bytes:
    """Return the seed of the chain that events of a salted request use."""
    require_text("cache_salt", cache_salt)
    return hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode("utf-8")).digest()


def sglang_storage_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """Return the seed of the chain that storage keys use, None for a request without namespace.

    Events and storage differ for every namespaced request: one digest cannot serve both.
    """
    if extra_key is None and cache_salt is None:
        return None
    message = b"sglang-cache-namespace-v1"
    for part in (extra_key, cache_salt):
        if part is None:
            message += b"\x00"
            continue
        require_text("namespace part", part)
        raw = part.encode("utf-8")
        message += b"\x01" + len(raw).to_bytes(8, "little") + raw
    return hashlib.sha256(message).digest()


def sglang_wire(digest: bytes) -> int:
    """Return what SGLang's events carry of a digest: its first 8 bytes, big-endian, i64."""
    require_digest("digest", digest)
    return int.from_bytes(digest[:8], "big", signed=True)


def _sglang_page(page: tuple[int, ...], unit: SglangUnit) -> bytes:
    if max(page) <= TOKEN_ID_MAX:
        if unit is SglangUnit.BIGRAM:
            page = tuple(token for pair in pairwise(page) for token in pair)
        return b"".join(token.to_bytes(4, "little") for token in page)
    if unit is SglangUnit.BIGRAM:
        raise CallerError("bigrams of tokens above u32 have no known form")
    return b"\xff" + b"".join(token.to_bytes(8, "little") for token in page)


# --- TensorRT-LLM, v2_sha256 and v2_sha256_64 ---


def trtllm_salt_id(cache_salt: str) -> int:
    """Return the u64 that stands for a cache salt in the root."""
    require_text("cache_salt", cache_salt)
    digest = hashlib.sha256(cache_salt.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "little")


def trtllm_root(lora_id: int | None = None, salt_id: int | None = None) -> bytes:
    """Return the 32-byte root of the chain of one LoRA id and salt id.

    A mask says which of the two are present (bit 0 LoRA, bit 1 salt); each follows as u64.
    """
    message = b""
    mask = 0
    for bit, part in enumerate((lora_id, salt_id)):
        if part is not None:
            require_integer("part of the reuse scope", part, 0, U64_MAX)
            mask |= 1 << bit
            message += part.to_bytes(8, "little")
    return hashlib.sha256(bytes([mask]) + message).digest()


def trtllm_digests(root: bytes, tokens: Sequence[int | bytes], block_tokens: int) -> list[bytes]:
    """Return the 32-byte digests of the full blocks of `tokens`, in order.

    The first token of a multimodal item is given as the 32-byte digest of its content. Partial
    blocks, which the engine may publish, have no digest here.
    """
    require_digest("root", root)
    require_integer("block_tokens", block_tokens, 1, BLOCK_TOKENS_MAX)
    _require_prompt_length(len(tokens))
    digests: list[bytes] = []
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[start : start + block_tokens]
        parent = hashlib.sha256(parent + b"".join(map(_trtllm_token, block))).digest()
        digests.append(parent)
    return digests


def trtllm_wire_first_8(digest: bytes) -> int:
    """Return the wire hash of `v2_sha256_64`: the first 8 bytes, big-endian, u64."""
    require_digest("digest", digest)
    return int.from_bytes(digest[:8], "big")


def trtllm_wire_low_64(digest: bytes) -> int:
    """Return the wire hash of the ZMQ stream: the low 64 bits, that is the last 8 bytes, u64."""
    return _last_8(digest)


def _trtllm_token(token: int | bytes) -> bytes:
    if isinstance(token, bytes):
        require_digest("multimodal token", token)
        return token
    (number,) = _checked_tokens((token,), 2**31 - 1)
    return number.to_bytes(4, "little")


# --- TensorRT-LLM, v1_block_key ---

_V1_PARENT_FACTOR: Final = 0xBF58476D1CE4E5B9
_V1_TOKEN_FACTOR: Final = 0x45D9F3B
_V1_GOLDEN_RATIO: Final = 0x9E3779B9
_U32: Final = 2**32 - 1


def trtllm_v1_hashes(tokens: Sequence[int], block_tokens: int) -> list[int]:
    """Return the u64 hashes of the full blocks of `tokens` under `v1_block_key`, in order.

    Text of the base model only: the engine mixes a salt through its C++ library's string hash,
    which nobody else can compute, and LoRA and multimodal blocks are not covered by any vector.
    Not collision resistant: good for routing hints, never as a storage key.
    """
    require_integer("block_tokens", block_tokens, 1, BLOCK_TOKENS_MAX)
    checked = _checked_tokens(tokens, TOKEN_ID_MAX)
    hashes: list[int] = []
    parent = 0
    for start in range(0, len(checked) - block_tokens + 1, block_tokens):
        state = block_tokens ^ (parent * _V1_PARENT_FACTOR & U64_MAX)
        for token in checked[start : start + block_tokens]:
            mixed = (_v1_scramble(token) + _V1_GOLDEN_RATIO) & _U32
            state ^= (mixed + (state << 6) + (state >> 2)) & U64_MAX
        parent = state
        hashes.append(state)
    return hashes


def _v1_scramble(token: int) -> int:
    for _ in range(2):
        token = (token >> 16 ^ token) * _V1_TOKEN_FACTOR & _U32
    return token >> 16 ^ token


# --- shared ---


def _last_8(digest: bytes) -> int:
    if type(digest) is not bytes or not 8 <= len(digest) <= DIGEST_BYTES:
        raise CallerError("digest is not bytes of 8 to 32")
    return int.from_bytes(digest[-8:], "big")


def _checked_tokens(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """Tokens as Python integers (numpy's are taken), each 0 to `most`."""
    _require_prompt_length(len(tokens))
    try:
        checked = tuple(map(operator.index, tokens))
    except TypeError:
        raise CallerError("tokens are not all integers") from None
    if any(isinstance(token, bool) for token in tokens):
        raise CallerError("a token is a boolean")
    if checked and not 0 <= min(checked) <= max(checked) <= most:
        raise CallerError(f"a token is outside 0 to {most}")
    return checked


def _require_prompt_length(length: int) -> None:
    if length > PROMPT_TOKENS_MAX:
        raise LimitError(f"{length} tokens exceed {PROMPT_TOKENS_MAX}")
