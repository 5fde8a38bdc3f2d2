"""`outrider try`: a log of requests through drafts, in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.__main__ import main
from cluster.cli.commands import try_drafts as try_module
from cluster.cli.commands.try_drafts import best_choice
from cluster.cli.replay_traffic import TrialFigures, read_traffic
from protos.errors import ConfigError
from tests.serve.tiny_models import write_pair


def measured(draft: str, num_tokens: int, num_streams: int, speedup: float, survival: float = 0.9) -> TrialFigures:
    tokens_per_pass = 1.0 + num_tokens * survival
    return TrialFigures(draft, num_tokens, "coupled", num_streams, 10.0, speedup, tokens_per_pass, num_tokens, 9, 9, ())


def test_bodies_and_lines_of_batch_files_are_read(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    batch = {"custom_id": "a", "body": {"model": "m", "messages": [], "max_completion_tokens": 99, "stream": True}}
    log.write_text(json.dumps({"prompt": "x", "max_tokens": 3}) + "\n\n" + json.dumps(batch) + "\n")
    plain, chat = read_traffic(log, max_requests=10, max_tokens=16)
    assert (plain.line, plain.path, plain.body) == (1, "/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert (chat.line, chat.path, chat.body) == (3, "/v1/chat/completions", {"messages": [], "max_tokens": 16})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ('{"prompt": "a"}\n[1]', "line 2 is not a request"),
        ('{"model": "m"}', "needs either `messages` or `prompt`"),
        ('{"prompt": "a", "max_tokens": "many"}', "line 1: max_tokens is 'many'"),
        ("\n\n", "has no request"),
    ],
)
def test_a_log_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    log = tmp_path / "log.jsonl"
    log.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_traffic(log, 10, 10)


def test_the_way_that_is_fastest_over_all_loads_is_chosen():
    found = [measured("a", 2, 1, 1.4), measured("a", 2, 8, 1.3), measured("b", 4, 1, 2.0), measured("b", 4, 8, 0.7)]
    choice = best_choice(found)
    assert choice is not None
    best, speedup = choice
    assert (best.draft, best.num_tokens, round(speedup, 2)) == ("a", 2, 1.35)


def test_no_draft_is_chosen_where_none_pays_and_noise_is_no_gain():
    assert best_choice([measured("a", 2, 1, 1.01), measured("b", 4, 1, 0.8)]) is None
    assert best_choice([measured("a", 2, 1, 3.0, survival=0.01)]) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "two"], "--lengths 'two' has a value that is not a whole number"),
        (["--lengths", "0"], "outside 1 to 256"),
        (["--verify", "typical"], "--verify 'typical' is unknown"),
        (["--drafts", "nowhere"], "there is no model 'nowhere'"),
        (["--hardware", "abacus"], "'abacus' is not in the table"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a"}\n')
    assert main(["try", "demo", "--traffic", str(log), *options]) == 1
    assert message in capsys.readouterr().err


def in_this_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """In the place of a child, which would import torch again."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result()


def test_traffic_is_replayed_and_a_deploy_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(try_module, "in_child", in_this_process)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the trial sets it, for its child
    write_pair(tmp_path)
    log, output = tmp_path / "log.jsonl", tmp_path / "deploy.yaml"
    requests = [{"prompt": [3, 4, 5 + index], "max_tokens": 6, "temperature": 0} for index in range(2)]
    log.write_text("\n".join(json.dumps(request) for request in requests))
    arguments = ["try", str(tmp_path / "target"), "--traffic", str(log), "--drafts", f"{tmp_path / 'draft'},self"]
    arguments += ["--lengths", "2", "--streams", "2,8", "--rounds", "1", "--set", "cache.num_blocks=64"]
    arguments += ["--set", "cache.memory_gib=null", "--set", "target.dtype=bfloat16"]
    arguments += ["--output", str(output)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "streams 8 are left out" in said
    assert "2 at a time" in said
    assert "model-greedy-free" in said
    # int4 needs AVX512-VNNI; a draft that cannot run here is reported, and the others go on.
    assert "self-greedy-free" in said or "self: cannot be tried" in said
    args = yaml.safe_load(output.read_text())["applications"][0]["args"]
    assert args["draft"]["kind"] in {"model", "self", "none"}
