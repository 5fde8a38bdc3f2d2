"""Chooses the children of a tree's nodes: by the verifier's noise, or drawn without replacement."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice

from torch import Tensor

from engine.native.library import are_finite
from engine.proposer.growth.tree import Child, Tree
from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose, random_bits
from engine.sampling.sampler import Sampler, draft_lanes, pass_keys
from engine.sampling.sparse_distribution import WEIGHT_BITS, choose, quantize, sparse_distributions

_NUM_BITS = 62 - WEIGHT_BITS  # of a uniform number, which is multiplied by the remaining weight
_LANES_PER_RANK = 1 << 16  # more than the depth of any draft


class TreeSampler:
    """Chooses children with the target's sampler."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def branch(self, trees: Seq[Tree], logits: Tensor) -> None:
        """Add children to every tree's level; `logits [R, V] float32` has a row for each node of the levels.

        A node whose logits are not finite gets none.
        """
        rows = [row for tree in trees for row in tree.rows]
        wanted = [number for tree in trees for number in tree.num_wanted]
        are_matched = [tree.sequence.is_matched for tree in trees for _ in tree.level]
        children = iter(self._choose(self._sampler.apply_processors(logits, rows), rows, wanted, are_matched))
        are_valid = iter(are_finite(logits).tolist())
        for tree in trees:
            tree.add([siblings if next(are_valid) else None for siblings in islice(children, len(tree.level))])

    def _choose(
        self, scores: Tensor, rows: Seq[LogitsRow], wanted: Seq[int], are_matched: Seq[bool]
    ) -> list[list[Child]]:
        """Return the children of each row, chosen for the verification of its sequence."""
        children: list[list[Child]] = [[]] * len(rows)
        for choose_children, flag in ((self._best, True), (self._drawn, False)):
            chosen = [index for index, each in enumerate(are_matched) if each is flag]
            if chosen:
                found = choose_children(scores[chosen], [rows[i] for i in chosen], [wanted[i] for i in chosen])
                for index, siblings in zip(chosen, found, strict=True):
                    children[index] = siblings
        return children

    def _best(self, scores: Tensor, rows: Seq[LogitsRow], wanted: Seq[int]) -> list[list[Child]]:
        """Return the tokens with the highest scores plus the target's noise, which the target will probably sample.

        The confidence is the softmax of the noisy scores without the temperature, since draft and target differ equally
        at every temperature. For a greedy row it is the draft's own probability.
        """
        noisy = self._sampler.perturb(scores, rows, Purpose.TARGET_GUMBEL)
        heat = [1.0 if row.sampling.is_greedy else row.sampling.temperature for row in rows]
        sharpness = noisy.new_tensor(heat)[:, None]
        log_total = (noisy * sharpness).logsumexp(dim=1, keepdim=True)
        top = noisy.topk(min(max(wanted), noisy.shape[1]))
        confidences = (top.values * sharpness - log_total).tolist()
        return [
            [Child(token_id, log) for token_id, log in zip(ids[:number], logs, strict=False) if log > float("-inf")]
            for ids, logs, number in zip(top.indices.tolist(), confidences, wanted, strict=True)
        ]

    def _drawn(self, scores: Tensor, rows: Seq[LogitsRow], wanted: Seq[int]) -> list[list[Child]]:
        """Draw up to `wanted` tokens from each row's sparse distribution without replacement.

        The first token equals the token that a chain draws. The noise is as in `Sampler.sample_sparse`, with a lane per
        draw. Nodes of one depth share it, and only one of them is ever verified.
        """
        probs, token_ids = self._sampler.probs(scores, rows).topk(min(32, scores.shape[1]))  # [R, k]; as for chains
        left = quantize(probs)
        distributions = sparse_distributions(token_ids, left)
        keys, lanes = pass_keys(rows, Purpose.DRAFT, scores.device), draft_lanes(rows, scores.device)
        children: list[list[Child]] = [[] for _ in rows]
        for rank in range(max(wanted)):
            total = left.sum(dim=1)
            uniforms = (random_bits(keys, _NUM_BITS, lanes + rank * _LANES_PER_RANK) * total) >> _NUM_BITS
            columns = choose(left, uniforms).clamp_(max=left.shape[1] - 1)[:, None]
            drawn = token_ids.gather(1, columns)[:, 0].tolist()
            for index, is_drawn in enumerate((total > 0).tolist()):
                if is_drawn and rank < wanted[index]:
                    children[index].append(Child(drawn[index], distribution=distributions[index]))
            left = left.scatter(1, columns, 0)
        return children
