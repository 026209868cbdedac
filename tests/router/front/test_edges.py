"""HTTPS, traces and settings: the edges of the router's front."""

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
    eventually(lambda: ends() != "", 10.0, "it serves")
    before = ends()
    certificate(folder, 20)
    eventually(lambda: ends() not in ("", before), 10.0, "the new certificate is shown")
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
