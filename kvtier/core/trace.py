"""Rows of request traces in Mooncake's JSON lines (and Bailian's extra fields). Parses text only.

What must not live here: opening files, and how a trace is replayed (see `replay`).
"""

import json
from dataclasses import dataclass
from typing import Final

from kvtier.errors import CallerError, LimitError
from kvtier.limits import MATCH_BLOCKS_MAX, PROMPT_TOKENS_MAX, TRACE_ROW_BYTES_MAX

MOONCAKE_BLOCK_TOKENS: Final = 512
"""Tokens of one hash id in the traces that Mooncake released."""
BAILIAN_BLOCK_TOKENS: Final = 16
"""Tokens of one hash id in the Qwen-Bailian traces."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request: arrival (in the trace's unit), lengths in tokens, ids of its prefix blocks.

    Equal ids name equal whole prefixes. `chat_id`, `parent_chat_id` and `turn` are None and
    `request_type` is empty where the trace does not say.
    """

    timestamp: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    chat_id: int | None = None
    parent_chat_id: int | None = None
    turn: int | None = None
    request_type: str = ""


def parse_trace_row(line: str | bytes) -> TraceRow:
    """Parse one line. Pure; raises CallerError on anything that is not a row, LimitError on size.

    Unknown fields are ignored, so that traces with more columns can be read.
    """
    if len(line) > TRACE_ROW_BYTES_MAX:
        raise LimitError(f"trace row of {len(line)} bytes exceeds {TRACE_ROW_BYTES_MAX}")
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CallerError(f"trace row is not JSON: {type(error).__name__}") from None
    if not isinstance(row, dict):
        raise CallerError("trace row is not a JSON object")
    timestamp: object = row.get("timestamp")
    if not isinstance(timestamp, int | float) or isinstance(timestamp, bool):
        raise CallerError("trace row has no numeric timestamp")
    if not 0 <= timestamp < float("inf"):
        raise CallerError("trace row has a negative or infinite timestamp")
    ids: object = row.get("hash_ids")
    if not isinstance(ids, list):
        raise CallerError("trace row has no list hash_ids")
    if len(ids) > MATCH_BLOCKS_MAX:
        raise LimitError(f"{len(ids)} hash_ids exceed MATCH_BLOCKS_MAX ({MATCH_BLOCKS_MAX})")
    if not all(type(i) is int for i in ids):
        raise CallerError("trace row has hash_ids that are not integers")
    kind: object = row.get("type", "")
    if not isinstance(kind, str):
        raise CallerError("trace row has a type that is not a string")
    return TraceRow(
        timestamp=float(timestamp),
        input_tokens=_tokens(row.get("input_length"), "input_length"),
        output_tokens=_tokens(row.get("output_length"), "output_length"),
        hash_ids=tuple(ids),
        chat_id=_integer(row.get("chat_id"), "chat_id"),
        parent_chat_id=_integer(row.get("parent_chat_id"), "parent_chat_id"),
        turn=_integer(row.get("turn"), "turn"),
        request_type=kind,
    )


def _tokens(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= PROMPT_TOKENS_MAX:
        raise CallerError(f"trace row needs an integer {name} of 0 to {PROMPT_TOKENS_MAX}")
    return value


def _integer(value: object, name: str) -> int | None:
    if value is not None and type(value) is not int:
        raise CallerError(f"trace row has a {name} that is not an integer")
    return value
