"""An anytime-valid test of a discrete law: look after every batch, stop when the evidence is there.

The e-process averages likelihood ratios of Dirichlet-multinomial alternatives centred on the claimed law. Under that
law it is a martingale that starts at 1, so by Ville's inequality it ever reaches 1/alpha with probability at most
alpha: no matter how often one looks, a correct server fails once in 1/alpha runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CONCENTRATIONS = (30.0, 300.0, 3000.0)


class SequentialTest:
    """Evidence against a law over cells `[C] float64`; `log_evidence` reaching log(1 / alpha) refutes it."""

    def __init__(self, law: Tensor) -> None:
        self._law = law.double()
        self._counts = torch.zeros_like(self._law)

    def add(self, cells: list[int]) -> None:
        """Count samples by cell."""
        self._counts += torch.bincount(torch.tensor(cells), minlength=len(self._law))

    @property
    def num_samples(self) -> int:
        return int(self._counts.sum())

    @property
    def log_evidence(self) -> float:
        """Infinite once a cell of probability zero was seen."""
        if bool(self._counts[self._law == 0].any()):
            return math.inf
        ratios = torch.stack([self._log_ratio(concentration) for concentration in CONCENTRATIONS])
        return float(ratios.logsumexp(dim=0)) - math.log(len(CONCENTRATIONS))

    def _log_ratio(self, concentration: float) -> Tensor:
        is_live = self._law > 0
        counts, law = self._counts[is_live], self._law[is_live]
        prior = concentration * law
        normal = math.lgamma(concentration) - math.lgamma(concentration + float(counts.sum()))
        marginal = normal + (torch.lgamma(prior + counts) - torch.lgamma(prior)).sum()
        return marginal - (counts * law.log()).sum()
