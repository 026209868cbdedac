"""How long an engine takes, for the mock workers of the router bench.

The points are those of the default performance model of NVIDIA Dynamo's engine simulator
(ai-dynamo/dynamo, `lib/mocker`, Apache-2.0), a fit of profiled vLLM steps of one 8B-class model on
one GPU: prefill is nearly linear in new tokens with a floor of 16 ms a step, a decode step gets
slower with the share of the KV cache in use. They are measured figures of another engine, not
`kvtier.core.costs`: the router has to learn them.
What must not live here: scheduling (router_engine).
"""

from typing import Final

import numpy as np

STEP_TOKENS_MAX: Final = 8192
"""Prompt tokens of one step; longer prompts are prefilled in chunks (vLLM's default)."""
RUNNING_MAX: Final = 256
"""Requests that decode together (vLLM's `max_num_seqs`)."""

PREFILL_MS: Final = (
    (1, 16.5), (256, 20.4), (512, 24.4), (1024, 32.5), (2048, 49.4), (4096, 85.8),
    (8192, 169.1), (16384, 378.3), (32768, 966.1),
)  # fmt: skip
"""New tokens of a step, and how long it takes."""

DECODE_MS: Final = (
    (0.0, 5.7), (0.1, 10.9), (0.2, 15.5), (0.3, 19.6), (0.4, 23.2), (0.5, 26.3),
    (0.6, 28.9), (0.7, 30.9), (0.8, 32.5), (0.9, 33.5), (1.0, 34.0),
)  # fmt: skip
"""Share of the KV cache in use, and how long a step of one token for every request takes."""

_PREFILL_X, _PREFILL_Y = (np.array(row, np.float64) for row in zip(*PREFILL_MS, strict=True))
_DECODE_X, _DECODE_Y = (np.array(row, np.float64) for row in zip(*DECODE_MS, strict=True))


def prefill_s(tokens: float) -> float:
    """Seconds of a step with so many new tokens."""
    return float(np.interp(tokens, _PREFILL_X, _PREFILL_Y)) / 1e3


def decode_s(used_share: float) -> float:
    """Seconds of a step that makes one token for every running request."""
    return float(np.interp(used_share, _DECODE_X, _DECODE_Y)) / 1e3
