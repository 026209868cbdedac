"""What this machine lets the harness do, found by trying, and the marks that skip without it.

A check returns None, or the exact reason why something cannot be done here. Checks are done once
per process. What must not live here: guesses from user ids or platform names.
"""

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

COMMAND_TIMEOUT_S = 40.0
CHROMIUM = "/usr/bin/chromium"
CHROMEDRIVER = "/usr/bin/chromedriver"


def run_command(*argv: str, stdin: str | None = None) -> str:
    """Run a tool to its end and return its output; raises OSError that quotes its complaint."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"`{' '.join(argv)}` has not ended in {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise OSError(f"`{' '.join(argv)}` gave {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@cache
def netns_missing() -> str | None:
    """Why network namespaces with veth pairs, bridges and private mounts cannot be had."""
    for tool in ("ip", "tc", "bridge", "nsenter", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"no `{tool}` on PATH (packages iproute2, util-linux)"
    name = f"kvt-probe-{secrets.token_hex(4)}"
    try:
        run_command("ip", "netns", "add", name)
    except OSError as error:
        return str(error)
    try:
        run_command("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        run_command("ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
        private = "mount --make-rprivate / && mount -t tmpfs -o size=64k tmpfs /dev/shm"
        run_command("ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", private)
    except OSError as error:
        return str(error)
    finally:
        run_command("ip", "netns", "del", name)
    return None


@cache
def tbf_missing() -> str | None:
    """Why the bandwidth of a link cannot be limited."""
    reason = netns_missing()
    if reason is not None:
        return reason
    script = "ip link set lo up && tc qdisc add dev lo root tbf rate 1mbit burst 16k latency 50ms"
    try:
        run_command("unshare", "--net", "sh", "-c", script)
    except OSError as error:
        return str(error)
    return None


@cache
def tmpfs_missing() -> str | None:
    """Why a tmpfs cannot be mounted where processes under test see it."""
    for tool in ("mount", "umount"):
        if shutil.which(tool) is None:
            return f"no `{tool}` on PATH"
    with tempfile.TemporaryDirectory() as directory:
        try:
            run_command("mount", "-t", "tmpfs", "-o", "size=64k", "kvtier-test-probe", directory)
            run_command("umount", directory)
        except OSError as error:
            return str(error)
    return None


@cache
def diskshim_missing() -> str | None:
    """Why the preload library of `diskshim` cannot be built."""
    return None if shutil.which("gcc") else "no `gcc` on PATH"


@cache
def chromium_missing() -> str | None:
    """Why no headless browser can be driven."""
    for path in (CHROMIUM, CHROMEDRIVER):
        if not Path(path).exists():
            return f"no {path} (Debian packages chromium, chromium-driver)"
    if find_spec("selenium") is None:
        return "no Python package selenium"
    return None


CHECKS: dict[str, Callable[[], str | None]] = {
    "netns": netns_missing,
    "tbf": tbf_missing,
    "tmpfs": tmpfs_missing,
    "diskshim": diskshim_missing,
    "chromium": chromium_missing,
}

requires_netns = pytest.mark.needs("netns")
requires_tbf = pytest.mark.needs("tbf")
requires_tmpfs = pytest.mark.needs("tmpfs")
requires_diskshim = pytest.mark.needs("diskshim")
requires_chromium = pytest.mark.needs("chromium")


def missing(names: tuple[str, ...]) -> str | None:
    """The first reason why one of `names` cannot be had; KeyError for a name without a check."""
    for name in names:
        reason = CHECKS[name]()
        if reason is not None:
            return f"needs {name}, not to be had here: {reason}"
    return None
