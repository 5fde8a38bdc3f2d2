"""The trial of a new draft: it runs in turns with the old draft in one pair, until goodput shows which is faster.

A pair has one draft process, so the two drafts share it in time. A block is some seconds of decoding with one draft.
Two neighbouring blocks, in random order, are a pair; changes of the traffic hardly affect their ratio.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq

from engine.accounting.goodput import GoodputStats, GoodputTrial, Verdict, log_ratio, seconds_of, since
from protos.errors import UnavailableError
from protos.served_model import CanaryOutcome, CanaryReport, TryDraft

logger = logging.getLogger(__name__)

Sums = Seq[GoodputStats]


class Canary:
    """Tries one draft against another.

    Args:
        order: the new draft, and the limits of its trial.
        old_path: the draft that ran before.
        run: makes the pair run the draft at a path; returns once it serves.
        goodput: returns the target's sums.
        report: called with the report so far.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        order: TryDraft,
        old_path: str,
        run: Callable[[str], Awaitable[None]],
        goodput: Callable[[], Awaitable[Sums]],
        report: Callable[[CanaryReport], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._order = order
        self._old_path = old_path
        self._run = run
        self._goodput = goodput
        self._report = report
        self._noise = random.Random()  # the order of each pair's blocks
        self._sleep = sleep
        self._trial = GoodputTrial(order.min_gain, order.false_keep, order.false_rollback, order.max_pairs)
        self._ratios: list[float] = []

    async def decide(self) -> Verdict:
        """Return the verdict. Either draft may be running by then.

        Raises:
            ServingError: a draft did not start.
        """
        self._report(self.described(CanaryOutcome.RUNNING))
        while (verdict := self._trial.verdict(self._ratios)) is Verdict.OPEN:
            ratio = await self._pair()
            if ratio is None:
                logger.info("canary %s: a pair of blocks had no load in common and does not count", self._order.path)
                continue
            self._ratios.append(ratio)
            report = self.described(CanaryOutcome.RUNNING)
            logger.info(
                "canary %s: pair %d, new/old %.4f, gain so far %s between %s and %s",
                *(self._order.path, report.num_pairs, math.exp(ratio), report.gain, report.low, report.high),
            )
            self._report(report)
        return verdict

    @property
    def reason(self) -> str:
        """The reason for the verdict, in words."""
        return self._trial.reason(self._ratios)

    def described(self, outcome: CanaryOutcome, reason: str = "") -> CanaryReport:
        """Return the report so far."""
        interval = self._trial.interval(self._ratios)
        is_bounded = math.isfinite(interval.low)
        return CanaryReport(
            self._order.path,
            self._old_path,
            outcome,
            reason,
            len(self._ratios),
            _gain(interval.mean) if self._ratios else None,
            _gain(interval.low) if is_bounded else None,
            _gain(interval.high) if is_bounded else None,
        )

    async def _pair(self) -> float | None:
        """Return the log ratio of one block of each draft, or None if they had no load in common."""
        paths = [self._order.path, self._old_path]
        self._noise.shuffle(paths)
        blocks = {}
        for path in paths:
            await self._run(path)
            blocks[path] = await self._block()
        return log_ratio(blocks[self._order.path], blocks[self._old_path])

    async def _block(self) -> Sums:
        """Return the sums of `block_s` of decoding. If the target restarts, so does the block."""
        await self._sleep(2.0)  # for a new draft to prefill the running sequences
        begin = await self._sums()
        while True:
            await self._sleep(1.0)
            now = await self._sums()
            block = None if begin is None or now is None else since(begin, now)
            if block is None:
                begin = now
            elif seconds_of(block) >= self._order.block_s:
                return block

    async def _sums(self) -> Sums | None:
        """Return the target's sums; or None while it is away."""
        try:
            return await self._goodput()
        except (UnavailableError, TimeoutError):
            return None


def _gain(log_ratio: float) -> float:
    return round(math.expm1(log_ratio), 4)
