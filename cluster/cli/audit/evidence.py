"""Evidence against a claimed distribution, valid at any time.

A draw multiplies the evidence by q(draw) / p(draw) for each alternative q of a mixture; p is the claimed distribution.
Its mean under p is 1, so the mixture is a martingale. Natural logarithms throughout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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

Probs = NDArray[np.float64]


class Evidence(Protocol):
    """The evidence of one part of a check."""

    @property
    def log_evidence(self) -> float:
        """The logarithm of the evidence; 0 before any draw."""

    def is_enough(self, threshold: float) -> bool:
        """True if the planned fault would have exceeded the threshold with probability POWER."""

    def num_needed(self, threshold: float) -> int:
        """The expected number of draws until `is_enough`."""

    @property
    def num_draws(self) -> int:
        """The draws so far."""


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
