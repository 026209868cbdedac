"""Model cards: canonical bytes, names that mean one thing, contradictions that name both values."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.encoding import Value, encode
from kvtier.core.identity import AdapterRef, Pool
from kvtier.core.model_card import Adapter, ModelCard
from kvtier.errors import CallerError, LimitError
from kvtier.limits import ADAPTERS_COUNT_MAX

CARD = ModelCard(
    served_names=("tiny", "tiny-latest", "acme/tiny"),
    model_id="acme/tiny",
    revision="0f3c",
    tokenizer_digest=b"\x0a" * 32,
    chat_template_digest=b"\x0b" * 32,
    block_tokens=16,
    adapters=(Adapter("law", b"\x01" * 32, 1), Adapter("art", None)),
)

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
digests = st.binary(min_size=32, max_size=32)


@st.composite
def cards(draw: st.DrawFn) -> ModelCard:
    drawn = draw(st.lists(names, min_size=1, max_size=6, unique=True))
    served_count = draw(st.integers(1, len(drawn)))
    return ModelCard(
        served_names=tuple(drawn[:served_count]),
        model_id=draw(names),
        revision=draw(names),
        tokenizer_digest=draw(digests),
        chat_template_digest=draw(st.none() | digests),
        block_tokens=draw(st.integers(1, 4096)),
        adapters=tuple(
            Adapter(name, draw(st.none() | digests), draw(st.integers(0, 2**64 - 1)))
            for name in drawn[served_count:]
        ),
    )


@given(cards())
def test_a_card_survives_its_encoding(card: ModelCard) -> None:
    assert ModelCard.decode(card.encode()) == card


@given(cards(), cards())
def test_cards_have_equal_digests_only_if_they_are_equal(left: ModelCard, right: ModelCard) -> None:
    assert (left.digest() == right.digest()) == (left == right)


@given(cards())
def test_a_card_does_not_contradict_itself(card: ModelCard) -> None:
    assert card.contradictions(card) == ()


def test_the_order_of_aliases_and_adapters_does_not_matter_but_the_first_name_does() -> None:
    shuffled = dataclasses.replace(
        CARD, served_names=("tiny", "acme/tiny", "tiny-latest"), adapters=CARD.adapters[::-1]
    )
    assert shuffled == CARD
    assert shuffled.digest() == CARD.digest()
    renamed = dataclasses.replace(CARD, served_names=("acme/tiny", "tiny", "tiny-latest"))
    assert (CARD.served_name, CARD.aliases) == ("tiny", ("acme/tiny", "tiny-latest"))
    assert renamed.digest() != CARD.digest()


CHANGED: dict[str, object] = {
    "served_names": ("tiny",),
    "model_id": "acme/other",
    "revision": "0f3d",
    "tokenizer_digest": b"\x0c" * 32,
    "chat_template_digest": None,
    "block_tokens": 32,
    "adapters": (),
}


def test_every_field_of_a_card_has_a_changed_value_to_test() -> None:
    assert {field.name for field in dataclasses.fields(ModelCard)} == set(CHANGED)


@pytest.mark.parametrize("field", CHANGED)
def test_changing_one_field_changes_the_digest(field: str) -> None:
    changed = dataclasses.replace(CARD, **{field: CHANGED[field]})  # type: ignore[arg-type]
    assert changed.digest() != CARD.digest()


@pytest.mark.parametrize(
    "adapter",
    [Adapter("law2", b"\x01" * 32, 1), Adapter("law", b"\x02" * 32, 1), Adapter("law", None, 1)],
    ids=["name", "digest", "no digest"],
)
def test_changing_an_adapter_changes_the_digest(adapter: Adapter) -> None:
    left = dataclasses.replace(CARD, adapters=(Adapter("law", b"\x01" * 32, 1),))
    assert dataclasses.replace(CARD, adapters=(adapter,)).digest() != left.digest()


def test_an_adapter_without_a_digest_is_listed_and_not_indexable() -> None:
    art, law = CARD.adapters
    assert (art.name, art.indexable, law.indexable) == ("art", False, True)
    assert CARD.indexable_adapters == (law,)
    assert law.ref == AdapterRef(b"\x01" * 32, 1)
    with pytest.raises(CallerError, match="no digest"):
        art.ref  # noqa: B018


def test_a_requested_name_is_the_model_an_adapter_or_unknown() -> None:
    assert CARD.adapter_for("tiny-latest") is None
    assert CARD.adapter_for("law") == CARD.adapters[1]
    with pytest.raises(CallerError, match="not served"):
        CARD.adapter_for("Tiny")


def test_the_pool_is_what_shapes_the_chain() -> None:
    assert CARD.pool == Pool("acme/tiny", "0f3c", 16)


def test_contradictions_name_both_values() -> None:
    other = dataclasses.replace(
        CARD,
        tokenizer_digest=b"\x0c" * 32,
        chat_template_digest=None,
        adapters=(Adapter("law", b"\x02" * 32, 1),),
    )
    found = {item.field: (item.ours, item.theirs) for item in CARD.contradictions(other)}
    assert found == {
        "tokenizer_digest": ("0a" * 32, "0c" * 32),
        "chat_template_digest": ("0b" * 32, "none"),
        "digest of adapter 'law', generation 1": ("01" * 32, "02" * 32),
    }
    assert len(other.contradictions(CARD)) == len(found)


def test_a_name_that_is_a_model_here_and_an_adapter_there_is_a_contradiction() -> None:
    other = dataclasses.replace(CARD, served_names=("law",), adapters=(Adapter("tiny", None),))
    found = {(item.field, item.ours, item.theirs) for item in CARD.contradictions(other)}
    assert found == {("name 'law'", "adapter", "model"), ("name 'tiny'", "model", "adapter")}


@pytest.mark.parametrize(
    "change",
    [
        {"served_names": ("tiny", "another")},
        {"adapters": ()},
        {"adapters": (Adapter("law", None, 1),)},
        {"adapters": (Adapter("law", b"\x02" * 32, 2),)},
        {"model_id": "acme/other", "tokenizer_digest": b"\x0c" * 32},
        {"revision": "canary", "tokenizer_digest": b"\x0c" * 32},
        {"block_tokens": 32, "tokenizer_digest": b"\x0c" * 32},
    ],
)
def test_more_names_reloads_and_other_pools_are_no_contradiction(change: dict[str, object]) -> None:
    other = dataclasses.replace(CARD, **change)  # type: ignore[arg-type]
    assert CARD.contradictions(other) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"served_names": ()},
        {"served_names": "tiny"},
        {"served_names": ("",)},
        {"served_names": ("a", "a")},
        {"served_names": ("law",)},
        {"served_names": tuple(str(at) for at in range(1000))},
        {"model_id": ""},
        {"tokenizer_digest": b""},
        {"chat_template_digest": b""},
        {"block_tokens": 0},
        {"adapters": [Adapter("x", None)]},
        {"adapters": (Adapter("x", None), Adapter("x", bytes(32)))},
    ],
)
def test_a_card_that_is_ambiguous_or_out_of_limits_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CallerError):
        dataclasses.replace(CARD, **change)  # type: ignore[arg-type]


def test_a_card_has_a_bounded_number_of_adapters() -> None:
    many = tuple(Adapter(f"a{at}", None) for at in range(ADAPTERS_COUNT_MAX + 1))
    with pytest.raises(LimitError):
        dataclasses.replace(CARD, adapters=many)
    full = dataclasses.replace(CARD, adapters=many[:-1])
    assert ModelCard.decode(full.encode()) == full


FIELDS: dict[int, Value] = {
    1: ("tiny",),
    2: "m",
    3: "r",
    4: bytes(32),
    5: None,
    6: 16,
    7: ({1: "b", 2: None, 3: 0},),
}


@pytest.mark.parametrize(
    "change",
    [
        {1: (1,)},
        {1: "tiny"},
        {2: b"m"},
        {5: "text"},
        {6: -1},
        {7: ({1: "b", 2: None, 3: 0, 4: "more"},)},
        {7: ({1: "b"},)},
        {7: ("b",)},
        {7: ({1: "b", 2: None, 3: 0}, {1: "a", 2: None, 3: 0})},  # not sorted
        {1: ("t", "b2", "a2")},  # not sorted
        {8: "more"},
    ],
)
def test_bytes_that_are_not_a_canonical_card_are_refused(change: dict[int, Value]) -> None:
    domain = "kvtier.model-card.v1"
    assert ModelCard.decode(encode(domain, FIELDS)).served_name == "tiny"
    with pytest.raises(CallerError):
        ModelCard.decode(encode(domain, FIELDS | change))
    with pytest.raises(CallerError):
        ModelCard.decode(encode("another.domain", FIELDS))


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_no_card(message: bytes) -> None:
    with pytest.raises(CallerError):
        ModelCard.decode(message)
