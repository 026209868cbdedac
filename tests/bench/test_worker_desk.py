"""The bench's own engine core, over the fake model: what it counts, and when answers differ."""

import threading

import torch

from kvtier.bench.worker_desk import Around, Desk, Job, differs, machine_of, tiers_of
from kvtier_services.worker.requests import CachedTokens
from tests.support.worker_rig import BLOCK_TOKENS, CacheOff, small_fake

PROMPT = tuple(range(33))


def desk(*, cached: bool) -> Desk:
    return Desk(machine_of(small_fake(), 512, cached=cached), Around(), threading.Event())


def test_requests_come_to_what_they_would_alone_and_every_token_has_its_time() -> None:
    jobs = [Job(PROMPT, 9), Job(PROMPT[::-1], 5)]
    for job, done in zip(jobs, desk(cached=True).run(jobs), strict=True):
        assert done.tokens == CacheOff().tokens(job.prompt, job.tokens_count)
        assert len(done.times) == job.tokens_count
        assert len(done.gaps) == job.tokens_count - 1
        assert done.ttft_s > 0


def test_a_prompt_is_found_again_with_the_cache_and_never_without() -> None:
    for cached, expected in (
        (True, {"gpu": len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS}),
        (False, {}),
    ):
        tried = desk(cached=cached)
        first, second = tried.run([Job(PROMPT, 3)])[0], tried.run([Job(PROMPT, 3)])[0]
        assert tiers_of(first.cached) == {}
        assert tiers_of(second.cached) == expected
        assert first.tokens == second.tokens


def test_waste_is_counted_as_places_of_blocks_in_use_that_hold_nothing() -> None:
    tried = desk(cached=False)
    tried.run([Job(PROMPT, 2)])  # 33 tokens in 9 blocks; after the second step nothing is in use
    assert tried.places == 9 * BLOCK_TOKENS
    assert tried.wasted_places == 3


def test_answers_differ_where_the_model_is_decided() -> None:
    model = small_fake()
    job = Job(PROMPT, 4)
    right = CacheOff().tokens(PROMPT, 4)
    wrong = [*right[:3], right[3] + 1]
    assert not differs(model, job, right, right)
    assert differs(model, job, right, wrong)
    assert differs(model, job, right, right[:3])


def test_answers_may_part_where_the_model_is_undecided() -> None:
    model = small_fake()

    class Undecided:
        geometry, device = model.geometry, model.device

        def step(self, *_: object) -> torch.Tensor:
            return torch.zeros((1, 8))

    assert not differs(Undecided(), Job(PROMPT, 1), [1], [2])  # type: ignore[arg-type]


def test_tiers_that_gave_nothing_are_left_out() -> None:
    assert tiers_of(CachedTokens(gpu=16, nvme=32)) == {"gpu": 16, "nvme": 32}
    assert tiers_of(None) == {}
