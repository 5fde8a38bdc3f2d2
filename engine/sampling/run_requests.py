"""The requests behind the runs of a batch, and what follows from them alone: worked out once for many steps.

A batch computes the same requests step after step, so the next one takes these over (`RowBatch.recall`).
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
    """The parameters and the sample index of each run.

    Answers are kept by the function that gives them, which is one of a module and no lambda of a step.
    """

    def __init__(self, requests: Seq[tuple[SamplingParams, int]]) -> None:
        self.requests = requests
        self.samplings = [sampling for sampling, _ in requests]
        self._asking: dict[Callable[[SamplingParams], bool], list[int]] = {}
        self._columns: dict[Callable[[SamplingParams], float | Seq[float]], NDArray[np.float64]] = {}

    def asking(self, is_asked: Callable[[SamplingParams], bool]) -> Seq[int]:
        """Return the runs whose parameters ask for something."""
        runs = self._asking.get(is_asked)
        if runs is None:
            runs = self._asking[is_asked] = [run for run, each in enumerate(self.samplings) if is_asked(each)]
        return runs

    def column(self, number: Callable[[SamplingParams], float | Seq[float]]) -> NDArray[np.float64]:
        """Return a number that the parameters give, or several: [runs] or [runs, numbers]."""
        column = self._columns.get(number)
        if column is None:
            column = self._columns[number] = np.array([number(each) for each in self.samplings], np.float64)
        return column

    @cached_property
    def key_prefixes(self) -> Words:
        """Prefix of the noise keys of each run, [runs]."""
        return key_prefixes([each.seed for each in self.samplings], [index for _, index in self.requests])
