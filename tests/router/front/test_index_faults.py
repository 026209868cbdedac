"""A router in front of an index that is frozen, killed and comes back: nobody notices."""

import pytest

from tests.harness.ports import free_port
from tests.harness.processes import Launch, kvtier_command
from tests.harness.readiness import grpc_ready
from tests.harness.waiting import eventually
from tests.router.front.rig import Rig


@pytest.mark.parametrize("mode", ["embedded", "remote"])
def test_requests_are_answered_while_the_index_is_frozen_killed_and_back(
    rig: Rig, mode: str
) -> None:
    port = free_port()
    index = rig.runner.start(
        Launch(
            "index",
            kvtier_command("index", f"--bind=127.0.0.1:{port}"),
            grpc_ready(f"127.0.0.1:{port}"),
        )
    )
    rig.start_workers(2)
    rig.start_router(f"--index-targets=127.0.0.1:{port}", f"--index-mode={mode}", brain="real")

    def all_answered() -> bool:
        return {rig.complete(max_tokens=1).status for _ in range(6)} == {200}

    assert all_answered()
    index.freeze()
    assert all_answered()
    index.thaw()
    index.kill()
    assert all_answered()
    index.restart()
    assert all_answered()
    eventually(lambda: rig.call("GET", "/ready").status == 200, 30, "it stays ready")


def test_a_router_starts_without_its_index(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router(f"--index-targets=127.0.0.1:{free_port()}", brain="real")
    assert rig.complete(max_tokens=1).status == 200


@pytest.mark.parametrize("mode", ["embedded", "remote"])
def test_a_router_that_is_told_to_end_ends_its_streams_without_an_error(
    rig: Rig, mode: str
) -> None:
    port = free_port()
    rig.runner.start(
        Launch(
            "index",
            kvtier_command("index", f"--bind=127.0.0.1:{port}"),
            grpc_ready(f"127.0.0.1:{port}"),
        )
    )
    rig.start_workers(1)
    rig.start_router(f"--index-targets=127.0.0.1:{port}", f"--index-mode={mode}", brain="real")
    assert rig.complete(max_tokens=1).status == 200
    router = rig.router
    assert router is not None
    router.terminate()
    assert router.wait(40) == 0
    log = router.log_text()
    for word in ("Exception", "Traceback", "is closed", "level=error"):
        assert word not in log, log
