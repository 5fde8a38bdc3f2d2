"""The speed-ups of a suite as bars: a panel per workload and temperature, a group of bars per number of streams."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

mpl.use("Agg")


class Row(Protocol):
    """The drawn part of a row."""

    @property
    def workload(self) -> str: ...
    @property
    def temperature(self) -> float: ...
    @property
    def num_streams(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def speedup(self) -> float: ...


def plot_rows(rows: Seq[Row], path: Path) -> None:
    """Write the picture to `path`."""
    cases = list(dict.fromkeys((row.workload, row.temperature) for row in rows))
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(12, 2.6 * len(cases)), layout="constrained", squeeze=False)
    for panel, (workload, temperature) in zip(axes[:, 0], cases, strict=True):
        members = [row for row in rows if (row.workload, row.temperature) == (workload, temperature)]
        _draw(panel, members)
        panel.set_title(f"{workload}, T = {temperature}", fontsize=10)
    axes[0, 0].legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.5))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw(panel: Axes, rows: Seq[Row]) -> None:
    methods = list(dict.fromkeys(row.method for row in rows))
    streams = sorted({row.num_streams for row in rows})
    width = 0.85 / len(methods)
    colors = mpl.colormaps["tab20"]  # there are more methods than the ten usual ones
    for index, method in enumerate(methods):
        heights = [row.speedup for row in rows if row.method == method]
        places = [place + index * width for place in range(len(streams))]
        panel.bar(places, heights, width, label=method, color=colors(index))
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks([place + 0.4 for place in range(len(streams))], [f"{count} streams" for count in streams])
    panel.set_ylabel("tokens/s against plain", fontsize=8)
