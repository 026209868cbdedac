"""Batches of Parquet files, and of data sets of Ray, read by the real readers.

Runs in `make test-ray`, where pyarrow and pandas are; skipped elsewhere. What a data set does on a
cluster is in test_ray_fleet.py.
"""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvtier.batch.reading import read_rows
from kvtier.batch.rows import Row, Url
from kvtier.batch.running import read_summary
from kvtier.errors import BackendError, CallerError
from tests.harness.processes import Launch, ProcessRunner, python_module
from tests.harness.waiting import eventually_async
from tests.support.openai_stub import serving

arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: see make test-ray")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.timeout(120)

ROWS, ROWS_OF_A_GROUP = 600, 70
WINDOW = 4


def written(path: Path, columns: dict[str, Any], **more: Any) -> Path:
    parquet.write_table(arrow.table(columns), path, **more)
    return path


def test_a_parquet_file_of_many_row_groups_has_the_rows_of_the_same_lines(tmp_path: Path) -> None:
    """Prompts as lists of tokens; a field that only some rows have; more rows than one reading."""
    lines = [
        {"custom_id": f"id-{n}", "prompt": [n % 7, *range(n % 40)]}
        | ({} if n % 3 else {"max_tokens": n})
        for n in range(ROWS)
    ]
    columns = {name: [line.get(name) for line in lines] for name in lines[0]}
    table = written(tmp_path / "rows.parquet", columns, row_group_size=ROWS_OF_A_GROUP)
    assert parquet.ParquetFile(table).num_row_groups == -(-ROWS // ROWS_OF_A_GROUP)
    same = tmp_path / "rows.jsonl"
    same.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert list(read_rows([table], {"seed": 1})) == list(read_rows([same], {"seed": 1}))
    both = list(read_rows([same, table], {}))
    assert len(both) == 2 * ROWS


def test_messages_and_rows_of_openais_form_are_read_without_what_is_null(tmp_path: Path) -> None:
    messages = [
        [{"role": "system", "content": "be brief", "name": None}],
        [{"role": "user", "content": "ho", "name": "me"}],
    ]
    chats = written(
        tmp_path / "chats.parquet",
        {
            "custom_id": ["a", None],
            "messages": messages,
            "stop": [["\n", "."], None],
            "temperature": [0.5, None],
        },
    )
    assert list(read_rows([chats], {})) == [
        Row(
            "a",
            Url.CHAT,
            {
                "messages": [{"role": "system", "content": "be brief"}],
                "stop": ["\n", "."],
                "temperature": 0.5,
            },
        ),
        Row("row-1", Url.CHAT, {"messages": messages[1]}),
    ]
    enveloped = written(
        tmp_path / "openai.pq",
        {
            "custom_id": ["a", "b"],
            "method": ["POST", None],
            "url": ["/v1/completions", None],
            "body": [{"prompt": "x", "max_tokens": 3}, {"prompt": "y", "max_tokens": None}],
        },
    )
    assert list(read_rows([enveloped], {"seed": 1})) == [
        Row("a", Url.COMPLETIONS, {"seed": 1, "prompt": "x", "max_tokens": 3}),
        Row("b", Url.COMPLETIONS, {"seed": 1, "prompt": "y"}),
    ]


def test_a_bad_row_of_a_table_is_named_and_what_is_no_table_is_refused(tmp_path: Path) -> None:
    when = [None, datetime(2026, 1, 1, tzinfo=UTC)]
    bad = written(tmp_path / "bad.parquet", {"prompt": ["x", "y"], "when": when})
    with pytest.raises(CallerError, match=r"bad\.parquet, row 2: not what JSON can say"):
        list(read_rows([bad], {}))
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(bad.read_bytes()[:-5])
    with pytest.raises(BackendError, match=r"cut\.parquet"):
        list(read_rows([cut], {}))
    with pytest.raises(BackendError, match=r"none\.parquet"):
        list(read_rows([tmp_path / "none.parquet"], {}))


async def test_a_killed_batch_of_parquet_goes_on_and_has_every_row_once(
    processes: ProcessRunner, tmp_path: Path
) -> None:
    questions = [f"group {n % 5} " * 60 + f"question {n}" for n in range(60)]
    names = [f"id-{n}" for n in range(len(questions))]
    messages = [[{"role": "user", "content": text}] for text in questions]
    columns = {"custom_id": names, "messages": messages}
    table = written(tmp_path / "rows.parquet", columns, row_group_size=9)
    hold = asyncio.Event()

    async def rule(_prompt: str, _before: int) -> web.Response | None:
        if len(stub.asked) > 20 and not hold.is_set():
            await hold.wait()
        return None

    async with serving(rule) as stub:
        argv = python_module(
            "kvtier.batch", "--inputs", str(table), "--out", str(tmp_path / "out"),
            "--urls", stub.url, "--window", str(WINDOW), "--lookahead", "64",
        )  # fmt: skip
        process = await asyncio.to_thread(processes.spawn, Launch("batch", argv))

        async def is_held() -> bool:
            return stub.at_once == WINDOW

        await eventually_async(is_held, 60, "the whole window is under way")
        await asyncio.to_thread(process.kill)
        first = list(stub.asked)
        hold.set()
        process.spawn()
        assert await asyncio.to_thread(process.wait, 60) == 0
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(names)
    assert sorted(set(stub.asked)) == sorted(questions)
    assert len([text for text in stub.asked[len(first) :] if text in first]) == WINDOW
    summary = read_summary(tmp_path / "out")
    assert (summary["rows"], summary["failed"]) == (len(questions), 0)
    assert summary["rows_of_earlier_runs"] == len(first) - WINDOW
