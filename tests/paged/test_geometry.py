"""Geometry: bytes, groups, namespaces."""

import pytest

from kvtier.core.identity import KvDtype
from kvtier.errors import CallerError
from kvtier.paged.geometry import KvGeometry, LayerGroup, one_group, window_start


def hybrid() -> KvGeometry:
    groups = (LayerGroup((1, 3)), LayerGroup((0, 2, 4), 8))
    return KvGeometry(5, 2, 16, KvDtype.FLOAT16, 4, groups)


def test_bytes_follow_from_the_shapes() -> None:
    shape = one_group(32, 8, 128, KvDtype.BFLOAT16, 16)
    assert shape.token_bytes == 131_072
    assert shape.block_bytes(0) == 16 * 131_072
    assert shape.slice_bytes * 32 == shape.block_bytes(0)


def test_a_layer_has_its_place_in_its_group() -> None:
    assert [hybrid().place(layer) for layer in range(5)] == [
        (1, 0), (0, 0), (1, 1), (0, 1), (1, 2)
    ]  # fmt: skip
    with pytest.raises(CallerError):
        hybrid().place(5)


def test_the_namespace_counts_the_bytes_of_the_groups_blocks() -> None:
    for group in (0, 1):
        spec = hybrid().spec(group, "m", "r", bytes(32))
        assert spec.block_bytes == hybrid().block_bytes(group)


def test_the_groups_of_a_model_never_share_a_namespace() -> None:
    two = KvGeometry(2, 1, 8, KvDtype.FLOAT32, 4, (LayerGroup((0,)), LayerGroup((1,), 4)))
    prints = {two.spec(group, "m", "r", bytes(32)).fingerprint() for group in (0, 1)}
    alone = one_group(1, 1, 8, KvDtype.FLOAT32, 4).spec(0, "m", "r", bytes(32)).fingerprint()
    assert len(prints | {alone}) == 3


def test_a_window_begins_at_the_block_of_the_first_token_it_reads() -> None:
    for tokens in range(40):
        for window in range(1, 12):
            first = max(0, tokens - window + 1)
            assert window_start(tokens, window, 4) == first // 4
    assert window_start(1000, None, 4) == 0


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (LayerGroup((0,)),),
        (LayerGroup((0, 1)), LayerGroup((1,), 4)),
        (LayerGroup((0,), 4), LayerGroup((1,))),
        (LayerGroup((0,), 4), LayerGroup((1,), 4)),
    ],
)
def test_groups_that_contradict_the_model_are_refused(groups: tuple[LayerGroup, ...]) -> None:
    with pytest.raises(CallerError):
        KvGeometry(2, 1, 8, KvDtype.FLOAT32, 4, groups)


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (-1,)])
def test_layers_of_a_group_ascend(layers: tuple[int, ...]) -> None:
    with pytest.raises(CallerError):
        LayerGroup(layers)
