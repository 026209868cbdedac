"""Who the holders are and what a served name means; over the naive index, the oracle."""

from dataclasses import replace

import numpy as np
import pytest

from kvtier.core.fleet import Chain, Fleet, HolderInfo
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import Adapter, ModelCard
from kvtier.core.naive_index import NaivePrefixIndex
from kvtier.errors import CallerError, IdentityError
from kvtier.types import Fingerprint, HolderId, HolderKind, InstanceId, NodeId, Source, Tier

SPACE = Fingerprint(b"n" * 32)
CARD = ModelCard(("chat",), "org/model", "rev-1", b"t" * 32, None, 16)
TOKENS = list(range(1000))


def a_worker(name: str = "w1", **changes: object) -> HolderInfo:
    base = HolderInfo(
        HolderKind.WORKER, InstanceId(name), NodeId("node-1"), SPACE, card=CARD, store="s1"
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def a_store(name: str = "s1", node: str = "node-1", namespace: bytes = SPACE) -> HolderInfo:
    return HolderInfo(HolderKind.STORE, InstanceId(name), NodeId(node), Fingerprint(namespace))


def a_fleet() -> Fleet:
    return Fleet(NaivePrefixIndex())


def chain_hashes(pool: Pool, adapter: Adapter | None = None) -> "np.typing.NDArray[np.uint64]":
    root = chain_root(pool, None, adapter.ref if adapter else None)
    return prefix_hashes(root, TOKENS, pool.block_tokens)


def matched(fleet: Fleet, pool: Pool) -> dict[int, int]:
    result = fleet.match(chain_hashes(pool), pool)
    return dict(zip(result.workers.tolist(), result.tokens.tolist(), strict=True))


def test_a_worker_counts_what_its_own_nodes_store_holds_and_no_other() -> None:
    fleet = a_fleet()
    attached = fleet.join(a_worker("w1"))
    detached = fleet.join(a_worker("w2", store=""))
    elsewhere = fleet.join(a_worker("w3", node=NodeId("node-2"), store="s2"))
    store = fleet.join(a_store())
    fleet.index.store(store, Tier.DRAM, 0, chain_hashes(CARD.pool)[:4])
    result = fleet.match(chain_hashes(CARD.pool), CARD.pool)
    sources = {
        worker: result.run_sources[result.run_offsets[row]]
        for row, worker in enumerate(result.workers.tolist())
    }
    assert sources == {attached: Source.DRAM, detached: Source.PEER, elsewhere: Source.PEER}


def test_a_store_of_another_namespace_counts_for_nobody() -> None:
    fleet = a_fleet()
    fleet.join(a_worker())
    other = fleet.join(a_store(namespace=b"o" * 32))
    fleet.index.store(other, Tier.DRAM, 0, chain_hashes(CARD.pool)[:4])
    assert matched(fleet, CARD.pool) == {}


def test_blocks_stay_when_a_second_shard_introduces_itself() -> None:
    fleet = a_fleet()
    first = fleet.join(a_worker(shard_index=0, shards_count=2))
    hashes = chain_hashes(CARD.pool)
    fleet.index.store(first, Tier.GPU, 0, hashes[:3])
    assert matched(fleet, CARD.pool) == {}, "half a block is no block"
    second_space = Fingerprint(b"m" * 32)
    assert fleet.join(a_worker(shard_index=1, shards_count=2, namespace=second_space)) == first
    fleet.index.store(first, Tier.GPU, 1, hashes[:2])
    assert matched(fleet, CARD.pool) == {first: 32}


def test_shards_of_one_worker_on_two_nodes_are_refused_with_both_values() -> None:
    fleet = a_fleet()
    fleet.join(a_worker(shard_index=0, shards_count=2))
    with pytest.raises(IdentityError, match=r"node-1.*node-9"):
        fleet.join(a_worker(shard_index=1, shards_count=2, node=NodeId("node-9")))
    assert len(fleet) == 1
    assert list(fleet.record(HolderId(0)).shards) == [0]


def test_another_tokenizer_in_one_pool_is_refused_with_both_values() -> None:
    fleet = a_fleet()
    fleet.join(a_worker("w1"))
    other = replace(CARD, tokenizer_digest=b"u" * 32)
    with pytest.raises(IdentityError, match=r"74.*75"):
        fleet.join(a_worker("w2", card=other))
    assert len(fleet) == 1


def test_the_only_worker_of_a_pool_may_change_its_own_card() -> None:
    fleet = a_fleet()
    holder = fleet.join(a_worker("w1"))
    other = replace(CARD, tokenizer_digest=b"u" * 32)
    assert fleet.join(a_worker("w1", card=other)) == holder


def test_two_block_sizes_behind_one_name_live_side_by_side_and_both_match() -> None:
    fleet = a_fleet()
    wide = replace(CARD, block_tokens=32)
    small = fleet.join(a_worker("w1"))
    large = fleet.join(a_worker("w2", card=wide))
    fleet.index.store(small, Tier.GPU, 0, chain_hashes(CARD.pool)[:5])
    fleet.index.store(large, Tier.GPU, 0, chain_hashes(wide.pool)[:3])
    assert set(fleet.chains("chat")) == {Chain(CARD.pool, None), Chain(wide.pool, None)}
    tokens = {
        worker: tokens
        for _, result in fleet.match_tokens("chat", TOKENS, None)
        for worker, tokens in zip(result.workers.tolist(), result.tokens.tolist(), strict=True)
    }
    assert tokens == {small: 80, large: 96}


def test_an_adapter_reloaded_under_its_name_is_another_chain() -> None:
    old, new = Adapter("lora", b"a" * 32, 1), Adapter("lora", b"a" * 32, 2)
    fleet = a_fleet()
    first = fleet.join(a_worker("w1", card=replace(CARD, adapters=(old,))))
    fleet.join(a_worker("w2", card=replace(CARD, adapters=(new,))))
    fleet.index.store(first, Tier.GPU, 0, chain_hashes(CARD.pool, old)[:2])
    found = {
        chain.adapter.generation: len(result.workers)
        for chain, result in fleet.match_tokens("lora", TOKENS, None)
        if chain.adapter is not None
    }
    assert found == {1: 1, 2: 0}


def test_an_adapter_without_a_digest_has_no_chain() -> None:
    fleet = a_fleet()
    fleet.join(a_worker(card=replace(CARD, adapters=(Adapter("lora", None),))))
    assert fleet.chains("lora") == ()
    assert fleet.chains("nobody") == ()


def test_a_salt_separates_scopes() -> None:
    fleet = a_fleet()
    holder = fleet.join(a_worker())
    fleet.index.store(holder, Tier.GPU, 0, chain_hashes(CARD.pool)[:5])
    (_, own), *_ = fleet.match_tokens("chat", TOKENS, None)
    (_, other), *_ = fleet.match_tokens("chat", TOKENS, "salt-of-somebody")
    assert own.tokens.tolist() == [80]
    assert len(other.workers) == 0


def test_a_hidden_holder_is_not_matched_and_keeps_its_blocks() -> None:
    fleet = a_fleet()
    holder = fleet.join(a_worker())
    fleet.index.store(holder, Tier.GPU, 0, chain_hashes(CARD.pool)[:5])
    fleet.hide(holder)
    assert matched(fleet, CARD.pool) == {}
    fleet.resume(holder)
    assert matched(fleet, CARD.pool) == {holder: 80}


def test_who_left_is_forgotten_and_its_number_serves_again() -> None:
    fleet = a_fleet()
    holder = fleet.join(a_worker("w1"))
    fleet.index.store(holder, Tier.GPU, 0, chain_hashes(CARD.pool)[:5])
    fleet.leave(holder)
    assert matched(fleet, CARD.pool) == {}
    assert fleet.pools() == ()
    assert fleet.chains("chat") == ()
    with pytest.raises(CallerError):
        fleet.record(holder)
    assert fleet.join(a_worker("w2")) == holder
    assert matched(fleet, CARD.pool) == {}


def test_a_replica_takes_the_numbers_of_its_index() -> None:
    fleet = a_fleet()
    assert fleet.join(a_worker("w1"), HolderId(41)) == 41
    assert fleet.join(a_worker("w1")) == 41
    with pytest.raises(CallerError):
        fleet.join(a_worker("w2"), HolderId(41))


def test_a_thousand_joins_and_leaves_leave_nothing_behind() -> None:
    fleet = a_fleet()
    for round_ in range(1000):
        namespace = Fingerprint(round_.to_bytes(32, "big"))
        card = replace(CARD, revision=f"r{round_}")
        holder = fleet.join(a_worker(f"w{round_}", namespace=namespace, card=card))
        fleet.leave(holder)
    numbers = (fleet._nodes, fleet._namespaces, fleet._pools)  # the leak would be here
    assert all(not table._numbers for table in numbers)
    assert fleet.join(a_worker("last")) == 0
