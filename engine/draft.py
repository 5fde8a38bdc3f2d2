"""What a proposer proposes: draft tokens, and the law they were drawn from where a verifier needs it."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_SUM = 1 << 16


@dataclass(frozen=True, slots=True)
class SparseLaw:
    """The exact law q one draft token was drawn from: integer weights over a few tokens, summing to `WEIGHT_SUM`.

    The draft samples with these integers, so both sides hold the same numbers.
    """

    token_ids: tuple[int, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Up to K tokens that may follow a sequence's committed tokens.

    `laws` has one entry per token when the tokens were sampled for rejection or block verification, and is empty when
    they are deterministic given the prefix and the public noise (n-gram, coupled): then q is one-hot.
    """

    token_ids: tuple[int, ...] = ()
    laws: tuple[SparseLaw, ...] = ()


NO_DRAFT = Draft()
