"""A proposal: draft tokens, and the distributions they were drawn from where a verifier needs them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

WEIGHT_SUM = 1 << 16


class DraftSource(StrEnum):
    """The text that a draft was copied from; other drafts are those of the deployment's own model or head."""

    PREDICTION = "prediction"  # the client's
    SUFFIX = "suffix"
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """The exact distribution q of one draft token: integer weights over a few tokens, summing to `WEIGHT_SUM`.

    The draft samples with these integers, so both sides hold the same numbers.
    """

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]


# Not frozen: a step makes one for each sequence, and does so in a third of the time. It is never changed.
@dataclass(slots=True, unsafe_hash=True)
class Draft:
    """Tokens that may follow a sequence's committed tokens: a chain of up to K, or a tree of alternatives.

    `distributions` has one entry per token when the tokens were sampled for rejection or block verification, and is
    empty when they are deterministic given the prefix and the public noise (n-gram, coupled): then q is one-hot.
    Siblings of a sampled tree have one distribution between them: each was drawn from it without those before it.

    `parents` makes the tokens the nodes of a tree: the index of each one's parent, -1 where it follows the committed
    tokens. A parent comes before its children, and siblings in the order in which they were drawn. Empty for a chain.

    `source` is None where the deployment's own model or head drafted.
    """

    token_ids: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()
    parents: tuple[int, ...] = ()
    source: DraftSource | None = field(default=None, compare=False)

    def head(self, num_tokens: int) -> Draft:
        """Return the first `num_tokens` tokens, which are a chain or a tree themselves."""
        if num_tokens >= len(self.token_ids):
            return self
        token_ids, parents = self.token_ids[:num_tokens], self.parents[:num_tokens]
        return Draft(token_ids, self.distributions[:num_tokens], parents, self.source)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from the first draft down to `node`, itself included; none for -1."""
        if not self.parents:
            return self.token_ids[: node + 1]
        return tuple(self.token_ids[each] for each in path_to(self.parents, node))

    @property
    def depth(self) -> int:
        """The most drafts that can stand."""
        return max(depths(self.parents), default=0) if self.parents else len(self.token_ids)


NO_DRAFT = Draft()


def path_to(parents: Seq[int], node: int) -> list[int]:
    """Return the ancestors of a tree's node from the root on, and itself; none for -1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def depths(parents: Seq[int]) -> list[int]:
    """Count the drafts on the way to each node of a tree, itself included."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found
