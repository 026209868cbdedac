"""vLLM's own block pool under random requests, watched as our connector does. Run by its Python.

    KVTIER_VLLM_PYTHON tests/vllm/residents_child.py SEED STEPS

After each step what the table of slots says is held against the pool, block for block, against the
counts that vLLM's own events add up to, and against keys computed from the tokens. Prints what it
saw as JSON; an assertion ends it. What must not live here: servers, our tests' modules.
"""

import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvtier.core.engine_residents import Rows, SlotState
from kvtier.core.identity import Pool, chain_root
from kvtier.core.keys import prefix_keys
from kvtier.engines.vllm import residents
from kvtier.engines.vllm.prefixes import PrefixHashes
from kvtier.engines.vllm.residents import SlotTable

BLOCK_TOKENS = 16
BLOCKS = 40
POOL = Pool("m", "r", BLOCK_TOKENS)


@dataclass
class Live:
    request: Request
    target: int
    """Tokens at which it ends."""
    is_admitted: bool = False


class Engine:
    """A scheduler's share of the work: admits, grows, preempts and ends requests."""

    def __init__(self, seed: int) -> None:
        init_none_hash(sha256_cbor)
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
        )
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config,
            max_model_len=4096,
            scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            enable_kv_cache_events=True,
        )
        self.pool = self.manager.block_pool
        self.table = SlotTable(self.pool.blocks, get_block_hash)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        self.rng = random.Random(seed)
        self.live: list[Live] = []
        self.published: Counter[Any] = Counter()
        self.keys: dict[bytes, bytes] = {}
        self.seen: Counter[str] = Counter()
        self.number = 0

    def arrive(self) -> None:
        chain, length = self.rng.randrange(6), self.rng.randrange(5, 200)
        salt = self.rng.choice([None, "tenant"])
        self.number += 1
        request = Request(
            str(self.number),
            [1000 * chain + n for n in range(length)],
            SamplingParams(max_tokens=64),
            None,
            cache_salt=salt,
            block_hasher=self.hasher,
        )
        root = chain_root(POOL, salt, None)
        keys = PrefixHashes(root, request.all_token_ids, BLOCK_TOKENS)
        self.table.arrived(request.request_id, request.block_hashes, keys)
        self.live.append(Live(request, length + self.rng.randrange(40)))

    def step(self) -> None:
        handed_out: list[list[int]] = []
        for one in list(self.live):
            if one.is_admitted and one.request.num_tokens >= one.target:
                self._end(one)
            elif not self._schedule(one, handed_out) and one.is_admitted:
                self.seen["preempted"] += 1
                self.manager.free(one.request)
                one.request.num_computed_tokens = 0
                one.is_admitted = False
        for one in self.live:
            if one.is_admitted:
                self.table.follow(one.request.request_id, self._slots(one))
        for slots in handed_out:
            self.table.handed_out(slots)
        self.table.end_step()
        self._learn()

    def reset(self) -> bool:
        return not any(one.is_admitted for one in self.live) and self.manager.reset_prefix_cache()

    def _slots(self, one: Live) -> list[int]:
        (slots,) = self.manager.get_block_ids(one.request.request_id)
        return list(slots)

    def _schedule(self, one: Live, handed_out: list[list[int]]) -> bool:
        request = one.request
        if not one.is_admitted:
            computed = self.manager.get_computed_blocks(request)
            blocks, tokens = computed[0], int(computed[1])
            new = self.manager.allocate_slots(request, request.num_tokens - tokens, tokens, blocks)
            if new is None:
                return False
            one.is_admitted = True
            self.seen["reused"] += tokens // BLOCK_TOKENS
            request_slots = self._slots(one)
            self.table.follow(request.request_id, request_slots)
            self.table.handed_out(request_slots)
        else:
            request.append_output_token_ids(self.rng.randrange(50_000))
            new = self.manager.allocate_slots(request, 1)
            if new is None:
                return False
            handed_out.append(list(new.get_block_ids()[0]))
        request.num_computed_tokens = request.num_tokens
        return True

    def _end(self, one: Live) -> None:
        self.table.finished(one.request.request_id, self._slots(one))
        self.manager.free(one.request)
        self.live.remove(one)

    def _learn(self) -> None:
        for one in self.live:
            tokens = list(one.request.all_token_ids)
            keys = prefix_keys(chain_root(POOL, one.request.cache_salt, None), tokens, BLOCK_TOKENS)
            for number, digest in enumerate(one.request.block_hashes):
                self.keys[bytes(digest)] = keys.key(number)
        for event in self.manager.take_events() or ():
            match event:
                case BlockStored():
                    self.published.update(event.block_hashes)
                case BlockRemoved():
                    self.published.subtract(event.block_hashes)
                    self.seen["evicted"] += len(event.block_hashes)
                case AllBlocksCleared():
                    self.published.clear()

    def check(self) -> None:
        rows = list(Rows(self.table.held()).each())
        told = {slot: digest for slot, _, digest, _ in rows}
        held = {
            block.block_id: bytes(get_block_hash(block.block_hash))
            for block in self.pool.blocks
            if block.block_hash is not None
        }
        assert told == held, (len(told), len(held))
        assert all(state == SlotState.KEYED for _, state, _, _ in rows)
        assert all(self.keys[digest] == key for _, _, digest, key in rows)
        wire = Counter(maybe_convert_block_hash(digest) for digest in held.values())
        assert wire == +self.published
        self.seen["held"] = max(self.seen["held"], len(held))
        self.seen["copies"] += len(held) - len(set(held.values()))


def main(seed: int, steps: int) -> None:
    setattr(residents, "SWEEP_BLOCKS_MIN", 0)  # noqa: B010 (nothing may be found by looking about)
    engine = Engine(seed)
    for number in range(steps):
        if len(engine.live) < 6:
            engine.arrive()
        engine.step()
        if number % 50 == 49:
            while any(one.is_admitted for one in engine.live):
                for one in engine.live:
                    one.target = 0
                engine.step()
            assert engine.reset()
            engine.seen["resets"] += 1
            engine.table.handed_out(range(BLOCKS))  # what a look over the pool would find
            engine.step()
        engine.check()
    sys.stdout.write(json.dumps(engine.seen) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
