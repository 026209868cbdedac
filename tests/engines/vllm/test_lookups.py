"""What the connector asks of a real store beside the scheduler: blocks, and terms of sharing."""

import concurrent.futures
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.core.identity import EngineIdentity, KvDtype, Pool
from kvtier.engines.vllm.facts import EngineFacts
from kvtier.engines.vllm.lookups import PendingAnswer, StoreLookups
from kvtier.engines.vllm.scheduling import BlockNames
from kvtier.engines.vllm.terms import RECORD_BYTES, differences, record_of
from kvtier.sections import DialConfig
from tests.harness.processes import ProcessRunner
from tests.harness.waiting import eventually
from tests.support.store_cluster import start_store

FACTS = EngineFacts(
    Pool("m", "r1", 32), KvDtype.FLOAT32, 30, 3, 64, 1, bytes(32),
    EngineIdentity("vllm", "0.32.0", "sha256_cbor", "seed"),
)  # fmt: skip


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[ProcessRunner]:
    with ProcessRunner("vllm-lookups", tmp_path) as runner:
        yield runner


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def compared(socket: str, facts: EngineFacts) -> None:
    """An engine starts, compares, and ends."""
    lookups = StoreLookups(DialConfig((socket,)))
    try:
        lookups.compare(facts).result(30)
    finally:
        lookups.close()


def test_records_differ_by_what_parts_namespaces_and_say_in_what() -> None:
    ours = record_of(FACTS)
    assert len(ours) == RECORD_BYTES
    assert differences(ours, record_of(FACTS)) == ()
    others = {
        "block size": replace(FACTS, pool=Pool("m", "r1", 64)),
        "revision": replace(FACTS, pool=Pool("m", "r2", 32)),
        "KV dtype": replace(FACTS, kv_dtype=KvDtype.BFLOAT16),
        "ranks": replace(FACTS, ranks=3),
        "vLLM": replace(FACTS, engine=EngineIdentity("vllm", "0.33.0", "sha256_cbor", "seed")),
        "hash seed": replace(FACTS, engine=EngineIdentity("vllm", "0.32.0", "sha256_cbor", "t")),
        "rope": replace(FACTS, rope_digest=b"1" * 32),
    }
    for term, facts in others.items():
        (found,) = differences(ours, record_of(facts))
        assert found.startswith(term)
        assert not set(facts.namespaces()) & set(FACTS.namespaces())
    assert differences(ours, b"\xff" * RECORD_BYTES) == ()


def test_a_secret_seed_is_not_in_the_record() -> None:
    facts = replace(FACTS, engine=EngineIdentity("vllm", "0.32.0", "sha256_cbor", "hush"))
    assert b"hush" not in record_of(facts)


def test_an_engine_that_differs_from_the_one_before_says_in_what_and_equal_ones_do_not(
    runner: ProcessRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = start_store(runner, tmp_path / "store")
    compared(store.socket, FACTS)
    compared(store.socket, FACTS)
    assert warnings(caplog) == []
    compared(store.socket, replace(FACTS, kv_dtype=KvDtype.BFLOAT16))
    (said,) = warnings(caplog)
    assert "KV dtype bfloat16 here, float32 there" in said
    caplog.clear()
    compared(store.socket, replace(FACTS, kv_dtype=KvDtype.BFLOAT16))
    compared(store.socket, replace(FACTS, pool=Pool("other model", "r1", 32)))
    assert warnings(caplog) == []


def test_a_store_that_appears_later_is_still_asked(
    runner: ProcessRunner,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier.engines.vllm.lookups._COMPARE_S", 0.05)
    lookups = StoreLookups(DialConfig((f"unix:{tmp_path / 'store' / 'run' / 'store.sock'}",)))
    try:
        comparison = lookups.compare(FACTS)
        names = BlockNames((bytes(32),), FACTS.namespaces())
        answer = lookups.look(names, 5.0)
        eventually(answer.done, 30, "an answer without a store")
        assert answer.held() is None
        assert not comparison.done()
        start_store(runner, tmp_path / "store")
        comparison.result(30)
    finally:
        lookups.close()
    assert warnings(caplog) == []


def test_an_engine_that_ends_before_there_is_a_store_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    lookups = StoreLookups(DialConfig((f"unix:{tmp_path / 'none.sock'}",)))
    comparison = lookups.compare(FACTS)
    lookups.close()
    assert comparison.cancelled() or comparison.done()


def test_a_lookup_that_breaks_off_or_is_given_up_says_that_nobody_could_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given_up: concurrent.futures.Future[tuple[bool, ...] | None] = concurrent.futures.Future()
    given_up.cancel()
    broken: concurrent.futures.Future[tuple[bool, ...] | None] = concurrent.futures.Future()
    broken.set_exception(RuntimeError("a bug"))
    for future in (given_up, broken):
        answer = PendingAnswer(future)
        assert answer.done()
        assert answer.held() is None
    assert len(warnings(caplog)) == 1
