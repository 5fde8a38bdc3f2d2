"""The end of a sequence, and the chunk that reports it. It knows no stop strings: the ingress finds those."""

from __future__ import annotations

from typing import NamedTuple

from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verify_result import VerifyResult
from protos.messages import FinishReason, TokenChunk, TokenLogprobs


class Cut(NamedTuple):
    """The tokens of one pass that are kept; a stop token is the last of them."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def cut_output(sequence: Sequence, token_ids: tuple[int, ...]) -> Cut:
    """Keep the tokens up to the first stop token, or up to the length limit; the sequence itself is not changed."""
    limit = sequence.num_remaining_tokens
    if not sequence.stop_token_ids.isdisjoint(token_ids):
        for index, token_id in enumerate(token_ids[:limit]):
            if _is_stop(sequence, token_id, sequence.num_output_tokens + index):
                return Cut(token_ids[: index + 1], FinishReason.STOP, token_id)
    if len(token_ids) >= limit:
        return Cut(token_ids[:limit], FinishReason.LENGTH)
    return Cut(token_ids)


def with_grammar(sequence: Sequence, cut: Cut) -> Cut:
    """Return the end of a pass whose tokens are appended: another one where it ended before the grammar did.

    Where nothing can follow, the end is all that a grammar's mask allows; the text is not complete then.
    """
    has_failed = sequence.matcher is not None and sequence.matcher.has_failed
    is_short = has_failed and cut.finish_reason is FinishReason.STOP
    return cut._replace(finish_reason=FinishReason.GRAMMAR) if is_short else cut


def cut_outcome(sequence: Sequence, outcome: VerifyResult) -> Cut:
    """Keep what a verified pass commits: nothing where the target has no next token, and the sequence ends."""
    if sequence.has_faulty_prompt or not outcome.is_finite:
        return Cut((), FinishReason.NON_FINITE)
    return cut_output(sequence, outcome.token_ids)


def finished_before_start(sequence: Sequence) -> Cut | None:
    """Return the end of a sequence that has nothing left to do when it arrives, None for all others.

    A stream can break between its last token and its finish reason; the replica that takes over gives only the latter.
    """
    if sequence.is_scoring:
        return None
    num_output = sequence.num_output_tokens
    last_id = sequence.token_ids[-1]
    if num_output > 0 and _is_stop(sequence, last_id, num_output - 1):
        return Cut((), FinishReason.STOP, last_id)
    return Cut((), FinishReason.LENGTH) if sequence.num_remaining_tokens <= 0 else None


def chunk_of(sequence: Sequence, cut: Cut, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenChunk:
    """Return the tokens that one pass committed, as a message."""
    request, report, token_ids = sequence.request, sequence.report, cut.token_ids
    offset = len(sequence.token_ids) - sequence.num_prompt_tokens - len(token_ids)
    return TokenChunk(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=cut.finish_reason,
        stop_token_id=cut.stop_token_id,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        speculation=sequence.speculation_stats(),
        prompt_logprobs=() if offset else tuple(sequence.prompt_logprobs),
        steps=sequence.step_stats,
        sources=() if report is None else report.sources[: len(token_ids)],
        explanation=report.explanation() if report is not None and request.speculation.explain else None,
        offset=offset,
        times=sequence.clock.take() if request.is_traced else None,
    )


def finish(sequence: Sequence, cut: Cut, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenChunk:
    """Mark the sequence as ended and return its last chunk."""
    sequence.status = SequenceStatus.FINISHED
    return chunk_of(sequence, cut, logprobs)


def _is_stop(sequence: Sequence, token_id: int, output_index: int) -> bool:
    """True if the token stops; below min_tokens none does.

    The sampler masks stop tokens there, and one that a migrated prefix has there does not count either.
    """
    return token_id in sequence.stop_token_ids and output_index >= sequence.sampling.min_tokens
