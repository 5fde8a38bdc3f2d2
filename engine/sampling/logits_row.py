"""The context of a row of logits: the request whose token it samples, and the tokens before it.

A step has hundreds of rows, and most code needs only their numbers. So the rows of a chain are one object
(`ChainRows`), the rows of a step are runs of them (`RowBatch`), and a request's number is computed once per run and
repeated by numpy. A `LogitsRow` is created only where a single row is needed: for penalties and grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.grammar import TokenMask
from engine.sampling.noise import Words, key_prefixes
from protos.messages import SamplingParams, TokenLogprobs


class RunRequests:
    """The sampling parameters and the sample index of each run, and values that depend on them alone.

    Consecutive batches usually have the same requests, so the next one reuses these values (`RowBatch.recall`). They
    are cached by function: pass module-level functions and not lambdas.
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


class LogitsRow(NamedTuple):
    """One row of `[R, V]` logits. It is a tuple, the fastest type to create, since a step makes hundreds.

    Its prefix is `token_ids` followed by `draft_ids`. They are separate so that the K + 1 rows of a verification share
    one list of committed tokens. A callee may read both until it returns, and not change them. `mask` has the tokens
    that a grammar allows after this prefix; None allows all.
    """

    sampling: SamplingParams
    token_ids: Seq[int]
    num_prompt_tokens: int
    sample_index: int = 0
    draft_ids: Seq[int] = ()
    mask: TokenMask | None = None

    @property
    def position(self) -> int:
        """Absolute position of the sampled token."""
        return len(self.token_ids) + len(self.draft_ids)

    @property
    def num_generated(self) -> int:
        return self.position - self.num_prompt_tokens


def temperature_of(sampling: SamplingParams) -> float:
    """Return the request's temperature; 1 for a greedy request, which changes no score."""
    return 1.0 if sampling.is_greedy else sampling.temperature


_request_of = attrgetter("sampling", "sample_index")


class ChainRows(Seq[LogitsRow]):
    """The rows of a chain without a grammar: `first`, without drafts, then one row after each of `draft_ids`."""

    __slots__ = ("draft_ids", "first")

    def __init__(self, first: LogitsRow, draft_ids: tuple[int, ...]) -> None:
        self.first = first
        self.draft_ids = draft_ids

    def __len__(self) -> int:
        return len(self.draft_ids) + 1

    @overload
    def __getitem__(self, index: int) -> LogitsRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[LogitsRow]: ...

    def __getitem__(self, index: int | slice) -> LogitsRow | list[LogitsRow]:
        counts = range(len(self))[index]
        if isinstance(counts, int):
            return self.first._replace(draft_ids=self.draft_ids[:counts]) if counts else self.first
        return [self[count] for count in counts]


class RowBatch(Seq[LogitsRow]):
    """Rows in runs. The rows of a chain are one run; any other row is a run of one.

    Attributes:
        firsts: the first row of each run; the whole run shares its request and its mask.
        run_of_row: index of each row's run, [R].
    """

    def __init__(self, groups: Seq[Seq[LogitsRow]]) -> None:
        """Concatenate the rows of `groups`."""
        self._runs: list[Seq[LogitsRow]] = []
        self.firsts: list[LogitsRow] = []
        lengths: list[int] = []
        for group in groups:
            if isinstance(group, ChainRows):
                self._runs.append(group)
                self.firsts.append(group.first)
                lengths.append(len(group.draft_ids) + 1)
            else:
                self._runs += [(row,) for row in group]
                self.firsts += group
                lengths += [1] * len(group)
        counts = np.array(lengths, np.int64)
        self._requests: RunRequests | None = None
        self.run_of_row = np.repeat(np.arange(len(lengths)), counts)
        self._places = np.arange(len(self.run_of_row)) - (np.cumsum(counts) - counts)[self.run_of_row]  # index in run

    @classmethod
    def of(cls, rows: Seq[LogitsRow]) -> RowBatch:
        """Return `rows` as a batch, unchanged if it is one."""
        return rows if isinstance(rows, cls) else cls((rows,))

    def __len__(self) -> int:
        return len(self.run_of_row)

    def __iter__(self) -> Iterator[LogitsRow]:
        return chain.from_iterable(self._runs)

    @overload
    def __getitem__(self, index: int) -> LogitsRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[LogitsRow]: ...

    def __getitem__(self, index: int | slice) -> LogitsRow | list[LogitsRow]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        return self._runs[int(self.run_of_row[index])][int(self._places[index])]

    def recall(self, last: RunRequests | None) -> RunRequests:
        """Return this batch's requests, reusing the `last` ones with their cached values if they are equal."""
        if self._requests is None:
            requests = [*map(_request_of, self.firsts)]
            self._requests = last if last is not None and last.requests == requests else RunRequests(requests)
        return self._requests

    @property
    def requests(self) -> RunRequests:
        """The requests of the runs."""
        return self.recall(None)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Absolute position of each row's sampled token, [R]."""
        return self._per_row([len(first.token_ids) + len(first.draft_ids) for first in self.firsts]) + self._places

    @property
    def pass_positions(self) -> NDArray[np.int64]:
        """Absolute position of the first token that each row's pass can commit, [R]."""
        return self._per_row([len(first.token_ids) for first in self.firsts])

    @property
    def num_drafts(self) -> NDArray[np.int64]:
        """Drafts before each row, [R]."""
        return self._per_row([len(first.draft_ids) for first in self.firsts]) + self._places

    def drafts_of(self, run: int) -> Seq[int]:
        """Return the drafts of a run. A row of it has the first `num_drafts` of them."""
        rows = self._runs[run]
        return rows.draft_ids if isinstance(rows, ChainRows) else rows[0].draft_ids

    def column(self, number: Callable[[SamplingParams], float]) -> NDArray[np.float64]:
        """Return a number of each row's sampling parameters, [R]."""
        return self.requests.column(number)[self.run_of_row]

    def _per_row(self, numbers: list[int]) -> NDArray[np.int64]:
        """Repeat the number of each run for its rows, [R]."""
        return np.array(numbers, np.int64)[self.run_of_row]

    def of_runs(self, runs: Seq[int]) -> tuple[list[int], RowBatch]:
        """Return the indices of the rows of these runs, and the rows as a batch."""
        return np.flatnonzero(np.isin(self.run_of_row, runs)).tolist(), RowBatch([self._runs[run] for run in runs])


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """One emitted token: its row of logits, and how many of the likeliest tokens to report."""

    row: int
    token_id: int
    num_top: int


def token_logprobs(logits: Tensor, queries: Seq[LogprobQuery]) -> list[TokenLogprobs]:
    """Answer each query from raw `logits [R, V] float32`, in order, before any sampling parameter.

    Only the queried rows are normalised. Among equally likely tokens the lowest id comes first, so speculation and
    plain decoding report the same list.
    """
    if not queries:
        return []
    logprobs = logits[[query.row for query in queries]].log_softmax(dim=1)  # [Q, V]
    num_top = min(max(query.num_top for query in queries), logits.shape[1])
    thresholds = logprobs.topk(num_top).values if num_top else None  # [Q, num_top]
    answers = []
    for index, query in enumerate(queries):
        count = min(query.num_top, num_top)
        top = () if thresholds is None or count == 0 else _largest(logprobs[index], thresholds[index, count - 1], count)
        answers.append(TokenLogprobs(query.token_id, float(logprobs[index, query.token_id]), top))
    return answers


def _largest(logprobs: Tensor, threshold: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` largest of `[V]`, all at least `threshold`. `topk` would choose freely among equals."""
    token_ids = (logprobs >= threshold).nonzero()[:, 0]  # ascending
    entries = zip(token_ids.tolist(), logprobs[token_ids].tolist(), strict=True)
    return tuple(sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:count])
