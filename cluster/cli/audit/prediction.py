"""The distribution of the next token as a server reports it, and what each sampling parameter makes of it.

Only the likeliest tokens are reported. A claim that needs more holds given that the draw is one of them. Tokens whose
text does not name them (a part of a character, an end token that some servers leave out) are excluded the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cluster.cli.audit.evidence import Probs

NUM_CELLS = 8
_SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")


def is_named(token: str) -> bool:
    """True if a token's text identifies it."""
    return bool(token) and "�" not in token and not _SPECIAL.fullmatch(token.strip())


@dataclass(frozen=True, slots=True)
class Prediction:
    """The likeliest tokens and their probabilities, most likely first."""

    tokens: tuple[str, ...]
    probs: tuple[float, ...]

    @classmethod
    def of(cls, logprobs: Mapping[str, float], num_top: int) -> Prediction:
        """Keep the `num_top` likeliest; servers add the drawn token where it is not one of them."""
        return _prediction(tuple(logprobs.items()), num_top)

    @property
    def named(self) -> list[tuple[str, float]]:
        return [pair for pair in zip(self.tokens, self.probs, strict=True) if is_named(pair[0])]

    def rest_beyond(self, prob: float) -> float:
        """Return the probability of tokens that are neither unnamed nor among those whose sum is `prob`."""
        unnamed = sum(self.probs) - sum(each for _, each in self.named)
        return max(1 - unnamed - prob, 1e-4)  # logprobs are rounded

    def gap_below_top(self, token: str) -> float:
        """Nats between the likeliest token and `token`; infinite if it is not reported."""
        if token not in self.tokens:
            return math.inf
        return math.log(self.probs[0]) - math.log(max(self.probs[self.tokens.index(token)], 1e-300))

    def distance(self, other: Prediction) -> float:
        """Total variation distance over the tokens that both report."""
        mine, theirs = dict(self.named), dict(other.named)
        tokens = {token for token, _ in (*self.named[:NUM_CELLS], *other.named[:NUM_CELLS])}
        floors = min(self.probs, default=0.0), min(other.probs, default=0.0)
        return 0.5 * sum(
            abs(
                mine.get(token, min(floors[0], theirs.get(token, 0.0)))
                - theirs.get(token, min(floors[1], mine.get(token, 0.0)))
            )
            for token in tokens
        )


@lru_cache(maxsize=4096)
def _prediction(logprobs: tuple[tuple[str, float], ...], num_top: int) -> Prediction:
    top = sorted(logprobs, key=lambda item: -item[1])[:num_top]
    return Prediction(tuple(token for token, _ in top), tuple(math.exp(min(0.0, logprob)) for _, logprob in top))


@dataclass(frozen=True, slots=True)
class Claim:
    """Cells of tokens with the probabilities that a request must have, and those without its parameter.

    A draw outside `cells` is in the last cell if `has_rest`, else it is left out: the claim holds given the cells.
    """

    cells: Mapping[str, int]
    probs: Probs
    has_rest: bool = False
    ignored: Probs | None = None

    def cell(self, token: str | None) -> int | None:
        """The cell of a drawn token; None if it is left out."""
        if token is None or not is_named(token):
            return None
        return self.cells.get(token, len(self.probs) - 1 if self.has_rest else None)

    def counts(self, drawn: Mapping[str | None, int]) -> list[int]:
        """Count drawn tokens by cell."""
        counts = [0] * len(self.probs)
        for token, count in drawn.items():
            if (cell := self.cell(token)) is not None:
                counts[cell] += count
        return counts

    @property
    def effect(self) -> float:
        """Mean evidence per draw if the parameter is ignored."""
        if self.ignored is None:
            return 0.0
        other = np.maximum(self.ignored, 1e-6)
        return float(other @ (np.log(other) - np.log(self.probs)))


@lru_cache(maxsize=4096)
def plain_claim(prediction: Prediction) -> Claim | None:
    """The reported distribution itself, its tail as one cell."""
    named = prediction.named
    if not named:
        return None
    top = [prob for _, prob in named[:NUM_CELLS]]
    probs = np.maximum(np.asarray([*top, prediction.rest_beyond(sum(top))]), 1e-9)
    return Claim({token: cell for cell, (token, _) in enumerate(named[:NUM_CELLS])}, probs / probs.sum(), True)


def weighted_claim(prediction: Prediction, weight: Callable[[str, float], float]) -> Claim | None:
    """The reported tokens with their probabilities times a weight of token and probability."""
    named = prediction.named
    if len(named) < 2:
        return None
    probs = np.maximum(np.asarray([prob for _, prob in named]), 1e-9)
    claimed = np.maximum(probs * [weight(token, prob) for token, prob in named], 1e-12)
    return Claim(
        {token: cell for cell, (token, _) in enumerate(named)},
        claimed / claimed.sum(),
        ignored=probs / probs.sum(),
    )


def tempered(prediction: Prediction, temperature: float) -> Claim | None:
    """The reported tokens at a temperature."""
    return weighted_claim(prediction, lambda token, prob: max(prob, 1e-9) ** (1 / temperature - 1))


def filtered(prediction: Prediction, num_kept: int) -> Claim | None:
    """The `num_kept` likeliest tokens alone, renormalized; all others are one cell that must stay empty."""
    kept = [(token, prob) for token, prob in prediction.named if token in prediction.tokens[:num_kept]]
    whole = plain_claim(prediction)
    if not kept or whole is None:
        return None
    probs = np.asarray([prob for _, prob in kept])
    ignored = np.append(probs, prediction.rest_beyond(float(probs.sum())))
    outside = 2e-3  # the rate of tokens that the filter removes: a near tie at its border
    claimed = np.append(probs / probs.sum() * (1 - outside), outside)
    return Claim({token: cell for cell, (token, _) in enumerate(kept)}, claimed, True, ignored / ignored.sum())
