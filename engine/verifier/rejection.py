"""Verification by rejection (arXiv:2211.17192, arXiv:2302.01318), with a sparse q in integer weights.

Draft x ~ q is accepted with probability min(1, p(x)/q(x)). The first rejected draft is replaced by a token from
norm(max(0, p - q)). If all are accepted, a bonus token is drawn from p of the last row. The emitted mass is
min(p, q) + max(0, p - q) = p. The formulas are in `rejection_rule`; `ChainBatch` applies them to the sequences of a
step, for `block` too.

In a tree siblings are tested one after the other. They are drawn from one distribution without replacement (Sequoia,
arXiv:2402.12374; recursive rejection, arXiv:2402.14160): c_1 from q_1 = q, c_2 from q_2 = q without c_1, and so on.
The first is tested against p_1 = p. If c_j is rejected, the next is tested against p_{j+1} = norm(max(0, p_j - q_j));
after the last sibling the recovered token is drawn from that residual. Each step is the rejection rule for a target
p_j, so the emitted token has the distribution p. The shape of a tree must not depend on the drawn tokens. A tree
without branches gives the same result as a chain.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TypeVar

import torch
from torch import Tensor

from engine.batch.draft import WEIGHT_SUM, Draft, SparseDistribution
from engine.sampling.logits_row import LogitsRow, RowBatch
from engine.sampling.noise import Purpose, gumbel, uniform
from engine.sampling.sampler import Sampler, row_keys
from engine.sampling.sparse_distribution import is_consistent, one_hot
from engine.verifier import rejection_rule
from engine.verifier.verify_task import VerifyResult, VerifyTask

Value = TypeVar("Value")


class ChainBatch:
    """The chains of prepared tasks, with p at their rows and q of their drafts.

    Args:
        target_probs: p, `[R, V]`, in the order of the tasks' rows.
        tasks: Prepared tasks whose drafts are chains.
    """

    def __init__(self, target_probs: Tensor, tasks: Seq[VerifyTask]) -> None:
        self.target_probs = target_probs
        self.tasks = tasks
        self.proposals = [rejection_rule.proposals_of(task.draft) for task in tasks]
        self.first_rows = [0, *accumulate(len(task.rows) for task in tasks)][:-1]

    @property
    def draft_rows(self) -> list[LogitsRow]:
        """The rows that verify the drafts: row i of a task verifies its draft i."""
        pairs = zip(self.tasks, self.proposals, strict=True)
        return [row for task, drafts in pairs for row in task.rows[: len(drafts)]]

    def by_task(self, values: Seq[Value]) -> list[list[Value]]:
        """Split values in the order of `draft_rows` into one list per task."""
        rest = iter(values)
        return [list(islice(rest, len(drafts))) for drafts in self.proposals]

    def drafted_probs(self) -> tuple[Tensor, Tensor]:
        """Return p and q of all drafted tokens, `[n] float64` each, in the order of `draft_rows`."""
        places = zip(self.first_rows, self.proposals, strict=True)
        row_ids = [first_row + i for first_row, drafts in places for i in range(len(drafts))]
        draft_ids = [draft_id for task in self.tasks for draft_id in task.draft_ids]
        p = rejection_rule.target_probs_of(self.target_probs, row_ids, draft_ids)
        q = rejection_rule.draft_probs_of([q for drafts in self.proposals for q in drafts], draft_ids)
        return p, q.to(p.device)

    def results(self, counts: Seq[int], scales: Seq[float] | None = None) -> list[VerifyResult]:
        """Draw all recovered and bonus tokens at once, and return the results for `counts` accepted drafts.

        `scales` goes to `final_probs`.
        """
        last_rows = [task.rows[count] for task, count in zip(self.tasks, counts, strict=True)]
        final_ids = draw_tokens(self.final_probs(counts, scales), last_rows)
        return [
            VerifyResult((*task.draft_ids[:count], final_id), count)
            for task, count, final_id in zip(self.tasks, counts, final_ids, strict=True)
        ]

    def final_probs(self, counts: Seq[int], scales: Seq[float] | None = None) -> Tensor:
        """Return norm(max(0, scale p - q)), `[tasks, V]`: the distribution of the token after the accepted drafts.

        Without `scales` each scale is 1. After the last draft q is 0, and the distribution is p itself.
        """
        places = list(zip(self.first_rows, self.proposals, counts, strict=True))
        row_ids = [rejection_rule.final_row(first_row, count) for first_row, _, count in places]
        p = self.target_probs[row_ids]  # [tasks, V]
        if scales is not None:
            p *= p.new_tensor(scales)[:, None]
        proposals = [rejection_rule.final_proposal(drafts, count) for _, drafts, count in places]
        return rejection_rule.recovered_probs(p, rejection_rule.dense_probs(proposals, self.target_probs))


def draw_tokens(probs: Tensor, rows: Seq[LogitsRow]) -> list[int]:
    """Draw a token from each of `probs [n, V]`, with the rows' noise; a token of probability 0 is never drawn."""
    noise = gumbel(row_keys(rows, Purpose.RESIDUAL, probs.device), probs.shape[1])
    return (probs.log() + noise).argmax(dim=1).tolist()  # log 0 + noise = -inf


def verify_by_rejection(sampler: Sampler, logits: Tensor, tasks: Seq[VerifyTask], rows: RowBatch) -> list[VerifyResult]:
    """Verify chains; `logits [R, V]` are in the order of the tasks' rows."""
    chains = ChainBatch(sampler.probs(sampler.apply_processors(logits, rows), rows), tasks)
    return chains.results([rejection_rule.count_accepted(flags) for flags in _accept_flags(chains)])


def _accept_flags(chains: ChainBatch) -> list[list[bool]]:
    """Return per task which drafts are accepted, provided that all drafts before them are."""
    rows = chains.draft_rows
    if not rows:
        return [[] for _ in chains.tasks]
    p, q = chains.drafted_probs()
    uniforms = uniform(row_keys(rows, Purpose.ACCEPT, p.device))
    return chains.by_task(rejection_rule.is_accepted(uniforms, p, q).tolist())


# ---- trees --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sibling:
    """A child of the walk's current node; `q` is its q_j, with the weights left by its earlier siblings."""

    node: int
    token_id: int
    q: SparseDistribution

    @property
    def draft_prob(self) -> float:
        """q_j of the sibling's own token."""
        return self.q.weights[self.q.token_ids.index(self.token_id)] / sum(self.q.weights)


def verify_tree_by_rejection(
    sampler: Sampler, logits: Tensor, tasks: Seq[VerifyTask], rows: RowBatch
) -> list[VerifyResult]:
    """Verify trees; `logits [R, V]` are in the order of the tasks' rows."""
    target_probs = sampler.probs(sampler.apply_processors(logits, rows), rows)  # [R, V]
    by_task = torch.split(target_probs, [len(task.rows) for task in tasks])
    walks = [_walk(probs, task) for probs, task in zip(by_task, tasks, strict=True)]
    last_rows = [task.rows[_row_after(path)] for (path, _), task in zip(walks, tasks, strict=True)]
    final_ids = draw_tokens(torch.stack([final_probs for _, final_probs in walks]), last_rows)
    return [
        VerifyResult((*task.draft.path(_row_after(path) - 1), final_id), len(path), path=path)
        for (path, _), task, final_id in zip(walks, tasks, final_ids, strict=True)
    ]


def _walk(target_probs: Tensor, task: VerifyTask) -> tuple[tuple[int, ...], Tensor]:
    """Descend while a child is accepted; `target_probs` has the task's rows.

    Returns the accepted nodes, from the top down, and the distribution of the token after them, `[V]`.
    """
    path: list[int] = []
    while True:
        row = _row_after(path)
        siblings = siblings_of(task.draft, row - 1)
        node, final_probs = _try_siblings(
            target_probs[row], siblings, _uniforms(task.rows[row], len(siblings), target_probs.device)
        )
        if node is None:
            return tuple(path), final_probs
        path.append(node)


def _try_siblings(target_probs: Tensor, siblings: Seq[Sibling], uniforms: Tensor) -> tuple[int | None, Tensor]:
    """Return the accepted child; if all are rejected, None and the residual distribution, `[V]`."""
    for sibling, u in zip(siblings, uniforms, strict=True):
        p = rejection_rule.target_probs_of(target_probs[None], [0], [sibling.token_id])
        if bool(rejection_rule.is_accepted(u, p, p.new_tensor([sibling.draft_prob]))):
            return sibling.node, target_probs
        target_probs = residual(target_probs, sibling)
    return None, target_probs


def _uniforms(row: LogitsRow, num_siblings: int, device: torch.device) -> Tensor:
    """Return a uniform number per child after a row, `[siblings] float64`; no other pass verifies this position."""
    keys = row_keys([row], Purpose.ACCEPT, device).expand(num_siblings)
    return uniform(keys, torch.arange(num_siblings, device=device))


def _row_after(path: Seq[int]) -> int:
    return path[-1] + 1 if path else 0


def siblings_of(draft: Draft, parent: int) -> list[Sibling]:
    """Return the children of `parent` in the order of their draws.

    A distribution is ignored if it excludes its token or differs from the first sibling's. Then q is one-hot, which is
    exact for any token that was chosen without knowledge of the verifier's noise.
    """
    nodes = [node for node, its_parent in enumerate(draft.parents) if its_parent == parent]
    shared = _shared_distribution(draft, nodes)
    left = shared
    siblings: list[Sibling] = []
    for node in nodes:
        token_id = draft.token_ids[node]
        is_valid = token_id in left.token_ids and draft.distributions[node] == shared
        siblings.append(Sibling(node, token_id, left if is_valid else one_hot(token_id)))
        left = without(left, token_id)
    return siblings


def _shared_distribution(draft: Draft, siblings: Seq[int]) -> SparseDistribution:
    """Return the distribution of the first sibling, which all share; `NO_PROPOSAL` if it excludes its token."""
    if not siblings or len(draft.distributions) != len(draft.token_ids):
        return rejection_rule.NO_PROPOSAL
    eldest = siblings[0]
    is_drawn = is_consistent(draft.distributions[eldest], draft.token_ids[eldest])
    return draft.distributions[eldest] if is_drawn else rejection_rule.NO_PROPOSAL


def without(q: SparseDistribution, token_id: int) -> SparseDistribution:
    """Return q without a token that was drawn; the other weights stay the same."""
    pairs = [pair for pair in zip(q.token_ids, q.weights, strict=True) if pair[0] != token_id]
    return SparseDistribution(tuple(token for token, _ in pairs), tuple(weight for _, weight in pairs))


def residual(target_probs: Tensor, sibling: Sibling) -> Tensor:
    """Return norm(max(0, p_j - q_j)), `[V]`: the distribution that the next sibling is tested against."""
    draft_probs = rejection_rule.dense_probs([sibling.q], target_probs[None])
    scale = WEIGHT_SUM / sum(sibling.q.weights)
    return rejection_rule.recovered_probs(target_probs[None], draft_probs * scale)[0]
