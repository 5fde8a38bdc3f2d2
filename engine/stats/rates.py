"""The speed of this engine, measured on its own steps, for the router and the prefill decision.

A step that prefills N tokens while sequences of D context tokens decode is taken to last

    seconds = N / rate * (1 + slowdown * D)

so `seconds / N` is a straight line over D: its intercept is 1 / rate, its slope slowdown / rate. The line is fitted by
least squares weighted with N, over sums that forget: recent steps count most, and a model, a load or a machine that
changes shows within some fifty prompts.

`engine.proposer.adaptive.forward_cost` learns a second model of a step's time, a curve over the rows of a pass. The
draft budget compares two sizes of one pass by it; the line here answers for whole prompts, whatever the passes they
come in.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf

from engine.sequence.batch import ScheduledSequence

_MIN_CHUNK_TOKENS = 16  # below, a step's fixed cost hides the cost per token
_PREFILL_DECAY = 0.97  # per step with a prefill chunk
_DECODE_DECAY = 0.99  # per step with a decoding sequence
_OUTLIER_FACTOR = 4.0  # a step slower than this many times the expected one counts as so many times
_LEAST_CHUNK_TOKENS = 32  # a block or two, however fast the passes
_PRIOR_SPREAD = 0.01  # of the mean of D², added to its variance: a slope from nearly equal D is no slope


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step and its duration.

    `num_decode_sequences` are those that had caught up when the step began, `num_decode_context_tokens` their committed
    tokens by then, and `num_committed_tokens` what the step added to them. The pass of `pass_s` had a row for each
    token and each of `num_drafts`.
    """

    num_prefill_tokens: int
    num_decode_sequences: int
    num_decode_context_tokens: int
    num_committed_tokens: int
    seconds: float
    num_drafts: int = 0
    pass_s: float = 0.0

    @classmethod
    def of(cls, batch: Seq[ScheduledSequence], seconds: float, num_drafts: int, pass_s: float) -> StepWork:
        """Return the work of a step, read after the step was committed: its sequences have grown past them."""
        decoding = [scheduled for scheduled in batch if scheduled.num_tokens == 1]
        num_context_tokens = sum(scheduled.start + 1 for scheduled in decoding)
        return cls(
            num_prefill_tokens=sum(scheduled.num_tokens for scheduled in batch) - len(decoding),
            num_decode_sequences=len(decoding),
            num_decode_context_tokens=num_context_tokens,
            num_committed_tokens=sum(len(scheduled.sequence.token_ids) for scheduled in decoding) - num_context_tokens,
            seconds=seconds,
            num_drafts=num_drafts,
            pass_s=pass_s,
        )


class RateMeter:
    """Prefill and decode speed over an exponential window of steps; a few floating-point operations per step."""

    def __init__(self) -> None:
        self._tokens = 0.0  # decayed sums over prefill steps: of N, N D, N D², t and t D
        self._tokens_d = 0.0
        self._tokens_d2 = 0.0
        self._seconds = 0.0
        self._seconds_d = 0.0
        self._committed = 0.0  # decayed sums over decode steps: of tokens, and of seconds times sequences
        self._sequence_seconds = 0.0
        self._passes = 0.0  # decayed sums over steps that decode and prefill nothing: their number, and seconds
        self._pass_seconds = 0.0

    def observe(self, work: StepWork) -> None:
        """Take one step in; chunks of fewer than 16 tokens do not tell prefill speed and are left out."""
        if work.num_prefill_tokens >= _MIN_CHUNK_TOKENS and work.seconds > 0:
            self._observe_prefill(work)
        if work.num_decode_sequences > 0:
            self._committed = _DECODE_DECAY * self._committed + work.num_committed_tokens
            self._sequence_seconds = _DECODE_DECAY * self._sequence_seconds + work.seconds * work.num_decode_sequences
        if work.num_decode_sequences > 0 and work.num_prefill_tokens == 0:
            self._passes = _DECODE_DECAY * self._passes + 1.0
            self._pass_seconds = _DECODE_DECAY * self._pass_seconds + work.seconds

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second with nothing decoding; 0 until measured."""
        return 1.0 / self._line()[0] if self._tokens > 0 else 0.0

    def chunk_tokens(self, num_passes: float) -> float:
        """Return the prompt tokens that take as long as so many passes without prompts; infinite until measured."""
        if self._tokens == 0 or self._passes == 0:
            return inf
        stall_s = num_passes * self._pass_seconds / self._passes
        return max(_LEAST_CHUNK_TOKENS, stall_s * self._tokens / self._seconds)

    @property
    def decode_slowdown(self) -> float:
        """Extra seconds per second of prefill, per context token in decode; 0 until measured."""
        if self._tokens == 0:
            return 0.0
        intercept, slope = self._line()
        return slope / intercept

    @property
    def decode_tokens_per_s(self) -> float:
        """Committed tokens per second of one running sequence, accepted drafts included; 0 until measured."""
        return self._committed / self._sequence_seconds if self._sequence_seconds > 0 else 0.0

    def _observe_prefill(self, work: StepWork) -> None:
        tokens, context, seconds = work.num_prefill_tokens, work.num_decode_context_tokens, work.seconds
        if self._tokens > 0:
            intercept, slope = self._line()
            seconds = min(seconds, _OUTLIER_FACTOR * tokens * (intercept + slope * context))
        self._tokens = _PREFILL_DECAY * self._tokens + tokens
        self._tokens_d = _PREFILL_DECAY * self._tokens_d + tokens * context
        self._tokens_d2 = _PREFILL_DECAY * self._tokens_d2 + tokens * context * context
        self._seconds = _PREFILL_DECAY * self._seconds + seconds
        self._seconds_d = _PREFILL_DECAY * self._seconds_d + seconds * context

    def _line(self) -> tuple[float, float]:
        """Return seconds per prefill token with nothing decoding (positive), and the extra per decode token (>= 0).

        Decoding makes no prefill faster: where noise says so the slope is 0; where it takes all the time, the intercept
        is a hundredth of the mean.
        """
        mean_d = self._tokens_d / self._tokens
        mean_d2 = self._tokens_d2 / self._tokens
        mean_seconds = self._seconds / self._tokens
        covariance = self._seconds_d / self._tokens - mean_seconds * mean_d
        variance = mean_d2 - mean_d * mean_d + _PRIOR_SPREAD * mean_d2
        slope = max(covariance / variance, 0.0) if variance > 0 else 0.0
        intercept = mean_seconds - slope * mean_d
        if intercept < 0.01 * mean_seconds:
            intercept = 0.01 * mean_seconds
            slope = 0.99 * mean_seconds / mean_d
        return intercept, slope
