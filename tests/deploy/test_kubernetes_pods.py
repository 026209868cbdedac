"""Overlays of k8s/ without a cluster: every container runs, is probed, serves and is ended.

Each overlay is started once; beside `vllm` runs the Deployment of somebody who has followed the
page and attached theirs. `tests.support.pods` says what is substituted. What is in the
manifests and does not run is in `test_kubernetes_manifests`.
"""

import json
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import count
from pathlib import Path
from shutil import which

import pytest

from kvtier.client.store import ReadTerms
from kvtier.client.store_blocking import BlockStoreClient
from kvtier.ports import GetStatus, PutStatus
from kvtier.sections import DialConfig
from tests.harness.waiting import eventually
from tests.support.kubernetes_page import (
    Follower,
    attached,
    commands,
    folder_of_follower,
    joined,
    rendered_own,
)
from tests.support.manifest_configs import KEY, SECRETS
from tests.support.manifests import KUBECTL, allowed_edges, number_of, port_of, rendered
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
    models: Sequence[str] = ("demo",)
    """What they ask for, in turn of the clients."""
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
            "model": self.models[client % len(self.models)],
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


PATIENT = {"KVTIER_ROUTER_DRAIN_DELAY_MS": "12000"}
"""However slow this machine is: whoever was sent to a router before it was out is let in."""
SMALL = {
    "KVTIER_STORE_DRAM_BYTES_MAX": str(128 << 20),
    "KVTIER_STORE_NVME_BYTES_MAX": str(1 << 30),
}
BLOCK_BYTES = 4096


def test_dev_starts_serves_and_is_ended_without_a_failed_request(tmp_path: Path) -> None:
    """One pod of each kind is ended as a kubelet ends it, under load."""
    with site(rendered("overlays/dev"), "kubernetes_dev", Terms({"router": PATIENT})) as dev:
        dev.start()
        clients = Clients(dev.of("kvtier-router"))
        _answers_the_pages_request(dev, tmp_path)
        with clients.asking():
            _end_one_of_each(dev, clients, "kvtier-worker")
        assert clients.failures == []
        # Of the whole life of these pods: no other, and none of them for nothing.
        assert dev.seen == allowed_edges(dev.overlay) - UNUSED
        for pod in dev.pods:
            for process in pod.processes.values():
                assert "Traceback" not in process.log_text(), process.name


def test_vllm_and_a_deployment_that_was_attached_serve_and_are_ended(tmp_path: Path) -> None:
    """Two models of two Deployments, behind the same routers, beside the same stores."""
    overlay = joined(rendered("overlays/vllm"), rendered_own(tmp_path, attached()))
    terms = Terms({"router": PATIENT, "store": SMALL})
    with site(overlay, "kubernetes_vllm", terms) as made:
        write_model(made.root / "claims/kvtier-models/qwen3-8b", byte_level_bpe())
        write_model(made.root / "claims/mine/model", byte_level_bpe())
        made.start()
        clients = Clients(made.of("kvtier-router"), ("qwen3-8b", "chat"), streams=False)
        with clients.asking():
            _end_one_of_each(made, clients, "kvtier-vllm")
        assert clients.failures == []
        (mine,) = made.of("mine")
        assert mine.name in clients.workers
        assert set(made.end(mine).values()) == {0}
        assert made.seen == allowed_edges(made.overlay) - UNUSED


def test_production_serves_by_tls_and_keys_and_is_ended_without_a_failed_request(
    tmp_path: Path,
) -> None:
    secrets, key = _secrets_of_the_page(tmp_path)
    terms = Terms({"router": PATIENT, "store": SMALL}, secrets, replicas=2)
    with site(rendered("overlays/production"), "kubernetes_production", terms) as made:
        write_model(made.root / "claims/kvtier-models/qwen3-8b", byte_level_bpe())
        made.start()
        clients = _with_key(made, key)
        with clients.asking():
            _end_one_of_each(made, clients, "kvtier-vllm")
        assert clients.failures == []
        assert made.seen == allowed_edges(made.overlay) - UNUSED
        stranger = Clients(clients.pods, clients.models, streams=False, tls=clients.tls)
        stranger.ask(stranger.pods[0], 0, 0)
        assert len(stranger.failures) == 1
        assert " 401 " in stranger.failures[0]
        _standing_still_is_found(made)


def _secrets_of_the_page(folder: Path) -> tuple[Mapping[str, Mapping[str, bytes]], str]:
    """The Secrets that the page's commands make, and the key that opens the routers."""
    if which("openssl") is None:
        return SECRETS, KEY
    reader = Follower(folder_of_follower(folder), "http://127.0.0.1:9")
    for line in commands("Production"):
        if " apply " not in line:
            reader.type(line)
    return reader.secrets, reader.key


def _answers_the_pages_request(made: Site, folder: Path) -> None:
    """The page's curl, sent to where its port-forward would have brought it."""
    if which("curl") is None:
        return
    (line,) = [one for one in commands() if one.startswith("curl ")]
    at = f"{made.of('kvtier-router')[0].address}:{PORT}"
    reader = Follower(folder, "http://127.0.0.1:9")
    reader.type(line.replace("127.0.0.1:8080", at))
    (said,) = reader.said.values()
    assert json.loads(said)["usage"]["completion_tokens"] == 8


def _standing_still_is_found(made: Site) -> None:
    """A process whose port is open, and that does nothing, does not pass for ready."""
    pods = [made.of("kvtier-index")[1], made.of("kvtier-store")[1]]
    for pod in pods:
        (process,) = pod.processes.values()
        process.freeze()
        socket.create_connection((pod.address, _grpc_port(pod)), _WAIT_S).close()
    with ThreadPoolExecutor(len(pods)) as pool:
        looks = [
            pool.submit(made.probe, pod, pod.workload.containers[0], "readinessProbe")
            for pod in pods
        ]
    assert [look.result() for look in looks] == [False, False]


def _grpc_port(pod: Pod) -> int:
    return port_of(pod.workload.containers[0], "grpc")


def _end_one_of_each(made: Site, clients: Clients, engines: str) -> None:
    clients.after(30)
    _read_elsewhere(made)
    expected = allowed_edges(made.overlay) - UNUSED

    def all_seen() -> bool:
        made.look()
        return made.seen >= expected

    eventually(all_seen, _WAIT_S, f"connections along {expected}")
    busiest = max(made.of(engines), key=lambda pod: clients.workers.get(pod.name, 0))
    pods = [made.of("kvtier-index")[0], busiest, made.of("kvtier-store")[0]]
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


def _with_key(made: Site, key: str) -> Clients:
    assert made.authority is not None
    tls = ssl.create_default_context(cadata=made.authority.cert.decode())
    shown = {"authorization": f"Bearer {key}"}
    routers = made.of("kvtier-router")
    return Clients(routers, ("qwen3-8b",), streams=False, headers=shown, tls=tls)


def _below_limits(made: Site) -> None:
    for pod in made.pods:
        for name, process in pod.processes.items():
            if process.alive:
                limit = number_of(pod.container(name)["resources"]["limits"]["memory"])
                assert made.resident_bytes(pod, name) < limit, process.name
