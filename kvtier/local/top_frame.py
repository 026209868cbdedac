"""What `kvtier top` shows, as lines of a given width and number. Pure.

What must not live here: terminals, calls. Input is the feed of a router's dashboard as parsed JSON:
missing or odd fields are shown as unknown, never raised for.
"""

import unicodedata
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

WIDTH_MIN: Final = 40
HEIGHT_MIN: Final = 10
MINUTE_POINTS: Final = 12
_BAR: Final = 16
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_ROWS_MAX: Final = 500
_LONG_ROWS: Final = 21
"""Of each list, where nothing bounds the frame."""

Table = Mapping[str, object]


class Tone(StrEnum):
    """How a line or a part of it is meant, for a terminal that has colours."""

    PLAIN = "plain"
    STRONG = "strong"
    FAINT = "faint"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    """One line; its text has no control characters and fits the width."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(slots=True)
class Known:
    """What the feed has said so far."""

    overview: Table = field(default_factory=dict)
    holders: Sequence[Table] = ()
    holders_count: int = 0
    requests: Sequence[Table] = ()
    events: deque[Table] = field(default_factory=lambda: deque(maxlen=_ROWS_MAX))
    minute: deque[Table] = field(default_factory=lambda: deque(maxlen=MINUTE_POINTS))
    """The last points of the series, a dictionary each."""
    last_point: int = 0
    last_event: int = 0

    def take(self, overview: Table) -> None:
        """Take in an overview; its points and events add to those known."""
        series = _table(overview, "series")
        columns = _table(series, "columns")
        for values in zip(*(_list(columns, name) for name in columns), strict=False):
            self.minute.append(dict(zip(columns, values, strict=True)))
        for event in reversed(_list(overview, "events")):
            if isinstance(event, dict):
                self.events.appendleft(event)
        self.last_point = int(_number(series, "last"))
        self.last_event = int(_number(overview, "events_count"))
        self.overview = overview

    def forget(self) -> None:
        """The router was restarted: nothing of its last life counts."""
        self.events.clear()
        self.minute.clear()
        self.last_point = self.last_event = 0


@dataclass(frozen=True, slots=True)
class Screen:
    """Where a frame goes."""

    width: int
    height: int | None
    """None: as long as it gets."""


def frame(known: Known, screen: Screen, trouble: str = "") -> list[Line]:
    """All lines, at most `screen.height` of them, each at most `screen.width` wide.

    `trouble` says why the router is not heard; what was known before is shown below it.
    """
    width = max(screen.width, WIDTH_MIN)
    lines = [Line(trouble, Tone.BAD)] if trouble else []
    if known.overview:
        lines += _head(known)
        lines += _alerts(known.overview)
        lines += _tiers(known.overview)
        left = None if screen.height is None else max(screen.height, HEIGHT_MIN) - len(lines)
        lines += _lists(known, width, left)
    cut = [Line(fit(line.text, width).rstrip(), line.tone) for line in lines]
    return cut if screen.height is None else cut[: max(1, screen.height)]


# ---- parts


def _head(known: Known) -> list[Line]:
    told = known.overview
    router, index = _table(told, "router"), _table(told, "index")
    fleet, gauges = _table(told, "fleet"), _table(told, "gauges")
    states, kinds = _table(fleet, "states"), _table(fleet, "kinds")
    clock = clock_text(_number(router, "now"))
    process = ""
    if _number(router, "processes") > 1:
        process = (
            f"  process {_number(router, 'process') + 1:.0f} of {_number(router, 'processes'):.0f}"
        )
    trust = {"exact": "EXACT", "degraded": "DEGRADED"}.get(str(index.get("trust")), "none")
    title = (
        f"kvtier {_text(router, 'instance')}  {clock}  up {duration(_number(router, 'up_s'))}"
        f"  {_text(router, 'policy')}  index {trust}{process}"
    )
    minute = known.minute
    spell = max(len(minute), 1) * (_number(_table(told, "series"), "point_s") or 1)
    hit = share(_sum(minute, "cached_tokens"), _sum(minute, "told_tokens"))
    expected = share(_sum(minute, "matched_tokens"), _sum(minute, "prompt_tokens"))
    medians = sorted(_given(minute, "ttft_p50_s"))
    slow = _given(minute, "ttft_p95_s")
    median = seconds(medians[(len(medians) - 1) // 2]) if medians else "-"
    rate = (
        f"requests {_sum(minute, 'requests') / spell:.1f}/s   hit {hit} (expected {expected})"
        f"   TTFT {median}, p95 {seconds(max(slow)) if slow else '-'}"
    )
    counts = "  ".join(
        f"{word} {_sum(minute, name):.0f}"
        for word, name in (
            ("5xx", "failed"),
            ("429", "limited"),
            ("4xx", "refused"),
            ("left", "left"),
        )
    )
    failed = _sum(minute, "failed") > 0
    work = (
        f"workers {_number(states, 'candidate'):.0f}/{_number(kinds, 'worker'):.0f}"
        f"  under way {_number(gauges, 'running'):.0f}  queued {_number(gauges, 'queued'):.0f}"
        f"  last minute: {counts}"
    )
    return [
        Line(title, Tone.STRONG),
        Line(rate),
        Line(work, Tone.BAD if failed else Tone.PLAIN),
    ]


def _alerts(told: Table) -> list[Line]:
    index = _table(told, "index")
    found = []
    if index.get("trust") == "degraded":
        age_s = index.get("age_s")
        since = f"for {duration(float(age_s))}" if isinstance(age_s, int | float) else "yet"
        found.append(Line(f"! the index is not heard {since}: routing by what was known", Tone.BAD))
    for model in _tables(told, "models"):
        if _number(model, "eligible") == 0:
            found.append(Line(f"! no worker takes requests for {_text(model, 'name')}", Tone.BAD))
        elif model.get("cause"):
            shown = f"! {_text(model, 'name')} is DEGRADED: {_text(model, 'cause')}"
            found.append(Line(shown, Tone.WARNING))
    if not _tables(told, "models"):
        found.append(Line("! no model is served yet", Tone.WARNING))
    return found[:3]


def _tiers(told: Table) -> list[Line]:
    is_stale = _table(told, "index").get("trust") == "degraded"
    rows = []
    for tier in _tables(told, "tiers"):
        used, most = _number(tier, "bytes"), _number(tier, "bytes_max")
        if not most:
            used, most = _number(tier, "blocks"), _number(tier, "blocks_max")
        part = min(used / most, 1.0) if most else 0.0
        full = round(part * _BAR) or int(part > 0)
        room = size(_number(tier, "bytes"))
        if _number(tier, "bytes_max"):
            room += f" of {size(_number(tier, 'bytes_max'))}"
        degraded = int(_number(tier, "degraded"))
        trust = f"{degraded} DEGRADED" if degraded else "as last heard" if is_stale else "EXACT"
        rows.append(
            Line(
                f"{_text(tier, 'tier').upper():<6}[{'#' * full}{'.' * (_BAR - full)}] "
                f"{plural(_number(tier, 'blocks'), 'block')}  {room}  "
                f"{plural(_number(tier, 'holders'), 'holder')}  {trust}",
                Tone.WARNING if degraded else Tone.PLAIN,
            )
        )
    return [Line(""), *rows] if rows else []


def _lists(known: Known, width: int, left: int | None) -> list[Line]:
    """Holders, requests and events; what there is room for, a part each."""
    holders = _rows(_HOLDERS, [_holder(row) for row in known.holders], width)
    requests = _rows(_REQUESTS, [_request(row) for row in known.requests], width)
    events = [_event(event) for event in known.events]
    parts = [("holders", holders, 0.4), ("requests", requests, 0.7), ("events", events, 1.0)]
    lines: list[Line] = []
    for name, rows, share_of_rest in parts:
        room = _LONG_ROWS
        if left is not None:
            room = max(0, round((left - len(lines)) * share_of_rest) - 1)
        if not rows or (left is not None and room < 1):
            continue
        shown = rows[:room]
        more = known.holders_count - len(known.holders) + len(rows) - len(shown)
        if name == "holders" and more > 0 and len(shown) > 2:
            shown = [*shown[:-1], Line(f"... {more + 1} more", Tone.FAINT)]
        lines += [Line(""), *shown]
    return lines


_HOLDERS: Final = ("HOLDER", "KIND", "STATE", "KNOWN", "IN FLIGHT", "WAITING", "HOLDS")
_REQUESTS: Final = ("ENDED", "STATUS", "SENT TO", "PROMPT", "REUSED", "TTFT", "TOTAL", "WHY")


def _holder(row: Table) -> tuple[tuple[str, ...], Tone]:
    name, state = _text(row, "name"), _text(row, "state")
    if _number(row, "dp_rank"):
        name += f"/{_number(row, 'dp_rank'):.0f}"
    tiers = _table(row, "tiers")
    holds = " ".join(
        f"{tier} {_number(_table(tiers, tier), 'blocks'):,.0f}" for tier in map(str, tiers)
    )
    trust = {"exact": "EXACT", "degraded": "DEGRADED"}.get(_text(row, "trust"), "-")
    tone = Tone.PLAIN
    if state != "candidate":
        tone = Tone.BAD
    elif trust == "DEGRADED":
        tone = Tone.WARNING
    in_flight = f"{_number(row, 'in_flight'):.0f}" if "in_flight" in row else ""
    waiting = f"{_number(row, 'waiting_tokens'):,.0f}" if "waiting_tokens" in row else ""
    shown = "ok" if state == "candidate" else state
    return (name, _text(row, "kind"), shown, trust, in_flight, waiting, holds or "nothing"), tone


def _request(row: Table) -> tuple[tuple[str, ...], Tone]:
    status = int(_number(row, "status"))
    tone = Tone.BAD if status >= 500 else Tone.WARNING if status >= 400 else Tone.PLAIN
    cached = row.get("cached_tokens")
    reused = f"{cached:,}" if isinstance(cached, int) else "-"
    why = _text(row, "error")
    if row.get("policy"):
        why = f"{_text(row, 'policy')}/{_text(row, 'knowledge')}"
    return (
        clock_text(_number(row, "at")),
        str(status) if status else "left",
        _text(row, "worker") or "-",
        f"{_number(row, 'prompt_tokens'):,.0f}",
        reused,
        seconds(row.get("ttft_s")),
        seconds(row.get("total_s")),
        why,
    ), tone


def _event(event: Table) -> Line:
    tones = {"good": Tone.GOOD, "warning": Tone.WARNING, "bad": Tone.BAD}
    words = (_text(event, name) for name in ("kind", "subject", "detail"))
    text = f"{clock_text(_number(event, 'at'))} {'  '.join(word for word in words if word)}"
    return Line(text, tones.get(_text(event, "level"), Tone.PLAIN))


def _rows(
    header: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], Tone]], width: int
) -> list[Line]:
    """A table whose columns are as wide as what is in them, names at most a third of the width."""
    if not rows:
        return []
    cells = [header, *(row for row, _ in rows[:_ROWS_MAX])]
    most = max(8, width // 3)
    widths = [min(most, max(columns(row[n]) for row in cells)) for n in range(len(header))]
    tones = [Tone.FAINT, *(tone for _, tone in rows)]
    return [
        Line("  ".join(fit(cell, wide) for cell, wide in zip(row, widths, strict=True)), tone)
        for row, tone in zip(cells, tones, strict=False)
    ]


# ---- words


def columns(text: str) -> int:
    """Columns of a terminal that a printable text takes."""
    return sum(_columns_of(character) for character in text)


def fit(text: str, width: int) -> str:
    """The text cut or padded to exactly `width` columns, without what a terminal would obey."""
    safe = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    taken, kept = 0, []
    for character in safe:
        wide = _columns_of(character)
        if taken + wide > width:
            break
        kept.append(character)
        taken += wide
    return "".join(kept) + " " * (width - taken)


def _columns_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def seconds(value: object) -> str:
    """A short time for people."""
    if not isinstance(value, int | float):
        return "-"
    if value < 1:
        return f"{value * 1e3:.1f} ms" if value < 0.01 else f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def duration(value: float) -> str:
    """A long one."""
    for limit, divisor, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if value < limit:
            return f"{value / divisor:.0f} {unit}"
    return f"{value / 86_400:.0f} d"


def size(count: float) -> str:
    """Bytes in a unit that leaves few digits."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.3g} {_UNITS[power]}"


def plural(count: float, word: str) -> str:
    return f"{count:,.0f} {word}{'' if count == 1 else 's'}"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def clock_text(at: float) -> str:
    """Time of day, UTC, of seconds since 1970."""
    try:
        return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return "--:--:--"


# ---- reading what may be anything


def _table(told: Table, name: str) -> Table:
    found = told.get(name)
    return found if isinstance(found, dict) else {}


def _list(told: Table, name: str) -> list[object]:
    found = told.get(name)
    return found if isinstance(found, list) else []


def _tables(told: Table, name: str) -> list[Table]:
    return [one for one in _list(told, name) if isinstance(one, dict)]


def _number(told: Table, name: str) -> float:
    found = told.get(name)
    return found if isinstance(found, int | float) else 0


def _text(told: Table, name: str) -> str:
    found = told.get(name)
    return found if isinstance(found, str) else ""


def _given(points: Sequence[Table] | deque[Table], name: str) -> list[float]:
    values = (point.get(name) for point in points)
    return [value for value in values if isinstance(value, int | float)]


def _sum(points: Sequence[Table] | deque[Table], name: str) -> float:
    return sum(_given(points, name))
