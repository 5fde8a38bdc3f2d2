"""Reports on the tokens of a pass: their sources, why it had no drafts, and log-probabilities of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.sampling.logits_row import LogprobQuery, token_logprobs
from engine.sequence.batch import Batch, ScheduledSequence
from engine.sequence.checked_draft import CheckedDraft
from engine.verifier.verify_task import VerifyResult
from protos.messages import PlainReason, TokenSource, has_own_weights


def token_sources(draft: CheckedDraft, outcome: VerifyResult, method: str) -> list[str]:
    """Return one source per token of `outcome`. Accepted drafts name their method: `accepted:model`."""
    if not outcome.is_exact:
        return [str(TokenSource.STEP)] * len(outcome.token_ids)
    accepted = [_accepted(draft, position, method) for position in range(outcome.num_accepted)]
    last = [str(_last(draft, outcome))] * (len(outcome.token_ids) - len(accepted))
    return [*accepted, *last]


def plain_reason(scheduled: ScheduledSequence, draft: CheckedDraft, *, is_class_open: bool) -> PlainReason | None:
    """Return why the pass had no drafts, None if it had some. Call it before the pass is committed."""
    if draft.num_valid > 0:
        return None
    if scheduled.max_draft_tokens > 0:
        return _empty_reason(scheduled, draft)
    sequence = scheduled.sequence
    reasons = (
        (sequence.num_draft_tokens == 0, PlainReason.OFF),
        (scheduled.num_tokens > 1 or sequence.num_output_tokens == 0, PlainReason.PROMPT),
        (sequence.num_remaining_tokens <= 1, PlainReason.LAST_TOKEN),
        (sequence.num_wanted_drafts > 0, PlainReason.NO_ROOM),
        (not is_class_open, PlainReason.CLASS_OFF),
    )
    return next((reason for is_so, reason in reasons if is_so), PlainReason.LOAD)


def _empty_reason(scheduled: ScheduledSequence, draft: CheckedDraft) -> PlainReason:
    """Return why the pass has no drafts although the proposer was called."""
    if draft.was_proposed:
        return PlainReason.CONSTRAINT if scheduled.sequence.matcher is not None else PlainReason.INVALID
    return PlainReason.DRAFT_AWAY if has_own_weights(scheduled.sequence.method) else PlainReason.NO_MATCH


def _accepted(draft: CheckedDraft, position: int, method: str) -> str:
    is_forced = not draft.draft.parents and position >= draft.num_valid - draft.num_forced
    return str(TokenSource.FORCED) if is_forced else f"{TokenSource.ACCEPTED}:{method}"


def _last(draft: CheckedDraft, outcome: VerifyResult) -> TokenSource:
    """Return the source of the token after the accepted ones: BONUS if the path ends at a leaf of the drafts."""
    drafted = draft.draft
    if not drafted.token_ids:
        return TokenSource.PLAIN
    if drafted.parents:
        is_rejected = (outcome.path[-1] if outcome.path else -1) in drafted.parents
    else:
        is_rejected = outcome.num_accepted < len(drafted.token_ids)
    return TokenSource.RECOVERED if is_rejected else TokenSource.BONUS


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
