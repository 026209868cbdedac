"""Who runs next: decodes first, prefill in chunks, the least important gives way."""

import pytest

from kvtier.errors import CallerError
from tests.support.worker_rig import BLOCK_TOKENS, CacheOff, Rig, RigTerms

OFF = CacheOff()


def prompt(start: int, count: int) -> list[int]:
    return [(start * 37 + 11 * i) % 259 for i in range(count)]


def parts(rig: Rig) -> list[int]:
    """Tokens that a step computes for each request, by a probe on the runner."""
    before = {r.number: r.computed_tokens for r in rig.core.scheduler.running()}
    rig.step()
    return [
        r.computed_tokens - before.get(r.number, 0)
        for r in rig.core.scheduler.running()
        if r.computed_tokens > before.get(r.number, 0)
    ]


def test_a_step_never_has_more_tokens_than_its_ceiling() -> None:
    rig = Rig(terms=RigTerms(step_tokens_max=10))
    rig.submit(prompt(1, 35), 4)
    rig.submit(prompt(2, 35), 4)
    while rig.core.requests_count:
        assert sum(parts(rig)) <= 10


def test_a_long_prefill_does_not_keep_those_that_decode_from_their_token() -> None:
    rig = Rig(terms=RigTerms(step_tokens_max=64, prefill_tokens_max=16, blocks=128))
    for n in range(3, 9):  # so that the speed of prefill is known
        rig.generate(prompt(n, 50), 1)
    first = rig.submit(prompt(1, 5), 40)
    rig.step()
    rig.submit(prompt(2, 200), 2)
    for expected in range(2, 10):
        computed = parts(rig)
        assert len(rig.told[first].tokens) == expected
        assert computed[0] == 1
        assert 4 <= sum(computed[1:]) <= 32  # 16 by the true speed, which is estimated


def test_the_least_important_gives_way_when_the_pool_is_full() -> None:
    rig = Rig(terms=RigTerms(blocks=12, step_tokens_max=64))
    numbers = [rig.submit(prompt(n, 8), 20, priority=n) for n in range(4)]
    rig.step()
    order: list[int] = []
    while rig.core.requests_count:
        running = set(numbers) - set(order)
        rig.step()
        order += [n for n in running if rig.told[n].finish is not None]
    assert rig.core.scheduler.counts.preempted > 0
    assert order[0] == numbers[0]
    assert order == sorted(order)
    for n, number in enumerate(numbers):
        assert rig.told[number].tokens == OFF.tokens(prompt(n, 8), 20)


def test_the_most_important_request_is_never_preempted() -> None:
    rig = Rig(terms=RigTerms(blocks=12))
    rig.submit(prompt(1, 12), 20, priority=1)
    rig.submit(prompt(2, 12), 20, priority=2)
    rig.step()
    urgent = rig.submit(prompt(3, 20), 20, priority=0)
    waited = 0
    while rig.told[urgent].finish is None:
        rig.step()
        waited += 1
        running = {r.number: r for r in rig.core.scheduler.running()}
        assert urgent not in running or running[urgent].preemptions == 0
    rig.finish()
    assert waited < 60


def test_a_sibling_waits_for_the_blocks_that_another_computes() -> None:
    rig = Rig(terms=RigTerms(step_tokens_max=8, blocks=64))
    common = prompt(1, 32)
    for n in range(5):
        rig.submit([*common, n], 1)
    rig.finish()
    assert rig.core.counts.computed_tokens == 33 + 4
    told = [told.cached for told in rig.told.values()]
    assert [cached.gpu for cached in told if cached is not None] == [0, 32, 32, 32, 32]


def test_a_prompt_that_is_cached_whole_computes_its_last_block_only() -> None:
    rig = Rig()
    rig.generate(prompt(1, 32), 1)
    before = rig.core.counts.computed_tokens
    told = rig.generate(prompt(1, 32), 1)
    assert told.cached is not None
    assert told.cached.gpu == 32 - BLOCK_TOKENS
    assert rig.core.counts.computed_tokens - before == BLOCK_TOKENS


def test_the_next_turn_reuses_blocks_that_were_generated() -> None:
    rig = Rig()
    first = rig.generate(prompt(1, 10), 11)
    told = rig.generate([*prompt(1, 10), *first.tokens, 5], 1)
    assert told.cached is not None
    assert told.cached.gpu == 20


def test_cancelling_frees_everything_at_once() -> None:
    rig = Rig()
    numbers = [rig.submit(prompt(n, 30), 50) for n in range(3)]
    for _ in range(4):
        rig.step()
    assert rig.blocks.usage().in_use_count > 0
    for number in numbers:
        rig.cancel(number)
    assert rig.blocks.usage().in_use_count == 0
    assert rig.core.requests_count == 0
    assert not rig.step()


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    rig = Rig(terms=RigTerms(blocks=8))
    assert rig.core.context_tokens == 32
    with pytest.raises(CallerError, match="does not fit 32"):
        rig.submit(prompt(1, 32), 1)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    rig = Rig()
    with pytest.raises(CallerError, match="vocabulary"):
        rig.submit([1, 259], 1)


def test_a_generation_that_fills_the_pool_ends_by_length() -> None:
    rig = Rig(terms=RigTerms(blocks=8))
    told = rig.generate(prompt(1, 20), 100)
    assert told.finish is not None
    assert told.finish.value == "length"
    assert len(told.tokens) == 12


def test_stop_tokens_end_a_generation_and_are_delivered() -> None:
    expected = OFF.tokens(prompt(1, 9), 10)
    stop = expected[4]
    told = Rig().generate(prompt(1, 9), 10, stop_token_ids=frozenset({stop}))
    assert told.finish is not None
    assert told.finish.value == "stop"
    assert told.tokens == expected[: expected.index(stop) + 1]


def test_salts_keep_the_prefixes_of_scopes_apart() -> None:
    rig = Rig()
    rig.generate(prompt(1, 32), 1, scope_salt="one")
    told = rig.generate(prompt(1, 32), 1, scope_salt="two")
    assert told.cached is not None
    assert told.cached.total == 0


def test_little_memory_is_wasted_while_many_run() -> None:
    rig = Rig(terms=RigTerms(blocks=400, sequences_max=8, step_tokens_max=64))
    for n in range(8):
        rig.submit(prompt(n, 150), 20)
    shares = []
    while rig.core.requests_count:
        rig.step()
        used = rig.blocks.usage().in_use_count * BLOCK_TOKENS
        if used:
            shares.append(rig.blocks.unfilled_tokens() / used)
    assert sum(shares) / len(shares) < 0.04


def test_what_the_worker_does_is_told() -> None:
    rig = Rig(terms=RigTerms(sequences_max=1, step_tokens_max=16))
    rig.submit(prompt(1, 5), 10)
    rig.submit(prompt(2, 30), 10)
    rig.step()
    load = rig.core.load()
    assert (load.running_requests, load.waiting_requests) == (1, 1)
    assert load.queued_prefill_tokens == 30
    assert load.total_blocks == 64
    assert load.free_blocks == 62
    assert load.prefill_tokens_per_s > 0
