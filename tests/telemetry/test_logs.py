"""Log lines: one a record, nothing unencoded, no secrets, never in the way."""

import io
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from enum import StrEnum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.limits import LOG_FIELDS_COUNT_MAX, LOG_QUEUE_LINES_MAX, LOG_VALUE_CHARS_MAX
from kvtier.telemetry.logs import (
    EventLog,
    FieldValue,
    LogFormat,
    Logging,
    safe_value,
    start_logging,
)
from tests.harness.waiting import eventually

CANARY = "canary-4711"
LOG = EventLog("kvtier.test")


class Color(StrEnum):
    RED = "red"


class Output(io.StringIO):
    """A stream that can be read after the log has been closed."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Logging] = []

    def start(self, level: str = "info", log_format: LogFormat = LogFormat.JSON) -> None:
        self.started.append(start_logging(self, level, log_format))

    def lines(self) -> list[str]:
        """Everything written, once the queue is empty."""
        for log in self.started:
            log.close()
        return self.getvalue().splitlines()


@pytest.fixture
def output() -> Iterator[Output]:
    output = Output()
    yield output
    output.lines()


def test_an_event_is_one_json_line_with_time_level_origin_and_fields(output: Output) -> None:
    output.start()
    LOG.info(
        "stream opened", holder="w-1", seq=7, ratio=0.5, exact=True, zone=None, color=Color.RED
    )
    (line,) = output.lines()
    record = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("ts"))
    assert record == {
        "level": "info",
        "logger": "kvtier.test",
        "event": "stream opened",
        "holder": "w-1",
        "seq": 7,
        "ratio": 0.5,
        "exact": True,
        "zone": None,
        "color": "red",
    }


def test_logfmt_quotes_what_is_not_plain(output: Output) -> None:
    output.start(log_format=LogFormat.LOGFMT)
    LOG.warning("gap found", holder="w/1", why="two words", seq=7, exact=False, zone=None)
    (line,) = output.lines()
    assert line.split(" ", 1)[1] == (
        'level=warning logger=kvtier.test event="gap found" holder=w/1 why="two words" seq=7'
        " exact=false zone=null"
    )


@pytest.mark.parametrize("log_format", list(LogFormat))
@settings(max_examples=60)
@given(text=st.text(max_size=200), name=st.text(max_size=20))
def test_any_text_from_outside_stays_on_one_printable_line(
    log_format: LogFormat, text: str, name: str
) -> None:
    output = Output()
    output.start(log_format=log_format)
    fields: dict[str, FieldValue] = {name: text}
    LOG.info(text, **fields)
    logging.getLogger("foreign").warning(text)
    logging.getLogger("foreign").warning("said %s", text)
    lines = output.lines()
    assert len(lines) == 3
    assert all(line.isascii() and line.isprintable() for line in lines)
    if log_format is LogFormat.JSON:
        assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize(
    "text", ["a\nlevel=error", "\x1b[31m", "\r", "\u2028", "\x7f", "\x85", "\0"]
)
def test_a_forged_line_or_an_escape_sequence_is_only_text(output: Output, text: str) -> None:
    output.start(log_format=LogFormat.LOGFMT)
    LOG.info("hello", model=text)
    (line,) = output.lines()
    assert line.isprintable()
    assert line.count(" level=") == 1


def test_secrets_are_masked_by_name_and_by_form(output: Output) -> None:
    output.start()
    secrets: dict[str, FieldValue] = {
        "token": CANARY,
        "api_key": CANARY,
        "cache_salt": CANARY,
        "password": CANARY,
        "Authorization": CANARY,
        "prompt": CANARY,
    }
    LOG.info("hello", **secrets)
    LOG.info("refused", reason=f"header Authorization: Bearer {CANARY}")
    foreign = logging.getLogger("foreign")
    foreign.warning("got %s", {"authorization": f"Bearer {CANARY}", "x": 1})
    foreign.warning("GET /v1?token=%s&n=1", CANARY)
    foreign.warning("client_password: %s", CANARY)
    lines = output.lines()
    assert len(lines) == 5
    assert CANARY not in "\n".join(lines)
    assert json.loads(lines[0])["token"] == "***"
    assert "n=1" in lines[3]


def test_counts_of_tokens_are_no_secrets(output: Output) -> None:
    output.start()
    LOG.info("routed", prompt_tokens=512, block_tokens=16)
    logging.getLogger("foreign").warning("block_tokens=16 tokens=3")
    first, second = map(json.loads, output.lines())
    assert (first["prompt_tokens"], first["block_tokens"]) == (512, 16)
    assert second["event"] == "block_tokens=16 tokens=3"


def test_bytes_and_foreign_objects_show_no_content() -> None:
    class Leaky:
        def __repr__(self) -> str:
            return CANARY

    assert safe_value("key", b"1234") == "<4 bytes>"
    assert safe_value("object", Leaky()) == "<Leaky>"
    assert safe_value("ids", [1, 2]) == "<list>"


def test_an_exception_is_one_line_with_its_type_and_trace(output: Output) -> None:
    output.start()
    try:
        raise ValueError(f"first\nsecond Bearer {CANARY}")
    except ValueError as error:
        LOG.exception("bug", error, seq=3)
    (line,) = output.lines()
    record = json.loads(line)
    assert record["error"] == "ValueError"
    assert record["seq"] == 3
    assert "test_an_exception_is_one_line" in record["trace"]
    assert "second Bearer ***" in record["trace"]
    assert CANARY not in line


def test_long_values_and_many_fields_are_cut(output: Output) -> None:
    output.start()
    LOG.info("long", name="x" * (LOG_VALUE_CHARS_MAX + 100))
    many: dict[str, FieldValue] = {f"f{n}": n for n in range(2 * LOG_FIELDS_COUNT_MAX)}
    LOG.info("many", **many)
    first, second = map(json.loads, output.lines())
    assert first["name"] == "x" * LOG_VALUE_CHARS_MAX + f"...({LOG_VALUE_CHARS_MAX + 100} chars)"
    assert len(second) == 4 + LOG_FIELDS_COUNT_MAX


def test_a_field_does_not_replace_what_the_line_says_of_itself(output: Output) -> None:
    output.start()
    fields: dict[str, FieldValue] = {"level": "none", "ts": "never"}
    LOG.warning("hello", **fields)
    record = json.loads(output.lines()[0])
    assert record["level"] == "warning"
    assert (record["level_"], record["ts_"]) == ("none", "never")


def test_the_level_holds_for_ours_and_others_start_at_warning(output: Output) -> None:
    output.start("debug")
    LOG.debug("ours")
    logging.getLogger("foreign").info("theirs")
    assert [json.loads(line)["event"] for line in output.lines()] == ["ours"]


def test_below_the_level_nothing_is_written(output: Output) -> None:
    output.start("error")
    LOG.info("a")
    LOG.warning("b")
    LOG.error("c")
    assert [json.loads(line)["event"] for line in output.lines()] == ["c"]


def test_an_unknown_level_is_refused(output: Output) -> None:
    with pytest.raises(ConfigError, match="loud"):
        output.start("loud")


def test_warnings_and_records_with_wrong_arguments_take_the_same_way(output: Output) -> None:
    output.start()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("watch\nout", UserWarning, stacklevel=1)
    logging.getLogger("foreign").warning("%d apples", "no number")
    lines = output.lines()
    assert len(lines) == 2
    assert "watch" in json.loads(lines[0])["event"]
    assert json.loads(lines[1])["event"] == "%d apples"


class Stuck(io.StringIO):
    """A reader that has stopped reading, until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def write(self, text: str) -> int:
        self.release.wait(30)
        return super().write(text)


def test_a_reader_that_stops_costs_lines_and_never_blocks() -> None:
    stream = Stuck()
    with start_logging(stream) as log:
        for number in range(LOG_QUEUE_LINES_MAX + 100):
            LOG.info("hello", number=number)
        assert 98 <= log.dropped_count <= 100
        stream.release.set()
    written = len(stream.getvalue().splitlines())
    assert written + log.dropped_count == LOG_QUEUE_LINES_MAX + 100


def test_a_closed_pipe_is_counted_and_does_not_raise() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    # Line-buffered: the writer sees the error at each line, and nothing is left to flush at close.
    stream = os.fdopen(writing, "w", buffering=1)
    with start_logging(stream) as log:
        LOG.info("hello")
        eventually(lambda: log.dropped_count > 0, 30, "the loss is counted")
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_closing_gives_the_root_logger_back(output: Output) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    output.start()
    assert root.handlers != before[1]
    output.lines()
    assert (root.level, root.handlers) == before
    output.started[0].close()
