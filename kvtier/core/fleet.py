"""The fleet by name: who the holders are, which pools they form, and what they hold.

One `Fleet` stands in the index service and one in every replica. It turns descriptions (as a Hello
gives them) into the small numbers that the prefix index works with, refuses contradictions, and
turns a served name into prefix chains.

What must not live here: epochs and sequences (events.py), leases (membership.py), the wire.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.core.checks import require_digest, require_integer, require_name, require_text
from kvtier.core.identity import AdapterRef, Pool, chain_root
from kvtier.core.keys import prefix_hashes
from kvtier.core.model_card import ModelCard
from kvtier.core.prefix_index import (
    TIERS_OF_KIND,
    HolderSpec,
    Located,
    LocateTerms,
    MatchResult,
    PrefixIndex,
)
from kvtier.errors import CallerError, IdentityError, LimitError
from kvtier.limits import HOLDERS_COUNT_MAX, SHARDS_COUNT_MAX
from kvtier.types import (
    Fingerprint,
    HolderId,
    HolderKind,
    InstanceId,
    Integers,
    NodeId,
    Role,
    Tier,
)

NO_STORE_NODE: Final = 0
"""Node number of a worker without a store: no store has it."""

UNKNOWN_NAMESPACE: Final = 0
"""Namespace number of a shard that has not introduced itself: no store has it."""

BLOCK_COUNT_MAX: Final = 2**48

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a holder can be reached; empty means not at all."""

    http: str = ""
    grpc: str = ""
    bulk: str = ""


@dataclass(frozen=True, slots=True)
class TierCapacity:
    tier: Tier
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HolderKey:
    """What makes two streams speak of one holder."""

    kind: HolderKind
    instance: InstanceId
    dp_rank: int
    namespace: Fingerprint | None
    """Of a store or shared holder; None for a worker, whose shards have one each."""


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """One shard of one holder, as its publisher describes it.

    `store` names the instance of the store attached to a worker; empty: none. `card` is required
    of a worker. `block_bytes` is 0 where unknown.
    """

    kind: HolderKind
    instance: InstanceId
    node: NodeId
    namespace: Fingerprint
    card: ModelCard | None = None
    dp_rank: int = 0
    shard_index: int = 0
    shards_count: int = 1
    zone: str = ""
    store: str = ""
    addresses: Addresses = Addresses()
    role: Role = Role.BOTH
    engine: str = ""
    engine_version: str = ""
    capacities: tuple[TierCapacity, ...] = ()
    block_bytes: int = 0

    def __post_init__(self) -> None:
        require_name("instance", self.instance)
        require_name("node", self.node)
        require_digest("namespace fingerprint", self.namespace)
        require_integer("dp_rank", self.dp_rank, 0, HOLDERS_COUNT_MAX)
        require_integer("shards_count", self.shards_count, 1, SHARDS_COUNT_MAX)
        require_integer("shard_index", self.shard_index, 0, self.shards_count - 1)
        require_integer("block_bytes", self.block_bytes, 0, BLOCK_COUNT_MAX)
        for what in ("zone", "store", "engine", "engine_version"):
            require_text(what, getattr(self, what))
        for what in ("http", "grpc", "bulk"):
            require_text(f"{what} address", getattr(self.addresses, what))
        for capacity in self.capacities:
            require_integer(f"{capacity.tier.name} blocks", capacity.blocks, 0, BLOCK_COUNT_MAX)
        if self.kind is HolderKind.WORKER and self.card is None:
            raise CallerError("a worker needs a model card")
        if self.kind is not HolderKind.WORKER and self.shards_count != 1:
            raise CallerError("a store holds whole blocks of its namespace: shards_count is 1")

    @property
    def key(self) -> HolderKey:
        namespace = None if self.kind is HolderKind.WORKER else self.namespace
        return HolderKey(self.kind, self.instance, self.dp_rank, namespace)


@dataclass(slots=True)
class HolderRecord:
    """One holder of the fleet; read it, do not write."""

    holder: HolderId
    key: HolderKey
    shards: dict[int, HolderInfo] = field(default_factory=dict)
    hidden: bool = False

    @property
    def info(self) -> HolderInfo:
        """The description that the lowest known shard gave."""
        return self.shards[min(self.shards)]


@dataclass(frozen=True, slots=True)
class Chain:
    """One way a served name turns tokens into prefix hashes."""

    pool: Pool
    adapter: AdapterRef | None


class _Numbers(Generic[T]):
    """Gives each name a small number, from 1, for as long as somebody holds it."""

    __slots__ = ("_free", "_next", "_numbers", "_users")

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._users: dict[T, int] = {}
        self._free: list[int] = []
        self._next = 1

    def take(self, name: T, held: list[Callable[[], None]]) -> int:
        """The name's number, held once more; how to give it back is appended to `held`."""
        number = self._numbers.get(name)
        if number is None:
            if self._free:
                number = self._free.pop()
            else:
                number = self._next
                self._next += 1
            self._numbers[name] = number
        self._users[name] = self._users.get(name, 0) + 1
        held.append(partial(self._drop, name))
        return number

    def find(self, name: T) -> int | None:
        return self._numbers.get(name)

    def _drop(self, name: T) -> None:
        self._users[name] -= 1
        if self._users[name] == 0:
            del self._users[name]
            self._free.append(self._numbers.pop(name))


class Fleet:
    """Holders by name over one prefix index.

    Mutated by join, leave, hide and resume; everything else only reads. Not thread-safe: one owner
    calls it, while the index below may be read by others.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._records: dict[HolderId, HolderRecord] = {}
        self._by_key: dict[HolderKey, HolderId] = {}
        self._nodes: _Numbers[str] = _Numbers()
        self._namespaces: _Numbers[bytes] = _Numbers()
        self._pools: _Numbers[Pool] = _Numbers()
        self._specs: dict[HolderId, HolderSpec] = {}
        self._held_numbers: dict[HolderId, list[Callable[[], None]]] = {}
        """How to give back the numbers that a holder's spec uses."""
        self._cards: dict[Pool, dict[ModelCard, int]] = {}
        """Distinct cards of each pool, with how many shards gave them."""
        self._free_holders: set[HolderId] = set()
        self._next_holder = 0

    @property
    def index(self) -> PrefixIndex:
        return self._index

    def __len__(self) -> int:
        return len(self._records)

    # ---- membership

    def join(self, info: HolderInfo, holder: HolderId | None = None) -> HolderId:
        """Add a shard of a holder, or replace what it said before; returns the holder's number.

        A replica passes the number that its index uses. Blocks that the holder holds stay.
        Raises IdentityError, naming both values, where `info` contradicts another shard of the
        same holder or another card of the same pool, and LimitError when the fleet is full; then
        nothing has changed.
        """
        known = self._by_key.get(info.key)
        record = None if known is None else self._records[known]
        self._refuse_contradictions(info, record)
        if record is None:
            record = HolderRecord(self._new_holder(holder), info.key)
            self._records[record.holder] = record
            self._by_key[info.key] = record.holder
        elif (before := record.shards.get(info.shard_index)) is not None:
            self._forget_card(before)
        record.shards[info.shard_index] = info
        self._remember_card(info)
        self._specify(record)
        return record.holder

    def leave(self, holder: HolderId) -> None:
        """Forget a holder and all that it holds. CallerError for an unknown one."""
        record = self.record(holder)
        self._index.remove_holder(holder)
        del self._specs[holder]
        _give_back(self._held_numbers.pop(holder))
        for info in record.shards.values():
            self._forget_card(info)
        del self._records[holder]
        del self._by_key[record.key]
        self._free_holders.add(holder)

    def hide(self, holder: HolderId) -> None:
        """Take a holder out of every match; its blocks stay. Idempotent."""
        self.record(holder).hidden = True
        self._index.hide(holder)

    def resume(self, holder: HolderId) -> None:
        """Let a hidden holder be matched again. Idempotent."""
        self.record(holder).hidden = False
        self._index.resume(holder)

    # ---- reading

    def record(self, holder: HolderId) -> HolderRecord:
        """The holder's record; CallerError for an unknown one."""
        record = self._records.get(holder)
        if record is None:
            raise CallerError(f"holder {holder} is not known")
        return record

    def find(self, key: HolderKey) -> HolderId | None:
        return self._by_key.get(key)

    def find_worker(self, instance: InstanceId, dp_rank: int) -> HolderId | None:
        return self._by_key.get(HolderKey(HolderKind.WORKER, instance, dp_rank, None))

    def records(self) -> Iterator[HolderRecord]:
        yield from self._records.values()

    def pools(self) -> tuple[Pool, ...]:
        """Every pool that a worker of the fleet belongs to."""
        return tuple(self._cards)

    def chains(self, served_name: str) -> tuple[Chain, ...]:
        """The distinct chains behind a served name, alias or adapter name; empty when unknown.

        Several pools (block sizes, revisions) and several generations of an adapter may stand
        behind one name. Adapters without a digest have no chain. O(cards x adapters).
        """
        found: dict[Chain, None] = {}
        for pool, cards in self._cards.items():
            for card in cards:
                if served_name in card.served_names:
                    found[Chain(pool, None)] = None
                    continue
                for adapter in card.indexable_adapters:
                    if adapter.name == served_name:
                        found[Chain(pool, adapter.ref)] = None
        return tuple(found)

    def match(self, hashes: npt.NDArray[np.uint64], pool: Pool | None = None) -> MatchResult:
        """Longest unbroken prefix per worker, of one pool or of all. Mutates nothing."""
        if pool is None:
            return self._index.match(hashes)
        number = self._pools.find(pool)
        if number is None:
            return self._index.match(hashes[:0])
        return self._index.match(hashes, pool=number)

    def locate(
        self, hashes: npt.NDArray[np.uint64], namespace: Fingerprint, terms: LocateTerms
    ) -> Located:
        """Which stores hold each block under a namespace; nobody, where no holder has said it."""
        number = self._namespaces.find(namespace)
        if number is None:
            return Located(np.zeros(len(hashes), np.uint32), np.zeros(0, np.uint32))
        return self._index.locate(hashes, number, terms)

    def match_tokens(
        self, served_name: str, tokens: Integers, scope_salt: str | None
    ) -> tuple[tuple[Chain, MatchResult], ...]:
        """Match one prompt on every chain behind `served_name`; compare tokens, never blocks."""
        results = []
        for chain in self.chains(served_name):
            root = chain_root(chain.pool, scope_salt, chain.adapter)
            hashes = prefix_hashes(root, tokens, chain.pool.block_tokens)
            results.append((chain, self.match(hashes, chain.pool)))
        return tuple(results)

    # ---- parts

    def _new_holder(self, asked: HolderId | None) -> HolderId:
        if asked is not None:
            if asked in self._records:
                raise CallerError(f"holder {asked} is taken")
            self._free_holders.discard(asked)
            return asked
        if self._free_holders:
            return self._free_holders.pop()
        if self._next_holder >= HOLDERS_COUNT_MAX:
            raise LimitError(f"the fleet has {HOLDERS_COUNT_MAX} holders already")
        self._next_holder += 1
        return HolderId(self._next_holder - 1)

    def _specify(self, record: HolderRecord) -> None:
        """Tell the index what the record now says; numbers that are no longer used go back."""
        held: list[Callable[[], None]] = []
        spec = self._spec(record, held)
        before = self._specs.get(record.holder)
        if before is None:
            self._index.add_holder(record.holder, spec)
        elif before != spec:
            self._replace_spec(record, before, spec)
        self._specs[record.holder] = spec
        _give_back(self._held_numbers.get(record.holder, []))
        self._held_numbers[record.holder] = held

    def _replace_spec(self, record: HolderRecord, before: HolderSpec, spec: HolderSpec) -> None:
        """Describe a holder anew and give it back what it held where shards are still the same.

        Rare (a further shard introduces itself, a worker restarts as something else), so plain:
        predictions for the holder are lost, which costs a hint.
        """
        index, holder = self._index, record.holder
        shards_count = min(len(before.namespaces), len(spec.namespaces))
        kept = [
            (tier, shard, index.snapshot(holder, tier, shard))
            for tier in TIERS_OF_KIND[before.kind]
            for shard in range(shards_count)
        ]
        index.remove_holder(holder)
        index.add_holder(holder, spec)
        for tier, shard, snapshot in kept:
            index.load(holder, tier, shard, snapshot)
        if record.hidden:
            index.hide(holder)

    def _spec(self, record: HolderRecord, held: list[Callable[[], None]]) -> HolderSpec:
        info = record.info
        namespaces = [UNKNOWN_NAMESPACE] * info.shards_count
        for index, shard in record.shards.items():
            namespaces[index] = self._namespaces.take(shard.namespace, held)
        node, pool, block_tokens = NO_STORE_NODE, 0, 1
        if info.kind is HolderKind.STORE or info.store:
            node = self._nodes.take(info.node, held)
        if info.card is not None and info.kind is HolderKind.WORKER:
            pool = self._pools.take(info.card.pool, held)
            block_tokens = info.card.block_tokens
        return HolderSpec(info.kind, node, tuple(namespaces), pool, block_tokens)

    def _remember_card(self, info: HolderInfo) -> None:
        if info.card is not None and info.kind is HolderKind.WORKER:
            cards = self._cards.setdefault(info.card.pool, {})
            cards[info.card] = cards.get(info.card, 0) + 1

    def _forget_card(self, info: HolderInfo) -> None:
        if info.card is None or info.kind is not HolderKind.WORKER:
            return
        cards = self._cards[info.card.pool]
        cards[info.card] -= 1
        if cards[info.card] == 0:
            del cards[info.card]
        if not cards:
            del self._cards[info.card.pool]

    def _refuse_contradictions(self, info: HolderInfo, record: HolderRecord | None) -> None:
        """IdentityError where another shard of the holder, or another card, says otherwise."""
        mine = None
        if record is not None:
            mine = record.shards.get(info.shard_index)
            for index, other in record.shards.items():
                if index != info.shard_index:
                    _refuse_unequal_shards(info, other)
            if mine is None and record.info.shards_count != info.shards_count:
                _refuse("shards_count", record.info.shards_count, info.shards_count)
        if info.card is None or info.kind is not HolderKind.WORKER:
            return
        for card, users_count in self._cards.get(info.card.pool, {}).items():
            if mine is not None and mine.card == card and users_count == 1:
                continue  # what this very shard said before
            for found in card.contradictions(info.card):
                _refuse(f"{found.field} of pool {_shown(info.card.pool)}", found.ours, found.theirs)


def _give_back(held: list[Callable[[], None]]) -> None:
    for give in held:
        give()


def _refuse(what: str, known: object, said: object) -> NoReturn:
    raise IdentityError(f"{what}: known as {known}, said to be {said}")


def _shown(pool: Pool) -> str:
    return f"{pool.model_id}@{pool.revision}/{pool.block_tokens}"


def _refuse_unequal_shards(info: HolderInfo, other: HolderInfo) -> None:
    """All shards of one worker are one process group on one node with one model."""
    for what in ("shards_count", "node", "store", "role", "engine", "engine_version"):
        known, said = getattr(other, what), getattr(info, what)
        if known != said:
            _refuse(f"{what} of {info.instance} rank {info.dp_rank}", known, said)
    if info.card is not None and other.card is not None and info.card.pool != other.card.pool:
        _refuse(f"pool of {info.instance}", _shown(other.card.pool), _shown(info.card.pool))
