"""One training of the draft, with a file that resumes it after the process was killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.training.optimizer import PairedOptimizer
from models.training.train import Budget, TrainingClock, train
from models.tuning.draft import TunableDraft
from models.tuning.lesson import DivergedError, LogLesson
from models.tuning.log_windows import Window
from models.tuning.low_rank import add_low_rank, merge_low_rank
from models.tuning.student import Student

_OTHERS_RATE = 0.2  # the learning rate of embeddings and norms relative to the matrices', as for the demo draft
_TOKENS_PER_STEP = 2048
_CHECKPOINT_EVERY_S = 20.0


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
        self._budget = Budget(
            candidate.minutes,
            device,
            _TOKENS_PER_STEP,
            max_tokens=None if candidate.num_steps is None else candidate.num_steps * _TOKENS_PER_STEP,
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
        lesson = LogLesson(student, windows, self._budget, self.candidate.seed, clock.num_steps)

        def save() -> None:
            self._save(clock, parameters, optimizer)

        def step_loss(progress: float) -> torch.Tensor:
            on_progress(progress)
            return lesson(progress)

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
        return [*matrices, *others], PairedOptimizer(matrices, others, rate, _OTHERS_RATE * rate)

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
