"""The host one step behind: a pass is issued before the host has seen the tokens of the one before.

All that the next pass needs to know of this one are the tokens drawn from it, and those are on the device. So where the
next pass can be nothing but one more token of each sequence, it is issued first, with its input gathered there; while
it is computed, the host reads this pass's tokens, commits and sends them, and takes commands. vLLM calls this
asynchronous scheduling, SGLang an overlap scheduler.

    host      draw j, issue j + 1 | wait | commit j ...... draw j + 1, issue j + 2 | wait | commit j + 1 ......
    device    .... pass j | draw j  | pass j + 1 ........................ | draw j + 1 | pass j + 2 ............

Tokens of pass j + 1 are drawn when those of pass j are committed, so every sampling parameter and every grammar counts
as ever, and the noise is that of the position: the texts are the same with and without this.

A sequence that turns out to have ended in pass j has a row in pass j + 1, which is dropped. That row has written one
slot behind what the sequence had computed, in a block without a key. The device computes in the order in which passes,
moves and blocks from elsewhere are issued, all by one thread, so the next owner of the block writes to it later.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from engine.indexing import index_tensor
from engine.proposer.checked_draft import NOTHING
from engine.scheduler.in_flight_batch import InFlightBatch
from engine.scheduler.scheduler import Scheduler
from engine.sequence.batch import Batch
from engine.sequence.sequence import SequenceStatus
from engine.span import Span
from engine.verifier.verifier import Verifier
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask


class FedRunner(Protocol):
    """A runner that takes tokens from the device."""

    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        """Logits `[R, V] float32` of the spans' rows; `input_ids` [T], if given, replace the spans' tokens."""


class DrawnTokens:
    """Tokens on their way to the host, which waits for them alone: not for what is issued after them."""

    def __init__(self, token_ids: Tensor) -> None:
        self._token_ids = token_ids
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def results(self) -> list[VerifyResult]:
        """Wait for the tokens, which follow no drafts."""
        if self._event is not None:
            self._event.synchronize()
        return [VerifyResult((token_id,), 0, is_finite=token_id >= 0) for token_id in self._token_ids.tolist()]


class Overlap(Protocol):
    """Issues passes before the one before is committed; state of the engine's thread.

    Attributes:
        num_passes: passes that were issued before the host had seen their tokens.
    """

    num_passes: int

    @property
    def has_pass(self) -> bool:
        """True while a pass is on its way whose outcome has not been asked for."""

    def take(self) -> InFlightBatch | None:
        """Return the pass that is on its way, with those of its sequences that still run; None: schedule one."""

    def issue_next(self, issued: InFlightBatch, tasks: Seq[VerifyTask]) -> DrawnTokens | None:
        """Issue the pass after `issued`, if it needs nothing but the tokens drawn from this one.

        Args:
            issued: the pass that is to be verified, with logits.
            tasks: what is to be verified of it, at least one.

        Returns:
            The tokens drawn, in the order of `tasks`; None if nothing was issued, and `tasks` are to be verified.
        """


class SyncScheduling:
    """Every pass is scheduled when the one before is committed."""

    num_passes = 0
    has_pass = False

    def take(self) -> InFlightBatch | None:
        return None

    def issue_next(self, issued: InFlightBatch, tasks: Seq[VerifyTask]) -> DrawnTokens | None:
        return None


class AsyncScheduling:
    """Issues the next pass first wherever it can, and waits like `SyncScheduling` elsewhere."""

    def __init__(self, runner: FedRunner, scheduler: Scheduler, verifier: Verifier) -> None:
        self.num_passes = 0
        self._runner = runner
        self._scheduler = scheduler
        self._verifier = verifier
        self._ahead: InFlightBatch | None = None

    @property
    def has_pass(self) -> bool:
        return self._ahead is not None

    def take(self) -> InFlightBatch | None:
        issued, self._ahead = self._ahead, None
        return None if issued is None else _of_running(issued)

    def issue_next(self, issued: InFlightBatch, tasks: Seq[VerifyTask]) -> DrawnTokens | None:
        following = self._scheduler.follow(issued.batch) if all(map(_is_plain, tasks)) else None
        if following is None:
            return None
        assert issued.logits is not None
        token_ids = self._verifier.draw(issued.logits, tasks)
        drawn = DrawnTokens(token_ids)
        self._issue(following, token_ids, tasks)
        return drawn

    def _issue(self, batch: Batch, token_ids: Tensor, tasks: Seq[VerifyTask]) -> None:
        """Compute `batch`, whose sequences are among those of `tasks`, from the tokens drawn for them."""
        rows = {task.sequence.request_id: row for row, task in enumerate(tasks)}
        chosen = [rows[scheduled.sequence.request_id] for scheduled in batch.scheduled]
        if len(chosen) < len(tasks):
            token_ids = token_ids.index_select(0, index_tensor(chosen, token_ids.device))
        spans = [Span([0], scheduled.start, scheduled.sequence.block_table, 1) for scheduled in batch.scheduled]
        logits = self._runner.forward(spans, token_ids.clamp(min=0))  # one without a token has a row that is dropped
        self._ahead = InFlightBatch(batch, [NOTHING] * len(batch.scheduled), logits, is_ahead=True)
        self.num_passes += 1


def _is_plain(task: VerifyTask) -> bool:
    """True if its token is what the sampler picks, and its logits are of no further use."""
    sequence = task.sequence
    return sequence.is_matched and not task.draft.token_ids and sequence.sampling.num_logprobs is None


def _of_running(issued: InFlightBatch) -> InFlightBatch | None:
    """Return the pass without the rows of sequences that have ended since it was issued; None if no row is left."""
    all_scheduled = issued.batch.scheduled
    rows = [row for row, scheduled in enumerate(all_scheduled) if scheduled.sequence.status is SequenceStatus.RUNNING]
    if len(rows) == len(all_scheduled) or not rows:
        return issued if rows else None
    assert issued.logits is not None
    logits = issued.logits.index_select(0, index_tensor(rows, issued.logits.device))
    scheduled = tuple(all_scheduled[row] for row in rows)
    return replace(issued, batch=Batch(scheduled, scheduled), drafts=[NOTHING] * len(rows), logits=logits)
