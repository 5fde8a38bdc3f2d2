"""A report as bars. Needs matplotlib (`pip install .[bench]`), as no other module here does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

from bench.simulator.report import Row

mpl.use("Agg")

_PANELS: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("prefix hit rate (of prompt tokens)", lambda row: row.hit_rate),
    ("TTFT mean [s]", lambda row: row.ttft_mean_s),
    ("TTFT p50 [s]", lambda row: row.ttft_p50_s),
    ("TTFT p95 [s]", lambda row: row.ttft_p95_s),
    ("TTFT p99 [s]", lambda row: row.ttft_p99_s),
    ("imbalance (busiest / mean worker)", lambda row: row.imbalance),
)


def plot_rows(rows: Sequence[Row], title: str, path: Path) -> None:
    """One panel per figure, one bar per row.

    Times on a logarithmic axis, as a policy that collapses is orders of magnitude off.
    """
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 7.5), layout="constrained")
    for panel, (label, value_of) in zip(axes.flat, _PANELS, strict=True):
        _draw_panel(panel, label, rows, [value_of(row) for row in rows])
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_panel(panel: Axes, label: str, rows: Sequence[Row], values: Sequence[float]) -> None:
    colors = ["tab:green" if row.policy.startswith("prefix") else "tab:gray" for row in rows]
    bars = panel.barh([row.policy for row in rows], values, color=colors)
    panel.bar_label(bars, fmt="%.4g", padding=3, fontsize=8)
    panel.set_title(label, fontsize=10)
    panel.invert_yaxis()
    panel.margins(x=0.18)
    if label.startswith("TTFT"):
        panel.set_xscale("log")
