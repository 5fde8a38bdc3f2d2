"""One training of the draft, with a file that resumes it after the process was killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tuning.drafts import TunableDraft
from tuning.log_windows import Window
from tuning.student import Student
from tuning.train import Budget, PairedOptimizer, TrainingClock, autocast, train

NUM_DRAFTS = 4  # of a round, that heads learn; the weights decrease
DRAFT_WEIGHT = 0.8  # of each draft's loss relative to its predecessor's

_LEAST = 1e-5  # a lower bound for unknown probabilities
_SCALE = 2.0  # alpha over rank
_CHECKPOINT_EVERY_S = 20.0


def next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of hidden [B, T, hidden] against labels [B, T]."""
    logits = F.linear(hidden, head).float()  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distillation_loss(hidden: Tensor, head: Tensor, target_logits: Tensor, l1_weight: float) -> Tensor:
    """KL(p || q) plus `l1_weight` times |p - q|_1 / 2, the chance of a rejection (arXiv:2211.17192, corollary 3.6)."""
    log_q = F.log_softmax(F.linear(hidden, head).float(), dim=-1)  # [B, T, V]
    return _divergence(F.log_softmax(target_logits.float(), dim=-1), log_q, l1_weight).mean()


def top_distillation_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, l1_weight: float) -> Tensor:
    """`distillation_loss` if only the likeliest tokens of p are known: all others count as one token.

    Without the tokens that the draft lacks, p is renormalized, and a row's weight is the remaining mass.

    Args:
        logits: of the draft, [N, V].
        top_ids: [N, k] int64, -1 for tokens that the draft lacks.
        top_logprobs: log p of these tokens, [N, k].
        l1_weight: as of `distillation_loss`.
    """
    is_unknown = top_ids < 0
    log_q = F.log_softmax(logits.float(), dim=-1).gather(1, top_ids.clamp(min=0))  # [N, k]
    missing = (top_logprobs.exp() * is_unknown).sum(-1).clamp(max=1.0 - _LEAST)  # [N]
    log_p = top_logprobs - torch.log1p(-missing)[:, None]
    # e^-40 represents a probability of 0.
    log_p, log_q = (_with_rest(each.masked_fill(is_unknown, -40.0)) for each in (log_p, log_q))
    return ((1.0 - missing) * _divergence(log_p, log_q, l1_weight)).mean()


def _with_rest(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens to [N, k]: [N, k + 1]."""
    total = logprobs.exp().sum(-1, keepdim=True).clamp(max=1.0 - _LEAST)  # float16 rounds p to more than 1
    return torch.cat([logprobs, torch.log1p(-total)], dim=-1)


def _divergence(log_p: Tensor, log_q: Tensor, l1_weight: float) -> Tensor:
    """[..., k] to the loss of each row, [...]."""
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1)
    rejection = (p - log_q.exp()).abs().sum(-1) / 2
    return divergence + l1_weight * rejection


class LowRankLinear(nn.Module):
    """A linear layer W x + scale B A x whose W is frozen; B begins at zero, so that nothing has changed yet."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features, device=linear.weight.device) / rank**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = self.linear(x) + _SCALE * F.linear(F.linear(x, self.a), self.b)
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the plain layer, with the change in its weights."""
        self.linear.weight += _SCALE * self.b @ self.a
        return self.linear


def add_low_rank(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Freeze the model, give each linear layer but the one to the vocabulary a change of this rank; return them."""
    model.requires_grad_(False)
    added: list[nn.Parameter] = []
    for parent, name, linear in _linears(model):
        layer = LowRankLinear(linear, min(rank, *linear.weight.shape))
        setattr(parent, name, layer)
        added += [layer.a, layer.b]
    return added


def merge_low_rank(model: nn.Module) -> None:
    """Put the plain layers back, with the changes in their weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LowRankLinear):
                setattr(parent, name, child.merged())


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    head = model.get_output_embeddings()  # type: ignore[operator]  # of transformers' models
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head
    ]


class DivergedError(Exception):
    """The loss is no number any more: this learning rate is too high."""


def batch_loss(student: Student, windows: Sequence[Window], device: torch.device) -> Tensor:
    """Return the draft's loss on a batch. Raises DivergedError."""
    top_ids = student.draft_ids(torch.cat([window.top_ids for window in windows])).to(device)
    top_logprobs = torch.cat([window.top_logprobs for window in windows]).to(device).float()
    total, weight, weights = torch.zeros((), device=device), 1.0, 0.0
    with autocast(device):
        for logits in student.logits(windows, student.num_unlike(NUM_DRAFTS)):
            # As in the demo draft's own training.
            total = total + weight * top_distillation_loss(logits, top_ids, top_logprobs, 1.0)
            weight, weights = weight * DRAFT_WEIGHT, weights + weight
    loss = total / weights
    if not torch.isfinite(loss):
        raise DivergedError
    return loss


def batches_of(windows: Sequence[Window], num_tokens: int, seed: int, num_steps: int = 0) -> Iterator[list[Window]]:
    """Yield batches without end, after the first `num_steps`: one window, or up to `num_tokens` with padding.

    Batch n is a function of the seed and n, so that a run can be resumed. A batch has windows of similar lengths, since
    padding to the longest is wasted.
    """
    windows = sorted(windows, key=lambda window: len(window.token_ids))
    for step in count(num_steps):
        rng = np.random.default_rng((seed, step))
        last = int(rng.integers(len(windows)))
        number = max(1, num_tokens // len(windows[last].token_ids))
        # Four candidates by length for each window of a batch.
        alike = windows[max(0, last + 1 - 4 * number) : last + 1]
        yield [alike[index] for index in rng.choice(len(alike), min(number, len(alike)), replace=False)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to train the draft, and its share of the tuning's minutes and steps.

    With `rank` None all weights are trained, else low-rank changes.
    """

    learning_rate: float
    seed: int
    share: float
    minutes: float
    num_steps: int | None = None
    rank: int | None = None

    @property
    def name(self) -> str:
        return f"rate {self.learning_rate:g}, seed {self.seed}, {self.share:.0%}"


class TrainingRun:
    """The training of one candidate.

    Args:
        candidate: how to train.
        draft: the starting weights.
        file: the file of its state, written every twenty seconds.
        device: the device that computes.
    """

    def __init__(self, candidate: Candidate, draft: TunableDraft, file: Path, device: torch.device) -> None:
        self.candidate = candidate
        self._draft = draft
        self._file = file
        tokens_per_step = 2048
        self._budget = Budget(
            candidate.minutes,
            device,
            tokens_per_step,
            max_tokens=None if candidate.num_steps is None else candidate.num_steps * tokens_per_step,
            checkpoint_every_s=_CHECKPOINT_EVERY_S,
        )
        self._state: dict[str, Any] = {"seconds": 0.0, "num_steps": 0, "is_done": False, "has_diverged": False}
        if file.is_file():
            self._state = torch.load(file, map_location=device, weights_only=True)

    @property
    def has_begun(self) -> bool:
        """True if there is a state to resume."""
        return self.num_steps > 0

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return int(self._state["num_steps"])

    def train(self, windows: Sequence[Window], on_progress: Callable[[float], None]) -> None:
        """Train until the minutes are over, including minutes before a restart; a second call does nothing."""
        if self._state["is_done"]:
            return
        torch.manual_seed(self.candidate.seed)
        student = self._draft.load()
        model = student.model.train()
        parameters, optimizer = self._prepare(student)
        if self.has_begun:
            _fill(parameters, self._state["weights"])
            optimizer.load_state_dict(self._state["optimizer"])
        clock = TrainingClock(self._budget, self._state["seconds"], self._state["num_steps"])
        batches = batches_of(windows, self._budget.tokens_per_step, self.candidate.seed, clock.num_steps)

        def save() -> None:
            self._save(clock, parameters, optimizer)

        def step_loss(progress: float) -> torch.Tensor:
            on_progress(progress)
            return batch_loss(student, next(batches), self._budget.device)

        try:
            train(model, optimizer, step_loss, self._budget, save, clock)
        except DivergedError:
            self._state = {
                "seconds": clock.seconds,
                "num_steps": clock.num_steps,
                "is_done": True,
                "has_diverged": True,
            }
            self._write()

    def trained(self) -> Student | None:
        """Return the trained draft with weights rounded as in the file; None if they are not finite."""
        if self._state["has_diverged"]:
            return None
        torch.manual_seed(self.candidate.seed)
        student = self._draft.load()
        parameters, _ = self._prepare(student)
        if not all(bool(torch.isfinite(weight).all()) for weight in self._state["weights"]):
            return None
        _fill(parameters, self._state["weights"])
        merge_low_rank(student.model)
        return self._draft.rounded(student)

    def _prepare(self, student: Student) -> tuple[list[nn.Parameter], PairedOptimizer]:
        """Return the trained parameters of the draft, and their optimizer."""
        rate, rank = self.candidate.learning_rate, self.candidate.rank
        if rank is not None:
            added = add_low_rank(student.model, rank)
            return added, PairedOptimizer([], added, rate, rate)
        named = list(student.model.parameters())
        vocabulary = {id(each) for each in student.vocabulary()}
        matrices = [each for each in named if each.ndim == 2 and id(each) not in vocabulary]
        chosen = {id(each) for each in matrices}
        others = [each for each in named if id(each) not in chosen]
        # Embeddings and norms learn slower, as in the demo draft.
        return [*matrices, *others], PairedOptimizer(matrices, others, rate, 0.2 * rate)

    def _save(self, clock: TrainingClock, parameters: Sequence[nn.Parameter], optimizer: PairedOptimizer) -> None:
        self._state = {
            "seconds": clock.seconds,
            "num_steps": clock.num_steps,
            "is_done": clock.progress >= 1.0,
            "has_diverged": False,
            "weights": [parameter.detach() for parameter in parameters],
            "optimizer": optimizer.state_dict(),
        }
        self._write()

    def _write(self) -> None:
        partial = self._file.with_suffix(".partial")
        content = BytesIO()  # the write below reports a full disk as an OSError; torch would not
        torch.save(self._state, content)
        partial.write_bytes(content.getbuffer())
        os.replace(partial, self._file)


@torch.no_grad()
def _fill(parameters: Sequence[nn.Parameter], weights: Sequence[torch.Tensor]) -> None:
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
