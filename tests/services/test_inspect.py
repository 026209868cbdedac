"""`kvtier inspect index` against real indexes: what it prints, for people and for programs."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.cli import main
from kvtier.publisher import Publisher, PublisherConfig
from kvtier.sections import DialConfig, ListenConfig
from kvtier.security import certs, new_principal
from kvtier.types import Tier
from kvtier.wire import transport
from kvtier_services.inspecting import shown, size
from tests.harness.ports import free_port
from tests.harness.waiting import eventually
from tests.support.live_index import DEADLINE_S, LiveIndex
from tests.support.raw_publisher import RawPublisher, stored, worker_info

CHAIN = np.arange(1, 65, dtype=np.uint64)


@pytest.fixture
def index() -> Iterator[LiveIndex]:
    with LiveIndex(lease_ms=5_000) as running:
        yield running


@pytest.fixture
def worker(index: LiveIndex) -> Iterator[Publisher]:
    config = PublisherConfig(coalesce_s=0.001)
    with Publisher(worker_info("w1"), DialConfig((index.target,)), config) as publisher:
        assert publisher.flush(DEADLINE_S)  # past the first snapshot: what follows comes as batches
        for chain in (CHAIN[:16], CHAIN[16:32]):
            publisher.store(Tier.GPU, 0, chain)
            assert publisher.flush(DEADLINE_S)
        yield publisher


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of the real command line."""
    status = main(["inspect", "index", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], index: LiveIndex) -> dict[str, Any]:
    """The only index of the JSON output."""
    status, out, err = inspected(capsys, "--json", "--targets", index.target)
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    (one,) = json.loads(out)["indexes"]
    assert isinstance(one, dict)
    return one


@pytest.mark.usefixtures("worker")
def test_a_holder_is_shown_with_state_tiers_and_events(
    index: LiveIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = inspected(capsys, "--targets", index.target)
    assert (status, err) == (0, "")
    head, events, columns, holder = out.splitlines()
    assert head.startswith(f"index {index.target}: 32 blocks, 32 copies, ")
    assert "followers" in head
    assert events.startswith("events: applied 2, duplicate 0, gap 0, fenced 0, undecodable 0")
    assert columns.split()[:4] == ["HOLDER", "KIND", "NODE", "STATE"]
    assert holder.split()[:4] == ["w1/0", "worker", "node-of-w1", "EXACT"]
    assert "gpu 32 (31.25 KiB)" in holder
    assert "hidden" not in holder


@pytest.mark.usefixtures("worker")
def test_programs_read_the_same_as_one_object(
    index: LiveIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    one = document(capsys, index)
    assert one["target"] == index.target
    assert (one["blocks"], one["holdings"], one["followers"]) == (32, 32, 0)
    assert one["index_bytes"] > 0
    assert one["position"] > 0
    assert one["events"]["blocks_stored"] == 32
    (holder,) = one["holders"]
    assert (holder["instance"], holder["kind"], holder["node"]) == ("w1", "worker", "node-of-w1")
    assert (holder["state"], holder["reason"], holder["hidden"]) == ("exact", "", False)
    assert holder["tiers"] == {"gpu": {"blocks": 32, "bytes": 32_000}}
    wanted = {"applied", "duplicate", "gap", "fenced", "undecodable"}
    assert wanted <= holder["messages"].keys()
    assert holder["messages"]["applied"] == one["events"]["applied"] == 2


async def test_a_gap_is_shown_as_degraded_with_its_reason(
    index: LiveIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    channel = transport.new_channel(index.target)
    publisher = RawPublisher(channel, worker_info("w1"), epoch=7)
    await publisher.join([])
    await publisher.batch(2, stored(CHAIN))
    await publisher.answer("resend")
    (holder,) = (await asyncio.to_thread(document, capsys, index))["holders"]
    assert (holder["state"], holder["reason"]) == ("degraded", "gap_pending")
    assert holder["messages"]["gap"] == 1
    _, out, _ = await asyncio.to_thread(inspected, capsys, "--targets", index.target)
    assert "DEGRADED (gap_pending)" in out
    await channel.close()


async def test_a_holder_whose_lease_ended_is_shown_as_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveIndex(lease_ms=100) as index:
        channel = transport.new_channel(index.target)
        publisher = RawPublisher(channel, worker_info("w1"), epoch=7)
        await publisher.join([stored(CHAIN)])
        await asyncio.to_thread(eventually, lambda: index.is_hidden("w1"), DEADLINE_S, "it hides")
        (holder,) = (await asyncio.to_thread(document, capsys, index))["holders"]
        assert holder["hidden"] is True
        _, out, _ = await asyncio.to_thread(inspected, capsys, "--targets", index.target)
        assert "DEGRADED (hidden), hidden" in out
        await channel.close()


def test_an_index_that_is_not_there_costs_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    target = f"127.0.0.1:{free_port()}"
    status, out, err = inspected(capsys, "--targets", target, "--deadline-ms", "1000")
    assert (status, out) == (1, "")
    assert err.startswith("kvtier inspect: ")
    assert target in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("worker")
def test_one_of_two_that_is_not_there_does_not_hide_the_other(
    index: LiveIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    both = f"{gone},{index.target}"
    status, out, _ = inspected(capsys, "--targets", both, "--deadline-ms", "1000", "--json")
    dead, alive = json.loads(out)["indexes"]
    assert status == 1
    assert dead["target"] == gone
    assert dead["error"]
    assert alive["holders"][0]["instance"] == "w1"
    _, out, _ = inspected(capsys, "--targets", both, "--deadline-ms", "1000")
    assert out.startswith(f"index {gone}: ")
    assert "EXACT" in out


def test_an_operators_token_is_shown_and_a_workers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for role in ("operator", "worker"):
        token = certs.add_token(tmp_path, new_principal(f"a-{role}", role))
        (tmp_path / role).write_text(token, encoding="utf-8")
    with LiveIndex(listen=ListenConfig(tokens_file=tmp_path / certs.TOKENS)) as index:
        flags = ("--targets", index.target, "--token-file")
        assert inspected(capsys, *flags, str(tmp_path / "operator"))[0] == 0
        status, out, err = inspected(capsys, *flags, str(tmp_path / "worker"))
        assert (status, out) == (1, "")
        assert "not allowed" in err
        assert err.count("\n") == 1


def test_a_flag_that_it_does_not_know_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = inspected(capsys, "--target", "127.0.0.1:1")
    assert (status, out) == (1, "")
    assert "--target" in err


@pytest.mark.parametrize("arguments", [[], ["store-of-ours"], ["--json"]])
def test_a_question_it_does_not_know_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *arguments]) == 2
    assert "usage" in capsys.readouterr().err


def test_names_from_outside_cannot_move_the_cursor() -> None:
    assert shown("w-1/é") == "w-1/é"
    assert shown("w\x1b[2J\n") == "w\\x1b[2J\\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3 TiB")]
)
def test_sizes_are_in_a_unit_that_leaves_few_digits(count: int, text: str) -> None:
    assert size(count) == text
