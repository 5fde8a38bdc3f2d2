"""Claims about the draws of a request, from the distribution that the server reports, and the evidence against them.

Only the likeliest tokens are reported. A claim that needs more holds given that the draw is one of them. Tokens whose
text does not name them (a part of a character, an end token that some servers leave out) are excluded the same way.

Evidence is valid at any time.

A draw multiplies the evidence by q(draw) / p(draw) for each alternative q of a mixture; p is the claimed distribution.
Its mean under p is 1, so the mixture is a martingale. Natural logarithms throughout.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.float64]
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


POWER = 0.99
_POWER_Z = NormalDist().inv_cdf(POWER)
SHIFT = math.log(0.63 / 0.37) - math.log(0.60 / 0.40)  # the tilt that serves a token of 60% at 63%
FAULT_RATE = 0.1  # an impossible outcome that a check must find

_TOP = (SHIFT, -SHIFT, 0.4, -0.4, 1.0, -1.0, 3.0, -3.0)
_SECOND = (0.4, -0.4, 2.0, -2.0)
_REST = (1.0, 3.0, 6.0)
_STICKY = (0.4, 1.0, 3.0, 6.0)
_SHARPER = (0.1, -0.1, 0.4, -0.4, 1.0, -0.9)  # q ~ p ** (1 + tilt): another temperature
_NUM_TILTS = len(_TOP) + len(_SECOND) + len(_REST) + len(_STICKY) + len(_SHARPER)


class DrawEvidence:
    """Draws, each from a claimed distribution of its own over cells: the top token first, all further tokens last.

    The planned fault is the first of `others` (distributions given with each draw), or a shift of the top token's
    odds by SHIFT.
    """

    def __init__(self, num_others: int = 0) -> None:
        self.num_draws = 0
        self._logs = np.zeros(_NUM_TILTS + num_others)
        weights = np.ones_like(self._logs)
        weights[_NUM_TILTS if num_others else slice(0, 2)] = len(weights) / (1 if num_others else 2)
        self._log_weights = np.log(weights / weights.sum())
        self._planned = _NUM_TILTS if num_others else 0
        self._mean = self._variance = 0.0  # of the planned fault's evidence, should it be there
        self.num_top = self.expected_top = 0.0  # draws of the likeliest token

    def add(
        self,
        probs: Probs,
        counts: Sequence[int],
        others: Sequence[Probs] = (),
        *,
        sticky: int | None = None,
    ) -> None:
        """Add draws of one distribution, counted by cell.

        `sticky` is the cell of an earlier draw in the same place.
        """
        num = np.asarray(counts, dtype=np.float64)
        ratios = [(np.log(np.maximum(other, 1e-6)) - np.log(probs))[None] for other in others]
        table = np.concatenate([_ratios(probs.tobytes(), sticky), *ratios])  # [alternatives, cells]
        self._logs += table @ num
        planned, number = table[self._planned], float(num.sum())
        fault = probs * np.exp(planned)
        mean = float(fault @ planned)
        self._mean += number * mean
        self._variance += number * float(fault @ (planned - mean) ** 2)
        self.num_draws += int(number)
        self.num_top += num[0]
        self.expected_top += number * float(probs[0])

    @property
    def log_evidence(self) -> float:
        return float(_log_sum(self._logs + self._log_weights))

    def is_enough(self, threshold: float) -> bool:
        needed = threshold - float(self._log_weights[self._planned])
        return self._mean - _POWER_Z * math.sqrt(self._variance) >= needed

    def num_needed(self, threshold: float) -> int:
        if not self.num_draws or self._mean <= 0:
            return 0
        mean, variance = self._mean / self.num_draws, self._variance / self.num_draws
        return math.ceil(_draws_until(mean, variance, threshold - float(self._log_weights[self._planned])))


class LeastEvidence:
    """Draws under several readings of a claim: all must be refuted. The first one is planned for."""

    def __init__(self, num_readings: int) -> None:
        self.parts = [DrawEvidence(1) for _ in range(num_readings)]

    @property
    def num_draws(self) -> int:
        return self.parts[0].num_draws

    @property
    def log_evidence(self) -> float:
        return min(part.log_evidence for part in self.parts)

    def is_enough(self, threshold: float) -> bool:
        return self.parts[0].is_enough(threshold)

    def num_needed(self, threshold: float) -> int:
        return self.parts[0].num_needed(threshold)


class HitEvidence:
    """Trials with an outcome that a server cannot have if it does as it reports."""

    def __init__(self, rate: float = FAULT_RATE) -> None:
        """`rate` is the planned fault's."""
        self._rate = rate
        self.num_draws = self.num_hits = 0  # trials, and those with the impossible outcome

    def add(self, is_hit: bool) -> None:
        """Count one trial."""
        self.num_draws += 1
        self.num_hits += is_hit

    @property
    def log_evidence(self) -> float:
        return _log_of_hits(self.num_hits, self.num_draws)

    def is_enough(self, threshold: float) -> bool:
        return self.num_draws >= self.num_needed(threshold)

    def num_needed(self, threshold: float) -> int:
        return _trials_needed(self._rate, threshold)


# The evidence of one part of a check. `log_evidence` is 0 before any draw. `is_enough` is true if the planned fault
# would have exceeded the threshold with probability POWER, and `num_needed` the expected number of draws until then.
Evidence = DrawEvidence | LeastEvidence | HitEvidence


@lru_cache(maxsize=4096)
def _ratios(probs_bytes: bytes, sticky: int | None) -> Probs:
    """Log ratios [alternatives, cells] of a mixture to a distribution, given as bytes.

    A cell that cannot be drawn, or is not there, has no tilt.
    """
    probs = np.frombuffer(probs_bytes)
    ratios = [_tilted(probs, 0, _TOP), _tilted(probs, 1 if len(probs) > 2 else None, _SECOND)]
    ratios += [_tilted(probs, len(probs) - 1, _REST), _tilted(probs, sticky, _STICKY)]
    sharper = np.log(probs) * (1 + np.asarray(_SHARPER)[:, None])
    return np.concatenate([*ratios, sharper - _log_sum(sharper)[:, None] - np.log(probs)])


def _tilted(probs: Probs, cell: int | None, tilts: Sequence[float]) -> Probs:
    """Log ratios [tilts, cells] of the distributions with one cell's odds changed."""
    table = np.zeros((len(tilts), len(probs)))
    if cell is not None:
        table[:, cell] = tilts
        table -= np.log1p(probs[cell] * np.expm1(np.asarray(tilts)))[:, None]
    return table


def _log_sum(logs: Probs) -> Probs:
    most = logs.max(axis=-1)
    sums: Probs = most + np.log(np.exp(logs - most[..., None]).sum(axis=-1))
    return sums


def _draws_until(mean: float, variance: float, needed: float) -> float:
    """The smallest n with n * mean - z * sqrt(n * variance) = needed."""
    spread = _POWER_Z * math.sqrt(variance)
    return float(((spread + math.sqrt(spread**2 + 4 * mean * needed)) / (2 * mean)) ** 2)


_RATES = (0.02, FAULT_RATE, 0.4, 0.95)


def _log_of_hits(num_hits: int, num_draws: int) -> float:
    sound = 1e-4  # the rate at a server that does as it reports: a broken line, a machine's fault
    logs = [
        num_hits * math.log(rate / sound) + (num_draws - num_hits) * math.log((1 - rate) / (1 - sound))
        for rate in _RATES
    ]
    return float(_log_sum(np.asarray(logs))) - math.log(len(_RATES))


@cache
def _trials_needed(rate: float, threshold: float) -> int:
    """The least number of trials of a fault of `rate` that give enough hits with probability POWER."""
    for number in itertools.count(1):
        least = next((hits for hits in range(number + 1) if _log_of_hits(hits, number) >= threshold), number + 1)
        missed = sum(math.comb(number, hits) * rate**hits * (1 - rate) ** (number - hits) for hits in range(least))
        if 1 - missed >= POWER:
            return number
    raise AssertionError
