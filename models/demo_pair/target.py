"""Training of the target: next tokens of the corpus, short windows first, then longer ones with skipped positions."""

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training.architecture import REPETITION_PENALTY, compile_layers, hidden_states, new_model, target_config
from models.training.checkpoint import load_checkpoint, save_checkpoint
from models.training.tokens import WindowStream, plain_positions, skipped_positions
from tuning.loss import next_token_loss
from tuning.optimizer import PairedOptimizer
from tuning.train import Budget, TrainingReport, autocast, train

LONG_PHASE_START = 0.75


class TargetLesson:
    """One step of training: a batch and its loss."""

    def __init__(self, model: LlamaForCausalLM, stream: WindowStream, budget: Budget, seed: int) -> None:
        self._model, self._stream, self._budget = model, stream, budget
        self._generator = torch.Generator().manual_seed(seed)
        self._loss = torch.compile(next_token_loss, dynamic=False)

    def __call__(self, progress: float) -> Tensor:
        """Return the loss of the next batch at `progress` in [0, 1]."""
        is_long = progress >= LONG_PHASE_START
        num_tokens = self._budget.long_window_tokens if is_long else self._budget.short_window_tokens
        num_windows = self._budget.tokens_per_step // num_tokens
        ids = self._stream.windows(num_windows, num_tokens).to(self._budget.device)  # [B, T + 1]
        positions = plain_positions(num_windows, num_tokens)
        if is_long:
            positions = skipped_positions(num_windows, num_tokens, self._generator)
        with autocast(self._budget.device):
            hidden = hidden_states(self._model, ids[:, :-1], positions.to(self._budget.device))
            return self._loss(hidden, self._model.lm_head.weight, ids[:, 1:].contiguous())


def train_target(stream: WindowStream, budget: Budget, folder: Path, seed: int, is_resumed: bool) -> TrainingReport:
    """Train a target into `folder`: a new one, or the existing one further.

    Two runs on one small corpus fit it differently. A resumed run writes the mean of its first and last weights: its
    held-out loss is lower than either's (arXiv:1803.05407).
    """
    model = (
        load_checkpoint(folder, device=budget.device) if is_resumed else new_model(target_config(), seed, budget.device)
    )
    earlier = copy.deepcopy(model) if is_resumed else None
    model.train()
    compile_layers(model)
    optimizer = PairedOptimizer.of_llama(model, matrix_lr=0.012, embedding_lr=0.002)
    lesson = TargetLesson(model, stream, budget, seed)
    report = train(model, optimizer, lesson, budget, lambda: save_checkpoint(model, folder, REPETITION_PENALTY))
    if earlier is not None:
        average(model, earlier)
        save_checkpoint(model, folder, REPETITION_PENALTY)
    return report


@torch.no_grad()
def average(model: LlamaForCausalLM, earlier: LlamaForCausalLM) -> None:
    """Set every weight of `model` to its mean with `earlier`."""
    for weight, other in zip(model.parameters(), earlier.parameters(), strict=True):
        weight.lerp_(other, 0.5)
