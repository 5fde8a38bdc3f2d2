"""One draft model or head of a pair, which can be replaced while the pair serves: one order at a time.

There is one form of an exchange: a new draft is checked, runs, and may give way to the old draft again. A draft model
is replaced by a restart of its process, a head between two steps of its target.

In a trial (a canary) a new draft runs in turns with the old one, until goodput shows which is faster. A pair has one
draft process, so the two share it in time. A block is some seconds of decoding with one draft. Two neighbouring blocks,
in random order, are a pair of blocks; changes of the traffic hardly affect their ratio.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from actors.shell_messages import RunningHead
from engine.accounting.goodput import GoodputStats, GoodputTrial, log_ratio, seconds_of, since
from protos.errors import (
    ConflictError,
    RequestError,
    ServingError,
    UnavailableError,
)
from protos.served_model import (
    RETURN_S,
    CanaryOutcome,
    CanaryReport,
    CheckDraft,
    DraftOrder,
    DraftReport,
    ShowDraft,
    StopCanary,
    SwapDraft,
    TryDraft,
)

logger = logging.getLogger(__name__)

Sums = Seq[GoodputStats]
Goodput = Callable[[], Awaitable[Sums]]


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
        goodput: Goodput,
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

    async def decide(self) -> CanaryOutcome:
        """Return the verdict, kept or rolled back. Either draft may be running by then.

        Raises:
            ServingError: a draft did not start.
        """
        self._report(self.described(CanaryOutcome.RUNNING))
        while (verdict := self._trial.verdict(self._ratios)) is CanaryOutcome.RUNNING:
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


class ReplaceableDraft(Protocol):
    """The process of a pair's draft model, or the pair's head."""

    async def check_draft(self, path: str) -> None:
        """Check that the checkpoint at `path` can be the draft; the old one still serves. Raises RequestError."""
        ...

    async def replace_draft(self, path: str, wait_s: float) -> str:
        """Draft with the checkpoint at `path`, and return its digest once it serves.

        Raises:
            RequestError: it cannot be loaded.
            DeadlineExceededError: it does not serve within `wait_s`.
        """
        ...


class PairDraft:
    """Carries out orders about one draft of a pair.

    Args:
        process: the draft's, or the head.
        report: describes the running draft, which is deploy.yaml's at first.
        goodput: returns the target's sums, for canaries. It may raise UnavailableError or TimeoutError.
        clock: Unix time in seconds.
        sleep: waits for some seconds, in a canary.
    """

    def __init__(
        self,
        process: ReplaceableDraft,
        report: DraftReport,
        goodput: Goodput,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.report = report
        self._process = process
        self.deployed_path = report.path
        self._goodput = goodput
        self._clock = clock
        self._sleep = sleep
        self.siblings: Seq[PairDraft] = (self,)  # all drafts of the pair, which runs one order at a time
        self._under_way: asyncio.Task[None] | None = None
        self._failure = ""  # of the canary that is under way

    async def carry_out(self, order: CheckDraft | SwapDraft | TryDraft) -> DraftReport:
        """Carry out an order, to its end even if the caller leaves, and return the report of the running draft.

        A canary has only started by then.

        Raises:
            ConflictError: another order is running.
            ServingError: the order failed; the old draft runs, or is starting.
        """
        self._require_idle()
        match order:
            case CheckDraft(path):
                work = self._process.check_draft(path)
            case SwapDraft():
                work = self._swap(order)
            case TryDraft(path):
                if path == self.report.path:
                    raise RequestError(f"The draft {path!r} is already running; try another one.", param="path")
                work = self._try(order)
        self._under_way = asyncio.create_task(work, name="draft-order")
        if isinstance(order, TryDraft):
            await asyncio.sleep(0)  # the canary's first report is set
        else:
            await asyncio.shield(self._under_way)
        return self.report

    @property
    def is_busy(self) -> bool:
        """True while an order runs, a canary included."""
        return self._under_way is not None and not self._under_way.done()

    @property
    def _has_canary(self) -> bool:
        canary = self.report.canary
        return self.is_busy and canary is not None and canary.outcome is CanaryOutcome.RUNNING

    def _require_idle(self) -> None:
        if self._has_canary:
            raise ConflictError(
                f"A canary is running on pair {self.report.replica}; wait until it ends, or stop it with POST "
                "/admin/drafts/canary/stop."
            )
        if any(each.is_busy for each in self.siblings):
            raise ConflictError(
                f"A draft of pair {self.report.replica} is being replaced, checked or tried; send the order again "
                "when that has ended (GET /admin/drafts lists the running drafts)."
            )

    async def _swap(self, order: SwapDraft) -> None:
        old = self.report
        self.report = replace(old, canary=None)
        try:
            await self._run(order.path, order.wait_s)
        except ServingError as error:
            logger.error("the draft %s did not start, going back to %s: %s", order.path, old.path, error)
            await self._restore(old.path)
            raise

    async def _run(self, path: str, wait_s: float) -> None:
        """Start the process with the draft at `path`. Raises ServingError if it does not serve within `wait_s`."""
        logger.info("replacing the draft: %s for %s, within %.0f s", path, self.report.path, wait_s)
        digest = await self._process.replace_draft(path, wait_s)
        self._take(path, digest)
        logger.info("the draft is now %s, digest %s", path, digest)

    async def _restore(self, path: str) -> None:
        try:
            await self._run(path, RETURN_S)
        except ServingError:
            logger.exception("the old draft %s did not start either; the target decodes without a draft", path)

    async def _try(self, order: TryDraft) -> None:
        """Try a draft, and leave the better one running, even after an error."""
        old_path = self.report.path

        async def run(path: str) -> None:
            if path != self.report.path:
                await self._run(path, order.wait_s)

        # The canary alternates both drafts until its test decides; the winner stays.
        canary = Canary(order, old_path, run, self._goodput, self._note, sleep=self._sleep)
        outcome, failure = CanaryOutcome.ROLLED_BACK, ""
        self._failure = ""
        try:
            async with asyncio.timeout(order.deadline_s):
                verdict = await canary.decide()
                await run(order.path if verdict is CanaryOutcome.KEPT else old_path)
                outcome = verdict
        except TimeoutError:
            failure = f"no verdict within {order.deadline_s:.0f} s"
        except ServingError as error:
            failure = error.message
        except asyncio.CancelledError:
            if not (failure := self._failure):
                outcome, failure = CanaryOutcome.STOPPED, "an admin stopped it"
        # Whatever failed, the old draft runs in the end.
        if failure:
            await self._restore(old_path)
        report = canary.described(outcome, failure or canary.reason)
        logger.warning("canary %s against %s: %s", order.path, old_path, report)
        self._note(report)

    async def stop_canary(self) -> None:
        """Stop the canary, if one runs, and return when the old draft runs again."""
        if not self._has_canary or self._under_way is None:
            return
        self._cancel(self._under_way)
        await asyncio.wait({self._under_way})

    @staticmethod
    def _cancel(canary: asyncio.Task[None]) -> None:
        if not canary.cancelling():
            canary.cancel()

    def note_head(self, head: RunningHead) -> None:
        """Note a head that the target has left by itself; that ends a canary.

        Without a failure an order has changed the head, and the order reports it.
        """
        failure = head.failure
        if failure is None or head.path == self.report.path:
            return
        if self._has_canary and self._under_way is not None:
            self._failure = self._failure or failure.reason
            self._cancel(self._under_way)
        elif not self.is_busy:
            self._take(head.path, head.digest)
            self._note(CanaryReport(failure.path, head.path, CanaryOutcome.ROLLED_BACK, failure.reason))

    def _take(self, path: str, digest: str) -> None:
        since_s, is_deployed = self._clock(), path == self.deployed_path
        self.report = replace(self.report, path=path, digest=digest, since_s=since_s, is_deployed=is_deployed)

    def note_tuning(self, text: str) -> None:
        """Add the state of a drift alarm's response to the report."""
        self.report = replace(self.report, tuning=text)

    def _note(self, canary: CanaryReport) -> None:
        self.report = replace(self.report, canary=canary)


class PairDrafts:
    """Passes each order to the draft that it names, or to the first draft, which is the deployment's own."""

    def __init__(self, drafts: Seq[PairDraft]) -> None:
        assert drafts, "a pair without drafts has no `PairDrafts`"
        self.by_method = {each.report.method: each for each in drafts}
        for each in drafts:
            each.siblings = drafts

    @property
    def first(self) -> PairDraft:
        """The deployment's own draft, or the first additional one if that cannot be replaced."""
        return next(iter(self.by_method.values()))

    @property
    def reports(self) -> tuple[DraftReport, ...]:
        """The running drafts, in order."""
        return tuple(each.report for each in self.by_method.values())

    async def carry_out(self, order: DraftOrder) -> tuple[DraftReport, ...]:
        """Carry out an order as `PairDraft.carry_out` does, and return the running drafts.

        Raises:
            RequestError: no draft has that name, or it cannot be replaced by the requested one.
            ConflictError: another order is running, for any draft.
            ServingError: the order failed; the old draft runs, or is starting.
        """
        match order:
            case ShowDraft():
                pass
            case StopCanary():
                for each in self.by_method.values():
                    await each.stop_canary()
            case _:
                await self._named(order.method).carry_out(order)
        return self.reports

    def _named(self, method: str) -> PairDraft:
        if not method:
            return self.first
        if method not in self.by_method:
            raise RequestError(
                f"No draft is named {method!r} here; choose from {', '.join(self.by_method)}.", param="method"
            )
        return self.by_method[method]
