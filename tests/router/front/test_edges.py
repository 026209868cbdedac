"""HTTPS, traces and settings: the edges of the router's front."""

import json
import ssl
import subprocess
import urllib.request
from pathlib import Path

from kvtier.security.certs import init, issue_into
from kvtier.security.roles import new_principal
from kvtier_router.config import RouterConfig
from tests.harness.processes import kvtier_command
from tests.harness.waiting import eventually
from tests.router.front.rig import Rig

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def certificate(folder: Path, days: int) -> tuple[Path, Path]:
    return issue_into(folder, new_principal("front", "router", (), ()), ["127.0.0.1"], days)


def test_https_shows_a_renewed_certificate_without_a_restart(rig: Rig) -> None:
    folder = rig.directory / "certs"
    init(folder)
    cert, key = certificate(folder, 10)
    rig.start_workers(1)
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def ends() -> str:
        url = f"https://127.0.0.1:{rig.port}/health"
        try:
            with urllib.request.urlopen(url, context=context, timeout=5) as answer:
                assert answer.status == 200
        except OSError:
            return ""
        return ssl.get_server_certificate(("127.0.0.1", rig.port), ca_certs=str(folder / "ca.crt"))

    rig.start_router(
        f"--listen-tls-cert-file={cert}", f"--listen-tls-key-file={key}", scheme="https"
    )
    eventually(lambda: ends() != "", 30, "it serves")
    before = ends()
    certificate(folder, 20)
    eventually(lambda: ends() not in ("", before), 30, "the new certificate is shown")
    cert.write_text("broken", encoding="utf-8")
    assert ends() not in ("", before)


def test_a_trace_of_the_client_goes_on_upstream(calm: Rig) -> None:
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}
    for given, sent in ((PARENT, PARENT), ("nonsense", None), ("00-" + "0" * 200, None)):
        answer = calm.call("POST", "/v1/completions", body, headers={"traceparent": given})
        assert answer.status == 200
        worker = calm.workers[int(answer.headers["x-kvtier-worker"][1:])]
        assert worker.last()["headers"].get("traceparent") == sent


def test_a_client_that_asks_for_tiers_is_heard_by_the_worker(calm: Rig) -> None:
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}
    for given, sent in (("1", "1"), ("yes", None)):
        answer = calm.call("POST", "/v1/completions", body, headers={"x-kvtier-explain": given})
        assert answer.status == 200
        worker = calm.workers[int(answer.headers["x-kvtier-worker"][1:])]
        assert worker.last()["headers"].get("x-kvtier-explain") == sent


def test_the_settings_are_printed_with_secrets_masked(rig: Rig) -> None:
    secret = rig.directory / "secret"
    secret.write_text("a cluster secret of thirty bytes", encoding="utf-8")
    argv = kvtier_command("router", f"--cluster-secret-file={secret}", "--print-config")
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
    assert "attempts_max" in shown
    assert "thirty" not in shown
    assert RouterConfig().workers == 1


def test_hostile_clients_cost_the_router_no_memory_that_stays(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--header-ms-max=60000", "--body-grace-ms=60000")
    router = rig.router
    assert router is not None
    ids = list(range(1, 250)) * 4200
    assert rig.complete(prompt=ids, max_tokens=1).status == 200
    before = router.usage().rss_bytes
    upload = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n{"
    slow = [rig.connect() for _ in range(200)]
    for number, client in enumerate(slow):
        client.sendall(upload if number % 2 else b"GET / HTTP/1.1\r\nx:")
    refused = [
        b'{"model":"mock","prompt":"a","x":[' + b"[]," * 3_000_000 + b"0]}",
        b'{"model":"mock","prompt":"\xff"}',
        json.dumps({"model": "mock", "prompt": ids, "max_tokens": -1}).encode(),
        json.dumps({"model": "m" * 1_000_000, "prompt": "a"}).encode(),
        json.dumps({"model": "mock", "prompt": "a", "cache_salt": "s" * 1_000_000}).encode(),
    ]
    for body in refused:
        assert rig.call("POST", "/v1/completions", body).status in (400, 404, 413)
    assert rig.complete(prompt=ids, max_tokens=1).status == 200
    assert router.usage().rss_bytes - before < 64 << 20
    for client in slow:
        client.close()
    eventually(lambda: rig.metric("kvtier_router_connections") <= 1, 30, "all are gone")
    assert rig.complete(max_tokens=1).status == 200


def test_no_header_of_a_client_or_a_worker_adds_one_to_an_answer(calm: Rig) -> None:
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}
    client = calm.connect()
    raw = json.dumps(body).encode()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"x-request-id: a%%0d%%0ax-evil: 1\r\nx-session-id: s\x00\r\ntraceparent: 00-x\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    answer = b""
    while piece := client.recv(65536):
        answer += piece
    client.close()
    assert b"evil" not in answer
    for value in ("text/plain\tx", "a" * 5000, "é"):
        for worker in calm.workers:
            worker.behave(status=429, headers={"retry-after": value, "x-evil": "1"})
        told = calm.call("POST", "/v1/completions", body)
        assert told.status == 429
        assert "x-evil" not in told.headers
