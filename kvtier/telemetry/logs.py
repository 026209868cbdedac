"""Structured logging: one line a record, nothing from outside unencoded, no secrets.

Code of ours logs an event and named fields through an `EventLog`; a service calls `start_logging`
once. Records of other libraries take the same way out. Lines go through a bounded queue to a thread
that writes them, so a reader of the log that stops reading costs lines (counted), never requests.
What must not live here: keys, tokens, prompts or salts as fields; choices of what to log.
"""

import atexit
import enum
import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self, TextIO, TypeAlias

from kvtier.errors import ConfigError
from kvtier.limits import (
    LOG_FIELDS_COUNT_MAX,
    LOG_QUEUE_LINES_MAX,
    LOG_TRACE_CHARS_MAX,
    LOG_VALUE_CHARS_MAX,
)

FieldValue: TypeAlias = "str | int | float | None"
"""Enums of text or numbers included."""

MASK: Final = "***"
OURS: Final = ("kvtier", "kvtier_services", "kvtier_router")
_FIELDS: Final = "kvtier_fields"
_CLOSE_DEADLINE_S: Final = 2.0
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:@+-]+")
_MASKED_WORDS: Final = frozenset(
    {"apikey", "authorization", "cookie", "credential", "credentials", "passwd", "password"}
    | {"prompt", "salt", "secret", "token", "tokens"}
)
_MASKED_PAIRS: Final = ("api_key", "private_key")
_MASKED_PATTERN: Final = (
    r"(?:proxy-)?authorization|api[-_]?key|private[-_]?key|(?:cache[-_])?salt|passw(?:or)?d|secret"
    r"|(?:access[-_]|auth[-_])?token|cookie"
)
_CREDENTIALS: Final = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]+", re.IGNORECASE)
_ASSIGNED: Final = re.compile(
    rf"(?<![A-Za-z0-9])({_MASKED_PATTERN})([\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|(?!{re.escape(MASK)})[^\s,;&}})\]]+)",
    re.IGNORECASE,
)


class LogFormat(enum.StrEnum):
    """How a line looks."""

    LOGFMT = "logfmt"
    JSON = "json"


class EventLog:
    """The log of one part of the program: events with fields, at a level. Holds no state."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: FieldValue) -> None:
        """For those who develop; off by default."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: FieldValue) -> None:
        """A change of state that an operator wants to find later; never once a request."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: FieldValue) -> None:
        """Something was lost or refused, and the service goes on."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: FieldValue) -> None:
        """Something that an operator has to repair."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, error: BaseException, /, **fields: FieldValue) -> None:
        """An error with the trace of the exception that shows it: a bug of ours."""
        self._logger.error(event, exc_info=error, extra={_FIELDS: fields})

    def _write(self, level: int, event: str, fields: Mapping[str, FieldValue]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


def safe_value(name: str, value: object) -> str | int | float | None:
    """`value` as a log line or a span may show it under `name`.

    Text under a name that speaks of secrets is masked, credentials inside other text too; long text
    is cut; bytes and foreign objects show their size or type only, for their text is unknown.
    """
    if value is None or isinstance(value, int | float):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, str):
        text = str(value.value) if isinstance(value, enum.Enum) else value
        return MASK if _names_a_secret(name) else _cut(scrub(text), LOG_VALUE_CHARS_MAX)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    return f"<{type(value).__name__}>"


def scrub(text: str) -> str:
    """`text` with what looks like credentials masked: for messages that others have worded."""
    text = _CREDENTIALS.sub(rf"\1 {MASK}", text[: 2 * LOG_TRACE_CHARS_MAX])
    return _ASSIGNED.sub(rf"\1\2{MASK}", text)


class LineFormatter(logging.Formatter):
    """Makes exactly one line of ASCII from any record, whoever made it."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._render = _RENDERERS[log_format]

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end. Pure."""
        line: dict[str, str | int | float | None] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _cut(scrub(_message(record)), LOG_VALUE_CHARS_MAX),
        }
        fields: Mapping[str, object] = getattr(record, _FIELDS, {})
        for name, value in list(fields.items())[:LOG_FIELDS_COUNT_MAX]:
            line[name if name not in line else f"{name}_"] = safe_value(name, value)
        if record.exc_info is not None and record.exc_info[0] is not None:
            trace = self.formatException(record.exc_info)
            line["error"] = record.exc_info[0].__name__
            line["trace"] = _cut_front(
                scrub(trace[-2 * LOG_TRACE_CHARS_MAX :]), LOG_TRACE_CHARS_MAX
            )
        return self._render(line)


class Logging:
    """A started log: a handler on the root logger and the thread that writes. Close it at the end.

    Also a context manager.
    """

    def __init__(self, stream: TextIO, level: str, log_format: LogFormat) -> None:
        self._handler = _QueueHandler(stream)
        self._handler.setFormatter(LineFormatter(log_format))
        root = logging.getLogger()
        self._before = (root.level, list(root.handlers))
        root.handlers = [self._handler]
        root.setLevel(logging.WARNING)
        for name in OURS:
            logging.getLogger(name).setLevel(level.upper())
        logging.captureWarnings(True)
        atexit.register(self.close)

    @property
    def dropped_count(self) -> int:
        """Lines that were lost because the queue was full."""
        return self._handler.dropped_count

    def close(self) -> None:
        """Write what is queued, for two seconds at most, and take the handler away. Idempotent."""
        atexit.unregister(self.close)
        root = logging.getLogger()
        if self._handler in root.handlers:
            root.setLevel(self._before[0])
            root.handlers = self._before[1]
            logging.captureWarnings(False)
        self._handler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_logging(
    stream: TextIO, level: str = "info", log_format: LogFormat = LogFormat.LOGFMT
) -> Logging:
    """Send every record of this process to `stream`, ours from `level` on, others' from warning on.

    Replaces the root logger's handlers until the result is closed. Raises ConfigError for a level
    that does not exist.
    """
    if level.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise ConfigError(f"log level must be debug, info, warning or error, got {level!r}")
    return Logging(stream, level, log_format)


class _QueueHandler(logging.Handler):
    """Formats in the caller's thread, writes in its own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.dropped_count = 0
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(LOG_QUEUE_LINES_MAX)
        self._thread = threading.Thread(target=self._write_lines, name="kvtier-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line, or count it as lost. Never blocks."""
        try:
            self._lines.put_nowait(f"{self.format(record)}\n")
        except queue.Full:
            self.dropped_count += 1

    def close(self) -> None:
        super().close()
        if self._thread.is_alive():
            try:
                self._lines.put(None, timeout=_CLOSE_DEADLINE_S)
            except queue.Full:
                return
            self._thread.join(_CLOSE_DEADLINE_S)

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # the reader is gone, or the stream is closed
                self.dropped_count += 1


def _message(record: logging.LogRecord) -> str:
    """The text of a record; a record with arguments that do not fit shows its template."""
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        return str(record.msg)


def _timestamp(created: float) -> str:
    moment = datetime.fromtimestamp(created, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"


def _names_a_secret(name: str) -> bool:
    lowered = name.lower()
    return not _MASKED_WORDS.isdisjoint(lowered.split("_")) or any(
        pair in lowered for pair in _MASKED_PAIRS
    )


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else f"{text[:chars_max]}...({len(text)} chars)"


def _cut_front(text: str, chars_max: int) -> str:
    """The end of a trace tells more than its beginning."""
    return text if len(text) <= chars_max else f"({len(text)} chars)...{text[-chars_max:]}"


def _quoted(text: str) -> str:
    """JSON text of printable ASCII only: no control character reaches a terminal."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def _as_logfmt(line: Mapping[str, str | int | float | None]) -> str:
    return " ".join(f"{_key(name)}={_logfmt_value(value)}" for name, value in line.items())


def _logfmt_value(value: str | int | float | None) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else _quoted(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value)


def _as_json(line: Mapping[str, str | int | float | None]) -> str:
    return "{" + ",".join(f"{_quoted(n)}:{_json_value(v)}" for n, v in line.items()) + "}"


def _json_value(value: str | int | float | None) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float) and value - value != 0:  # JSON has no infinity and no NaN
        return _quoted(str(value))
    return json.dumps(value)


def _key(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


_RENDERERS: Final[Mapping[LogFormat, Callable[[Mapping[str, str | int | float | None]], str]]] = {
    LogFormat.LOGFMT: _as_logfmt,
    LogFormat.JSON: _as_json,
}
