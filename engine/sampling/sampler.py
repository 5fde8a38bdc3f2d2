"""Turns logits into tokens: applies every sampling parameter in one fixed order, to draft rows and target rows alike.

The order is penalties, logit bias, grammar, banned tokens, temperature, top-k, top-p, min-p. The noise is a function of
seed and position. The row has the complete input of the sampler. Its state between steps, the token counts for
penalties and the numbers of the last requests, is a cache of values computed from rows.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.draft import SparseDistribution
from engine.batch.indexing import index_tensor, runs_triton, send, send_arrays
from engine.native.library import highest
from engine.sampling.logits_row import LogitsRow, RowBatch, RunRequests
from engine.sampling.masks import (
    add_bias,
    has_banned_tokens,
    has_bias,
    has_mask,
    mask_banned_tokens,
    mask_forbidden_tokens,
    may_ban_tokens,
    may_have_mask,
)
from engine.sampling.noise import Purpose, gumbel, noise_keys, random_bits
from engine.sampling.penalties import TokenCounts, has_penalties, penalize
from engine.sampling.sparse_distribution import WEIGHT_BITS, choose, quantize, sparse_distributions
from engine.sampling.truncation import (
    divide_by_temperature,
    has_min_p,
    has_temperature,
    has_top_k,
    has_top_p,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_least_share,
    nucleus_share,
)
from protos.messages import GREEDY_BELOW, SamplingParams

if TYPE_CHECKING:
    from engine.sampling.triton_draw import RowEdits

_temperature = attrgetter("temperature")


@dataclass(frozen=True, slots=True)
class Transform:
    """One step of the order. `apply` gets only the rows that need it and returns new scores, `[R, V]` -> `[R, V]`.

    A row needs it if `is_requested` is true for its parameters and `is_needed`, if set, is true for the row. If
    `is_uniform`, the first row of a run decides for the whole run. A GPU fuses the `is_fused` steps into the draw, or
    computes them first if other steps follow. This is correct, since they commute with masking tokens. The `is_last`
    steps are part of a GPU's draw too.
    """

    is_requested: Callable[[SamplingParams], bool]
    apply: Callable[[Tensor, Seq[LogitsRow]], Tensor]
    is_needed: Callable[[LogitsRow], bool] | None = None
    is_uniform: bool = True
    is_fused: bool = False
    is_last: bool = False

    def choose(self, rows: RowBatch) -> tuple[Seq[int], Seq[LogitsRow]]:
        """Return the indices of the rows that need it, and the rows."""
        runs, is_needed = rows.requests.matching(self.is_requested), self.is_needed
        if is_needed is None and len(runs) == len(rows.firsts):
            return range(len(rows)), rows
        if is_needed is not None and self.is_uniform:
            runs = [run for run in runs if is_needed(rows.firsts[run])]
        if not runs:
            return (), ()
        chosen, members = rows.of_runs(runs)
        if self.is_uniform or is_needed is None:
            return chosen, members
        needing = [(index, row) for index, row in zip(chosen, members, strict=True) if is_needed(row)]
        return [index for index, _ in needing], [row for _, row in needing]


def _transforms(counts: TokenCounts) -> tuple[Transform, ...]:
    return (
        Transform(has_penalties, partial(penalize, counts=counts), is_fused=True),
        Transform(has_bias, add_bias, is_fused=True),
        Transform(may_have_mask, mask_forbidden_tokens, has_mask),
        Transform(may_ban_tokens, mask_banned_tokens, has_banned_tokens, is_uniform=False),
        Transform(has_temperature, divide_by_temperature, is_fused=True),
        Transform(has_top_k, keep_top_k),
        Transform(has_top_p, keep_top_p, is_last=True),
        Transform(has_min_p, keep_min_p, is_last=True),
    )


class Sampler:
    """Turns logits into tokens. One thread owns it."""

    def __init__(self) -> None:
        self._counts = TokenCounts()
        self._transforms = _transforms(self._counts)
        self._not_fused = tuple(transform for transform in self._transforms if not transform.is_fused)
        self._before_draw = tuple(transform for transform in self._not_fused if not transform.is_last)
        self._requests: RunRequests | None = None  # of the last batch

    def apply_processors(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """Apply each row's sampling parameters: `[R, V] float32` -> scores `[R, V]`, -inf for impossible tokens.

        A row's distribution is the softmax of its scores, or their argmax if the row is greedy. The logits are not
        changed. Do not write to the result: it may be the logits themselves.
        """
        batch = self._batch(rows)
        if not runs_triton(logits):
            return _apply(self._transforms, logits, batch)
        return self._processed(self._not_fused, logits, batch)

    def draw(self, logits: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """Draw the token of each row of logits, `[R] int64`: `apply_processors`, then `sample`."""
        batch = self._batch(rows)
        if not runs_triton(logits):
            return self.sample(self.apply_processors(logits, batch), batch)
        if any(each.choose(batch)[0] for each in self._before_draw):
            return _draw(self._processed(self._before_draw, logits, batch), batch, is_whole=False)
        # Imported here, since processes without a GPU may have no Triton.
        from engine.sampling.triton_draw import edits_of

        return _draw(logits, batch, edits_of(batch, logits, self._counts), is_whole=False)

    def sample(self, scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """Draw the token of each row, `[R] int64`: the argmax of its scores plus position-keyed Gumbel noise.

        Greedy rows get no noise. Ties go to the lowest id. Draft and target rows at one position share their noise, so
        their tokens agree the more often the closer their distributions are (arXiv:2408.07978).
        """
        if runs_triton(scores):
            return _draw(scores, self._batch(rows))
        return highest(self.perturb(scores, rows, Purpose.TARGET_GUMBEL))

    def rank(self, scores: Tensor, rows: Seq[LogitsRow], purpose: Purpose, k: int) -> list[list[int]]:
        """Return each row's up to k possible tokens with the highest scores plus noise of `purpose`, highest first.

        Noise is keyed, and omitted for greedy rows, as in `sample`. For TARGET_GUMBEL, `sample` draws the first token.
        """
        top = self.perturb(scores, rows, purpose).topk(min(k, scores.shape[1]))
        return [
            [token_id for token_id, score in zip(token_ids, values, strict=True) if score > float("-inf")]
            for token_ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]

    def perturb(self, scores: Tensor, rows: Seq[LogitsRow], purpose: Purpose) -> Tensor:
        """Return scores plus the noise of `purpose` at each row's position, `[R, V]`. Greedy rows get no noise."""
        batch = self._batch(rows)
        noisy = np.flatnonzero(_has_noise(batch)).tolist()
        if not noisy:
            return scores
        keys = row_keys(batch, purpose, scores.device)
        if len(noisy) == len(batch):
            return _noise(keys, scores).add_(scores)
        index = index_tensor(noisy, scores.device)
        return scores.index_add(0, index, _noise(keys[index], scores).to(scores.dtype))

    def probs(self, scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        """Return each row's probabilities, `[R, V]`: one-hot at the argmax if greedy, all 0 if no token is possible."""
        greedy = np.flatnonzero(~_has_noise(self._batch(rows))).tolist()
        if len(greedy) == len(rows):
            return _one_hot_at_argmax(scores)
        probs = scores.softmax(dim=1).nan_to_num_(nan=0.0)
        if greedy:
            index = index_tensor(greedy, scores.device)
            probs[index] = _one_hot_at_argmax(scores[index])
        return probs

    def sample_sparse(
        self, scores: Tensor, rows: Seq[LogitsRow], k: int
    ) -> tuple[tuple[int, ...], tuple[SparseDistribution, ...]]:
        """Draw a draft from each row's k likeliest tokens, with its distribution, for rejection or block verification.

        The distribution is first cut to k tokens and rounded to integer weights, and the draw uses those integers. So
        the returned distribution is exactly the proposal. The noise is independent of the noise that verifies the
        draft. It is new in every pass, since block verification has already used the drafts after the committed ones.
        """
        probs, token_ids = self.probs(scores, rows).topk(min(k, scores.shape[1]))  # [R, k], largest first
        weights = quantize(probs)
        keys = pass_keys(rows, Purpose.DRAFT, scores.device)
        bits = random_bits(keys, WEIGHT_BITS, draft_lanes(rows, scores.device))
        drawn = token_ids.gather(1, choose(weights, bits)[:, None])[:, 0]
        return tuple(drawn.tolist()), tuple(sparse_distributions(token_ids, weights))

    def _processed(self, transforms: Seq[Transform], logits: Tensor, rows: RowBatch) -> Tensor:
        """Compute the fused steps, then `transforms`, on a GPU."""
        from engine.sampling.triton_draw import edit, edits_of

        edits = edits_of(rows, logits, self._counts)
        return _apply(transforms, logits if edits is None else edit(logits, edits), rows)

    def _batch(self, rows: Seq[LogitsRow]) -> RowBatch:
        """Return `rows` as a batch that reuses the last batch's cached values if the requests are the same."""
        batch = RowBatch.of(rows)
        self._requests = batch.recall(self._requests)
        return batch


def _apply(transforms: Seq[Transform], logits: Tensor, rows: RowBatch) -> Tensor:
    """Return the scores. The logits are not changed."""
    scores = logits
    for transform in transforms:
        chosen, members = transform.choose(rows)
        if not chosen:
            continue
        if len(chosen) == len(rows):
            scores = transform.apply(scores, members)
            continue
        if scores is logits:
            scores = logits.clone()
        index = index_tensor(chosen, logits.device)
        scores[index] = transform.apply(scores[index], members)
    return scores


def _draw(scores: Tensor, rows: RowBatch, edits: RowEdits | None = None, *, is_whole: bool = True) -> Tensor:
    """Draw on a GPU; unless the scores are `is_whole`, from each row's nucleus."""
    from engine.sampling.triton_draw import draw

    has_noise = _has_noise(rows)
    if not has_noise.any():
        return draw(scores, edits=edits)
    keys = row_keys(rows, Purpose.TARGET_GUMBEL, torch.device("cpu")).numpy()
    noise = keys, has_noise.view(np.int8)
    if is_whole or not (rows.requests.matching(has_top_p) or rows.requests.matching(has_min_p)):
        sent_keys, is_noisy = send_arrays(noise, scores.device)
        return draw(scores, (sent_keys, is_noisy), edits)
    from engine.sampling.triton_nucleus import draw_nucleus

    limits = [rows.column(each).astype(np.float32) for each in (nucleus_share, log_least_share)]
    sent_keys, is_noisy, top_p, log_min_p = send_arrays((*noise, *limits), scores.device)
    return draw_nucleus(scores, (sent_keys, is_noisy), top_p, log_min_p, edits)


def _has_noise(rows: RowBatch) -> NDArray[np.bool_]:
    """True for each sampled row, False for each greedy row, [R]."""
    return np.asarray(rows.column(_temperature) >= GREEDY_BELOW)


def _noise(keys: Tensor, like: Tensor) -> Tensor:
    """Return Gumbel noise of each row's key, `[R, V]`. Tree branches at the same position share a key."""
    if keys.device.type != "cpu":  # counting the distinct keys would wait for the device; drawing them all is faster
        return gumbel(keys, like.shape[1])
    distinct, index = torch.unique(keys, return_inverse=True)
    return gumbel(keys, like.shape[1]) if len(distinct) == len(keys) else gumbel(distinct, like.shape[1])[index]


def _one_hot_at_argmax(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)


def row_keys(rows: Seq[LogitsRow], purpose: Purpose, device: torch.device) -> Tensor:
    """Return the noise key of each row's sampled token, `[R] int64`."""
    batch = RowBatch.of(rows)
    return _keys(batch, batch.positions, purpose, device)


def pass_keys(rows: Seq[LogitsRow], purpose: Purpose, device: torch.device) -> Tensor:
    """Return the noise key of each row's pass, `[R] int64`. `draft_lanes` distinguish the rows of one pass.

    A pass commits at least one token. So the next pass starts at another position and uses new numbers, even if it
    drafts for the same positions again.
    """
    batch = RowBatch.of(rows)
    return _keys(batch, batch.pass_positions, purpose, device)


def draft_lanes(rows: Seq[LogitsRow], device: torch.device) -> Tensor:
    """Return the index in its pass of the draft that each row draws or verifies, `[R] int64`."""
    return send(torch.from_numpy(RowBatch.of(rows).num_drafts), device)


def _keys(rows: RowBatch, positions: NDArray[np.int64], purpose: Purpose, device: torch.device) -> Tensor:
    return noise_keys(rows.requests.key_prefixes[rows.run_of_row], positions, purpose, device)
