"""Who may call, what goes upstream in their name, and what they may use."""

import hashlib
import os
from pathlib import Path

import pytest

from kvtier.core.scopes import private_scope, scope_salt, shared_scope
from kvtier.errors import CallerError, ConfigError, LimitError, UnauthenticatedError
from kvtier.security.clock import Clock
from kvtier.types import TenantId
from kvtier_router.config import HttpListenConfig, RouterConfig, check_listen
from kvtier_router.front.credentials import parse_credentials
from kvtier_router.front.quota import QuotaDesk, QuotaExceededError
from kvtier_router.front.tenants import TenantBook, parse_tenants
from tests.harness.ports import free_port
from tests.harness.waiting import eventually
from tests.router.front.rig import Rig

SECRET = "a cluster secret of thirty bytes"
BODY = {"model": "mock", "prompt": "a b", "max_tokens": 1}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenant(name: str, *keys: str, more: str = "") -> str:
    rows = "".join(f'[[tenant.key]]\nsha256 = "{digest(key)}"\n' for key in keys)
    return f'[[tenant]]\nid = "{name}"\n{more}\n{rows}'


def keys_file(directory: Path, *tenants: str) -> Path:
    path = directory / "keys.toml"
    fresh = directory / "keys.new"
    fresh.write_text("\n".join(tenants), encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def start(rig: Rig, *flags: str) -> None:
    secret = rig.directory / "secret"
    secret.write_text(SECRET, encoding="utf-8")
    keys = rig.directory / "keys.toml"
    rig.start_router(f"--keys-file={keys}", f"--cluster-secret-file={secret}", *flags)


def test_keys_decide_scope_salt_and_models_and_follow_their_file(rig: Rig) -> None:
    (worker,) = rig.start_workers(1)
    shared = 'scope = "team"'
    rows = [
        tenant("acme", "key-acme-1", "key-acme-2"),
        tenant("red", "key-red", more=shared),
        tenant("blue", "key-blue", more=shared),
        tenant("picky", "key-picky", more='models = ["other"]'),
    ]
    keys_file(rig.directory, *rows)
    start(rig)

    def salt(key: str, **fields: object) -> object:
        answer = rig.call("POST", "/v1/completions", {**BODY, **fields}, headers=as_key(key))
        assert answer.status == 200
        request = worker.last()
        assert "authorization" not in request["headers"]
        return request["body"]["cache_salt"]

    secret = SECRET.encode()
    acme = private_scope(TenantId("acme"))
    assert salt("key-acme-1") == scope_salt(secret, acme, None) == salt("key-acme-2")
    assert salt("key-red") == salt("key-blue") == scope_salt(secret, shared_scope("team"), None)
    assert salt("key-acme-1", cache_salt="mine") == scope_salt(secret, acme, "mine")
    stolen = scope_salt(secret, shared_scope("team"), None)
    assert salt("key-acme-1", cache_salt=stolen) not in (stolen, salt("key-red"))

    assert rig.call("POST", "/v1/completions", BODY).status == 401
    wrong = rig.call("POST", "/v1/completions", BODY, headers=as_key("key-nobody"))
    assert wrong.status == 401
    assert wrong.json["error"]["code"] == "invalid_api_key"
    assert rig.call("GET", "/v1/models").status == 401
    picky = rig.call("POST", "/v1/completions", BODY, headers=as_key("key-picky"))
    assert picky.status == 404
    assert rig.call("GET", "/v1/models", headers=as_key("key-picky")).json["data"] == []
    assert rig.call("GET", "/health").status == 200

    keys_file(rig.directory, tenant("new", "key-new"))
    eventually(
        lambda: rig.call("POST", "/v1/completions", BODY, headers=as_key("key-new")).status == 200,
        30,
        "the new key works",
    )
    assert rig.call("POST", "/v1/completions", BODY, headers=as_key("key-acme-1")).status == 401


def test_a_body_of_nobody_is_refused_before_it_is_read(rig: Rig) -> None:
    rig.start_workers(1)
    keys_file(rig.directory, tenant("acme", "key-acme"))
    start(rig)
    client = rig.connect()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n")
    assert client.recv(2000).startswith(b"HTTP/1.1 401")
    client.close()


def test_a_quota_answers_429_with_the_time_to_wait(rig: Rig) -> None:
    rig.start_workers(1)
    quota = "requests_per_s = 0.5\nrequests_burst = 2"
    keys_file(rig.directory, tenant("acme", "key-acme", more=quota), tenant("free", "key-free"))
    start(rig)
    answers = [
        rig.call("POST", "/v1/completions", BODY, headers=as_key("key-acme")) for _ in range(4)
    ]
    assert [answer.status for answer in answers].count(200) in (2, 3)
    refused = answers[-1]
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 3
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert rig.call("POST", "/v1/completions", BODY, headers=as_key("key-free")).status == 200


def test_a_quota_of_tokens_counts_every_prompt_and_choice_and_gives_back_what_was_not_used(
    rig: Rig,
) -> None:
    (worker,) = rig.start_workers(1)
    quota = "tokens_per_s = 0.001\ntokens_burst = 100"
    names = ("lists", "choices", "refused", "answered")
    keys_file(rig.directory, *(tenant(name, name, more=quota) for name in names))
    start(rig)

    def status(name: str, **fields: object) -> int:
        body = {"model": "mock", "max_tokens": 1, **fields}
        return rig.call("POST", "/v1/completions", body, headers=as_key(name)).status

    assert status("lists", prompt=[[1] * 30] * 4) == 413
    assert status("lists", prompt=[[1] * 30] * 3) == 200
    assert status("choices", prompt=[1] * 30, max_tokens=40, n=2) == 413
    assert status("choices", prompt=[1] * 30, max_tokens=30, n=2) == 200
    assert [status("answered", prompt=[1] * 20) for _ in range(5)] == [200] * 4 + [429]
    worker.behave(status=400)
    assert {status("refused", prompt=[1] * 60) for _ in range(5)} == {400}
    worker.behave()
    assert status("refused", prompt=[1] * 60) == 200


def test_each_worker_is_shown_its_own_credential(rig: Rig) -> None:
    workers = rig.start_workers(2)
    tokens = rig.directory / "tokens.toml"
    tokens.write_text('[[worker]]\nname = "w0"\ntoken = "for-w0"\n', encoding="utf-8")
    bearer = rig.directory / "bearer"
    bearer.write_text("for-others\n", encoding="utf-8")
    rig.start_router(f"--upstream-tokens-file={tokens}", f"--upstream-bearer-file={bearer}")
    for _ in range(2):
        assert rig.call("POST", "/v1/completions", BODY, headers=as_key("sk-client")).status == 200
    shown = [worker.last()["headers"]["authorization"] for worker in workers]
    assert shown == ["Bearer for-w0", "Bearer for-others"]
    assert rig.router is not None
    assert "for-w0" not in rig.router.log_text()


def test_a_rank_is_named_in_the_engines_own_header_and_never_by_the_client(rig: Rig) -> None:
    [worker] = rig.start_workers(1)
    address = f"127.0.0.1:{worker.port}"
    rig.start_router(*(f"--static-workers=v#{rank}={address} ranked" for rank in (0, 3)))
    told = as_key("sk-client") | {"x-data-parallel-rank": "7"}
    for _ in range(2):
        body = BODY | {"model": "ranked"}
        assert rig.call("POST", "/v1/completions", body, headers=told).status == 200
    assert rig.call("POST", "/v1/completions", BODY, headers=told).status == 200
    named = [one["headers"].get("x-data-parallel-rank") for one in worker.recorded()]
    assert named == ["0", "3", None]


def test_with_an_engine_gone_none_of_its_ranks_is_tried_again(rig: Rig) -> None:
    rig.start_workers(1)
    gone = free_port()
    rig.start_router(*(f"--static-workers=v#{rank}=127.0.0.1:{gone} mock" for rank in (0, 1, 2)))
    rig.call("POST", "/v1/completions", BODY)  # the first turn is the living worker's
    for _ in range(3):
        answer = rig.call("POST", "/v1/completions", BODY)
        assert (answer.status, answer.headers["x-kvtier-worker"]) == (200, "w0")
    assert rig.metric('kvtier_router_retries_total{outcome="granted"}') <= 3


def test_off_loopback_it_refuses_to_start_without_tls_and_keys() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.keys_file"):
        check_listen(RouterConfig(listen=HttpListenConfig(bind="0.0.0.0:80")))
    check_listen(RouterConfig(listen=HttpListenConfig(bind="0.0.0.0:80", insecure=True)))
    with pytest.raises(ConfigError, match="admin_bind"):
        RouterConfig(admin_bind="0.0.0.0:81")


def test_an_open_router_says_so(rig: Rig) -> None:
    rig.start_workers(1)
    rig.start_router()
    assert rig.router is not None
    assert "open mode" in rig.router.log_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tenant = 3",
        "[[tenant]]\nid = 3",
        '[[tenant]]\nid = "a"\nbogus = 1',
        '[[tenant]]\nid = "a"\n[[tenant]]\nid = "a"',
        '[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "zz"',
        '[[tenant]]\nid = "a"\npriority = 99',
        '[[tenant]]\nid = "a"\nrequests_per_s = -1',
        '[[tenant]]\nid = "a"\nrequests_per_s = "many"',
        '[[tenant]]\nid = "a"\nweight = 0',
        f'[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "{"0" * 64}"\nexpires = "never"',
        f'[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "{"0" * 64}"\n'
        f'[[tenant]]\nid = "b"\n[[tenant.key]]\nsha256 = "{"0" * 64}"',
        '[[tenant]]\nid = "a"\nscope = ""',
    ],
)
def test_a_keys_file_that_is_not_exactly_one_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_tenants(text.encode())


def test_a_keys_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = keys_file(tmp_path, tenant("a", "k"))
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="written by others"):
        TenantBook(path, SECRET.encode())
    assert os.stat(path).st_mode & 0o022


def test_a_broken_change_keeps_the_keys_that_were_good(tmp_path: Path) -> None:
    now = [0.0]
    clock = Clock(wall=lambda: now[0], monotonic=lambda: now[0])
    path = keys_file(tmp_path, tenant("a", "key-a"))
    book = TenantBook(path, SECRET.encode(), clock)
    path.write_text("broken", encoding="utf-8")
    now[0] = 10.0
    assert book.find("Bearer key-a").tenant_id == "a"
    assert book.reload_errors == 1
    for bad in (None, "", "Basic key-a", "Bearer ", "Bearer " + "x" * 10_000, "Bearer \udcff"):
        with pytest.raises(UnauthenticatedError):
            book.find(bad)


def test_a_salt_that_is_no_text_is_the_callers_error(tmp_path: Path) -> None:
    book = TenantBook(keys_file(tmp_path, tenant("a", "key-a")), SECRET.encode())
    found = book.find("Bearer key-a")
    with pytest.raises(CallerError):
        book.salt(found, "\ud800")


def test_upstream_tokens_are_not_repeated_in_errors() -> None:
    for text in ("[[worker]]\nname = 3", '[[worker]]\nname = "a"\ntoken = "has space"', "x ="):
        with pytest.raises(ConfigError) as caught:
            parse_credentials(text.encode())
        assert "has space" not in str(caught.value)


def test_a_request_beyond_every_burst_is_refused_for_good() -> None:
    quota = "tokens_per_s = 10\ntokens_burst = 100"
    entries = parse_tenants(tenant("a", "k", more=quota).encode())
    (key,) = entries.values()
    desk = QuotaDesk(lambda: 0.0)
    with pytest.raises(LimitError):
        desk.take(key.tenant, 101)
    desk.take(key.tenant, 100)
    with pytest.raises(QuotaExceededError) as caught:
        desk.take(key.tenant, 50)
    assert caught.value.retry_after_s == pytest.approx(5.0)
