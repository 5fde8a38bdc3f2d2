"""Chooses the rows of each draft that give the most expected tokens per second.

A sequence has no drafts, a chain of a length, or a tree of a number of nodes. Each class of requests has chains or
trees, by the speed that they promise in a batch of this size, and each sequence has its own number of rows.

Suffixes know the chance of each of their drafts. Instead of a planned length they get the prices of rows
(`engine.accounting.length_allocation`), and have the length that is worth most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.accounting.acceptance import AcceptanceTable
from engine.accounting.cost_model import CostModel, RowSeconds
from engine.accounting.draft_shapes import ShapeLimits, ShapeRates
from engine.accounting.length_allocation import Allocation, RowPrice, allocate
from engine.accounting.record import SequencePass, drafter_of
from engine.accounting.speculation_gate import SpeculationGates
from engine.sequence.sequence import Sequence
from protos.messages import SpeculationMethod

_CHOICE = 8  # steps between two choices of classes with trees
_CLASS_GAIN = 1.02  # of a change of these classes; what clients do not notice is not worth one
_LONGEST = 6.0  # plain passes: the longest pass with drafts of a single sequence
_LONGEST_SHARED = 4.0  # the same for several sequences, which wait for each other's drafts
LONGEST_PER_TOKEN = 2.5  # plain passes per token that each of several sequences is expected to get

_PRICED = SpeculationMethod.SUFFIX  # the drafter whose drafts know their chances

Rates = Callable[[AcceptanceTable], list[list[float]]]  # of the sequences of a plan, `[B][K]`


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The sequences of one plan.

    Attributes:
        names: the class of each.
        limits: of drafts whose length is planned.
        priced: the longest drafts that know their chances, `[B]`: they get a price instead of a length.
        row_seconds: the seconds of a pass with 0 to M drafts.
        ages: the steps since each sequence had drafts.
    """

    sequences: Seq[Sequence]
    names: list[str]
    limits: ShapeLimits
    priced: list[int]
    row_seconds: RowSeconds
    ages: Seq[int]

    @classmethod
    def of(cls, sequences: Seq[Sequence], limits: ShapeLimits, row_seconds: RowSeconds, ages: Seq[int]) -> PlannedBatch:
        """Divide the limits of `sequences` between planned and priced drafts."""
        is_priced = [each.drafter == _PRICED for each in sequences]
        priced = [chain if flag else 0 for chain, flag in zip(limits.chains, is_priced, strict=True)]
        if any(is_priced):
            chains = [0 if flag else chain for chain, flag in zip(limits.chains, is_priced, strict=True)]
            limits = replace(limits, chains=chains)
        return cls(sequences, [each.draft_class for each in sequences], limits, priced, row_seconds, ages)

    def drafters(self, is_tree: Seq[bool]) -> list[str]:
        """Return the name for the cost of each sequence's drafts."""
        return [drafter_of(each, is_tree=flag) for each, flag in zip(self.sequences, is_tree, strict=True)]


class ShapeChoice:
    """The acceptance of shapes, and the choice among them by the costs of passes.

    Args:
        max_length: The longest draft.
        max_nodes: The largest tree; 0 if all drafts are chains.
        max_pass_s: The longest pass that drafts may cause.
        costs: The seconds of passes and drafts.
        gates: The classes that have drafts now.

    Attributes:
        doubtful: the classes whose other shape may be better, since few of its passes are known.
        row_prices: the tokens that each row of a sequence costs in the last plan, for drafts that know their chances.
        has_priced: some of its drafts know their chances.
    """

    def __init__(
        self, max_length: int, max_nodes: int, max_pass_s: float, costs: CostModel, gates: SpeculationGates
    ) -> None:
        self.row_prices: Seq[float] = ()
        self.has_priced = False
        self._max_length, self._max_nodes, self._max_pass_s = max_length, max_nodes, max_pass_s
        self._costs, self._gates = costs, gates
        self._price = RowPrice()
        self._next_choice = 0  # step
        self.forget_draft()

    def forget_draft(self) -> None:
        """Forget the acceptance of drafts and the choices by it, since another model drafts now."""
        self.doubtful: set[str] = set()
        self._rates = ShapeRates(self._max_length, self._max_nodes)
        self._tree_classes: set[str] = set()

    def knows(self, request_id: str) -> bool:
        """True if a request has had drafts."""
        return self._rates.knows(request_id)

    def keep_only(self, request_ids: Seq[str]) -> None:
        """Forget all other requests."""
        self._rates.keep_only(request_ids)

    def learn(self, passes: Seq[SequencePass]) -> None:
        """Learn from the drafts of one pass."""
        self._rates.learn(passes)
        priced = [each for each in passes if each.sequence.drafter == _PRICED]
        if priced:
            num_drafts = sum([each.num_proposed for each in priced])
            self._price.observe(len(priced), num_drafts, sum([each.num_accepted for each in priced]))

    def priced_rows(self, batch: PlannedBatch) -> list[int]:
        """Set the prices of rows, and return the most rows of sequences with priced drafts."""
        num_sequences, num_priced = len(batch.sequences), sum([length > 0 for length in batch.priced])
        self.has_priced = num_priced > 0
        row_seconds = batch.row_seconds.recent.tolist()
        self.row_prices = self._price.each(num_sequences, num_priced, row_seconds)
        if num_priced == 0 or min(self.row_prices) >= 1.0:
            return [0] * num_sequences
        longest_s = self._limited((_LONGEST if num_sequences == 1 else LONGEST_PER_TOKEN) * row_seconds[0])
        num_rows = bisect_right(row_seconds, longest_s) - 1
        most = num_rows if num_rows == len(row_seconds) - 1 else max(0, num_rows // num_priced)
        return self._opened(batch.names, [min(length, most) for length in batch.priced])

    def rows(
        self, step: int, batch: PlannedBatch, least_gain: float, num_errors: float
    ) -> tuple[list[int], list[bool]]:
        """Return the rows of each draft, and which are trees; no rows if they gain less than `least_gain`.

        Chains of classes with few passes count as better by a number of standard errors.
        """
        limits, names = batch.limits, batch.names
        if not any(limits.chains):
            return [0] * len(names), [False] * len(names)
        branching = sorted({name for name, size in zip(names, limits.trees, strict=True) if size > 0})
        if branching and step >= self._next_choice:
            self._next_choice = step + _CHOICE
            self._choose_classes(batch, branching)
        is_tree = limits.are_trees(names, self._tree_classes)
        request_ids = [each.request_id for each in batch.sequences]
        hopes = {self._rates.chains: num_errors, self._rates.trees: 0.0}
        best = self._best(batch, is_tree, lambda table: table.of(request_ids, names, batch.ages, hopes[table]))
        has_gain = best.tokens_per_s > least_gain * best.plain_tokens_per_s
        return (best.lengths if has_gain else [0] * len(names)), is_tree

    def _choose_classes(self, batch: PlannedBatch, branching: list[str]) -> None:
        """Choose the classes that have trees, by the rates of whole classes: the luck of a request is no reason.

        Luck in the first passes of a shape is no reason either: a class is in doubt while its other shape, at best, is
        faster.
        """
        names = batch.names

        def tokens_per_s(classes: set[str], *, is_best: bool = False) -> float:
            num_errors = 1.0 if is_best else 0.0
            is_tree = batch.limits.are_trees(names, classes)
            return self._best(batch, is_tree, lambda table: table.of_classes(names, num_errors)).tokens_per_s

        present = self._tree_classes
        speed = tokens_per_s(present)
        absent = present - set(branching)
        options = [absent | set(branching), absent, *(present ^ {name} for name in branching)]
        speeds = [tokens_per_s(each) for each in options]
        if max(speeds) > _CLASS_GAIN * speed:
            self._tree_classes = options[speeds.index(max(speeds))]
            speed = max(speeds)
        others = {name: tokens_per_s(self._tree_classes ^ {name}, is_best=True) for name in branching}
        self.doubtful = {name for name, best in others.items() if best > _CLASS_GAIN * speed}

    def _best(self, batch: PlannedBatch, is_tree: Seq[bool], rates: Rates) -> Allocation:
        """Return the best allocation over the cheapest drafter, the two cheapest, and so on: one may be too slow."""
        is_single, plain_s, drafts = len(batch.sequences) == 1, float(batch.row_seconds.alone[0]), self._costs.drafts
        chances = self._chances(rates(self._rates.chains), batch.names, batch.limits.chains)
        num_steps = [float(each) for each in range(1, len(chances[0]) + 1)]
        if any(is_tree):
            nodes = self._chances(rates(self._rates.trees), batch.names, batch.limits.trees)
            chances = [tree if flag else chain for tree, chain, flag in zip(nodes, chances, is_tree, strict=True)]
            of_trees = self._rates.tree_steps
            num_steps = of_trees if all(is_tree) else [*map(max, num_steps, of_trees)]
        longest_s = self._limited((_LONGEST if is_single else _LONGEST_SHARED) * plain_s)
        token_s = longest_s if is_single else self._limited(LONGEST_PER_TOKEN * plain_s)
        drafters = batch.drafters(is_tree)
        by_price = sorted(set(drafters), key=lambda each: (*drafts.prices([each]), each))
        allocations = []
        for number in range(1, len(by_price) + 1):
            used = by_price[:number]
            own = [row if each in used else [0.0] * len(row) for row, each in zip(chances, drafters, strict=True)]
            prices = drafts.prices([each for each in drafters if each in used])
            found = allocate(own, batch.row_seconds, prices, longest_s, num_steps)
            if found.seconds > token_s * found.least_tokens:
                found = allocate(own, batch.row_seconds, prices, token_s, num_steps)
            allocations.append(found)
        return max(allocations, key=lambda each: each.tokens_per_s)

    def _chances(self, known: Seq[list[float]], names: Seq[str], limits: Seq[int]) -> list[list[float]]:
        """Return the chance of each row of a shape, `[B][W]`; 0 above the limits, and for classes that are off."""
        width = max(self._max_length, self._max_nodes)
        allowed = self._opened(names, limits)
        return [row[:limit] + [0.0] * (width - min(limit, len(row))) for row, limit in zip(known, allowed, strict=True)]

    def _opened(self, names: Seq[str], limits: Seq[int]) -> list[int]:
        """Return the limits, and 0 for classes that are off."""
        is_open = {name: self._gates.is_open(name) for name in set(names)}
        return [limit if is_open[name] else 0 for name, limit in zip(names, limits, strict=True)]

    def _limited(self, seconds: float) -> float:
        """Return a limit for the expected seconds of a pass: at most `max_pass_s`, less the noise."""
        return min(self._max_pass_s / (1.0 + self._costs.noise), seconds)
