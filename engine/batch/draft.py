"""A draft: proposed tokens, with the distributions they were drawn from if the verifier needs them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

WEIGHT_SUM = 1 << 16
PREDICTION = "prediction"  # the source of drafts from a text that the client sent


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """The exact distribution q of one draft token: integer weights over a few tokens, summing to `WEIGHT_SUM`.

    The draft samples with these integers, so the drafter and the verifier hold the same numbers.
    """

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]


# Not frozen: each step makes one per sequence, three times as fast without `frozen`. It is never changed.
@dataclass(slots=True, unsafe_hash=True)
class Draft:
    """Tokens that may follow a sequence's committed tokens: a chain of up to K, or a tree of alternatives.

    `distributions` has one entry per token if the tokens were sampled for rejection or block verification. It is empty
    if the prefix and the public noise determine the tokens (n-gram, coupled): then q is one-hot. Siblings of a sampled
    tree share one distribution: each was drawn from it without replacement.

    `parents` makes the tokens the nodes of a tree: the index of each token's parent, -1 for a child of the committed
    tokens. A parent comes before its children, and siblings keep the order of their draws. It is empty for a chain.

    `source` is `PREDICTION` or the method that copied from a text; None if the deployment's own model or head drafted.
    `is_block` if one pass gave the distributions of all its positions; `is_ahead` if it was drafted before the tokens
    that it continues were committed.
    """

    token_ids: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()
    parents: tuple[int, ...] = ()
    source: str | None = field(default=None, compare=False)
    is_block: bool = field(default=False, compare=False)
    is_ahead: bool = field(default=False, compare=False)

    def head(self, num_tokens: int) -> Draft:
        """Return the draft of the first `num_tokens` tokens, again a chain or a tree."""
        if num_tokens >= len(self.token_ids):
            return self
        token_ids, parents = self.token_ids[:num_tokens], self.parents[:num_tokens]
        distributions = self.distributions[:num_tokens]
        return Draft(token_ids, distributions, parents, self.source, self.is_block, self.is_ahead)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from the root down to `node`, including it; empty for -1."""
        if not self.parents:
            return self.token_ids[: node + 1]
        return tuple(self.token_ids[each] for each in path_to(self.parents, node))

    def first_path(self) -> Draft:
        """Return a tree's chain of first children; a chain itself."""
        if not self.parents:
            return self
        nodes: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (nodes[-1] if nodes else -1):
                nodes.append(node)
        has_distributions = len(self.distributions) == len(self.token_ids)
        distributions = tuple(self.distributions[node] for node in nodes) if has_distributions else ()
        token_ids = tuple(self.token_ids[node] for node in nodes)
        return replace(self, token_ids=token_ids, distributions=distributions, parents=())

    @property
    def depth(self) -> int:
        """The most tokens that a verifier can accept."""
        return max(depths(self.parents), default=0) if self.parents else len(self.token_ids)


NO_DRAFT = Draft()


def path_to(parents: Seq[int], node: int) -> list[int]:
    """Return the nodes from the root down to `node`, including it; empty for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def depths(parents: Seq[int]) -> list[int]:
    """Return the depth of each node of a tree; a root has depth 1."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


class Offer(NamedTuple):
    """A draft after the first `base_len` committed tokens and `after`; usable once exactly these are committed.

    An offer made ahead of verification has a possible outcome in `after`. In the answer to a commit `after` is empty.
    A tuple, since it is sent as one.
    """

    request_id: str
    base_len: int
    draft: Draft
    after: tuple[int, ...] = ()
