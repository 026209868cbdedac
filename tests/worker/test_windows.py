"""Models with windows over the tiers below: each layer group has frames of its own.

A cut of a prefix needs of a window only what the next token still reads.
"""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from kvtier.core.costs import LoadPolicy, Speeds
from kvtier.core.estimates import Terms
from kvtier.engines.transformers.runner import TransformersRunner
from kvtier.paged.geometry import window_start
from kvtier.types import Source
from kvtier_services.worker.l2.port import Load, Save
from kvtier_services.worker.l2.windowed import Gap, GroupShape, cheapest
from tests.support.worker_rig import (
    MIXED,
    WINDOWED,
    CacheOff,
    LazyCarrier,
    Rig,
    RigTerms,
    TierBelow,
    small_fake,
)

BLOCK_TOKENS = 4
PROMPT = [(7 + 11 * i) % 259 for i in range(41)]
SHAPE = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=9)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}


def orders(tier: TierBelow, kind: type[Load | Save]) -> list[Load | Save]:
    return [order for order in tier.orders if isinstance(order, kind)]


@pytest.mark.parametrize("groups", [MIXED, WINDOWED], ids=["mixed", "windowed"])
def test_only_what_a_window_still_reads_is_loaded(groups: tuple[object, ...]) -> None:
    tier = TierBelow()
    first = Rig(small_fake(groups=groups), below=tier)  # type: ignore[arg-type]
    first.generate(PROMPT, 1)
    first.settle()
    assert len(tier.held) == 10 * 2  # every block of either group, at every place
    second = Rig(small_fake(groups=groups), below=tier)  # type: ignore[arg-type]
    told = second.generate(PROMPT, 6)
    assert told.tokens == CacheOff(groups).tokens(PROMPT, 6)  # type: ignore[arg-type]
    assert told.cached is not None
    assert told.cached.dram == 40
    loaded = [len(load.names) for load in orders(tier, Load)]
    windows = [group.window for group in second.runner.geometry.groups]
    assert loaded == [10 - window_start(40, window, BLOCK_TOKENS) for window in windows]
    assert sum(loaded) < 20


def test_a_window_that_is_not_there_costs_the_blocks_that_need_it_and_no_more() -> None:
    tier = TierBelow()
    first = Rig(small_fake(groups=MIXED), below=tier)
    first.generate(PROMPT, 1)
    first.settle()
    second = Rig(small_fake(groups=MIXED), below=tier)
    number = second.submit(PROMPT, 1)
    chain = second.core.request(number).chain
    spec = second.runner.geometry.spec(
        1, second.runner.model_id, second.runner.revision, second.runner.rope_digest
    )
    (gone,) = chain.names(9, 10, spec.fingerprint())
    del tier.held[gone]
    second.finish()
    told = second.told[number]
    assert told.tokens == CacheOff(MIXED).tokens(PROMPT, 1)
    assert told.cached is not None
    assert told.cached.dram == 36


def test_a_window_that_is_lost_on_the_way_means_computing() -> None:
    tier = TierBelow()
    first = Rig(small_fake(groups=MIXED), below=tier)
    first.generate(PROMPT, 1)
    first.settle()
    second = Rig(small_fake(groups=MIXED), below=tier)
    number = second.submit(PROMPT, 5)
    while not orders(tier, Load):
        second.step(0.0)
    tier.held.clear()
    second.finish()
    assert second.told[number].tokens == CacheOff(MIXED).tokens(PROMPT, 5)
    cached = second.told[number].cached
    assert cached is not None
    assert cached.total == 0


@pytest.mark.parametrize("is_staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("name", MODELS)
def test_real_windows_answer_as_with_the_cache_off(name: str, is_staged: bool) -> None:
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = MODELS[name]().eval()
    runner = TransformersRunner(model, name, "r", BLOCK_TOKENS)
    expected = Rig(runner, RigTerms(step_tokens_max=4096)).generate(PROMPT, 24).tokens
    tier = TierBelow()
    first = Rig(runner, RigTerms(step_tokens_max=13), tier)
    assert first.generate(PROMPT, 24).tokens == expected
    first.settle()
    carrier = LazyCarrier(random.Random(5)) if is_staged else None
    second = Rig(runner, RigTerms(step_tokens_max=13), tier, carrier)
    told = second.generate(PROMPT, 24)
    assert told.tokens == expected
    assert told.cached is not None
    assert told.cached.dram == 40
    for frame, payload in tier.loaded:
        assert payload == tier.held[frame]


# ---- the decision


def naive(gap: Gap, groups: list[GroupShape], speeds: Speeds) -> float:
    """The least time of all cuts, one after another."""
    times = []
    for cut in range(len(gap.below[0]) + 1):
        sizes = dict.fromkeys(Source, 0)
        is_possible = True
        for group, below in zip(groups, gap.below, strict=True):
            held = (gap.l1_blocks + cut) * gap.block_tokens
            start = window_start(held, group.window, gap.block_tokens)
            for place in range(max(start, gap.l1_blocks), gap.l1_blocks + cut):
                source = below[place - gap.l1_blocks]
                if source is None:
                    is_possible = False
                else:
                    sizes[source] += group.block_bytes
        if is_possible:
            done = (gap.l1_blocks + cut) * gap.block_tokens
            load_s = speeds.predict_load_s(sizes)
            times.append(load_s + speeds.predict_prefill_s(gap.prompt_tokens - done, done))
    return min(times)


@settings(max_examples=60)
@given(st.data())
def test_the_cut_is_the_best_of_all_possible_ones(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    l1 = data.draw(st.integers(0, 4))
    source = st.sampled_from([None, Source.DRAM, Source.NVME])
    windows = data.draw(st.sampled_from([(None, 5), (None, 9, 20), (5,), (4, 9)]))
    groups = [GroupShape(100 * (i + 1), window) for i, window in enumerate(windows)]
    below = tuple(
        tuple(data.draw(st.lists(source, min_size=count, max_size=count))) for _ in groups
    )
    gap = Gap((l1 + count) * BLOCK_TOKENS + data.draw(st.integers(1, 9)), l1, BLOCK_TOKENS, below)
    loads = {
        Source.DRAM: Terms(0.001, data.draw(st.sampled_from([1e-7, 1e-5]))),
        Source.NVME: Terms(0.003, 1e-6),
    }
    speeds = Speeds(Terms(data.draw(st.sampled_from([1e-4, 1e-3])), 1e-7), loads)
    cut, runs = cheapest(gap, groups, speeds, LoadPolicy())
    sizes = dict.fromkeys(Source, 0)
    for run in runs:
        sizes[run.source] += run.blocks_count * groups[run.group].block_bytes
        assert run.deadline_s > 0
    done = (l1 + cut) * BLOCK_TOKENS
    total = speeds.predict_load_s(sizes)
    total += speeds.predict_prefill_s(gap.prompt_tokens - done, done)
    assert total == pytest.approx(naive(gap, groups, speeds))
