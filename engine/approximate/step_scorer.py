"""The target's score of a reasoning step, from 0 to 9, computed from one pass over the step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.config import ScorerKind, StepConfig
from protos.errors import ConfigError
from protos.messages import MAX_STEP_SCORE


@dataclass(frozen=True, slots=True)
class StepScorer:
    """Scores steps. The pass computes `suffix_ids` after the step; they are never committed.

    Without `digit_ids` a step is scored by the likelihood of its tokens: 9 times the geometric mean of p(x) / max p. It
    works with any model, and a step that a greedy target would have written scores 9. With them, `suffix_ids` ask the
    target for a digit (arXiv:2504.07891). The score is the expectation over the ten digits, so an undecided target does
    not give a random score.
    """

    suffix_ids: tuple[int, ...] = ()
    digit_ids: tuple[int, ...] = ()

    def score(self, logits: Tensor, step_ids: Seq[int]) -> float:
        """Return a score in [0, 9].

        Args:
            logits: `[S + len(suffix_ids) + 1, V] float32`; row i follows the step's first i tokens.
            step_ids: The S tokens of the step.
        """
        if self.digit_ids:
            row = logits[len(step_ids) + len(self.suffix_ids)]  # [V]
            probs = row[list(self.digit_ids)].double().softmax(dim=0)  # [10]
            return float(probs @ torch.arange(10, dtype=torch.float64, device=probs.device))
        rows = logits[: len(step_ids)]  # [S, V]
        chosen = rows.gather(1, torch.tensor(step_ids, device=rows.device)[:, None])[:, 0]  # [S]
        return MAX_STEP_SCORE * float((chosen - rows.amax(dim=1)).mean().exp())


def make_scorer(config: StepConfig, tokenizer: Tokenizer) -> StepScorer:
    """Return the scorer of a deployment.

    Raises:
        ConfigError: the tokenizer writes a digit in several tokens, or the rating prompt has no tokens.
    """
    if config.judge is ScorerKind.LIKELIHOOD:
        return StepScorer()
    suffix_ids = tuple(tokenizer.encode(config.rating_prompt, add_special_tokens=False).ids)
    digit_ids = [tokenizer.encode(str(digit), add_special_tokens=False).ids for digit in range(10)]
    wrong = next((digit for digit, ids in enumerate(digit_ids) if len(ids) != 1), None)
    if wrong is not None:
        raise ConfigError(
            f"`speculation.steps.judge` is 'rating', but the target's tokenizer writes the digit {wrong} in "
            f"{len(digit_ids[wrong])} tokens instead of 1; set it to 'likelihood'"
        )
    if not suffix_ids:
        raise ConfigError("the tokenizer has no tokens for the question; set `speculation.steps.judge` to 'likelihood'")
    return StepScorer(suffix_ids, tuple(ids[0] for ids in digit_ids))
