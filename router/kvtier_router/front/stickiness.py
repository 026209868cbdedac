"""Which worker holds an answer that later requests go on from (`previous_response_id`).

What must not live here: conversations, and routing.
"""

import hashlib
import json
import re
from collections import OrderedDict
from typing import Final

from kvtier.core.workers import WorkerName
from kvtier.limits import NAME_BYTES_MAX
from kvtier.types import ScopeId

_ANSWERS_MAX: Final = 1 << 16
_NEWS_MAX: Final = 256
"""Of one report to other processes and routers; what is beyond only this one knows."""
_STREAMED_ID: Final = re.compile(rb'"response"\s*:\s*\{\s*"id"\s*:\s*"([^"\\]{1,256})"')


class Stickiness:
    """The last answers' workers, by scope: no tenant reaches another's. Bounded; forgets the
    oldest. Answers are known by a digest of scope and id, which is all that others are told."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, WorkerName] = OrderedDict()
        self._news: list[tuple[str, WorkerName]] = []

    def find(self, scope_id: ScopeId | None, response_id: str) -> WorkerName | None:
        return self._homes.get(_digest(scope_id, response_id))

    def learn(self, scope_id: ScopeId | None, body: bytes, worker: WorkerName) -> None:
        """Take the id out of a whole answer; mutates."""
        try:
            answer = json.loads(body)
        except ValueError:
            return
        found = answer.get("id") if isinstance(answer, dict) else None
        if isinstance(found, str):
            self._put(scope_id, found, worker)

    def learn_stream(self, scope_id: ScopeId | None, start: bytes, worker: WorkerName) -> None:
        """Take the id out of the first events of a stream; mutates."""
        found = _STREAMED_ID.search(start)
        if found is not None:
            self._put(scope_id, found[1].decode("utf-8", "replace"), worker)

    def heard(self, digest: str, worker: WorkerName) -> None:
        """Another process or router knows an answer's home; mutates."""
        self._homes[digest] = worker
        self._homes.move_to_end(digest)
        if len(self._homes) > _ANSWERS_MAX:
            self._homes.popitem(last=False)

    def take_news(self) -> list[tuple[str, WorkerName]]:
        """What was learnt here since the last call; mutates."""
        news, self._news = self._news, []
        return news

    def _put(self, scope_id: ScopeId | None, response_id: str, worker: WorkerName) -> None:
        if not 0 < len(response_id) <= NAME_BYTES_MAX:
            return
        digest = _digest(scope_id, response_id)
        self.heard(digest, worker)
        if len(self._news) < _NEWS_MAX:
            self._news.append((digest, worker))


def _digest(scope_id: ScopeId | None, response_id: str) -> str:
    text = json.dumps([scope_id, response_id])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
