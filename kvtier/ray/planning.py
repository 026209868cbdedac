"""Which services a fleet wants on which nodes. Pure. What must not live here: Ray, processes."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.local.models import text_directory
from kvtier.local.plan import Kind
from kvtier.local.settings import Table, merged
from kvtier.ray.settings import Fleet
from kvtier.sections import Reach, parse_address

INDEX: Final = "index"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the Ray cluster."""

    node_id: str
    name: str
    """As it was started with; need not be unique."""
    ip: str
    is_head: bool
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A service that should run."""

    name: str
    """Of the actor, and of the instance in the fleet."""
    kind: Kind
    node: str
    """Unique name of its node."""
    node_id: str
    ip: str
    port: int
    """0: a free one, remembered."""
    cpus: float
    gpus: float
    resource: str
    table: Table
    """Its settings, without those that its node chooses."""

    @property
    def digest(self) -> str:
        """Equal for services that need not be replaced by each other."""
        told = [self.kind.value, self.node_id, self.ip, self.port, self.table]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Serving:
    """What is known of a service that serves."""

    address: str
    socket: str = ""
    """Of a store, for workers of its node."""


def kind_of(name: str) -> Kind | None:
    """The kind of the service that an actor of this name keeps; None: it keeps none."""
    first = name.partition("-")[0]
    return Kind(first) if first in list(Kind) else None


def node_names(nodes: Iterable[Node]) -> dict[str, str]:
    """A name that is safe in paths and unique, by node id; the node's own where it is alone."""
    found: dict[str, list[Node]] = {}
    for node in nodes:
        found.setdefault(_UNSAFE.sub("-", node.name) or "node", []).append(node)
    return {
        node.node_id: name if len(same) == 1 else f"{name}-{node.node_id[:8]}"
        for name, same in found.items()
        for node in same
    }


def wanted_of(
    fleet: Fleet, nodes: Sequence[Node], serving: Mapping[str, Serving]
) -> tuple[Wanted, ...]:
    """The services that can be started now, given those that serve.

    The index first; stores and routers when it serves, for they are told its address; workers when
    the store of their node does. Index and routers are on the head: without that there is no Ray.
    """
    return _Planner(fleet, nodes, serving).wanted()


class _Planner:
    def __init__(self, fleet: Fleet, nodes: Sequence[Node], serving: Mapping[str, Serving]) -> None:
        self._fleet = fleet
        self._config = fleet.config
        self._nodes = sorted(nodes, key=lambda node: node.node_id)
        self._names = node_names(nodes)
        self._serving = serving

    def wanted(self) -> tuple[Wanted, ...]:
        heads = [node for node in self._nodes if node.is_head]
        found = [self._service(INDEX, Kind.INDEX, head, {}) for head in heads]
        index = self._serving.get(INDEX)
        if index is None:
            return tuple(found)
        open_dial = {"insecure": True} if self._config.insecure else {}
        dial: dict[str, object] = {"index": {"targets": [index.address], **open_dial}}
        for node in self._nodes:
            name = f"store-{self._names[node.node_id]}"
            found.append(self._service(name, Kind.STORE, node, _STORE | dial))
            store = self._serving.get(name)
            if store is not None and self._takes_workers(node):
                found += self._workers(node, dial, name, store)
        for head in heads:
            found += self._routers(head, dial)
        return tuple(found)

    def _workers(self, node: Node, dial: Table, store: str, serving: Serving) -> Iterable[Wanted]:
        table = {
            **dial,
            "model": {"model": self._config.model},
            "cache": {"kv_memory_bytes": 512 * _MIB},
            "store": {"targets": [f"unix:{serving.socket}"]},
            "offload": {"store_instance": store},
        }
        for number in range(1, self._config.workers_per_node + 1):
            name = f"worker-{self._names[node.node_id]}-{number}"
            yield self._service(name, Kind.WORKER, node, table)

    def _routers(self, head: Node, dial: Table) -> Iterable[Wanted]:
        directory = text_directory(self._config.model)
        texts = {"texts": [f"*={directory}"]} if directory else {}
        for number in range(1, self._config.routers + 1):
            name = "router" if number == 1 else f"router-{number}"
            yield self._service(name, Kind.ROUTER, head, {**dial, **texts})

    def _takes_workers(self, node: Node) -> bool:
        needs = {
            "CPU": self._config.worker_cpus,
            "GPU": self._config.worker_gpus,
            self._config.worker_resource: 1.0 if self._config.worker_resource else 0.0,
        }
        return all(node.resources.get(name, 0.0) >= count for name, count in needs.items())

    def _service(self, name: str, kind: Kind, node: Node, table: Table) -> Wanted:
        config = self._config
        is_worker = kind is Kind.WORKER
        unique = self._names[node.node_id]
        base: Table = {} if kind is Kind.INDEX else {"instance": name}
        base = merged(base, {"node": unique} if kind in {Kind.STORE, Kind.WORKER} else {})
        host = f"[{node.ip}]" if ":" in node.ip else node.ip
        if parse_address(f"{host}:0").reach is Reach.NETWORK and config.insecure:
            base = merged(base, {"listen": {"insecure": True}})
        return Wanted(
            name=name,
            kind=kind,
            node=unique,
            node_id=node.node_id,
            ip=host,
            port=config.router_port if name == "router" else 0,
            cpus=config.worker_cpus if is_worker else config.service_cpus,
            gpus=config.worker_gpus if is_worker else 0.0,
            resource=config.worker_resource if is_worker else "",
            table=merged(merged(base, table), self._fleet.sections[kind.value]),
        )


_STORE: Final[dict[str, object]] = {
    "dram": {"bytes_max": _GIB},
    "nvme": {"bytes_max": 8 * _GIB, "write_policy": "on_seal"},
}
