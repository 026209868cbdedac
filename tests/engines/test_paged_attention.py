"""Our paged attention against transformers' DynamicCache, on tiny random models."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvtier.engines.transformers.runner import TransformersRunner
from kvtier.engines.transformers.tiny import tiny_llama
from kvtier.errors import CallerError
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import Logits, Slice
from tests.support.paged_models import cached_logits, paged_logits

LENGTH = 61
VOCAB = 64
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
TOLERANCE = 2e-4


def made(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[name]().eval()


MODELS = {
    "llama gqa": lambda: tiny_llama(1, **SHAPE),
    "llama mqa": lambda: tiny_llama(1, **(SHAPE | {"num_key_value_heads": 1})),
    "llama mha": lambda: tiny_llama(1, **(SHAPE | {"num_key_value_heads": 4})),
    "mistral window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)),
    "mistral window of one block": lambda: MistralForCausalLM(
        MistralConfig(**SHAPE, sliding_window=4)
    ),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "gemma3 hybrid": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request: pytest.FixtureRequest) -> tuple[Tensor, PreTrainedModel, list[int]]:
    """Logits by DynamicCache, a model of the same weights, and the tokens."""
    tokens = random.Random(5).choices(range(VOCAB), k=LENGTH)
    return cached_logits(made(request.param), tokens, []), made(request.param), tokens


def pool_of(runner: TransformersRunner, blocks_count: int) -> KvPool:
    return KvPool(runner.geometry, [blocks_count] * len(runner.geometry.groups))


def shuffled_tables(runner: TransformersRunner, seed: int, needed: int) -> list[list[int]]:
    drawn = random.Random(seed)
    return [drawn.sample(range(needed + 3), needed) for _ in runner.geometry.groups]


@settings(max_examples=12)
@given(
    chunks=st.lists(st.sampled_from([1, 1, 2, 3, 5, 8, 13, 30]), max_size=12),
    block_tokens=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 9),
)
def test_chunks_and_block_sizes_give_the_logits_of_a_dynamic_cache(
    pair: tuple[Tensor, PreTrainedModel, list[int]],
    chunks: list[int],
    block_tokens: int,
    seed: int,
) -> None:
    expected, model, tokens = pair
    runner = TransformersRunner(model, "m", "r", block_tokens)
    needed = -(-LENGTH // block_tokens)
    pool = pool_of(runner, needed + 3)
    tables = shuffled_tables(runner, seed, needed)
    for position, logits in paged_logits(runner, pool, tokens, tables, chunks):
        torch.testing.assert_close(logits, expected[position], rtol=0, atol=TOLERANCE)


def test_what_lies_before_the_window_is_never_read(
    pair: tuple[Tensor, PreTrainedModel, list[int]],
) -> None:
    expected, model, tokens = pair
    runner = TransformersRunner(model, "m", "r", 4)
    pool = pool_of(runner, 16)
    tables: list[list[int]] = [list(range(16)) for _ in runner.geometry.groups]
    runner.step(pool, [Slice(tokens[:50], 0, tables)])
    for group, table in enumerate(tables):
        window = runner.geometry.groups[group].window
        left = 0 if window is None else (50 - window + 1) // 4
        table[:left] = [-1] * left
    logits = runner.step(pool, [Slice(tokens[50:], 50, tables)])
    torch.testing.assert_close(logits[0], expected[-1], rtol=0, atol=TOLERANCE)


def test_neighbours_in_a_step_do_not_change_a_slice() -> None:
    runner = TransformersRunner(made("llama gqa"), "m", "r", 4)
    pool = pool_of(runner, 64)
    drawn = random.Random(1)
    prompts = [drawn.choices(range(VOCAB), k=count) for count in (5, 23, 40, 11)]
    tables = [[[16 * i + j for j in range(16)]] for i in range(4)]
    firsts = [3, 0, 33, 10]
    for prompt, table, first in zip(prompts, tables, firsts, strict=True):
        if first:
            runner.step(pool, [Slice(prompt[:first], 0, table, Logits.NONE)])
    slices = [
        Slice(prompt[first:], first, table)
        for prompt, table, first in zip(prompts, tables, firsts, strict=True)
    ]
    logits = runner.step(pool, slices)
    for row, prompt in zip(logits, prompts, strict=True):
        alone = runner.step(pool_of(runner, 16), [Slice(prompt, 0, [list(range(16))])])
        torch.testing.assert_close(row, alone[0], rtol=0, atol=TOLERANCE)


def test_only_asked_rows_come_back_in_the_order_of_the_slices() -> None:
    runner = TransformersRunner(made("llama gqa"), "m", "r", 4)
    pool = pool_of(runner, 8)
    slices = [
        Slice([1, 2], 0, [[0]]),
        Slice([3], 0, [[1]], Logits.NONE),
        Slice([4, 5, 6], 0, [[2]]),
    ]
    logits = runner.step(pool, slices)
    assert logits.shape == (2, VOCAB)
    assert logits.dtype is torch.float32
    assert runner.step(pool, [slices[1]]).shape == (0, VOCAB)
    again = runner.step(pool, [slices[2]])
    torch.testing.assert_close(again[0], logits[1], rtol=0, atol=TOLERANCE)


def test_bytes_copied_to_another_pool_are_as_good_as_computed_ones() -> None:
    runner = TransformersRunner(made("llama gqa"), "m", "r", 4)
    first, second = pool_of(runner, 8), pool_of(runner, 8)
    tokens = random.Random(2).choices(range(VOCAB), k=20)
    expected = runner.step(first, [Slice(tokens[:16], 0, [[0, 1, 2, 3]], Logits.NONE)])
    expected = runner.step(first, [Slice(tokens[16:], 16, [[0, 1, 2, 3, 4]])])
    for source, target in enumerate([6, 2, 5, 1]):
        second.block_memory(target)[:] = first.block_memory(source)
    loaded = runner.step(second, [Slice(tokens[16:], 16, [[6, 2, 5, 1, 0]])])
    assert torch.equal(loaded, expected)


def test_each_layer_is_waited_for_before_its_blocks_are_read() -> None:
    runner = TransformersRunner(made("llama gqa"), "m", "r", 4)
    first, second = pool_of(runner, 4), pool_of(runner, 4)
    tokens = random.Random(2).choices(range(VOCAB), k=8)
    expected = runner.step(first, [Slice(tokens, 0, [[0, 1]])])
    asked: list[int] = []

    def load(layer: int) -> None:
        asked.append(layer)
        second.layer_memory(0, layer)[:] = first.layer_memory(0, layer)

    late = runner.step(second, [Slice(tokens[4:], 4, [[0, 1]])], load)
    assert asked == [0, 1, 2]
    torch.testing.assert_close(late, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "part",
    [
        Slice([], 0, [[0]]),
        Slice([1], 3, [[]]),
        Slice([1], 0, [[9]]),
        Slice([1], 0, [[-1]]),
        Slice([1], 0, []),
        Slice([1], 256, [list(range(8)) * 10]),
    ],
)
def test_slices_that_cannot_be_run_are_refused(part: Slice) -> None:
    runner = TransformersRunner(made("llama gqa"), "m", "r", 4)
    with pytest.raises(CallerError):
        runner.step(pool_of(runner, 8), [part])


def greedy(runner: TransformersRunner, tokens: Sequence[int], count: int) -> list[int]:
    pool, table, answer = pool_of(runner, 64), [list(range(64))], list[int]()
    part = list(tokens)
    start = 0
    while len(answer) < count:
        answer.append(int(runner.step(pool, [Slice(part, start, table)])[0].argmax()))
        start, part = start + len(part), answer[-1:]
    return answer


def test_greedy_answers_equal_those_of_generate() -> None:
    tokens = random.Random(4).choices(range(VOCAB), k=19)
    model = made("llama gqa")
    generated = model.generate(
        torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    runner = TransformersRunner(made("llama gqa"), "m", "r", 4)
    assert greedy(runner, tokens, 24) == generated[0, 19:].tolist()
