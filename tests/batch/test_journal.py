"""The journal after every way in which its writer may have ended."""

from pathlib import Path

import pytest

from kvtier.batch import journal as module
from kvtier.batch.answers import Outcome
from kvtier.batch.journal import is_done, journal_of, line_of, recover
from kvtier.errors import BackendError

USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
GOOD = Outcome({"status_code": 200, "request_id": "r", "body": {"usage": USAGE}}, None)
BAD = Outcome(None, {"code": "given_up", "message": "\ud800"})
LINES = [line_of(number, f"id {number}", BAD if number == 2 else GOOD) for number in range(4)]


def test_every_cut_of_the_last_line_is_taken_off_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    whole = b"".join(LINES[:3])
    for cut in range(len(LINES[3])):
        path.write_bytes(whole + LINES[3][:cut])
        found = recover(path, 4)
        assert path.read_bytes() == whole
        assert found.cut_bytes == cut
        assert [is_done(found.done, number) for number in range(4)] == [True, True, True, False]
        assert (found.totals.rows, found.totals.failed, found.totals.cached_tokens) == (3, 1, 16)


def test_what_a_power_cut_leaves_is_cut_off_with_what_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(LINES[0] + bytes(len(LINES[1])) + b"\n" + LINES[2])
    found = recover(path, 4)
    assert path.read_bytes() == LINES[0]
    assert found.totals.rows == 1


def test_damage_further_from_the_end_than_a_crash_reaches_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_WINDOW_MAX", 2)
    path = tmp_path / "results.jsonl"
    damaged = LINES[0] + b"x" + b"".join(LINES[1:])
    path.write_bytes(damaged)
    with pytest.raises(BackendError, match=f"byte {len(LINES[0])}"):
        recover(path, 4)
    assert path.read_bytes() == damaged


def test_a_row_that_is_there_twice_or_of_another_batch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(LINES[0] + LINES[0])
    with pytest.raises(BackendError, match="twice"):
        recover(path, 4)
    path.write_bytes(LINES[3])
    assert recover(path, 3).totals.rows == 0  # as a line that was not whole


async def test_lines_are_in_the_file_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    async with journal_of(path) as journal:
        for line in LINES[:3]:
            await journal.append(line)
            assert path.read_bytes().endswith(line)
    assert path.read_bytes() == b"".join(LINES[:3])


async def test_a_full_disk_is_told_to_whoever_waits() -> None:
    async with journal_of(Path("/dev/full")) as journal:
        with pytest.raises(BackendError, match="No space"):
            await journal.append(LINES[0])
