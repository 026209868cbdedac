"""Packed linear layers give what plain ones give, and replace only those."""

import pytest
import torch
from torch import nn

from kvtier.engines.transformers.packing import PackedLinear, pack_linears
from kvtier.engines.transformers.runner import TransformersRunner
from kvtier.engines.transformers.tiny import tiny_llama

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 24), (3, 24), (1, 9, 24), (2, 300, 24)])
def test_a_packed_layer_computes_what_the_plain_one_does(
    shape: tuple[int, ...], bias: bool
) -> None:
    drawn = torch.Generator().manual_seed(1)
    plain = nn.Linear(24, 40, bias=bias)
    tokens = torch.randn(shape, generator=drawn)
    with torch.inference_mode():
        expected = plain(tokens)
        given = PackedLinear(plain)(tokens)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_other_kinds_and_dtypes_of_layers_stay() -> None:
    class Special(nn.Linear):
        """Does something else with its weight."""

    model = nn.Sequential(nn.Linear(4, 4), Special(4, 4), nn.Linear(4, 4).to(torch.bfloat16))
    assert pack_linears(model) == 1
    assert [type(layer) for layer in model] == [PackedLinear, Special, nn.Linear]


def test_an_embedding_keeps_the_weight_that_the_output_layer_shared() -> None:
    model = tiny_llama()
    before = model.get_input_embeddings().weight.clone()
    runner = TransformersRunner(model, "m", "r", 4)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert runner.device.type == "cpu"
