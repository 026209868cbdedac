"""What no client library would send, and clients that go away: the process lives, and bounded."""

import asyncio
import itertools
import json
from collections.abc import Iterable

import pytest

from kvtier.errors import BackendError, ConfigError, DeadlineError
from kvtier.limits import REQUEST_BYTES_MAX
from kvtier_services.worker.http.settings import EndpointSettings
from kvtier_services.worker.requests import (
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    TokenDelta,
)
from tests.support.raw_http import RawConnection, ask, post
from tests.support.scripted_engine import EOS, MODEL, ScriptedEngine, Served, Step, says, served

COMPLETIONS = "/v1/completions"
GOOD = json.dumps({"model": MODEL, "prompt": "p"}).encode()
STREAM = json.dumps({"model": MODEL, "prompt": "p", "stream": True}).encode()


async def still_works(it: Served) -> None:
    answer = await ask(it.port, post(COMPLETIONS, GOOD))
    assert answer.status == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"null", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b"\xff\xfe", 400),
        (b'{"model": "\xc3\x28"}', 400),
        (b'{"model": "\\ud800", "prompt": "p"}', 400),
        (b'{"model": "scripted", "prompt": "\\udc00"}', 400),
        (b'{"model": "scripted", "prompt": [1, NaN]}', 400),
        (b'{"model": "scripted", "prompt": "p", "temperature": NaN}', 400),
        (b'{"model": "scripted", "prompt": "p", "temperature": Infinity}', 400),
        (b'{"model": "scripted", "prompt": "p", "temperature": -1e999}', 400),
        (b'{"model": "scripted", "prompt": "p", "max_tokens": -1}', 400),
        (b'{"model": "scripted", "prompt": "p", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "scripted", "prompt": ' + b"[" * 100_000 + b"}", 413),
        (b'{"model": "scripted", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}", 413),
        (b'{"model": "gpt\\r\\nx: y", "prompt": "p"}', 404),
        (b'{"model": "scripted", "prompt": "p"} trailing', 400),
        (b'{"model": "scripted", "prompt": ["\xf0\x9f\x92"]}', 400),
    ],
)  # fmt: skip
async def test_bad_bodies_get_openais_error_shape_and_the_next_request_an_answer(
    body: bytes, status: int
) -> None:
    async with served(ScriptedEngine()) as it:
        answer = await ask(it.port, post(COMPLETIONS, body))
        assert answer.status == status
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert answer.error["type"] == "invalid_request_error"
        assert it.engine.generations == []
        await still_works(it)


@pytest.mark.parametrize(
    ("message", "status"),
    [(7, 400), ({"role": 7}, 400), ({}, 400), ([], 400)],
)
async def test_chat_messages_that_the_template_cannot_take_are_the_callers_fault(
    message: object, status: int
) -> None:
    body = json.dumps({"model": MODEL, "messages": [message]}).encode()
    async with served(ScriptedEngine()) as it:
        answer = await ask(it.port, post("/v1/chat/completions", body))
        assert answer.status == status
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["param"] == "messages"


async def test_a_body_that_says_it_is_too_long_is_refused_unread() -> None:
    settings = EndpointSettings(body_bytes_max=1000)
    async with served(ScriptedEngine(), settings) as it:
        request = post(COMPLETIONS, b"{", content_length="1001")
        answer = await ask(it.port, request)
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        await still_works(it)


async def test_a_chunked_body_is_refused_when_it_grows_too_long() -> None:
    settings = EndpointSettings(body_bytes_max=1000)
    async with served(ScriptedEngine(), settings) as it:
        chunk = b"200\r\n" + b" " * 0x200 + b"\r\n"
        request = post(COMPLETIONS, b"", content_length="", transfer_encoding="chunked")
        answer = await ask(it.port, request + chunk * 3 + b"0\r\n\r\n")
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        await still_works(it)


async def test_bodies_together_have_a_ceiling() -> None:
    settings = EndpointSettings(body_bytes_max=1000, bodies_bytes_max=1500)
    async with served(ScriptedEngine(), settings) as it:
        slow = await RawConnection.open(it.port)
        await slow.send(post(COMPLETIONS, GOOD[:1], content_length="1000"))
        answer = await ask(it.port, post(COMPLETIONS, GOOD.ljust(900)))
        while answer.status == 200:  # until the server has seen the head of the slow one
            answer = await ask(it.port, post(COMPLETIONS, GOOD.ljust(900)))
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        await slow.send(GOOD[1:].ljust(999))
        assert (await slow.answer()).status == 200
        await slow.close()
        assert (await ask(it.port, post(COMPLETIONS, GOOD.ljust(900)))).status == 200


async def test_a_body_that_does_not_come_is_given_up() -> None:
    async with served(ScriptedEngine(), EndpointSettings(body_ms_max=30)) as it:
        answer = await ask(it.port, post(COMPLETIONS, GOOD[:5], content_length="100"))
        assert answer.status == 408
        assert answer.error["type"] == "invalid_request_error"
        await still_works(it)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content_type", "text/plain"),
        ("content_type", "application/x-www-form-urlencoded"),
        ("content_type", ""),
        ("content_encoding", "gzip"),
    ],
)
async def test_only_plain_json_is_taken(name: str, value: str) -> None:
    async with served(ScriptedEngine()) as it:
        answer = await ask(it.port, post(COMPLETIONS, GOOD, **{name: value}))
        assert answer.status == 415
        assert answer.error["type"] == "invalid_request_error"


async def test_paths_and_methods_that_there_are_not_get_the_error_shape() -> None:
    async with served(ScriptedEngine()) as it:
        assert (await ask(it.port, post("/v1/embeddings", GOOD))).status == 404
        get = b"GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n"
        answer = await ask(it.port, get)
        assert answer.status == 405
        assert "POST" in str(answer.error["message"])
        broken = await ask(it.port, b"GARBAGE\r\n\r\n")
        assert broken.status == 400
        await still_works(it)


async def test_a_request_id_is_taken_over_if_it_is_one_and_made_if_not() -> None:
    async with served(ScriptedEngine()) as it:
        good = await ask(it.port, post(COMPLETIONS, GOOD, x_request_id="abc-1"))
        assert good.headers["x-request-id"] == "abc-1"
        bad = await ask(it.port, post(COMPLETIONS, STREAM, x_request_id="a b\x80c"))
        assert bad.headers["x-request-id"] not in ("", "a b\x80c")
        refused = await ask(it.port, post(COMPLETIONS, b"", x_request_id="abc-2"))
        assert refused.headers["x-request-id"] == "abc-2"


# Streams as bytes


async def test_a_stream_is_events_that_end_in_done() -> None:
    async with served(ScriptedEngine(lambda request: says("ab"))) as it:
        answer = await ask(it.port, post(COMPLETIONS, STREAM))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    *events, done, end = answer.body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") for event in events)
    assert all(b"\n" not in event for event in events)


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (BackendError("lost the device"), 503, "service_unavailable_error"),
        (DeadlineError("too slow"), 504, "timeout_error"),
        (RuntimeError("a bug with a secret"), 500, "server_error"),
    ],
)
async def test_a_failed_engine_ends_a_stream_with_an_error_event_and_never_with_done(
    failure: Exception, status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    scripts: list[list[Step]] = [[*says("par", finish=None), failure], [failure]]
    engine = ScriptedEngine(lambda request: scripts.pop(0))
    async with served(engine) as it:
        answer = await ask(it.port, post(COMPLETIONS, STREAM))
        assert answer.status == 200
        assert b"[DONE]" not in answer.body
        last = answer.body.removesuffix(b"\n\n").rpartition(b"\n\n")[2]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["type"] == kind
        assert b"secret" not in answer.body
        first = await ask(it.port, post(COMPLETIONS, STREAM))
        assert (first.status, first.error["type"]) == (status, kind)
        assert b"secret" not in first.body
    assert all(generation.cancelled.is_set() for generation in engine.generations)


async def test_a_generation_that_ends_without_a_reason_is_a_failure() -> None:
    engine = ScriptedEngine(lambda request: says("par", finish=None))
    async with served(engine) as it:
        assert (await ask(it.port, post(COMPLETIONS, GOOD))).status == 503
        answer = await ask(it.port, post(COMPLETIONS, STREAM))
        assert b"error" in answer.body
        assert b"[DONE]" not in answer.body


@pytest.mark.parametrize("body", [GOOD, STREAM])
async def test_tokens_that_are_no_characters_come_out_as_replacements_in_valid_json(
    body: bytes,
) -> None:
    tokens = [0x61, 0xFF, 0x62, 0xF0, 0x9F, EOS]
    steps: list[Step] = [TokenDelta(tuple(map(GeneratedToken, tokens)), FinishReason.STOP)]
    async with served(ScriptedEngine(lambda request: steps)) as it:
        answer = await ask(it.port, post(COMPLETIONS, body))
    assert answer.status == 200
    events = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
    said = [json.loads(event) for event in events if event != b"[DONE]"]
    text = "".join(choice["text"] for each in said for choice in each["choices"])
    assert text == "a\ufffdb\ufffd"


# Clients that go away, and time that runs out


def endless(request: GenerationRequest) -> Iterable[Step]:
    forever = asyncio.Event()
    return itertools.chain(says("abc", finish=None), [forever])


async def test_a_client_that_goes_in_mid_stream_cancels_its_generation() -> None:
    async with served(ScriptedEngine(endless)) as it:
        connection = await RawConnection.open(it.port)
        await connection.send(post(COMPLETIONS, STREAM))
        await connection.until(b'"text":"c"')
        (generation,) = it.engine.generations
        assert not generation.cancelled.is_set()
        connection.reset()
        async with asyncio.timeout(20):
            await generation.cancelled.wait()
        await still_answers_models(it)


@pytest.mark.parametrize("body", [GOOD, STREAM])
async def test_a_client_that_goes_before_the_first_token_cancels_its_generation(
    body: bytes,
) -> None:
    submitted = asyncio.Event()

    def script(request: GenerationRequest) -> Iterable[Step]:
        submitted.set()
        yield asyncio.Event()

    async with served(ScriptedEngine(script)) as it:
        connection = await RawConnection.open(it.port)
        await connection.send(post(COMPLETIONS, body))
        async with asyncio.timeout(20):
            await submitted.wait()
        await connection.close()
        async with asyncio.timeout(20):
            await it.engine.generations[0].cancelled.wait()


async def test_every_choice_of_a_client_that_goes_is_cancelled() -> None:
    body = json.dumps({"model": MODEL, "prompt": "p", "stream": True, "n": 4}).encode()
    async with served(ScriptedEngine(endless)) as it:
        connection = await RawConnection.open(it.port)
        await connection.send(post(COMPLETIONS, body))
        await connection.until(b'"text":"c"')
        connection.reset()
        async with asyncio.timeout(20):
            for generation in it.engine.generations:
                await generation.cancelled.wait()
        assert len(it.engine.generations) == 4


async def test_a_client_that_does_not_read_is_given_up() -> None:
    flood = says("x" * 200, finish=None)

    def script(request: GenerationRequest) -> Iterable[Step]:
        return itertools.cycle(flood)

    async with served(ScriptedEngine(script), EndpointSettings(write_ms_max=50)) as it:
        connection = await RawConnection.open(it.port, read_bytes_max=1024)
        await connection.send(post(COMPLETIONS, STREAM))
        await connection.until(b"\r\n\r\n")
        async with asyncio.timeout(30):
            await it.engine.generations[0].cancelled.wait()
        connection.reset()


async def test_a_client_that_goes_while_it_sends_starts_nothing() -> None:
    async with served(ScriptedEngine()) as it:
        connection = await RawConnection.open(it.port)
        await connection.send(post(COMPLETIONS, GOOD[:5], content_length="100"))
        connection.reset()
        await still_works(it)
        assert len(it.engine.generations) == 1


async def test_an_answer_that_takes_too_long_is_ended() -> None:
    async with served(ScriptedEngine(endless), EndpointSettings(generation_ms_max=100)) as it:
        whole = await ask(it.port, post(COMPLETIONS, GOOD))
        assert (whole.status, whole.error["code"]) == (504, "timeout")
        streamed = await ask(it.port, post(COMPLETIONS, STREAM))
        assert b"timeout" in streamed.body
        assert b"[DONE]" not in streamed.body
        assert all(generation.cancelled.is_set() for generation in it.engine.generations)


async def test_requests_beyond_the_ceiling_are_turned_away_while_probes_pass() -> None:
    async with served(ScriptedEngine(endless), EndpointSettings(requests_max=1)) as it:
        connection = await RawConnection.open(it.port)
        await connection.send(post(COMPLETIONS, STREAM))
        await connection.until(b'"text":"a"')
        refused = await ask(it.port, post(COMPLETIONS, GOOD))
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        live = await ask(it.port, b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert live.status == 200
        connection.reset()
        await it.engine.generations[0].cancelled.wait()


async def still_answers_models(it: Served) -> None:
    answer = await ask(it.port, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer.status == 200


async def test_long_bodies_are_prepared_beside_the_event_loop_with_the_same_answer() -> None:
    text = "x" * 300
    padded = json.dumps({"model": MODEL, "prompt": text}).encode() + b" " * 100_000
    async with served(ScriptedEngine(lambda request: says("ok", FinishReason.LENGTH))) as it:
        answer = await ask(it.port, post(COMPLETIONS, padded))
        assert answer.status == 200
        assert len(it.engine.request.prompt_tokens) == 301


def test_settings_without_a_ceiling_are_refused() -> None:
    with pytest.raises(ConfigError):
        EndpointSettings(body_bytes_max=REQUEST_BYTES_MAX + 1)
    with pytest.raises(ConfigError):
        EndpointSettings(bodies_bytes_max=1)
    with pytest.raises(ConfigError):
        EndpointSettings(generation_ms_max=0)
