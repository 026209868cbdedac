"""Which blocks a request of a step lies in, as vLLM tells its connectors.

Since 0.30 it tells of every request of the step; 0.29 only of those that got blocks in it: what it
said last is then still true.
What must not live here: what is done with the blocks (scheduling.py).
"""

from collections.abc import Sequence
from typing import Any


class BlockTables:
    """Of one engine; one thread."""

    def __init__(self) -> None:
        self._told: dict[str, Sequence[int]] = {}

    def of(self, state: Any, request_id: str) -> Sequence[int] | None:
        """Blocks by the step's `KVConnectorBlockState`; None where vLLM never said."""
        if hasattr(state, "get_block_ids"):
            groups = state.get_block_ids(request_id)
            return None if groups is None else _of_one_group(groups)
        groups = state.block_ids.get(request_id)
        if groups is not None:
            self._told[request_id] = _of_one_group(groups)
        return self._told.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._told.pop(request_id, None)


def _of_one_group(groups: Sequence[Sequence[int]]) -> Sequence[int]:
    (table,) = groups
    return table
