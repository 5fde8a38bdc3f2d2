"""Log-probabilities of emitted tokens, from the target's raw logits, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from protos.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """One emitted token: its row of logits, and how many of the likeliest tokens to report."""

    row: int
    token_id: int
    num_top: int


def token_logprobs(logits: Tensor, queries: Seq[LogprobQuery]) -> list[TokenLogprobs]:
    """Answer each query from `logits [R, V] float32`, in order. Only the queried rows are normalised.

    Among equally likely tokens the lowest id comes first, so speculation and plain decoding report the same list.
    """
    if not queries:
        return []
    logprobs = logits[[query.row for query in queries]].log_softmax(dim=1)  # [Q, V]
    num_top = min(max(query.num_top for query in queries), logits.shape[1])
    thresholds = logprobs.topk(num_top).values if num_top else None  # [Q, num_top]
    answers = []
    for index, query in enumerate(queries):
        count = min(query.num_top, num_top)
        top = () if thresholds is None or count == 0 else _largest(logprobs[index], thresholds[index, count - 1], count)
        answers.append(TokenLogprobs(query.token_id, float(logprobs[index, query.token_id]), top))
    return answers


def _largest(logprobs: Tensor, threshold: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` largest of `[V]`, all at least `threshold`. `topk` would choose freely among equals."""
    token_ids = (logprobs >= threshold).nonzero()[:, 0]  # ascending
    entries = zip(token_ids.tolist(), logprobs[token_ids].tolist(), strict=True)
    return tuple(sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:count])
