"""Distillation of the draft from the target's whole distribution, over the corpus and over the target's own text."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training.architecture import compile_layers, draft_config, hidden_states, new_model
from models.training.checkpoint import load_checkpoint, save_checkpoint
from models.training.rollout import RolloutPool, mixed_sources
from models.training.tokens import WindowStream, plain_positions
from tuning.loss import distillation_loss
from tuning.optimizer import PairedOptimizer
from tuning.train import Budget, TrainingReport, autocast, train

ROLLOUT_EVERY_BATCHES = 4


class DraftLesson:
    """One step of distillation: a batch, the target's logits for it, and the draft's loss."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        target: LlamaForCausalLM,
        stream: WindowStream,
        rollouts: RolloutPool,
        budget: Budget,
    ) -> None:
        self._model, self._target, self._budget = model, target, budget
        self._sources = mixed_sources(stream, rollouts, ROLLOUT_EVERY_BATCHES)
        self._loss = torch.compile(distillation_loss, dynamic=False)

    def __call__(self, progress: float) -> Tensor:
        """Return the loss of the next batch; it does not depend on `progress`."""
        num_tokens = self._budget.short_window_tokens
        num_windows = self._budget.tokens_per_step // num_tokens
        positions = plain_positions(num_windows, num_tokens).to(self._budget.device)
        windows = next(self._sources).windows(num_windows, num_tokens)  # [B, T + 1]
        ids = windows[:, :-1].to(self._budget.device)  # [B, T]
        with autocast(self._budget.device):
            with torch.no_grad():
                target_logits = F.linear(hidden_states(self._target, ids, positions), self._target.lm_head.weight)
            hidden = hidden_states(self._model, ids, positions)
            return self._loss(hidden, self._model.lm_head.weight, target_logits, 1.0)


def distil_draft(
    target: LlamaForCausalLM,
    stream: WindowStream,
    rollouts: RolloutPool,
    budget: Budget,
    folder: Path,
    seed: int,
    is_resumed: bool,
) -> TrainingReport:
    """Distil a draft into `folder`: a new one, or the existing one further.

    The target's layers are compiled; its weights do not change.
    """
    model = (
        load_checkpoint(folder, device=budget.device) if is_resumed else new_model(draft_config(), seed, budget.device)
    )
    model.train()
    compile_layers(model)
    compile_layers(target)
    optimizer = PairedOptimizer.of_llama(model, matrix_lr=0.02, embedding_lr=0.004)
    return train(
        model,
        optimizer,
        DraftLesson(model, target, stream, rollouts, budget),
        budget,
        lambda: save_checkpoint(model, folder),
    )
