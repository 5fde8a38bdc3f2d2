"""The dashboard's panels as Prometheus answers them, drawn as a page: a picture of it where no Grafana is.

    python -m bench.served.dashboard_plot --prometheus http://127.0.0.1:9090 --minutes 20 --output dashboard.png

Draws what `docs/watch/dashboard.json` asks for, panel by panel, and reports the queries that have no answer.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

mpl.use("Agg")
DASHBOARD = Path("docs/watch/dashboard.json")
_COLUMNS = 3
_NUM_POINTS = 240
_RATE_INTERVAL = "60s"
_MAX_LABELS = 8


def series_of(client: httpx.Client, expr: str, begin_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return the series of a query over a time, as Prometheus answers it."""
    step_s = max(1.0, (end_s - begin_s) / _NUM_POINTS)
    query = expr.replace("$__rate_interval", _RATE_INTERVAL)
    reply = client.get("/api/v1/query_range", params={"query": query, "start": begin_s, "end": end_s, "step": step_s})
    reply.raise_for_status()
    return list(reply.json()["data"]["result"])


def legend_of(legend: str | None, labels: dict[str, str]) -> str:
    """Return the legend of a series: Grafana's `{{label}}` filled in, or the labels where there is none."""
    if not legend:
        return ", ".join(labels.values())
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), legend)


def draw(axes: Axes, panel: dict[str, Any], client: httpx.Client, begin_s: float, end_s: float) -> list[str]:
    """Draw a panel, and return its queries without an answer."""
    silent = []
    for target in panel["targets"]:
        found = series_of(client, target["expr"], begin_s, end_s)
        if not found:
            silent.append(target["expr"])
        for series in found:
            minutes = [(float(at) - begin_s) / 60 for at, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            axes.plot(minutes, values, linewidth=1.1, label=legend_of(target.get("legendFormat"), series["metric"]))
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_title(panel["title"] if unit == "short" else f"{panel['title']} [{unit}]", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.set_xlim(0, (end_s - begin_s) / 60)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(handles[:_MAX_LABELS], labels[:_MAX_LABELS], fontsize=6)
    return silent


def plot_dashboard(client: httpx.Client, minutes: float, output: Path) -> list[str]:
    """Write the page of the last `minutes`, and return the queries that have no answer."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    end_s = time.time()
    begin_s = end_s - 60 * minutes
    num_rows = -(-len(panels) // _COLUMNS)
    figure, grid = pyplot.subplots(num_rows, _COLUMNS, figsize=(14, 2.4 * num_rows), layout="constrained")
    silent = []
    for axes, panel in zip(grid.flat, panels, strict=False):
        silent += draw(axes, panel, client, begin_s, end_s)
    for axes in list(grid.flat)[len(panels) :]:
        axes.axis("off")
    figure.supxlabel("minutes", fontsize=8)
    figure.savefig(output, dpi=70)
    pyplot.close(figure)
    return silent


def main() -> None:
    """Draw, and print what has no answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with httpx.Client(base_url=options.prometheus, timeout=30.0) as client:
        for query in plot_dashboard(client, options.minutes, options.output):
            print(f"no answer: {query}")


if __name__ == "__main__":
    main()
