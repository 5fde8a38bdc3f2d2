"""The progress of downloading and loading models: bars in a terminal, else a line every few seconds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from engine.model.checkpoint.progress import FOLDER_VARIABLE, Progress, read_progress

_LINE_PERIOD_S = 5.0


@contextmanager
def loading_view(console: Console) -> Iterator[LoadingView]:
    """Show the loading of models by this process and its children until the block ends."""
    with TemporaryDirectory(prefix="outrider-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        view = LoadingView(console, Path(folder))
        try:
            view.start()
            yield view
        finally:
            view.stop()
            del os.environ[FOLDER_VARIABLE]


class LoadingView:
    """The display of loading models, from `start` to `stop`; `waiting_for` adds another reason for the wait."""

    def __init__(self, console: Console, folder: Path) -> None:
        self._console = console
        self._folder = folder
        self._waiting = "the models"
        self._began_s = self._told_s = time.monotonic()
        self._is_stopped = threading.Event()
        self._bars = _bars(console) if console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._thread = threading.Thread(target=self._run, name="loading-view", daemon=True)

    def start(self) -> None:
        """Start the display."""
        if self._bars is not None:
            self._bars.start()
        self._thread.start()

    def stop(self) -> None:
        """Show the last state and end; a second call does nothing."""
        if self._is_stopped.is_set():
            return
        self._is_stopped.set()
        self._thread.join()
        self._show()
        if self._bars is not None:
            self._bars.stop()

    def waiting_for(self, what: str) -> None:
        """Show another reason for the wait."""
        self._waiting = what

    @property
    def progress(self) -> Mapping[str, Progress]:
        """The present state of all reports."""
        return read_progress(self._folder)

    def _run(self) -> None:
        while not self._is_stopped.wait(0.25):
            self._show()

    def _show(self) -> None:
        found = self.progress
        running = [str(progress) for progress in found.values() if not progress.is_done]
        if self._bars is None or not running:
            self._print_line("; ".join(running))
        if self._bars is not None:
            self._draw(self._bars, found)

    def _draw(self, bars: Bars, found: Mapping[str, Progress]) -> None:
        for name, progress in found.items():
            if name not in self._tasks:
                self._tasks[name] = bars.add_task(f"{progress.activity} {progress.model}")
            bars.update(self._tasks[name], total=progress.total_bytes, completed=progress.num_bytes)

    def _print_line(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < _LINE_PERIOD_S:
            return
        self._told_s = now_s
        text = text or f"waiting for {self._waiting}"
        self._console.print(f"      {now_s - self._began_s:3.0f} s, {text}", markup=False)


def _bars(console: Console) -> Bars:
    columns = (TextColumn("      {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Bars(*columns, console=console)
