"""The phases of the demo, one after the other, on a running cluster.

What must not live here: how a cluster starts, what is printed.
"""

import asyncio
import contextlib
import http.client
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from kvtier.errors import UnavailableError
from kvtier.local.cluster import RunningCluster
from kvtier.local.demo.chats import CHATS, Chat, conversation
from kvtier.local.demo.client import Answer, Ask, Asking, ask
from kvtier.local.demo.judging import GPU, Computed, Phase, PhaseResult
from kvtier.local.plan import Kind
from kvtier.local.probes import samples
from kvtier.sections import parse_address

COLD: Final = Phase("cold", ())
REPEATED: Final = Phase("repeated: L1", (GPU,))
WORKER: Final = Phase("workers restarted: L2 DRAM", ("dram",))
STORE: Final = Phase("store restarted: NVMe", ("nvme",))
OTHER: Final = Phase("other worker: L2", ("dram", "nvme"))
OFF: Final = Phase("cache off", (), Computed.ALL)
_SETTLE_S_MAX: Final = 30.0
_LOOK_S: Final = 0.1
_ADMIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What is asked."""

    model: str
    system: str
    tokens_max: int
    asking: Asking = ask
    """How it is asked."""


class Demo:
    """Runs the phases on one cluster; each is told as it begins."""

    def __init__(self, cluster: RunningCluster, terms: Terms, tell: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._terms = terms
        self._tell = tell
        self._asking = terms.asking
        self._router = cluster.plan.endpoint.removeprefix("http://")
        self._workers = cluster.addresses(Kind.WORKER)
        self._answers: dict[str, list[str]] = {}
        """Of the first phase, by user: the history that every later phase goes on from."""
        self._warm: set[str] = set()
        """Workers that answered since they were last started."""

    async def run(self) -> list[PhaseResult]:
        """All phases in order. UnavailableError where the cluster does not answer."""
        results = [await self._phase(COLD), await self._phase(REPEATED)]
        await self._written()
        await self._restart()
        results.append(await self._phase(WORKER))
        await self._written()
        one = min(self._warm)
        other = next(name for name in self._workers if name != one)
        await self._restart("store")
        async with self._without(other):  # whose pool is empty, and stays so
            results.append(await self._phase(STORE))
        await self._written()
        async with self._without(one):
            results.append(await self._phase(OTHER))
        results.append(await self._phase(OFF))
        return results

    async def _phase(self, phase: Phase) -> PhaseResult:
        self._tell(phase.name)
        answers = []
        for turn in range(len(CHATS[0].questions)):
            for chat in CHATS:
                answers.append(await asyncio.to_thread(self._ask, phase, chat, turn))
        return PhaseResult(phase, tuple(answers))

    def _ask(self, phase: Phase, chat: Chat, turn: int) -> Answer:
        told = self._answers.setdefault(chat.user, [])
        messages = conversation(self._terms.system, chat, told[:turn])
        # Nobody else has this salt, so nothing of this request can be found, whatever is cached.
        salt = f"off-{chat.user}-{turn}" if phase is OFF else None
        answer = self._asking(
            self._router, Ask(self._terms.model, messages, self._terms.tokens_max, salt)
        )
        if phase is COLD:
            told.append(answer.text)
        self._warm.add(answer.worker)
        return answer

    # Faults and moves

    async def _restart(self, *more: str) -> None:
        """Restart every worker whose pool holds something, and whatever else is named."""
        names = [*more, *sorted(self._warm)]
        self._tell(f"restarting {', '.join(names)}")
        await asyncio.gather(*(self._cluster.supervisor.restart(name) for name in names))
        self._warm.clear()
        await self._cluster.until_seen()
        await self._until(self._attached, "every worker has found the store")

    @contextlib.asynccontextmanager
    async def _without(self, worker: str) -> AsyncIterator[None]:
        """One worker out of the router's choice while entered."""
        path = f"/workers/{quote(worker, safe='')}"
        await asyncio.to_thread(self._admin, f"{path}/drain")
        try:
            yield
        finally:
            await asyncio.to_thread(self._admin, f"{path}/undrain")

    def _admin(self, path: str) -> None:
        place = parse_address(self._cluster.plan.admin)
        connection = http.client.HTTPConnection(place.host, place.port, timeout=_ADMIN_S)
        try:
            connection.request("POST", path)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"the router's admin does not answer: {error!r}") from error
        finally:
            connection.close()
        if status != 200:
            raise UnavailableError(f"the router's admin answers {status} to {path}")

    # Waiting

    async def _written(self) -> None:
        """Wait until nothing is on its way to the store or from its DRAM to the disk."""
        await self._until(self._quiet, "everything is written to the store")

    async def _until(self, happened: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _SETTLE_S_MAX
        while not await asyncio.to_thread(happened):
            if time.monotonic() > until:
                self._tell(f"going on, though not within {_SETTLE_S_MAX:g} s: {what}")
                return
            await asyncio.sleep(_LOOK_S)

    def _quiet(self) -> bool:
        for address in self._workers.values():
            if sum(samples(address, "kvtier_worker_saves_waiting").values()):
                return False
        blocks = samples(self._cluster.plan.metrics["store"], "kvtier_store_blocks")
        return blocks.get('tier="nvme"', 0) >= blocks.get('tier="dram"', 0)

    def _attached(self) -> bool:
        return all(
            sum(samples(address, "kvtier_worker_store_attached").values())
            for address in self._workers.values()
        )
