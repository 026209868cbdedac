"""The queue, the stream filters and the access log, without a network."""

import asyncio
import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.admission import AdmissionPolicy, ClassPolicy
from kvtier.core.quotas import Quota
from kvtier.errors import CallerError, DeadlineError
from kvtier.openai.sse import DONE
from kvtier.types import ScopeId, TenantId
from kvtier_router.front.access_log import AccessLog, quoted
from kvtier_router.front.calls import Amendment, Api, read_call, upstream_body
from kvtier_router.front.queue import QueueFullError, RequestQueue
from kvtier_router.front.resume import StreamBudget
from kvtier_router.front.streams import PlainFilter
from kvtier_router.front.tenants import Tenant
from kvtier_router.web.upstream import parse_origin, request_bytes
from kvtier_router.web.values import response_head


def tenant(name: str, priority: int = 0) -> Tenant:
    return Tenant(TenantId(name), ScopeId(f"tenant:{name}"), Quota(), priority)


def policy(running: int, queued: int = 100) -> AdmissionPolicy:
    row = ClassPolicy(queued_requests_max=queued)
    return AdmissionPolicy(classes=(row, row), running_requests_max=running)


# The queue


async def test_tenants_take_turns_however_many_requests_one_has() -> None:
    queue = RequestQueue(policy(1), 30.0, lambda: 0.0)
    held = await queue.enter(tenant("a"), 10)
    order: list[str] = []

    async def wait(name: str) -> None:
        async with queue.slot(tenant(name), 10):
            order.append(name)

    waiting = [asyncio.create_task(wait(name)) for name in "aaaaaabb"]
    await asyncio.sleep(0)
    queue.leave(held)
    await asyncio.gather(*waiting)
    assert order.index("b") <= 1
    assert order[:4].count("b") == 2
    assert queue.running == 0


async def test_a_higher_class_goes_first() -> None:
    queue = RequestQueue(policy(1), 30.0, lambda: 0.0)
    held = await queue.enter(tenant("x"), 1)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        async with queue.slot(tenant(name, priority), 1):
            order.append(name)

    waiting = [asyncio.create_task(wait("low", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(wait("high", 0)))
    await asyncio.sleep(0)
    queue.leave(held)
    await asyncio.gather(*waiting)
    assert order[0] == "high"


async def test_a_full_queue_says_when_to_come_back() -> None:
    queue = RequestQueue(policy(1, queued=1), 30.0, lambda: 0.0)
    held = await queue.enter(tenant("a"), 1)
    waiting = asyncio.create_task(queue.enter(tenant("a"), 1))
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as caught:
        await queue.enter(tenant("a"), 1)
    assert caught.value.retry_after_s >= 1
    queue.leave(held)
    queue.leave(await waiting)
    assert (queue.running, queue.queued) == (0, 0)


async def test_who_waits_too_long_is_told_and_who_leaves_is_forgotten() -> None:
    now = [0.0]
    queue = RequestQueue(policy(1), 5.0, lambda: now[0])
    held = await queue.enter(tenant("a"), 1)
    late = asyncio.create_task(queue.enter(tenant("a"), 1))
    left = asyncio.create_task(queue.enter(tenant("b"), 1))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    assert queue.queued == 1
    now[0] = 6.0
    queue.pump()
    with pytest.raises(DeadlineError):
        await late
    queue.leave(held)
    slot = await queue.enter(tenant("c"), 1)
    queue.leave(slot)
    assert queue.running == 0


async def test_a_client_that_leaves_in_the_moment_of_its_turn_blocks_nobody() -> None:
    queue = RequestQueue(policy(1), 30.0, lambda: 0.0)
    held = await queue.enter(tenant("a"), 1)
    first = asyncio.create_task(queue.enter(tenant("b"), 1))
    second = asyncio.create_task(queue.enter(tenant("c"), 1))
    await asyncio.sleep(0)
    queue.leave(held)  # the turn of the first, who does not know it yet
    first.cancel()
    queue.leave(await asyncio.wait_for(second, 40))
    assert queue.running == 0


# Streams


def chunk(text: str, **more: object) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **more}


EVENTS = st.lists(
    st.one_of(
        st.text(max_size=8).map(lambda text: (json.dumps(chunk(text)), True)),
        st.text(max_size=8).map(lambda text: (json.dumps(chunk(text + '"usage":null')), True)),
        st.just((json.dumps({"id": "c", "choices": [], "usage": {"prompt_tokens": 3}}), False)),
    ),
    max_size=6,
)


@given(EVENTS, st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_a_filter_passes_all_but_usage_whatever_the_pieces(
    made: list[tuple[str, bool]], sizes: list[int]
) -> None:
    raw = b"".join(b"data: " + text.encode() + b"\n\n" for text, _ in made) + DONE
    kept = b"".join(b"data: " + text.encode() + b"\n\n" for text, stays in made if stays) + DONE
    for wants_usage in (True, False):
        filtered = PlainFilter(wants_usage=wants_usage, keeps=True)
        out, at = b"", 0
        for number in range(len(raw)):
            size = sizes[number % len(sizes)]
            piece, at = raw[at : at + size], at + size
            passed = filtered.feed(piece)
            assert passed == b"" or passed.endswith(b"\n\n")
            out += passed
        assert out == (raw if wants_usage else kept)
        assert filtered.kept == out
        assert filtered.is_done
        assert filtered.end() == b""
        if not all(stays for _, stays in made):
            assert filtered.usage is not None
            assert filtered.usage.prompt_tokens == 3


# Bodies


EXTRA = st.fixed_dictionaries(
    {},
    optional={
        "cache_salt": st.one_of(st.none(), st.text(st.characters(codec="ascii"), max_size=5)),
        "stream_options": st.one_of(st.none(), st.just({"x": 1})),
        "temperature": st.integers(0, 9),
        "x": st.text(st.characters(codec="utf-8"), max_size=5),
    },
)


@given(
    EXTRA, st.booleans(), st.one_of(st.none(), st.just("salt")), st.sampled_from(["mock", "real"])
)
def test_an_amended_body_says_what_was_said_and_what_the_router_adds(
    extra: dict[str, Any], stream: bool, salt: str | None, model: str
) -> None:
    body = {**extra, "model": "mock", "prompt": "a } b", "stream": stream}
    raw = json.dumps(body, indent=1).encode() + b" \n"
    call = read_call(Api.COMPLETIONS, "POST", "/v1/completions", "", raw)
    sent = json.loads(upstream_body(call, Amendment(model, salt)))
    expected = {**body, "model": model}
    expected.pop("cache_salt", None)
    if salt is not None:
        expected["cache_salt"] = salt
    if stream:
        expected["stream_options"] = {**(extra.get("stream_options") or {}), "include_usage": True}
    assert sent == expected


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb"])
def test_no_header_value_ends_its_line(value: str) -> None:
    with pytest.raises(CallerError):
        response_head(200, [("x", value)])
    with pytest.raises(CallerError):
        request_bytes("GET", "/", [("x", value)], b"")


@pytest.mark.parametrize(
    ("address", "authority", "prefix"),
    [
        ("127.0.0.1:80", "127.0.0.1:80", ""),
        ("http://host:8000/v1", "host:8000", ""),
        ("https://host/base/", "host", "/base"),
        ("[::1]:9", "[::1]:9", ""),
    ],
)
def test_addresses_of_workers_are_read(address: str, authority: str, prefix: str) -> None:
    origin = parse_origin(address)
    assert (origin.authority, origin.prefix) == (authority, prefix)


@pytest.mark.parametrize(
    "address", ["", "ftp://a:1", "http://", "a:b", "http://u:p@h:1", "h:99999", "h:1\r\nx", "é:1"]
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(CallerError):
        parse_origin(address)


# The log


def test_lines_come_out_whole_in_order_and_in_ascii() -> None:
    stream = io.StringIO()
    log = AccessLog(stream)
    for number in range(3):
        log.add(f"id={number} model={quoted('mödel' + chr(10) + 'x=1')}")
    log.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("id=")[1][0] for line in lines] == ["0", "1", "2"]
    assert all(line.isascii() and "event=request" in line for line in lines)
    assert log.dropped_count == 0


def test_a_closed_reader_costs_lines_and_nothing_else() -> None:
    stream = io.StringIO()
    log = AccessLog(stream)
    stream.close()
    log.add("id=1")
    log.close()
    assert log.dropped_count == 1


# Streams that go on elsewhere


def test_all_streams_of_a_dead_worker_may_go_on_at_once_and_no_more() -> None:
    budget = StreamBudget()
    for _ in range(100):
        budget.began()
    assert sum(budget.take() for _ in range(150)) == 100


def test_streams_that_are_over_leave_no_budget_behind() -> None:
    budget = StreamBudget()
    for _ in range(100):
        budget.began()
    for _ in range(98):
        budget.ended()
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.began()
    assert [budget.take() for _ in range(2)] == [True, False]
