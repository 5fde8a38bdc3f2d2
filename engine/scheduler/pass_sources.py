"""Names the source of each token that a pass commits, and the reason why a pass had no drafts."""

from __future__ import annotations

from engine.sequence.batch import ScheduledSequence
from engine.sequence.checked_draft import CheckedDraft
from engine.verifier.verify_result import VerifyResult
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
