"""The screen of `outrider top`, a textual application over readings of `/metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.widgets import DataTable, Footer, Static

from cluster.cli.server import NOT_UNDERSTOOD, AnswerError, ClassFigures, Figures, Reading, figures_between

_MAX_POSITIONS = 8


class TopView(App[None]):
    """Tables of pairs and classes, updated by each reading; a failed reading is reported and repeated."""

    CSS = (
        "#sums {height: auto; padding: 0 1} #alarms {height: auto; padding: 0 1} DataTable {height: auto; margin: 1 0}"
    )
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit")]

    def __init__(self, read: Callable[[], Reading], interval_s: float) -> None:
        super().__init__()
        self._read = read
        self._interval_s = interval_s
        self._before: Reading | None = None
        self._before_s = 0.0

    def compose(self) -> ComposeResult:
        yield Static("reading ...", id="sums")
        yield DataTable(id="pairs", show_cursor=False)
        yield DataTable(id="classes", show_cursor=False)
        yield Static("", id="alarms")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#pairs", DataTable).add_columns(
            "pair", "running", "waiting", "KV", "tokens per pass", "draft", "shapes"
        )
        positions = [f"pos. {position}" for position in range(_MAX_POSITIONS)]
        self.query_one("#classes", DataTable).add_columns("acceptance of", *positions)
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        while True:
            await self.refresh_figures()
            await asyncio.sleep(self._interval_s)

    async def refresh_figures(self) -> None:
        """Read once and show the changes since the previous reading."""
        try:
            now = await asyncio.to_thread(self._read)
            now_s = time.monotonic()
            figures = figures_between(self._before or now, now, max(now_s - self._before_s, 1e-3))
        except (AnswerError, *NOT_UNDERSTOOD) as error:
            self.query_one("#alarms", Static).update(Text(f"no metrics: {error}", style="bold red"))
            return
        self._before, self._before_s = now, now_s
        self.show(figures)

    def show(self, figures: Figures) -> None:
        """Write figures to the screen."""
        speedups = ", ".join(f"{name} {value:.2f}" for name, value in sorted(figures.speedups.items()))
        self.query_one("#sums", Static).update(
            Text(
                f"{figures.output_tokens_per_s:.1f} tokens/s out, {figures.prompt_tokens_per_s:.1f} in; "
                f"speed-up: {speedups or 'not measured yet'}"
            )
        )
        pairs = self.query_one("#pairs", DataTable).clear()
        for pair in figures.pairs:
            tokens = "" if pair.tokens_per_pass is None else f"{pair.tokens_per_pass:.2f}"
            draft = "away" if pair.is_draft_away else ""
            numbers = (str(pair.num_running), str(pair.num_waiting), f"{pair.kv_usage:.0%}", tokens)
            pairs.add_row(Text(pair.replica), *numbers, draft, pair.shapes)
        classes = self.query_one("#classes", DataTable).clear()
        for each in figures.classes:
            classes.add_row(*_class_row(each))
        alarms = Text("\n".join(figures.alarms), style="bold red") if figures.alarms else Text("no alarms")
        self.query_one("#alarms", Static).update(alarms)


def _class_row(figures: ClassFigures) -> list[Text]:
    shares = figures.acceptance[:_MAX_POSITIONS]
    cells = [Text("" if share is None else f"{share:.0%}") for share in shares]
    name = Text(figures.name, style="bold red" if figures.is_alarmed else "")
    return [name, *cells, *[Text("")] * (_MAX_POSITIONS - len(cells))]
