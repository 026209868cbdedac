"""Output tokens a second at eight requests of mixed length, against transformers' own batching.

transformers' continuous batching (its paged cache, its scheduler, on the same weights, threads and
tokens a step) and the worker's core take turns on the same new requests.
What must not live here: measurements of one side alone.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvtier.bench.report import Bar, Result
from kvtier.bench.worker_desk import STEP_TOKENS_MAX, Around, Desk, Job, differs, machine_of
from kvtier.bench.worker_pairs import Pairs
from kvtier.bench.worker_steps import BLOCK_TOKENS, CONCURRENT, WASTE_MAX, Jobs, StepSizes
from kvtier.engines.transformers.runner import TransformersRunner
from kvtier.engines.transformers.sources import resolve
from kvtier.errors import BackendError

GENERATE_MIN: Final = 1.2
_ANSWER_S: Final = 300.0


class _Theirs(Protocol):
    """A result of transformers' manager, as far as we read it."""

    request_id: str
    generated_tokens: list[int]

    def is_finished(self) -> bool: ...


class _Manager(Protocol):
    """transformers' ContinuousBatchingManager, as far as we call it."""

    def add_request(self, input_ids: list[int], *, max_new_tokens: int) -> str: ...

    def get_result(self, *, timeout: float) -> _Theirs | None: ...


def generate_rows(runner: TransformersRunner, sizes: StepSizes) -> list[Result]:
    """Throughput, and what memory of the pool in use held nothing meanwhile."""
    room = 2 * CONCURRENT * (max(sizes.prompt_tokens) + max(sizes.answer_tokens))
    desk = Desk(machine_of(runner, room), Around(sequences_max=CONCURRENT), threading.Event())
    jobs = Jobs(sizes, 3)
    throughput = Pairs()
    differing = 0
    with theirs(sizes.model, room) as manager:
        for number in range(sizes.bursts + 1):
            asked = [jobs.next() for _ in range(CONCURRENT)]
            tokens = sum(job.tokens_count for job in asked)
            began = time.monotonic()
            ours = [done.tokens for done in desk.run(asked)]
            between = time.monotonic()
            other = ask(manager, asked)
            ended = time.monotonic()
            if number:
                throughput.add(tokens / (between - began), tokens / (ended - between))
            for job, mine, yours in zip(asked, ours, other, strict=True):
                differing += differs(runner, job, yours, mine)
    wasted = desk.wasted_places / desk.places
    return [
        Result("output at 8 requests", sum(throughput.first) / len(throughput.first), "tokens/s"),
        throughput.result("output at 8 requests / transformers", GENERATE_MIN, Bar.AT_LEAST),
        Result("output at 8 requests, answers that differ", differing, "answers", 0, Bar.AT_MOST),
        Result("pool memory wasted", wasted, "share", WASTE_MAX, Bar.AT_MOST),
    ]


@contextlib.contextmanager
def theirs(name: str, tokens_count: int) -> Iterator[_Manager]:
    """transformers' continuous batching of a model, with a cache for so many tokens."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        resolve(name).directory, dtype=torch.float32, local_files_only=True
    ).eval()
    terms = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
    config = ContinuousBatchingConfig(
        page_size=BLOCK_TOKENS,
        num_blocks=-(-tokens_count // BLOCK_TOKENS),
        max_batch_tokens=STEP_TOKENS_MAX,
    )
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=terms, continuous_batching_config=config, warmup=False
        ) as manager,
    ):
        yield manager


def ask(manager: _Manager, jobs: Sequence[Job]) -> list[list[int]]:
    """All at once, to their ends."""
    names = [manager.add_request(list(job.prompt), max_new_tokens=job.tokens_count) for job in jobs]
    told: dict[str, list[int]] = {}
    end = time.monotonic() + _ANSWER_S
    while len(told) < len(jobs):
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished():
            told[result.request_id] = list(result.generated_tokens)
        elif time.monotonic() > end:
            raise BackendError("transformers does not answer")
    return _in_order(told, names)


def _in_order(told: Mapping[str, list[int]], names: Sequence[str]) -> list[list[int]]:
    return [told[name] for name in names]
