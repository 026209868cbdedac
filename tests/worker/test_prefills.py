"""Prefill halves in the engine core: answered when their blocks are below, or known not to be."""

import random
from itertools import takewhile

import pytest

from kvtier.core.identity import Pool, chain_root
from kvtier.core.planner import WritePolicy
from kvtier_services.worker.l2.port import Save
from kvtier_services.worker.requests import FinishReason, Purpose
from kvtier_services.worker.sequences import KeyChain
from tests.support.worker_rig import (
    BLOCK_TOKENS,
    MIXED,
    CacheOff,
    Rig,
    RigTerms,
    Script,
    TierBelow,
    small_fake,
)

PROMPT = [(i * 7 + i * i) % 251 for i in range(90)]
WHOLE = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
OFF = CacheOff()


def prefill(rig: Rig, prompt: list[int]) -> int:
    return rig.submit(prompt, 1, purpose=Purpose.PREFILL)


def settled(rig: Rig, number: int, steps_max: int = 400) -> int:
    """Step until it is answered; how many tokens it says are below."""
    for _ in range(steps_max):
        if rig.told[number].finish is not None:
            stored = rig.told[number].stored
            assert stored is not None
            return stored.tokens
        rig.step(0.01)
    raise AssertionError("a prefill half is not answered")


def held_tokens(tier: TierBelow, rig: Rig) -> int:
    return len(tier.held) // len(rig.pool.blocks_counts) * BLOCK_TOKENS


def leading_tokens(tier: TierBelow, rig: Rig, prompt: list[int]) -> int:
    """How much of a prompt's beginning lies below."""
    root = chain_root(Pool(rig.runner.model_id, rig.runner.revision, BLOCK_TOKENS), None, None)
    chain = KeyChain(root, BLOCK_TOKENS)
    chain.extend(prompt)
    names = chain.names(0, len(chain.keys), rig.namespace)
    return len(list(takewhile(tier.held.__contains__, names))) * BLOCK_TOKENS


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_it_is_answered_when_all_its_blocks_are_below_whatever_the_write_policy(
    policy: WritePolicy,
) -> None:
    tier = TierBelow(Script(random.Random(3), late_max=5))
    rig = Rig(terms=RigTerms(write_policy=policy), below=tier)
    number = prefill(rig, PROMPT)
    assert settled(rig, number) == WHOLE == held_tokens(tier, rig)
    assert rig.told[number].finish is FinishReason.LENGTH


def test_blocks_are_written_while_later_ones_are_computed() -> None:
    tier = TierBelow()
    rig = Rig(terms=RigTerms(step_tokens_max=16), below=tier)
    number = prefill(rig, PROMPT)
    while not any(isinstance(order, Save) for order in tier.orders):
        rig.step()
    assert rig.core.request(number).computed < len(PROMPT)


def test_another_worker_loads_what_it_left_and_goes_on_with_the_same_tokens() -> None:
    tier = TierBelow()
    first, second = Rig(below=tier), Rig(below=tier)
    settled(first, prefill(first, PROMPT))
    told = second.generate(PROMPT, 5)
    assert told.tokens == OFF.tokens(PROMPT, 5)
    assert told.cached is not None
    assert told.cached.dram == WHOLE
    assert second.core.counts.computed_tokens == len(PROMPT) - WHOLE + 4


def test_layer_groups_with_windows_are_written_whole() -> None:
    tier = TierBelow()
    first = Rig(small_fake(groups=MIXED), below=tier)
    assert settled(first, prefill(first, PROMPT)) == WHOLE
    second = Rig(small_fake(groups=MIXED), below=tier)
    assert second.generate(PROMPT, 4).tokens == CacheOff(MIXED).tokens(PROMPT, 4)


def test_what_the_store_lost_since_is_written_again() -> None:
    tier = TierBelow()
    rig = Rig(below=tier)
    settled(rig, prefill(rig, PROMPT))
    tier.held.clear()
    assert settled(rig, prefill(rig, PROMPT)) == WHOLE == held_tokens(tier, rig)


def test_what_is_below_already_is_not_written_again() -> None:
    tier = TierBelow()
    rig = Rig(below=tier)
    settled(rig, prefill(rig, PROMPT))
    saves = sum(isinstance(order, Save) for order in tier.orders)
    other = Rig(below=tier)
    assert settled(other, prefill(other, PROMPT)) == WHOLE
    assert sum(isinstance(order, Save) for order in tier.orders) == saves


def test_a_store_that_fails_is_not_waited_for_and_nothing_is_promised() -> None:
    tier = TierBelow(Script(random.Random(1), fails=1.0))
    rig = Rig(below=tier)
    assert settled(rig, prefill(rig, PROMPT)) == 0


def test_a_store_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    tier = TierBelow()
    tier.is_frozen = True
    rig = Rig(below=tier)
    number = prefill(rig, PROMPT)
    began = rig.clock.now
    assert settled(rig, number, 2000) == 0
    assert rig.clock.now - began < 10.0


def test_one_that_is_cancelled_while_it_waits_is_never_answered() -> None:
    tier = TierBelow()
    rig = Rig(below=tier)
    number = prefill(rig, PROMPT)
    tier.is_frozen = True
    while rig.core.requests_count:
        rig.step(0.05)
    rig.cancel(number)
    tier.is_frozen = False
    rig.settle()
    assert rig.core.offload is not None
    assert not rig.core.offload.prefills.is_busy


def test_without_tiers_below_it_is_answered_at_once_and_promises_nothing() -> None:
    rig = Rig()
    number = prefill(rig, PROMPT)
    rig.finish()
    assert rig.told[number].finish is FinishReason.LENGTH
    assert rig.told[number].stored is None


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_promised_that_is_not_below(seed: int) -> None:
    dice = random.Random(seed)
    script = Script(random.Random(seed), late_max=4, fails=0.2, loses=0.1)
    tier = TierBelow(script)
    rig = Rig(terms=RigTerms(blocks=40), below=tier)
    for _ in range(12):
        prompt = PROMPT[: dice.randint(1, 90)] + dice.choices(range(251), k=dice.randint(1, 30))
        number = prefill(rig, prompt)
        asked = rig.submit(prompt, 3) if dice.random() < 0.3 else None
        promised = settled(rig, number)
        assert promised <= leading_tokens(tier, rig, prompt)
        if asked is not None:
            rig.finish()
            assert rig.told[asked].tokens == OFF.tokens(prompt, 3)
