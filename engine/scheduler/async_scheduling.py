"""Issues the next pass before the host has read the tokens of this one.

If the next pass is one more token of each sequence, its only unknown input is the tokens drawn from this pass, and they
are already on the device. So the next pass is issued first and gathers its input on the device. While it is computed,
the host reads, commits and sends this pass's tokens and takes commands. vLLM calls this asynchronous scheduling, SGLang
an overlap scheduler.

    host      draw j, issue j + 1 | wait | commit j ...... draw j + 1, issue j + 2 | wait | commit j + 1 ......
    device    .... pass j | draw j  | pass j + 1 ........................ | draw j + 1 | pass j + 2 ............

The texts are the same with and without this: tokens of pass j + 1 are drawn after pass j is committed, so sampling
parameters and grammars apply as usual, and the noise depends on the position alone.

If a sequence ends in pass j, its row in pass j + 1 is dropped. That row has written one slot after the sequence's
computed tokens, in a block without a key. The block's next owner writes to it later: one thread issues all passes,
moves and fetched blocks, and the device runs them in that order.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.kv_cache.block_pool import KVMove, compaction
from engine.scheduler.scheduler import Scheduler
from engine.sequence.batch import NOTHING, Batch, CheckedDraft
from engine.sequence.sequence import SequenceStatus
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import VerifyResult, VerifyTask


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A pass, with the state that its verification and commit need.

    `drafts` has one draft per sampled sequence. `logits` [R, V] float32 are the batch's rows, None if the batch is
    empty. If `is_ahead`, the pass was issued before the host had read its input tokens.
    """

    batch: Batch
    drafts: Seq[CheckedDraft]
    logits: Tensor | None
    is_ahead: bool = False

    @property
    def num_drafts(self) -> list[int]:
        """Computed drafts of each sampled sequence."""
        return [draft.num_valid for draft in self.drafts]

    def tasks(self) -> list[VerifyTask]:
        """Return the verifier's tasks, one for each sampled sequence."""
        tasks = []
        first_row = 0
        for scheduled, draft in zip(self.batch.sampled, self.drafts, strict=True):
            first_row += scheduled.num_scored_rows
            tasks.append(VerifyTask(scheduled.sequence, draft.draft, first_row))
            first_row += draft.num_valid + 1
        return tasks

    def compactions(self, verified: Seq[VerifyResult]) -> list[KVMove]:
        """Return the KV moves that make the accepted paths of trees contiguous, for all later passes."""
        pairs = zip(self.batch.sampled, verified, strict=True)
        moves = [
            compaction(each.sequence.block_table, each.draft_start, outcome.path)
            for each, outcome in pairs
            if outcome.path
        ]
        return [move for move in moves if move is not None]


class Runner(Protocol):
    """A model, as the engine uses it. `engine.model.runner.model_runner.ModelRunner` implements it."""

    vocab_size: int

    @property
    def can_overlap(self) -> bool:
        """True if `forward` may return before the device has computed the pass."""

    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        """Return the logits `[R, V] float32` of the spans' requested rows, in span order.

        `input_ids` [T] on the device, if given, replace the spans' tokens.
        """

    def move(self, moves: Seq[KVMove]) -> None:
        """Move KV to other slots before the next `forward`."""


class DrawnTokens:
    """Tokens being copied to the host. Reading them does not wait for work issued after them."""

    def __init__(self, token_ids: Tensor) -> None:
        self._token_ids = token_ids
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def results(self) -> list[VerifyResult]:
        """Wait for the tokens and return them as results of passes without drafts."""
        if self._event is not None:
            self._event.synchronize()
        return [VerifyResult((token_id,), 0, is_finite=token_id >= 0) for token_id in self._token_ids.tolist()]


class AsyncScheduling:
    """Issues the next pass ahead where possible. Owned by the engine's thread.

    Attributes:
        num_passes: number of passes issued before the host had read the tokens of the last one.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, verifier: Verifier) -> None:
        self.num_passes = 0
        self._runner = runner
        self._scheduler = scheduler
        self._verifier = verifier
        self._ahead: InFlightBatch | None = None

    @property
    def has_pass(self) -> bool:
        """True if an issued pass has not been taken yet."""
        return self._ahead is not None

    def take(self) -> InFlightBatch | None:
        """Return the issued pass, without sequences that have ended; None if the next pass must be scheduled."""
        issued, self._ahead = self._ahead, None
        return None if issued is None else _of_running(issued)

    def issue_next(self, issued: InFlightBatch, tasks: Seq[VerifyTask]) -> DrawnTokens | None:
        """Issue the pass after `issued`, if it needs only the tokens drawn from `issued`.

        Args:
            issued: the pass to verify, with logits.
            tasks: its verification tasks, at least one.

        Returns:
            The tokens drawn, in the order of `tasks`; None if nothing was issued and `tasks` must be verified.
        """
        following = self._scheduler.follow(issued.batch) if all(map(_is_plain, tasks)) else None
        if following is None:
            return None
        assert issued.logits is not None
        token_ids = self._verifier.draw(issued.logits, tasks)
        drawn = DrawnTokens(token_ids)
        self._issue(following, token_ids, tasks)
        return drawn

    def _issue(self, batch: Batch, token_ids: Tensor, tasks: Seq[VerifyTask]) -> None:
        """Compute `batch` from the tokens drawn for `tasks`, which include all its sequences."""
        rows = {task.sequence.request_id: row for row, task in enumerate(tasks)}
        chosen = [rows[scheduled.sequence.request_id] for scheduled in batch.scheduled]
        if len(chosen) < len(tasks):
            token_ids = token_ids.index_select(0, index_tensor(chosen, token_ids.device))
        spans = [Span([0], scheduled.start, scheduled.sequence.block_table, 1) for scheduled in batch.scheduled]
        logits = self._runner.forward(spans, token_ids.clamp(min=0))  # -1 is no token: its row is dropped later
        self._ahead = InFlightBatch(batch, [NOTHING] * len(batch.scheduled), logits, is_ahead=True)
        self.num_passes += 1


def _is_plain(task: VerifyTask) -> bool:
    """True if the sampler picks the token directly and nothing else needs the logits."""
    sequence = task.sequence
    return sequence.is_matched and not task.draft.token_ids and sequence.sampling.num_logprobs is None


def _of_running(issued: InFlightBatch) -> InFlightBatch | None:
    """Return the pass without the rows of sequences that have ended since; None if no row is left."""
    all_scheduled = issued.batch.scheduled
    rows = [row for row, scheduled in enumerate(all_scheduled) if scheduled.sequence.status is SequenceStatus.RUNNING]
    if len(rows) == len(all_scheduled) or not rows:
        return issued if rows else None
    assert issued.logits is not None
    logits = issued.logits.index_select(0, index_tensor(rows, issued.logits.device))
    scheduled = tuple(all_scheduled[row] for row in rows)
    return replace(issued, batch=Batch(scheduled, scheduled), drafts=[NOTHING] * len(rows), logits=logits)
