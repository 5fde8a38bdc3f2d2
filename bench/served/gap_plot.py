"""The plot of a stream's gaps: the fraction of gaps longer than each length, by deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot

mpl.use("Agg")


def plot_gaps(gaps_ms: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Write to `path` one line per label: how many of its gaps [ms] are longer than the value below."""
    figure, panel = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for label, gaps in gaps_ms.items():
        ordered = np.sort(gaps)
        panel.step(ordered, 1.0 - np.arange(len(ordered)) / len(ordered), where="post", label=label)
    panel.set(xscale="log", yscale="log", xlabel="milliseconds between two chunks", ylabel="share of gaps that long")
    panel.set_title(title, fontsize=10)
    panel.grid(which="both", alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
