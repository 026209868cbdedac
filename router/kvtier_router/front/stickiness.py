"""Which worker holds an answer that later requests go on from (`previous_response_id`).

What must not live here: conversations, and routing.
"""

import json
from collections import OrderedDict
from typing import Final

from kvtier.core.workers import WorkerName
from kvtier.limits import NAME_BYTES_MAX
from kvtier.types import ScopeId

_ANSWERS_MAX: Final = 1 << 16


class Stickiness:
    """The last answers' workers, by scope: no tenant reaches another's. Bounded; forgets the
    oldest."""

    def __init__(self) -> None:
        self._homes: OrderedDict[tuple[ScopeId | None, str], WorkerName] = OrderedDict()

    def find(self, scope_id: ScopeId | None, response_id: str) -> WorkerName | None:
        return self._homes.get((scope_id, response_id))

    def learn(self, scope_id: ScopeId | None, body: bytes, worker: WorkerName) -> None:
        """Take the id out of an answer's body; mutates."""
        try:
            answer = json.loads(body)
        except ValueError:
            return
        found = answer.get("id") if isinstance(answer, dict) else None
        if isinstance(found, str):
            self.put(scope_id, found, worker)

    def put(self, scope_id: ScopeId | None, response_id: str, worker: WorkerName) -> None:
        if not 0 < len(response_id) <= NAME_BYTES_MAX:
            return
        self._homes[scope_id, response_id] = worker
        self._homes.move_to_end((scope_id, response_id))
        if len(self._homes) > _ANSWERS_MAX:
            self._homes.popitem(last=False)
