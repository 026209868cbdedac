"""The actor that has a fleet started, and started again, on whatever nodes Ray has.

It keeps nothing of its own: what runs is asked of Ray and of the services' actors, so a controller
that was killed goes on where it was. Services that end are restarted by Ray itself. What must not
live here: what is wanted (`planning.py`), processes (`keeper.py`).
"""

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtier.config import CONFIG_FLAG
from kvtier.local.plan import Kind
from kvtier.local.probes import http_json
from kvtier.ray.keeper import Duty, Keeper, Kept
from kvtier.ray.planning import Node, Serving, Wanted, kind_of, wanted_of
from kvtier.ray.settings import on_this_node, read_fleet

CONTROLLER: Final = "controller"
SERVING: Final = "serving"
_PASS_S: Final = 0.5
_ASK_S: Final = 5.0
_STOP_S: Final = 60.0
_HEAD: Final = "node:__internal_head__"


@dataclass(frozen=True, slots=True)
class Shown:
    """One service as `status` shows it."""

    name: str
    kind: str
    node: str
    state: str
    """serving, starting, or failed with the reason."""
    address: str = ""
    url: str = ""
    admin: str = ""
    pid: int = 0


class ServiceActor:
    """One service on one node, as an actor: dies with it, and is restarted by Ray."""

    def __init__(self, duty: Duty, digest: str) -> None:
        """`duty.root` is of the node that this runs on."""
        self._keeper = Keeper(replace(duty, root=on_this_node(duty.root)))
        self._digest = digest

    def kept(self) -> tuple[Kept, str]:
        """Addresses of the service, and the digest of what it was made from."""
        return self._keeper.kept, self._digest

    def stop(self) -> None:
        """Let the service drain and end."""
        self._keeper.stop()


class Controller:
    """See the module. Made on the head node."""

    def __init__(self, argv: Sequence[str], document: str) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
            file.write(document)
            file.flush()
            self._fleet = read_fleet([*argv, CONFIG_FLAG, file.name])
        self._lock = threading.Lock()
        self._asked: dict[str, Any] = {}
        """What each service was asked and has not answered yet."""
        self._known: dict[str, tuple[Kept, str]] = {}
        """What those that serve answered."""
        self._places: dict[str, Serving] = {}
        """Where services serve, or did before they ended: they come back there."""
        self._failed: dict[str, str] = {}
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="controller", daemon=True)
        self._thread.start()

    def status(self) -> list[dict[str, Any]]:
        """All services that are wanted now, as `Shown` has them."""
        return [asdict(one) for one in self._all_shown()]

    def serves(self) -> bool:
        """Whether everything wanted serves and every router sends requests to every worker."""
        shown = self._all_shown()
        routers = [one for one in shown if one.kind == Kind.ROUTER]
        workers = {one.name for one in shown if one.kind == Kind.WORKER}
        all_serve = all(one.state == SERVING for one in shown)
        if not routers or not workers or not all_serve:
            return False
        return all(workers <= _candidates(one.admin) for one in routers)

    def endpoints(self) -> list[str]:
        """URLs of the routers that serve, without /v1."""
        routers = [one for one in self._all_shown() if one.kind == Kind.ROUTER]
        return [one.url for one in routers if one.state == SERVING]

    def stop(self) -> None:
        """Stop every service: routers first, the index last. The controller stays."""
        self._is_stopping.set()
        self._thread.join()
        with self._lock:
            for kind in (Kind.ROUTER, Kind.WORKER, Kind.STORE, Kind.INDEX):
                handles = [
                    handle for name, handle in self._actors().items() if kind_of(name) is kind
                ]
                _stop(handles)

    # One pass after another

    def _keep(self) -> None:
        while not self._is_stopping.wait(_PASS_S):
            try:
                with self._lock:
                    self._pass()
            except RayError:
                continue  # the next pass looks again

    def _pass(self) -> None:
        wanted = {one.name: one for one in wanted_of(self._fleet, living_nodes(), self._places)}
        actors = self._actors()
        for name, handle in actors.items():
            if name in wanted and name not in self._asked:
                self._asked[name] = handle.kept.remote()
        self._hear()
        for name, one in wanted.items():
            known = self._known.get(name)
            if name not in actors:
                self._forget(name)
                self._make(one)
            elif known is not None and known[1] != one.digest:
                self._forget(name)
                _stop([actors[name]])
        for name in self._known.keys() - wanted.keys():
            self._forget(name)

    def _hear(self) -> None:
        """Take the answers that have come."""
        if not self._asked:
            return
        names = {ref: name for name, ref in self._asked.items()}
        ready, _ = ray.wait(list(names), num_returns=len(names), timeout=0)
        for ref in ready:
            name = names[ref]
            del self._asked[name]
            try:
                kept, digest = ray.get(ref, timeout=_ASK_S)
                self._known[name] = kept, digest
                self._places[name] = Serving(kept.address, kept.socket)
                self._failed.pop(name, None)
            except (RayActorError, RayTaskError, GetTimeoutError) as error:
                self._known.pop(name, None)
                self._failed[name] = str(error).strip().splitlines()[-1][:300]

    def _make(self, wanted: Wanted) -> None:
        config = self._fleet.config
        duty = Duty(
            name=wanted.name,
            kind=wanted.kind,
            ip=wanted.ip,
            port=wanted.port,
            table=wanted.table,
            model=config.model,
            root=config.data_dir / wanted.node / wanted.name,
            ready_s_max=config.ready_s_max,
            silent_s_max=config.silent_s_max,
            log_bytes_max=config.log_bytes_max,
        )
        options = {
            "name": wanted.name,
            "namespace": config.namespace,
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": wanted.cpus,
            "num_gpus": wanted.gpus,
            "resources": {wanted.resource: 1.0} if wanted.resource else {},
            "scheduling_strategy": NodeAffinitySchedulingStrategy(wanted.node_id, soft=False),
        }
        ray.remote(ServiceActor).options(**options).remote(duty, wanted.digest)

    def _actors(self) -> dict[str, Any]:
        namespace = self._fleet.config.namespace
        found = {}
        for one in ray.util.list_named_actors(all_namespaces=True):
            if one["namespace"] == namespace and kind_of(one["name"]) is not None:
                try:
                    found[one["name"]] = ray.get_actor(one["name"], namespace)
                except ValueError:
                    continue  # it died meanwhile
        return found

    def _all_shown(self) -> list[Shown]:
        with self._lock:
            wanted = wanted_of(self._fleet, living_nodes(), self._places)
            return [self._shown(one) for one in wanted]

    def _shown(self, wanted: Wanted) -> Shown:
        known = self._known.get(wanted.name)
        shown = Shown(wanted.name, wanted.kind.value, wanted.node, SERVING)
        if known is None:
            failed = self._failed.get(wanted.name)
            return replace(shown, state="starting" if failed is None else f"failed: {failed}")
        kept, _ = known
        return replace(shown, address=kept.address, url=kept.url, admin=kept.admin, pid=kept.pid)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._asked.pop(name, None)


def living_nodes() -> list[Node]:
    """The machines of the cluster that are alive."""
    return [
        Node(
            node_id=one["NodeID"],
            name=one.get("NodeName") or one["NodeManagerAddress"],
            ip=one["NodeManagerAddress"],
            is_head=_HEAD in one["Resources"],
            resources=one["Resources"],
        )
        for one in ray.nodes()
        if one["Alive"]
    ]


def _stop(handles: Sequence[Any]) -> None:
    """Let services drain, then end their actors for good."""
    asked = [handle.stop.remote() for handle in handles]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=_STOP_S)
    for handle in handles:
        ray.kill(handle, no_restart=True)


def _candidates(admin: str) -> set[str]:
    """Workers that a router sends requests to."""
    told = http_json(admin, "/fleet")
    rows = told.get("workers", []) if isinstance(told, dict) else []
    return {row["worker"] for row in rows if row.get("state") == "candidate"}
