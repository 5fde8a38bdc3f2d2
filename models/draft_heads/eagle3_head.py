"""Training of an EAGLE-3 head on the target's distribution at every draft of a round, over the head's own states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from models.draft_heads.head_acceptance import DraftLogits
from tuning.run import DRAFT_WEIGHT, NUM_DRAFTS, distillation_loss
from tuning.student import Eagle3Student, view_of
from tuning.train import Budget, PairedOptimizer, TrainingReport, autocast, train


def taps_of(target: LlamaForCausalLM) -> tuple[int, ...]:
    """Return the layers whose input is read: a low, a middle and a high one, the default for a head without ids."""
    num_layers = target.config.num_hidden_layers
    return (2, num_layers // 2, num_layers - 3)


def new_student(target: LlamaForCausalLM, draft_vocab_size: int) -> Eagle3Student:
    """Return a head as wide as its target's layers."""
    return Eagle3Student(target.config, len(taps_of(target)), draft_vocab_size)


def frequent_ids(windows: Tensor, vocab_size: int, num_ids: int) -> Tensor:
    """Return the most frequent ids of texts [B, T], in ascending order, [num_ids]."""
    counts = torch.bincount(windows.flatten(), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:num_ids].sort().values


class Eagle3Lesson:
    """One step of training: a batch, the target's logits for it, and the loss of a round of drafts."""

    def __init__(
        self, student: Eagle3Student, target: LlamaForCausalLM, target_ids: Tensor, next_texts: Callable[[], Tensor]
    ) -> None:
        self._student, self._target, self._target_ids, self._next_texts = student, target, target_ids, next_texts
        self._loss = torch.compile(distillation_loss, dynamic=False)

    def __call__(self, progress: float) -> Tensor:
        """Return the loss of the next batch: at first of the first draft, later of whole rounds."""
        ids = self._next_texts()  # [B, T]
        num_steps = NUM_DRAFTS if progress >= 0.4 else 1  # the first draft alone takes a third of the time
        num_rounds = ids.shape[1] - num_steps
        with autocast(ids.device):
            view = view_of(self._target, ids, taps_of(self._target))
            embedded = self._target.model.embed_tokens(ids)
            wanted = view.logits.index_select(-1, self._target_ids)  # [B, T, draft vocabulary]
            head = self._student.lm_head.weight
            losses = [
                self._loss(states, head, wanted[:, 1 + step :][:, :num_rounds], 1.0) * DRAFT_WEIGHT**step
                for step, states in enumerate(self._student.steps(view.features, embedded, num_steps))
            ]
        return torch.stack(losses).sum() / sum(DRAFT_WEIGHT**step for step in range(num_steps))


def train_eagle3(
    target: LlamaForCausalLM,
    next_texts: Callable[[], Tensor],
    budget: Budget,
    folder: Path,
    draft_vocab_size: int,
) -> TrainingReport:
    """Train a head on batches of texts [B, T] into `folder`, in the original format."""
    texts = torch.cat([next_texts() for _ in range(256)])  # 256 batches of texts choose the vocabulary
    target_ids = frequent_ids(texts, target.config.vocab_size, draft_vocab_size)
    student = new_student(target, draft_vocab_size).to(budget.device)
    student.begin_as(target, target_ids)
    layer = [*student.fc.parameters(), *student.midlayer.parameters()]
    others = [*student.norm.parameters(), *student.lm_head.parameters(), *(p for p in layer if p.ndim == 1)]
    optimizer = PairedOptimizer([p for p in layer if p.ndim == 2], others, matrix_lr=0.02, other_lr=0.002)
    lesson = Eagle3Lesson(student, target, target_ids, next_texts)
    return train(student, optimizer, lesson, budget, lambda: save_head(student, target, target_ids, folder))


def save_head(student: Eagle3Student, target: LlamaForCausalLM, target_ids: Tensor, folder: Path) -> None:
    """Write the original EAGLE-3 format: config.json, and bfloat16 weights with `d2t` and `t2d`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in student.state_dict().items()}
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    tensors["t2d"] = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(head_config(target, len(target_ids)), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")


def head_config(target: LlamaForCausalLM, draft_vocab_size: int) -> dict[str, object]:
    """Return config.json of the original format; its layer ids count outputs of layers."""
    config: Any = target.config
    kept: tuple[str, ...] = (
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    kept += ("rms_norm_eps", "max_position_embeddings", "vocab_size", "bos_token_id", "eos_token_id")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in kept},
        "rope_theta": config.rope_parameters["rope_theta"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps_of(target)],
        },
        "dtype": "bfloat16",
    }


def eagle3_logits(folder: Path, target: LlamaForCausalLM) -> DraftLogits:
    """Return the head in `folder` as a function of texts, in float32."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("t2d")
    offsets = tensors.pop("d2t")
    target_ids = torch.arange(len(offsets)) + offsets
    student = new_student(target, len(offsets))
    student.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    def draft_logits(ids: Tensor, num_steps: int) -> Iterator[Tensor]:
        view = view_of(target, ids, taps_of(target))
        for states in student.steps(view.features, target.model.embed_tokens(ids), num_steps):
            drafted = F.linear(states, student.lm_head.weight)
            logits = drafted.new_full((*drafted.shape[:-1], target.config.vocab_size), float("-inf"))
            yield logits.index_copy_(-1, target_ids, drafted)

    return draft_logits
