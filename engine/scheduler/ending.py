"""Decides where a sequence ends, and builds the chunk that reports a pass: tokens, their sources, logprobs, the end.

The ingress finds stop strings.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from engine.sampling.logits_row import LogprobQuery, token_logprobs
from engine.sequence.batch import Batch, CheckedDraft, ScheduledSequence
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verify_task import VerifyResult
from protos.errors import RequestError
from protos.messages import FinishReason, PlainReason, TokenChunk, TokenLogprobs, TokenSource, has_own_weights

logger = logging.getLogger(__name__)


def check_prompt(num_tokens: int, max_model_len: int, num_slots: int) -> None:
    """Raise RequestError unless the prompt has a token, and the model and the KV pool have room for one more."""
    if num_tokens == 0:
        raise RequestError("the prompt has no tokens; send at least 1", param="prompt")
    if num_tokens + 1 > max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but the model takes {max_model_len} for prompt and output "
            f"together; send at most {max_model_len - 1}",
            param="prompt",
        )
    if num_tokens + 1 > num_slots:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, but the KV cache holds {num_slots} for prompt and output "
            f"together; send at most {num_slots - 1}, or give the server more cache.memory_gib",
            param="prompt",
        )


class KeptTokens(NamedTuple):
    """The tokens of one pass to commit. A stop token is the last one."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def keep_output(sequence: Sequence, token_ids: tuple[int, ...]) -> KeptTokens:
    """Keep the tokens up to the first stop token or the length limit. The sequence is not changed."""
    limit = sequence.num_remaining_tokens
    if not sequence.stop_token_ids.isdisjoint(token_ids):
        for index, token_id in enumerate(token_ids[:limit]):
            if _is_stop(sequence, token_id, sequence.num_output_tokens + index):
                return KeptTokens(token_ids[: index + 1], FinishReason.STOP, token_id)
    if len(token_ids) >= limit:
        return KeptTokens(token_ids[:limit], FinishReason.LENGTH)
    return KeptTokens(token_ids)


def with_grammar(sequence: Sequence, kept: KeptTokens) -> KeptTokens:
    """Correct the finish reason after the tokens are appended: GRAMMAR if the grammar failed before its end.

    A failed grammar's mask allows the end token alone, so the text stops without being complete.
    """
    has_failed = sequence.matcher is not None and sequence.matcher.has_failed
    is_short = has_failed and kept.finish_reason is FinishReason.STOP
    return kept._replace(finish_reason=FinishReason.GRAMMAR) if is_short else kept


def keep_outcome(sequence: Sequence, outcome: VerifyResult) -> KeptTokens:
    """Keep the tokens of a verified pass. If the logits are not finite, keep nothing and end the sequence."""
    if sequence.has_faulty_prompt or not outcome.is_finite:
        return KeptTokens((), FinishReason.NON_FINITE)
    return keep_output(sequence, outcome.token_ids)


def explain_non_finite(chunks: Seq[TokenChunk], model_name: str) -> int:
    """Log and explain each sequence that ends because its logits are not finite, and return the number of them.

    Args:
        chunks: the chunks of a step.
        model_name: the model and its dtype.
    """
    ended = [chunk for chunk in chunks if chunk.finish_reason is FinishReason.NON_FINITE]
    for chunk in ended:
        is_narrow = " in float16" in model_name
        remedy = "; set target.dtype to bfloat16 or float32, which hold larger numbers" if is_narrow else ""
        chunk.error = (
            f"{model_name} computed NaN or infinite logits after {chunk.offset} tokens of the answer, which ends "
            f"there: its numbers overflow on this text. A retry gives the same{remedy}"
        )
        logger.warning("request %s: %s", chunk.request_id, chunk.error)
    return len(ended)


def finished_before_start(sequence: Sequence) -> KeptTokens | None:
    """Return the end of a sequence that is complete when it arrives, None if it is not.

    A stream can break between its last token and its finish reason. The replica that takes over sends only the reason.
    """
    if sequence.is_scoring:
        return None
    num_output = sequence.num_output_tokens
    last_id = sequence.token_ids[-1]
    if num_output > 0 and _is_stop(sequence, last_id, num_output - 1):
        return KeptTokens((), FinishReason.STOP, last_id)
    return KeptTokens((), FinishReason.LENGTH) if sequence.num_remaining_tokens <= 0 else None


def chunk_of(sequence: Sequence, kept: KeptTokens, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenChunk:
    """Return the message with the tokens that one pass committed."""
    request, report, token_ids = sequence.request, sequence.report, kept.token_ids
    offset = len(sequence.token_ids) - sequence.num_prompt_tokens - len(token_ids)
    return TokenChunk(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=kept.finish_reason,
        stop_token_id=kept.stop_token_id,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        speculation=sequence.speculation_stats(),
        prompt_logprobs=() if offset else tuple(sequence.prompt_logprobs),
        steps=sequence.step_stats,
        sources=() if report is None else report.sources[: len(token_ids)],
        explanation=report.explanation() if report is not None and request.speculation.explain else None,
        offset=offset,
        times=sequence.clock.take() if request.is_traced else None,
    )


def finish(sequence: Sequence, kept: KeptTokens, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenChunk:
    """Mark the sequence as ended and return its last chunk."""
    sequence.status = SequenceStatus.FINISHED
    return chunk_of(sequence, kept, logprobs)


def _is_stop(sequence: Sequence, token_id: int, output_index: int) -> bool:
    """True if the token is a stop token at or after min_tokens.

    The sampler masks earlier stop tokens. A migrated prefix may contain one; it does not count.
    """
    return token_id in sequence.stop_token_ids and output_index >= sequence.sampling.min_tokens


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
