"""`kvtier top`: what a router does, in a terminal; the same figures as its dashboard's.

Exit status: 0 after `q` or `--once`, 1 where `--once` finds no router, 130 after Ctrl-C. What must
not live here: what a frame looks like (`top_frame`).
"""

import argparse
import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

from kvtier.errors import ConfigError, UnavailableError
from kvtier.local.directory import DataDirectory
from kvtier.local.probes import http_json
from kvtier.local.settings import read_cluster
from kvtier.local.top_frame import Known, Line, Screen, Tone, duration, frame
from kvtier.sections import parse_address

ADMIN: Final = "127.0.0.1:8001"
_INTERRUPTED: Final = 130
_TERMINATED: Final = 143
_ROWS_WANTED: Final = 200
_PIPE_WIDTH: Final = 120
_COLOURS: Final = {
    Tone.STRONG: "\x1b[1m",
    Tone.FAINT: "\x1b[2m",
    Tone.GOOD: "\x1b[32m",
    Tone.WARNING: "\x1b[33m",
    Tone.BAD: "\x1b[31m",
}
_PLAIN: Final = "\x1b[0m"
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_TO_LINE_END: Final = "\x1b[K"
_TO_END: Final = "\x1b[J"


@dataclass(frozen=True, slots=True)
class TopTerms:
    """How to look."""

    admin: str
    """host:port of the router's admin listener."""
    interval_s: float
    once: bool


def command(argv: list[str]) -> int:
    """Entry point of `kvtier top`."""
    terms = read_terms(argv)
    watch = Watch(terms.admin)
    if terms.once:
        watch.ask()
        if watch.trouble:
            raise UnavailableError(watch.trouble)
        width = _size()[0] if sys.stdout.isatty() else _PIPE_WIDTH
        _write(frame(watch.known, Screen(width, None)), colours=sys.stdout.isatty())
        return 0
    if not sys.stdout.isatty():
        return _print_on(watch, terms.interval_s)
    return _Terminal(watch, terms.interval_s).run()


def read_terms(argv: Sequence[str]) -> TopTerms:
    """What the flags say; ConfigError where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="kvtier top", description="show what a router does", allow_abbrev=False
    )
    parser.add_argument("--admin", help=f"host:port of a router's admin listener ({ADMIN})")
    parser.add_argument("--data-dir", help="data directory of a cluster under kvtier up")
    parser.add_argument("--config", help="cluster file that names it")
    parser.add_argument("--interval-s", type=float, default=2.0, help="between two looks (2)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    told = parser.parse_args(list(argv))
    if not 0.1 <= told.interval_s <= 3600:
        raise ConfigError("--interval-s must be 0.1 to 3600")
    admin = told.admin or _admin_of(told.data_dir, told.config)
    if admin.startswith("unix:"):
        raise ConfigError("--admin is host:port; ask a Unix socket with curl --unix-socket")
    parse_address(admin)
    return TopTerms(admin, told.interval_s, told.once)


def _admin_of(data_dir: str | None, config: str | None) -> str:
    """The admin listener of a cluster that runs here; the default one where none is named."""
    flags: list[str] = []
    for flag, value in (("--data-dir", data_dir), ("--config", config)):
        flags += [] if value is None else [flag, value]
    directory = DataDirectory(read_cluster(flags).config.directory)
    state = directory.state() if directory.supervisor() is not None else None
    if state is not None and state.admin:
        return state.admin
    if flags:
        raise UnavailableError(f"no cluster runs in {directory.root}")
    return ADMIN


class Watch:
    """Asks a router and keeps what it said last."""

    def __init__(self, admin: str) -> None:
        self.known = Known()
        self.trouble = ""
        """Why the last question had no answer; empty where it had one."""
        self._admin = admin
        self._began = 0.0
        self._lost_at = 0.0

    def ask(self) -> None:
        """Ask for everything once; at most a few seconds. Raises nothing: see `trouble`."""
        known = self.known
        told = self._get(f"/ui/feed?point={known.last_point}&event={known.last_event}")
        if told is not None and self._is_another_life(told):
            known.forget()
            told = self._get("/ui/feed")
        holders = None if told is None else self._get(f"/ui/fleet?limit={_ROWS_WANTED}")
        requests = None if holders is None else self._get(f"/ui/requests?limit={_ROWS_WANTED}")
        if told is None or "router" not in told or holders is None or requests is None:
            self._fail()
            return
        known.take(told)
        known.holders = _rows(holders)
        count = holders.get("count")
        known.holders_count = count if isinstance(count, int) else len(known.holders)
        known.requests = _rows(requests)
        self.trouble = ""

    def _get(self, path: str) -> dict[str, object] | None:
        told = http_json(self._admin, path)
        return told if isinstance(told, dict) else None

    def _is_another_life(self, told: dict[str, object]) -> bool:
        router = told.get("router")
        if not isinstance(router, dict):
            return False
        began = float(router.get("now", 0)) - float(router.get("up_s", 0))
        is_other = bool(self._began) and abs(began - self._began) > 5
        self._began = began
        return is_other

    def _fail(self) -> None:
        now = time.monotonic()
        if not self.trouble:
            self._lost_at = now
        since = f" for {duration(now - self._lost_at)}" if self.known.overview else ""
        self.trouble = f"no router answers at {self._admin}{since}; is it up? trying again"


def _rows(told: dict[str, object]) -> list[dict[str, object]]:
    rows = told.get("rows")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _print_on(watch: Watch, interval_s: float) -> int:
    """A frame after the other, for a pipe; ends with its reader."""
    while True:
        watch.ask()
        try:
            _write(
                [*frame(watch.known, Screen(_PIPE_WIDTH, None), watch.trouble), Line("")],
                colours=False,
            )
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        time.sleep(interval_s)


def _size() -> tuple[int, int]:
    """Columns and lines of the terminal, as it is now."""
    try:
        found = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return 80, 24
    return found.columns or 80, found.lines or 24


def _write(lines: Sequence[Line], *, colours: bool) -> None:
    sys.stdout.write("".join(f"{_coloured(line) if colours else line.text}\n" for line in lines))
    sys.stdout.flush()


def _coloured(line: Line) -> str:
    colour = _COLOURS.get(line.tone)
    return line.text if colour is None else f"{colour}{line.text}{_PLAIN}"


class _Terminal:
    """Draws in place until `q`, Ctrl-C or SIGTERM; gives the terminal back as it was."""

    def __init__(self, watch: Watch, interval_s: float) -> None:
        self._watch = watch
        self._interval_s = interval_s
        self._status: int | None = None
        """Once a signal has ended it."""

    def run(self) -> int:
        with self._held() as wake:
            due = 0.0
            while self._status is None:
                if time.monotonic() >= due:
                    self._watch.ask()
                    due = time.monotonic() + self._interval_s
                self._draw()
                if self._quits(wake, due):
                    return 0
        return self._status

    def _draw(self) -> None:
        width, height = _size()
        lines = frame(self._watch.known, Screen(width, height - 1), self._watch.trouble)
        body = "".join(f"{_coloured(line)}{_TO_LINE_END}\r\n" for line in lines)
        sys.stdout.write(f"{_HOME}{body}{_TO_END}q: end")
        sys.stdout.flush()

    def _quits(self, wake: int, due: float) -> bool:
        """Wait until the next look is due, a key is pressed or a signal comes."""
        watched = [wake, *([sys.stdin.fileno()] if sys.stdin.isatty() else [])]
        ready, _, _ = select.select(watched, [], [], max(0.0, due - time.monotonic()))
        if wake in ready:
            os.read(wake, 512)
        if sys.stdin.isatty() and sys.stdin.fileno() in ready:
            keys = os.read(sys.stdin.fileno(), 64)
            return not keys or b"q" in keys or b"Q" in keys
        return False

    @contextlib.contextmanager
    def _held(self) -> Iterator[int]:
        """The terminal in our mode; a descriptor that is readable once a signal has come."""
        with contextlib.ExitStack() as stack:
            if sys.stdin.isatty():
                before = termios.tcgetattr(sys.stdin)
                stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, before)
                tty.setcbreak(sys.stdin)
            stack.callback(self._show, _LEAVE)
            self._show(_ENTER)
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            stack.callback(os.close, reading)
            stack.callback(os.close, writing)
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing))
            for number, handler in (
                # An exception out of a handler is lost where it meets a finaliser.
                (signal.SIGINT, self._end),
                (signal.SIGTERM, self._end),
                (signal.SIGHUP, self._end),
                (signal.SIGWINCH, _nothing),
            ):
                stack.callback(signal.signal, number, signal.signal(number, handler))
            yield reading

    def _end(self, number: int, where: FrameType | None) -> None:
        self._status = _INTERRUPTED if number == signal.SIGINT else _TERMINATED

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it may be gone
            sys.stdout.write(text)
            sys.stdout.flush()


def _nothing(number: int, where: FrameType | None) -> None:
    """A signal that only ends a wait."""
