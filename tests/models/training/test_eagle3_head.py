"""The EAGLE-3 trainer: its unrolled rounds equal the engine's drafting, and its files load again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training.architecture import llama_config, new_model
from models.training.evaluate import count_rounds
from models.training.train_heads import (
    eagle3_lesson,
    eagle3_logits,
    features_and_logits,
    new_student,
    save_head,
    verdicts,
)
from tuning.score import generate
from tuning.student import Eagle3Student

NUM_LAYERS = 7  # the least number with three default layers
TARGET_IDS = torch.arange(0, 4096, 3)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    model = new_model(llama_config(NUM_LAYERS, hidden_size=64, mlp_size=64, num_heads=2, num_kv_heads=1), seed=0)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.2)
        torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def student(target: LlamaForCausalLM) -> Eagle3Student:
    torch.manual_seed(1)
    return new_student(target, len(TARGET_IDS))


def test_a_round_of_the_unrolled_head_sees_nothing_behind_it(student: Eagle3Student, target: LlamaForCausalLM) -> None:
    """Draft j of the round at p knows the text up to token p + 1 + j: what comes later may change and it may not."""
    ids = torch.randint(0, 4096, (1, 12))
    changed = ids.clone()
    changed[0, 8:] = (ids[0, 8:] + 1) % 4096
    before, after = (_steps(student, target, text) for text in (ids, changed))
    for step in range(3):
        assert torch.equal(before[step][0, : 7 - step], after[step][0, : 7 - step])
        assert not torch.allclose(before[step][0, 7 - step], after[step][0, 7 - step])


def test_later_drafts_stand_on_own_states_and_not_on_the_targets(
    student: Eagle3Student, target: LlamaForCausalLM
) -> None:
    """The target's states of the drafted tokens do not exist when a round is drafted."""
    ids = torch.randint(0, 4096, (1, 12))
    features, _ = features_and_logits(target, ids, (2, 3, 4))
    blind = features.clone()
    blind[:, 5:] = 0.0
    embedded = target.model.embed_tokens(ids)
    for seen, unseen in zip(student.steps(features, embedded, 3), student.steps(blind, embedded, 3), strict=True):
        assert torch.equal(seen[0, 4], unseen[0, 4])


def test_a_saved_head_says_what_the_trained_one_says(
    student: Eagle3Student, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    save_head(student, target, TARGET_IDS, tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["draft_vocab_size"] == len(TARGET_IDS)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert torch.equal(torch.arange(len(TARGET_IDS)) + tensors["d2t"], TARGET_IDS)
    ids = torch.randint(0, 4096, (2, 12))
    rounded = new_student(target, len(TARGET_IDS))
    rounded.load_state_dict({name: tensor.bfloat16().float() for name, tensor in student.state_dict().items()})
    for read, states in zip(eagle3_logits(tmp_path, target)(ids, 3), _steps(rounded, target, ids), strict=True):
        assert torch.allclose(read[..., TARGET_IDS], rounded.lm_head(states), atol=1e-5)
        assert bool(read[..., 1].isinf().all())  # a token that the head does not know


def test_an_eagle3_lesson_lowers_the_loss(target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss, **_: loss)  # compiling takes longer than all of this
    torch.manual_seed(2)
    texts = torch.randint(0, 4096, (2, 32))
    learner = new_student(target, len(TARGET_IDS))
    learner.begin_as(target, TARGET_IDS)
    lesson = eagle3_lesson(learner, target, TARGET_IDS, lambda: texts)
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = lesson(1.0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert torch.isfinite(lesson(0.0))  # of the first draft alone


def test_rounds_are_counted_as_a_decoder_walks() -> None:
    is_accepted = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    assert count_rounds(is_accepted) == [2, 3]  # two are accepted and one is recovered, so the next round begins at 3


def test_a_head_that_is_the_target_is_always_right(target: LlamaForCausalLM) -> None:
    ids = generate(target, torch.randint(0, 4096, (2, 6)), 10, 1.0, seed=3)
    logits = target(ids).logits

    def clairvoyant(text: Tensor, num_steps: int) -> list[Tensor]:
        return [logits[:, 1 + step :] for step in range(num_steps)]

    assert verdicts(lambda text, k: iter(clairvoyant(text, k)), ids, 6, 1.0, 3, seed=3).all()
    assert not verdicts(lambda text, k: iter(clairvoyant(text, k)), ids, 6, 1.0, 3, seed=4).all()


@torch.no_grad()
def _steps(student: Eagle3Student, target: LlamaForCausalLM, ids: Tensor) -> list[Tensor]:
    features, _ = features_and_logits(target, ids, (2, 3, 4))
    return list(student.steps(features, target.model.embed_tokens(ids), 3))
