"""Overlays of k8s/ without a cluster: every container runs, is probed, serves and is ended.

`tests.support.pods` says what is substituted. What is in the manifests and does not run is in
`test_kubernetes_manifests`.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from itertools import count

import pytest

from tests.harness.waiting import eventually
from tests.support.manifests import KUBECTL, allowed_edges, number_of, rendered
from tests.support.pods import Pod, Site, site

pytestmark = [
    pytest.mark.skipif(
        KUBECTL is None, reason="kubectl with kustomize 5 is not installed: nothing renders k8s/"
    ),
    pytest.mark.timeout(240),
]

CLIENTS = 3
TURN_TOKENS = 64
ANSWER_TOKENS = 12
_WAIT_S = 60.0
_THINKS_S = 0.05
PORT = 8000
UNUSED = {("kvtier-store", "kvtier-store", 7720)}
"""Payload goes this way only where two stores cannot agree on the bulk channel (port 7721)."""


@dataclass(slots=True)
class Clients:
    """Clients of the Service `kvtier-router`; each goes on with a conversation of its own."""

    pods: list[Pod]
    """Behind the service; whoever is taken out gets nothing more."""
    done: int = 0
    failures: list[str] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)
    by_router: dict[str, int] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def asking(self) -> Iterator["Clients"]:
        threads = [threading.Thread(target=self._ask_on, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(_WAIT_S)

    def after(self, more: int) -> None:
        """Wait until so many more requests have ended."""
        goal = self.done + more
        eventually(lambda: self.done >= goal, _WAIT_S, f"{more} more answers")

    def _ask_on(self, client: int) -> None:
        for turn in count():
            if self._stop.wait(_THINKS_S):
                return
            pods = list(self.pods)
            pod = pods[(client + turn) % len(pods)]
            self._ask(pod, client, turn)
            self.done += 1

    def _ask(self, pod: Pod, client: int, turn: int) -> None:
        tokens = TURN_TOKENS * (2 + turn % 24)
        prompt = [(client * 31 + at * 7 + at * at) % 256 for at in range(tokens)]
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": turn % 2 > 0,
        }
        connection = HTTPConnection(pod.address, PORT, timeout=_WAIT_S)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, HTTPException) as error:
            self.failures.append(f"{pod.name}: {type(error).__name__} {error}")
            return
        finally:
            connection.close()
        whole = text.rstrip().endswith(b"[DONE]") if body["stream"] else b'"usage"' in text
        if answer.status != 200 or not whole or b'"error"' in text:
            self.failures.append(f"{pod.name}: {answer.status} {text[-200:]!r}")
        worker = answer.headers.get("x-kvtier-worker", "")
        self.workers[worker] = self.workers.get(worker, 0) + 1
        self.by_router[pod.name] = self.by_router.get(pod.name, 0) + 1


def test_dev_starts_serves_and_is_ended_without_a_failed_request() -> None:
    """One pod of each kind is ended as a kubelet ends it, one after the other, under load."""
    with site(rendered("overlays/dev"), "kubernetes_dev") as dev:
        dev.start()
        clients = Clients(dev.of("kvtier-router"))
        ended = [dev.of(name)[0] for name in ("kvtier-index", "kvtier-worker", "kvtier-store")]
        with clients.asking():
            clients.after(30)
            dev.look()
            assert set(clients.workers) == {pod.name for pod in dev.of("kvtier-worker")}
            for pod in ended:
                _below_limits(dev)
                assert set(dev.end(pod).values()) == {0}, pod.name
                clients.after(10)
                dev.look()
            _end_router(dev, clients)
            clients.after(10)
        assert clients.failures == []
        # Of the whole life of these pods: no other, and none of them for nothing.
        assert dev.seen == allowed_edges(dev.overlay) - UNUSED
        for pod in dev.pods:
            for process in pod.processes.values():
                assert "Traceback" not in process.log_text(), process.name


def _end_router(made: Site, clients: Clients) -> None:
    """The service sends it requests until everybody has heard; then no more."""
    pod, *_ = made.of("kvtier-router")
    (container,) = pod.workload.containers
    ending = threading.Thread(target=made.end, args=(pod,))
    ending.start()
    try:
        eventually(lambda: not made.probe(pod, container, "readinessProbe"), _WAIT_S, "not ready")
        before = clients.by_router[pod.name]
        more = "answers while it ends"
        eventually(lambda: clients.by_router[pod.name] > before + 2, _WAIT_S, more)
        clients.pods.remove(pod)
    finally:
        ending.join(_WAIT_S)
    assert pod.processes["router"].wait(_WAIT_S) == 0


def _below_limits(made: Site) -> None:
    for pod in made.pods:
        for name, process in pod.processes.items():
            if process.alive:
                limit = number_of(pod.container(name)["resources"]["limits"]["memory"])
                assert made.resident_bytes(pod, name) < limit, process.name
