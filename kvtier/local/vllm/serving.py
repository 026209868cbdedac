"""vLLM and the bridge beside it, as processes that end together. Main thread only.

vLLM starts processes of its own that rename themselves; all are in one process group, and none
outlives it. A bridge that ends is started again after a pause that doubles. Signals go to vLLM;
its exit status is ours. What must not live here: flags.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from kvtier.config import variables_with
from kvtier.engines.vllm.namespaces import FILE as NAMESPACE_FILE
from kvtier.engines.vllm.namespaces import told_namespace
from kvtier.errors import ConfigError
from kvtier.local.child import EXEC, command_of
from kvtier.local.settings import Table, merged
from kvtier.local.vllm.asking import Server
from kvtier.local.vllm.environment import look
from kvtier.local.vllm.server import Assembled, assembled, check_bridge
from kvtier.local.vllm.settings import BRIDGE_STOP_S, VllmConfig
from kvtier.sections import parse_address

_FORWARDED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_SOCKETS: Final = ("events", "replay", NAMESPACE_FILE)
_PAUSE_S_FIRST: Final = 0.5
_PAUSE_S_MAX: Final = 30.0
_STEADY_S: Final = 30.0
_SIGNALLED: Final = 128


def serve(config: VllmConfig, log: TextIO) -> int:
    """Run vLLM and its bridge until vLLM ends; returns its exit status, 128 + n for a signal.

    ConfigError and UnavailableError before anything was started.
    """
    with _run_directory(config.run_dir) as run_dir:
        parts = assembled(config, look(config.python), run_dir)
        if parts.bridge is not None:
            check_bridge(parts.bridge, run_dir)
        for name in _SOCKETS:
            (run_dir / name).unlink(missing_ok=True)  # of a server that was killed
        return asyncio.run(_Pair(parts, run_dir, config.stop_s_max, log).run())


@contextlib.contextmanager
def _run_directory(chosen: Path | None) -> Iterator[Path]:
    """A directory for sockets that no other user reaches; one of our own is removed again."""
    if chosen is None:
        made = Path(tempfile.mkdtemp(prefix="kvtier-vllm-"))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return
    path = chosen.expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o77:
        raise ConfigError(f"{path} can be reached by others")
    yield path


class _Pair:
    """Both processes over the life of vLLM."""

    def __init__(self, parts: Assembled, run_dir: Path, stop_s_max: float, log: TextIO) -> None:
        self._parts = parts
        self._run_dir = run_dir
        self._stop_s_max = stop_s_max
        self._log = log
        self._bridge: asyncio.subprocess.Process | None = None
        self._kill: asyncio.TimerHandle | None = None
        self._ended = threading.Event()

    async def run(self) -> int:
        """See `serve`."""
        vllm = self._spawned()
        loop = asyncio.get_running_loop()
        for number in _FORWARDED:
            loop.add_signal_handler(number, self._forward, vllm.pid, number)
        table = self._parts.bridge
        beside = None if table is None else asyncio.create_task(self._keep_bridge(table))
        try:
            # Not reaped yet, so that its process group cannot be that of somebody else.
            await asyncio.to_thread(os.waitid, os.P_PID, vllm.pid, os.WEXITED | os.WNOWAIT)
        finally:
            _kill_group(vllm.pid)
            if self._kill is not None:
                self._kill.cancel()
            code = vllm.wait()
            self._ended.set()
            if beside is not None:
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)
            await self._end_bridge()
        return code if code >= 0 else _SIGNALLED - code

    def _spawned(self) -> subprocess.Popen[bytes]:
        self._say(f"starting vLLM at {self._parts.address}")
        return subprocess.Popen(  # noqa: S603 (the operator chose the program)
            command_of([EXEC, *self._parts.argv]),
            stdin=subprocess.DEVNULL,
            env=variables_with(self._parts.variables),
            process_group=0,
        )

    def _forward(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number in _ENDING and self._kill is None:
            loop = asyncio.get_running_loop()
            self._kill = loop.call_later(self._stop_s_max, _kill_group, pid)

    async def _keep_bridge(self, table: Table) -> None:
        """Start the bridge once vLLM serves, and again whenever it ends."""
        place = parse_address(self._parts.address)
        server = Server(place.host, place.port, is_https=False)
        await asyncio.to_thread(server.until_healthy, self._ended)
        told = {"model": {"namespace": told_namespace(self._run_dir)}}
        toml = check_bridge(merged(table, told), self._run_dir)
        pause_s = _PAUSE_S_FIRST
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._bridge = await asyncio.create_subprocess_exec(
                *command_of(["bridge", "--config", str(toml)]),
                stdin=asyncio.subprocess.DEVNULL,
                process_group=0,
            )
            code = await self._bridge.wait()
            if loop.time() - started > _STEADY_S:
                pause_s = _PAUSE_S_FIRST
            self._say(f"the bridge ended with status {code}; starting again in {pause_s:g} s")
            await asyncio.sleep(pause_s * (1 + secrets.randbelow(100) / 1000))
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _end_bridge(self) -> None:
        bridge = self._bridge
        if bridge is None or bridge.returncode is not None:
            return
        bridge.terminate()
        try:
            async with asyncio.timeout(BRIDGE_STOP_S):
                await bridge.wait()
        except TimeoutError:
            bridge.kill()
            await bridge.wait()

    def _say(self, text: str) -> None:
        self._log.write(f"kvtier vllm: {text}\n")
        self._log.flush()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
