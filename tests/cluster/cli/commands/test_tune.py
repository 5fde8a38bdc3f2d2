"""`outrider tune`: from a file of requests, or a log, to the folder of a draft."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from actors.settings import NO_GAIN
from cluster.cli.__main__ import main
from tests.serve.tiny_models import write_pair
from tuning import tune


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give one of --log"),
        (["--log", "here", "--traffic", "there"], "give one of --log"),
        (["--log", "here", "--own-chats", "9"], "give one of --log"),
        (["--own-chats", "9", "--fresh", "9"], "--fresh 9 waits for a deployment's log"),
        (["--log", "x", "--set", "cache.memory_gib=1"], "--set cache.memory_gib=1 is for the deployment that answers"),
        (["--log", "nowhere"], "nowhere holds no log"),
        (["--log", "x", "--learning-rates", "fast"], "--learning-rates 'fast' has a value that is not a number"),
        (["--log", "x", "--learning-rates", "0"], "must be above 0"),
        (["--log", "x", "--draft", "smollm2"], "has no draft model of its own"),
        (["--log", "x", "--target", "nowhere"], "there is no model 'nowhere'"),
        (["--traffic", "nothing.jsonl"], "nothing.jsonl cannot be read"),
    ],
)
def test_options_are_checked_before_anything_is_trained(
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["tune", "--target", "demo", "--draft", "demo", "--output", str(tmp_path / "new"), *options]
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def in_this_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """In the place of a child, which would import torch again."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_requests_become_a_log_and_a_draft_that_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.commands.tune.in_child", in_this_process)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_pair(tmp_path)
    traffic = tmp_path / "log.jsonl"
    fields = {"max_tokens": 24, "temperature": 1, "ignore_eos": True}
    requests = [{"prompt": [3, 4 + index % 4, 1 + index % 15], "seed": index, **fields} for index in range(60)]
    requests.append({"prompt": [9, 9, 9], "store": False})
    traffic.write_text("\n".join(json.dumps(request) for request in requests))
    pair = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    options = ["--traffic", str(traffic), "--steps", "24", "--rollouts", "0", "--output", str(tmp_path / "new")]
    options += ["--set", "cache.num_blocks=64", "--set", "cache.memory_gib=null"]
    assert main(["tune", *pair, *options]) == 0
    said = capsys.readouterr().out
    assert f"written: {tmp_path / 'new'}; try it with `outrider draft try {tmp_path / 'new'}`" in said
    assert "1440 positions" in said, "60 answers of 24 tokens, without the request that must not be stored"
    assert {"config.json", "model.safetensors", "tokenizer.json", "tuning.json"} <= {
        file.name for file in (tmp_path / "new").iterdir()
    }
    assert not (tmp_path / "new").stat().st_mode & 0o077, "a draft has learnt clients' texts"


def test_the_status_says_that_no_training_has_helped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tune, "tune", lambda *_: False)
    arguments = ["tune", "--target", "demo", "--draft", "demo", "--output", str(tmp_path / "new"), "--log", "x"]
    assert main(arguments) == NO_GAIN
    assert "written" not in capsys.readouterr().out
