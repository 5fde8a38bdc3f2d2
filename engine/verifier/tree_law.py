"""The formulas of rejection in a tree: siblings are judged one after the other, each by what those before it left.

Siblings are drawn from one distribution without replacement (Sequoia, arXiv:2402.12374; recursive rejection,
arXiv:2402.14160): c_1 from q_1 = q, c_2 from q_2 = q without c_1, and so on. The first is tested against p_1 = p. Where
c_j falls, the next is tested against p_{j+1} = norm(max(0, p_j - q_j)), and after the last the recovered token is drawn
from it. Each step is the rejection rule of `rejection_law` for a target p_j, so what is emitted has the distribution p.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from engine.draft import WEIGHT_SUM, Draft, SparseDistribution
from engine.sampling.sparse_distribution import is_consistent, one_hot
from engine.verifier import rejection_law


@dataclass(frozen=True, slots=True)
class Sibling:
    """A child of the node that the walk has reached; the weights of its q_j sum to what its elders have left."""

    node: int
    token_id: int
    distribution: SparseDistribution

    @property
    def draft_prob(self) -> float:
        """q_j of its own token."""
        return self.distribution.weights[self.distribution.token_ids.index(self.token_id)] / sum(
            self.distribution.weights
        )


def siblings_of(draft: Draft, parent: int) -> list[Sibling]:
    """The children of `parent` in the order in which they were drawn.

    A distribution that its token cannot have come from is not believed, nor one that is not its elder siblings':
    one-hot is exact for any token that was chosen without knowledge of the verifier's noise.
    """
    nodes = [node for node, its_parent in enumerate(draft.parents) if its_parent == parent]
    shared = _shared_distribution(draft, nodes)
    left = shared
    siblings: list[Sibling] = []
    for node in nodes:
        token_id = draft.token_ids[node]
        is_believed = token_id in left.token_ids and draft.distributions[node] == shared
        siblings.append(Sibling(node, token_id, left if is_believed else one_hot(token_id)))
        left = without(left, token_id)
    return siblings


def _shared_distribution(draft: Draft, siblings: Seq[int]) -> SparseDistribution:
    """The distribution that siblings were drawn from, that of the first; `NO_PROPOSAL` where it cannot be."""
    if not siblings or len(draft.distributions) != len(draft.token_ids):
        return rejection_law.NO_PROPOSAL
    eldest = siblings[0]
    is_drawn = is_consistent(draft.distributions[eldest], draft.token_ids[eldest])
    return draft.distributions[eldest] if is_drawn else rejection_law.NO_PROPOSAL


def without(distribution: SparseDistribution, token_id: int) -> SparseDistribution:
    """What is left of a distribution to draw from once a token is drawn; its weights are the same."""
    pairs = [pair for pair in zip(distribution.token_ids, distribution.weights, strict=True) if pair[0] != token_id]
    return SparseDistribution(tuple(token for token, _ in pairs), tuple(weight for _, weight in pairs))


def residual(target_probs: Tensor, sibling: Sibling) -> Tensor:
    """norm(max(0, p_j - q_j)), `[V]`: the distribution that the next sibling is tested against."""
    draft_probs = rejection_law.dense_probs([sibling.distribution], target_probs[None])
    scale = WEIGHT_SUM / sum(sibling.distribution.weights)
    return rejection_law.recovered_probs(target_probs[None], draft_probs * scale)[0]
