"""The drafts of a step that are worth their time: the lengths that make the most expected tokens per second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.proposer.adaptive.acceptance import Floats, Ints

_NEAR = 0.99  # of the best goodput: among lengths that promise so much the shortest pass is the best


@dataclass(frozen=True, slots=True)
class Allocation:
    """`lengths` `[B]` drafts per sequence, and the expected tokens per second with and without them."""

    lengths: Ints
    tokens_per_s: float
    plain_tokens_per_s: float


def allocate(
    acceptance: Floats, row_seconds: Floats, step_s: float, token_s: float, max_seconds: float = np.inf
) -> Allocation:
    """Maximise G = (B + sum of acceptance) / (C(B + drafts) + D(drafts)) over all lengths.

    `acceptance` `[B, K]` falls along K, and is 0 where a draft may not be; `row_seconds` `[M + 1]` is C(B) to C(B + M),
    the M drafts that may be made at most; D is `step_s` per step of the longest draft and `token_s` per token. For a
    given number of drafts and a given longest one the best are those of the largest acceptance (arXiv:2406.14066), and
    each sequence's form a prefix; so every longest length and every number is tried, whatever the shape of C. Of those
    that are nearly the best the one with the shortest pass is taken: clients wait less, and a promise that hangs on few
    drafts is the surer one. No drafts are made with which C + D would be above `max_seconds`.
    """
    num_sequences, num_positions = acceptance.shape
    if num_sequences == 1:
        return _allocate_to_one(acceptance[0].tolist(), row_seconds.tolist(), step_s + token_s, max_seconds)
    plain = num_sequences / row_seconds[0]
    order = np.argsort(-acceptance.T, axis=None, kind="stable")  # by position among equals: lengths stay prefixes
    chances = acceptance.T.ravel()[order]
    max_drafts = min(len(row_seconds) - 1, int((chances > 0).sum()))
    if max_drafts == 0:
        return Allocation(np.zeros(num_sequences, dtype=np.int64), plain, plain)
    depths = order // num_sequences + 1  # [B * K]
    longest = np.arange(1, num_positions + 1)[:, None]  # [K, 1]
    is_in = (depths <= longest) & (chances > 0)  # [K, B * K]
    num_drafts = np.minimum(np.cumsum(is_in, axis=1), len(row_seconds))
    tokens = num_sequences + np.cumsum(is_in * chances, axis=1)
    seconds = np.append(row_seconds, np.inf)[num_drafts] + step_s * longest + token_s * num_drafts
    goodput = np.where(seconds <= max_seconds, tokens / seconds, 0.0)
    if (best := goodput.max()) <= plain:
        return Allocation(np.zeros(num_sequences, dtype=np.int64), plain, plain)
    is_near = goodput >= max(_NEAR * best, np.nextafter(plain, np.inf))
    best_longest, best_last = np.unravel_index(int(np.where(is_near, seconds, np.inf).argmin()), goodput.shape)
    chosen = order[: best_last + 1][is_in[best_longest, : best_last + 1]]
    lengths = np.bincount(chosen % num_sequences, minlength=num_sequences)
    return Allocation(lengths, float(goodput[best_longest, best_last]), plain)


def _allocate_to_one(
    acceptance: list[float], row_seconds: list[float], draft_s: float, max_seconds: float
) -> Allocation:
    """Allocate to one sequence, where the number of drafts is all there is: a short loop is the fastest."""
    plain, tokens = 1.0 / row_seconds[0], 1.0
    goodputs = []
    for length, (chance, seconds) in enumerate(zip(acceptance, row_seconds[1:], strict=False), start=1):
        if chance <= 0.0:
            break
        tokens += chance
        pass_s = seconds + length * draft_s
        goodputs.append(tokens / pass_s if pass_s <= max_seconds else 0.0)
    if not goodputs or (best := max(goodputs)) <= plain:
        return Allocation(np.array([0]), plain, plain)
    length, goodput = next((i, each) for i, each in enumerate(goodputs, 1) if each >= _NEAR * best and each > plain)
    return Allocation(np.array([length]), goodput, plain)
