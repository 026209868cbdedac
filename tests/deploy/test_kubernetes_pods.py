"""Overlays of k8s/ without a cluster: every container runs, is probed, serves and is ended.

`tests.support.pods` says what is substituted. What is in the manifests and does not run is in
`test_kubernetes_manifests`.
"""

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import count

import pytest

from kvtier.client.store import ReadTerms
from kvtier.client.store_blocking import BlockStoreClient
from kvtier.ports import GetStatus, PutStatus
from kvtier.sections import DialConfig
from tests.harness.waiting import eventually
from tests.support.manifest_configs import KEY, SECRETS
from tests.support.manifests import KUBECTL, allowed_edges, number_of, rendered
from tests.support.pods import NODES, Pod, Site, Terms, site
from tests.support.store_cluster import CLIENT
from tests.support.store_service import names
from tests.support.text_models import byte_level_bpe, write_model

pytestmark = [
    pytest.mark.skipif(
        KUBECTL is None, reason="kubectl with kustomize 5 is not installed: nothing renders k8s/"
    ),
    pytest.mark.timeout(400),
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
    model: str = "demo"
    streams: bool = True
    """Every other request wants a stream."""
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None
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
            self.ask(pod, client, turn)
            self.done += 1

    def ask(self, pod: Pod, client: int, turn: int) -> None:
        """One request, and what became of it."""
        tokens = TURN_TOKENS * (2 + turn % 24)
        prompt = [(client * 31 + at * 7 + at * at) % 256 for at in range(tokens)]
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": self.streams and turn % 2 > 0,
        }
        connection = HTTPConnection(pod.address, PORT, timeout=_WAIT_S)
        if self.tls is not None:
            connection = HTTPSConnection(pod.address, PORT, timeout=_WAIT_S, context=self.tls)
        try:
            headers = {"content-type": "application/json", **self.headers}
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


PATIENT = {"KVTIER_ROUTER_DRAIN_DELAY_MS": "20000"}
"""However slow this machine is: whoever was sent to a router before it was out is let in."""
SMALL = {
    "KVTIER_STORE_DRAM_BYTES_MAX": str(128 << 20),
    "KVTIER_STORE_NVME_BYTES_MAX": str(1 << 30),
}
BLOCK_BYTES = 4096


def test_dev_starts_serves_and_is_ended_without_a_failed_request() -> None:
    """One pod of each kind is ended as a kubelet ends it, under load."""
    with site(rendered("overlays/dev"), "kubernetes_dev", Terms({"router": PATIENT})) as dev:
        dev.start()
        clients = Clients(dev.of("kvtier-router"))
        with clients.asking():
            _end_one_of_each(dev, clients, "kvtier-worker")
        assert clients.failures == []
        # Of the whole life of these pods: no other, and none of them for nothing.
        assert dev.seen == allowed_edges(dev.overlay) - UNUSED
        for pod in dev.pods:
            for process in pod.processes.values():
                assert "Traceback" not in process.log_text(), process.name


def test_production_serves_by_tls_and_keys_and_is_ended_without_a_failed_request() -> None:
    terms = Terms({"router": PATIENT, "store": SMALL}, SECRETS, replicas=2)
    with site(rendered("overlays/production"), "kubernetes_production", terms) as made:
        write_model(made.root / "claims/kvtier-models/qwen3-8b", byte_level_bpe())
        made.start()
        clients = _with_key(made)
        with clients.asking():
            _end_one_of_each(made, clients, "kvtier-vllm")
        assert clients.failures == []
        assert made.seen == allowed_edges(made.overlay) - UNUSED
        stranger = Clients(clients.pods, "qwen3-8b", streams=False, tls=clients.tls)
        stranger.ask(stranger.pods[0], 0, 0)
        assert len(stranger.failures) == 1
        assert " 401 " in stranger.failures[0]


def _end_one_of_each(made: Site, clients: Clients, engines: str) -> None:
    clients.after(30)
    _read_elsewhere(made)
    made.look()
    busiest = max(clients.workers, key=lambda name: clients.workers[name])
    pods = [
        made.of("kvtier-index")[0],
        next(pod for pod in made.of(engines) if pod.name == busiest),
        made.of("kvtier-store")[0],
    ]
    with _ending_router(made, clients):
        for pod in pods:
            _below_limits(made)
            assert set(made.end(pod).values()) == {0}, pod.name
            clients.after(10)
            made.look()
    clients.after(10)


@contextmanager
def _ending_router(made: Site, clients: Clients) -> Iterator[None]:
    """A router ends meanwhile; the service sends it requests until it is not ready any more."""
    pod, *_ = made.of("kvtier-router")
    (container,) = pod.workload.containers
    ending = threading.Thread(target=made.end, args=(pod,))
    ending.start()
    try:
        eventually(lambda: not made.probe(pod, container, "readinessProbe"), _WAIT_S, "not ready")
        clients.pods.remove(pod)
        yield
    finally:
        ending.join(_WAIT_S)
    assert pod.processes["router"].wait(_WAIT_S) == 0


def _read_elsewhere(made: Site) -> None:
    """Blocks are put on one node, as its engines put them, and read on the other."""
    written, payload = names(1, 2, 3), bytes(BLOCK_BYTES)
    dials = [
        DialConfig((f"unix:{made.root / node}/run/kvtier/store/store.sock",)) for node in NODES
    ]
    with BlockStoreClient(dials[0], CLIENT) as here, BlockStoreClient(dials[1], CLIENT) as there:
        for one in here.put_many(written, [payload] * len(written), deadline_s=_WAIT_S):
            assert one.status is PutStatus.STORED
        terms = ReadTerms(payload_bytes=BLOCK_BYTES)

        def are_there() -> bool:
            found = there.get_many(written, terms=terms, deadline_s=_WAIT_S)
            return all(one.status is GetStatus.HIT for one in found)

        eventually(are_there, _WAIT_S, "the blocks of one node on the other")


def _with_key(made: Site) -> Clients:
    assert made.authority is not None
    tls = ssl.create_default_context(cadata=made.authority.cert.decode())
    key = {"authorization": f"Bearer {KEY}"}
    return Clients(made.of("kvtier-router"), "qwen3-8b", streams=False, headers=key, tls=tls)


def _below_limits(made: Site) -> None:
    for pod in made.pods:
        for name, process in pod.processes.items():
            if process.alive:
                limit = number_of(pod.container(name)["resources"]["limits"]["memory"])
                assert made.resident_bytes(pod, name) < limit, process.name
