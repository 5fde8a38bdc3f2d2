"""The wait for models: the loading processes' reports become lines in a file and bars in a terminal."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cluster.cli import serve_view as module
from cluster.cli.serve_view import loading_view
from engine.config import ModelConfig
from engine.model.checkpoint.progress import Progress, ProgressReport
from engine.model.loader import load_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINE_PERIOD_S", 0.0)


def console(is_terminal: bool) -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=is_terminal, width=100, highlight=False), output


def test_time_left_is_that_of_the_bytes_left_at_the_speed_so_far():
    assert str(Progress("reading", "org/big", 3_000_000_000, 8_000_000_000, 6.0)) == (
        "reading org/big: 3.0 GB of 8.0 GB, 10 s left"
    )
    resumed = Progress("fetching", "org/big", 3_000_000_000, 8_000_000_000, 6.0, first_bytes=2_000_000_000)
    assert resumed.left_s == pytest.approx(30.0)
    assert str(Progress("fetching", "org/big", 0, 8_000_000_000, 0.0)) == "fetching org/big: 0.0 MB of 8.0 GB"


def test_a_file_gets_lines_with_bytes_and_seconds_left():
    out, output = console(is_terminal=False)
    now_s = iter([0.0, 0.0, 5.0])
    with loading_view(out) as view:
        ProgressReport("reading", "org/big", 8_000_000, clock=lambda: next(now_s)).at(2_000_000)
        view.stop()
    assert "reading org/big: 2.0 MB of 8.0 MB, 15 s left" in output.getvalue()


def test_a_terminal_gets_a_bar_and_what_else_is_waited_for():
    out, output = console(is_terminal=True)
    with loading_view(out) as view:
        view.waiting_for("Pair: no node has 2 GPUs")
        view.stop()
    assert "waiting for Pair: no node has 2 GPUs" in output.getvalue()
    out, output = console(is_terminal=True)
    with loading_view(out):
        ProgressReport("reading", "org/big", 8_000_000).at(8_000_000)
    assert "reading org/big" in output.getvalue()
    assert "8.0/8.0 MB" in output.getvalue()


def test_reading_weights_reports_every_byte_and_prints_no_bar_of_its_own(capfd: pytest.CaptureFixture[str]):
    out, _ = console(is_terminal=False)
    with loading_view(out) as view:
        load_model(ModelConfig(str(ROOT / "models/demo/draft")), torch.device("cpu"))
        (told,) = view.progress.values()
    size = (ROOT / "models/demo/draft/model.safetensors").stat().st_size
    assert (told.activity, told.model, told.num_bytes, told.total_bytes) == ("reading", "demo/draft", size, size)
    assert "Loading weights" not in capfd.readouterr().err


def test_the_reports_of_a_killed_command_are_removed_by_the_next():
    code = """
import os
from rich.console import Console
from cluster.cli.serve_view import loading_view
with loading_view(Console(quiet=True)):
    print(os.environ["OUTRIDER_PROGRESS_FOLDER"], flush=True)
    os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    folder = Path(killed.stdout.strip())
    assert folder.is_dir(), killed.stderr
    with loading_view(console(is_terminal=False)[0]):
        assert not folder.exists()
