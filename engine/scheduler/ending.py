"""Decides where a sequence ends and builds the chunk that reports it. The ingress finds stop strings."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verify_task import VerifyResult
from protos.errors import RequestError
from protos.messages import FinishReason, TokenChunk, TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The maximum tokens of prompt and output together, by the model and by the KV pool."""

    max_model_len: int
    num_slots: int

    @property
    def num_tokens(self) -> int:
        """The lower of the two limits."""
        return min(self.max_model_len, self.num_slots)

    def check_prompt(self, num_tokens: int) -> None:
        """Raise RequestError unless the prompt has a token and leaves room for one more."""
        if num_tokens == 0:
            raise RequestError("the prompt has no tokens; send at least 1", param="prompt")
        if num_tokens + 1 > self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the model takes {self.max_model_len} for prompt and output "
                f"together; send at most {self.max_model_len - 1}",
                param="prompt",
            )
        if num_tokens + 1 > self.num_slots:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but the KV cache holds {self.num_slots} for prompt and output "
                f"together; send at most {self.num_slots - 1}, or give the server more cache.memory_gib",
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


class NonFiniteReport:
    """Counts and explains requests that end because the model's logits are not finite.

    Args:
        model_name: the model and its dtype.
    """

    def __init__(self, model_name: str) -> None:
        self.num_requests = 0
        self._model_name = model_name
        is_narrow = " in float16" in model_name
        self._remedy = "; set target.dtype to bfloat16 or float32, which hold larger numbers" if is_narrow else ""

    def explain(self, chunks: Seq[TokenChunk]) -> None:
        """Log, count and explain each sequence that ends because its logits are not finite."""
        for chunk in chunks:
            if chunk.finish_reason is FinishReason.NON_FINITE:
                self.num_requests += 1
                chunk.error = (
                    f"{self._model_name} computed NaN or infinite logits after {chunk.offset} tokens of the answer, "
                    f"which ends there: its numbers overflow on this text. A retry gives the same{self._remedy}"
                )
                logger.warning("request %s: %s", chunk.request_id, chunk.error)


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
