"""Acceptance by position: the chance that draft i of a sequence is accepted, from its own and its class's passes.

The position of a tree's node is its place among the nodes, likeliest first.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq
from itertools import accumulate
from math import sqrt
from operator import mul

# The acceptance of a tree's first, second, ... child. The first is measured with the demo pair at T=1; the rest is
# assumed.
RANK_ACCEPTANCE = (0.60, 0.14, 0.06, 0.035, 0.02, 0.015)

_INITIAL_RATE = 0.7  # acceptance of a class without passes
_CLASS_WINDOW = 100.0  # passes of a class that count
_REQUEST_WINDOW = 20.0  # passes of a request that count
_CLASS_TRUST = 4.0  # weight, in passes, of the position before (or the initial rate) in a class's rate
_KNOWN = (_CLASS_WINDOW + _CLASS_TRUST) ** -0.5  # the standard error of a class with as many passes as count
_CHAIN_TRUST = 8.0  # the same of the position before in a chain: bad luck in the few tries of a far one would last
_REQUEST_TRUST = 8.0  # weight, in passes, of the class in a request's rate
_HALF_LIFE = 16.0  # steps without drafts that halve the weight of a request's own passes
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
        self._num_positions = num_positions
        self._requests: dict[str, _Counts] = {}
        self._classes: dict[str, _ClassCounts] = {}

    def observe(self, request_ids: Seq[str], classes: Seq[str], num_proposed: Seq[int], num_accepted: Seq[int]) -> None:
        """Record one pass: each sequence's id, class, number of drafts and number of accepted drafts, `[B]` each."""
        # The accepted positions were tried, and the first rejected one.
        num_tried = [min(proposed, accepted + 1) for proposed, accepted in zip(num_proposed, num_accepted, strict=True)]
        self._count(request_ids, classes, num_tried, [range(number) for number in num_accepted])

    def observe_trees(
        self, request_ids: Seq[str], classes: Seq[str], num_nodes: Seq[int], paths: Seq[Seq[int]]
    ) -> None:
        """Record one pass: each sequence's id, class, number of nodes and accepted nodes; every node was tried."""
        self._count(request_ids, classes, num_nodes, paths)

    def _count(
        self, request_ids: Seq[str], classes: Seq[str], num_tried: Seq[int], accepted: Seq[Container[int]]
    ) -> None:
        """Add one pass: each sequence's number of tried positions, and the accepted ones."""
        fade = 1.0 - 1.0 / _REQUEST_WINDOW
        tries: dict[str, tuple[list[int], list[int]]] = {}  # class -> tried and accepted sequences by position
        for request_id, name, number, positions in zip(request_ids, classes, num_tried, accepted, strict=True):
            number = min(number, self._num_positions)  # a chain may come where a smaller tree was requested
            if number == 0:
                continue
            if request_id not in self._requests:
                self._requests[request_id] = _Counts(self._num_positions)
            counts = self._requests[request_id]
            if name not in tries:
                tries[name] = [0] * self._num_positions, [0] * self._num_positions
            class_tried, class_accepted = tries[name]
            own_tried, own_accepted = counts.tried, counts.accepted
            for position in range(number):
                is_accepted = position in positions
                own_tried[position] = fade * own_tried[position] + 1.0
                own_accepted[position] = fade * own_accepted[position] + is_accepted
                class_tried[position] += 1
                class_accepted[position] += is_accepted
        for name, (class_tried, class_accepted) in tries.items():
            self._class(name).add_pass(class_tried, class_accepted)

    def keep_only(self, request_ids: Seq[str]) -> None:
        """Forget all other requests; their classes keep the counts."""
        if len(self._requests) > len(request_ids):
            known = set(request_ids)
            self._requests = {each: counts for each, counts in self._requests.items() if each in known}

    def knows(self, request_id: str) -> bool:
        """True if a request has had drafts."""
        return request_id in self._requests

    def of_classes(self, classes: Seq[str], num_errors: float = 0.0) -> list[list[float]]:
        """Return the chances of new requests, `[B][K]`, by rates that are higher by a number of standard errors."""
        chances = {name: self._falling(self._class(name).rates_above(num_errors)) for name in set(classes)}
        return [chances[name] for name in classes]

    def of(
        self, request_ids: Seq[str], classes: Seq[str], ages: Seq[int], num_errors: float = 0.0
    ) -> list[list[float]]:
        """Return the chance that each draft is accepted: in a chain with all drafts before it. `[B][K]`, falling.

        Classes of few passes have rates that are higher by a number of standard errors. `ages` are the steps since each
        request had drafts. Its own passes fade with them, since texts change: a request that had bad luck is tried
        again.
        """
        priors = {name: self._class(name).rates_above(num_errors, _KNOWN) for name in set(classes)}
        chances = []
        for request_id, name, age in zip(request_ids, classes, ages, strict=True):
            prior, counts = priors[name], self._requests.get(request_id)
            rates = prior if counts is None else counts.rates(prior, 0.5 ** (age / _HALF_LIFE))
            chances.append(self._falling(rates))
        return chances

    def _falling(self, rates: list[float]) -> list[float]:
        """Return chances that fall along K: a node's is the mean of the least up to it and the greatest from it on."""
        if not self._has_trees:
            return [*accumulate(rates, mul)]
        after = [*accumulate(reversed(rates), max)][::-1]
        return [(least + greatest) / 2 for least, greatest in zip(accumulate(rates, min), after, strict=True)]

    def _class(self, name: str) -> _ClassCounts:
        if name not in self._classes:
            after = (_NEXT_NODE, _CLASS_TRUST) if self._has_trees else (1.0, _CHAIN_TRUST)
            self._classes[name] = _ClassCounts(self._num_positions, *after)
        return self._classes[name]


class _Counts:
    """Decayed counts of the passes that tried each position, and that accepted it, `[K]`."""

    def __init__(self, num_positions: int) -> None:
        self.tried = [0.0] * num_positions
        self.accepted = [0.0] * num_positions

    def rates(self, prior: list[float], weight: float) -> list[float]:
        """Return the rates of a request, by the rates of its class and its own passes, which have `weight`."""
        return [
            (weight * accepted + _REQUEST_TRUST * rate) / (weight * tried + _REQUEST_TRUST)
            for accepted, tried, rate in zip(self.accepted, self.tried, prior, strict=True)
        ]


class _ClassCounts(_Counts):
    """The counts of a class. A position without passes has `next_share` of the rate before it, which has a weight."""

    def __init__(self, num_positions: int, next_share: float, next_trust: float) -> None:
        super().__init__(num_positions)
        self._next_share, self._next_trust = next_share, next_trust
        self._cached: list[float] | None = None

    def add_pass(self, num_tried: Seq[int], num_accepted: Seq[int]) -> None:
        """Add one pass, which tried position i for `num_tried[i]` sequences of the class."""
        for position, (tried, accepted) in enumerate(zip(num_tried, num_accepted, strict=True)):
            if tried:
                fade = (1.0 - 1.0 / _CLASS_WINDOW) ** tried
                self.tried[position] = fade * self.tried[position] + tried
                self.accepted[position] = fade * self.accepted[position] + accepted
        self._cached = None

    def class_rates(self) -> list[float]:
        """Return the rates by position; a position with few tries takes the rate of the previous position."""
        if self._cached is None:
            self._cached, prior, trust = [], _INITIAL_RATE, _CLASS_TRUST
            for accepted, tried in zip(self.accepted, self.tried, strict=True):
                rate = (accepted + trust * prior) / (tried + trust)
                self._cached.append(rate)
                prior, trust = self._next_share * rate, self._next_trust
        return self._cached

    def rates_above(self, num_errors: float, least: float = 0.0) -> list[float]:
        """Return the rates by position, each higher by a number of standard errors.

        An error is one over the root of the passes; `least` is taken from it.
        """
        return [
            min(1.0, rate + num_errors * sqrt(rate * (1.0 - rate)) * max(0.0, (tried + _CLASS_TRUST) ** -0.5 - least))
            for rate, tried in zip(self.class_rates(), self.tried, strict=True)
        ]
