"""Chooses by measurement whether a draft model works ahead of verdicts, where the deployment allows it.

Ahead, the draft of a likely outcome is ready before its verdict. But any other outcome waits for the step that runs,
and the work may take cores or bandwidth that the target needs. Only the speed of whole steps shows all of this, so each
way has blocks of steps in turn until both are known; then the faster one has them, and the other one block now and
then. Ahead or not, a draft is the same, so the choice changes no text.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_BLOCK = 16  # steps
_SETTLING = 2  # first steps of a block, whose drafts were made in the way before
_KNOWN = 2  # blocks of a way
_PERIOD = 24  # blocks between two of the slower way: a way that takes 20% longer costs 0.8%
_FADE = 0.8  # of a way's earlier blocks, per block
_LEAST_GAIN = 1.02  # of a change


class AheadChoice:
    """The choice for batches of about the size of the last step."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Ways] = {}  # by the bit length of the batch size
        self._ways = _Ways(0)

    @property
    def is_ahead(self) -> bool:
        """True if drafts are made ahead of the next verdicts."""
        return self._ways.is_ahead

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Learn from a step with drafts and without prompts; call it once per such step."""
        bits = num_sequences.bit_length()
        if bits != self._ways.bits:
            self._ways = self._sizes.setdefault(bits, _Ways(bits))
            self._ways.begin()
        self._ways.observe(num_tokens / num_sequences, seconds)


class _Ways:
    """Both ways at about one size of batch: blocks so far, and decayed tokens per sequence and seconds."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.is_ahead = True
        self._best = True
        self._num_blocks = 0
        self._num_of = {True: 0, False: 0}
        self._sums = {True: (0.0, 0.0), False: (0.0, 0.0)}
        self.begin()

    def begin(self) -> None:
        """Begin a block; a block that has not ended counts for nothing."""
        self._num_steps, self._tokens, self._seconds = 0, 0.0, 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps > _SETTLING:
            self._tokens += num_tokens
            self._seconds += seconds
        if self._num_steps == _BLOCK:
            self._end()

    def _end(self) -> None:
        """Count the block, and choose the way of the next one."""
        tokens, seconds = self._sums[self.is_ahead]
        self._sums[self.is_ahead] = _FADE * tokens + self._tokens, _FADE * seconds + self._seconds
        self._num_of[self.is_ahead] += 1
        self._num_blocks += 1
        self.begin()
        fewest = min(self._num_of, key=self._num_of.__getitem__)
        if self._num_of[fewest] < _KNOWN:
            self.is_ahead = not self.is_ahead
            return
        best, other = self._speed(self._best), self._speed(not self._best)
        if other > _LEAST_GAIN * best:
            self._best = not self._best
            way, size = "ahead of" if self._best else "after", 1 << max(0, self.bits - 1)
            logger.info("batches of about %d: drafts %s verdicts are %.2f times as fast", size, way, other / best)
        self.is_ahead = self._best if self._num_blocks % _PERIOD else not self._best

    def _speed(self, is_ahead: bool) -> float:
        tokens, seconds = self._sums[is_ahead]
        return tokens / seconds if seconds else 0.0
