"""NIXL behind three verbs: meet another agent, move bytes to or from its memory, forget it.

Only here is the wheel imported, and only when an agent is opened: the store runs without it.
What must not live here: blocks, slots, sockets, who may meet whom.
"""

import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from kvtier.errors import BackendError, ConfigError

DESCRIPTION_BYTES_MAX: Final = 1 << 16
PROGRESS_US: Final = 2_000
"""How often UCX is looked after where no event of its own asks for it."""
_EXTRA: Final = "nixl is not installed: pip install 'kvtier[nixl]'"

T = TypeVar("T")


class Direction(Enum):
    """Seen from the agent that moves."""

    WRITE = "WRITE"
    READ = "READ"


class State(Enum):
    """Of a transfer."""

    RUNNING = "running"
    DONE = "done"
    """Every byte is where it belongs."""
    FAILED = "failed"
    """It moves nothing more, but what it had sent may still come to lie."""


class Exposure(Enum):
    """Who can connect to an agent. UCX asks nobody who he is: whoever can is trusted."""

    LOOPBACK = "loopback"
    """Processes of this machine."""
    ANY = "any"
    """Whoever reaches a network device of this machine."""


class Transfer(Protocol):
    """One transfer that has begun."""

    def state(self) -> State: ...

    def give_up(self) -> bool:
        """Try to end it; whether it has ended. FAILED from then on, unless it was DONE."""
        ...


class Agent(Protocol):
    """Any thread may call it. BackendError where the library refuses."""

    def register(self, memory: memoryview) -> int:
        """Let the memory be moved from and to, as long as the agent lives; its address."""
        ...

    def describe(self) -> bytes:
        """What another agent needs to reach all that is registered here."""
        ...

    def meet(self, description: bytes) -> str:
        """Know another agent from now on; its name."""
        ...

    def forget(self, name: str) -> None:
        """End the connection to it."""
        ...

    def begin(
        self, direction: Direction, near: int, far: int, size_bytes: int, name: str
    ) -> Transfer:
        """Begin to move so many bytes between an address here and one there."""
        ...

    def close(self) -> None:
        """Nothing is moved to or from the memory afterwards. Idempotent."""
        ...


AgentMaker = Callable[[str, Exposure], Agent]


def is_installed() -> bool:
    """Whether an agent could be opened here. Imports nothing of it."""
    return importlib.util.find_spec("nixl_cu12") is not None


def open_agent(name: str, reach: Exposure) -> Agent:
    """A NIXL agent over UCX. Takes seconds the first time.

    ConfigError where the wheel is not installed, BackendError where UCX does not start.
    """
    try:
        api: Any = importlib.import_module("nixl_cu12._api")
        bindings: Any = importlib.import_module("nixl_cu12._bindings")
    except ImportError as error:
        raise ConfigError(f"{_EXTRA} ({error})") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of every agent
    return _NixlAgent(api, bindings, name, reach)


def address_of(memory: memoryview) -> int:
    """Where memory is that can be written."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class _NixlAgent:
    """`Agent` over the wheel. One call at a time: the library leaves that to its callers."""

    def __init__(self, api: Any, bindings: Any, name: str, reach: Exposure) -> None:
        self._lock = threading.Lock()
        refusals: list[type[Exception]] = [RuntimeError, AttributeError]
        for one in vars(bindings).values():
            if isinstance(one, type) and issubclass(one, Exception):
                refusals.append(one)
        self._refusals = tuple(refusals)
        self._registered: list[Any] = []
        self._memories: list[memoryview] = []  # not freed before a transfer that still runs
        self._agent: Any = None
        self._agent = self._asked(partial(_started, api, bindings, name, reach))

    def register(self, memory: memoryview) -> int:
        """See `Agent.register`."""
        address = address_of(memory)
        region = [(address, memory.nbytes, 0, "")]
        self._registered.append(self._asked(lambda: self._agent.register_memory(region, "DRAM")))
        self._memories.append(memory)
        return address

    def describe(self) -> bytes:
        """See `Agent.describe`."""
        return bytes(self._asked(lambda: self._agent.get_agent_metadata()))

    def meet(self, description: bytes) -> str:
        """See `Agent.meet`."""

        def known() -> str:
            name = self._agent.add_remote_agent(description)
            return name.decode() if isinstance(name, bytes) else str(name)

        return self._asked(known)

    def forget(self, name: str) -> None:
        """See `Agent.forget`."""
        self._asked(lambda: self._agent.remove_remote_agent(name))

    def begin(
        self, direction: Direction, near: int, far: int, size_bytes: int, name: str
    ) -> Transfer:
        """See `Agent.begin`."""

        def begun() -> Transfer:
            here = self._agent.get_xfer_descs([(near, size_bytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(far, size_bytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer(direction.value, here, there, name)
            return _NixlTransfer(self, handle, self._agent.transfer(handle))

        return self._asked(begun)

    def close(self) -> None:
        """See `Agent.close`."""
        with self._lock:
            self._registered.clear()
            self._agent = None  # the library ends its threads and connections with its object

    def state_of(self, handle: Any) -> State:
        """Of a transfer that was begun here."""
        return _state(str(self._asked(lambda: self._agent.check_xfer_state(handle))))

    def release(self, handle: Any) -> None:
        """End a transfer, if it runs, and let go of it."""
        self._asked(lambda: self._agent.release_xfer_handle(handle))

    def _asked(self, call: Callable[[], T]) -> T:
        with self._lock:
            try:
                return call()
            except self._refusals as error:
                raise BackendError(f"nixl: {type(error).__name__}: {error}") from error


class _NixlTransfer:
    """`Transfer` of an agent. One thread at a time."""

    def __init__(self, agent: _NixlAgent, handle: Any, begun: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = State.RUNNING
        self._begun = begun

    def state(self) -> State:
        """See `Transfer.state`."""
        if self._state is State.RUNNING:
            state = _state(self._begun)
            if state is State.RUNNING:
                try:
                    state = self._agent.state_of(self._handle)
                except BackendError:
                    state = State.FAILED
            self._end(state)
        return self._state

    def give_up(self) -> bool:
        """See `Transfer.give_up`."""
        if self.state() is State.RUNNING:
            self._end(State.FAILED)
        return self._state is not State.RUNNING

    def _end(self, state: State) -> None:
        if state is State.RUNNING:
            return
        try:
            self._agent.release(self._handle)
        except BackendError:
            if state is not State.DONE:
                return  # it runs on
        self._handle = None  # or the library's object would outlive `close`
        self._state = state


def _started(api: Any, bindings: Any, name: str, reach: Exposure) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread = True
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE  # one call at a time
    config.pthrDelay = PROGRESS_US  # its own wrapper says 0, and then the thread never rests
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    agent.agent = bindings.nixlAgent(name, config)
    settings = {"ucx_error_handling_mode": "peer"}
    if reach is Exposure.LOOPBACK:
        os.putenv("UCX_NET_DEVICES", "lo")  # read when the backend starts; names of TCP devices
    agent.create_backend("UCX", settings)
    return agent


def _state(said: str) -> State:
    return {"DONE": State.DONE, "PROC": State.RUNNING}.get(said, State.FAILED)
