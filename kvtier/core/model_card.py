"""Model card: what a router must know of a pool to turn a request into its prefix chain.

What must not live here: namespaces and chains (identity.py), the protobuf form (wire/).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier.core.checks import require_digest, require_integer, require_name
from kvtier.core.encoding import U64_MAX, Value, decode, encode
from kvtier.core.encoding import digest as encoding_digest
from kvtier.core.identity import AdapterRef, Pool
from kvtier.errors import CallerError, LimitError
from kvtier.limits import ADAPTERS_COUNT_MAX, CARD_NAMES_COUNT_MAX

_CARD_DOMAIN: Final = "kvtier.model-card.v1"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter (LoRA) by the name that requests use.

    `digest` is that of its weights, None where the publisher cannot tell; `generation` counts how
    often this name was loaded, so that weights replaced in place never meet their old KV.
    """

    name: str
    digest: bytes | None
    generation: int = 0

    def __post_init__(self) -> None:
        require_name("adapter name", self.name)
        require_integer("adapter generation", self.generation, 0, U64_MAX)
        if self.digest is not None:
            require_digest("adapter digest", self.digest)

    @property
    def indexable(self) -> bool:
        """Whether its blocks may be indexed: without a digest a name says nothing of weights."""
        return self.digest is not None

    @property
    def ref(self) -> AdapterRef:
        """What the chain root takes of it; CallerError when it is not indexable."""
        if self.digest is None:
            raise CallerError(f"adapter {self.name!r} has no digest and cannot be indexed")
        return AdapterRef(self.digest, self.generation)


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One thing that two cards of one pool say differently, with both values as text."""

    field: str
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What one pool serves, under which names, tokenised how.

    The first served name is the canonical one, the rest are aliases. Aliases and adapters are kept
    sorted, so that equal cards are equal objects, bytes and digests. No name may mean two things.
    """

    served_names: tuple[str, ...]
    model_id: str
    revision: str
    tokenizer_digest: bytes
    chat_template_digest: bytes | None
    block_tokens: int
    adapters: tuple[Adapter, ...] = ()

    def __post_init__(self) -> None:
        Pool(self.model_id, self.revision, self.block_tokens)  # checks the three
        require_digest("tokenizer_digest", self.tokenizer_digest)
        if self.chat_template_digest is not None:
            require_digest("chat_template_digest", self.chat_template_digest)
        if not isinstance(self.served_names, tuple) or not isinstance(self.adapters, tuple):
            raise CallerError("served_names and adapters are not tuples")
        if not self.served_names:
            raise CallerError("served_names is empty")
        if len(self.served_names) > CARD_NAMES_COUNT_MAX:
            raise LimitError(f"{len(self.served_names)} names exceed {CARD_NAMES_COUNT_MAX}")
        if len(self.adapters) > ADAPTERS_COUNT_MAX:
            raise LimitError(f"{len(self.adapters)} adapters exceed {ADAPTERS_COUNT_MAX}")
        if not all(isinstance(adapter, Adapter) for adapter in self.adapters):
            raise CallerError("adapters holds what is no Adapter")
        for name in self.served_names:
            require_name("served name", name)
        self._refuse_shared_names()
        first, *aliases = self.served_names
        object.__setattr__(self, "served_names", (first, *sorted(aliases)))
        by_name = sorted(self.adapters, key=lambda adapter: adapter.name)
        object.__setattr__(self, "adapters", tuple(by_name))

    def _refuse_shared_names(self) -> None:
        seen: set[str] = set()
        for name in (*self.served_names, *(adapter.name for adapter in self.adapters)):
            if name in seen:
                raise CallerError(f"name {name!r} means two things in one card")
            seen.add(name)

    @property
    def served_name(self) -> str:
        return self.served_names[0]

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.served_names[1:]

    @property
    def pool(self) -> Pool:
        return Pool(self.model_id, self.revision, self.block_tokens)

    @property
    def indexable_adapters(self) -> tuple[Adapter, ...]:
        return tuple(adapter for adapter in self.adapters if adapter.indexable)

    def adapter_for(self, requested_name: str) -> Adapter | None:
        """Return the adapter that `requested_name` means, None when it means the model itself.

        Raises CallerError for a name that this card does not serve. O(adapters).
        """
        if requested_name in self.served_names:
            return None
        for adapter in self.adapters:
            if adapter.name == requested_name:
                return adapter
        raise CallerError(f"name {requested_name!r} is not served by {self.served_name!r}")

    def encode(self) -> bytes:
        """Return the canonical bytes of this card; `ModelCard.decode` is the inverse."""
        return encode(_CARD_DOMAIN, self._fields())

    def digest(self) -> bytes:
        """Return the 32-byte SHA-256 of the canonical bytes."""
        return encoding_digest(_CARD_DOMAIN, self._fields())

    @staticmethod
    def decode(message: bytes) -> "ModelCard":
        """Return the card that `message` encodes; CallerError for anything else."""
        card = _card_of(decode(_CARD_DOMAIN, message))
        if card.encode() != message:
            raise CallerError("model card is not in its canonical form")
        return card

    def contradictions(self, other: "ModelCard") -> tuple[Contradiction, ...]:
        """Return what `other` says differently of the same pool; empty when both may stand.

        A router tokenises once per pool, so tokenizer and chat template must agree, and a name must
        mean one thing: served in one card, it is no adapter of the other, and an adapter of one
        name and generation has one digest. Names and adapters that only one card has are no
        contradiction, nor is a digest that one publisher does not know. Cards of different pools
        never contradict each other: several may stand behind one served name. O(adapters).
        """
        if self.pool != other.pool:
            return ()
        found = [
            Contradiction(field, _shown(ours), _shown(theirs))
            for field, ours, theirs in (
                ("tokenizer_digest", self.tokenizer_digest, other.tokenizer_digest),
                ("chat_template_digest", self.chat_template_digest, other.chat_template_digest),
            )
            if ours != theirs
        ]
        return (*found, *self._name_contradictions(other))

    def _name_contradictions(self, other: "ModelCard") -> list[Contradiction]:
        found = []
        theirs_by_name = {adapter.name: adapter for adapter in other.adapters}
        for ours in self.adapters:
            theirs = theirs_by_name.get(ours.name)
            if ours.name in other.served_names:
                found.append(Contradiction(f"name {ours.name!r}", "adapter", "model"))
            elif theirs is not None and _digests_contradict(ours, theirs):
                field = f"digest of adapter {ours.name!r}, generation {ours.generation}"
                found.append(Contradiction(field, _shown(ours.digest), _shown(theirs.digest)))
        found += [
            Contradiction(f"name {name!r}", "model", "adapter")
            for name in self.served_names
            if name in theirs_by_name
        ]
        return found

    def _fields(self) -> dict[int, Value]:
        return {
            1: self.served_names,
            2: self.model_id,
            3: self.revision,
            4: self.tokenizer_digest,
            5: self.chat_template_digest,
            6: self.block_tokens,
            7: tuple(
                {1: adapter.name, 2: adapter.digest, 3: adapter.generation}
                for adapter in self.adapters
            ),
        }


def _digests_contradict(ours: Adapter, theirs: Adapter) -> bool:
    both_known = ours.digest is not None and theirs.digest is not None
    return both_known and ours.generation == theirs.generation and ours.digest != theirs.digest


def _shown(value: bytes | None) -> str:
    return "none" if value is None else value.hex()


def _card_of(fields: Mapping[int, Value]) -> ModelCard:
    match fields:
        case {
            1: tuple(names),
            2: str(model_id),
            3: str(revision),
            4: bytes(tokenizer_digest),
            5: (bytes() | None) as chat_template_digest,
            6: int(block_tokens),
            7: tuple(adapters),
        }:  # more fields are refused by the comparison of bytes in decode
            return ModelCard(
                served_names=tuple(_name_of(name) for name in names),
                model_id=model_id,
                revision=revision,
                tokenizer_digest=tokenizer_digest,
                chat_template_digest=chat_template_digest,
                block_tokens=block_tokens,
                adapters=tuple(_adapter_of(adapter) for adapter in adapters),
            )
    raise CallerError("fields are not those of a model card")


def _name_of(value: Value) -> str:
    if isinstance(value, str):
        return value
    raise CallerError("a served name is not a text")


def _adapter_of(value: Value) -> Adapter:
    match value:
        case {1: str(name), 2: (bytes() | None) as digest, 3: int(generation)}:
            return Adapter(name, digest, generation)
    raise CallerError("fields are not those of an adapter")
