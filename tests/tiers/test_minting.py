"""Instances made in one call are what their constructors make."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import _native
from kvtier.core.frame import FrameHeader, FrameName, KeyKind
from kvtier.ports import GetResult, GetStatus
from kvtier.tiers.minting import hit, hits, minted, pure_minted
from kvtier.types import Fingerprint


@dataclass(frozen=True, slots=True)
class Pair:
    first: object
    second: object = 7


class Plain:
    first: int


class Text(str):
    __slots__ = ()


values = st.lists(st.integers() | st.text() | st.none(), max_size=20)


@given(values, st.integers() | st.tuples(st.integers()))
def test_instances_are_what_the_constructor_makes(column: list[object], shared: object) -> None:
    made = minted(Pair, (column, shared), len(column))
    assert made == [Pair(one, shared) for one in column]
    assert made == pure_minted(Pair, (column, shared), len(column))


@pytest.mark.parametrize(
    ("columns", "count"), [(([1, 2],), 2), (([1], 1, 1), 1), (([1], [1, 2]), 1), (([], 1), 1)]
)
def test_columns_that_do_not_fit_are_refused(columns: tuple[object, ...], count: int) -> None:
    with pytest.raises(ValueError, match="columns"):
        minted(Pair, columns, count)
    with pytest.raises(ValueError, match="columns"):
        pure_minted(Pair, columns, count)


@pytest.mark.parametrize("kind", [Plain, Text, int, type, 7, "Pair", GetStatus])
def test_only_classes_with_plain_slots_have_instances_made(kind: type[object]) -> None:
    with pytest.raises(TypeError, match="kind"):
        _native.instances(kind, (), 1)


@pytest.mark.parametrize("count", [-1, 1 << 40, 1.0, None])
def test_a_count_that_is_none_is_refused(count: int) -> None:
    with pytest.raises((ValueError, TypeError), match="count"):
        _native.instances(Pair, (1, 2), count)
    with pytest.raises(TypeError, match="columns"):
        _native.instances(Pair, [1, 2], 1)  # type: ignore[arg-type]


def test_a_batch_of_hits_is_what_each_would_be() -> None:
    names = [
        FrameName(KeyKind.PREFIX_KEY, bytes([i] * 32), Fingerprint(b"n" * 32)) for i in range(3)
    ]
    payloads = [memoryview(bytes(8)) for _ in names]
    made = hits(names, [1, 2, 3], [4, 5, 6], payloads)
    assert made == [hit(names[i], 1 + i, 4 + i, payloads[i]) for i in range(3)]
    assert made[1] == GetResult(GetStatus.HIT, payloads[1], FrameHeader(names[1], 2, 8, 5))
    assert hits([], [], [], []) == []
