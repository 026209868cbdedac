"""Brings the hot set that another worker left into L1, chain by chain, before anybody is served.

A chain is a sequence of its own for as long as it is loaded: admitted on what L1 has, filled from
below, sealed, released. So each block is verified like any that is loaded, and events say that it
is there. What must not live here: where hot sets come from (`shelf`), how blocks arrive
(`loading`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from kvtier.core.frame import FrameName, KeyKind, frame_names
from kvtier.core.keys import KEY_BYTES
from kvtier.limits import TIER_BATCH_BLOCKS_MAX
from kvtier.paged.blocks import BlockManager
from kvtier.paged.group_blocks import BlockId
from kvtier.paged.sampling import SamplingTerms
from kvtier.types import Fingerprint, PrefixKey, Source
from kvtier_services.worker.l2.heat import NO_BLOCK_BEFORE, HotSet
from kvtier_services.worker.l2.loading import Loads
from kvtier_services.worker.l2.port import BlockCache, LoadRun, Looked, Lookup, Ticket
from kvtier_services.worker.l2.saving import SaveBook, block_name
from kvtier_services.worker.l2.tickets import Tickets
from kvtier_services.worker.requests import GenerationRequest
from kvtier_services.worker.scheduler import LoadStart
from kvtier_services.worker.sequences import KeyChain, Phase, Request

_NOBODY: Final = GenerationRequest(
    request_id="hot-set", prompt_tokens=(0,), sampling=SamplingTerms(temperature=0.0), tokens_max=1
)
MakeLoads = Callable[["Prefetch"], Loads]


@dataclass(frozen=True, slots=True)
class PrefetchPorts:
    """What a prefetch is made of."""

    below: BlockCache
    blocks: BlockManager
    saves: SaveBook
    tickets: Tickets
    namespaces: tuple[Fingerprint, ...]
    """Of each layer group."""


@dataclass(slots=True)
class PrefetchCounts:
    """Blocks of layer group 0."""

    listed: int = 0
    absent: int = 0
    """Not in the store any more, or behind such a block."""
    loaded: int = 0


class Prefetch:
    """One hot set on its way. Not thread-safe; whoever drives the engine core owns it."""

    def __init__(
        self,
        ports: PrefetchPorts,
        loads_of: MakeLoads,
        hot: HotSet,
        blocks_max: int,
        until: float,
    ) -> None:
        """Brings in at most `blocks_max` blocks, and begins nothing after `until`."""
        self.counts = PrefetchCounts(listed=len(hot))
        self.loads = loads_of(self)
        self._ports = ports
        self._hot = hot
        self._blocks_max = blocks_max
        self._until = until
        self._asked: dict[Ticket, Sequence[PrefixKey]] = {}
        self._sources: list[dict[PrefixKey, Source]] = [{} for _ in ports.namespaces]
        self._leaves: Iterator[int] | None = None
        self._brought: list[list[PrefixKey]] = []
        self._number = 0
        self.is_over = False

    def begin(self, now: float) -> None:
        """Ask what of it the tiers below still have."""
        ports = self._ports
        most = max(1, TIER_BATCH_BLOCKS_MAX // len(ports.namespaces))
        for at in range(0, len(self._hot), most):
            keys = [block.key for block in self._hot[at : at + most]]
            ticket = ports.tickets.draw()
            self._asked[ticket] = keys
            names = names_of(keys, ports.namespaces)
            ports.below.begin(Lookup(ticket, names, max(0.001, self._until - now)))
        self.tick(now)

    def owns(self, ticket: Ticket) -> bool:
        """Whether an outcome is of this."""
        return ticket in self._asked or self.loads.owns(ticket)

    def looked(self, outcome: Looked) -> None:
        """Take in what the tiers below have."""
        keys = self._asked.pop(outcome.ticket)
        for group, found in enumerate(self._sources):
            sources = outcome.sources[group * len(keys) : (group + 1) * len(keys)]
            for key, source in zip(keys, sources, strict=False):
                if source is not None:
                    found[key] = source
            self._ports.saves.know(block_name(group, key) for key in keys if key in found)

    def tick(self, now: float) -> None:
        """Go on with the next chain where nothing is under way. Mutates."""
        self.loads.tick(now)
        if self.is_over or self._asked:
            return
        if self._leaves is None:
            self._leaves = iter(self._planned())
        while not self.loads.is_busy:
            leaf = None if now >= self._until else next(self._leaves, None)
            if leaf is None or not self._load(leaf, now):
                self._end(now)
                return

    # ---- what `Loads` tells

    def loaded(self, start: LoadStart, blocks_count: int, now: float) -> None:
        """A chain's load is over: what arrived is cached."""
        holder, keys = start.request.holder, start.request.chain.keys
        blocks = self._ports.blocks
        stop = start.first_block + blocks_count
        blocks.seal(holder, stop * blocks.geometry.block_tokens, keys, now)
        blocks.release(holder, now)
        start.request.phase = Phase.ENDED
        self.counts.loaded += blocks_count
        if blocks_count:
            self._brought.append(keys[:stop])

    def abandoned_ended(self, start: LoadStart, holder: str, blocks_count: int, now: float) -> None:
        """The same, later than it should have been."""
        self.loaded(start, blocks_count, now)

    def give_up_load(self, request: Request) -> str:
        """Nobody waits for it: it ends when it ends."""
        return request.holder

    # ---- parts

    def _planned(self) -> list[int]:
        """The last blocks of the chains of what is there and within the budget, hottest first."""
        there: list[int] = []
        known = [False] * len(self._hot)
        for at, block in enumerate(self._hot):
            behind = block.parent == NO_BLOCK_BEFORE or known[block.parent]
            if behind and block.key in self._sources[0]:
                known[at] = True
                there.append(at)
        self.counts.absent = len(self._hot) - len(there)
        kept = there[: self._blocks_max]
        parents = {self._hot[at].parent for at in kept}
        return [at for at in kept if at not in parents]

    def _load(self, leaf: int, now: float) -> bool:
        """Begin to load the chain that ends with a block; False where there is no room for it."""
        blocks = self._ports.blocks
        at, scope = leaf, self._hot[leaf].scope
        keys: list[PrefixKey] = []
        while at != NO_BLOCK_BEFORE:
            keys.append(self._hot[at].key)
            at = self._hot[at].parent
        keys.reverse()
        self._number += 1
        holder = f"hot.{self._number}"
        first = blocks.admit(holder, keys, now) // blocks.geometry.block_tokens
        adoption = blocks.adopt(holder, len(keys) - first, now) if first < len(keys) else None
        if adoption is None:
            blocks.release(holder, now)
            return first == len(keys)
        chain = KeyChain(b"", blocks.geometry.block_tokens)
        chain.keys = list(keys)
        request = Request(0, _NOBODY, chain, [], holder, Phase.LOADING, sealed_blocks=first)
        entries = tuple(
            (group, place, block)
            for group, filled in enumerate(adoption.blocks)
            for place, block in filled
            if place >= first
        )
        runs = self._runs(entries, keys, max(0.001, self._until - now))
        self.loads.begin(LoadStart(request, first, len(keys) - first, runs, entries), scope, now)
        return True

    def _runs(
        self, entries: Sequence[tuple[int, int, BlockId]], keys: Sequence[PrefixKey], wait_s: float
    ) -> tuple[LoadRun, ...]:
        """Entries that follow one another and come from one source."""

        def origin(entry: tuple[int, int, BlockId]) -> tuple[int, Source]:
            group, place, _ = entry
            return group, self._sources[group].get(keys[place], Source.DRAM)

        return tuple(
            LoadRun(source, len(list(same)), wait_s, group)
            for (group, source), same in groupby(entries, origin)
        )

    def _end(self, now: float) -> None:
        """What is hottest was loaded first, and is to be evicted last: touch it last."""
        self.is_over = True
        for keys in reversed(self._brought):
            self._number += 1
            holder = f"hot.{self._number}"
            self._ports.blocks.admit(holder, keys, now)
            self._ports.blocks.release(holder, now)
        self._brought.clear()


def names_of(keys: Sequence[PrefixKey], namespaces: Sequence[Fingerprint]) -> tuple[FrameName, ...]:
    """The frames of blocks, all of one layer group after those of the one before. Pure."""
    packed = b"".join(keys)
    return tuple(
        name
        for namespace in namespaces
        for name in frame_names(KeyKind.PREFIX_KEY, packed, KEY_BYTES, namespace)
    )
