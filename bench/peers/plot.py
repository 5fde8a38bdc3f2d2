"""Tokens per second by the number of streams: a colour per system, dashed without the draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.peers.rows import Row
from bench.peers.system import Mode

DASHES = {Mode.PLAIN: "--", Mode.DRAFT: "-"}
SIZE_INCHES = (9, 5)
DOTS_PER_INCH = 120


def draw(rows: Seq[Row], path: Path) -> None:
    """A logarithmic picture into `path`."""
    figure = Figure(figsize=SIZE_INCHES)
    axes = figure.subplots()
    systems = list(dict.fromkeys(row.system for row in rows))
    for system, mode in dict.fromkeys((row.system, row.mode) for row in rows):
        points = [(row.num_streams, row.tokens_per_second) for row in rows if (row.system, row.mode) == (system, mode)]
        color = f"C{systems.index(system)}"
        axes.plot(*zip(*points, strict=True), DASHES[mode], marker="o", color=color, label=f"{system}, {mode}")
    streams = sorted({row.num_streams for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="streams at once", ylabel="tokens per second, all streams")
    axes.set_xticks(streams, [str(number) for number in streams], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=DOTS_PER_INCH, bbox_inches="tight")
