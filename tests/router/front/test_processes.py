"""Families of processes: stopped at any moment, and none of their requests lost."""

import http.client
import io
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import psutil
import pytest

from kvtier_router.brain import Brain
from kvtier_router.config import RouterConfig
from kvtier_router.main import ALONE, serve
from kvtier_router.web.values import HttpLimits
from tests.harness.processes import REPOSITORY, python_module
from tests.harness.waiting import eventually, eventually_async
from tests.router.front.fake_brain import FakeBrain
from tests.router.front.rig import Rig


@pytest.mark.parametrize("seed", range(12))
def test_a_family_ends_at_a_signal_in_any_moment_of_its_start(seed: int) -> None:
    argv = python_module("tests.router.front.family_process", "16")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=REPOSITORY) as family:
        assert family.stdout is not None
        assert family.stdout.readline() == b"ready\n"
        moment = time.monotonic() + random.Random(seed).uniform(0, 0.02)
        while time.monotonic() < moment:
            pass
        family.send_signal(signal.SIGTERM)
        try:
            assert family.wait(10) in (0, -signal.SIGTERM)  # before or after it listens for it
        finally:
            family.kill()


class _Broken(FakeBrain):
    """Whose tick fails."""

    ticks = 0

    def tick(self) -> None:
        self.ticks += 1
        raise RuntimeError("as told")


async def test_a_chore_that_fails_keeps_no_deadline_from_being_kept() -> None:
    brain = _Broken({})

    @asynccontextmanager
    async def make_brain(config: RouterConfig, process: int) -> AsyncIterator[Brain]:
        yield Brain(brain)

    config = RouterConfig(admin_bind="", http=replace(HttpLimits(), header_ms_max=200))
    config = replace(config, listen=replace(config.listen, bind="127.0.0.1:0"), drain_ms_max=100)
    async with serve(config, io.StringIO(), make_brain, ALONE) as router:
        client = socket.create_connection(("127.0.0.1", router.port))
        client.setblocking(False)
        client.sendall(b"GET / HTTP/1.1\r\nhost:")
        heard = bytearray()

        async def is_cut() -> bool:
            try:
                heard.extend(client.recv(1000))
            except BlockingIOError:
                return False
            return heard.startswith(b"HTTP/1.1 408")

        await eventually_async(is_cut, 30, "a header that drips is cut")
        client.close()
        assert brain.ticks > 1


class _Asker(threading.Thread):
    """A client that asks over one connection after the other until the router is gone."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.answers: list[int] = []
        self.lost: list[str] = []

    def run(self) -> None:
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
            try:
                connection.connect()
            except OSError:
                return
            try:
                self._ask_on(connection)
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(repr(error))
                return
            finally:
                connection.close()

    def _ask_on(self, connection: http.client.HTTPConnection) -> None:
        body = '{"model": "mock", "prompt": "a b", "max_tokens": 2}'
        for _ in range(20):
            connection.request("POST", "/v1/completions", body)
            response = connection.getresponse()
            response.read()
            self.answers.append(response.status)
            if response.getheader("connection") == "close":
                return


def test_a_stop_under_load_loses_no_request(rig: Rig) -> None:
    rig.start_workers(1, token_ms=2.0)
    rig.start_router("--drain-delay-ms=2000")
    router = rig.router
    assert router is not None
    askers = [_Asker(rig.port) for _ in range(6)]
    for asker in askers:
        asker.start()
    eventually(lambda: all(len(asker.answers) > 5 for asker in askers), 30, "all are served")
    router.terminate()
    for asker in askers:
        asker.join(30)
    assert router.wait(40) == 0
    assert [asker.lost for asker in askers] == [[]] * 6
    assert {status for asker in askers for status in asker.answers} == {200}


def test_one_of_two_processes_is_killed_under_load_and_only_its_own_connections_are_lost(
    rig: Rig,
) -> None:
    rig.start_workers(1, token_ms=2.0)
    rig.start_router("--workers=2")
    router = rig.router
    assert router is not None
    parent = psutil.Process(router.pid)
    eventually(lambda: router.log_text().count("event=serving") == 2, 30, "both serve")
    askers = [_Asker(rig.port) for _ in range(16)]  # all at one process: once in 2**15 runs
    for asker in askers:
        asker.start()
    eventually(lambda: all(len(asker.answers) > 5 for asker in askers), 30, "all are served")
    victim, other = parent.children()
    before = {asker: len(asker.answers) for asker in askers}
    victim.kill()
    eventually(
        lambda: (
            any(len(a.answers) > before[a] + 25 for a in askers) and len(parent.children()) == 2
        ),
        40.0,
        "the other goes on, and a new one runs",
    )
    assert other.pid in {child.pid for child in parent.children()}
    router.terminate()
    for asker in askers:
        asker.join(30)
    assert router.wait(40) == 0
    assert {status for asker in askers for status in asker.answers} == {200}
    assert sum(len(asker.lost) > 0 for asker in askers) < 16
