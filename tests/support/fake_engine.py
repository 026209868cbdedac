"""A foreign engine's block pool without a model: allocates, caches, evicts, and says so like vLLM.

`EngineCache` has physical blocks, so that two requests can compute one prompt side by side and hold
it twice. What it holds in the words of an index is `held`: computed from the tokens, by no code of
the bridge. What must not live here: sockets, our decoders.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.core import engine_keys
from kvtier.core.identity import AdapterRef, Pool, chain_root
from kvtier.core.keys import PrefixKeys, prefix_hashes, prefix_keys
from tests.support import engine_wire as wire


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request brings. `adapter` has a reference where it is indexable."""

    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: str | None = None
    ref: AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    digest: bytes
    prefix_hash: int | None


@dataclass(slots=True)
class Slot:
    """One physical block as vLLM shows it to a connector: named while it is in the prefix cache."""

    block_hash: bytes | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A request's blocks, as a connector sees them: where they are, their digests and keys."""

    slots: tuple[int, ...]
    digests: tuple[bytes, ...]
    keys: PrefixKeys | None


class EngineCache:
    """One rank. `run` and the others return the events of one scheduler step, as wire structs."""

    def __init__(
        self, pool: Pool, blocks_count: int, seed: str = "0", int_hashes: bool = True
    ) -> None:
        self._pool = pool
        self._scheme = engine_keys.VllmScheme(engine_keys.vllm_none_hash(seed), pool.block_tokens)
        self._int_hashes = int_hashes
        self._free = list(range(blocks_count))
        self._used: OrderedDict[int, _Block] = OrderedDict()
        """Slot -> block, the least lately used first."""
        self._by_digest: dict[bytes, set[int]] = {}
        self.slots = [Slot() for _ in range(blocks_count)]

    def held(self) -> Counter[int]:
        """Distinct resident prefix hashes that an index may know, each once."""
        blocks = {block.digest: block.prefix_hash for block in self._used.values()}
        return Counter(one for one in blocks.values() if one is not None)

    def run(self, prompt: Prompt, *, side_by_side: bool = False) -> list[Any]:
        """Compute a prompt; blocks that are cached are reused, unless another request that runs
        `side_by_side` computes the same ones at the same time."""
        digests, hashes = self._names(prompt)
        events: list[Any] = []
        start = 0
        if not side_by_side:
            while start < len(digests) and self._by_digest.get(digests[start]):
                for slot in self._by_digest[digests[start]]:
                    self._used.move_to_end(slot)
                start += 1
        new = digests[start:]
        for number, digest in enumerate(new, start):
            events += self._allocate(digest, hashes[number])
        if new:
            events.append(self._stored(prompt, digests, start))
        return events

    def table(self, prompt: Prompt) -> Table:
        """Of a prompt that ran just now, its leading blocks that are still there."""
        digests, _ = self._names(prompt)
        slots = []
        for digest in digests:
            found = self._by_digest.get(digest)
            if not found:
                break
            newest = len(found) > 1
            slots.append(max(found, key=list(self._used).index) if newest else next(iter(found)))
        keys = None
        if prompt.adapter is None or prompt.ref is not None:
            root = chain_root(self._pool, prompt.salt, prompt.ref)
            keys = prefix_keys(root, list(prompt.tokens), self._pool.block_tokens)
        return Table(tuple(slots), tuple(digests), keys)

    def evict(self, count: int) -> list[Any]:
        """Reallocate so many blocks, the least lately used first."""
        return [event for _ in range(min(count, len(self._used))) for event in self._evict_one()]

    def clear(self) -> list[Any]:
        """`reset_prefix_cache`."""
        for slot in self._used:
            self.slots[slot].block_hash = None
        self._free += self._used
        self._used.clear()
        self._by_digest.clear()
        return [wire.AllBlocksCleared()]

    def _names(self, prompt: Prompt) -> tuple[list[bytes], list[int | None]]:
        lora = None if prompt.adapter is None else (prompt.adapter, f"/adapters/{prompt.adapter}")
        request = engine_keys.VllmRequest(lora=lora, cache_salt=prompt.salt)
        digests = engine_keys.vllm_digests(self._scheme, prompt.tokens, request)
        if prompt.adapter is not None and prompt.ref is None:
            return digests, [None] * len(digests)
        root = chain_root(self._pool, prompt.salt, prompt.ref)
        hashes = prefix_hashes(root, list(prompt.tokens), self._pool.block_tokens)
        return digests, [int(one) for one in hashes]

    def _stored(self, prompt: Prompt, digests: Sequence[bytes], start: int) -> Any:
        size = self._pool.block_tokens
        named = [] if prompt.adapter is None else [prompt.adapter]
        extras = [list(named) for _ in digests[start:]]
        if start == 0 and prompt.salt:
            extras[0].append(prompt.salt)
        return wire.stored(
            [self._wire(one) for one in digests[start:]],
            self._wire(digests[start - 1]) if start else None,
            prompt.tokens[start * size : len(digests) * size],
            block_size=size,
            lora_name=prompt.adapter,
            lora_id=None if prompt.adapter is None else 1,
            extra_keys=[one or None for one in extras] if any(extras) else None,
        )

    def _allocate(self, digest: bytes, prefix_hash: int | None) -> list[Any]:
        events = [] if self._free else self._evict_one()
        slot = self._free.pop()
        self._used[slot] = _Block(digest, prefix_hash)
        self.slots[slot].block_hash = digest
        self._by_digest.setdefault(digest, set()).add(slot)
        return events

    def _evict_one(self) -> list[Any]:
        slot, block = self._used.popitem(last=False)
        self._free.append(slot)
        self.slots[slot].block_hash = None
        self._by_digest[block.digest].discard(slot)
        return [wire.removed([self._wire(block.digest)])]

    def _wire(self, digest: bytes) -> bytes | int:
        return engine_keys.vllm_wire(digest) if self._int_hashes else digest
