"""Publish a worker's blocks to a running index and ask who holds a prompt's prefix.

kvtier index --bind 127.0.0.1:7710 &
python docs/examples/first_match.py 127.0.0.1:7710
"""

import hashlib
import sys

from kvtier.client import TokenPrompt
from kvtier.client.blocking import IndexClient
from kvtier.core.fleet import HolderInfo
from kvtier.core.identity import KvDtype, ModelSpec, Shard, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import ModelCard
from kvtier.sections import DialConfig
from kvtier.types import HolderKind, InstanceId, NodeId, Tier


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


spec = ModelSpec(
    model_id="org/tiny",
    revision="2026-11",
    kv_dtype=KvDtype.BFLOAT16,
    layers=30,
    kv_heads=3,
    head_dim=64,
    block_tokens=16,
    layout="block-layer-kv-token-head",
    rope_digest=digest("rope theta 100000"),
    shard=Shard(0, 30, 0, 3),
)
card = ModelCard(("tiny",), "org/tiny", "2026-11", digest("tokenizer"), digest("template"), 16)
worker = HolderInfo(
    kind=HolderKind.WORKER,
    instance=InstanceId("worker-1"),
    node=NodeId("laptop"),
    namespace=spec.fingerprint(),
    card=card,
    block_bytes=spec.block_bytes,
)

# The chain names a block by all tokens up to its end: router, worker and SDK compute the same.
prompt = list(range(1000))
hashes = prefix_hashes(chain_root(card.pool, None, None), prompt, card.block_tokens)

dial = DialConfig(targets=(sys.argv[1],))
with IndexClient(dial) as client, client.publisher(worker) as publisher:
    publisher.store(Tier.GPU, 0, hashes[:40])
    assert publisher.flush(5.0), "the index did not answer"
    for match in client.match_tokens(TokenPrompt("tiny", prompt)):
        for row, found in enumerate(match.workers):
            tokens = int(match.tokens[row])
            print(f"{found.name.instance} holds {tokens} of {len(prompt)} tokens")
