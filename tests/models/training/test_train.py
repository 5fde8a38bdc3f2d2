"""The training loop: budgets end it, checkpoints remain; the draft's loss is zero at the target."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.training.architecture import llama_config, load_checkpoint, new_model, num_parameters, save_checkpoint
from models.training.tokens import TokenizedCorpus, WindowStream, write_rollouts
from models.training.train_demo_pair import average
from tuning.run import distillation_loss
from tuning.score import penalise
from tuning.train import Budget, PairedOptimizer, _is_faster_in_bfloat16, autocast, train


def test_training_ends_with_its_tokens_and_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    model = new_model(llama_config(num_layers=1, hidden_size=64, mlp_size=64, num_heads=1, num_kv_heads=1), seed=0)
    ids = torch.arange(33).unsqueeze(0)
    budget = Budget(minutes=5.0, device=torch.device("cpu"), tokens_per_step=32, max_tokens=160)
    optimizer = PairedOptimizer.of_llama(model, matrix_lr=0.01, embedding_lr=0.01)
    losses: list[float] = []

    def step_loss(progress: float) -> torch.Tensor:
        loss = F.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:])
        losses.append(loss.item())
        return loss

    report = train(model, optimizer, step_loss, budget, lambda: save_checkpoint(model, tmp_path))
    assert (report["num_steps"], report["num_tokens"]) == (5, 160)
    assert losses[-1] < losses[0]
    assert num_parameters(load_checkpoint(tmp_path)) == num_parameters(model)


def test_a_draft_that_equals_its_target_has_no_loss() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 3, 8), torch.randn(16, 8)
    target_logits = F.linear(hidden, head)
    assert distillation_loss(hidden, head, target_logits, 1.0).item() < 1e-5
    assert distillation_loss(hidden, head, target_logits.flip(-1), 1.0).item() > 0.1


def test_the_mean_of_two_trainings_lies_in_the_middle_of_every_weight() -> None:
    config = llama_config(num_layers=1, hidden_size=64, mlp_size=64, num_heads=1, num_kv_heads=1)
    first, second = new_model(config, seed=0), new_model(config, seed=1)
    wanted = {name: (weight + second.state_dict()[name]) / 2 for name, weight in first.state_dict().items()}
    average(second, first)
    for name, weight in second.state_dict().items():
        torch.testing.assert_close(weight, wanted[name])


def test_a_penalty_makes_what_was_said_less_likely_and_nothing_else() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    penalised = penalise(logits, torch.tensor([[0, 1, 0]]), 2.0)
    assert penalised.tolist() == [[1.0, -4.0, 1.0, -1.0]]


def test_rollouts_go_on_from_the_stream_half_of_them_greedily() -> None:
    model = new_model(llama_config(num_layers=1, hidden_size=64, mlp_size=64, num_heads=1, num_kv_heads=1), seed=0)
    corpus = TokenizedCorpus([np.arange(400)], [], [])
    windows = [write_rollouts(model, WindowStream(corpus, 0), 4, 6, 10, seed) for seed in (0, 1)]
    assert [each.shape for each in windows] == [(4, 11), (4, 11)]
    assert torch.equal(windows[0][:, :6], windows[1][:, :6])
    assert all(torch.equal(row[1:6], row[:5] + 1) for row in windows[0]), "the stream's own text"
    assert torch.equal(windows[0][:2], windows[1][:2])
    assert not torch.equal(windows[0][2:], windows[1][2:])


def test_products_are_in_bfloat16_only_where_the_processor_is_faster_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    times = {torch.float32: 2.0}
    monkeypatch.setattr("tuning.train.product_seconds", times.get)
    for has_amx, seconds, dtype in (
        (True, 4.0, torch.bfloat16),
        (False, 4.0, torch.float32),
        (False, 1.9, torch.float32),
        (False, 1.0, torch.bfloat16),
    ):
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda has=has_amx: has)
        times[torch.bfloat16] = seconds
        _is_faster_in_bfloat16.cache_clear()
        with autocast(torch.device("cpu")):
            assert (x @ x).dtype is dtype
    _is_faster_in_bfloat16.cache_clear()
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    with autocast(torch.device("cpu")):
        assert (x @ x).dtype is torch.float32
    _is_faster_in_bfloat16.cache_clear()
