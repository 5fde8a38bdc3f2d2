"""Acceptance by position: the chance that draft i of a sequence is accepted, from its own and its class's passes.

The position of a tree's node is its place among the nodes, likeliest first.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_INITIAL_RATE = 0.7  # acceptance of a class without passes
_CLASS_WINDOW = 100.0  # passes of a class that count
_REQUEST_WINDOW = 20.0  # passes of a request that count
_CLASS_TRUST = 4.0  # weight, in passes, of the position before (or the initial rate) in a class's rate
_REQUEST_TRUST = 8.0  # weight, in passes, of the class in a request's rate
_NEXT_NODE = 0.9  # times the chance of the node before: assumed for a node without passes


class AcceptanceTable:
    """Conditional acceptance by position, for each request and each class of requests, over recent passes.

    A rate is the acceptance of draft i given that all drafts before it were accepted, so it does not depend on the
    length of drafts. A new request starts from its class's rate, and a class from the rate of the position before. Old
    passes fade only at positions that are tried. `observe` takes counts, never drafted tokens.

    In a table of trees a rate is the chance of a node itself, since its parent may be any node before it. A tree's
    first nodes are the best smaller tree, so these chances do not depend on the size of trees either.
    """

    def __init__(self, num_positions: int, *, has_trees: bool = False) -> None:
        self._has_trees = has_trees
        self._positions = np.arange(num_positions)  # [K]
        self._rows: dict[str, int] = {}  # request id -> row in the two tables below
        self._free_rows: list[int] = []
        self._tried = np.zeros((0, num_positions))  # [rows, K] decayed count of passes that tried a position
        self._accepted = np.zeros((0, num_positions))  # [rows, K] the same for passes that accepted it
        self._classes: dict[str, _ClassCounts] = {}

    def observe(self, request_ids: Seq[str], classes: Seq[str], num_proposed: Ints, num_accepted: Ints) -> None:
        """Record one pass: each sequence's id, class, number of drafts and number of accepted drafts, `[B]` each."""
        # The accepted positions were tried, and the first rejected one.
        num_tried = np.minimum(num_proposed, num_accepted + 1)
        self._count(request_ids, classes, num_tried, self._positions < num_accepted[:, None])

    def observe_trees(self, request_ids: Seq[str], classes: Seq[str], num_nodes: Ints, paths: Seq[Seq[int]]) -> None:
        """Record one pass: each sequence's id, class, number of nodes and accepted nodes; every node was tried."""
        is_accepted = np.array([np.isin(self._positions, path) for path in paths])
        self._count(request_ids, classes, num_nodes, is_accepted)

    def _count(self, request_ids: Seq[str], classes: Seq[str], num_tried: Ints, is_accepted: NDArray[np.bool_]) -> None:
        """Add one pass: each sequence's number of tried positions `[B]`, and which are accepted, `[B, K]`."""
        drafted = np.flatnonzero(num_tried)
        if len(drafted) == 0:
            return
        is_tried, is_accepted = self._positions < num_tried[drafted, None], is_accepted[drafted]  # [D, K]
        # Update the requests.
        rows = [self._row(request_ids[index]) for index in drafted.tolist()]
        fade = 1.0 - is_tried / _REQUEST_WINDOW
        self._tried[rows] = fade * self._tried[rows] + is_tried
        self._accepted[rows] = fade * self._accepted[rows] + is_accepted
        # Update the classes.
        members: dict[str, list[int]] = {}
        for place, index in enumerate(drafted.tolist()):
            members.setdefault(classes[index], []).append(place)
        for name, places in members.items():
            self._class(name).add(is_tried[places].sum(axis=0), is_accepted[places].sum(axis=0))

    def keep_only(self, request_ids: Seq[str]) -> None:
        """Forget all other requests; their classes keep the counts."""
        if len(self._rows) > len(request_ids):
            known = set(request_ids)
            for each in [each for each in self._rows if each not in known]:
                self._free_rows.append(self._rows.pop(each))

    def knows(self, request_id: str) -> bool:
        """True if a request has had drafts."""
        return request_id in self._rows

    def of(self, request_ids: Seq[str], classes: Seq[str]) -> Floats:
        """Return the chance that each draft is accepted: in a chain with all drafts before it. `[B, K]`, falling."""
        priors = {name: self._class(name).rates() for name in set(classes)}
        prior = np.array([priors[name] for name in classes])  # [B, K]
        rows = [self._rows.get(each, -1) for each in request_ids]
        if max(rows) < 0:
            return self._falling(prior)
        is_known = np.array(rows)[:, None] >= 0
        accepted, tried = self._accepted[rows] * is_known, self._tried[rows] * is_known
        rates: Floats = (accepted + _REQUEST_TRUST * prior) / (tried + _REQUEST_TRUST)
        return self._falling(rates)

    def _falling(self, rates: Floats) -> Floats:
        """Return falling chances; a node's is between the least before it and the most after it."""
        if not self._has_trees:
            return rates.cumprod(axis=1)
        after = np.maximum.accumulate(rates[:, ::-1], axis=1)[:, ::-1]
        return (np.minimum.accumulate(rates, axis=1) + after) / 2

    def _row(self, request_id: str) -> int:
        if request_id not in self._rows:
            if not self._free_rows:
                self._grow()
            self._rows[request_id] = row = self._free_rows.pop()
            self._tried[row] = self._accepted[row] = 0.0
        return self._rows[request_id]

    def _grow(self) -> None:
        size = len(self._tried)
        more = np.zeros((max(8, size), len(self._positions)))
        self._tried, self._accepted = np.concatenate((self._tried, more)), np.concatenate((self._accepted, more))
        self._free_rows += range(size, len(self._tried))

    def _class(self, name: str) -> _ClassCounts:
        if name not in self._classes:
            self._classes[name] = _ClassCounts(len(self._positions), _NEXT_NODE if self._has_trees else 1.0)
        return self._classes[name]


class _ClassCounts:
    """Decayed counts of a class's passes that tried each position, and that accepted it, `[K]`.

    A position without passes has `next_share` of the rate before it.
    """

    def __init__(self, num_positions: int, next_share: float) -> None:
        self._next_share = next_share
        self._tried = np.zeros(num_positions)
        self._accepted = np.zeros(num_positions)
        self._rates: list[float] | None = None

    def add(self, num_tried: Ints, num_accepted: Ints) -> None:
        """Add one step, which tried position i for `num_tried[i]` sequences of the class."""
        fade = (1.0 - 1.0 / _CLASS_WINDOW) ** num_tried
        self._tried = fade * self._tried + num_tried
        self._accepted = fade * self._accepted + num_accepted
        self._rates = None

    def rates(self) -> list[float]:
        """Return the rates by position; a position with few tries takes the rate of the previous position."""
        if self._rates is None:
            self._rates, rate = [], _INITIAL_RATE / self._next_share
            for accepted, tried in zip(self._accepted.tolist(), self._tried.tolist(), strict=True):
                rate = (accepted + _CLASS_TRUST * self._next_share * rate) / (tried + _CLASS_TRUST)
                self._rates.append(rate)
        return self._rates
