"""Collects the log-probabilities of a prompt's tokens during prefill, each from the row before it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.sampling.logprobs import LogprobQuery, token_logprobs
from engine.sequence.batch import Batch, ScheduledSequence


def score_prompts(logits: Tensor, batch: Batch, num_drafts: Seq[int]) -> None:
    """Append to each sequence's `prompt_logprobs` from this pass's `logits [R, V] float32`.

    A sequence whose row is not finite is marked, and ends with the step. Call it before the step is committed.
    `num_drafts` has one count per sampled sequence.
    """
    if all(scheduled.sequence.sampling.num_prompt_logprobs is None for scheduled in batch.scheduled):
        return
    queries: list[LogprobQuery] = []
    owners: list[ScheduledSequence] = []
    first_row = 0
    for scheduled, num_rows in zip(batch.scheduled, batch.num_logits(num_drafts), strict=True):
        of_scheduled = _queries(scheduled, first_row)
        queries += of_scheduled
        owners += [scheduled] * len(of_scheduled)
        first_row += num_rows
    for scheduled, scored in zip(owners, token_logprobs(logits, queries), strict=True):
        scheduled.sequence.prompt_logprobs.append(scored)
        scheduled.sequence.has_faulty_prompt |= math.isnan(scored.logprob)


def _queries(scheduled: ScheduledSequence, first_row: int) -> list[LogprobQuery]:
    """Return a query for each prompt token after a scheduled row, unless it was scored before a preemption."""
    sequence = scheduled.sequence
    num_top = sequence.sampling.num_prompt_logprobs
    if num_top is None or not scheduled.num_scored_rows:
        return []
    first = max(scheduled.start, len(sequence.prompt_logprobs))
    end = min(scheduled.start + scheduled.num_tokens, sequence.num_prompt_tokens - 1)
    return [
        LogprobQuery(first_row + position - scheduled.start, sequence.token_ids[position + 1], num_top)
        for position in range(first, end)
    ]
