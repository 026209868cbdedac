"""The fleet of the batch bench: answers at once, and says what its caches would have found.

`python -m kvtier.bench.batch_mock`; says `port=N` on standard error. Two engines that take turns
have a cache of text each, and one store behind both. What must not live here: what is measured.
"""

import asyncio
import contextlib
import sys
from typing import Final

import uvloop

from kvtier.batch.estimate import TextCache
from kvtier.batch.prefixes import key_of
from kvtier.batch.rows import prompt_bytes, row_of
from kvtier.bench.router_mock_http import Answer, MockConnection, MockRequest

TOKEN_BYTES: Final = 4
WORKERS: Final = 2
WORKER_TOKENS: Final = 1 << 18
STORE_TOKENS: Final = 1 << 22


class Fleet:
    """Engines and the store. Mutable."""

    def __init__(self) -> None:
        self._engines = [TextCache(WORKER_TOKENS * TOKEN_BYTES) for _ in range(WORKERS)]
        self._store = TextCache(STORE_TOKENS * TOKEN_BYTES)
        self._requests = 0

    def answer(self, request: MockRequest, answer: Answer) -> None:
        """Answer one request."""
        if request.method == "GET":
            answer.whole(200, {"requests": self._requests})
            return
        body = request.json()
        text = prompt_bytes(row_of({"body": body, "url": request.path}, 0, {}))
        key = key_of(text)
        engine = self._engines[self._requests % WORKERS]
        self._requests += 1
        own = _found(engine, key)
        tokens, cached = len(text) // TOKEN_BYTES, max(own, _found(self._store, key))
        usage = {
            "prompt_tokens": tokens,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
            "kvtier": {"cached_tokens": {"gpu": own, "dram": cached - own}},
        }
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        answer.whole(200, {"id": "c", "choices": [choice], "usage": usage})


def _found(cache: TextCache, key: bytes) -> int:
    """Tokens of a prompt that a cache has, which it has all of afterwards."""
    before = cache.found_bytes
    cache.take(key, 0)
    return (cache.found_bytes - before) // TOKEN_BYTES


async def serve() -> None:
    """Serve until the process is ended."""
    fleet = Fleet()
    server = await asyncio.get_running_loop().create_server(
        lambda: MockConnection(fleet.answer), "127.0.0.1", 0, backlog=2048
    )
    sys.stderr.write(f"port={server.sockets[0].getsockname()[1]}\n")
    sys.stderr.flush()
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve())
