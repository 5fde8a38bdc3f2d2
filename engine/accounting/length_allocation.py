"""The draft lengths that give the most expected tokens per second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.accounting.acceptance import Floats, Ints

_NEAR = 0.99  # of the best goodput: among lengths above this, the shortest pass is chosen


@dataclass(frozen=True, slots=True)
class Allocation:
    """The drafts per sequence, `lengths [B]`, and the expected tokens per second with and without them."""

    lengths: Ints
    tokens_per_s: float
    plain_tokens_per_s: float


def allocate(
    acceptance: Floats, row_seconds: Floats, step_s: float, token_s: float, max_seconds: float = np.inf
) -> Allocation:
    """Maximise G = (B + sum of acceptance) / (C(B + drafts) + D(drafts)) over all lengths.

    For a given number of drafts and a given longest draft, the drafts with the largest acceptance are best
    (arXiv:2406.14066), and they form a prefix per sequence. So every longest length and every number is tried, for any
    shape of C. Among lengths that are nearly the best, the shortest pass is chosen: clients wait less, and an estimate
    for few drafts is more certain.

    Args:
        acceptance: `[B, K]`, falling along K; 0 for a draft that is not allowed.
        row_seconds: `[M + 1]`, C(B) to C(B + M), where M is the largest number of drafts.
        step_s: Seconds in D per step of the longest draft.
        token_s: Seconds in D per drafted token.
        max_seconds: Upper limit of C + D.
    """
    num_sequences, num_positions = acceptance.shape
    if num_sequences == 1:
        return _allocate_to_one(acceptance[0].tolist(), row_seconds.tolist(), step_s + token_s, max_seconds)
    plain = num_sequences / row_seconds[0]
    # Order all drafts by acceptance; equal ones by position, so that lengths stay prefixes.
    order = np.argsort(-acceptance.T, axis=None, kind="stable")
    chances = acceptance.T.ravel()[order]
    max_drafts = min(len(row_seconds) - 1, int((chances > 0).sum()))
    if max_drafts == 0:
        return Allocation(np.zeros(num_sequences, dtype=np.int64), plain, plain)
    # Compute the goodput of every longest length (rows) with every number of drafts (columns).
    depths = order // num_sequences + 1  # [B * K]
    longest = np.arange(1, num_positions + 1)[:, None]  # [K, 1]
    is_in = (depths <= longest) & (chances > 0)  # [K, B * K]
    num_drafts = np.minimum(np.cumsum(is_in, axis=1), len(row_seconds))
    tokens = num_sequences + np.cumsum(is_in * chances, axis=1)
    seconds = np.append(row_seconds, np.inf)[num_drafts] + step_s * longest + token_s * num_drafts
    goodput = np.where(seconds <= max_seconds, tokens / seconds, 0.0)
    if (best := goodput.max()) <= plain:
        return Allocation(np.zeros(num_sequences, dtype=np.int64), plain, plain)
    # Choose the shortest pass among the nearly best ones.
    is_near = goodput >= max(_NEAR * best, np.nextafter(plain, np.inf))
    best_longest, best_last = np.unravel_index(int(np.where(is_near, seconds, np.inf).argmin()), goodput.shape)
    chosen = order[: best_last + 1][is_in[best_longest, : best_last + 1]]
    lengths = np.bincount(chosen % num_sequences, minlength=num_sequences)
    return Allocation(lengths, float(goodput[best_longest, best_last]), plain)


def _allocate_to_one(
    acceptance: list[float], row_seconds: list[float], draft_s: float, max_seconds: float
) -> Allocation:
    """Allocate to a single sequence; a short loop is faster than arrays."""
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
