"""Counts of tokens over all choices of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.messages import GenerateRequest, SpeculationExplanation, SpeculationStats, StepStats, TokenChunk
from protos.predicted_text import PredictedText, Prediction
from router.generation.delta import Delta


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one client request; a prompt with several choices counts once.

    Tokens of a prediction are accepted if the output has them. `speculation` is None while no choice has reported it,
    `steps` wherever the output is exact, `explanation` where the client has not asked for it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    speculation: SpeculationStats | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    steps: StepStats | None = None
    explanation: SpeculationExplanation | None = None
    reasoning_tokens: int = 0


class UsageMeter:
    """Sums of deltas and chunks as they come."""

    def __init__(self, requests: Sequence[GenerateRequest], num_choices_per_prompt: int) -> None:
        self._firsts = range(0, len(requests), num_choices_per_prompt)  # each prompt is counted at its first choice
        self._num_prompt_tokens = sum(len(requests[index].prompt_token_ids) for index in self._firsts)
        self._num_cached = [0] * len(requests)
        self._num_generated = [0] * len(requests)
        self._num_reasoning = 0
        self._speculation: list[SpeculationStats | None] = [None] * len(requests)
        self._explanations: list[SpeculationExplanation | None] = [None] * len(requests)
        self.steps = StepStats() if any(request.speculation.is_approximate for request in requests) else None
        self._prediction = Prediction(requests[0].prediction_token_ids if requests else ())
        self._predicted = [PredictedText(self._prediction) for _ in requests if len(self._prediction)]

    def record(self, index: int, gained: Sequence[Delta], batch: Sequence[TokenChunk]) -> None:
        """Count what choice `index` gained from `batch`."""
        self._num_generated[index] += sum(len(delta.token_ids) for delta in gained)
        self._num_reasoning += sum(delta.num_reasoning_tokens for delta in gained)
        for delta in gained if self._predicted else ():
            self._predicted[index].read(delta.token_ids)
        for chunk in batch:
            self._num_cached[index] = max(self._num_cached[index], chunk.num_cached_tokens)
            self._speculation[index] = chunk.speculation or self._speculation[index]
            self._explanations[index] = chunk.explanation or self._explanations[index]
            if self.steps is not None:  # such a request has one choice
                self.steps = chunk.steps or self.steps

    def usage(self) -> Usage:
        """Return the sums so far."""
        explained = [each for each in self._explanations if each is not None]
        known = [stats for stats in self._speculation if stats is not None]
        num_predicted = len(self._predicted) * len(self._prediction)  # each choice had the whole prediction to repeat
        num_accepted = sum(text.num_matched for text in self._predicted)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(self._num_generated),
            cached_tokens=sum(self._num_cached[index] for index in self._firsts),
            speculation=sum(known, SpeculationStats()) if known else None,
            accepted_prediction_tokens=num_accepted,
            rejected_prediction_tokens=num_predicted - num_accepted,
            steps=self.steps,
            explanation=sum(explained, SpeculationExplanation()) if explained else None,
            reasoning_tokens=self._num_reasoning,
        )
