"""What routers tell each other beside the index: quota used, workers drained, where an answer
lives that others go on from. Datagrams; loss is harmless.

Counters are cumulative within a router's life, so a lost or repeated report changes nothing; an
HMAC of the cluster's secret keeps strangers out, and tenants are named by an HMAC too. What must
not live here: what a quota is, routing, health.
"""

import asyncio
import contextlib
import hmac
import itertools
import json
import secrets
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvtier.core.checks import require_integer, require_name
from kvtier.core.workers import WorkerName
from kvtier.errors import CallerError, ConfigError
from kvtier.limits import HOLDERS_COUNT_MAX, ROUTERS_COUNT_MAX
from kvtier.sections import parse_address
from kvtier.security.clock import SYSTEM
from kvtier.types import InstanceId, TenantId
from kvtier_router.front.quota import QuotaDesk
from kvtier_router.front.stickiness import Stickiness
from kvtier_router.front.tenants import Tenant, TenantBook

_KEY_LABEL: Final = b"kvtier.gossip.v1"
_MAC_BYTES: Final = 32
_PART_BYTES_MAX: Final = 12 << 10
"""Of rows, of orders and of homes in one datagram, which none of UDP's limits then cuts."""
_REPEATS: Final = 8
"""A changed counter stands in so many reports."""
_DRAINS_MAX: Final = 256
_HOMES_MAX: Final = 256
_BIND_DEFAULT: Final = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """An operator's word about a worker; the newest counts."""

    worker: WorkerName
    drains: bool
    stamp: float
    """Seconds since 1970 when it was said."""


@dataclass(slots=True)
class _Life:
    """What another router's life has told."""

    is_late: bool
    """Whether it was heard for the first time long after its start: what it then says of a tenant
    for the first time is history, of which nothing is charged."""
    totals: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    requests: float = 0.0
    tokens: float = 0.0
    left: int = 0
    """Reports that it still has to stand in."""


class Gossip:
    """Makes and takes reports. Sans-I/O; one event loop uses it."""

    def __init__(
        self,
        secret: bytes,
        desk: QuotaDesk,
        book: TenantBook,
        stickiness: Stickiness,
        on_drain: Callable[[WorkerName, bool], None],
    ) -> None:
        """`on_drain` is told of orders of others."""
        self._key = hmac.digest(secret, _KEY_LABEL, "sha256")
        self._desk = desk
        self._book = book
        self._stickiness = stickiness
        self._homes: deque[tuple[str, str, int]] = deque(maxlen=_HOMES_MAX)
        self._on_drain = on_drain
        self._life = secrets.token_hex(8)
        self._seq = 0
        self._rows: dict[str, _Row] = {}
        self._lives: OrderedDict[str, _Life] = OrderedDict()
        self._tags: dict[TenantId, str] = {}
        self._by_tag: dict[str, Tenant] = {}
        self._tagged_from: Mapping[TenantId, Tenant] | None = None
        self._orders: OrderedDict[WorkerName, DrainOrder] = OrderedDict()
        self.refused = 0
        """Datagrams that were not of this cluster."""

    def order(self, worker: WorkerName, drains: bool) -> None:
        """Tell the others of an operator's word."""
        self._keep(DrainOrder(worker, drains, SYSTEM.wall()))

    def report(self) -> list[bytes]:
        """The datagrams to send now; at least one, so that a life is known before it grants."""
        self._refresh()
        rows = [(tag, row.requests, row.tokens) for tag, row in self._rows.items()]
        for tag, row in list(self._rows.items()):
            row.left -= 1
            if row.left == 0:
                del self._rows[tag]
        orders = [
            (order.worker.instance, order.worker.dp_rank, order.drains, order.stamp)
            for order in self._orders.values()
        ]
        parts = (_paged(rows), _paged(orders), _paged(self._homes))
        pages = itertools.zip_longest(*parts, fillvalue="[]")
        return [self._sealed(*page) for page in pages] or [self._sealed("[]", "[]", "[]")]

    def take(self, datagram: bytes) -> None:
        """Take in a datagram; whatever it is, nothing is raised."""
        mac, body = datagram[:_MAC_BYTES], datagram[_MAC_BYTES:]
        if not hmac.compare_digest(mac, hmac.digest(self._key, body, "sha256")):
            self.refused += 1
            return
        try:
            life, seq, rows, orders, homes = json.loads(body)
            if life == self._life:
                return
            self._take_rows(str(life), int(seq), rows)
            for instance, rank, drains, stamp in orders:
                self._take_order(instance, rank, bool(drains), float(stamp))
            for digest, instance, rank in homes:
                self._stickiness.heard(str(digest)[:64], _worker(instance, rank))
        except (ValueError, TypeError, KeyError, CallerError):
            self.refused += 1

    # Quotas

    def _refresh(self) -> None:
        for digest, worker in self._stickiness.take_news():
            self._homes.append((digest, worker.instance, worker.dp_rank))
        for tenant_id, used in self._desk.take_changed():
            row = _Row(used.requests, used.tokens, _REPEATS)
            self._rows[self._tag(tenant_id)] = row

    def _take_rows(self, name: str, seq: int, rows: Sequence[tuple[str, float, float]]) -> None:
        life = self._lives.get(name)
        if life is None:
            life = self._lives[name] = _Life(seq > _REPEATS)
            if len(self._lives) > ROUTERS_COUNT_MAX:
                self._lives.popitem(last=False)
        for tag, requests, tokens in rows:
            nothing = (float(requests), float(tokens)) if life.is_late else (0.0, 0.0)
            known_requests, known_tokens = life.totals.get(tag, nothing)
            if requests < known_requests:
                continue  # an older report that came late
            life.totals[tag] = (requests, tokens)
            tenant = self._tenant(tag)
            if tenant is not None:
                self._desk.charge(tenant, requests - known_requests, tokens - known_tokens)

    def _tag(self, tenant_id: TenantId) -> str:
        tag = self._tags.get(tenant_id)
        if tag is None:
            digest = hmac.digest(self._key, tenant_id.encode(), "sha256")
            tag = self._tags[tenant_id] = digest[:12].hex()
        return tag

    def _tenant(self, tag: str) -> Tenant | None:
        tenants = self._book.tenants()
        if tenants is not self._tagged_from:
            self._tagged_from = tenants
            self._by_tag = {self._tag(name): tenant for name, tenant in tenants.items()}
        return self._by_tag.get(tag)

    # Drains

    def _take_order(self, instance: str, rank: int, drains: bool, stamp: float) -> None:
        worker = _worker(instance, rank)
        known = self._orders.get(worker)
        if known is None or stamp > known.stamp:
            self._keep(DrainOrder(worker, drains, stamp))
            self._on_drain(worker, drains)

    def _keep(self, order: DrainOrder) -> None:
        self._orders[order.worker] = order
        self._orders.move_to_end(order.worker)
        if len(self._orders) > _DRAINS_MAX:
            self._orders.popitem(last=False)

    def _sealed(self, rows: str, orders: str, homes: str) -> bytes:
        self._seq += 1
        body = f'["{self._life}",{self._seq},{rows},{orders},{homes}]'.encode()
        return hmac.digest(self._key, body, "sha256") + body


def _paged(items: Iterable[object]) -> list[str]:
    """JSON arrays of the items, each of a size that fits a datagram."""
    pages: list[str] = []
    page: list[str] = []
    page_bytes = 0
    for item in items:
        text = json.dumps(item)
        if page and page_bytes + len(text) > _PART_BYTES_MAX:
            pages.append(f"[{','.join(page)}]")
            page, page_bytes = [], 0
        page.append(text)
        page_bytes += len(text) + 1
    return [*pages, f"[{','.join(page)}]"] if page else pages


def _worker(instance: str, rank: int) -> WorkerName:
    require_name("instance", instance)
    require_integer("dp_rank", rank, 0, HOLDERS_COUNT_MAX)
    return WorkerName(InstanceId(instance), rank)


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, gossip: Gossip) -> None:
        self._gossip = gossip

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._gossip.take(data)

    def error_received(self, error: Exception) -> None:
        """A peer that is not there: it will be told again."""


@dataclass(frozen=True, slots=True)
class GossipSockets:
    """Datagram sockets of all processes of one router, made before they part."""

    sockets: tuple[socket.socket, ...]
    secret: bytes
    """The cluster's, or one drawn for these processes alone."""


def open_sockets(bind: str | None, count: int, secret: bytes | None) -> GossipSockets:
    """A bound socket for each process. ConfigError where one cannot be had."""
    address = parse_address(bind or _BIND_DEFAULT)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = []
    for number in range(count):
        made = socket.socket(family, socket.SOCK_DGRAM)
        bound.append(made)
        try:
            made.bind((address.host, address.port + number if address.port else 0))
        except OSError as error:
            for each in bound:
                each.close()
            raise ConfigError(f"cannot gossip on {bind}: {error.strerror}") from error
        made.setblocking(False)
    return GossipSockets(tuple(bound), secret or secrets.token_bytes(32))


class GossipLink:
    """Sends a process's reports to the others and hands it theirs. Close it at the end."""

    def __init__(
        self, transport: asyncio.DatagramTransport, gossip: Gossip, targets: Sequence[object]
    ) -> None:
        self._transport = transport
        self._gossip = gossip
        self._targets = targets

    def tell(self) -> None:
        """Send a report to everybody; never blocks."""
        for datagram in self._gossip.report():
            for target in self._targets:
                self._transport.sendto(datagram, target)  # type: ignore[arg-type]

    def close(self) -> None:
        self._transport.close()


async def open_link(
    shared: GossipSockets, number: int, peers: Sequence[str], gossip: Gossip
) -> GossipLink:
    """The link of process `number`. ConfigError for a peer whose name means nothing."""
    loop = asyncio.get_running_loop()
    own = shared.sockets[number]
    targets: list[object] = [
        each.getsockname() for n, each in enumerate(shared.sockets) if n != number
    ]
    for text in peers:
        address = parse_address(text)
        try:
            found = await loop.getaddrinfo(
                address.host, address.port, family=own.family, type=socket.SOCK_DGRAM
            )
        except OSError as error:
            raise ConfigError(f"gossip.peers: {text}: {error.strerror}") from error
        targets.append(found[0][4])
    transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(gossip), sock=own)
    return GossipLink(transport, gossip, targets)


def drain_quietly(act: Callable[[WorkerName], None], worker: WorkerName) -> None:
    """Carry out another router's order; a worker that is unknown here is left alone."""
    with contextlib.suppress(CallerError):
        act(worker)
