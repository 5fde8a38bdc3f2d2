"""A draft tuned on a log is better on unseen text, or is not written; a killed run resumes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.model.loader import model_version
from engine.position_log.position_log import top_logprobs
from engine.position_log.shard import LoggedModel, LoggedRequest, log_files, new_file, read_shard, write_shard
from models.training.evaluate import count_rounds
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, Folders, write_checkpoint, write_pair
from tests.engine.model.draft_heads.test_checkpoint import Hostile
from tuning.drafts import DraftFolder
from tuning.log_windows import read_log, windows_of
from tuning.rollouts import write_rollouts
from tuning.run import Candidate, TrainingRun, add_low_rank, batches_of, merge_low_rank
from tuning.score import expected_passes, generate
from tuning.tune import TuneSettings, tune, working_folder

NUM_PROMPT_TOKENS = 4
NUM_STEPS = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders = write_pair(tmp_path_factory.mktemp("pair"), noise=0.4)
    write_log(folders.target.parent / "log", folders.target)
    return folders


def write_log(folder: Path, target: Path) -> None:
    """Write a log of texts of the target itself, half of them greedy, with the tokens it finds likely there."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = torch.randint(0, VOCAB_SIZE, (40, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    requests = []
    for temperature in (0.0, 1.0):
        written = generate(model, prompts, 24, temperature, seed=1)
        with torch.no_grad():
            logits = model(written).logits[:, NUM_PROMPT_TOKENS - 1 : -1]
        requests += [logged(ids.numpy(), rows.numpy(), temperature) for ids, rows in zip(written, logits, strict=True)]
    write_shard(new_file(folder), LoggedModel(model_version(str(target)), VOCAB_SIZE), requests)


def logged(token_ids: np.ndarray, logits: np.ndarray, temperature: float) -> LoggedRequest:
    positions = np.arange(NUM_PROMPT_TOKENS, len(token_ids), dtype=np.int32)
    return LoggedRequest(
        "free", temperature, 1.0, token_ids.astype(np.int32), positions, *top_logprobs(logits, VOCAB_SIZE)
    )


def settings(pair: Folders, output: Path, **changes: object) -> TuneSettings:
    return replace(
        TuneSettings(
            log=pair.target.parent / "log",
            target=str(pair.target),
            draft=pair.draft,
            output=output,
            minutes=5.0,
            learning_rates=(0.005, 0.02),
            num_seeds=1,
            rank=None,
            num_tokens=3,
            num_steps=NUM_STEPS,
            rollouts=0.0,
        ),
        **changes,
    )


def run(settings: TuneSettings, on_progress: Callable[[str, float], None] = lambda *_: None) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return tune(settings, lines.append, on_progress), lines


@pytest.mark.parametrize("rank", [None, 4])
def test_a_tuned_draft_is_better_on_what_it_has_not_seen(pair: Folders, tmp_path: Path, rank: int | None) -> None:
    is_better, _ = run(settings(pair, tmp_path / "new", rank=rank, learning_rates=(0.02,)))
    assert is_better
    report = json.loads((tmp_path / "new" / "tuning.json").read_text(encoding="utf-8"))
    assert report["after"]["tokens_per_pass"] > 1.05 * report["before"]["tokens_per_pass"]
    tuned = LlamaForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    assert tuned.config.to_dict() == LlamaForCausalLM.from_pretrained(pair.draft).config.to_dict() | {
        "_name_or_path": tuned.config._name_or_path
    }
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


def test_a_run_that_was_killed_goes_on(pair: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(Exception): ...

    def kill(name: str, share: float) -> None:
        if share > 0.5:  # the trials are done, the long run is not
            raise KilledError

    monkeypatch.setattr("tuning.run._CHECKPOINT_EVERY_S", 0.0)

    wanted = settings(pair, tmp_path / "new")
    with pytest.raises(KilledError):
        run(wanted, kill)
    assert not wanted.output.exists()
    with pytest.raises(ConfigError, match="with other options"):
        run(replace(wanted, num_tokens=4))
    shares: list[float] = []
    is_better, _ = run(wanted, lambda _, share: shares.append(share))
    assert is_better
    assert min(shares) > 0.4, "nothing was done again"


def test_code_in_a_state_to_resume_is_not_run(pair: Folders, tmp_path: Path) -> None:
    draft = DraftFolder(pair.draft, str(pair.target), torch.device("cpu"))
    torch.save({"num_steps": Hostile(tmp_path / "ran")}, tmp_path / "state")
    with pytest.raises(pickle.UnpicklingError, match=r"eights.only"):
        TrainingRun(Candidate(0.01, 0, 1.0, 1.0), draft, tmp_path / "state", torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


def test_the_target_writes_more_text_to_train_on(pair: Folders, tmp_path: Path) -> None:
    is_better, lines = run(settings(pair, tmp_path / "new", minutes=0.4, rollouts=0.5, learning_rates=(0.02,)))
    assert is_better
    said = next(line for line in lines if "positions of" in line)
    assert int(said.split()[0]) > 3 * NUM_PROMPT_TOKENS * 40
    assert [file.name for file in tmp_path.iterdir()] == ["new"]


def test_a_tuning_may_wait_for_new_traffic_and_take_nothing_else(
    pair: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the requests are in the log at the start; a tuning that was killed begins at the same place."""
    model = LoggedModel(model_version(str(pair.target)), VOCAB_SIZE)
    requests = [each for file in log_files(pair.target.parent / "log") for each in read_shard(file)]
    file = new_file(tmp_path / "log")
    write_shard(file, model, requests[:40])
    wanted = settings(pair, tmp_path / "new", log=tmp_path / "log", num_fresh=900, learning_rates=(0.02,))

    def write_more(seconds: float) -> None:
        write_shard(file, model, requests)

    monkeypatch.setattr("tuning.log_windows.time.sleep", write_more)
    is_better, lines = run(wanted)
    assert is_better
    assert "960 positions are new" in lines
    assert any(line.startswith("960 positions; ") for line in lines)
    monkeypatch.setattr("tuning.log_windows.time.sleep", lambda seconds: None)
    with pytest.raises(ConfigError, match="has 0 positions in all"):
        run(replace(wanted, output=tmp_path / "late", minutes=0.001))


def test_texts_that_were_written_are_behind_prompts_that_train_and_are_written_once(
    pair: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = read_log(pair.target.parent / "log", LoggedModel(model_version(str(pair.target)), VOCAB_SIZE), print)
    measuring = {tuple(request.token_ids[:NUM_PROMPT_TOKENS]) for request in log.held_out}
    assert measuring
    shares: list[float] = []
    written = write_rollouts(str(pair.target), log, tmp_path / "rollouts", 0.05, shares.append)
    assert written
    assert shares == sorted(shares)
    assert not {tuple(request.token_ids[:NUM_PROMPT_TOKENS]) for request in written} & measuring
    assert {round(request.temperature, 3) for request in written} == {0.3, 1.0}
    assert all(min(request.positions) == NUM_PROMPT_TOKENS for request in written)
    monkeypatch.setattr("tuning.rollouts._write", None)
    again = write_rollouts(str(pair.target), log, tmp_path / "rollouts", 0.05, shares.append)
    assert [each.token_ids.tolist() for each in again] == [each.token_ids.tolist() for each in written]


def test_windows_of_a_batch_are_of_like_lengths_and_batches_the_same_again() -> None:
    logits = np.random.default_rng(0).normal(size=(200, VOCAB_SIZE)).astype(np.float32)
    requests = [logged(np.arange(length + 4), logits[:length], 0.0) for length in range(8, 200)]
    windows = [window for request in requests for window in windows_of(request)]
    all_batches = [islice(batches_of(windows, 2048, seed=3), 50) for _ in range(2)]
    for first, second in zip(*all_batches, strict=True):
        assert [id(window) for window in first] == [id(window) for window in second]
        lengths = [len(window.token_ids) for window in first]
        assert len(lengths) * max(lengths) <= 2048
        assert max(lengths) - min(lengths) <= 4 * 2048 // max(lengths)


def test_nothing_is_written_where_no_training_helps(pair: Folders, tmp_path: Path) -> None:
    is_better, lines = run(settings(pair, tmp_path / "new", draft=pair.target, learning_rates=(1e-6,), num_steps=1))
    assert not is_better
    assert "nothing is written" in lines[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_diverges_is_dropped(pair: Folders, tmp_path: Path) -> None:
    is_better, lines = run(settings(pair, tmp_path / "new", learning_rates=(1e38,)))
    assert not is_better
    assert any("dropped after" in line for line in lines)


def test_logs_that_cannot_be_used_are_refused(pair: Folders, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no log"):
        run(settings(pair, tmp_path / "new", log=tmp_path))
    write_checkpoint(tmp_path / "other", seed=5)
    with pytest.raises(ConfigError, match="of a target with other weights"):
        run(settings(pair, tmp_path / "new", target=str(tmp_path / "other")))
    write_checkpoint(tmp_path / "wide", seed=5, vocab_size=4096)
    with pytest.raises(ConfigError, match="vocab"):
        run(settings(pair, tmp_path / "new", draft=tmp_path / "wide"))
    with pytest.raises(ConfigError, match="exists"):
        run(settings(pair, tmp_path / "other"))
    assert not working_folder(tmp_path / "new").exists()


def test_windows_hold_each_position_once_with_the_tokens_before_it() -> None:
    logits = np.random.default_rng(0).normal(size=(96, VOCAB_SIZE)).astype(np.float32)
    request = logged(np.arange(100), logits, 0.0)
    windows = list(windows_of(request, num_tokens=16))
    found = [int(window.token_ids[row]) + 1 for window in windows for row in window.rows]
    assert found == list(range(NUM_PROMPT_TOKENS, 100))
    assert all(
        window.chosen_ids.tolist() == [int(window.token_ids[row]) + 1 for row in window.rows] for window in windows
    )
    assert all(min(window.rows.tolist()) >= 7 for window in windows[1:])


def test_a_text_behind_a_long_prompt_is_one_window_with_all_of_the_prompt() -> None:
    logits = np.random.default_rng(0).normal(size=(1200 - NUM_PROMPT_TOKENS, VOCAB_SIZE)).astype(np.float32)
    answered = logged(np.arange(1200), logits, 0.0)
    request = replace(
        answered,
        positions=answered.positions[-96:],
        top_ids=answered.top_ids[-96:],
        top_logprobs=answered.top_logprobs[-96:],
    )
    (window,) = windows_of(request)
    assert len(window.token_ids) == 1199
    assert len(window.rows) == 96


def test_expected_passes_are_those_of_a_decoder_and_of_its_mean() -> None:
    agrees = [True, False, True, True, True, True, False, False, True]
    rounds = count_rounds(torch.tensor([*agrees, False]).unfold(0, 2, 1))  # the last pass ends after the text
    assert expected_passes([[float(each) for each in agrees]] * 2) == len(rounds) == 5
    tokens_per_pass = (1 - 0.5**4) / (1 - 0.5)  # arXiv:2211.17192, equation 1
    assert 2000 / expected_passes([[0.5] * 2000] * 3) == pytest.approx(tokens_per_pass, rel=0.01)
    by_draft = [[0.9] * 2000, [0.5] * 2000]  # the second draft of a round is worse, wherever the round begins
    assert 2000 / expected_passes(by_draft) == pytest.approx(1 + 0.9 + 0.9 * 0.5, rel=0.01)


def test_low_rank_changes_begin_at_nothing_and_become_weights(pair: Folders) -> None:
    model = LlamaForCausalLM.from_pretrained(pair.draft, dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    before = model(ids).logits.detach()
    added = add_low_rank(model, 4)
    torch.testing.assert_close(model(ids).logits, before)
    with torch.no_grad():
        for parameter in added:
            parameter.add_(0.05)
    changed = model(ids).logits.detach()
    assert not torch.allclose(changed, before)
    merge_low_rank(model)
    torch.testing.assert_close(model(ids).logits, changed, atol=1e-4, rtol=1e-4)
    assert not any("linear" in name for name in model.state_dict())
