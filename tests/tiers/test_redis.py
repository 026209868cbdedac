"""The Redis tier against a real Valkey: the contract, and what only it promises."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier.core.frame import FrameName, KeyKind
from kvtier.errors import BackendError, FrameFault
from kvtier.ports import (
    BlockOwner,
    BlockTier,
    ByNamespace,
    ByScope,
    ByWriter,
    GetRequest,
    GetStatus,
    PutRequest,
    PutStatus,
    Refusal,
    RemovalCause,
    TierObserver,
)
from kvtier.security import certs
from kvtier.security.roles import AccessRole, Principal
from kvtier.tiers.redis.config import RedisConfig, RedisTls, SingleServer, UnixPath, parse_url
from kvtier.tiers.redis.naming import block_key
from kvtier.tiers.redis.tier import RedisTier
from kvtier.tiers.redis.troubles import Trouble
from kvtier.tiers.redis.values import TAIL_BYTES
from kvtier.types import ScopeId
from tests.harness.processes import ProcessRunner
from tests.harness.valkey import Valkey, ValkeyOptions, requires_valkey, start_valkey
from tests.tiers.contract import (
    NAMESPACE,
    SMALL_BYTES,
    Backend,
    Journal,
    TierContract,
    bytes_of,
    get,
    get_bytes,
    get_status,
    holds,
    name_of,
    payload_of,
    put,
    put_of,
    soon,
)

pytestmark = requires_valkey


def config_of(server: SingleServer, **changes: float) -> RedisConfig:
    """A configuration that is patient: the machine may be busy."""
    return replace(RedisConfig(server, connect_timeout_s=5.0), **changes)  # type: ignore[arg-type]


class RedisBackend:
    """Tiers of one server; each `open` begins with an empty one."""

    payload_bytes_max = SMALL_BYTES - 128 - TAIL_BYTES

    def __init__(self, server: Valkey) -> None:
        self.server = server
        self.opened: list[RedisTier] = []

    async def open(
        self, bytes_max: int = SMALL_BYTES, observer: TierObserver | None = None
    ) -> RedisTier:
        self.server.command("FLUSHALL")
        config = config_of(
            parse_url(self.server.url), bytes_max=64 << 20, value_bytes_max=bytes_max
        )
        tier = RedisTier(config, observer)
        self.opened.append(tier)
        return tier

    async def flip(self, tier: BlockTier, name: FrameName, bit: int) -> None:
        key = block_key(name)
        at = str(bit // 8)
        (byte,) = self.server.command("GETRANGE", key, at, at)[4:5]
        changed = bytes([byte ^ 1 << bit % 8])
        assert self.server.command("SETRANGE", key, at, changed).startswith(b":")

    async def replace(self, tier: BlockTier, name: FrameName, frame: FrameName) -> None:
        answer = self.server.command("COPY", block_key(frame), block_key(name), "REPLACE")
        assert answer == b":1\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with ProcessRunner("tests/tiers/test_redis", tmp_path_factory.mktemp("redis")) as runner:
        # An evicting policy, so that the contract holds under it; nothing is evicted yet.
        lines = ("maxmemory 256mb", "maxmemory-policy allkeys-lru", "proto-max-bulk-len 1mb")
        yield start_valkey(runner, options=ValkeyOptions(lines))


@pytest.fixture
async def redis_backend(server: Valkey) -> AsyncIterator[RedisBackend]:
    made = RedisBackend(server)
    yield made
    for tier in made.opened:
        await tier.close()


class TestRedis(TierContract):
    @pytest.fixture
    def backend(self, redis_backend: RedisBackend) -> Backend:
        return redis_backend

    async def test_bytes_stay_bounded_under_churn_and_every_read_is_exact_or_a_miss(
        self, backend: Backend
    ) -> None:
        """Here the server evicts, not the tier, and says nothing: the tier finds out."""
        assert isinstance(backend, RedisBackend)
        journal = Journal()
        tier = await backend.open(observer=journal)
        used = int(info(backend.server, "memory", "used_memory"))
        backend.server.command("CONFIG", "SET", "maxmemory", str(used + (1 << 20)))
        try:
            hits = misses = 0
            for start in range(0, 600, 8):
                numbers = range(start, start + 8)
                statuses = await put(tier, *map(put_of, numbers))
                assert set(statuses) == {PutStatus.STORED}
                for n in range(max(0, start - 300), start, 20):
                    result = await get(tier, name_of(n))
                    assert bytes_of(result) in {None, payload_of(n)}
                    assert result.status in {GetStatus.HIT, GetStatus.MISS}
                    hits, misses = hits + result.is_hit, misses + (not result.is_hit)
            assert hits > 0
            assert misses > 0
            assert int(info(backend.server, "stats", "evicted_keys")) > 0
            await holds(tier, *map(name_of, range(600)))
            stats = tier.stats()
            assert stats.removals[RemovalCause.LOST] > 0
            assert stats.blocks == len(journal.held)
            assert not journal.faults
            left = [n for n in range(600) if (await holds(tier, name_of(n)))[0]]
            assert {name_of(n) for n in left} == journal.held
        finally:
            backend.server.command("CONFIG", "SET", "maxmemory", "256mb")


def info(server: Valkey, section: str, field: str) -> str:
    """One field of INFO."""
    found = re.search(rf"^{field}:(.*)\r$", server.command("INFO", section).decode(), re.M)
    assert found is not None, f"no {field} in INFO {section}"
    return found[1]


def calls(server: Valkey, command: str) -> int:
    """How often a command was called."""
    text = server.command("INFO", "commandstats").decode()
    found = re.search(rf"^cmdstat_{command}:calls=(\d+)", text, re.M)
    return int(found[1]) if found else 0


async def test_only_keys_of_our_form_are_ever_made(redis_backend: RedisBackend) -> None:
    tier = await redis_backend.open()
    nasty = ["../../etc", "a\0b", "x\r\nFLUSHALL\r\n", "é" * 500, "* ? [a]", "{slot}"]
    for scope in nasty:
        name = FrameName(KeyKind.ENGINE_DIGEST, scope.encode()[:32].ljust(8, b"!"), NAMESPACE)
        request = PutRequest(name, b"x", BlockOwner(1, ScopeId(scope)))
        assert [r.status for r in await tier.put_many([request], soon())] == [PutStatus.STORED]
        assert (await get(tier, name)).scope == scope
        assert await tier.drop(ByScope(ScopeId(scope)), soon()) == 1
        await tier.put_many([request], soon())
    keys = re.findall(rb"\$\d+\r\n(.*?)\r\n", redis_backend.server.command("KEYS", "*"))
    assert len(keys) == len(nasty)
    assert all(re.fullmatch(rb"kvtier:1:[0-9a-f]{140}", key) for key in keys)


@pytest.mark.parametrize(
    "make",
    [
        ("RPUSH", "x"),
        ("HSET", "f", "v"),
        ("SET", "another application's value that is longer than a header" * 5),
        ("SET", ""),
        ("SET", "short"),
    ],
)
async def test_what_is_not_ours_at_our_key_is_a_miss_and_goes(
    redis_backend: RedisBackend, make: tuple[str, ...]
) -> None:
    server = redis_backend.server
    tier = await redis_backend.open()
    key = block_key(name_of(1))
    for act in ("get", "put"):
        server.command("DEL", key)
        assert not server.command(make[0], key, *make[1:]).startswith(b"-")
        corrupt = sum(tier.stats().corrupt.values())
        if act == "get":
            assert await get_status(tier, name_of(1)) is GetStatus.CORRUPT
            assert server.command("EXISTS", key) == b":0\r\n"
        else:
            assert await put(tier, put_of(1), put_of(2)) == [PutStatus.STORED] * 2
            assert await get_bytes(tier, name_of(1)) == payload_of(1)
        assert sum(tier.stats().corrupt.values()) == corrupt + 1
        await tier.drop(ByNamespace(NAMESPACE), soon())


async def test_foreign_keys_are_never_touched(redis_backend: RedisBackend) -> None:
    server = redis_backend.server
    tier = await redis_backend.open()
    foreign = [b"session:1", b"kvtier:1:mine", block_key(name_of(1)) + b"0", b"kvtier:2:x"]
    for key in foreign:
        server.command("SET", key, "theirs")
    await put(tier, put_of(1), put_of(2))
    assert await tier.drop(ByNamespace(NAMESPACE), soon()) == 2
    assert await tier.drop(ByWriter(7), soon()) == 0
    for key in foreign:
        assert server.command("GET", key) == b"$6\r\ntheirs\r\n"


@pytest.mark.parametrize("length", [1, 127, 128, 139, 1000, 4235])
async def test_a_truncated_value_is_a_miss_and_goes(
    redis_backend: RedisBackend, length: int
) -> None:
    server = redis_backend.server
    tier = await redis_backend.open()
    await put(tier, put_of(1))
    key = block_key(name_of(1))
    value = server.command("GET", key).split(b"\r\n", 1)[1][:-2]
    assert len(value) == 4236
    server.command("SET", key, value[:length])
    result = await get(tier, name_of(1))
    assert result.status is GetStatus.CORRUPT
    assert result.reason in {FrameFault.SHORT, FrameFault.LENGTH}
    assert server.command("EXISTS", key) == b":0\r\n"


async def test_two_clients_with_other_bytes_keep_the_first_and_count(
    redis_backend: RedisBackend,
) -> None:
    first = await redis_backend.open()
    second = await redis_backend.open()
    numbers = range(20)
    one, other = await asyncio.gather(
        put(first, *[put_of(n, version=0) for n in numbers]),
        put(second, *[put_of(n, version=1) for n in numbers]),
    )
    for n in numbers:
        statuses = {one[n], other[n]}
        assert statuses == {PutStatus.STORED, PutStatus.DIVERGENT}
        kept = payload_of(n, version=0 if one[n] is PutStatus.STORED else 1)
        assert await get_bytes(first, name_of(n)) == await get_bytes(second, name_of(n)) == kept
    assert first.stats().divergent_puts + second.stats().divergent_puts == 20
    assert first.stats().blocks == second.stats().blocks == 20


async def test_what_another_put_already_is_not_sent_again(redis_backend: RedisBackend) -> None:
    server = redis_backend.server
    first, second = await redis_backend.open(), await redis_backend.open()
    await put(first, *map(put_of, range(10)))
    before = int(info(server, "stats", "total_net_input_bytes"))
    assert await put(second, *map(put_of, range(10))) == [PutStatus.DUPLICATE] * 10
    assert int(info(server, "stats", "total_net_input_bytes")) - before < 4096


async def test_a_value_that_the_server_would_cut_the_connection_for_is_never_sent(
    redis_backend: RedisBackend,
) -> None:
    server = redis_backend.server
    tier = await redis_backend.open(bytes_max=64 << 20)
    before = calls(server, "set")
    long = put_of(2, 1 << 20)
    results = await tier.put_many([put_of(1), long, put_of(3)], soon())
    assert [r.status for r in results] == [PutStatus.STORED, PutStatus.REFUSED, PutStatus.STORED]
    assert results[1].reason == Refusal.TOO_LONG
    assert calls(server, "set") == before + 2
    assert tier.sessions.connects_count == 1
    fits = put_of(4, (1 << 20) - 128 - TAIL_BYTES)
    assert await put(tier, fits) == [PutStatus.STORED]


async def test_values_expire_where_a_lifetime_is_configured_and_reads_do_not_prolong_it(
    server: Valkey,
) -> None:
    tier = RedisTier(config_of(parse_url(server.url), ttl_s=100.0))
    server.command("FLUSHALL")
    await put(tier, put_of(1))
    key = block_key(name_of(1))
    assert 0 < int(server.command("PTTL", key)[1:-2]) <= 100_000
    server.command("PEXPIRE", key, "5000")
    assert await get_status(tier, name_of(1)) is GetStatus.HIT
    assert int(server.command("PTTL", key)[1:-2]) <= 5000
    server.command("PEXPIRE", key, "-1")
    assert await get_status(tier, name_of(1)) is GetStatus.MISS
    assert tier.stats().removals[RemovalCause.LOST] == 1
    await tier.close()


async def test_asking_whether_a_block_is_there_is_not_use_of_it(server: Valkey) -> None:
    tier = RedisTier(config_of(parse_url(server.url)))
    await put(tier, put_of(1))
    key = block_key(name_of(1))
    reads = calls(server, "get") + calls(server, "getrange")
    assert await holds(tier, name_of(1)) == [True]
    assert calls(server, "get") + calls(server, "getrange") == reads
    assert server.command("OBJECT", "IDLETIME", key).startswith(b":")
    await tier.close()


async def test_a_reader_adopts_what_another_node_wrote(redis_backend: RedisBackend) -> None:
    writer = await redis_backend.open()
    journal = Journal()
    reader = RedisTier(config_of(parse_url(redis_backend.server.url)), journal)
    await put(writer, put_of(1), put_of(2))
    assert await get_bytes(reader, name_of(1)) == payload_of(1)
    assert journal.held == {name_of(1)}
    assert reader.stats().bytes == 4096 + 128 + TAIL_BYTES
    await reader.close()


async def test_the_names_it_remembers_are_bounded(server: Valkey) -> None:
    server.command("FLUSHALL")
    tier = RedisTier(config_of(parse_url(server.url), names_max=3))
    assert await put(tier, *map(put_of, range(5))) == [PutStatus.STORED] * 5
    assert tier.stats().blocks == 3
    assert await get_bytes(tier, name_of(4)) == payload_of(4)
    assert tier.belief.overflows_count > 0
    await tier.close()


async def test_no_more_connections_than_allowed_serve_any_number_of_calls(server: Valkey) -> None:
    server.command("FLUSHALL")
    tier = RedisTier(config_of(parse_url(server.url), connections_max=2))
    statuses = await asyncio.gather(*(put(tier, put_of(n)) for n in range(40)))
    assert statuses == [[PutStatus.STORED]] * 40
    assert 1 <= tier.sessions.connects_count <= 2
    await tier.close()


async def test_a_small_window_moves_large_batches(server: Valkey) -> None:
    server.command("FLUSHALL")
    tier = RedisTier(config_of(parse_url(server.url), in_flight_bytes_max=5000))
    assert await put(tier, *map(put_of, range(64))) == [PutStatus.STORED] * 64
    results = await tier.get_many([GetRequest(name_of(n)) for n in range(64)], soon())
    assert [bytes_of(result) for result in results] == [payload_of(n) for n in range(64)]
    await tier.close()


async def test_a_unix_socket_and_another_database_serve_alike(server: Valkey) -> None:
    single = replace(parse_url(server.url), place=UnixPath(str(server.socket_path)), database=3)
    tier = RedisTier(config_of(single))
    await put(tier, put_of(1))
    assert await get_bytes(tier, name_of(1)) == payload_of(1)
    assert await tier.drop(ByWriter(7), soon()) == 1
    other = RedisTier(config_of(parse_url(server.url)))
    await put(tier, put_of(77))
    assert await get_status(other, name_of(77)) is GetStatus.MISS
    await tier.close()
    await other.close()


async def test_a_password_is_needed_where_the_server_has_one(processes: ProcessRunner) -> None:
    server = await asyncio.to_thread(
        start_valkey, processes, "locked", ValkeyOptions(password="right")
    )
    for login, trouble in (("", Trouble.UNAUTHENTICATED), (":wrong@", Trouble.WRONG_PASSWORD)):
        tier = RedisTier(config_of(parse_url(f"redis://{login}127.0.0.1:{server.port}")))
        (read,) = await tier.get_many([GetRequest(name_of(1))], soon())
        (written,) = await tier.put_many([put_of(1)], soon())
        assert (read.status, read.reason) == (GetStatus.ERROR, trouble)
        assert (written.status, written.reason) == (PutStatus.ERROR, trouble)
        assert tier.trouble is trouble
        with pytest.raises(BackendError, match=trouble.value):
            await holds(tier, name_of(1))
        await tier.close()
    tier = RedisTier(config_of(parse_url(server.url)))
    assert await put(tier, put_of(1)) == [PutStatus.STORED]
    assert await get_bytes(tier, name_of(1)) == payload_of(1)
    assert await tier.drop(ByWriter(7), soon()) == 1
    await tier.close()


async def test_an_acl_that_hides_info_and_config_costs_nothing_else(
    processes: ProcessRunner,
) -> None:
    lines = ("user kv on >pw ~* +get +set +getrange +exists +unlink +ping +select +scan",)
    server = await asyncio.to_thread(start_valkey, processes, "acl", ValkeyOptions(lines))
    tier = RedisTier(config_of(parse_url(f"redis://kv:pw@127.0.0.1:{server.port}")))
    assert await put(tier, put_of(1)) == [PutStatus.STORED]
    assert await get_bytes(tier, name_of(1)) == payload_of(1)
    server.command("ACL", "SETUSER", "kv", "-get")
    (read,) = await tier.get_many([GetRequest(name_of(1))], soon())
    assert (read.status, read.reason) == (GetStatus.ERROR, Trouble.FORBIDDEN)
    await tier.close()


@asynccontextmanager
async def tls_in_front_of(server: Valkey, folder: Path) -> AsyncIterator[tuple[int, RedisTls]]:
    """A TLS listener that relays to the server, for a binary that was built without TLS."""
    validity = certs.Validity(datetime.now(UTC), 1)
    authority = certs.new_authority(certs.Validity(datetime.now(UTC), 2))
    principal = Principal("redis", AccessRole.STORE, (), ())
    issued = certs.issue(authority, principal, ["127.0.0.1"], validity)
    paths = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    for path, pem in zip(paths, (authority.cert, issued.cert, issued.key), strict=True):
        path.write_bytes(pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(paths[1], paths[2])

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, sink = await asyncio.open_connection("127.0.0.1", server.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            except (ConnectionError, ssl.SSLError):
                pass
            finally:
                target.close()

        await asyncio.gather(pump(reader, sink), pump(upstream, writer))

    listener = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with listener:
        yield listener.sockets[0].getsockname()[1], RedisTls(ca_file=paths[0])


async def test_tls_carries_blocks_and_is_verified(server: Valkey, tmp_path: Path) -> None:
    server.command("FLUSHALL")
    async with tls_in_front_of(server, tmp_path) as (port, tls):
        tier = RedisTier(config_of(parse_url(f"rediss://127.0.0.1:{port}", tls)))
        assert await put(tier, put_of(1, 600_000), put_of(2)) == [PutStatus.STORED] * 2
        assert await get_bytes(tier, name_of(1)) == payload_of(1, 600_000)
        assert await tier.drop(ByWriter(7), soon()) == 2
        await tier.close()
        stranger = RedisTier(config_of(parse_url(f"rediss://127.0.0.1:{port}")))
        (read,) = await stranger.get_many([GetRequest(name_of(1))], soon())
        assert (read.status, read.reason) == (GetStatus.ERROR, Trouble.UNREACHABLE)
        await stranger.close()
        plain = RedisTier(config_of(parse_url(f"redis://127.0.0.1:{port}")))
        (read,) = await plain.get_many([GetRequest(name_of(1))], soon())
        assert read.status is GetStatus.ERROR
        await plain.close()
