"""Agents that move bytes within one process, when the test lets them: NIXL without NIXL."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.errors import BackendError
from kvtier.peers.nixl_agent import Direction, Exposure, State, Transfer, address_of

PROBE_BYTES = 64


@dataclass
class World:
    """All agents of a test, and what becomes of what they move. Any thread may use it."""

    holds: bool = False
    """Transfers that begin now move nothing before `release`. Not the first small one."""
    fails: bool = False
    """They end without having moved all."""
    damages: bool = False
    """One byte arrives wrong."""
    is_full: bool = False
    """No agent can be opened."""
    held: list["MemoryTransfer"] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    """Far addresses of what was begun, in order."""
    agents: dict[str, "MemoryAgent"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def agent(self, name: str, exposure: Exposure) -> "MemoryAgent":
        """An `AgentMaker`."""
        if self.is_full:
            raise BackendError("no more agents")
        return self.agents.setdefault(name, MemoryAgent(self, name))

    def release(self) -> None:
        """Let everything that is held come to pass, late."""
        self.holds = False
        with self.lock:
            held, self.held = self.held, []
        for transfer in held:
            transfer.happen()


class MemoryAgent:
    """`Agent`."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self.name = name
        self.memories: list[memoryview] = []
        self.known: set[str] = set()
        self.is_open = True

    def register(self, memory: memoryview) -> int:
        self.memories.append(memory)
        return address_of(memory)

    def describe(self) -> bytes:
        return self.name.encode()

    def meet(self, description: bytes) -> str:
        self.known.add(description.decode())
        return description.decode()

    def forget(self, name: str) -> None:
        self.known.remove(name)

    def begin(
        self, direction: Direction, near: int, far: int, size_bytes: int, name: str
    ) -> Transfer:
        peer = self._world.agents[name]
        if name not in self.known or not peer.is_open:
            raise BackendError("nobody there")
        assert within(self.memories, near, size_bytes)
        if not within(peer.memories, far, size_bytes):
            raise BackendError("memory that was not registered")
        into, of = (far, near) if direction is Direction.WRITE else (near, far)
        transfer = MemoryTransfer(self._world, peer, lambda: copied(into, of, size_bytes))
        with self._world.lock:
            self._world.targets.append(far)
            is_held = self._world.holds and size_bytes > PROBE_BYTES
            if is_held:
                self._world.held.append(transfer)
        if not is_held:
            transfer.happen()
        if self._world.damages and size_bytes > PROBE_BYTES:
            ctypes.memset(into, ctypes.c_ubyte.from_address(into).value ^ 1, 1)
        return transfer

    def close(self) -> None:
        self.is_open = False


class MemoryTransfer:
    """`Transfer`. Nothing ends it but the world."""

    def __init__(self, world: World, peer: MemoryAgent, move: Callable[[], None]) -> None:
        self._world = world
        self._peer = peer
        self._move = move
        self._state = State.RUNNING

    def happen(self) -> None:
        if self._world.fails:
            self._state = State.FAILED
            return
        if self._peer.is_open:
            self._move()
        self._state = State.DONE

    def state(self) -> State:
        return self._state

    def give_up(self) -> bool:
        return self._state is not State.RUNNING


def copied(into: int, of: int, size_bytes: int) -> None:
    ctypes.memmove(into, of, size_bytes)


def within(memories: list[memoryview], address: int, size_bytes: int) -> bool:
    return any(
        address_of(one) <= address and address + size_bytes <= address_of(one) + one.nbytes
        for one in memories
    )
