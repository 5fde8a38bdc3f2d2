"""Log-probabilities of a prompt's own tokens, each from the row before it, gathered while the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.sampling.logprobs import LogprobQuery, token_logprobs
from engine.sequence.batch import Batch, ScheduledSequence


def score_prompts(logits: Tensor, batch: Batch, num_drafts: Seq[int]) -> None:
    """Add to each sequence's `prompt_logprobs` what this pass's rows of `logits [R, V] float32` say.

    Call it before the step is committed. `num_drafts` are those of each sampled share.
    """
    queries: list[LogprobQuery] = []
    owners: list[ScheduledSequence] = []
    first_row = 0
    for share, num_rows in zip(batch.shares, batch.num_logits(num_drafts), strict=True):
        of_share = _queries(share, first_row)
        queries += of_share
        owners += [share] * len(of_share)
        first_row += num_rows
    for share, scored in zip(owners, token_logprobs(logits, queries), strict=True):
        share.sequence.prompt_logprobs.append(scored)


def _queries(share: ScheduledSequence, first_row: int) -> list[LogprobQuery]:
    """One per prompt token that follows a row of the share and is not scored yet (a preempted prompt is read twice)."""
    sequence = share.sequence
    num_top = sequence.sampling.num_prompt_logprobs
    if num_top is None or not share.num_scored_rows:
        return []
    first = max(share.start, len(sequence.prompt_logprobs))
    end = min(share.start + share.num_tokens, sequence.num_prompt_tokens - 1)
    return [
        LogprobQuery(first_row + position - share.start, sequence.token_ids[position + 1], num_top)
        for position in range(first, end)
    ]
