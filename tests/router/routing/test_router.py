"""The brain on its own: who is chosen, why, what is reserved, what is learnt. Time is virtual."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from kvtier.core.fleet import Addresses
from kvtier.core.model_card import Adapter
from kvtier.core.workers import Load, WorkerName
from kvtier.errors import ConfigError, NotFoundError, UnavailableError
from kvtier.types import InstanceId, Role, Source, Trust
from kvtier_router.routing import FailureKind, Policy, RouteAsk, RouteDecision, Router, Usage
from kvtier_router.routing.config import NameRule, NameTarget, RoutingConfig, static_worker
from kvtier_router.routing.fleet import LEFT_S
from kvtier_router.routing.values import Delivery, Knowledge, PromptKind
from tests.router.routing.bench import PROMPT, Bench, chain, name
from tests.support.virtual_fleet import (
    BLOCK_TOKENS,
    CARD,
    Clock,
    info_of,
    view_of,
    words,
)

# ---- cache against load


def test_the_holder_of_a_prefix_is_chosen_and_the_decision_says_why() -> None:
    bench = Bench()
    bench.replica.store(2, chain(PROMPT)[:30])
    decision = bench.route()
    assert decision.worker == name(2)
    assert decision.matched_tokens == {Source.GPU: 30 * BLOCK_TOKENS}
    assert decision.reused_tokens == 30 * BLOCK_TOKENS
    assert (decision.knowledge, decision.cause) == (Knowledge.FRESH, "")
    assert decision.target.address == "http://10.0.0.2:8000"
    assert decision.target.model == "model"


def test_a_holder_under_load_loses_against_recomputing_elsewhere() -> None:
    bench = Bench()
    bench.replica.store(2, chain(PROMPT)[:30])
    load = Load(queued_prefill_tokens=60_000)
    bench.replica.tell(view_of(2, info_of(2), load=load, heard_at=bench.clock.now))
    assert bench.route().worker != name(2)


def test_a_report_of_load_fades_as_the_queue_is_worked_off() -> None:
    bench = Bench(2)
    bench.replica.store(1, chain(PROMPT)[:30])
    load = Load(queued_prefill_tokens=60_000)
    bench.replica.tell(view_of(1, info_of(1), load=load, heard_at=bench.clock.now))
    bench.advance(30.0)
    assert bench.route().worker == name(1)


def test_what_a_report_counts_and_a_router_reserved_weighs_once() -> None:
    bench = Bench(2)
    bench.replica.store(1, chain(PROMPT)[:39])
    first = bench.route(np.concatenate([PROMPT, words("more", 3000)]))
    assert first.worker == name(1)
    load = Load(queued_prefill_tokens=3064, running_requests=1)
    bench.replica.tell(view_of(1, info_of(1), load=load, heard_at=bench.clock.now))
    told = bench.router.explain(RouteAsk("model", PROMPT))
    row = next(row for row in told.candidates if row.worker == name(1))
    assert row.queue_s == pytest.approx(3064 / 10_000, rel=0.05)


def test_siblings_of_one_burst_land_together() -> None:
    bench = Bench(8)
    rows = [
        bench.route(np.concatenate([PROMPT, words(f"s{number}", 80)])).worker
        for number in range(32)
    ]
    assert Counter(rows).most_common(1)[0][1] == 32


def test_another_scope_has_no_part_in_a_prefix() -> None:
    bench = Bench()
    bench.replica.store(2, chain(PROMPT, "a" * 64)[:30])
    assert bench.route(scope_salt="a" * 64).reused_tokens == 30 * BLOCK_TOKENS
    assert bench.route(scope_salt="b" * 64).reused_tokens == 0
    assert bench.route().reused_tokens == 0


def test_a_prompt_shorter_than_a_block_goes_by_load() -> None:
    bench = Bench(2)
    decision = bench.route(PROMPT[:10])
    assert decision.knowledge is Knowledge.LOAD_ONLY
    assert bench.route(PROMPT[:0]).prompt_tokens == 0


# ---- names


def test_unknown_names_and_an_empty_fleet_are_told_apart() -> None:
    bench = Bench(1)
    with pytest.raises(NotFoundError):
        bench.route(name="nothing")
    bench.replica.remove(0)
    with pytest.raises(UnavailableError):
        bench.route()
    assert not bench.router.serves("model")
    bench.advance(LEFT_S + 1)
    with pytest.raises(NotFoundError):
        bench.route()


def test_a_configured_name_without_workers_is_out_of_service_and_not_unknown() -> None:
    bench = Bench(1, RoutingConfig(rules=(NameRule("chat", (NameTarget("elsewhere"),)),)))
    with pytest.raises(UnavailableError):
        bench.route(name="chat")
    assert not bench.router.serves("chat")


def test_an_alias_of_the_router_asks_for_what_the_workers_serve() -> None:
    rule = NameRule("gpt-4", (NameTarget("model"),))
    bench = Bench(config=RoutingConfig(rules=(rule,)))
    bench.replica.store(3, chain(PROMPT)[:30])
    decision = bench.route(name="gpt-4")
    assert (decision.worker, decision.target.model) == (name(3), "model")
    assert [report.name for report in bench.router.models()] == ["gpt-4", "model"]


def test_a_canary_gets_its_share_and_another_revision_another_chain() -> None:
    rule = NameRule("chat", (NameTarget("model", "r1", 0.9), NameTarget("model", "r2", 0.1)))
    bench = Bench(4, RoutingConfig(rules=(rule,)))
    card = replace(CARD, revision="r2", block_tokens=32)
    bench.replica.tell(view_of(4, info_of(4, card), heard_at=100.0))
    revisions = Counter(bench.serve(name="chat").target.pool.revision for _ in range(400))
    assert 0.05 < revisions["r2"] / 400 < 0.16


def test_pools_of_different_block_sizes_compete_on_tokens() -> None:
    bench = Bench(4)
    card = replace(CARD, revision="r2", block_tokens=32)
    bench.replica.tell(view_of(4, info_of(4, card), heard_at=100.0))
    bench.replica.store(1, chain(PROMPT)[:29])
    bench.replica.store(4, chain(PROMPT, pool=card.pool)[:60])
    assert bench.route(name="model").reused_tokens == 60 * 32  # all pools compete on tokens


def test_workers_with_the_adapter_loaded_are_taken_and_a_reload_has_no_old_hits() -> None:
    bench = Bench(3)
    old, new = Adapter("lora", b"a" * 32, 1), Adapter("lora", b"b" * 32, 2)
    card = replace(CARD, adapters=(old,))
    bench.replica.tell(view_of(1, info_of(1, card), heard_at=100.0))
    bench.replica.store(1, chain(PROMPT, adapter=old.ref)[:30])
    decision = bench.route(name="lora")
    assert (decision.worker, decision.target.model) == (name(1), "lora")
    assert decision.target.adapter == old.ref
    assert decision.reused_tokens == 30 * BLOCK_TOKENS
    reloaded = replace(CARD, adapters=(new,))
    bench.replica.tell(view_of(1, info_of(1, reloaded), heard_at=100.0))
    after = bench.route(name="lora")
    assert (after.worker, after.reused_tokens, after.target.adapter) == (name(1), 0, new.ref)


def test_where_nobody_with_the_adapter_can_be_asked_others_of_its_pool_are() -> None:
    bench = Bench(2)
    card = replace(CARD, adapters=(Adapter("lora", None),))
    bench.replica.tell(view_of(1, info_of(1, card), heard_at=100.0))
    assert bench.route(name="lora").worker == name(1)
    bench.router.drain(name(1))
    assert bench.route(name="lora").worker == name(0)


# ---- who may be asked


def test_a_draining_worker_gets_nothing_new() -> None:
    bench = Bench(2)
    bench.replica.store(1, chain(PROMPT))
    bench.router.drain(name(1))
    assert {bench.route().worker for _ in range(20)} == {name(0)}
    bench.router.undrain(name(1))
    assert bench.route().worker == name(1)
    with pytest.raises(NotFoundError):
        bench.router.drain(name(7))


def test_a_hidden_worker_is_asked_only_when_all_are_hidden() -> None:
    bench = Bench(2)
    bench.replica.tell(view_of(0, info_of(0), is_hidden=True))
    assert {bench.route().worker for _ in range(20)} == {name(1)}
    bench.replica.tell(view_of(1, info_of(1), is_hidden=True))
    assert bench.route().worker in (name(0), name(1))


def test_all_drained_is_unavailable_with_the_reasons() -> None:
    bench = Bench(2)
    for number in range(2):
        bench.router.drain(name(number))
    with pytest.raises(UnavailableError, match="2 draining"):
        bench.route()
    assert bench.router.stats.unavailable == 1


def test_a_worker_that_failed_this_request_is_passed_over_unless_it_is_the_last() -> None:
    bench = Bench(2)
    bench.replica.store(1, chain(PROMPT))
    assert bench.route(excluded=frozenset({name(1)})).worker == name(0)
    assert bench.route(excluded=frozenset({name(0), name(1)})).worker == name(1)


def test_a_breaker_opens_after_failures_and_closes_after_good_answers() -> None:
    bench = Bench(2)
    bench.replica.store(1, chain(PROMPT)[:30])
    for _ in range(bench.config.breaker.failures_max):
        decision = bench.route()
        assert decision.worker == name(1)
        decision.placement.failed(FailureKind.CONNECT)
    assert {bench.route().worker for _ in range(10)} == {name(0)}
    states = {report.worker: report.state for report in bench.router.workers()}
    assert states[name(1)] == "breaker"
    bench.advance(bench.config.breaker.open_s + 0.1)
    later = []
    for number in range(120):
        later.append(bench.serve(words(f"later{number}", 500)).worker)
        bench.advance(1.0)
    assert later[:20].count(name(1)) < 10  # slow start
    assert 20 <= later[60:].count(name(1)) <= 40


def test_when_all_breakers_are_open_it_is_unavailable_and_says_so() -> None:
    bench = Bench(1)
    for _ in range(bench.config.breaker.failures_max):
        bench.route().placement.failed(FailureKind.SERVER_ERROR)
    with pytest.raises(UnavailableError, match="breaker"):
        bench.route()
    bench.advance(bench.config.breaker.open_s + 0.1)
    assert bench.serve().worker == name(0)


@pytest.mark.parametrize("kind", [FailureKind.REJECTED, FailureKind.CANCELLED])
def test_what_is_not_the_workers_fault_does_not_count_against_it(kind: FailureKind) -> None:
    bench = Bench(1)
    for _ in range(50):
        bench.route().placement.failed(kind)
    assert bench.route().worker == name(0)


def test_an_overloaded_worker_is_left_alone_for_a_moment() -> None:
    bench = Bench(2)
    bench.replica.store(1, chain(PROMPT))
    bench.route().placement.failed(FailureKind.OVERLOADED, 5.0)
    assert bench.route().worker == name(0)
    bench.advance(5.1)
    assert bench.route().worker == name(1)


def test_a_worker_that_joins_later_starts_slowly_and_reaches_its_full_part() -> None:
    bench = Bench(7, RoutingConfig(policy=Policy.RANDOM))
    bench.serve()
    bench.advance(60.0)
    bench.replica.tell(view_of(7, info_of(7), heard_at=bench.clock.now))
    early = Counter(bench.serve().worker for _ in range(800))
    bench.advance(60.0)
    late = Counter(bench.serve().worker for _ in range(800))
    assert early[name(7)] < 40
    assert late[name(7)] > 60


def test_roles_are_kept_apart() -> None:
    bench = Bench(1)
    for number, role in ((1, Role.PREFILL), (2, Role.DECODE)):
        info = replace(info_of(number), role=role)
        bench.replica.tell(view_of(number, info, heard_at=100.0))
    chosen = {
        stage: {bench.route(words(f"{stage}{n}", 500), stage=stage).worker for n in range(40)}
        for stage in Role
    }
    assert chosen[Role.BOTH] == {name(0), name(2)}
    assert chosen[Role.PREFILL] == {name(0), name(1)}
    assert chosen[Role.DECODE] == {name(0), name(2)}


def test_a_whole_request_goes_to_a_prefill_worker_rather_than_to_nobody() -> None:
    bench = Bench(0)
    for number, role in ((1, Role.PREFILL), (2, Role.DECODE)):
        info = replace(info_of(number), role=role)
        bench.replica.tell(view_of(number, info, heard_at=100.0))
    bench.router.drain(name(2))
    assert bench.route().worker == name(1)


# ---- the ladder


def test_credit_decays_when_the_index_is_silent_and_hashing_comes_last() -> None:
    bench = Bench(4)
    bench.replica.store(2, chain(PROMPT)[:32])
    bench.replica.lose()
    bench.advance(60.0)
    stale = bench.route()
    assert (stale.knowledge, stale.worker) == (Knowledge.STALE, name(2))
    assert stale.reused_tokens == pytest.approx(16 * BLOCK_TOKENS, abs=2)
    stale.placement.failed(FailureKind.CANCELLED)
    bench.advance(200.0)
    hashed = bench.route()
    assert hashed.knowledge is Knowledge.HASHED
    assert "silent" in hashed.cause


def test_without_an_index_prompts_stick_by_hash_and_loads_stay_bounded() -> None:
    workers = tuple(static_worker(f"s{n}", f"http://10.1.0.{n}:80", ["m"]) for n in range(4))
    router = Router(RoutingConfig(workers=workers), clock=Clock(), draw=Random(1).random)
    placed = [router.route(RouteAsk("m", PROMPT)) for _ in range(20)]
    assert placed[0].knowledge is Knowledge.HASHED
    assert max(Counter(decision.worker for decision in placed).values()) <= 7
    for decision in placed:
        decision.placement.finished(Usage())
    assert router.route(RouteAsk("m", PROMPT)).worker == placed[0].worker


def test_text_without_a_tokenizer_sticks_by_its_beginning() -> None:
    bench = Bench(8)
    chosen = set()
    for _ in range(20):
        decision = bench.serve(kind=PromptKind.TEXT)
        chosen.add(decision.worker)
        assert decision.knowledge is Knowledge.HASHED
    assert len(chosen) == 1


def test_a_model_whose_tokens_differ_is_degraded_and_hashed_until_they_agree() -> None:
    bench = Bench(4)
    for _ in range(60):
        decision = bench.route()
        decision.placement.first_token(0.1)
        decision.placement.finished(Usage(prompt_tokens=len(PROMPT) + 3, cached_tokens=0))
    report = bench.router.models()[0]
    assert "tokenised differently" in report.cause
    assert report.token_mismatches == 60
    assert bench.route().knowledge is Knowledge.HASHED
    for _ in range(40):
        for _ in range(60):
            bench.serve()
        bench.advance(60.0)
    assert bench.router.models()[0].cause == ""
    assert bench.route().knowledge is Knowledge.FRESH


def test_promised_prefixes_that_are_never_found_degrade_a_model() -> None:
    bench = Bench(1)
    bench.replica.store(0, chain(PROMPT)[:30])
    for _ in range(60):
        decision = bench.route()
        decision.placement.first_token(0.1)
        decision.placement.finished(Usage(prompt_tokens=len(PROMPT), cached_tokens=0))
    report = bench.router.models()[0]
    assert "not cached" in report.cause
    assert report.hit_mismatches == 60


def test_a_degraded_holder_has_half_the_credit() -> None:
    bench = Bench(1)
    bench.replica.tell(view_of(0, info_of(0), trust=Trust.DEGRADED, heard_at=100.0))
    bench.replica.store(0, chain(PROMPT)[:32])
    assert bench.route().reused_tokens == pytest.approx(16 * BLOCK_TOKENS, abs=2)


def test_a_new_picture_with_other_numbers_is_taken_over_and_missing_workers_stay_a_while() -> None:
    bench = Bench(3)
    bench.route()
    bench.replica.new_picture()
    bench.replica.tell(view_of(7, info_of(2), heard_at=bench.clock.now))
    bench.replica.store(7, chain(PROMPT)[:30])
    assert bench.route().worker == name(2)
    assert len(bench.router.workers()) == 3
    bench.advance(11.0)
    assert [report.worker for report in bench.router.workers()] == [name(2)]


# ---- static workers


def test_an_index_knows_better_than_the_configuration() -> None:
    static = static_worker("by-hand", "10.0.0.0:8000/", ["model"], BLOCK_TOKENS)
    other = static_worker("alone", "http://10.9.9.9:1", ["model"], BLOCK_TOKENS)
    bench = Bench(2, RoutingConfig(workers=(static, other)))
    bench.route()
    names = {report.worker.instance for report in bench.router.workers()}
    assert names == {"w0", "w1", "alone"}
    bench.replica.remove(0)
    bench.route()
    names = {report.worker.instance for report in bench.router.workers()}
    assert names == {"by-hand", "w1", "alone"}


# ---- policies


def test_round_robin_takes_turns() -> None:
    bench = Bench(4, RoutingConfig(policy=Policy.ROUND_ROBIN))
    order = [bench.route().worker.instance for _ in range(8)]
    assert order == ["w0", "w1", "w2", "w3"] * 2


def test_least_loaded_goes_where_fewest_are() -> None:
    bench = Bench(4, RoutingConfig(policy=Policy.LEAST_LOADED))
    counts = Counter(bench.route().worker for _ in range(40))
    assert set(counts.values()) == {10}


def test_a_session_stays_with_its_worker_and_moves_only_when_it_must() -> None:
    bench = Bench(4, RoutingConfig(policy=Policy.SESSION))
    home = bench.route(session_id="alice").worker
    assert {bench.route(session_id="alice").worker for _ in range(20)} == {home}
    assert len({bench.route(session_id=f"user-{n}").worker for n in range(40)}) == 4
    bench.router.drain(home)
    moved = {bench.route(session_id="alice").worker for _ in range(20)}
    assert len(moved) == 1
    assert home not in moved


def test_random_reaches_everybody() -> None:
    bench = Bench(4, RoutingConfig(policy=Policy.RANDOM))
    assert len({bench.route().worker for _ in range(60)}) == 4


# ---- placements


def test_a_placement_is_reserved_at_once_told_to_others_and_released_after_the_first_token() -> (
    None
):
    bench = Bench(2)
    decision = bench.route()
    key, worker = decision.placement.key, decision.worker
    assert bench.replica.own.totals(worker).prefill_tokens == len(PROMPT)
    assert [wanted.key for wanted in bench.sink.reserved] == [key]
    assert len(bench.sink.reserved[0].hashes) == 40
    decision.placement.first_token(0.3)
    assert bench.replica.own.totals(worker).prefill_tokens == 0
    assert bench.route().worker == worker  # its blocks are still believed to be there
    assert bench.sink.released == []
    bench.advance(0.2)
    assert bench.sink.released == [key]


def test_a_failed_placement_leaves_nothing_behind() -> None:
    bench = Bench(2)
    decision = bench.route()
    decision.placement.failed(FailureKind.CONNECT)
    assert bench.replica.own.totals(decision.worker).prefill_tokens == 0
    assert bench.route().reused_tokens == 0
    bench.advance(0.2)
    assert decision.placement.key in bench.sink.released


def end_twice(decision: RouteDecision) -> None:
    decision.placement.finished(Usage())
    decision.placement.finished(Usage())


def fail_after_the_end(decision: RouteDecision) -> None:
    decision.placement.finished(Usage())
    decision.placement.failed(FailureKind.BROKEN)


def answer_after_failing(decision: RouteDecision) -> None:
    decision.placement.failed(FailureKind.CANCELLED)
    decision.placement.first_token(1.0, 3)
    decision.placement.finished(Usage())


def answer_nonsense(decision: RouteDecision) -> None:
    decision.placement.first_token(float("nan"), -5)
    decision.placement.finished(Usage(-1, -1, -1, -1.0))


def never_end(decision: RouteDecision) -> None:
    """Nothing."""


@pytest.mark.parametrize(
    "end", [end_twice, fail_after_the_end, answer_after_failing, answer_nonsense, never_end]
)
def test_however_placements_end_nothing_stays_counted(
    end: Callable[[RouteDecision], None],
) -> None:
    bench = Bench(2)
    for delivery in (Delivery.STREAM, Delivery.WHOLE):
        for _ in range(10):
            end(bench.route(delivery=delivery))
    bench.advance(100.0)
    bench.advance(bench.config.placement_s_max + 1.0)
    assert bench.router.in_flight_count == 0
    for report in bench.router.workers():
        assert (report.requests_in_flight, report.waiting_prefill_tokens) == (0, 0)


def test_an_answer_in_one_piece_is_presumed_to_have_prefilled() -> None:
    bench = Bench(1)
    bench.route(delivery=Delivery.WHOLE)
    assert bench.router.workers()[0].waiting_prefill_tokens == len(PROMPT)
    bench.advance(5.0)
    report = bench.router.workers()[0]
    assert (report.waiting_prefill_tokens, report.requests_in_flight) == (0, 1)


def test_a_worker_may_leave_and_come_back_while_its_requests_run() -> None:
    bench = Bench(2)
    held = [bench.route() for _ in range(10)]
    for number in range(2):
        bench.replica.remove(number)
    with pytest.raises(UnavailableError):
        bench.route()
    bench.replica.tell(view_of(5, info_of(0), heard_at=bench.clock.now))
    again = bench.route()
    assert again.worker == name(0)
    for decision in (*held, again):
        decision.placement.finished(Usage())
    assert bench.router.in_flight_count == 0
    assert [report.requests_in_flight for report in bench.router.workers()] == [0]


# ---- learning


@pytest.mark.parametrize("tokens_per_s", [1_000.0, 40_000.0])
def test_prefill_speed_is_learnt_from_times_to_first_token(tokens_per_s: float) -> None:
    bench = Bench(1)
    for number in range(30):
        decision = bench.route(words(f"p{number}", 4000))
        bench.advance(4000 / tokens_per_s + 0.003)
        decision.placement.first_token(4000 / tokens_per_s + 0.003, 0)
        decision.placement.finished(Usage())
        bench.advance(0.5)
    measured = bench.router.workers()[0].prefill_tokens_per_s
    assert measured == pytest.approx(tokens_per_s, rel=0.25)


def test_a_worker_that_repeats_its_own_old_word_is_tried_again() -> None:
    bench = Bench(2)
    for step in range(40):
        for number in range(2):
            speed = 1_000.0 + step * 20 if number else 10_000.0 + step * 200
            load = Load(
                prefill_tokens_per_s=speed if step < 10 else 1_000.0 + 9_000.0 * (1 - number)
            )
            bench.replica.tell(view_of(number, info_of(number), load=load, heard_at=100.0))
        bench.router.workers()
        if step == 9:
            slow, well = bench.router.workers()[1], bench.router.workers()[0]
            assert slow.prefill_tokens_per_s < 0.3 * well.prefill_tokens_per_s
        bench.advance(0.5)
    reports = bench.router.workers()
    assert reports[1].prefill_tokens_per_s == pytest.approx(reports[0].prefill_tokens_per_s)


def test_a_worker_slow_in_whole_answers_gets_less() -> None:
    bench = Bench(2)
    chosen = Counter[WorkerName]()
    for number in range(200):
        decision = bench.route(words(f"p{number}", 2000), delivery=Delivery.WHOLE)
        seconds = 0.2 + 1.0 * (8.0 if decision.worker == name(1) else 1.0)
        decision.placement.finished(Usage(2000, 50, 0, seconds))
        chosen[decision.worker] += 1
        bench.advance(0.5)
    assert chosen[name(1)] < 0.5 * chosen[name(0)]


# ---- explanations and configuration


def test_an_explanation_has_a_row_for_everybody_and_places_nothing() -> None:
    bench = Bench(4)
    bench.replica.store(2, chain(PROMPT)[:30])
    bench.router.drain(name(3))
    told = bench.router.explain(RouteAsk("model", PROMPT))
    assert [row.state for row in told.candidates] == ["candidate"] * 3 + ["draining"]
    assert [row.chosen for row in told.candidates] == [False, False, True, False]
    assert told.candidates[2].matched_tokens["gpu"] == 30 * BLOCK_TOKENS
    assert told.candidates[3].total_s == float("inf")
    json.dumps(told.as_json(), allow_nan=False)
    told.placement.finished(Usage())
    assert bench.router.in_flight_count == 0
    assert bench.sink.reserved == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: NameRule("a", ()),
        lambda: NameRule("a", (NameTarget("x", share=1.0), NameTarget("y"))),
        lambda: NameRule("a", (NameTarget("x", share=0.0),)),
        lambda: NameTarget("x", share=-1.0),
        lambda: RoutingConfig(hash_bound=0.5),
        lambda: RoutingConfig(ramp_s=-1.0),
        lambda: RoutingConfig(workers=(static_worker("a", "b:1", ["m"]),) * 2),
        lambda: RoutingConfig(rules=(NameRule("a", (NameTarget("x"),)),) * 2),
    ],
)
def test_senseless_settings_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_addresses_of_ranks_are_theirs() -> None:
    bench = Bench(0)
    for rank in range(2):
        info = replace(
            info_of(0), dp_rank=rank, addresses=Addresses(http=f"http://10.0.0.9:{8000 + rank}")
        )
        bench.replica.tell(view_of(rank, info, heard_at=100.0))
    bench.replica.store(1, chain(PROMPT)[:30])
    decision = bench.route()
    assert decision.worker == WorkerName(InstanceId("w0"), 1)
    assert decision.target.address == "http://10.0.0.9:8001"
