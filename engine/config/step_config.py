"""The reasoning steps that a deployment allows; the presence in a `SpeculationConfig` is the operator's consent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protos.errors import ConfigError
from protos.messages import MAX_STEP_SCORE

DEFAULT_RATING_PROMPT = (
    "\n\nOn a scale from 0 to 9, how correct and useful is the last reasoning step above? Answer with one digit: "
)


class JudgeKind(StrEnum):
    """The target's score of a step, from 0 to 9 (`engine.approximate.judge`)."""

    RATING = "rating"  # the digit it expects to say when it is asked for one
    LIKELIHOOD = "likelihood"  # how near the step's tokens come to those it finds likeliest


@dataclass(frozen=True, slots=True)
class StepConfig:
    """Reasoning steps: where they are, how long they may be, and when one is good enough.

    A step ends behind `step_end`, or after `max_step_tokens`. Steps are drafted between the two markers `think`, the
    last of which may stand in the prompt; without markers, anywhere in the output. At most `max_steps` of one request
    are drafted. `threshold` is what a request that names none gets.

    Raises:
        ConfigError: a limit is out of range, or a marker is empty.
    """

    threshold: float = 7.0
    judge: JudgeKind = JudgeKind.RATING
    rating_prompt: str = DEFAULT_RATING_PROMPT
    step_end: str = "\n\n"
    think: tuple[str, str] | None = ("<think>", "</think>")
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
                "must be at least 1 (leave speculation.steps out for none)"
            )
