"""Asks are checked where they enter; decisions can be shown as JSON and as headers."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from kvtier.core.identity import Pool
from kvtier.core.workers import WorkerName
from kvtier.errors import CallerError
from kvtier.types import InstanceId, Source
from kvtier_router.routing.values import (
    Candidate,
    FailureKind,
    Knowledge,
    Policy,
    RouteAsk,
    RouteDecision,
    Target,
    Usage,
)

POOL = Pool("model", "main", 16)
TOKENS = np.arange(10, dtype=np.uint32)


class Nothing:
    key = "k"

    def first_token(self, ttft_s: float, cached_tokens: int | None = None) -> None: ...
    def finished(self, usage: Usage) -> None: ...
    def failed(self, kind: FailureKind, retry_after_s: float | None = None) -> None: ...


def candidate(total_s: float) -> Candidate:
    return Candidate(
        worker=WorkerName(InstanceId("w"), 1),
        pool=POOL,
        state="candidate",
        chosen=True,
        tied=False,
        matched_tokens={"gpu": 32},
        reused_tokens=32.0,
        queue_s=0.1,
        load_s=0.0,
        compute_s=0.2,
        decode_s=0.0,
        adapter_s=0.0,
        ttft_s=0.3,
        total_s=total_s,
    )


def decision(instance: str = "w") -> RouteDecision:
    worker = WorkerName(InstanceId(instance), 1)
    return RouteDecision(
        target=Target(worker, "http://127.0.0.1:1", "m", POOL, None, "node", ""),
        policy=Policy.CACHE_AWARE,
        knowledge=Knowledge.FRESH,
        cause="",
        prompt_tokens=40,
        matched_tokens={Source.GPU: 32, Source.DRAM: 0},
        reused_tokens=32,
        predicted_ttft_s=0.3,
        decided_in_s=1e-4,
        placement=Nothing(),
        candidates=(candidate(0.5), candidate(float("inf"))),
    )


def test_a_decision_is_json_without_infinities() -> None:
    text = json.dumps(decision().as_json(), allow_nan=False)
    shown = json.loads(text)
    assert shown["matched_tokens"] == {"gpu": 32, "dram": 0}
    assert [row["total_s"] for row in shown["candidates"]] == [0.5, None]


@pytest.mark.parametrize("instance", ["w", "w\r\nx-evil: 1", "Wörk€r", "\x00"])
def test_headers_are_one_line_of_ascii_whatever_a_worker_is_called(instance: str) -> None:
    for name, value in decision(instance).headers().items():
        assert all(" " <= char <= "~" for char in name + value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RouteAsk("", TOKENS),
        lambda: RouteAsk("m", TOKENS.astype(np.int64)),
        lambda: RouteAsk("m", TOKENS[::2]),
        lambda: RouteAsk("m", TOKENS.reshape(2, 5)),
        lambda: RouteAsk("m", TOKENS, scope_salt="x" * 2000),
        lambda: RouteAsk("m", TOKENS, session_id="\ud800"),
        lambda: RouteAsk("m", TOKENS, output_tokens=-1),
        lambda: RouteAsk("m", TOKENS, deadline=float("nan")),
    ],
)
def test_a_senseless_ask_is_refused(make: Callable[[], RouteAsk]) -> None:
    with pytest.raises(CallerError):
        make()
