"""Rows of every form become the same requests, and what is no request is named."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier.batch.reading import read_rows, rows_of
from kvtier.batch.rows import Row, Url, kept_row, parsed_row, prompt_bytes, row_of
from kvtier.errors import CallerError

CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_openais_form_and_plain_objects_say_the_same() -> None:
    plain = row_of({"custom_id": "a", **CHAT, "max_tokens": 3}, 0, {})
    enveloped = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    assert row_of({**enveloped, "body": {**CHAT, "max_tokens": 3}}, 0, {}) == plain
    assert plain.url is Url.CHAT
    completion = row_of({"prompt": "hello"}, 7, {"max_tokens": 2})
    assert completion == Row("row-7", Url.COMPLETIONS, {"max_tokens": 2, "prompt": "hello"})
    assert row_of({"id": 5, "prompt": [1, 2], "max_tokens": 9}, 0, {"max_tokens": 2}) == Row(
        "5", Url.COMPLETIONS, {"max_tokens": 9, "prompt": [1, 2]}
    )
    assert kept_row(plain.line()) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": 5},
        {"prompt": []},
        {"prompt": [1, -1]},
        {"prompt": [1, 2**40]},
        {"messages": []},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"prompt": "x", "stream": True},
        {"prompt": "x", "custom_id": ""},
        {"prompt": "x", "custom_id": "y" * 2000},
        {"prompt": "x", "custom_id": [1]},
        {"prompt": "\ud800"},
        {"prompt": "x", "user": "\ud800", "when": datetime(2026, 1, 1, tzinfo=UTC)},
        {"body": "x"},
        {"body": {"prompt": "x"}, "url": "/v1/embeddings"},
        {"body": {"prompt": "x"}, "method": "GET"},
        {"body": {"prompt": "x"}, "more": 1},
    ],
)
def test_what_is_no_request_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(CallerError):
        row_of(fields, 0, {})


def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n\n{"prompt": NaN}\n')
    with pytest.raises(CallerError, match=r"rows\.jsonl, line 3"):
        list(read_rows([path], {}))
    with pytest.raises(CallerError, match="row 1"):
        list(rows_of([{"prompt": "x"}, {}], {}))


def test_several_files_are_read_one_after_another(tmp_path: Path) -> None:
    one = written(tmp_path / "one.jsonl", {"prompt": "a"}, {"prompt": "b"})
    two = written(tmp_path / "two.jsonl", {"custom_id": "c", **CHAT})
    assert [row.custom_id for row in read_rows([one, two], {})] == ["row-0", "row-1", "c"]


def test_bytes_of_a_prompt_begin_alike_as_far_as_prompts_do() -> None:
    system = {"role": "system", "content": "s" * 300}

    def asked(text: str, **more: object) -> bytes:
        messages = [system, {"role": "user", "content": text}]
        return prompt_bytes(row_of({"messages": messages, **more}, 0, {}))

    one, other = asked("one"), asked("other")
    assert one[:300] == other[:300]
    assert asked("one", temperature=1) == one
    assert asked("one", tools=[{"type": "function"}])[:200] != one[:200]
    assert asked("one", model="m")[:200] != one[:200]
    tokens = prompt_bytes(parsed_row(b'{"prompt": [1, 2, 3]}', 0, {}))
    assert prompt_bytes(parsed_row(b'{"prompt": [1, 2, 3, 4]}', 0, {})).startswith(tokens)


def test_rows_are_read_as_they_are_asked_for() -> None:
    def endless() -> Iterator[dict[str, object]]:
        while True:
            yield {"prompt": "x"}

    assert next(rows_of(endless(), {})).custom_id == "row-0"
