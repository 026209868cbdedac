"""Workers that die before, in and after the first byte, and clients that misbehave."""

import json
import select
import socket
import threading
from http.client import HTTPConnection

import pytest

from tests.harness.waiting import eventually
from tests.router.front.fake_brain import BUG
from tests.router.front.rig import Rig, call, events, text_of

LONG = {"stream": True, "max_tokens": 12, "stream_options": {"include_usage": True}}


def whole_text(rig: Rig, path: str) -> str:
    """What a worker says when nothing goes wrong."""
    answer = rig.chat(max_tokens=12) if "chat" in path else rig.complete(max_tokens=12)
    choice = answer.json["choices"][0]
    text: str = choice["message"]["content"] if "chat" in path else choice["text"]
    return text


def test_a_worker_that_is_gone_costs_nobody_an_answer(rig: Rig) -> None:
    workers = rig.start_workers(2)
    rig.start_router(brain="real")
    workers[0].process.kill()
    assert {rig.complete(max_tokens=1).status for _ in range(8)} == {200}


@pytest.mark.parametrize("when", ["before", "first"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_is_lost_before_the_first_byte_is_replaced(
    calm: Rig, when: str, stream: bool
) -> None:
    calm.workers[0].behave(cut=when)
    answers = [calm.chat(max_tokens=4, stream=stream) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    assert {len(text_of(events(answer.body)).split()) for answer in answers} <= {4, 0}


def test_processes_that_are_killed_in_and_before_a_stream_are_replaced(rig: Rig) -> None:
    workers = rig.start_workers(3)
    rig.start_router()
    expected = whole_text(rig, "chat")
    workers[0].behave(die=4)
    workers[1].behave(die="before")
    answers = [rig.chat(**LONG) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert {text_of(events(answer.body)) for answer in answers} == {expected}
    assert workers[0].process.wait(40) == 3
    assert workers[1].process.wait(40) == 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("after", [0, 5, 11, "done"])
def test_a_stream_goes_on_elsewhere_with_the_same_text(
    calm: Rig, path: str, after: int | str
) -> None:
    expected = whole_text(calm, path)
    ask = calm.chat if "chat" in path else calm.complete
    calm.workers[0].behave(cut=after)
    resumed = calm.metric("kvtier_router_resumptions_total")
    answers = [ask(**LONG) for _ in range(2)]  # one of them meets it
    nothing_sent = after == 0 and "chat" not in path
    assert calm.metric("kvtier_router_resumptions_total") == resumed + (0 if nothing_sent else 1)
    for answer in answers:
        chunks = events(answer.body)
        assert chunks.pop() == "[DONE]"
        assert text_of(chunks) == expected
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert len({chunk["object"] for chunk in chunks}) == 1
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        if "chat" in path:
            assert [c["delta"].get("role") for c in choices].count("assistant") == 1
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        direct = call(calm.workers[0].port, "POST", path, _body(path)).json["usage"]
        assert usage["prompt_tokens"] == direct["prompt_tokens"]
        assert usage["completion_tokens"] == 12


def _body(path: str) -> dict[str, object]:
    if "chat" in path:
        messages = [{"role": "user", "content": "say it"}]
        return {"model": "mock", "messages": messages, "max_tokens": 12}
    return {"model": "mock", "prompt": "the quick brown fox", "max_tokens": 12}


def test_a_stream_without_a_ceiling_goes_on_within_the_workers_context(calm: Rig) -> None:
    before = [len(worker.recorded()) for worker in calm.workers]
    body = {"model": "mock", "messages": [{"role": "user", "content": "a"}], "stream": True}
    calm.workers[0].behave(cut=3)
    for _ in range(2):
        assert calm.call("POST", "/v1/chat/completions", body).status == 200
    new = [
        request
        for worker, count in zip(calm.workers, before, strict=True)
        for request in worker.recorded()[count:]
    ]
    (sent,) = [request["body"] for request in new if request["path"] == "/v1/completions"]
    assert sent["max_tokens"] == 4096 - len(sent["prompt"])


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"logprobs": True}],
)
def test_what_cannot_go_on_ends_with_an_error_event_and_no_done(
    calm: Rig, more: dict[str, object]
) -> None:
    for worker in calm.workers:
        worker.behave(cut=5)
    answer = calm.chat(**LONG, **more)
    assert answer.status == 200
    chunks = events(answer.body)
    assert chunks[-1]["error"]["code"] == "upstream_failed"
    assert "[DONE]" not in chunks
    assert b'"half' not in answer.body


def test_all_workers_down_is_a_503_with_a_reason(rig: Rig) -> None:
    workers = rig.start_workers(2)
    rig.start_router(brain="real")
    for worker in workers:
        worker.process.kill()
    for _ in range(12):
        answer = rig.complete(max_tokens=1)
        assert answer.status == 503
        assert answer.json["error"]["message"]
        assert answer.headers["retry-after"]


def test_an_overloaded_worker_is_passed_over_and_the_last_word_is_relayed(calm: Rig) -> None:
    workers = calm.workers
    workers[0].behave(status=429, headers={"retry-after": "7"})
    assert {calm.complete(max_tokens=1).status for _ in range(4)} == {200}
    workers[1].behave(status=429, headers={"retry-after": "7"})
    answer = calm.complete(max_tokens=1)
    assert answer.status == 429
    assert answer.headers["retry-after"] == "7"


def test_a_workers_own_refusal_is_relayed_at_once(calm: Rig) -> None:
    workers = calm.workers
    for worker in workers:
        worker.behave(status=400, reply={"error": {"message": "no such tool", "type": "x"}})
    before = sum(len(worker.recorded()) for worker in workers)
    answer = calm.complete(max_tokens=1)
    assert answer.status == 400
    assert answer.json["error"]["message"] == "no such tool"
    assert sum(len(worker.recorded()) for worker in workers) == before + 1


def test_retries_stay_within_their_budget(rig: Rig) -> None:
    workers = rig.start_workers(2)
    rig.start_router("--retry-burst=2", "--retry-ratio=0")
    for worker in workers:
        worker.behave(status=500)
    for _ in range(20):
        assert rig.complete(max_tokens=1).status == 500
    assert sum(len(worker.recorded()) for worker in workers) <= 20 + 2 + 20  # floor: 0.5 a second
    assert rig.metric("kvtier_router_retries_total") >= 20


def test_a_client_that_leaves_ends_its_generation_at_once(rig: Rig) -> None:
    (worker,) = rig.start_workers(1, token_ms=20.0)
    rig.start_router()
    body = json.dumps({"model": "mock", "prompt": "a", "stream": True, "max_tokens": 3000})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    client = rig.connect()
    client.sendall(head.encode() + body.encode())
    assert client.recv(1000).startswith(b"HTTP/1.1 200")
    assert worker.state()["open_streams"] == 1
    client.close()
    eventually(lambda: worker.state()["open_streams"] == 0, 30, "the worker is told")
    assert worker.state()["cancelled_at"]  # a minute before it would have ended by itself
    assert rig.router is not None
    rig.router.terminate()
    assert rig.router.wait(40) == 0
    line = next(line for line in rig.router.log_text().splitlines() if "event=request" in line)
    assert {"status=200", "error=left"} <= set(line.split())


def request_line(rig: Rig, request_id: str) -> set[str]:
    """The fields of a request's line in the log, waited for."""
    router = rig.router
    assert router is not None
    mark = f" id={request_id} "
    eventually(lambda: mark in router.log_text(), 30, "its line is written")
    return set(next(line for line in router.log_text().splitlines() if mark in line).split())


def test_a_client_that_leaves_with_its_whole_answer_had_one(calm: Rig) -> None:
    for worker in calm.workers:
        worker.behave(linger=30.0)
    body = json.dumps({"model": "mock", "prompt": "a", "stream": True, "max_tokens": 3})
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: whole\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    client = calm.connect()
    client.sendall(head.encode() + body.encode())
    heard = b""
    while b"[DONE]" not in heard:
        heard += client.recv(65536)
    client.close()
    assert {"status=200", 'error=""'} <= request_line(calm, "whole")


def test_a_stream_whose_worker_is_lost_after_done_is_whole(calm: Rig) -> None:
    calm.workers[0].behave(cut="end")
    lost = calm.metric("kvtier_router_upstream_losses_total")
    answers = [calm.chat(**LONG) for _ in range(2)]
    for answer in answers:
        chunks = events(answer.body)
        assert chunks.count("[DONE]") == 1
        assert chunks[-1] == "[DONE]"
        assert len([chunk for chunk in chunks[:-1] if chunk.get("usage")]) == 1
    assert calm.metric("kvtier_router_upstream_losses_total") == lost


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_answered_counted_and_logged_as_one(rig: Rig, stream: bool) -> None:
    rig.start_workers(1)
    rig.start_router()
    answer = rig.complete(model=BUG, max_tokens=1, stream=stream)
    assert answer.status == 500
    assert answer.json["error"]["type"] == "server_error"
    assert rig.metric('kvtier_router_requests_total{api="completions",status="5xx"}') == 1
    assert rig.complete(max_tokens=1).status == 200
    assert rig.router is not None
    rig.router.terminate()
    assert rig.router.wait(40) == 0
    line = next(line for line in rig.router.log_text().splitlines() if "event=request" in line)
    assert {"status=500", "error=RuntimeError"} <= set(line.split())


def test_a_client_that_leaves_before_the_first_byte_ends_its_generation(calm: Rig) -> None:
    for worker in calm.workers:
        worker.behave(hang=True)
    body = b'{"model": "mock", "prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    client = calm.connect()
    client.sendall(head + body)
    eventually(lambda: calm.metric("kvtier_router_running_requests") == 1, 30, "it runs")
    client.close()
    eventually(lambda: calm.metric("kvtier_router_running_requests") == 0, 30, "it is given up")


# Clients that attack


def test_a_header_that_drips_is_cut_while_others_are_served(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--header-ms-max=2000")
    slow = [rig.connect() for _ in range(20)]
    for client in slow:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost:")
    assert rig.complete(max_tokens=1).status == 200
    for client in slow:
        assert client.recv(1000).startswith(b"HTTP/1.1 408")
        client.close()


def test_a_body_that_stalls_is_cut(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--body-grace-ms=300")
    client = rig.connect()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{")
    answer = client.recv(4000)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"error"' in answer
    client.close()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 400),
        (b"GET / HTTP/1.1\r\nhost : x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\ncontent-length: 4\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"GET http://evil/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"CONNECT evil:80 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nauthorization: a\r\nauthorization: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: a\nb\r\n\r\n", 400),
    ],
)
def test_bad_http_is_refused_in_words_and_the_router_lives(
    calm: Rig, raw: bytes, status: int
) -> None:
    client = calm.connect()
    client.sendall(raw)
    answer = b""
    while piece := client.recv(65536):
        answer += piece
    client.close()
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer[:200]
    assert calm.call("GET", "/health").status == 200


def test_a_body_beyond_the_ceiling_is_refused_without_being_kept(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--body-bytes-max=100000")
    assert rig.router is not None
    before = rig.router.usage().rss_bytes
    client = rig.connect()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    try:
        for _ in range(200):
            client.sendall(chunk)
    except OSError:
        pass
    client.close()
    assert rig.router.usage().rss_bytes - before < 16 << 20
    assert rig.complete(max_tokens=1).status == 200


def test_uploads_of_all_clients_together_have_a_ceiling(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--bodies-bytes-max=1000000")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 400000\r\n\r\n"
    held = [rig.connect() for _ in range(3)]
    for client in held:
        client.sendall(head + b'{"model":"mock","prompt":"' + b"x" * 360_000)
    (told, *_), _, _ = select.select(held, [], [], 20)
    answer = told.recv(4000)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after" in answer
    for client in held:
        client.close()
    for _ in range(4):  # nothing stays counted
        assert rig.complete(prompt="x" * 600_000, max_tokens=1).status in (200, 400)
    assert rig.metric('kvtier_router_refused_total{reason="bodies_bytes"}') == 1


def test_connections_beyond_the_ceiling_are_told_so(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--client-connections-max=4")
    held = [rig.connect() for _ in range(4)]
    eventually(lambda: rig.metric("kvtier_router_connections") == 4, 30, "all are counted")
    extra = rig.connect()
    assert extra.recv(1000).startswith(b"HTTP/1.1 429")
    for client in (*held, extra):
        client.close()
    eventually(lambda: rig.metric("kvtier_router_connections") == 0, 30, "all are gone")
    assert rig.complete(max_tokens=1).status == 200


def test_a_reader_that_stalls_holds_the_worker_back_and_is_cut(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--reader-stall-ms-max=500")
    rig.workers[0].behave(scripted=["x" * 100_000] * 400)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", rig.port))
    body = b'{"model": "mock", "prompt": "a", "stream": true}'
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    eventually(lambda: rig.metric("kvtier_router_refused_total") == 1, 30, "it is cut off")
    assert rig.router is not None
    assert rig.router.usage().rss_bytes < 300 << 20
    client.close()


def test_pipelined_requests_are_answered_in_order(calm: Rig) -> None:
    client = calm.connect()
    client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
    client.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = b""
    while piece := client.recv(65536):
        answer += piece
    client.close()
    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b'"ok"') < answer.index(b'"ready"') < answer.index(b'"list"')


def test_what_was_asked_before_nonsense_is_answered_before_it(calm: Rig) -> None:
    client = calm.connect()
    client.sendall(
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /ready HTTP/1.1\r\nhost: x\r\n\r\n\x00\x01"
    )
    answer = b""
    while piece := client.recv(65536):
        answer += piece
    client.close()
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'"ok"') < answer.index(b'"ready"') < answer.index(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1 ") == 3


# Stopping


def test_a_graceful_stop_loses_no_request(rig: Rig) -> None:
    rig.start_workers(1, token_ms=10.0)
    rig.start_router("--drain-delay-ms=2000")
    assert rig.router is not None
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(rig.chat(max_tokens=200, stream=True).status)

    clients = [threading.Thread(target=ask) for _ in range(8)]
    kept = HTTPConnection("127.0.0.1", rig.port, timeout=20)
    kept.request("GET", "/health")
    kept.getresponse().read()
    for client in clients:
        client.start()
    eventually(lambda: rig.metric("kvtier_router_running_requests") == 8, 30, "all run")
    rig.router.terminate()
    eventually(lambda: rig.call("GET", "/ready").status == 503, 30, "it says so")
    kept.request("GET", "/ready")
    assert kept.getresponse().status == 503
    for client in clients:
        client.join(20)
    assert statuses == [200] * 8
    assert rig.router.wait(40) == 0
    kept.close()


def test_several_processes_share_the_port_and_one_that_dies_is_replaced(rig: Rig) -> None:
    import psutil

    rig.start_workers(1)
    rig.start_router("--workers=2")
    assert rig.router is not None
    parent = psutil.Process(rig.router.pid)
    eventually(lambda: len(parent.children()) == 2, 30, "both run")
    first = parent.children()[0]
    first.kill()
    eventually(
        lambda: (
            first.pid not in {child.pid for child in parent.children()}
            and len(parent.children()) == 2
        ),
        30,
        "a new one runs",
    )

    def served() -> bool:
        try:
            return rig.complete(max_tokens=1).status == 200
        except OSError:
            return False

    eventually(served, 30, "requests are served")
    rig.router.terminate()
    assert rig.router.wait(40) == 0
