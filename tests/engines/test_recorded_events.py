"""Bytes that a real engine published, read, recomputed and turned into what a router computes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.core import engine_keys
from kvtier.core.engine_events import AllCleared, BlocksStored, EngineEvent, Place
from kvtier.core.engine_holdings import Appeared, EngineHoldings, HoldingsTerms, KnownKeys
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.engines.events import DecodePolicy, Dialect, decode

RECORDED = Path(__file__).parent / "recorded" / "vllm_0_32_0.json"
BLOCK_TOKENS = 32
POOL = Pool("m", "r", BLOCK_TOKENS)


def events_of(message: int) -> Sequence[EngineEvent]:
    frames = [
        bytes.fromhex(frame) for frame in json.loads(RECORDED.read_text())["messages"][message]
    ]
    topic, number, payload = frames
    assert (topic, len(number)) == (b"kv", 8)
    batch = decode(DecodePolicy(Dialect.VLLM, BLOCK_TOKENS), payload)
    assert not batch.faults
    return batch.events


def last(message: int) -> BlocksStored:
    event = events_of(message)[-1]
    assert isinstance(event, BlocksStored)
    return event


@pytest.mark.parametrize(
    ("message", "salt", "blocks"), [(0, None, 13), (1, "tenant-a", 13), (2, None, 1)]
)
def test_events_of_vllm_are_read_and_its_hashes_can_be_recomputed(
    message: int, salt: str | None, blocks: int
) -> None:
    event = last(message)
    assert (len(event.hashes), event.parent, event.salt) == (blocks, None, salt)
    assert (event.unindexed, event.adapter, event.place) == (None, None, Place("GPU", "", 0))
    scheme = engine_keys.VllmScheme(engine_keys.vllm_none_hash(), BLOCK_TOKENS)
    request = engine_keys.VllmRequest(cache_salt=salt)
    digests = engine_keys.vllm_digests(scheme, event.tokens.tolist(), request)
    assert event.hashes == tuple(digest[-8:] for digest in digests)


def test_a_reset_of_vllm_comes_with_the_next_step() -> None:
    assert events_of(2)[0] == AllCleared()


def test_what_vllm_holds_has_the_names_that_a_router_computes() -> None:
    holdings = EngineHoldings(HoldingsTerms(POOL), KnownKeys(1 << 10))
    for message, salt in ((0, None), (1, "tenant-a")):
        (appeared,) = holdings.apply(last(message))
        assert isinstance(appeared, Appeared)
        tokens = last(message).tokens.tolist()
        expected = prefix_hashes(chain_root(POOL, salt, None), tokens, BLOCK_TOKENS)
        assert appeared.hashes.tolist() == expected.tolist()
