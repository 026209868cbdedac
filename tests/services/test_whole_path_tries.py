"""One fleet of real processes behind one router, tried in every way that clients and faults have.

The tests share the fleet: each uses prompts of its own and, but for the last one, leaves all
processes running.
"""

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from itertools import count

import pytest

from kvtier.core.scopes import private_scope, scope_salt
from kvtier.types import TenantId
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually
from tests.router.front.rig import call
from tests.support.whole_fleet import CONTEXT_TOKENS, POOL_BLOCKS, SECRET, WholeFleet
from tests.support.worker_cluster import MODEL, Expected, prompt_of
from tests.telemetry.test_tracing import Collector

pytestmark = pytest.mark.timeout(240)
EXPECTED = Expected()
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[WholeFleet]:
    directory = tmp_path_factory.mktemp("fleet")
    flags = (
        f"--otlp-endpoint=http://127.0.0.1:{collector.port}",
        f"--names=pet={MODEL}",
        "--names=shared=shared@@1-0-8*0.75 shared@@1-1-8*0.25",
    )
    with ProcessRunner(f"fleet-{directory.name}", directory) as runner:
        # Slow enough that a busy machine loads a prompt sooner than it computes it.
        fleet = WholeFleet(runner, directory, flags, tokens_per_s=5_000.0)
        fleet.start()
        eventually(lambda: fleet.metric("kvtier_router_eligible_workers") >= 8, 30, "all are known")
        yield fleet
        fleet.clean_logs()


def test_tenants_meet_in_no_tier_and_a_named_scope_joins_them(fleet: WholeFleet) -> None:
    prompt = prompt_of(1, 321)
    expected = EXPECTED.text(prompt, 3)

    def comes_true(tenant: str, salt: str) -> bool:
        told = fleet.ask(tenant, prompt, 3, cache_salt=salt)
        assert told.texts == [expected]
        return told.cached.get("gpu", 0) == told.matched == 320

    for tenant, salt in (("alice", "x"), ("bob", "x"), ("carol", "x"), ("alice", "y")):
        # Others' blocks are in L1 and in L2, and known to be.
        cold = fleet.ask(tenant, prompt, 3, cache_salt=salt)
        assert (cold.texts, cold.cached, cold.matched) == ([expected], {}, 0)
        eventually(partial(comes_true, tenant, salt), 30, "its own blocks hit")
    stolen = scope_salt(SECRET.encode(), private_scope(TenantId("alice")), "x")
    theft = fleet.ask("bob", prompt, 3, cache_salt=stolen)
    assert (theft.cached, theft.matched) == ({}, 0)
    assert fleet.ask("red", prompt, 3, cache_salt="x").cached == {}
    eventually(lambda: comes_true("blue", "x"), 30, "who shares a scope shares its blocks")


def test_three_choices_from_the_tier_below_are_all_right(fleet: WholeFleet) -> None:
    prompt = prompt_of(2, 321)
    expected = EXPECTED.text(prompt, 6)
    assert fleet.ask("alice", prompt, 6).texts == [expected]

    def from_below() -> bool:
        for number in range(3):  # put other prompts in place of what the workers hold
            for worker in ("w0", "w1"):
                fleet.at(worker, prompt_of(100 + number, 1800), 1, "flush")
        told = fleet.ask("alice", prompt, 6, n=3)
        assert told.texts == [expected] * 3
        return sum(told.cached.get(tier, 0) for tier in ("dram", "nvme")) >= 160

    eventually(from_below, 100, "most of the prompt comes from below")


def test_prompts_at_the_edges_of_the_context(fleet: WholeFleet) -> None:
    prompt = prompt_of(3, CONTEXT_TOKENS)
    empties: tuple[object, ...] = ("", [], [[]], [""])
    for empty in empties:
        refused = fleet.ask("alice", empty, 1)
        assert refused.status == 400
        assert refused.answer.json["error"]["param"] == "prompt"
    for length in (CONTEXT_TOKENS, CONTEXT_TOKENS + 1):
        refused = fleet.ask("alice", [*prompt, 7][:length], 1)
        assert refused.status == 400
        assert refused.answer.json["error"]["code"] == "context_length_exceeded"
    fits = fleet.ask("alice", prompt[:-1], 1)
    assert fits.status == 200
    assert fits.matched == 0  # nothing is predicted of what was refused


def test_names_stand_for_models_revisions_and_their_shares(fleet: WholeFleet) -> None:
    prompt = prompt_of(4, 100)
    pet = fleet.ask("alice", prompt, 2, model="pet")
    assert pet.texts == [EXPECTED.text(prompt, 2)]
    other = fleet.ask("alice", prompt, 2, model="other")
    assert other.worker == "w2"
    assert other.cached == {}  # the same tokens of another revision are other blocks
    asks: list[dict[str, object]] = [
        {"prompt": prompt_of(200 + n, 40), "model": "shared"} for n in range(120)
    ]
    told = [one for at in range(0, 120, 20) for one in fleet.ask_all("bob", 1, *asks[at : at + 20])]
    assert {one.status for one in told} == {200}
    share = Counter(one.worker for one in told)["w2"] / len(told)
    assert 0.06 < share < 0.44  # of 0.25; almost five deviations


def test_requests_beyond_the_pool_give_way_and_come_back_unchanged(fleet: WholeFleet) -> None:
    prompt = prompt_of(5, 200)
    expected = EXPECTED.text(prompt, 260)
    before = sum(
        fleet.metric("kvtier_worker_preempted_total", fleet.ports[name]) for name in ("w0", "w1")
    )
    # Salts of their own, so that nothing is shared: 24 times 29 blocks in two pools of 256.
    assert 2 * POOL_BLOCKS < 24 * 29
    asks: list[dict[str, object]] = [
        {"prompt": prompt, "cache_salt": f"own-{n}"} for n in range(24)
    ]
    told = fleet.ask_all("alice", 260, *asks)
    assert {one.status for one in told} == {200}
    assert {text for one in told for text in one.texts} == {expected}
    after = sum(
        fleet.metric("kvtier_worker_preempted_total", fleet.ports[name]) for name in ("w0", "w1")
    )
    assert after > before


def _leave_within(fleet: WholeFleet, number: int) -> None:
    """Ask for a stream and leave somewhere in it, or before it begins."""
    draw = random.Random(number)
    body = {"model": MODEL, "prompt": prompt_of(300 + number, 150), "max_tokens": 400}
    connection = HTTPConnection("127.0.0.1", fleet.port, timeout=20)
    headers = {"authorization": "Bearer carol", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
    if number % 4:
        response = connection.getresponse()
        for _ in range(draw.randrange(1, 12)):
            assert response.readline()
    connection.close()


def test_clients_that_leave_all_at_once_hold_nothing(fleet: WholeFleet) -> None:
    leavers = [threading.Thread(target=_leave_within, args=(fleet, n)) for n in range(32)]
    for leaver in leavers:
        leaver.start()
    for leaver in leavers:
        leaver.join(60)
    ports = [fleet.ports[name] for name in ("w0", "w1")]

    def is_calm() -> bool:
        used = sum(_labelled(port, 'kvtier_worker_blocks{state="used"}') for port in ports)
        live = sum(fleet.metric("kvtier_worker_live_requests", port) for port in ports)
        return used == live == fleet.metric("kvtier_router_running_requests") == 0

    eventually(is_calm, 30, "nothing runs and nothing is held")
    fleetwide = call(fleet.admin_port, "GET", "/fleet").json["workers"]
    assert {one["requests_in_flight"] for one in fleetwide} == {0}
    prompt = prompt_of(6, 100)
    assert fleet.ask("carol", prompt, 4).texts == [EXPECTED.text(prompt, 4)]


def _labelled(port: int, sample: str) -> float:
    page = call(port, "GET", "/metrics").body.decode()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(sample)
    )


def test_a_store_that_stands_still_costs_no_answer(fleet: WholeFleet) -> None:
    prompts = [prompt_of(400 + number, 330) for number in range(8)]
    expected = [EXPECTED.text(prompt, 4) for prompt in prompts]
    asks: list[dict[str, object]] = [{"prompt": prompt} for prompt in prompts]
    fleet.ask_all("alice", 4, *asks)
    fleet.store.freeze()
    try:
        for _ in range(2):
            told = fleet.ask_all("alice", 4, *asks)
            assert [one.texts[0] for one in told] == expected
    finally:
        fleet.store.thaw()
    assert [one.texts[0] for one in fleet.ask_all("alice", 4, *asks)] == expected


def test_indexes_that_die_one_after_the_other_cost_no_answer_and_matches_come_back(
    fleet: WholeFleet,
) -> None:
    prompt = prompt_of(7, 321)
    expected = EXPECTED.text(prompt, 2)
    fleet.ask("alice", prompt, 2)
    for index in fleet.indexes:
        index.kill()
        for number in range(3):
            told = fleet.ask("alice", prompt, 2)
            assert told.texts == [expected], number
    for index in fleet.indexes:
        index.restart()

    def comes_true() -> bool:
        told = fleet.ask("alice", prompt, 2)
        assert told.texts == [expected]
        fresh = told.answer.headers["x-kvtier-policy"].endswith("/fresh")
        return fresh and told.matched == sum(told.cached.values()) == 320

    eventually(comes_true, 40, "what the workers hold is known again")


def test_a_trace_of_the_client_is_joined_and_exported(
    fleet: WholeFleet, collector: Collector
) -> None:
    body = {"model": MODEL, "prompt": prompt_of(8, 20), "max_tokens": 1}
    headers = {
        "authorization": "Bearer alice",
        "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
    }
    answer = call(fleet.port, "POST", "/v1/completions", body, headers=headers)
    assert answer.status == 200

    def ours() -> list[object]:
        return [span for span in collector.spans if span.trace_id.hex() == TRACE]

    eventually(lambda: bool(ours()), 30, "the span is exported")
    (span,) = [span for span in collector.spans if span.trace_id.hex() == TRACE]
    assert span.name == "router.request"
    assert span.parent_span_id.hex() == "00f067aa0ba902b7"
    told = {item.key: item.value.string_value or item.value.int_value for item in span.attributes}
    assert told["kvtier.worker"] == answer.headers["x-kvtier-worker"]
    assert told["kvtier.model"] == MODEL
    assert told["kvtier.attempts"] == 1
    assert collector.resources["service.name"] == "router"


def test_requests_at_a_worker_that_stands_still_are_answered_by_another(
    fleet: WholeFleet,
) -> None:
    prompt = prompt_of(10, 600)
    expected = EXPECTED.text(prompt, 1)
    lost = "kvtier_router_upstream_losses_total"
    before = fleet.metric(lost)
    rounds = count()

    def some_waited_at_it() -> bool:
        """Three at once, with the next test's fewer than may be tried again at once (20)."""
        number = next(rounds)
        asks: list[dict[str, object]] = [
            {"prompt": prompt, "cache_salt": f"frozen-{number}-{n}"} for n in range(3)
        ]
        assert [one.texts for one in fleet.ask_all("alice", 1, *asks)] == [[expected]] * 3
        return fleet.metric(lost) > before

    fleet.workers["w0"].freeze()
    try:
        eventually(some_waited_at_it, 60, "some waited at the worker that stands still")
    finally:
        fleet.workers["w0"].thaw()
    seeds = count(500)
    answers: list[str] = []

    def takes_part_again() -> bool:
        """As often as its breaker wants probes, and more: afterwards it is as good as any."""
        answers.append(fleet.ask("alice", prompt_of(next(seeds), 40), 1).worker)
        return sum("w0" in worker for worker in answers) >= 8

    eventually(takes_part_again, 50, "the worker that stood still takes part again")


def test_a_worker_that_dies_before_its_first_byte_is_replaced(fleet: WholeFleet) -> None:
    prompt = prompt_of(9, 1200)
    expected = EXPECTED.text(prompt, 1)
    told: list[list[str]] = []

    def ask(number: int) -> None:
        told.append(fleet.ask("alice", prompt, 1, cache_salt=f"dying-{number}").texts)

    asking: list[threading.Thread] = []

    def is_busy() -> bool:
        """Whether requests are at the victim; where all went elsewhere, more are made."""
        if not any(one.is_alive() for one in asking):
            more = [threading.Thread(target=ask, args=(len(asking) + n,)) for n in range(8)]
            for one in more:
                one.start()
            asking.extend(more)
        rows = call(fleet.admin_port, "GET", "/fleet").json["workers"]
        return any(row["requests_in_flight"] > 0 for row in rows if row["worker"] == "w1")

    victim = fleet.workers["w1"]
    victim.freeze()  # no request at it ends before it does
    eventually(is_busy, 30, "requests are at it")
    victim.kill()
    for one in asking:
        one.join(60)
    assert told == [[expected]] * len(asking)
