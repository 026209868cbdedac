"""How many tokens a worker's model takes, asked of the worker itself and remembered.

Needed only to go on with an answer whose request set no ceiling. What must not live here: limits of
the router's own.
"""

import asyncio
import json
from typing import Final

from kvtier_router.web.upstream import (
    Origin,
    ResponseHead,
    Upstream,
    UpstreamError,
    request_bytes,
)

_ANSWER_BYTES_MAX: Final = 1 << 20
_WAIT_S: Final = 2.0
_KEPT_MAX: Final = 4096


class _Whole:
    """A sink that collects one small answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts = bytearray()

    def on_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_body(self, data: bytes) -> None:
        if len(self._parts) <= _ANSWER_BYTES_MAX:
            self._parts += data

    def on_end(self) -> None:
        if not self.answer.done():
            self.answer.set_result(bytes(self._parts) if self._status == 200 else b"")

    def on_lost(self, error: UpstreamError) -> None:
        if not self.answer.done():
            self.answer.set_result(b"")


class ContextLengths:
    """Context lengths by worker and model."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: dict[tuple[Origin, str], int] = {}

    async def find(self, origin: Origin, model: str, token: str | None) -> int | None:
        """`max_model_len` (or `context_length`) as `/v1/models` says; None where it does not."""
        known = self._known.get((origin, model))
        if known is not None:
            return known
        headers = [("host", origin.authority)]
        if token is not None:
            headers.append(("authorization", f"Bearer {token}"))
        sink = _Whole()
        connection = None
        try:
            async with asyncio.timeout(_WAIT_S):
                connection = await self._upstream.connection(origin, fresh=True)
                path = f"{origin.prefix}/v1/models"
                connection.send(request_bytes("GET", path, headers, b""), sink)
                answer = await sink.answer
        except (UpstreamError, TimeoutError):
            answer = b""
        finally:
            if connection is not None:
                connection.abandon(sink)
        found = _length(answer, model)
        if found is not None:
            if len(self._known) >= _KEPT_MAX:
                self._known.clear()
            self._known[origin, model] = found
        return found


def _length(answer: bytes, model: str) -> int | None:
    try:
        rows = json.loads(answer)["data"]
        lengths = {row["id"]: row.get("max_model_len") or row.get("context_length") for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    found = lengths.get(model)
    if found is None and len(lengths) == 1:
        found = next(iter(lengths.values()))
    return found if isinstance(found, int) and found > 0 else None
