"""Reasoning steps. An operator consents to them by setting them in a `SpeculationConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protos.errors import ConfigError
from protos.messages import MAX_STEP_SCORE

DEFAULT_RATING_PROMPT = (
    "\n\nOn a scale from 0 to 9, how correct and useful is the last reasoning step above? Answer with one digit: "
)


class ScorerKind(StrEnum):
    """The source of a step's score, 0 to 9 (`engine.approximate.step_scorer`)."""

    RATING = "rating"  # a digit that the target answers to a prompt
    LIKELIHOOD = "likelihood"  # the likelihood of the step's tokens


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The boundaries of reasoning steps, their greatest length, and the score that accepts one.

    A step ends after `step_end`, or after `max_step_tokens`. Steps are drafted between the two markers `think`, which
    the prompt may contain; without markers, anywhere in the output. At most `max_steps` steps of a request are drafted.
    `threshold` is the default of requests.

    Raises:
        ConfigError: a limit is out of range, or a marker is empty.
    """

    threshold: float = 7.0
    judge: ScorerKind = ScorerKind.RATING
    rating_prompt: str = DEFAULT_RATING_PROMPT
    step_end: str = "\n\n"
    think: tuple[str, str] | None = None
    max_step_tokens: int = 64
    max_steps: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= MAX_STEP_SCORE:
            raise ConfigError(f"speculation.steps.threshold is {self.threshold}; scores are 0 to {MAX_STEP_SCORE:g}")
        if not self.step_end or (self.think is not None and not all(self.think)):
            raise ConfigError("speculation.steps has an empty step_end or marker, which would be found everywhere")
        if self.max_step_tokens < 1 or self.max_steps < 1:
            raise ConfigError(
                f"speculation.steps.max_step_tokens is {self.max_step_tokens} and max_steps {self.max_steps}; both "
                "must be at least 1 (to disable steps, remove speculation.steps)"
            )
