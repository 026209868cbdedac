"""Routers that tell each other hand out a quota once, and follow an operator's word."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.core.workers import WorkerName
from kvtier.types import InstanceId, ScopeId, TenantId
from kvtier_router.front.quota import QuotaDesk, QuotaExceededError
from kvtier_router.front.stickiness import Stickiness
from kvtier_router.front.tenants import TenantBook
from kvtier_router.gossip import Gossip
from tests.harness.readiness import tcp_ready
from tests.harness.waiting import eventually
from tests.router.front.rig import Rig, call
from tests.router.front.test_tenants import as_key, keys_file, tenant

SECRET = b"a cluster secret of thirty bytes"


class Router:
    """The quota of one router, without a network."""

    def __init__(self, path: Path, now: list[float], secret: bytes = SECRET) -> None:
        self.book = TenantBook(path, secret)
        self.desk = QuotaDesk(lambda: now[0])
        self.orders: list[tuple[WorkerName, bool]] = []
        self.homes = Stickiness()
        self.gossip = Gossip(
            secret, self.desk, self.book, self.homes, lambda w, d: self.orders.append((w, d))
        )
        self.granted = 0
        self.tokens = 0

    def ask(self, tokens: int = 10) -> None:
        try:
            self.desk.take(self.book.tenants()[TenantId("acme")], tokens)
        except QuotaExceededError:
            return
        self.granted += 1
        self.tokens += tokens


def exchange(routers: list[Router], drop: float, draw: random.Random) -> None:
    for sender in routers:
        for datagram in sender.gossip.report():
            for receiver in routers:
                if receiver is not sender and draw.random() >= drop:
                    receiver.gossip.take(datagram)


@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (10, 1, 1, 0), (1, 0, 0, 0)])
@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("limit", ["requests", "tokens"])
def test_four_routers_hand_out_one_quota_within_a_tenth(
    tmp_path: Path, shares: tuple[int, ...], drop: float, limit: str
) -> None:
    more = {
        "requests": "requests_per_s = 50\nrequests_burst = 50",
        "tokens": "tokens_per_s = 500\ntokens_burst = 500",
    }
    path = keys_file(tmp_path, tenant("acme", "key", more=more[limit]))
    now, draw = [0.0], random.Random(7)
    routers = [Router(path, now) for _ in shares]
    exchange(routers, 0.0, draw)
    for step in range(1, 6000):  # a minute, eight times the quota asked for
        now[0] = step / 100
        for router in draw.choices(routers, shares, k=4):
            router.ask()
        if step % 10 == 0:
            exchange(routers, drop, draw)
    granted = sum(router.granted for router in routers)
    assert granted == pytest.approx(50 * 60 + 50, rel=0.1)


def test_what_is_no_report_of_this_cluster_changes_nothing(tmp_path: Path) -> None:
    path = keys_file(tmp_path, tenant("acme", "key", more="requests_per_s = 1\nrequests_burst = 1"))
    now = [0.0]
    ours, theirs = Router(path, now), Router(path, now, b"another secret, of another cluster")
    theirs.ask()
    stranger = theirs.gossip.report()
    for datagram in (*stranger, b"", b"x" * 100, b"\0" * 32 + json.dumps([]).encode()):
        ours.gossip.take(datagram)
    assert ours.gossip.refused == 4
    ours.ask()
    assert ours.granted == 1


def test_a_repeated_or_late_report_charges_nothing_twice(tmp_path: Path) -> None:
    path = keys_file(tmp_path, tenant("acme", "key", more="requests_per_s = 1\nrequests_burst = 9"))
    now = [0.0]
    one, other = Router(path, now), Router(path, now)
    reports = []
    for _ in range(3):
        one.ask()
        reports += one.gossip.report()
    for datagram in (*reports, *reversed(reports), *reports):
        other.gossip.take(datagram)
    for _ in range(9):
        other.ask()
    assert other.granted == 6


def test_who_joins_late_charges_no_history(tmp_path: Path) -> None:
    path = keys_file(tmp_path, tenant("acme", "key", more="requests_per_s = 1\nrequests_burst = 9"))
    now = [0.0]
    one, late = Router(path, now), Router(path, now)
    for second in range(40):
        now[0] = float(second)
        one.ask()
        one.gossip.report()
    for _ in range(8):
        one.gossip.report()
    late.gossip.take(one.gossip.report()[0])  # the tenant has not been heard of for a while
    for _ in range(2):
        one.ask()
        for datagram in one.gossip.report():
            late.gossip.take(datagram)
    for _ in range(9):
        late.ask()
    assert late.granted == 8


def test_a_report_of_whatever_size_travels_in_datagrams(tmp_path: Path) -> None:
    rows = [tenant(f"tenant-{n}", f"key-{n}") for n in range(1000)]
    path = keys_file(tmp_path, *rows)
    one, other = Router(path, [0.0]), Router(path, [0.0])
    for name, known in one.book.tenants().items():
        one.desk.take(known, 10)
        one.gossip.order(WorkerName(InstanceId(f"{name}-{'w' * 200}")), True)
    scope = ScopeId("tenant:acme")
    for number in range(256):
        worker = WorkerName(InstanceId(f"{number}-{'w' * 200}"))
        one.homes.learn(scope, json.dumps({"id": f"resp_{number}"}).encode(), worker)
    datagrams = one.gossip.report()
    assert max(map(len, datagrams)) <= 48 << 10
    for datagram in datagrams:
        other.gossip.take(datagram)
    assert other.gossip.refused == 0
    assert all(other.homes.find(scope, f"resp_{number}") for number in range(256))
    assert len(other.orders) == 256


def test_the_newest_order_about_a_worker_counts(tmp_path: Path) -> None:
    path = keys_file(tmp_path, tenant("acme", "key"))
    one, other = Router(path, [0.0]), Router(path, [0.0])
    worker = WorkerName(InstanceId("w0"), 1)
    one.gossip.order(worker, True)
    early = one.gossip.report()
    one.gossip.order(worker, False)
    for datagram in (*one.gossip.report(), *early):
        other.gossip.take(datagram)
    assert other.orders == [(worker, False)]


def test_the_home_of_an_answer_is_known_to_all_and_in_its_scope_only(tmp_path: Path) -> None:
    path = keys_file(tmp_path, tenant("acme", "key"))
    one, other = Router(path, [0.0]), Router(path, [0.0])
    worker = WorkerName(InstanceId("w3"))
    acme, red = ScopeId("tenant:acme"), ScopeId("tenant:red")
    one.homes.learn(acme, b'{"id": "resp_1"}', worker)
    start = b'event: response.created\ndata: {"type":"x","response":{"id":"resp_2","a":1}}\n\n'
    one.homes.learn_stream(acme, start, worker)
    for datagram in one.gossip.report():
        assert b"resp_1" not in datagram
        other.gossip.take(datagram)
    assert [other.homes.find(acme, f"resp_{n}") for n in (1, 2, 3)] == [worker, worker, None]
    assert other.homes.find(red, "resp_1") is None


def states_at(port: int) -> dict[str, str]:
    """How one process of a router, whose admin port this is, sees the workers."""
    rows = call(port, "GET", "/fleet").json["workers"]
    return {row["worker"]: row["state"] for row in rows}


def until_all_have_told(ports: Sequence[int], verbs: Iterator[str]) -> None:
    """Wait until each process has heard of each other one what quota that one has used by now.

    It travels in the report that carries the word of an operator about w0, which can be seen.
    """
    for teller in ports:
        verb = next(verbs)
        assert call(teller, "POST", f"/workers/w0/{verb}").status == 200
        wanted = {"drain": "draining", "undrain": "candidate"}[verb]
        for listener in ports:
            eventually(
                lambda port=listener, state=wanted: states_at(port)["w0"] == state,  # type: ignore[misc]
                30,
                f"{listener} follows {teller}",
            )


@pytest.mark.parametrize("count", [2, 4])
def test_processes_of_one_router_share_quota_and_drains(rig: Rig, count: int) -> None:
    rig.start_workers(2)
    quota = "requests_per_s = 0.001\nrequests_burst = 6"
    keys = keys_file(rig.directory, tenant("acme", "key", more=quota), tenant("free", "free"))
    secret = rig.directory / "secret"
    secret.write_bytes(SECRET)
    rig.start_router(f"--workers={count}", f"--keys-file={keys}", f"--cluster-secret-file={secret}")
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}

    def asked(key: str) -> tuple[int, str]:
        answer = rig.call("POST", "/v1/completions", body, headers=as_key(key))
        return answer.status, answer.headers.get("x-kvtier-worker", "")

    ports = range(rig.admin_port, rig.admin_port + count)
    for port in ports:
        eventually(tcp_ready(port), 30, "each process is there")
    verbs = itertools.cycle(("drain", "undrain"))
    assert call(rig.admin_port, "POST", f"/workers/w0/{next(verbs)}").status == 200
    eventually(
        lambda: {asked("free") for _ in range(12)} == {(200, "w1")}, 30, "all processes follow"
    )
    granted = 0
    for _ in range(14):  # of which two processes that know nothing of each other would grant 12
        if asked("key")[0] == 200:
            granted += 1
            until_all_have_told(ports, verbs)
    assert granted == 6
    (rig.directory / "keys.toml").write_text("broken", encoding="utf-8")
    errors = "kvtier_router_keys_reload_errors_total"

    def is_noticed() -> bool:  # a process looks at the file when somebody asks it
        assert asked("free")[0] == 200
        return rig.metric(errors) >= 1

    eventually(is_noticed, 30, "the broken file is noticed")
    assert asked("free")[0] == 200
