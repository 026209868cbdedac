"""Prompts computed by one worker and answered by another: what clients get, with real processes."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count

import pytest

from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually
from tests.router.front.rig import events, text_of
from tests.support.split_fleet import TENANTS, Asked, SplitFleet, SplitTerms
from tests.support.worker_cluster import BLOCK_TOKENS, Expected, prompt_of

pytestmark = pytest.mark.timeout(240)
EXPECTED = Expected()
NUMBERS = count(1000)
LONG = 900
"""Tokens that take a prefill worker most of a second."""


def a_fleet(tmp_path_factory: pytest.TempPathFactory, terms: SplitTerms) -> Iterator[SplitFleet]:
    directory = tmp_path_factory.mktemp("split")
    with ProcessRunner(f"split-{directory.name}", directory) as runner:
        fleet = SplitFleet(runner, directory, terms)
        fleet.start()
        yield fleet
        fleet.clean_logs()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitFleet]:
    yield from a_fleet(tmp_path_factory, SplitTerms())


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitFleet]:
    """One to break; the last test leaves it broken."""
    yield from a_fleet(tmp_path_factory, SplitTerms(workers=("p", "d", "b"), is_apart=True))


def right(told: Asked, prompt: list[int], tokens_count: int) -> bool:
    assert told.status == 200
    assert set(told.texts) == {EXPECTED.text(prompt, tokens_count)}
    return True


def reusable(prompt: list[int]) -> int:
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def is_from(tier: str, fleet: SplitFleet, length: int) -> bool:
    """Whether the whole blocks of a prompt that nobody knows came from a tier, all of them, to the
    worker that answered; where the machine was too slow for that once, another prompt will do."""
    prompt = prompt_of(next(NUMBERS), length)
    told = fleet.ask(prompt, 4)
    right(told, prompt, 4)
    if told.workers != ("p", "d") or told.cached != {tier: reusable(prompt)}:
        return False
    assert told.counted_cached == 0  # it was computed, if elsewhere
    return True


def test_answers_are_those_of_one_worker(fleet: SplitFleet) -> None:
    common = prompt_of(1, 320)
    asked: list[tuple[list[int], str, dict[str, object]]] = []
    for number, tenant in enumerate(TENANTS):
        for length in (3, 17, 64, 321):
            asked.append((prompt_of(10 + number, length), tenant, {"stream": length % 2 == 0}))
        asked.append((common + prompt_of(20 + number, 41), tenant, {"cache_salt": "x"}))
        asked.append((common + prompt_of(30 + number, 70), tenant, {"stream": True}))
        asked.append((common, tenant, {"n": 2}))
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            pool.submit(fleet.ask, prompt, 5, tenant, **fields) for prompt, tenant, fields in asked
        ]
        for (prompt, _, _), job in zip(asked, jobs, strict=True):
            right(job.result(), prompt, 5)

    def some_are_split() -> bool:
        prompt = prompt_of(next(NUMBERS), 321)
        right(fleet.ask(prompt, 5), prompt, 5)
        return fleet.splits("split", "always") >= 1

    eventually(some_are_split, 60, "prompts are split")
    assert fleet.splits("whole", "several") == len(TENANTS)
    assert fleet.splits("whole", "short") >= len(TENANTS)


def test_the_answering_worker_takes_the_prompt_from_the_store(fleet: SplitFleet) -> None:
    eventually(partial(is_from, "dram", fleet, 320), 90, "all of a prompt from the store")
    eventually(partial(is_from, "dram", fleet, 333), 90, "all of a prompt from the store")


def test_a_turn_that_goes_on_is_not_split_again(fleet: SplitFleet) -> None:
    def is_whole() -> bool:
        prompt = prompt_of(next(NUMBERS), 321)
        right(fleet.ask(prompt, 4), prompt, 4)
        told = fleet.ask(prompt, 4)
        right(told, prompt, 4)
        return told.workers[0] is None and told.counted_cached == 320

    eventually(is_whole, 60, "the second turn finds its beginning where it goes")


def test_both_workers_are_named_before_and_after(fleet: SplitFleet) -> None:
    plan = fleet.explained(prompt_of(next(NUMBERS), 400))["split"]
    assert (plan["prefill_worker"], plan["decode_worker"]) == ("p", "d")
    short = fleet.explained(prompt_of(next(NUMBERS), 5))["split"]
    assert (short["split"], short["reason"]) == (False, "short")


def test_a_client_that_leaves_ends_the_prefill(fleet: SplitFleet) -> None:
    name = "kvtier_endpoint_requests_total"
    before = fleet.metric(name, "p")

    def is_idle() -> bool:
        return not fleet.is_busy("p")

    eventually(is_idle, 30, "nobody is served")
    prompt = prompt_of(next(NUMBERS), LONG)
    # On a slow machine stores may just be left alone: a load that came too late.
    eventually(lambda: fleet.explained(prompt)["split"]["split"], 60, "it would be split")
    connection = fleet.stream(prompt, 4)
    eventually(lambda: fleet.is_busy("p"), 30, "the prompt is being computed")
    connection.close()
    eventually(is_idle, 30, "the prefill is given up")
    assert fleet.metric(name, "p") > before


def test_never_means_never(fleet: SplitFleet) -> None:
    with fleet.seen_by("never") as never:
        for _ in range(3):
            prompt = prompt_of(next(NUMBERS), 333)
            told = never.ask(prompt, 4)
            right(told, prompt, 4)
            assert told.workers == (None, "d")
        assert never.splits("split") == never.splits("whole") == never.splits("failed") == 0
        assert "split" not in never.explained(prompt_of(9, 333))


def test_who_decodes_for_others_is_spared_the_prompt(fleet: SplitFleet) -> None:
    with fleet.seen_by("auto") as auto:
        idle = auto.explained(prompt_of(next(NUMBERS), 500))["split"]
        assert idle["split"] is False
        streams = [auto.stream(prompt_of(next(NUMBERS), 20), 2000) for _ in range(6)]
        answers = [stream.getresponse() for stream in streams]
        assert {answer.getheader("x-kvtier-worker") for answer in answers} == {"d"}
        prompt = prompt_of(next(NUMBERS), 500)
        told = auto.ask(prompt, 4)
        right(told, prompt, 4)
        assert told.workers == ("p", "d")
        assert auto.splits("split", "cost") == 1
        for stream in streams:
            stream.close()


def in_the_middle(fleet: SplitFleet) -> tuple[list[int], Future[Asked]]:
    """A prompt that `p` or `b` is just computing for an answer, and that answer to be."""
    prompt = prompt_of(next(NUMBERS), LONG)
    answer: Future[Asked] = Future()

    def ask() -> None:
        try:
            answer.set_result(fleet.ask(prompt, 4))
        except BaseException as error:
            answer.set_exception(error)
            raise

    threading.Thread(target=ask, daemon=True).start()
    return prompt, answer


def test_over_two_nodes_nobody_who_dies_or_stands_still_costs_an_answer(
    frail: SplitFleet,
) -> None:
    def is_from_a_peer() -> bool:
        prompt = prompt_of(next(NUMBERS), 320)
        told = frail.ask(prompt, 4)
        right(told, prompt, 4)
        return told.workers[0] in ("p", "b") and told.cached.get("peer", 0) >= 160

    eventually(is_from_a_peer, 90, "most of a prompt from the other node's store")

    frail.workers["p"].freeze()
    try:
        all_right(frail)
    finally:
        frail.workers["p"].thaw()

    prompt, tokens = prompt_of(next(NUMBERS), 200), 400
    connection = frail.stream(prompt, tokens)
    response = connection.getresponse()
    heard = response.read(200)
    victim = frail.workers[str(response.getheader("x-kvtier-worker"))]
    victim.kill()
    heard += response.read()
    connection.close()
    assert b"[DONE]" in heard
    assert text_of(events(heard)) == EXPECTED.text(prompt, tokens)
    all_right(frail)
    victim.restart()


def test_without_its_store_or_who_prefills_the_answers_are_right(frail: SplitFleet) -> None:
    prompt, answer = in_the_middle(frail)
    eventually(lambda: frail.is_busy("p") or frail.is_busy("b"), 30, "it is being computed")
    frail.stores[0].kill()
    right(answer.result(90), prompt, 4)
    all_right(frail)
    frail.workers["b"].kill()
    prompt, answer = in_the_middle(frail)
    frail.workers["p"].kill()
    right(answer.result(90), prompt, 4)
    all_right(frail)


def all_right(fleet: SplitFleet) -> None:
    for _ in range(3):
        prompt = prompt_of(next(NUMBERS), 200)
        right(fleet.ask(prompt, 4), prompt, 4)
