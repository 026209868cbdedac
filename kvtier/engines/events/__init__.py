"""Bytes of foreign engines' KV events to the core's vocabulary (`kvtier.core.engine_events`).

Tolerant: nothing that an engine sends raises; what cannot be read is counted by reason, and one bad
event does not lose its batch. What must not live here: sockets, the order of messages
(`kvtier.core.engine_sequence`), what events mean (`kvtier.core.engine_holdings`).
"""

from kvtier.engines.events.policy import DecodePolicy, Dialect, HiddenSalts
from kvtier.engines.events.stream import decode
from kvtier.engines.events.trtllm_json import NumberedBatch, decode_trtllm_json

__all__ = [
    "DecodePolicy",
    "Dialect",
    "HiddenSalts",
    "NumberedBatch",
    "decode",
    "decode_trtllm_json",
]
