"""The terminal during a start: the progress of models, then addresses, a first request, and a race of drafts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from actors.process.frames import private_folder
from cluster.cli.server import API_KEY
from cluster.deploy_file import LOOPBACK, DeployFile, in_url
from engine.model.checkpoint.progress import FOLDER_VARIABLE, Progress, read_progress

_LINE_PERIOD_S = 5.0
_RACE_PROMPT = "def main():\n    parser = argparse.ArgumentParser("


@contextmanager
def loading_view(console: Console) -> Iterator[LoadingView]:
    """Show the loading of models by this process and its children until the block ends."""
    folder = private_folder()
    os.environ[FOLDER_VARIABLE] = str(folder)
    view = LoadingView(console, folder)
    try:
        view.start()
        yield view
    finally:
        view.stop()
        del os.environ[FOLDER_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


class LoadingView:
    """The display of loading models, from `start` to `stop`; `waiting_for` adds another reason for the wait."""

    def __init__(self, console: Console, folder: Path) -> None:
        self._console = console
        self._folder = folder
        self._waiting = "the models"
        self._began_s = self._printed_s = time.monotonic()
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
        if now_s - self._printed_s < _LINE_PERIOD_S:
            return
        self._printed_s = now_s
        text = text or f"waiting for {self._waiting}"
        self._console.print(f"      {now_s - self._began_s:3.0f} s, {text}", markup=False)


def _bars(console: Console) -> Bars:
    columns = (TextColumn("      {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Bars(*columns, console=console)


def race(url: str, model: str) -> None:
    """Print both texts as they arrive, and the verdict; without a race, print the reason in one line."""
    console = Console(highlight=False)
    limit_s = 30.0  # of the whole race; a slower machine gets no race
    deadline_s = time.monotonic() + limit_s
    try:
        with OpenAI(base_url=url, api_key=API_KEY, timeout=limit_s, max_retries=0) as client:
            # Both ways run once before the clock, then each in turn.
            for enabled in (False, True):  # a warm-up of both ways, which also caches the prompt
                _run(client, model, 8, enabled, deadline_s)
            results = []
            for enabled in (False, True):
                console.print(f"draft {'on ' if enabled else 'off'} ", end="", style="bold")
                ids, seconds = _run(client, model, num_tokens=96, enabled=enabled, deadline_s=deadline_s)
                results.append((ids, seconds))
                console.print(f"{len(ids) / seconds:7.1f} tokens/s  ({len(ids)} tokens in {seconds:.2f} s)")
    except (OpenAIError, TimeoutError) as error:
        console.print(f"no race: {error}", style="dim")
        return
    (off, off_s), (on, on_s) = results
    if off != on:
        console.print("the texts differ: rejection and block verification keep the distribution, not the text")
        return
    console.print(f"identical tokens, {len(on) / on_s / (len(off) / off_s):.2f} times the speed", style="bold green")


def _run(client: OpenAI, model: str, num_tokens: int, enabled: bool, deadline_s: float) -> tuple[list[int], float]:
    """Return the token ids, and the seconds until the last of them."""
    extra: dict[str, Any] = {"return_token_ids": True, "speculation": {"enabled": enabled}}
    ids: list[int] = []
    began_s = time.monotonic()
    with client.completions.create(
        model=model, prompt=_RACE_PROMPT, max_tokens=num_tokens, temperature=0, seed=7, stream=True, extra_body=extra
    ) as stream:
        for event in stream:
            if time.monotonic() > deadline_s:
                raise TimeoutError("it would take more than 30 s here")
            for choice in event.choices:
                ids += (choice.model_extra or {}).get("token_ids") or ()
    return ids, time.monotonic() - began_s


def race_in_terminal(file: DeployFile) -> None:
    """Run the race if the output is a terminal and the server is on loopback without keys and TLS."""
    ingress, host = file.config.ingress, file.http_host
    if not sys.stdout.isatty() or ingress.api_keys_file or ingress.tls_certificate_file or host not in LOOPBACK:
        return
    race(f"{file.http_url}/v1", file.config.model_id)


def invitation(file: DeployFile, logs: str | None = None) -> str:
    """Return the addresses, a first request, and the way to stop."""
    address = file.http_url
    body = {"model": file.config.model_id, "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}
    lines = [
        f"  page   {address}/",
        f"  HTTP   {address}/v1   (model {file.config.model_id})",
        *([f"  gRPC   {in_url(file.http_host)}:{file.grpc_port}   (outrider.v1.Generation)"] if file.grpc_port else []),
        *([f"  logs   {logs}"] if logs else []),
        "",
        "try:",
        f"  curl {address}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}",
        "",
        "stop with Ctrl-C",
    ]
    return "\n".join(lines)
