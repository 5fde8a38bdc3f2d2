"""Plans the shape of each sequence's draft in the next pass, so that the pass makes the most tokens per second.

After every pass the policy learns from the accepted drafts and the time of the pass, and `ShapeChoice` chooses the
rows. A plan holds for a few steps where passes are short. While sequences draft, one pass now and then has no drafts,
which measures the baseline. `DraftProbes` changes other plans for one pass, to measure the drafts that they would not
have.

Each shape is chosen before any token of it is drawn, so it depends only on committed tokens, counts and clocks.
Otherwise `rejection` and `block` verification would be biased (the look-ahead counter-example of DSpark,
arXiv:2607.05147: p = (.7, .3) comes out as (.85, .15)); `coupled` verification cannot be biased. In the first two modes
the text of a seed depends on the lengths, which depend on clocks: sequences with a client's seed keep their first
length.

A simpler rule, the best measured K of {0, 2, 4, 8} per class and batch size, is up to a quarter slower
(bench/EXPERIMENTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import ceil

import numpy as np

from engine.accounting.acceptance import Ints
from engine.accounting.cost_model import DENSE, CostModel, ExpertReads, size_class
from engine.accounting.draft_cost import RequestedDrafts
from engine.accounting.draft_probes import DraftProbes
from engine.accounting.draft_shapes import Bools, DraftSize, ShapeLimits
from engine.accounting.record import PassRecord, SequencePass
from engine.accounting.shape_choice import PlannedBatch, ShapeChoice
from engine.accounting.speculation_gate import SpeculationGates, class_of, drafter_of
from engine.sequence.sequence import Sequence

# Fewer plain passes and more plans moved simulated goodput by 3% at most (bench/EXPERIMENTS.md).
_PLAIN_PERIOD = 64  # steps between plain passes that measure the baseline
_FEW_MISSED = 2  # passes without a draft; after more, the next draft has much to prefill
_REST = 8  # fewest steps between two plans while no sequence drafts
_HOLD = 4  # most steps between two plans while sequences draft
_LONG_S = 0.016  # of a plain pass: a plan costs little then, so there is one for each pass
# What clients notice: a small gain is not worth longer and uneven passes.
_WAKE_GAIN = 1.05  # drafts start above this expected gain: the first ones also pay for missed tokens
_LEAST_GAIN = 1.02  # drafts end below this expected gain


class LengthPolicy:
    """Plans a shape for each sequence: none, a chain or a tree, up to its limits. Used by the engine's thread alone.

    Args:
        first_length: The length before any pass is measured, and the limit until the cost of drafts is known.
        max_length: The longest draft.
        max_pass_s: The longest pass that drafts may cause; a pass that is longer without drafts gets none.
        experts: What rows read of the target's experts.
        max_nodes: The largest tree; 0 if all drafts are chains.
    """

    def __init__(
        self,
        first_length: int,
        max_length: int,
        max_pass_s: float = np.inf,
        experts: ExpertReads = DENSE,
        max_nodes: int = 0,
    ) -> None:
        self._first_length, self._max_length, self._max_nodes = first_length, max_length, max_nodes
        self._is_free = np.isinf(max_pass_s)
        self._costs = CostModel(experts)
        self._gates = SpeculationGates(self._costs)
        self._shapes = ShapeChoice(max_length, max_nodes, max_pass_s, self._costs, self._gates)
        self._step = 0
        self._last_plain = -_PLAIN_PERIOD  # step of the last pass without drafts
        self._next_plan = 0  # step
        self._planned_class = 0  # class of batch sizes of the last plan
        self._held: dict[str, DraftSize] = {}  # request id -> size in the last plan
        self._held_name = ""  # class of its requests, if there is one
        self._can_join = False  # new requests of this class may draft as others until the next plan
        self._has_planned = False  # since the last pass
        self._plan_s = 0.0  # of a recent plan
        self._is_short = False  # plain passes are shorter than `_LONG_S`
        self._last_drafted: dict[str, int] = {}  # request id -> step of its last draft, or of its first pass
        self._probes = DraftProbes(first_length)
        self._is_speculating = False
        self._num_skipped = 0  # plain passes since the last one that was learned from

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second relative to plain decoding, by class of requests."""
        return self._gates.speedups

    @property
    def least_chance(self) -> float:
        """The price of a row in the last plan: a draft with a lower known chance is not worth it."""
        return self._shapes.least_chance

    def goodput(self, method: str, kind: str) -> float | None:
        """Return the speedup of a method's greedy or sampled requests; None until it is measured."""
        return self._gates.goodput(f"{method}-{kind}")

    def is_open(self, sequence: Sequence) -> bool:
        """False while drafts are off for the sequence's class, in batches of the last pass's size."""
        return self._gates.is_open(class_of(sequence))

    def forget_draft(self) -> None:
        """Forget all measurements of the draft model, since another has replaced it; keep the target's costs."""
        self._shapes.forget_draft()
        self._probes.forget_draft()
        self._costs.forget_drafts()
        self._gates.forget_drafts()
        self._is_speculating = True
        self._next_plan, self._num_skipped = self._step, 0

    def charge(self, seconds: float) -> None:
        """Record the time of the policy's own work after a pass: drafts have to gain it too."""
        self._gates.planning_s.append(seconds)
        if self._has_planned:
            self._plan_s += 0.1 * (seconds - self._plan_s)
        self._has_planned = False

    def on_pass(self, record: PassRecord) -> None:
        """Learn from a pass; call it once per pass, before `sizes`."""
        passes = [each for each in record.passes if each.outcome.is_exact]
        if not passes:
            return
        self._costs.count(record.num_prompt_rows, sum(each.num_accepted + 1 for each in passes))
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
        self._shapes.learn(passes)
        self._last_drafted.update(dict.fromkeys(drafted_ids, self._step))
        # A reasoning step makes a pass that other passes are not comparable with.
        if len(passes) == len(record.passes):
            self._learn_time(record, has_catch_up)

    def sizes(self, sequences: Seq[Sequence]) -> list[DraftSize]:
        """Return the size of each sequence's next draft; the next pass samples all of them."""
        request_ids = [sequence.request_id for sequence in sequences]
        is_due = self._step >= self._next_plan or size_class(len(sequences)) != self._planned_class
        if not is_due and self._held.keys() >= set(request_ids):
            return [self._held[each] for each in request_ids]
        if not is_due and self._join(sequences):
            return [self._held[each] for each in request_ids]
        self._shapes.keep_only(request_ids)
        self._last_drafted = {each: self._last_drafted.get(each, self._step) for each in request_ids}
        if not sequences:
            return []
        self._set_size(len(sequences))
        self._next_plan, self._planned_class = self._step + 1, size_class(len(sequences))
        self._has_planned = True
        sizes = self._plan(sequences)
        self._held = dict(zip(request_ids, sizes, strict=True))
        self._held_name, *others = {class_of(each) for each in sequences}
        self._can_join = self._is_short and self._is_speculating and not others
        return sizes

    def _join(self, sequences: Seq[Sequence]) -> bool:
        """Give new requests the usual size of the last plan; return False if they need a plan.

        While no sequence drafts they need one: that is often the luck of other requests.
        """
        if not self._can_join or any(class_of(each) != self._held_name or each.has_fixed_length for each in sequences):
            return False
        usual = sorted(self._held.values())[len(self._held) // 2]
        for each in sequences:
            if each.request_id not in self._held:
                self._last_drafted[each.request_id] = self._step
                self._held[each.request_id] = self._limited(usual, each)
        return True

    def _limited(self, size: DraftSize, sequence: Sequence) -> DraftSize:
        """Return a size within the limits of a sequence."""
        if size.num_nodes and sequence.num_tree_nodes:
            num_nodes = min(size.num_nodes, self._num_possible(sequence, is_tree=True))
            return DraftSize(min(size.num_tokens, num_nodes, sequence.num_draft_tokens), num_nodes)
        return DraftSize(min(size.num_tokens, self._num_possible(sequence, is_tree=False)), 0)

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
        num_drafts = min(int(np.maximum(limits.chains, limits.trees).sum()), room)
        if num_drafts == 0:  # the last token of each request, or requests without drafts
            self._is_speculating = self._is_speculating and any(each.num_draft_tokens > 0 for each in sequences)
            self._next_plan = self._step + _REST
            return limits.sizes(np.zeros_like(limits.chains), limits.no_trees)
        row_seconds = self._costs.row_seconds(num_rows, num_drafts, is_optimistic=self._is_free)
        ages = [self._step - self._last_drafted[each.request_id] for each in sequences]
        batch = PlannedBatch.of(sequences, limits, row_seconds, ages)
        lengths, is_tree = self._shapes.rows(self._step, batch, _LEAST_GAIN if self._is_speculating else _WAKE_GAIN)
        lengths = lengths + self._shapes.priced_rows(batch)
        self._is_speculating = bool(lengths.any())
        is_changed = self._probe(batch, lengths, is_tree)
        sizes = limits.sizes(lengths, is_tree)
        self._hold(sizes, self._costs.pass_s(len(sequences)), is_changed=is_changed)
        return sizes

    def _probe(self, batch: PlannedBatch, lengths: Ints, is_tree: Bools) -> bool:
        """Change the plan for one pass now and then, to measure another. Changes both arrays; returns True if it does.

        Under a time limit nothing is tried.
        """
        step, probes, doubtful = self._step, self._probes, self._shapes.doubtful
        changes = [
            self._is_free and probes.try_other_shape(step, batch, lengths, is_tree, doubtful),
            probes.let_one_draft_alone(step, batch.drafters(is_tree & (lengths > 1)), lengths),
            probes.probe(step, self._last_drafted, lengths, batch.limits.chains),
        ]
        return any(changes)

    def _hold(self, sizes: list[DraftSize], plain_s: float, *, is_changed: bool) -> None:
        """Let a plan hold for a few steps while passes are short, unless it is `is_changed` for one pass."""
        self._is_short = plain_s < _LONG_S
        # Under a time limit the longest draft changes with each pass.
        change = sum(each.num_tokens for each in sizes) - sum(each.num_tokens for each in self._held.values())
        is_settled = self._is_free and 2 * abs(change) <= len(sizes)
        if not is_changed and (is_settled or not self._is_speculating):
            rest = max(100 * self._plan_s / plain_s, _REST)  # plans take a hundredth of the time
            hold = min(_LONG_S / plain_s, _HOLD) if self._is_speculating else rest
            self._next_plan = self._step + ceil(hold)

    def _is_up_to_date(self, request_id: str) -> bool:
        """True if the draft has to prefill the tokens of a few passes at most, and no prompt."""
        num_missed = self._step - 1 - self._last_drafted.get(request_id, self._step)
        return self._shapes.knows(request_id) and num_missed <= _FEW_MISSED

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
            plain_s = self._costs.pass_s(len(record.passes))
            more_s = max(0.0, record.times.target_s - plain_s) if record.num_prompt_rows == 0 else 0.0
            self._probes.charge(self._step, record.times.draft_s + more_s, plain_s)
        if requested and not has_catch_up:
            # A probe that finds drafts much cheaper than expected goes on until that is known.
            if not self._is_speculating and record.times.draft_s < self._costs.drafts.seconds(requested) / 2.0:
                self._probes.repeat(
                    self._step, next(each.sequence.request_id for each in record.passes if each.num_requested)
                )
            self._costs.drafts.observe(requested, record.times.draft_s)
        if record.num_prompt_rows == 0 or self._costs.has_prompts:
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


def _requested(passes: Seq[SequencePass]) -> dict[str, RequestedDrafts]:
    """Return the requested drafts of a pass, by drafter."""
    numbers: dict[str, list[tuple[int, int]]] = {}
    for each in passes:
        if each.num_requested > 0:
            # A draft whose first token is impossible has depth 0, and took a step.
            num_steps = max(1, each.draft.depth) if each.wants_tree and each.num_proposed else each.num_requested
            drafter = drafter_of(each.sequence, is_tree=each.wants_tree)
            numbers.setdefault(drafter, []).append((num_steps, each.num_requested))
    return {
        drafter: RequestedDrafts(max(steps for steps, _ in sizes), sum(rows for _, rows in sizes))
        for drafter, sizes in numbers.items()
    }
