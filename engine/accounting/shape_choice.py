"""Chooses the rows of each draft that give the most expected tokens per second.

A sequence has no drafts, a chain of a length, or a tree of a number of nodes. Each class of requests has chains or
trees, by the speed that they promise in a batch of this size, and each sequence has its own number of rows.

Suffixes know the chance of each of their drafts. Instead of a planned length they get a price, the least chance that is
worth a row (`engine.accounting.length_allocation`), and end where their chance falls below it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from engine.accounting.acceptance import AcceptanceTable, Floats, Ints
from engine.accounting.cost_model import CostModel, RowSeconds
from engine.accounting.draft_cost import REQUEST_STEPS
from engine.accounting.draft_shapes import Bools, Names, ShapeLimits, ShapeRates
from engine.accounting.length_allocation import Allocation, RowPrice, allocate
from engine.accounting.record import SequencePass
from engine.accounting.speculation_gate import SpeculationGates, class_of, drafter_of, method_of
from engine.sequence.sequence import Sequence
from protos.messages import SpeculationMethod

_CHOICE = 8  # steps between two choices of classes with trees
_CLASS_GAIN = 1.02  # of a change of these classes; what clients do not notice is not worth one
_LONGEST = 6.0  # plain passes: the longest pass with drafts of a single sequence
_LONGEST_SHARED = 4.0  # the same for several sequences, which wait for each other's drafts
LONGEST_PER_TOKEN = 2.5  # plain passes per token that each of several sequences is expected to get

Rates = Callable[[AcceptanceTable], Floats]  # of the sequences of a plan, `[B, K]`


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
    names: Names
    limits: ShapeLimits
    priced: Ints
    row_seconds: RowSeconds
    ages: Seq[int]

    @classmethod
    def of(cls, sequences: Seq[Sequence], limits: ShapeLimits, row_seconds: RowSeconds, ages: Seq[int]) -> PlannedBatch:
        """Divide the limits of `sequences` between planned and priced drafts."""
        is_priced = np.array([_is_priced(each) for each in sequences])
        planned = replace(limits, chains=np.where(is_priced, 0, limits.chains))
        names = np.array([class_of(each) for each in sequences])
        return cls(sequences, names, planned, np.where(is_priced, limits.chains, 0), row_seconds, ages)

    def drafters(self, is_tree: Bools) -> list[str]:
        """Return the name for the cost of each sequence's drafts."""
        return [drafter_of(each, is_tree=flag) for each, flag in zip(self.sequences, is_tree.tolist(), strict=True)]


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
        least_chance: the price of a row in the last plan: a draft with a lower known chance is not worth it.
    """

    def __init__(
        self, max_length: int, max_nodes: int, max_pass_s: float, costs: CostModel, gates: SpeculationGates
    ) -> None:
        self.least_chance = 0.0
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
        priced = [each for each in passes if _is_priced(each.sequence)]
        num_accepted = sum(each.num_accepted for each in priced)
        self._price.observe(len(priced), sum(each.num_proposed for each in priced), num_accepted)

    def priced_rows(self, batch: PlannedBatch) -> Ints:
        """Set the price of a row, and return the most rows of sequences with priced drafts."""
        num_sequences, num_priced = len(batch.sequences), int(np.count_nonzero(batch.priced))
        row_seconds = batch.row_seconds.recent
        self.least_chance = self._price.of(num_sequences, num_priced, row_seconds)
        if self.least_chance >= 1.0 or num_priced == 0:
            return np.zeros_like(batch.priced)
        longest_s = self._limited((_LONGEST if num_sequences == 1 else LONGEST_PER_TOKEN) * float(row_seconds[0]))
        num_rows = int(np.searchsorted(row_seconds, longest_s, side="right")) - 1
        most = num_rows if num_rows == len(row_seconds) - 1 else max(0, num_rows // num_priced)
        return np.where(self._are_open(batch.names), np.minimum(batch.priced, most), 0)

    def rows(self, step: int, batch: PlannedBatch, least_gain: float) -> tuple[Ints, Bools]:
        """Return the rows of each draft, and which are trees; no rows if they gain less than `least_gain`."""
        no_rows, limits = np.zeros_like(batch.limits.chains), batch.limits
        if not limits.chains.any():
            return no_rows, limits.no_trees
        names = batch.names
        branching = sorted(set(names[limits.trees > 0].tolist()))
        if branching and step >= self._next_choice:
            self._next_choice = step + _CHOICE
            self._choose_classes(batch, branching)
        is_tree = limits.are_trees(names, self._tree_classes)
        request_ids = [each.request_id for each in batch.sequences]
        best = self._best(batch, is_tree, lambda table: table.of(request_ids, names.tolist(), batch.ages))
        return (no_rows if best.tokens_per_s <= least_gain * best.plain_tokens_per_s else best.lengths), is_tree

    def _choose_classes(self, batch: PlannedBatch, branching: list[str]) -> None:
        """Choose the classes that have trees, by the rates of whole classes: the luck of a request is no reason.

        Luck in the first passes of a shape is no reason either: a class is in doubt while its other shape, at best, is
        faster.
        """
        names = batch.names

        def tokens_per_s(classes: set[str], *, is_best: bool = False) -> float:
            num_errors = 1.0 if is_best else 0.0
            is_tree = batch.limits.are_trees(names, classes)
            return self._best(batch, is_tree, lambda table: table.of_classes(names.tolist(), num_errors)).tokens_per_s

        present = self._tree_classes
        speed = tokens_per_s(present)
        absent = present - set(branching)
        options = [absent | set(branching), absent, *(present ^ {name} for name in branching)]
        speeds = [tokens_per_s(each) for each in options]
        if max(speeds) > _CLASS_GAIN * speed:
            self._tree_classes = options[int(np.argmax(speeds))]
            speed = max(speeds)
        others = {name: tokens_per_s(self._tree_classes ^ {name}, is_best=True) for name in branching}
        self.doubtful = {name for name, best in others.items() if best > _CLASS_GAIN * speed}

    def _best(self, batch: PlannedBatch, is_tree: Bools, rates: Rates) -> Allocation:
        """Return the best allocation over the cheapest drafter, the two cheapest, and so on: one may be too slow."""
        chances = self._chances(rates(self._rates.chains), batch.names, batch.limits.chains)
        num_steps = np.arange(1.0, chances.shape[1] + 1.0)
        if is_tree.any():
            chances[is_tree] = self._chances(rates(self._rates.trees), batch.names, batch.limits.trees)[is_tree]
            num_steps = self._rates.tree_steps if is_tree.all() else np.maximum(num_steps, self._rates.tree_steps)
        is_single, plain_s, drafts = len(batch.sequences) == 1, float(batch.row_seconds.alone[0]), self._costs.drafts
        longest_s = self._limited((_LONGEST if is_single else _LONGEST_SHARED) * plain_s)
        token_s = longest_s if is_single else self._limited(LONGEST_PER_TOKEN * plain_s)
        drafters = batch.drafters(is_tree)
        by_price = sorted(set(drafters), key=lambda each: (*drafts.prices([each]), each))
        allocations = []
        for number in range(1, len(by_price) + 1):
            own = chances * np.isin(drafters, by_price[:number])[:, None]
            prices = drafts.prices([each for each in drafters if each in by_price[:number]])
            found = allocate(own, batch.row_seconds, *prices, longest_s, num_steps + REQUEST_STEPS)
            if found.seconds > token_s * found.least_tokens:
                found = allocate(own, batch.row_seconds, *prices, token_s, num_steps + REQUEST_STEPS)
            allocations.append(found)
        return max(allocations, key=lambda each: each.tokens_per_s)

    def _chances(self, known: Floats, names: Names, limits: Ints) -> Floats:
        """Return the chance of each row of a shape, `[B, W]`; 0 above the limits, and for classes that are off."""
        chances = np.zeros((len(names), max(self._max_length, self._max_nodes)))
        chances[:, : known.shape[1]] = known
        allowed = np.where(self._are_open(names), limits, 0)
        chances[np.arange(chances.shape[1]) >= allowed[:, None]] = 0.0
        return chances

    def _are_open(self, names: Names) -> list[bool]:
        return [self._gates.is_open(name) for name in names.tolist()]

    def _limited(self, seconds: float) -> float:
        """Return a limit for the expected seconds of a pass: at most `max_pass_s`, less the noise."""
        return min(self._max_pass_s / (1.0 + self._costs.noise), seconds)


def _is_priced(sequence: Sequence) -> bool:
    """True if the drafts of a sequence know their chances."""
    return method_of(sequence) == SpeculationMethod.SUFFIX
