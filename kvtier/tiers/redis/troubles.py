"""What can be wrong with a Redis, told by the first word of its error replies.

What must not live here: what is done about it.
"""

from enum import StrEnum
from typing import Final

from kvtier.errors import KvtierError
from kvtier.ports import PutResult, PutStatus, Refusal


class Trouble(StrEnum):
    """Why the tier is degraded; reasons of results and labels of metrics."""

    OUT_OF_MEMORY = "out_of_memory"
    """`maxmemory` with `noeviction`: writes are refused, reads go on."""
    READ_ONLY = "read_only"
    """A replica: the master is elsewhere now."""
    DISK_REFUSED = "disk_refused"
    """It refuses writes because it could not save or replicate (MISCONF, NOREPLICAS)."""
    LOADING = "loading"
    BUSY = "busy"
    """A script of somebody blocks it."""
    UNAUTHENTICATED = "unauthenticated"
    WRONG_PASSWORD = "wrong_password"  # noqa: S105
    FORBIDDEN = "forbidden"
    """Its ACL does not let us."""
    MASTER_DOWN = "master_down"
    CLUSTER = "cluster"
    """A Redis Cluster, which this tier does not speak to."""
    CROWDED = "crowded"
    """It has no room for another client."""
    UNREACHABLE = "unreachable"
    """No connection, or a lost one; also: no Sentinel knows a master."""
    SILENT = "silent"
    """Connected, and no answer in time."""
    PROTOCOL = "protocol"
    """What came is not what a Redis says."""
    BREAKER_OPEN = "breaker_open"
    CONTENDED = "contended"
    """Others put and dropped this very block all the time."""
    REFUSED = "refused"
    """Any other error reply."""


_BY_CODE: Final = {
    "OOM": Trouble.OUT_OF_MEMORY,
    "READONLY": Trouble.READ_ONLY,
    "MISCONF": Trouble.DISK_REFUSED,
    "NOREPLICAS": Trouble.DISK_REFUSED,
    "LOADING": Trouble.LOADING,
    "BUSY": Trouble.BUSY,
    "NOAUTH": Trouble.UNAUTHENTICATED,
    "WRONGPASS": Trouble.WRONG_PASSWORD,
    "NOPERM": Trouble.FORBIDDEN,
    "MASTERDOWN": Trouble.MASTER_DOWN,
    "MOVED": Trouble.CLUSTER,
    "ASK": Trouble.CLUSTER,
    "CLUSTERDOWN": Trouble.CLUSTER,
    "CROSSSLOT": Trouble.CLUSTER,
    "TRYAGAIN": Trouble.CLUSTER,
}
WRITES_ONLY: Final = frozenset(
    {Trouble.OUT_OF_MEMORY, Trouble.READ_ONLY, Trouble.DISK_REFUSED, Trouble.REFUSED}
)
"""Troubles of a server that still answers reads."""
WRONG_TYPE: Final = "WRONGTYPE"
_REFUSALS: Final = {
    Trouble.OUT_OF_MEMORY: Refusal.FULL,
    Trouble.READ_ONLY: Refusal.READ_ONLY,
    Trouble.DISK_REFUSED: Refusal.READ_ONLY,
}


class RedisTroubleError(KvtierError):
    """The call cannot go on; stays inside this package, where it becomes results."""

    def __init__(self, trouble: Trouble, detail: str = "") -> None:
        super().__init__(f"{trouble.value}: {detail}" if detail else trouble.value)
        self.trouble = trouble


def code_of(message: str) -> str:
    """The first word of an error reply."""
    return message.split(" ", 1)[0]


def classify(message: str) -> Trouble:
    """What an error reply says is wrong."""
    known = _BY_CODE.get(code_of(message))
    if known is not None:
        return known
    lowered = message.lower()
    if "max number of clients" in lowered:
        return Trouble.CROWDED
    if "password" in lowered:  # servers before version 6
        return Trouble.WRONG_PASSWORD
    return Trouble.REFUSED


def refused_put(trouble: Trouble) -> PutResult:
    """The outcome of a put that met this trouble."""
    refusal = _REFUSALS.get(trouble)
    if refusal is not None:
        return PutResult(PutStatus.REFUSED, refusal)
    return PutResult(PutStatus.ERROR, trouble)
