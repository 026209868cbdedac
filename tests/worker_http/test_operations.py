"""Health that does real work, metrics, and who may call."""

import asyncio
from pathlib import Path

import pytest
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError

from kvtier.errors import UnavailableError
from kvtier.security.clock import Clock
from kvtier.security.roles import new_principal
from kvtier.security.tokens import TokenBook, TokenEntry, format_entry, hashed, mint
from kvtier_services.worker.http.access import admit_by, bearer
from kvtier_services.worker.http.app import Surroundings
from kvtier_services.worker.http.health import HealthGate
from kvtier_services.worker.http.settings import EndpointSettings
from kvtier_services.worker.requests import CachedTokens
from tests.harness.waiting import eventually_async
from tests.support.raw_http import ask, post
from tests.support.scripted_engine import MODEL, ScriptedEngine, says, served


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


async def test_health_asks_the_engine_for_a_token() -> None:
    engine = ScriptedEngine()
    async with served(engine, EndpointSettings(check_fresh_ms=0)) as it:
        answer = await ask(it.port, get("/health"))
        assert (answer.status, answer.json) == (200, {"status": "ok"})
        engine.failure = UnavailableError("the device at 10.0.0.7 is gone")
        failing = await ask(it.port, get("/health"))
        assert failing.status == 503
        assert failing.json == {"status": "failing", "reason": "UnavailableError"}
        engine.failure = None
        assert (await ask(it.port, get("/health"))).status == 200
        assert engine.checks_count == 3


async def test_probes_at_once_share_one_token_and_its_verdict_stays_fresh() -> None:
    engine, now = ScriptedEngine(), 100.0
    gate = HealthGate(engine, EndpointSettings(check_fresh_ms=1000), lambda: now)
    await asyncio.gather(*(gate.check() for _ in range(50)))
    assert engine.checks_count == 1
    now += 0.9
    await gate.check()
    assert engine.checks_count == 1
    now += 0.2
    engine.failure = UnavailableError("gone")
    results = await asyncio.gather(*(gate.check() for _ in range(5)), return_exceptions=True)
    assert engine.checks_count == 2
    assert all(isinstance(result, UnavailableError) for result in results)


async def test_an_engine_that_hangs_is_not_healthy() -> None:
    class Hanging(ScriptedEngine):
        async def check(self) -> None:
            await asyncio.Event().wait()

    async with served(Hanging(), EndpointSettings(check_ms_max=20)) as it:
        answer = await ask(it.port, get("/health"))
        assert (answer.status, answer.json["reason"]) == (503, "DeadlineError")
        assert (await ask(it.port, get("/live"))).status == 200


async def test_the_metrics_page_counts_requests_and_tokens_by_tier() -> None:
    cached = CachedTokens(gpu=16, nvme=4)
    async with served(ScriptedEngine(lambda request: says("abc", cached=cached))) as it:
        await it.client.completions.create(model=MODEL, prompt="hello")
        await ask(it.port, post("/v1/completions", b"{"))
        page = (await ask(it.port, get("/metrics"))).body.decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    requests = "kvtier_endpoint_requests_total"
    assert lines[f'{requests}{{call="completions",outcome="ok"}}'] == "1.0"
    assert lines[f'{requests}{{call="completions",outcome="refused"}}'] == "1.0"
    assert lines["kvtier_endpoint_prompt_tokens_total"] == "6.0"
    assert lines["kvtier_endpoint_completion_tokens_total"] == "4.0"
    assert lines['kvtier_endpoint_cached_tokens_total{tier="gpu"}'] == "16.0"
    assert lines['kvtier_endpoint_cached_tokens_total{tier="nvme"}'] == "4.0"
    assert lines['kvtier_endpoint_cached_tokens_total{tier="redis"}'] == "0.0"
    assert lines["kvtier_endpoint_first_token_seconds_count"] == "1.0"


async def test_a_client_that_goes_is_counted_as_such() -> None:
    wanted = 'kvtier_endpoint_requests_total{call="completions",outcome="disconnected"} 1.0'
    async with served(ScriptedEngine(lambda request: [*says("a", None), asyncio.Event()])) as it:
        stream = await it.client.completions.create(model=MODEL, prompt="p", stream=True)
        await stream.close()

        async def counted() -> bool:
            return wanted in (await ask(it.port, get("/metrics"))).body.decode()

        await eventually_async(counted, 30, "the count of clients that went")
        assert it.engine.generations[0].cancelled.is_set()


def token_book(path: Path, *entries: tuple[str, str]) -> TokenBook:
    clock = Clock(wall=lambda: 1000.0)
    lines = [
        format_entry(
            TokenEntry(new_principal(f"p{at}", role, (), ()), hashed(token), 1e9 if at else 2e9)
        )
        for at, (token, role) in enumerate(entries)
    ]
    path.write_text("".join(lines))
    path.chmod(0o600)
    return TokenBook(path, clock)


async def test_only_tokens_of_routers_and_operators_are_admitted(tmp_path: Path) -> None:
    router, worker = mint(), mint()
    book = token_book(tmp_path / "tokens.toml", (router, "router"), (worker, "worker"))
    surroundings = Surroundings(admit=admit_by(book))
    async with served(ScriptedEngine(), None, surroundings) as it:
        base = f"{it.url}/v1"

        async def call(api_key: str) -> str | None:
            async with AsyncOpenAI(base_url=base, api_key=api_key, max_retries=0) as client:
                answer = await client.completions.create(model=MODEL, prompt="p")
                return answer.choices[0].text

        assert await call(router) == "ok"
        with pytest.raises(AuthenticationError):
            await call(mint())
        with pytest.raises(PermissionDeniedError):
            await call(worker)
        assert len(it.engine.generations) == 1
        for path in ("/v1/models", "/metrics"):
            refused = await ask(it.port, get(path))
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/live", "/health"):
            assert (await ask(it.port, get(path))).status == 200


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (None, None), ("", None), ("Basic abc", None), ("Bearer", None), ("Bearer a", "a"),
        ("bearer  a ", "a"), ("Bearer ", ""),
    ],
)  # fmt: skip
def test_the_token_is_taken_out_of_its_header(header: str | None, token: str | None) -> None:
    assert bearer(header) == token
