"""A pair with known costs and known acceptance on a clock of its own: what lengths cost and bring, without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.draft_budget import DraftBudget, DraftedPass, PassTime
from engine.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, VerifyMode

MAX_DRAFTS = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: a pass of n rows takes the longer of reading the weights and computing the rows, and something fixed."""

    weights_s: float = 0.010
    row_s: float = 0.010 / 48
    fixed_s: float = 0.0005
    draft_step_s: float = 0.0004
    draft_row_s: float = 0.00001

    def target_s(self, num_rows: int) -> float:
        return self.fixed_s + max(self.weights_s, self.row_s * num_rows)

    def draft_s(self, lengths: list[int]) -> float:
        steps = max(lengths, default=0)
        return self.draft_step_s * steps + self.draft_row_s * sum(lengths)


def new_sequence(index: int, num_drafts: int = MAX_DRAFTS, temperature: float = 0.0) -> Sequence:
    request = GenerateRequest(f"r{index}", (1,), SamplingParams(temperature=temperature, max_tokens=10**9))
    return Sequence(
        request,
        num_draft_tokens=num_drafts,
        verify=VerifyMode.COUPLED,
        arrival_s=0.0,
        method=SpeculationMethod.MODEL,
    )


@dataclass
class SimulatedPair:
    """`acceptance(index, step)` is the chance of each draft of a sequence; `noise` multiplies what the clock shows.

    A request's first pass reads its prompt, which is `prompt_tokens` rows besides the one that yields a token.
    """

    acceptance: Callable[[int, int], float]
    costs: Costs = Costs()
    noise: float = 0.1
    request_tokens: int = 200
    prompt_tokens: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    seconds: float = 0.0
    num_tokens: float = 0.0  # expected given the lengths, so that luck is out of the comparison
    lengths: list[int] = field(default_factory=list)  # drafts of all sequences together, by step

    def run(self, num_sequences: int, num_steps: int, budget: DraftBudget | int) -> float:
        """Tokens per second of `num_sequences` streams, each one request after the other; an int is a fixed length."""
        began_s, began_tokens = self.seconds, self.num_tokens
        ids = iter(range(10**9))
        slots = [new_sequence(next(ids)) for _ in range(num_sequences)]
        left = [int(self.rng.integers(1, self.request_tokens + 1)) for _ in slots]
        _plan(slots, budget)
        for step in range(num_steps):
            ended = [slot for slot in range(num_sequences) if left[slot] <= 0]
            for slot in ended:
                slots[slot] = new_sequence(next(ids))
                left[slot] = self.request_tokens
                slots[slot].draft_allowance = 0  # its first pass reads the prompt
            passes = self._pass(slots, step, budget, len(ended) * self.prompt_tokens)
            for slot, each in enumerate(passes):
                left[slot] -= each.num_accepted + 1
            _plan(slots, budget)
        return (self.num_tokens - began_tokens) / (self.seconds - began_s)

    def _pass(
        self, slots: list[Sequence], step: int, budget: DraftBudget | int, num_prompt_rows: int = 0
    ) -> list[DraftedPass]:
        lengths = [each.draft_allowance for each in slots]
        passes = []
        for index, (sequence, length) in enumerate(zip(slots, lengths, strict=True)):
            stands = self.rng.random(length) < self.acceptance(index, step)
            num_accepted = int(np.cumprod(stands).sum())
            passes.append(DraftedPass(sequence, length, length, num_accepted))
            self.num_tokens += sum(self.acceptance(index, step) ** i for i in range(length + 1))
        target_s = self.costs.target_s(num_prompt_rows + len(slots) + sum(lengths))
        draft_s = self.costs.draft_s(lengths)
        self.seconds += target_s + draft_s
        self.lengths.append(sum(lengths))
        if isinstance(budget, DraftBudget):
            target_noise, draft_noise = self.rng.lognormal(0.0, self.noise, 2) if self.noise else (1.0, 1.0)
            budget.observe(passes, PassTime(draft_s * draft_noise, target_s * target_noise), num_prompt_rows)
        return passes


def _plan(slots: list[Sequence], budget: DraftBudget | int) -> None:
    if isinstance(budget, DraftBudget):
        budget.plan(slots)
        return
    for each in slots:
        each.draft_allowance = budget


def best_fixed(num_sequences: int, acceptance: float, costs: Costs) -> tuple[int, float]:
    """The best fixed length and its expected tokens per second."""
    speeds = []
    for length in range(MAX_DRAFTS + 1):
        tokens = num_sequences * sum(acceptance**i for i in range(length + 1))
        seconds = costs.target_s(num_sequences * (length + 1)) + costs.draft_s([length] * num_sequences)
        speeds.append(tokens / seconds)
    return int(np.argmax(speeds)), max(speeds)


def plain_speed(num_sequences: int, costs: Costs) -> float:
    return num_sequences / costs.target_s(num_sequences)
