"""An anytime-valid test of a discrete distribution: look after every batch, stop when the evidence is there.

The e-process averages likelihood ratios of Dirichlet-multinomial alternatives centred on the claimed distribution.
Under that distribution it is a martingale that starts at 1, so by Ville's inequality it ever reaches 1/alpha with
probability at most alpha: no matter how often one looks, a correct server fails once in 1/alpha runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CONCENTRATIONS = (30.0, 300.0, 3000.0)


class SequentialTest:
    """Evidence against a distribution over cells `[C] float64`; `log_evidence` reaching log(1 / alpha) refutes it."""

    def __init__(self, probs: Tensor) -> None:
        self._probs = probs.double()
        self._counts = torch.zeros_like(self._probs)

    def add(self, cells: list[int]) -> None:
        """Count samples by cell."""
        self._counts += torch.bincount(torch.tensor(cells), minlength=len(self._probs))

    @property
    def num_samples(self) -> int:
        return int(self._counts.sum())

    @property
    def log_evidence(self) -> float:
        """Infinite once a cell of probability zero was seen."""
        if bool(self._counts[self._probs == 0].any()):
            return math.inf
        ratios = torch.stack([self._log_ratio(concentration) for concentration in CONCENTRATIONS])
        return float(ratios.logsumexp(dim=0)) - math.log(len(CONCENTRATIONS))

    def _log_ratio(self, concentration: float) -> Tensor:
        is_live = self._probs > 0
        counts, probs = self._counts[is_live], self._probs[is_live]
        prior = concentration * probs
        normal = math.lgamma(concentration) - math.lgamma(concentration + float(counts.sum()))
        marginal = normal + (torch.lgamma(prior + counts) - torch.lgamma(prior)).sum()
        return marginal - (counts * probs.log()).sum()
