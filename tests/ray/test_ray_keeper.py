"""A keeper and its service, without Ray: they end together, and come back at the same place."""

import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvtier.errors import UnavailableError
from kvtier.local.plan import Kind
from kvtier.local.probes import grpc_serving
from kvtier.ray.keeper import Duty, Keeper
from tests.support.local_cluster import living

pytestmark = pytest.mark.timeout(240)

WAIT_S = 120.0


def duty(root: Path, silent_s_max: float = 600.0, **table: object) -> Duty:
    return Duty(
        name="index",
        kind=Kind.INDEX,
        ip="127.0.0.1",
        port=0,
        table=table,
        model="fake",
        root=root,
        ready_s_max=WAIT_S,
        silent_s_max=silent_s_max,
        log_bytes_max=1 << 20,
    )


def test_a_keeper_ends_with_its_service_and_the_next_one_takes_its_place(tmp_path: Path) -> None:
    ended = threading.Event()
    first = Keeper(duty(tmp_path / "index"), lambda _: ended.set())
    psutil.Process(first.kept.pid).kill()
    assert ended.wait(WAIT_S)
    first.stop()  # here the process lives on, so its directory is given back by hand
    second = Keeper(duty(tmp_path / "index"))
    assert second.kept.address == first.kept.address
    assert grpc_serving(second.kept.address)()
    second.stop()
    assert not living([second.kept.pid])


def test_a_service_that_stands_still_is_killed_and_its_keeper_ends(tmp_path: Path) -> None:
    ended = threading.Event()
    keeper = Keeper(duty(tmp_path / "index", silent_s_max=1.0), lambda _: ended.set())
    with suppress(psutil.NoSuchProcess):  # on a slow machine it may seem to stand still already
        psutil.Process(keeper.kept.pid).suspend()
    assert ended.wait(WAIT_S)
    assert not living([keeper.kept.pid])
    keeper.stop()


def test_a_service_that_refuses_its_settings_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"reachable from other machines"):
        Keeper(duty(tmp_path / "index", listen={"bind": "192.0.2.7:7710"}))
    again = Keeper(duty(tmp_path / "index"))  # the directory was given back
    again.stop()
