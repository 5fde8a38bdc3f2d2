"""The requests of a batch's runs, with values that depend on the requests alone and are cached over many steps.

Consecutive batches usually have the same requests, so the next one reuses these values (`RowBatch.recall`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.sampling.noise import Words, key_prefixes
from protos.messages import SamplingParams


class RunRequests:
    """The sampling parameters and the sample index of each run.

    Results are cached by function, so pass module-level functions and not lambdas.
    """

    def __init__(self, requests: Seq[tuple[SamplingParams, int]]) -> None:
        self.requests = requests
        self.samplings = [sampling for sampling, _ in requests]
        self._matching: dict[Callable[[SamplingParams], bool], list[int]] = {}
        self._columns: dict[Callable[[SamplingParams], float | Seq[float]], NDArray[np.float64]] = {}

    def matching(self, predicate: Callable[[SamplingParams], bool]) -> Seq[int]:
        """Return the runs whose parameters match the predicate."""
        runs = self._matching.get(predicate)
        if runs is None:
            runs = self._matching[predicate] = [run for run, each in enumerate(self.samplings) if predicate(each)]
        return runs

    def column(self, number: Callable[[SamplingParams], float | Seq[float]]) -> NDArray[np.float64]:
        """Return a number of each run's parameters, [runs], or several, [runs, numbers]."""
        column = self._columns.get(number)
        if column is None:
            column = self._columns[number] = np.array([number(each) for each in self.samplings], np.float64)
        return column

    @cached_property
    def key_prefixes(self) -> Words:
        """Noise key prefix of each run, [runs]."""
        return key_prefixes([each.seed for each in self.samplings], [index for _, index in self.requests])
