"""The demo's results: a table for people, JSON for programs, a picture.

What must not live here: measuring, judging.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.local.demo.judging import GPU, PhaseResult

_TIERS: Final = (GPU, "dram", "nvme", "redis", "peer")
_ALWAYS: Final = 3
"""Tiers that are shown even where nothing came from them."""
_COLOURS: Final = ("#8a8a8a", "#1b7837", "#5aae61", "#a6dba0", "#80b1d3", "#bebada")


def table(results: Sequence[PhaseResult]) -> str:
    """One row a phase. Pure."""
    tiers = _shown(results)
    rows = [
        ("phase", "TTFT first", "TTFT median", "prompt", "computed", *tiers, "hits", "identical")
    ]
    rows += [
        (
            one.phase.name,
            f"{one.ttft_first_s * 1000:.0f} ms",
            f"{one.ttft_median_s * 1000:.0f} ms",
            str(one.prompt_tokens),
            str(one.computed),
            *(str(one.reused.get(tier, 0)) for tier in tiers),
            f"{one.hit_rate:.0%}",
            one.identical.value,
        )
        for one in results
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        + "\n"
        for row in rows
    )


def as_json(results: Sequence[PhaseResult], model: str) -> dict[str, object]:
    """The same, and each request. Pure."""
    return {
        "model": model,
        "phases": [
            {
                "name": one.phase.name,
                "expected_tiers": list(one.phase.tiers),
                "ttft_first_s": one.ttft_first_s,
                "ttft_median_s": one.ttft_median_s,
                "prompt_tokens": one.prompt_tokens,
                "computed_tokens": one.computed,
                "reused_tokens": one.reused,
                "hit_rate": one.hit_rate,
                "identical": one.identical.value,
                "complaint": one.complaint(),
                "requests": [
                    {
                        "worker": answer.worker,
                        "ttft_s": answer.ttft_s,
                        "prompt_tokens": answer.prompt_tokens,
                        "reused_tokens": dict(answer.reused),
                        "identical": same.value,
                        "text": answer.text,
                    }
                    for answer, same in zip(one.answers, one.same, strict=True)
                ],
            }
            for one in results
        ],
    }


def plot(results: Sequence[PhaseResult], title: str, path: Path) -> None:
    """Draw TTFT and where prompt tokens came from, a bar a phase. ConfigError: no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("no picture: matplotlib is not installed (extra demo)") from None
    names = [one.phase.name for one in results][::-1]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    times = [one.ttft_first_s * 1000 for one in results][::-1]
    bars = left.barh(names, times, color="#4575b4")
    left.bar_label(bars, [f"{ms:.0f} ms" for ms in times], padding=3)
    left.set_xlim(0, max(times) * 1.2)
    left.set_xlabel("time to first token of the first request, ms")
    below = [0] * len(names)
    kinds = ["computed", *_shown(results)]
    for kind, colour in zip(kinds, _COLOURS, strict=False):
        counts = [_count(one, kind) for one in results][::-1]
        right.barh(names, counts, left=below, color=colour, label=kind)
        below = [a + b for a, b in zip(below, counts, strict=True)]
    right.set_xlabel("prompt tokens of all requests")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=len(kinds), frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _count(result: PhaseResult, kind: str) -> int:
    return result.computed if kind == "computed" else result.reused.get(kind, 0)


def _shown(results: Sequence[PhaseResult]) -> list[str]:
    used = {tier for one in results for tier, count in one.reused.items() if count}
    return [tier for i, tier in enumerate(_TIERS) if i < _ALWAYS or tier in used]
