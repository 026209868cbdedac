"""A whole batch against an endpoint that answers by rule: order, exactly once, going on, errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvtier.batch import sending
from kvtier.batch.rows import Json
from kvtier.batch.running import read_summary, run
from kvtier.batch.settings import BatchConfig, EstimateSection, Order
from kvtier.batch.summary import Run
from kvtier.errors import CallerError, UnavailableError
from tests.harness.ports import free_port
from tests.harness.processes import Launch, ProcessRunner, python_module
from tests.harness.waiting import eventually_async
from tests.support.openai_stub import completion, serving

pytestmark = pytest.mark.timeout(120)

GROUPS = 5
OF_EACH = 8


def prompt_of(group: int, number: int) -> str:
    return f"group {group} " * 60 + f"question {number} " * 20


def prompts() -> list[str]:
    """Groups dealt out in turn: no neighbours share anything."""
    return [prompt_of(group, number) for number in range(OF_EACH) for group in range(GROUPS)]


def config_of(folder: Path, url: str, asked: list[str] | None = None, **terms: Any) -> BatchConfig:
    path = folder / "rows.jsonl"
    lines = [
        {"custom_id": f"id-{number}", "prompt": prompt}
        for number, prompt in enumerate(prompts() if asked is None else asked)
    ]
    if not path.exists():
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings: dict[str, Any] = {"window": 4, "lookahead": 64, **terms}
    return BatchConfig(inputs=(str(path),), out=folder / "out", urls=(url,), **settings)


def replace_input(config: BatchConfig) -> None:
    Path(config.inputs[0]).write_text('{"prompt": "x"}\n')


async def done(config: BatchConfig) -> Run:
    return await asyncio.to_thread(run, config, lambda _: None)


def results(config: BatchConfig) -> dict[str, Json]:
    """By custom_id; fails where one is there twice."""
    assert config.out is not None
    found: dict[str, Json] = {}
    for line in (config.out / "results.jsonl").read_text().splitlines():
        told = json.loads(line)
        assert told["custom_id"] not in found
        found[told["custom_id"]] = told
    return found


def text_of(row: Json) -> str:
    response = row["response"]
    assert isinstance(response, dict)
    return str(response["body"]["choices"][0]["text"])


async def test_every_row_is_answered_once_in_groups_the_first_of_each_before_the_others(
    tmp_path: Path,
) -> None:
    """A follower that is asked before its leader was answered fails the test by the leader's own
    record: the rule holds the leader until every other group's leader has come."""
    answered: set[str] = set()
    early: list[str] = []

    async def rule(prompt: str, _before: int) -> web.Response | None:
        group = prompt[:8]
        if group not in answered and any(p[:8] == group and p != prompt for p in stub.asked):
            early.append(prompt)
        await asyncio.sleep(0)
        answered.add(group)
        return None

    async with serving(rule) as stub:
        config = config_of(tmp_path, stub.url)
        ended = await done(config)
    assert early == []
    assert sorted(stub.asked) == sorted(prompts())
    assert stub.at_once_max <= 4
    assert {body["model"] for body in stub.bodies} == {"stub-model"}
    found = results(config)
    assert {name: text_of(row) for name, row in found.items()} == {
        f"id-{number}": prompt[-20:][::-1] for number, prompt in enumerate(prompts())
    }
    assert (ended.totals.rows, ended.totals.failed, ended.rows_before) == (40, 0, 0)


async def test_the_summary_counts_what_answers_say_and_compares_with_other_orders(
    tmp_path: Path,
) -> None:
    """A cache of one group: in the input's order it finds nothing, in groups nearly all."""
    small = EstimateSection(workers=2, worker_tokens=100, store_tokens=100)
    async with serving() as stub:
        config = config_of(tmp_path, stub.url, estimate=small)
        await done(config)
    told = read_summary(tmp_path / "out")
    tokens = sum(len(prompt) // 4 for prompt in prompts())
    cached = sum(len(prompt) // 4 // 2 for prompt in prompts())
    assert told["prompt_tokens"] == tokens
    assert told["cached_tokens"] == cached
    assert told["hit_rate"] == round(cached / tokens, 4)
    estimates = told["estimates"]
    assert isinstance(estimates, dict)
    assert estimates["input_order_cached_tokens"] == 0
    assert estimates["engines_alone_cached_tokens"] == 0
    assert estimates["grouped_cached_tokens"] > 0.4 * tokens
    assert estimates["saved_against_input_order_tokens"] == cached
    by_tier = told["cached_tokens_by_tier"]
    assert isinstance(by_tier, dict)
    assert told["beyond_own_cache_tokens"] == by_tier["dram"]


async def test_savings_are_what_was_cached_less_what_each_comparison_would_have_found(
    tmp_path: Path,
) -> None:
    """Six equal prompts of eight pieces: one cache finds five of them, two engines in turn four."""
    prompt = "x" * 1023  # and a byte for the name of the model
    tokens = len(prompt) // 4

    async def rule(text: str, before: int) -> web.Response | None:
        told = completion({"model": "m"}, text)
        cached = tokens if before else 0
        told["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        told["usage"]["kvtier"] = {"cached_tokens": {"gpu": 0, "dram": cached}}
        return web.json_response(told)

    async with serving(rule) as stub:
        config = config_of(tmp_path, stub.url, [prompt] * 6)
        await done(config)
    told = read_summary(tmp_path / "out")
    assert told["prompt_tokens"] == 6 * tokens
    assert told["cached_tokens"] == told["beyond_own_cache_tokens"] == 5 * tokens
    assert told["hit_rate"] == round(5 / 6, 4)
    estimates = told["estimates"]
    assert isinstance(estimates, dict)
    assert estimates["grouped_cached_tokens"] == 5 * tokens
    assert estimates["input_order_cached_tokens"] == 5 * tokens
    assert estimates["engines_alone_cached_tokens"] == 4 * tokens
    assert estimates["saved_against_input_order_tokens"] == 0
    assert estimates["saved_against_engines_alone_tokens"] == tokens


async def test_the_order_of_the_input_is_kept_where_it_is_asked_for(tmp_path: Path) -> None:
    async with serving() as stub:
        await done(config_of(tmp_path, stub.url, order=Order.INPUT, window=1))
    assert stub.asked == prompts()


async def test_a_killed_batch_goes_on_and_computes_only_its_window_again(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    hold = asyncio.Event()

    async def rule(_prompt: str, _before: int) -> web.Response | None:
        if len(stub.asked) > 20 and not hold.is_set():
            await hold.wait()
        return None

    async with serving(rule) as stub:
        config = config_of(tmp_path, stub.url)
        argv = python_module(
            "kvtier.batch", "--inputs", config.inputs[0], "--out", str(config.out),
            "--urls", stub.url, "--window", "4", "--lookahead", "64",
        )  # fmt: skip
        process = await asyncio.to_thread(processes.spawn, Launch("batch", argv))

        async def is_held() -> bool:
            return stub.at_once == 4

        await eventually_async(is_held, 60, "the whole window is under way")
        await asyncio.to_thread(process.kill)
        before = results(config)
        first = list(stub.asked)
        assert len(before) == len(first) - 4
        hold.set()
        with (tmp_path / "out" / "results.jsonl").open("ab") as file:
            file.write(b'{"id": "batch_req_0000000001", "custom')
        process.spawn()
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert {name: text_of(row) for name, row in results(config).items()} == {
        f"id-{number}": prompt[-20:][::-1] for number, prompt in enumerate(prompts())
    }
    again = [prompt for prompt in stub.asked[len(first) :] if prompt in first]
    assert len(again) == 4
    assert read_summary(tmp_path / "out")["rows_of_earlier_runs"] == len(before)


async def test_a_finished_batch_sends_nothing_more_and_another_input_is_refused(
    tmp_path: Path,
) -> None:
    async with serving() as stub:
        config = config_of(tmp_path, stub.url)
        await done(config)
        count = len(stub.asked)
        await done(config)
        assert len(stub.asked) == count
        replace_input(config)
        with pytest.raises(CallerError, match="other inputs"):
            await done(config)
    assert len(results(config)) == len(prompts())


async def test_two_processes_do_not_work_on_one_batch(tmp_path: Path) -> None:
    hold = asyncio.Event()

    async def rule(_prompt: str, _before: int) -> web.Response | None:
        await hold.wait()
        return None

    async with serving(rule) as stub:
        config = config_of(tmp_path, stub.url)
        first = asyncio.create_task(done(config))

        async def has_begun() -> bool:
            return bool(stub.asked)

        await eventually_async(has_begun, 60, "the first one sends")
        with pytest.raises(UnavailableError, match="another process"):
            await done(config)
        hold.set()
        await first
    assert len(results(config)) == len(prompts())


async def test_what_the_endpoint_refuses_becomes_a_row_and_what_it_cannot_now_is_tried_again(
    tmp_path: Path,
) -> None:
    async def rule(prompt: str, before: int) -> web.Response | None:
        if prompt == prompt_of(0, 3):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if prompt == prompt_of(1, 1) and before < 3:
            return web.json_response({"error": {}}, status=[503, 429, 502][before])
        if prompt == prompt_of(2, 2) and before == 0:
            return web.Response(text="not JSON")
        return None

    async with serving(rule) as stub:
        config = config_of(tmp_path, stub.url)
        ended = await done(config)
    assert ended.totals.failed == 1
    rows = results(config)
    assert len(rows) == len(prompts())
    bad = rows[f"id-{3 * GROUPS}"]["response"]
    assert isinstance(bad, dict)
    assert bad["status_code"] == 400
    assert bad["body"]["error"]["message"] == "too long"
    assert stub.asked.count(prompt_of(0, 3)) == 1
    assert stub.asked.count(prompt_of(1, 1)) == 4
    assert stub.asked.count(prompt_of(2, 2)) == 2


async def test_a_row_that_fails_while_others_are_answered_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "BATCH_PAUSE_MS_MAX", 50)

    async def rule(prompt: str, _before: int) -> web.Response | None:
        return web.json_response({}, status=500) if prompt == "poison" else None

    asked = ["poison", *(f"good {number}" for number in range(400))]
    async with serving(rule) as stub:
        config = config_of(tmp_path, stub.url, asked, window=2)

        async def pace(prompt: str, before: int) -> web.Response | None:
            # Others are answered between any two tries of the bad one.
            if prompt != "poison" and stub.asked.count("poison") < 16:
                await asyncio.sleep(0.02)
            return await rule(prompt, before)

        stub.rule = pace
        ended = await done(config)
    assert ended.totals.failed == 1
    assert stub.asked.count("poison") >= 8  # more where nobody was answered between two
    error = results(config)["id-0"]["error"]
    assert isinstance(error, dict)
    assert error["code"] == "given_up"


async def test_an_outage_ends_the_batch_without_failed_rows_and_another_router_is_tried(
    tmp_path: Path,
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    config = config_of(tmp_path, nobody, model="m", outage_s_max=0.3)
    with pytest.raises(UnavailableError, match="nothing was answered"):
        await done(config)
    assert results(config) == {}
    async with serving() as stub:
        both = config_of(tmp_path, nobody, model="m")
        both = BatchConfig(
            inputs=both.inputs, out=both.out, urls=(nobody, f"{stub.url}/v1"), model="m", window=4
        )
        assert (await done(both)).totals.rows == len(prompts())
    assert len(results(config)) == len(prompts())


async def test_two_rows_of_one_name_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"custom_id": "same" if at in {3, 5} else f"{at}", "prompt": "x"} for at in range(8)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    async with serving() as stub:
        with pytest.raises(CallerError, match="rows 3 and 5"):
            await done(config_of(tmp_path, stub.url))
    assert stub.asked == []
