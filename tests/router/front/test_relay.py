"""What goes through the router: bodies, streams, usage, headers, and answers of its own."""

import json
from typing import Any

import pytest

from tests.router.front.rig import Rig, call, events, text_of


def last(rig: Rig) -> dict[str, Any]:
    """The request that a worker got last, of whichever worker."""
    everything = [item for worker in rig.workers for item in worker.recorded()]
    found = [item for item in everything if "-" in item["headers"].get("x-request-id", "")]
    return dict(max(found, key=lambda item: int(item["headers"]["x-request-id"].split("-")[1], 16)))


def test_a_chat_is_relayed_and_its_worker_is_named(calm: Rig) -> None:
    answer = calm.chat(max_tokens=3)
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"]
    assert answer.headers["x-kvtier-worker"] in ("w0", "w1")
    assert answer.headers["x-kvtier-matched-tokens"] == "gpu=16"
    assert answer.headers["x-request-id"]


def test_the_body_goes_upstream_as_it_came(calm: Rig) -> None:
    raw = b'{ "model":"mock",\n"prompt" : "h\\u00e9llo", "max_tokens":1, "x_unknown": [1.0, null] }'
    assert calm.call("POST", "/v1/completions", raw).status == 200
    body = last(calm)["body"]
    assert body == {"model": "mock", "prompt": "héllo", "max_tokens": 1, "x_unknown": [1.0, None]}


def test_the_clients_credentials_and_cookies_stay_here(calm: Rig) -> None:
    answer = calm.call(
        "POST",
        "/v1/completions",
        {"model": "mock", "prompt": "a", "max_tokens": 1},
        headers={"authorization": "Bearer sk-mine", "cookie": "a=b", "x-forwarded-for": "1.2.3.4"},
    )
    assert answer.status == 200
    sent = last(calm)["headers"]
    assert not {"authorization", "cookie", "x-forwarded-for"} & set(sent)


def test_a_stream_without_usage_has_none_of_what_the_router_asked_for(calm: Rig) -> None:
    answer = calm.chat(stream=True, max_tokens=4)
    body = last(calm)["body"]
    assert body["stream_options"] == {"include_usage": True}
    chunks = events(answer.body)
    assert chunks[-1] == "[DONE]"
    assert b"usage" not in answer.body
    assert len(text_of(chunks).split()) == 4


def test_usage_that_was_asked_for_arrives(calm: Rig) -> None:
    answer = calm.chat(stream=True, max_tokens=4, stream_options={"include_usage": True})
    usage = [chunk for chunk in events(answer.body)[:-1] if chunk.get("usage")]
    assert len(usage) == 1
    assert usage[0]["usage"]["completion_tokens"] == 4


def test_a_stream_is_the_workers_byte_for_byte(calm: Rig) -> None:
    body = {"model": "mock", "prompt": "a b", "stream": True, "max_tokens": 5}
    body["stream_options"] = {"include_usage": True}
    direct = call(calm.workers[0].port, "POST", "/v1/completions", body)
    for _ in range(4):
        relayed = calm.call("POST", "/v1/completions", body)
        if relayed.headers["x-kvtier-worker"] == "w0":
            assert relayed.body == direct.body
            return
    pytest.fail("the first worker was never chosen")


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, None),
        ("/v1/chat/completions", b'{"model": "mock"}', 400, "missing_required_parameter"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}', 400, None),
        ("/v1/completions", b'{"model": "mock", "prompt": "\xff"}', 400, None),
        ("/v1/completions", b'{"model": "nobody", "prompt": "a"}', 404, "model_not_found"),
        ("/v1/completions", {"model": "mock", "prompt": "a", "max_tokens": -1}, 400, None),
        ("/v1/completions", {"model": "mock", "prompt": "a", "n": 0}, 400, None),
        ("/v1/completions", {"model": "mock", "prompt": [1, -2]}, 400, None),
        ("/v1/completions", {"model": "mock", "prompt": [2**40]}, 400, None),
        ("/v1/completions", {"model": "a\r\nx-evil: 1", "prompt": "a"}, 404, "model_not_found"),
        ("/v1/completions", b"[" * 100_000, 413, None),
        ("/v1/completions", b'{"model": "mock", "prompt": NaN}', 400, None),
        ("/v1/embeddings", {"model": "mock"}, 400, "missing_required_parameter"),
    ],
)
def test_wrong_input_is_answered_in_the_shape_of_the_api(
    calm: Rig, path: str, body: object, status: int, code: str | None
) -> None:
    answer = calm.call("POST", path, body)
    assert answer.status == status
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert code is None or error["code"] == code


def test_a_prompt_of_a_million_tokens_is_relayed_or_refused_and_the_router_lives(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--prompt-tokens-max=100000")
    for prompt in ("a b " * 500_000, list(range(1, 400)) * 2600):
        answer = rig.complete(prompt=prompt, max_tokens=1)
        assert answer.status == 400
        assert answer.json["error"]["code"] == "context_length_exceeded"
    assert rig.complete(max_tokens=1).status == 200


def test_other_paths_of_a_known_model_are_relayed_by_load(calm: Rig) -> None:
    answer = calm.call("POST", "/v1/rerank?x=1", {"model": "mock", "query": "q"})
    assert answer.status == 200
    sent = last(calm)
    assert sent["path"] == "/v1/rerank?x=1"
    assert calm.call("POST", "/v1/rerank", {"model": "other"}).status == 404
    upload = b'--x\r\ncontent-disposition: form-data; name="f"\r\n\r\n\x00\xff\r\n--x--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=x"}
    assert calm.call("POST", "/v1/audio/transcriptions", upload, headers=kind).status == 200
    assert last(calm)["headers"]["content-type"] == kind["content-type"]


def test_responses_go_where_the_one_before_went(calm: Rig) -> None:
    for _ in range(4):
        first = calm.call("POST", "/v1/responses", {"model": "mock", "input": "a"})
        home = first.headers["x-kvtier-worker"]
        for _ in range(3):
            follow = {"model": "mock", "input": "b", "previous_response_id": first.json["id"]}
            assert calm.call("POST", "/v1/responses", follow).headers["x-kvtier-worker"] == home


def test_models_health_readiness_and_the_document_are_served(calm: Rig) -> None:
    models = calm.call("GET", "/v1/models").json
    assert [model["id"] for model in models["data"]] == ["mock"]
    assert calm.call("GET", "/v1/models/mock").json["id"] == "mock"
    assert calm.call("GET", "/v1/models/other").status == 404
    assert calm.call("GET", "/ready").status == 200
    assert calm.call("GET", "/openapi.json").json["openapi"].startswith("3.1")
    assert calm.call("GET", "/nothing").status == 404
    assert calm.call("GET", "/v1/chat/completions").status == 405
    assert b"kvtier_router_requests_total" in calm.call("GET", "/metrics").body


def test_the_admin_explains_a_route_without_sending_it(calm: Rig) -> None:
    before = sum(len(worker.recorded()) for worker in calm.workers)
    body = {"model": "mock", "messages": [{"role": "user", "content": "x"}]}
    shown = call(calm.admin_port, "POST", "/route", body).json
    assert shown["candidates"]
    assert shown["prompt_tokens"] > 0
    assert sum(len(worker.recorded()) for worker in calm.workers) == before
    assert call(calm.port, "POST", "/route", body).status == 404


def test_a_drained_worker_gets_nothing_until_it_is_back(rig: Rig) -> None:
    rig.start_workers(2)
    rig.start_router()
    assert call(rig.admin_port, "POST", "/workers/w0/drain").status == 200
    assert {rig.complete(max_tokens=1).headers["x-kvtier-worker"] for _ in range(4)} == {"w1"}
    assert call(rig.admin_port, "POST", "/workers/w1/drain").status == 200
    refused = rig.complete(max_tokens=1)
    assert refused.status == 503
    assert "drain" in refused.json["error"]["message"]
    assert rig.call("GET", "/ready").status == 503
    assert call(rig.admin_port, "POST", "/workers/w0/undrain").status == 200
    assert rig.complete(max_tokens=1).headers["x-kvtier-worker"] == "w0"
    assert call(rig.admin_port, "POST", "/workers/nobody/drain").status == 404


def test_no_prompt_text_reaches_the_log(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router()
    assert rig.complete(prompt="xyzzy plugh", max_tokens=1).status == 200
    assert rig.complete(prompt="xyzzy plugh", max_tokens=-1).status == 400
    assert rig.router is not None
    rig.router.terminate()
    assert rig.router.wait(40) == 0
    log = rig.router.log_text()
    assert log.count("event=request") == 2
    assert "xyzzy" not in log


def test_alien_request_ids_are_replaced_and_good_ones_kept(calm: Rig) -> None:
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}
    kept = calm.call("POST", "/v1/completions", body, headers={"x-request-id": "abc-1"})
    assert kept.headers["x-request-id"] == "abc-1"
    long = calm.call("POST", "/v1/completions", body, headers={"x-request-id": "a b" * 90})
    assert " " not in long.headers["x-request-id"]
    assert json.loads(long.body)


@pytest.mark.parametrize(("given", "sent"), [("1", "1"), ("yes\t1", None), (None, None)])
def test_a_wish_to_have_usage_explained_goes_upstream(
    calm: Rig, given: str | None, sent: str | None
) -> None:
    headers = {} if given is None else {"x-kvtier-explain": given}
    body = {"model": "mock", "prompt": "a", "max_tokens": 1}
    assert calm.call("POST", "/v1/completions", body, headers=headers).status == 200
    assert last(calm)["headers"].get("x-kvtier-explain") == sent


def test_the_longest_prompt_of_a_list_counts(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router("--prompt-tokens-max=20")
    assert rig.complete(prompt=[[1] * 20, [2] * 20], max_tokens=1).status == 200
    for prompt in ([[1], [2] * 21], ["a", "b c " * 21]):
        refused = rig.complete(prompt=prompt, max_tokens=1)
        assert refused.status == 400
        assert refused.json["error"]["code"] == "context_length_exceeded"
