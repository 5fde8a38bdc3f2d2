"""Chooses the shape of each sequence's draft in the next pass, so that the pass makes the most tokens per second.

A sequence has no drafts, a chain of a length, or a tree of a number of nodes. Each class of requests has chains or
trees, by the speed that they promise in a batch of this size, and each sequence has its own number of rows.

After every pass the policy learns from the accepted drafts and the time of the pass. It chooses each next shape before
any token is drawn, so a shape depends only on committed tokens, counts and clocks. Otherwise `rejection` and `block`
verification would be biased (the look-ahead counter-example of DSpark, arXiv:2607.05147: p = (.7, .3) comes out as
(.85, .15)); `coupled` verification cannot be biased. In the first two modes the text of a seed depends on the lengths,
which depend on clocks: sequences with a client's seed keep their first length.

Suffixes know the chance of each of their drafts. Instead of a planned length they get a price, the least chance that is
worth a row (`engine.accounting.length_allocation`), and end where their chance falls below it.

While sequences draft, one pass now and then has no drafts, which measures the baseline. `DraftProbes` changes other
plans for one pass, to measure the drafts that they would not have.

A simpler rule, the best measured K of {0, 2, 4, 8} per class and batch size, is up to a quarter slower
(bench/EXPERIMENTS.md).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import ceil

import numpy as np

from engine.accounting.acceptance import AcceptanceTable, Floats, Ints
from engine.accounting.ahead_choice import AheadChoice
from engine.accounting.cost_model import DENSE, CostModel, ExpertReads
from engine.accounting.draft_cost import RequestedDrafts
from engine.accounting.draft_probes import DraftProbes
from engine.accounting.draft_shapes import Bools, DraftSize, Names, ShapeLimits, ShapeRates
from engine.accounting.length_allocation import Allocation, RowPrice, allocate
from engine.accounting.record import PassRecord, SequencePass
from engine.accounting.speculation_gate import SpeculationGates, class_of, drafter_of, method_of
from engine.sequence.sequence import Sequence
from protos.messages import SpeculationMethod

# Fewer plain passes and more plans moved simulated goodput by 3% at most (bench/EXPERIMENTS.md).
_PLAIN_PERIOD = 64  # steps between plain passes that measure the baseline
_FEW_MISSED = 2  # passes without a draft; after more, the next draft has much to prefill
_CHOICE = 8  # steps between two choices of shapes
_REST = 8  # steps between two plans while no sequence drafts
_HOLD = 4  # most steps between two plans while sequences draft
_LONG_S = 0.016  # of a plain pass: a plan costs little then, so there is one for each pass
_REST_S = 0.080  # between two plans while no sequence drafts
# What clients notice: a small gain is not worth longer and uneven passes.
_WAKE_GAIN = 1.05  # drafts start above this expected gain: the first ones also pay for missed tokens
_LEAST_GAIN = 1.02  # drafts end below this expected gain
_LONGEST = 6.0  # plain passes: the longest pass with drafts of a single sequence
_LONGEST_SHARED = 4.0  # the same for several sequences, which wait for each other's drafts
LONGEST_PER_TOKEN = 2.5  # plain passes per token that each of several sequences is expected to get

Rates = Callable[[AcceptanceTable], Floats]  # of the sequences of a plan, `[B, K]`


class LengthPolicy:
    """Plans a shape for each sequence: none, a chain or a tree, up to its limits. Used by the engine's thread alone.

    Args:
        first_length: The length before any pass is measured, and the limit until the cost of drafts is known.
        max_length: The longest draft.
        max_pass_s: The longest pass that drafts may cause; a pass that is longer without drafts gets none.
        experts: What rows read of the target's experts.
        max_nodes: The largest tree; 0 if all drafts are chains.
        ahead: Chooses whether drafts are made ahead of verdicts; None if they never are.

    Attributes:
        least_chance: the price of a row in the last plan: a draft with a lower known chance is not worth it.
    """

    def __init__(
        self,
        first_length: int,
        max_length: int,
        max_pass_s: float = np.inf,
        experts: ExpertReads = DENSE,
        max_nodes: int = 0,
        ahead: AheadChoice | None = None,
    ) -> None:
        self.least_chance = 0.0
        self._ahead = ahead
        self._first_length = first_length
        self._max_length = max_length
        self._max_pass_s = max_pass_s
        self._max_nodes = max_nodes
        self._rates = ShapeRates(max_length, max_nodes)
        self._costs = CostModel(experts)
        self._price = RowPrice()
        self._gates = SpeculationGates(self._costs)
        self._step = 0
        self._last_plain = -_PLAIN_PERIOD  # step of the last pass without drafts
        self._next_plan = 0  # step
        self._planned_bits = 0  # bit length of the batch size of the last plan
        self._held: dict[str, DraftSize] = {}  # request id -> size in the last plan
        self._is_short = False  # plain passes are shorter than `_LONG_S`
        self._last_drafted: dict[str, int] = {}  # request id -> step of its last draft, or of its first pass
        self._tree_classes: set[str] = set()
        self._next_choice = 0  # step
        self._probes = DraftProbes()
        self._is_speculating = False
        self._num_skipped = 0  # plain passes since the last one that was learned from

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second relative to plain decoding, by class of requests."""
        return self._gates.speedups

    @property
    def is_ahead(self) -> bool:
        """True if drafts for the pass after the next one are made while that one is verified."""
        return self._ahead is not None and self._ahead.is_ahead

    def goodput(self, method: str, kind: str) -> float | None:
        """Return the speedup of a method's greedy or sampled requests; None until it is measured."""
        return self._gates.goodput(f"{method}-{kind}")

    def is_open(self, sequence: Sequence) -> bool:
        """False while drafts are off for the sequence's class, in batches of the last pass's size."""
        return self._gates.is_open(class_of(sequence))

    def forget_draft(self) -> None:
        """Forget all measurements of the draft model, since another has replaced it; keep the target's costs."""
        self._rates, self._tree_classes = ShapeRates(self._max_length, self._max_nodes), set()
        self._probes.forget_draft()
        self._costs.forget_drafts()
        self._gates = SpeculationGates(self._costs)
        self._ahead = None if self._ahead is None else AheadChoice()
        self._is_speculating = True
        self._next_plan, self._num_skipped = self._step, 0

    def charge(self, seconds: float) -> None:
        """Record the time of the policy's own work after a pass: drafts have to gain it too."""
        self._gates.planning_s.append(seconds)

    def on_pass(self, record: PassRecord) -> None:
        """Learn from a pass; call it once per pass, before `sizes`."""
        passes = [each for each in record.passes if each.outcome.is_exact]
        self._costs.expect_prompts(record.num_prompt_rows)
        if not passes:
            return
        self._step += 1
        # While no sequence drafts, a pass before each plan represents all passes since the last one.
        is_plain = not self._is_speculating and not any(each.num_requested for each in passes)
        if is_plain and self._step < self._next_plan and record.num_prompt_rows == 0:
            self._num_skipped += 1
            return
        if not is_plain:
            self._num_skipped = 0  # a pass with drafts does not represent them
        self._set_size(len(passes))
        drafted_ids = [each.sequence.request_id for each in passes if each.num_requested > 0]
        has_catch_up = not all(map(self._is_up_to_date, drafted_ids))
        self._rates.learn(passes)
        self._last_drafted.update(dict.fromkeys(drafted_ids, self._step))
        priced = [each for each in passes if _is_priced(each.sequence)]
        num_accepted = sum(each.num_accepted for each in priced)
        self._price.observe(len(priced), sum(each.num_proposed for each in priced), num_accepted)
        # A reasoning step makes a pass that other passes are not comparable with.
        if len(passes) == len(record.passes):
            self._learn_time(record, has_catch_up)

    def sizes(self, sequences: Seq[Sequence]) -> list[DraftSize]:
        """Return the size of each sequence's next draft; the next pass samples all of them."""
        request_ids = [sequence.request_id for sequence in sequences]
        is_due = self._step >= self._next_plan or len(sequences).bit_length() != self._planned_bits
        # While passes are short and none has drafts, new requests wait for the next plan.
        if not is_due and self._held.keys() >= set(request_ids):
            return [self._held[each] for each in request_ids]
        if not is_due and not self._is_speculating and self._is_short:
            for each in request_ids:
                self._last_drafted.setdefault(each, self._step)
            return [DraftSize(0, 0)] * len(sequences)
        self._rates.keep_only(request_ids)
        self._last_drafted = {each: self._last_drafted.get(each, self._step) for each in request_ids}
        if not sequences:
            return []
        self._set_size(len(sequences))
        self._next_plan, self._planned_bits = self._step + 1, len(sequences).bit_length()
        sizes = self._plan(sequences)
        self._held = dict(zip(request_ids, sizes, strict=True))
        return sizes

    def _set_size(self, num_sequences: int) -> None:
        self._costs.set_size(num_sequences)
        self._gates.batch_size = num_sequences

    def _plan(self, sequences: Seq[Sequence]) -> list[DraftSize]:
        limits = ShapeLimits.of(sequences, lambda each, is_tree: self._num_possible(each, is_tree=is_tree))
        num_rows = len(sequences) + sum(each.num_wanted_rows for each in sequences if each.has_fixed_length)
        # Before any pass is measured, use the first length.
        if not self._costs.is_known:
            self._is_speculating = True
            return limits.sizes(np.minimum(limits.chains, self._first_length), limits.no_trees)
        # Use no drafts if a plain pass is due, or if the costs are not known for more rows.
        room = self._costs.room(num_rows)
        if self._step - self._last_plain > _PLAIN_PERIOD or room <= 0:
            self._last_plain = self._step
            return limits.sizes(np.zeros_like(limits.chains), limits.no_trees)
        # Plan the shapes of most methods; set a price for drafts that know their chances.
        is_free = np.isinf(self._max_pass_s)  # under a time limit nothing is tried
        num_drafts = min(int(np.maximum(limits.chains, limits.trees).sum()), room)
        row_seconds = self._costs.row_seconds(num_rows, num_drafts, is_optimistic=is_free)
        is_priced = np.array([_is_priced(each) for each in sequences])
        planned = replace(limits, chains=np.where(is_priced, 0, limits.chains))
        lengths, is_tree = self._planned(sequences, planned, row_seconds)
        lengths += self._priced(sequences, np.where(is_priced, limits.chains, 0), row_seconds)
        # Change the plan for one pass now and then, to measure another.
        self._is_speculating = bool(lengths.any())
        changes = [
            is_free and self._probes.try_other_shape(self._step, sequences, planned, lengths, is_tree),
            self._probes.let_one_draft_alone(self._step, _drafters(sequences, is_tree & (lengths > 1)), lengths),
            self._probes.probe(self._step, self._last_drafted, lengths, planned.chains),
        ]
        sizes = limits.sizes(lengths, is_tree)
        self._is_short = row_seconds[0] < _LONG_S
        # Under a time limit the longest draft changes with each pass.
        is_settled = is_free and sizes == [*self._held.values()]
        if not any(changes) and (is_settled or not self._is_speculating):
            plain_s = row_seconds[0]
            hold = min(_LONG_S / plain_s, _HOLD) if self._is_speculating else max(_REST_S / plain_s, _REST)
            self._next_plan = self._step + ceil(hold)
        return sizes

    def _planned(self, sequences: Seq[Sequence], limits: ShapeLimits, row_seconds: Floats) -> tuple[Ints, Bools]:
        """Return the rows, within `limits`, with the most expected tokens per second, and which drafts are trees."""
        no_rows = np.zeros_like(limits.chains)
        if not limits.chains.any():
            return no_rows, limits.no_trees
        names = np.array([class_of(sequence) for sequence in sequences])
        branching = sorted(set(names[limits.trees > 0].tolist()))
        if branching and self._step >= self._next_choice:
            self._next_choice = self._step + _CHOICE
            self._choose_shapes(sequences, names, branching, limits, row_seconds)
        is_tree = limits.are_trees(names, self._tree_classes)
        request_ids = [each.request_id for each in sequences]
        best = self._best_allocation(
            sequences, names, lambda table: table.of(request_ids, names.tolist()), limits, is_tree, row_seconds
        )
        needed = _LEAST_GAIN if self._is_speculating else _WAKE_GAIN
        if best.tokens_per_s <= needed * best.plain_tokens_per_s:
            return no_rows, is_tree
        return best.lengths, is_tree

    def _choose_shapes(
        self, sequences: Seq[Sequence], names: Names, branching: list[str], limits: ShapeLimits, row_seconds: Floats
    ) -> None:
        """Choose the classes that have trees, by the rates of whole classes: the luck of a request is no reason.

        Luck in the first passes of a shape is no reason either: a class is in doubt while its other shape, at best, is
        faster.
        """

        def tokens_per_s(classes: set[str], *, is_best: bool = False) -> float:
            is_tree = limits.are_trees(names, classes)
            num_errors = 1.0 if is_best else 0.0

            def rates(table: AcceptanceTable) -> Floats:
                return table.of_classes(names.tolist(), num_errors)

            return self._best_allocation(sequences, names, rates, limits, is_tree, row_seconds).tokens_per_s

        present = self._tree_classes
        speed = tokens_per_s(present)
        absent = present - set(branching)
        options = [absent | set(branching), absent, *(present ^ {name} for name in branching)]
        speeds = [tokens_per_s(each) for each in options]
        if max(speeds) > _LEAST_GAIN * speed:
            self._tree_classes = options[int(np.argmax(speeds))]
            speed = max(speeds)
        others = {name: tokens_per_s(self._tree_classes ^ {name}, is_best=True) for name in branching}
        self._probes.doubtful = {name for name, best in others.items() if best > _LEAST_GAIN * speed}

    def _chances(self, rates: Rates, names: Names, limits: Ints, *, is_tree: bool) -> Floats:
        """Return the chance of each row of a shape, `[B, W]`; 0 above the limits, and for classes that are off."""
        chances = np.zeros((len(names), max(self._max_length, self._max_nodes)))
        known = rates(self._rates.trees if is_tree else self._rates.chains)
        chances[:, : known.shape[1]] = known
        allowed = np.where([self._gates.is_open(name) for name in names.tolist()], limits, 0)
        chances[np.arange(chances.shape[1]) >= allowed[:, None]] = 0.0
        return chances

    def _priced(self, sequences: Seq[Sequence], num_possible: Ints, row_seconds: Floats) -> Ints:
        """Set the price of a row, and return the longest lengths of sequences with priced drafts."""
        num_priced = int(np.count_nonzero(num_possible))
        self.least_chance = self._price.of(len(sequences), num_priced, row_seconds)
        if self.least_chance >= 1.0 or num_priced == 0:
            return np.zeros_like(num_possible)
        longest_s = self._limited((_LONGEST if len(sequences) == 1 else LONGEST_PER_TOKEN) * float(row_seconds[0]))
        num_rows = int(np.searchsorted(row_seconds, longest_s, side="right")) - 1
        most = num_rows if num_rows == len(row_seconds) - 1 else max(0, num_rows // num_priced)
        is_open = [self.is_open(each) for each in sequences]
        return np.where(is_open, np.minimum(num_possible, most), 0)

    def _best_allocation(
        self,
        sequences: Seq[Sequence],
        names: Names,
        rates: Rates,
        limits: ShapeLimits,
        is_tree: Bools,
        row_seconds: Floats,
    ) -> Allocation:
        """Return the best allocation over the cheapest method, the two cheapest, and so on: one may be too slow."""
        chances = self._chances(rates, names, limits.chains, is_tree=False)
        num_steps = np.arange(1.0, chances.shape[1] + 1.0)
        if is_tree.any():
            chances[is_tree] = self._chances(rates, names, limits.trees, is_tree=True)[is_tree]
            num_steps = self._rates.tree_steps if is_tree.all() else np.maximum(num_steps, self._rates.tree_steps)
        is_single, plain_s, drafts = len(sequences) == 1, float(row_seconds[0]), self._costs.drafts
        longest_s = self._limited((_LONGEST if is_single else _LONGEST_SHARED) * plain_s)
        token_s = longest_s if is_single else self._limited(LONGEST_PER_TOKEN * plain_s)
        drafters = _drafters(sequences, is_tree)
        by_price = sorted(set(drafters), key=lambda each: (*drafts.prices([each]), each))
        allocations = []
        for number in range(1, len(by_price) + 1):
            is_in = np.isin(drafters, by_price[:number])
            prices = drafts.prices([each for each in drafters if each in by_price[:number]])
            own = chances * is_in[:, None]
            found = allocate(own, row_seconds, *prices, longest_s, num_steps)
            if found.seconds > token_s * found.least_tokens:
                found = allocate(own, row_seconds, *prices, token_s, num_steps)
            allocations.append(found)
        return max(allocations, key=lambda each: each.tokens_per_s)

    def _limited(self, seconds: float) -> float:
        """Return a limit for the expected seconds of a pass: at most `max_pass_s`, less the noise."""
        return min(self._max_pass_s / (1.0 + self._costs.noise), seconds)

    def _is_up_to_date(self, request_id: str) -> bool:
        """True if the draft has to prefill the tokens of a few passes at most, and no prompt."""
        num_missed = self._step - 1 - self._last_drafted.get(request_id, self._step)
        return self._rates.knows(request_id) and num_missed <= _FEW_MISSED

    def _learn_time(self, record: PassRecord, has_catch_up: bool) -> None:
        """Learn from the time of a pass; the wait for drafts is ignored if one had to prefill missed tokens."""
        requested, num_proposed = _requested(record.passes), sum(each.num_proposed for each in record.passes)
        num_rows = len(record.passes) + num_proposed
        if not self._costs.is_known:
            self._costs.observe(record.num_prompt_rows, num_rows, record.times.target_s)
            return
        if num_proposed == 0:
            self._last_plain = self._step
        if requested and not self._is_speculating:
            self._probes.charge(self._step, record.times.draft_s, record.times.target_s)
        if requested and not has_catch_up:
            # A probe that finds drafts much cheaper than expected goes on until that is known.
            if not self._is_speculating and record.times.draft_s < self._costs.drafts.seconds(requested) / 2.0:
                self._probes.repeat(next(each.sequence.request_id for each in record.passes if each.num_requested))
            self._costs.drafts.observe(requested, record.times.draft_s)
            if self._ahead is not None and record.num_prompt_rows == 0:
                num_tokens = sum(each.num_accepted + 1 for each in record.passes)
                self._ahead.observe(len(record.passes), num_tokens, record.times.draft_s + record.times.target_s)
        self._gates.observe(record, requested, 1 + self._num_skipped, is_speculating=self._is_speculating)
        self._num_skipped = 0
        self._costs.observe(record.num_prompt_rows, num_rows, record.times.target_s)

    def _num_possible(self, sequence: Sequence, *, is_tree: bool) -> int:
        """Return the longest chain of the next pass, or the largest tree."""
        if sequence.has_fixed_length or sequence.num_remaining_tokens <= 1:
            return 0
        is_known = self._costs.drafts.knows(drafter_of(sequence, is_tree=is_tree))
        limit = max(self._max_length, self._max_nodes) if is_known else self._first_length
        if is_tree:
            return min(limit, sequence.num_tree_nodes if sequence.num_draft_tokens > 0 else 0)
        return min(limit, sequence.num_draft_tokens, sequence.num_remaining_tokens - 1)


def _is_priced(sequence: Sequence) -> bool:
    """True if the drafts of a sequence know their chances."""
    return method_of(sequence) == SpeculationMethod.SUFFIX


def _drafters(sequences: Seq[Sequence], is_tree: Bools) -> list[str]:
    return [drafter_of(each, is_tree=flag) for each, flag in zip(sequences, is_tree.tolist(), strict=True)]


def _requested(passes: Seq[SequencePass]) -> dict[str, RequestedDrafts]:
    """Return the requested drafts of a pass, by drafter."""
    numbers: dict[str, list[tuple[int, int]]] = {}
    for each in passes:
        if each.num_requested > 0:
            is_tree = each.scheduled.max_tree_nodes > 0
            # A draft whose first token is impossible has depth 0, and took a step.
            num_steps = max(1, each.draft.depth) if is_tree and each.num_proposed else each.num_requested
            numbers.setdefault(drafter_of(each.sequence, is_tree=is_tree), []).append((num_steps, each.num_requested))
    return {
        drafter: RequestedDrafts(max(steps for steps, _ in sizes), sum(rows for _, rows in sizes))
        for drafter, sizes in numbers.items()
    }
