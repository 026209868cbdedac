"""What one rank of a foreign engine holds, in the words of an index.

An engine names blocks by its own hashes, which say nothing to anybody else. Its events carry the
tokens, so each hash is given the prefix key that the router computes for the same prompt: the key
of its parent's hash, or the root of pool, salt and adapter, chained over the tokens. From then on
the hash stands for the key, wherever it is seen again: `KnownKeys`, which outlives engine, bridge
and the block itself.

Copies are counted per (place, hash), as engines publish them: two blocks of equal content are two
stores, and each eviction is one removal. An index is told of the first and the last. Only what is
in GPU memory is told: a worker has no other tier.

What must not live here: the order of messages (`engine_sequence`), disks, sockets, decoding.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.core.engine_events import (
    GPU,
    AllCleared,
    BlockExtras,
    BlocksMoved,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EngineHash,
    Place,
    Unindexed,
)
from kvtier.core.identity import (
    CONTENT_ID_BYTES_MIN,
    AdapterRef,
    MultimodalItem,
    Pool,
    chain_root,
    encode_extras,
)
from kvtier.core.keys import HASH_BYTES, prefix_hash, prefix_keys
from kvtier.errors import CallerError
from kvtier.limits import ENGINE_DIGESTS_MAX, ENGINE_RESIDENTS_MAX, PROMPT_TOKENS_MAX
from kvtier.types import PrefixKey, Tier

U64Array: TypeAlias = npt.NDArray[np.uint64]

_HASH_ONLY_BYTES: Final = HASH_BYTES
"""A key of this length is only what an index calls a block: nothing can be chained behind it."""
UNINDEXED: Final = PrefixKey(b"")
"""Known as a block whose identity cannot be told: nor can that of the blocks behind it."""
_HASH_HEX_CHARS: Final = 2 * CONTENT_ID_BYTES_MIN
_TIERS: Final[Mapping[str, Tier]] = {GPU: Tier.GPU}


class Reports(StrEnum):
    """What a stored event of blocks that are resident, from the first of a prompt on, means."""

    COPIES = "copies"
    """More copies: two requests computed the same prompt side by side."""
    REPEATS = "repeats"
    """Perhaps the same copies again: clients of vLLM may ask for full reports, a request at a time.
    Not counted twice; a prompt that does have two copies is then forgotten with the first."""


@dataclass(frozen=True, slots=True)
class HoldingsTerms:
    """Whose blocks they are and how much is remembered. `adapters` are those with a digest."""

    pool: Pool
    adapters: Mapping[str, AdapterRef] = field(default_factory=dict)
    reports: Reports = Reports.COPIES
    residents_max: int = 1 << 20
    pending_tokens_max: int = 1 << 22
    """Tokens that wait for a parent that was never seen."""

    def __post_init__(self) -> None:
        if not 1 <= self.residents_max <= ENGINE_RESIDENTS_MAX:
            raise CallerError(f"residents_max: want 1 .. {ENGINE_RESIDENTS_MAX}")
        if not 0 <= self.pending_tokens_max <= PROMPT_TOKENS_MAX:
            raise CallerError(f"pending_tokens_max: want 0 .. {PROMPT_TOKENS_MAX}")


@dataclass(frozen=True, slots=True, eq=False)
class Appeared:
    """Consecutive blocks of one chain are held now; `parent` is the prefix hash before, or 0."""

    tier: Tier
    parent: int
    hashes: U64Array


@dataclass(frozen=True, slots=True, eq=False)
class Vanished:
    """Blocks are held no more."""

    tier: Tier
    hashes: U64Array


@dataclass(frozen=True, slots=True)
class Emptied:
    """Nothing is held in a tier any more; None: nowhere."""

    tier: Tier | None


Change: TypeAlias = Appeared | Vanished | Emptied


class ResidentRow(NamedTuple):
    """One resident hash as a store on disk keeps it; `copies` 0: it is to be deleted."""

    place: Place
    name: EngineHash
    copies: int
    key: PrefixKey | None


@dataclass(slots=True)
class HoldingsCounts:
    """Counters of one rank."""

    indexed: int = 0
    """Stored blocks that an index was, or is to be, told of."""
    unindexed: Counter[Unindexed] = field(default_factory=Counter)
    """Stored blocks that no index is told of, by reason."""
    unknown_removals: int = 0
    contradictions: int = 0
    """Hashes that came to stand for another key: a collision, or another seed."""
    overflows: int = 0
    """Blocks that found no room among the residents, or to wait for their parent."""


class KnownKeys:
    """Engine hash to prefix key, bounded: the least lately used goes first. Shared by ranks."""

    def __init__(self, count_max: int) -> None:
        if not 1 <= count_max <= ENGINE_DIGESTS_MAX:
            raise CallerError(f"count_max: want 1 .. {ENGINE_DIGESTS_MAX}, got {count_max}")
        self._count_max = count_max
        self._keys: OrderedDict[EngineHash, PrefixKey] = OrderedDict()
        self._fresh: dict[EngineHash, PrefixKey | None] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, name: EngineHash) -> PrefixKey | None:
        """The key; UNINDEXED where it has none, None where nothing is known. Counts as a use."""
        key = self._keys.get(name)
        if key is not None:
            self._keys.move_to_end(name)
        return key

    def learn(self, name: EngineHash, key: PrefixKey) -> None:
        """What was learnt last counts, but for a hash that stands for no other key."""
        before = self._keys.get(name)
        is_less = before is not None and len(key) == _HASH_ONLY_BYTES and before.startswith(key)
        if before != key and not is_less:
            self._keys[name] = self._fresh[name] = key
        self._keys.move_to_end(name)
        while len(self._keys) > self._count_max:
            gone, _ = self._keys.popitem(last=False)
            self._fresh[gone] = None

    def restore(self, rows: Iterable[tuple[EngineHash, PrefixKey]]) -> None:
        """Take over what a disk remembered, oldest first; none of it is fresh."""
        for name, key in rows:
            self.learn(name, key)
        self._fresh.clear()

    def take_fresh(self) -> dict[EngineHash, PrefixKey | None]:
        """What was learnt, and (None) forgotten, since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh


class _Resident:
    __slots__ = ("copies", "key", "round")

    def __init__(self, round_number: int) -> None:
        self.copies = 0
        self.key: PrefixKey | None = None
        self.round = round_number


@dataclass(slots=True, eq=False)
class _Fragment:
    """Blocks that wait for their parent's key."""

    event: BlocksStored
    tokens_count: int


class EngineHoldings:
    """Applies events in their order; every method returns what to tell an index. Not thread-safe.
    `known` is shared by all ranks of an engine.

    O(blocks) an event, in tokens where they are hashed. A collision of an engine's 64-bit hashes
    costs a wrong hint, never wrong bytes.
    """

    def __init__(self, terms: HoldingsTerms, known: KnownKeys) -> None:
        self._terms = terms
        self.known = known
        self._residents: dict[Place, dict[EngineHash, _Resident]] = {}
        self._residents_count = 0
        self._pending: OrderedDict[EngineHash, list[_Fragment]] = OrderedDict()
        self._pending_tokens = 0
        self._round = 0
        self._keyless: set[tuple[Place, EngineHash]] = set()
        """Residents that wait for their parent's key."""
        self._dirty: dict[tuple[Place, EngineHash], None] = {}
        self._is_cleared = False
        self.counts = HoldingsCounts()

    # ---- reading

    @property
    def residents_count(self) -> int:
        """Distinct (place, hash) with a copy, indexed or waiting."""
        return self._residents_count

    @property
    def unresolved_count(self) -> int:
        """Of those, the ones that an index cannot be told of yet."""
        return len(self._keyless)

    @property
    def pending_tokens(self) -> int:
        return self._pending_tokens

    def held(self) -> list[Change]:
        """All that an index is to know, for a publisher that begins."""
        found: list[Change] = []
        for place, residents in self._residents.items():
            tier = _TIERS.get(place.medium)
            keys = [one.key for one in residents.values() if one.key is not None]
            if tier is not None and keys:
                found.append(Appeared(tier, 0, _hashes(keys)))
        return found

    def uses_only_gpu(self) -> bool:
        """Whether nothing is known of other media, so that a clear of the GPU clears all."""
        return all(place.medium == GPU for place in self._residents)

    # ---- events

    def apply(self, event: EngineEvent) -> list[Change]:
        match event:
            case BlocksStored():
                return list(self._stored(event))
            case BlocksRemoved():
                return self._removed(event)
            case BlocksMoved():
                return self._moved(event)
            case AllCleared():
                return self._cleared()

    def unresolved(self) -> Iterator[EngineHash]:
        """Residents that an index cannot be told of yet."""
        return (name for _, name in self._keyless)

    def learn(self, hashes: Mapping[EngineHash, int]) -> list[Change]:
        """Prefix hashes of `unresolved` blocks; others are ignored. What lies behind them waits
        for their keys all the same."""
        changes: list[Change] = []
        for place, name in list(self._keyless):
            one = self._residents.get(place, {}).get(name)
            if name not in hashes or one is None:
                continue
            one.key = PrefixKey(hashes[name].to_bytes(HASH_BYTES, "little"))
            self.known.learn(name, one.key)
            self._keyless.discard((place, name))
            self._dirty[place, name] = None
            self.counts.indexed += 1
            tier = _TIERS.get(place.medium)
            if tier is not None:
                changes.append(Appeared(tier, 0, _hashes([one.key])))
        return changes

    def restart(self) -> list[Change]:
        """The engine's process is another one, which holds nothing yet. Keys stay known."""
        self._residents.clear()
        self._residents_count = 0
        self._pending.clear()
        self._pending_tokens = 0
        self._keyless.clear()
        self._dirty.clear()
        self._is_cleared = True
        return [Emptied(None)]

    def doubt(self) -> None:
        """Events were lost: a block that is stored again has one copy, whatever was counted."""
        self._round += 1

    # ---- disk

    def take_rows(self) -> tuple[bool, list[ResidentRow]]:
        """What changed since the last call: whether all before it is gone, and the rows since."""
        rows = []
        for place, name in self._dirty:
            one = self._residents.get(place, {}).get(name)
            if one is None or one.key is None:
                rows.append(ResidentRow(place, name, 0, None))
            else:
                rows.append(ResidentRow(place, name, one.copies, one.key))
        is_cleared, self._is_cleared = self._is_cleared, False
        self._dirty = {}
        return is_cleared, rows

    def restore(self, rows: Iterable[ResidentRow]) -> list[Change]:
        """Take over what a bridge before this one held; before any event."""
        for row in rows:
            if row.copies < 1 or row.key is None or not self._has_room():
                continue
            one = self._enter(row.place, row.name)
            one.copies, one.key = row.copies, row.key
            self._keyless.discard((row.place, row.name))
        return self.held()

    # ---- parts

    def _stored(self, event: BlocksStored) -> Iterator[Change]:
        reason, root_adapter = self._refusal(event)
        if reason is not None:
            self._leave_out(event, reason)
            return
        for name in event.hashes:
            self._count_copy(event, name)
        if event.parent is None:
            above = PrefixKey(chain_root(self._terms.pool, event.salt or None, root_adapter))
            yield from self._chain(event, above, 0)
            return
        known = self.known.find(event.parent)
        if known is None:
            resident = self._residents.get(event.place, {}).get(event.parent)
            known = None if resident is None else resident.key
        if known is None or len(known) == _HASH_ONLY_BYTES:
            self._wait(event, event.parent)
        elif known == UNINDEXED:
            self._forget_copies(event)
            self._leave_out(event, Unindexed.DEPENDENT)
        else:
            yield from self._chain(event, known, int(prefix_hash(known)))

    def _refusal(self, event: BlocksStored) -> tuple[Unindexed | None, AdapterRef | None]:
        if event.unindexed is not None:
            return event.unindexed, None
        if event.block_tokens != self._terms.pool.block_tokens:
            return Unindexed.BLOCK_TOKENS, None
        if event.adapter is None:
            return None, None
        ref = self._terms.adapters.get(event.adapter)
        return (Unindexed.ADAPTER_UNKNOWN if ref is None else None), ref

    def _leave_out(self, event: BlocksStored, reason: Unindexed) -> None:
        self.counts.unindexed[reason] += len(event.hashes)
        if reason in _OF_IDENTITY:
            for name in event.hashes:
                self.known.learn(name, UNINDEXED)

    def _chain(self, event: BlocksStored, above: PrefixKey, parent: int) -> Iterator[Change]:
        """Give the blocks of `event` their keys, and all that waited for one of them."""
        work: list[tuple[BlocksStored, PrefixKey, int]] = [(event, above, parent)]
        while work:
            event, above, parent = work.pop()
            keys = self._keys(event, above)
            if keys is None:
                self._forget_copies(event)
                self._leave_out(event, Unindexed.EXTRAS)
                continue
            self.counts.indexed += len(keys)
            for name, key in zip(event.hashes, keys, strict=True):
                self.known.learn(name, key)
            yield from self._appear(event, keys, parent)
            for name, key in zip(event.hashes, keys, strict=True):
                for fragment in self._no_longer_waiting(name):
                    work.append((fragment.event, key, int(prefix_hash(key))))

    def _keys(self, event: BlocksStored, above: PrefixKey) -> list[PrefixKey] | None:
        """None where an input's content cannot be identified."""
        try:
            extras = {block: _encoded(one) for block, one in event.extras.items()}
            chained = prefix_keys(above, event.tokens, event.block_tokens, extras)
        except CallerError:
            return None
        return [chained.key(block) for block in range(len(chained))]

    def _appear(
        self, event: BlocksStored, keys: Sequence[PrefixKey], parent: int
    ) -> Iterator[Change]:
        """Runs of neighbours that an index does not know yet, each under the block before it."""
        residents = self._residents.get(event.place, {})
        tier = _TIERS.get(event.place.medium)
        run: list[PrefixKey] = []
        for name, key in zip(event.hashes, keys, strict=True):
            one = residents.get(name)
            is_new = one is not None and one.key != key
            replaced = one.key if one is not None and is_new else None
            if replaced is not None and one is not None and replaced == key[:HASH_BYTES]:
                one.key, is_new, replaced = key, False, None  # a hash, and now the whole key
                self._dirty[event.place, name] = None
            if run and tier is not None and (not is_new or replaced is not None):
                yield Appeared(tier, parent, _hashes(run))
                parent, run = int(prefix_hash(run[-1])), []
            if replaced is not None:
                self.counts.contradictions += 1
                if tier is not None:
                    yield Vanished(tier, _hashes([replaced]))
            if one is not None and is_new:
                one.key = key
                self._keyless.discard((event.place, name))
                self._dirty[event.place, name] = None
                run.append(key)
            else:
                parent = int(prefix_hash(key))
        if run and tier is not None:
            yield Appeared(tier, parent, _hashes(run))

    def _removed(self, event: BlocksRemoved) -> list[Change]:
        places = [event.place] if event.place is not None else list(self._residents)
        changes: list[Change] = []
        for place in places:
            gone = [
                key
                for name in event.hashes
                if (key := self._take_copy(place, name, takes_all=event.place is None))
            ]
            tier = _TIERS.get(place.medium)
            if gone and tier is not None:
                changes.append(Vanished(tier, _hashes(gone)))
        return changes

    def _take_copy(self, place: Place, name: EngineHash, *, takes_all: bool) -> PrefixKey | None:
        """Take one copy, or all; the key of a block that was told and has none left."""
        residents = self._residents.get(place, {})
        one = residents.get(name)
        if one is None:
            self.counts.unknown_removals += 1
            return None
        self._dirty[place, name] = None
        one.copies = 0 if takes_all else one.copies - 1
        if one.copies > 0:
            return None
        self._drop(place, name)
        return one.key

    def _moved(self, event: BlocksMoved) -> list[Change]:
        gone, come = [], []
        for name in event.hashes:
            one = self._residents.get(event.source, {}).get(name)
            if one is None:
                self.counts.unknown_removals += 1
                continue
            self._dirty[event.source, name] = None
            self._drop(event.source, name)
            already = self._residents.get(event.target, {}).get(name)
            there = already if already is not None else self._enter(event.target, name)
            there.copies += one.copies
            there.key = one.key
            if there.key is not None:
                self._keyless.discard((event.target, name))
            self._dirty[event.target, name] = None
            if one.key is not None:
                gone.append(one.key)
                if already is None:
                    come.append(one.key)
        source, target = _TIERS.get(event.source.medium), _TIERS.get(event.target.medium)
        changes: list[Change] = []
        if gone and source is not None:
            changes.append(Vanished(source, _hashes(gone)))
        if come and target is not None:
            # Without parents: blocks of a call need not be neighbours.
            changes += [Appeared(target, 0, _hashes([key])) for key in come]
        return changes

    def _cleared(self) -> list[Change]:
        for place in [place for place in self._residents if place.medium == GPU]:
            for name in self._residents[place]:
                self._dirty[place, name] = None
                self._keyless.discard((place, name))
            self._residents_count -= len(self._residents.pop(place))
        for parent in list(self._pending):
            for fragment in self._no_longer_waiting(parent):
                if fragment.event.place.medium != GPU:
                    self._wait(fragment.event, parent)
        return [Emptied(Tier.GPU)]

    # ---- books

    def _has_room(self) -> bool:
        return self._residents_count < self._terms.residents_max

    def _enter(self, place: Place, name: EngineHash) -> _Resident:
        one = _Resident(self._round)
        self._residents.setdefault(place, {})[name] = one
        self._residents_count += 1
        self._keyless.add((place, name))
        return one

    def _drop(self, place: Place, name: EngineHash) -> None:
        residents = self._residents[place]
        del residents[name]
        self._keyless.discard((place, name))
        self._residents_count -= 1
        if not residents:
            del self._residents[place]

    def _count_copy(self, event: BlocksStored, name: EngineHash) -> None:
        one = self._residents.get(event.place, {}).get(name)
        if one is None:
            if not self._has_room():
                self.counts.overflows += 1
                return
            one = self._enter(event.place, name)
        elif one.round != self._round:
            one.copies, one.round = 0, self._round
        is_report = event.parent is None and self._terms.reports is Reports.REPEATS
        if not is_report or not one.copies:
            one.copies += 1
        self._dirty[event.place, name] = None

    def _forget_copies(self, event: BlocksStored) -> None:
        """Take back what was counted of an event that is not indexed after all."""
        for name in event.hashes:
            one = self._residents.get(event.place, {}).get(name)
            if one is not None and one.key is None:
                self._drop(event.place, name)
                self._dirty[event.place, name] = None

    def _wait(self, event: BlocksStored, parent: EngineHash) -> None:
        self.counts.unindexed[Unindexed.UNRESOLVED] += len(event.hashes)
        tokens_count = len(event.tokens)
        if tokens_count > self._terms.pending_tokens_max:
            self._give_up(event)
            return
        self._pending.setdefault(parent, []).append(_Fragment(event, tokens_count))
        self._pending_tokens += tokens_count
        while self._pending_tokens > self._terms.pending_tokens_max:
            for fragment in self._no_longer_waiting(next(iter(self._pending))):
                self._give_up(fragment.event)

    def _give_up(self, event: BlocksStored) -> None:
        self.counts.overflows += len(event.hashes)
        self._forget_copies(event)

    def _no_longer_waiting(self, parent: EngineHash) -> list[_Fragment]:
        fragments = self._pending.pop(parent, None) or []
        for fragment in fragments:
            self._pending_tokens -= fragment.tokens_count
        return fragments


_OF_IDENTITY: Final = frozenset(
    {
        Unindexed.SALT_UNSEEN,
        Unindexed.ADAPTER_UNSEEN,
        Unindexed.ADAPTER_UNKNOWN,
        Unindexed.EXTRAS,
        Unindexed.DEPENDENT,
    }
)
"""Reasons that hold for the hash itself. The others are of one group or event: another group of a
hybrid model may publish the same hash rightly."""


def _hashes(keys: Sequence[PrefixKey]) -> U64Array:
    return np.frombuffer(b"".join(key[:8] for key in keys), "<u8").astype(np.uint64)


def _encoded(extras: BlockExtras) -> bytes:
    """CallerError where an item is named by something other than a digest of its content."""
    items = tuple(
        MultimodalItem(_content_id(identifier), offset) for identifier, offset in extras.items
    )
    return encode_extras(items, extras.embeds)


def _content_id(identifier: str) -> bytes:
    """vLLM names an item by a digest in hex, unless the client gave it a name of its own."""
    if len(identifier) < _HASH_HEX_CHARS:
        raise CallerError("an item without a digest")
    try:
        return bytes.fromhex(identifier)
    except ValueError:
        raise CallerError("an item without a digest") from None
