"""Measures the engine's speed on its own steps, for the router and the prefill decision.

The model of a step that prefills N tokens while sequences with D context tokens decode is

    seconds = N / rate * (1 + slowdown * D)

so `seconds / N` is a straight line over D with intercept 1 / rate and slope slowdown / rate. The line is fitted by
least squares weighted with N, over decaying sums. Recent steps count most, so a change of model, load or machine shows
within about fifty prompts.

`engine.accounting.cost_model` fits another model of a step's time, a curve over the rows of a pass. The draft
budget uses it to compare sizes of one pass. The line here predicts whole prompts, independent of their passes.
"""

from __future__ import annotations

from math import inf

from engine.accounting.record import PassRecord

_PREFILL_DECAY = 0.97  # per step with a prefill chunk
_DECODE_DECAY = 0.99  # per step with a decoding sequence


class RateMeter:
    """Prefill and decode speed over an exponential window of steps. It costs a few operations per step."""

    def __init__(self) -> None:
        self._tokens = 0.0  # decayed sums of N, N D, N D², t and t D over prefill steps
        self._tokens_d = 0.0
        self._tokens_d2 = 0.0
        self._seconds = 0.0
        self._seconds_d = 0.0
        self._committed = 0.0  # decayed sums of tokens, and of seconds times sequences, over decode steps
        self._sequence_seconds = 0.0
        self._passes = 0.0  # decayed number and seconds of decode steps without prefill
        self._pass_seconds = 0.0

    def on_pass(self, record: PassRecord) -> None:
        """Add one step. Chunks of fewer than 16 tokens do not count for prefill speed."""
        # In smaller chunks, a step's fixed cost hides the cost per token.
        if record.num_prefill_tokens >= 16 and record.times.total_s > 0:
            self._observe_prefill(record)
        if record.num_decode_sequences > 0:
            self._committed = _DECODE_DECAY * self._committed + record.num_committed_tokens
            self._sequence_seconds = (
                _DECODE_DECAY * self._sequence_seconds + record.times.total_s * record.num_decode_sequences
            )
        if record.num_decode_sequences > 0 and record.num_prefill_tokens == 0:
            self._passes = _DECODE_DECAY * self._passes + 1.0
            self._pass_seconds = _DECODE_DECAY * self._pass_seconds + record.times.total_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second with nothing decoding; 0 until measured."""
        return 1.0 / self._line()[0] if self._tokens > 0 else 0.0

    def chunk_tokens(self, num_passes: float) -> float:
        """Return the prompt tokens that take as long as `num_passes` decode passes; infinite until measured."""
        if self._tokens == 0 or self._passes == 0:
            return inf
        stall_s = num_passes * self._pass_seconds / self._passes
        return max(32, stall_s * self._tokens / self._seconds)  # a block or two, even if passes are fast

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

    def _observe_prefill(self, record: PassRecord) -> None:
        tokens, context, seconds = record.num_prefill_tokens, record.num_decode_context_tokens, record.times.total_s
        if self._tokens > 0:
            intercept, slope = self._line()
            # A slower step counts as four times the expected time.
            seconds = min(seconds, 4.0 * tokens * (intercept + slope * context))
        self._tokens = _PREFILL_DECAY * self._tokens + tokens
        self._tokens_d = _PREFILL_DECAY * self._tokens_d + tokens * context
        self._tokens_d2 = _PREFILL_DECAY * self._tokens_d2 + tokens * context * context
        self._seconds = _PREFILL_DECAY * self._seconds + seconds
        self._seconds_d = _PREFILL_DECAY * self._seconds_d + seconds * context

    def _line(self) -> tuple[float, float]:
        """Return seconds per prefill token with nothing decoding (positive), and the extra per decode token (>= 0).

        The slope is never negative, since decoding makes no prefill faster. The intercept is at least a hundredth of
        the mean.
        """
        mean_d = self._tokens_d / self._tokens
        mean_d2 = self._tokens_d2 / self._tokens
        mean_seconds = self._seconds / self._tokens
        covariance = self._seconds_d / self._tokens - mean_seconds * mean_d
        variance = mean_d2 - mean_d * mean_d + 0.01 * mean_d2  # nearly equal D give no slope
        slope = max(covariance / variance, 0.0) if variance > 0 else 0.0
        intercept = mean_seconds - slope * mean_d
        if intercept < 0.01 * mean_seconds:
            intercept = 0.01 * mean_seconds
            slope = 0.99 * mean_seconds / mean_d
        return intercept, slope
