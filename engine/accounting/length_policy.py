"""Plans the shape of each sequence's draft in the next pass, so that the pass makes the most tokens per second.

Before each plan the policy learns from the accepted drafts and the times of the passes since the last one, and then
`ShapeChoice` chooses the rows. A plan holds for some steps where passes are short, and the next one is made while a
draft model drafts. While sequences draft, one pass now and then has no drafts, which measures the baseline.
`DraftProbes` changes other plans for one pass, to measure the drafts that they would not have.

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
from math import ceil, inf, isinf
from operator import add
from typing import NamedTuple

from engine.accounting.cost_model import DENSE, CostModel, ExpertReads, size_class
from engine.accounting.draft_probes import DraftProbes
from engine.accounting.draft_shapes import DraftSize, ShapeLimits
from engine.accounting.record import PassParts, PassRecord, SequencePass, drafter_of
from engine.accounting.shape_choice import PlannedBatch, ShapeChoice
from engine.accounting.speculation_gate import SpeculationGates
from engine.sequence.sequence import Sequence

# Fewer plain passes and more plans moved simulated goodput by 3% at most (bench/EXPERIMENTS.md).
_PLAIN_PERIOD = 64  # steps between plain passes that measure the baseline
_FEW_MISSED = 2  # passes without a draft; after more, the next draft has much to prefill
_REST = 8  # fewest steps between two plans while no sequence drafts; up to `_PLAN_SHARE` each rest is twice as long
_PLAN_S = 0.0005  # assumed for a plan before any is measured
_TIMED = 6  # passes with drafts between two plans whose times are learned
_HOLD = 64  # most steps between two plans while sequences draft
_BRIEF = 2  # most steps of a plan whose successor knows its last pass
_LONG_S = 0.016  # of a plain pass: a plan costs little then, so there is one for each pass
_PLAN_SHARE = 0.003  # of the time is for plans while no sequence drafts
# What clients notice: a small gain is not worth longer and uneven passes.
_WAKE_GAIN = 1.05  # drafts start above this expected gain: the first ones also pay for missed tokens
_WAKE_ERRORS = 1.0  # standard errors of acceptance in it: few passes, and bad luck in them, end no drafts for long
_LEAST_GAIN = 1.02  # drafts end below this expected gain


class NotedPass(NamedTuple):
    """A pass to learn from: its step, and its exact part."""

    step: int
    record: PassRecord
    passes: Seq[SequencePass]


class LengthPolicy:
    """Plans a shape for each sequence: none, a chain or a tree, up to its limits. Used by the engine's thread alone.

    Args:
        first_length: The length before any pass is measured, and the limit until the cost of drafts is known.
        max_length: The longest draft.
        max_pass_s: The longest pass that drafts may cause; a pass that is longer without drafts gets none.
        experts: What rows read of the target's experts.
        max_nodes: The largest tree; 0 if all drafts are chains.

    Attributes:
        is_resting: the last plan for requests with drafts gave them none.
    """

    def __init__(
        self,
        first_length: int,
        max_length: int,
        max_pass_s: float = inf,
        experts: ExpertReads = DENSE,
        max_nodes: int = 0,
    ) -> None:
        self._first_length, self._max_length, self._max_nodes = first_length, max_length, max_nodes
        self._is_free = isinf(max_pass_s)
        self._costs = CostModel(experts)
        self._gates = SpeculationGates(self._costs)
        self._shapes = ShapeChoice(max_length, max_nodes, max_pass_s, self._costs, self._gates)
        self._step = 0
        self._last_plain = -_PLAIN_PERIOD  # step of the last pass without drafts
        self._planned_step = self._next_plan = 0  # of the last plan, and of the next one
        self._num_planned = 0  # sequences of the last plan
        self._held: dict[str, DraftSize] = {}  # request id -> size in the last plan
        self._sized: Seq[Sequence] = ()  # sequences that have their sizes of the last plan
        self._usual = DraftSize(first_length, 0)  # size in the last plan with requests that do not end soon
        self._held_name = ""  # class of its requests, if there is one
        self._can_join = False  # new requests of this class may draft as others until the next plan
        self._num_joined = 0  # of them since then
        self._has_planned = False  # since the last pass
        self._own_s, self._last_charge = 0.0, 0  # own work since the step of the last plan
        self._rest = _REST  # most steps to the next plan while no sequence drafts
        self._steady = 1  # the same while sequences draft
        self._plan_s = _PLAN_S  # of a recent plan, with the lessons before it
        self._is_short = False  # plain passes are shorter than `_LONG_S`
        self._last_drafted: dict[str, int] = {}  # request id -> step of its last draft, or of its first pass
        self._probes = DraftProbes(first_length)
        self._is_speculating = False
        self.is_resting = False
        self._num_skipped = 0  # plain passes since the last one that was noted
        self._noted: list[NotedPass] = []  # since the last plan

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second relative to plain decoding, by class of requests."""
        return self._gates.speedups

    @property
    def row_prices(self) -> Seq[float]:
        """The tokens that each row costs in the last plan, for drafts that know their chances."""
        return self._shapes.row_prices

    def goodput(self, method: str, kind: str) -> float | None:
        """Return the speedup of a method's greedy or sampled requests; None until it is measured."""
        return self._gates.goodput(f"{method}-{kind}")

    def is_open(self, sequence: Sequence) -> bool:
        """False while drafts are off for the sequence's class, in batches of the last pass's size."""
        return self._gates.is_open(sequence.draft_class)

    def forget_draft(self) -> None:
        """Forget all measurements of the draft model, since another has replaced it; keep the target's costs."""
        self._learn_noted()
        self._shapes.forget_draft()
        self._probes.forget_draft()
        self._costs.forget_drafts()
        self._gates.forget_drafts()
        self._is_speculating, self.is_resting = True, False
        self._num_planned = self._num_skipped = 0  # the next pass needs another plan

    def charge(self, seconds: float) -> None:
        """Record the time of the policy's own work after a pass: drafts have to gain it too."""
        self._own_s += seconds
        if self._has_planned:
            self._gates.planning_s.append(self._own_s / max(1, self._step - self._last_charge))
            self._plan_s += 0.1 * (self._own_s - self._plan_s)
            self._own_s, self._last_charge, self._has_planned = 0.0, self._step, False

    def on_pass(self, record: PassRecord) -> None:
        """Note a pass; call it once per pass, before `sizes`. The next plan learns from it."""
        passes = [each for each in record.passes if each.outcome.is_exact]
        if not passes:
            return
        self._step += 1
        # While no sequence drafts, a pass before each plan represents all passes since the last one.
        is_due = self._step >= self._next_plan
        is_plain = not self._is_speculating and not any(each.num_requested for each in passes)
        if is_plain and not is_due and record.num_prompt_rows == 0:
            self._num_skipped += 1
            self._costs.count(0, len(passes))
            return
        if not is_plain:
            self._num_skipped = 0  # a pass with drafts does not represent them
        self._noted.append(NotedPass(self._step, record, passes))

    def _learn_noted(self) -> None:
        """Learn from all passes since the last plan: together they take less time, since the code is in the caches.

        All drafts count. While a plan holds most passes are alike, and the times of a few of them are enough.
        """
        noted, self._noted = self._noted, []
        num_steps = ceil(len(noted) / _TIMED)
        for index, each in enumerate(noted, 1 - len(noted)):
            is_usual = any(one.num_requested for one in each.passes) == self._is_speculating
            is_left_out = index % num_steps != 0
            self._learn(each, (0 if is_left_out else num_steps) if is_usual else 1)

    def _learn(self, noted: NotedPass, num_steps: int) -> None:
        """Learn from the drafts of a pass, and from its time if it represents any steps."""
        step, record, passes = noted
        drafted_ids = [each.sequence.request_id for each in passes if each.num_requested]
        has_catch_up = not all(self._is_up_to_date(each, step) for each in drafted_ids)
        self._costs.count(record.num_prompt_rows, len(passes) + sum([each.outcome.num_accepted for each in passes]))
        self._shapes.learn(passes)
        self._last_drafted.update(dict.fromkeys(drafted_ids, step))
        # A reasoning step makes a pass that other passes are not comparable with.
        if num_steps and len(passes) == len(record.passes):
            self._set_size(len(passes))
            self._learn_time(step, record, PassParts(passes), has_catch_up, num_steps)

    def sizes(self, sequences: Seq[Sequence]) -> list[DraftSize]:
        """Return the size of each sequence's next draft; the next pass samples all of them.

        They are of the last plan, unless it has ended or was for other sequences: then there is a new one now.
        """
        if not self._fits(len(sequences)) or not self._join(sequences):
            self._renew(sequences, self._step)
        self._sized = sequences
        return [self._held[each.request_id] for each in sequences]

    def holds_for(self, sequences: Seq[Sequence]) -> bool:
        """True if these sequences have had their sizes from `sizes`, and the plan still holds."""
        return sequences == self._sized and self._fits(len(sequences))

    def plan_ahead(self, sequences: Seq[Sequence]) -> None:
        """Plan for the pass after the next one, unless the last plan still holds."""
        if self._step >= self._next_plan:
            self._renew(sequences, self._step + 1)

    def _renew(self, sequences: Seq[Sequence], step: int) -> None:
        """Learn from the passes since the last plan, and make another one, to be used from `step` on."""
        request_ids = [sequence.request_id for sequence in sequences]
        self._learn_noted()
        self._shapes.keep_only(request_ids)
        self._last_drafted = {each: self._last_drafted.get(each, self._step) for each in request_ids}
        if not sequences:
            return
        self._set_size(len(sequences))
        self._planned_step, self._next_plan, self._num_planned = step, step + 1, len(sequences)
        self._sized = ()
        self._has_planned = True
        sizes = self._plan(sequences)
        self._held = dict(zip(request_ids, sizes, strict=True))
        # The drafts of a request that soon ends are short, and no measure for the next one.
        pairs = zip(sequences, sizes, strict=True)
        lasting = sorted([size for each, size in pairs if size.num_tokens < each.num_remaining_tokens - 1])
        self._usual = lasting[len(lasting) // 2] if lasting else self._usual
        self._held_name, *others = {each.draft_class for each in sequences}
        self._can_join, self._num_joined = self._is_short and not others, 0

    def _fits(self, num_sequences: int) -> bool:
        """True if the last plan is for about so many sequences, and lasts until `plan_ahead` makes the next one.

        A plan without drafts, or for a pass or two, does not: the next one has to know all passes. While sequences
        draft, another number of them soon has its plan anyway.
        """
        is_brief = not self._is_speculating or self._next_plan <= self._planned_step + _BRIEF
        if is_brief and self._step >= self._next_plan:
            return False
        if self._is_speculating:
            return self._num_planned <= 2 * num_sequences <= 4 * self._num_planned
        return size_class(num_sequences) == size_class(self._num_planned)

    def _join(self, sequences: Seq[Sequence]) -> bool:
        """Give new requests the usual size; return False if they need a plan.

        While no sequence drafts, a batch of them needs one: that is often the luck of those before them.
        """
        new = [each for each in sequences if each.request_id not in self._held]
        if not new:
            return True
        if not self._can_join or any(each.draft_class != self._held_name or each.has_fixed_length for each in new):
            return False
        self._num_joined += len(new)
        if not self._is_speculating and self._num_joined >= len(sequences):
            return False
        for each in new:
            self._last_drafted[each.request_id] = self._step
            self._held[each.request_id] = self._limited(self._usual, each)
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
        # Before any pass is measured, use the first length, but few rows: a large batch may compute them in turn.
        if not self._costs.is_known:
            self._is_speculating = True
            return limits.equal(min(self._first_length, max(1, 32 // len(sequences))))
        # Use no drafts if a plain pass is due, or if the costs are not known for more rows.
        room = self._costs.room(num_rows)
        if self._step - self._last_plain > _PLAIN_PERIOD or room <= 0:
            self._last_plain = self._step
            return limits.equal(0)
        # Plan the shapes of most methods; set a price for drafts that know their chances.
        num_drafts = min(sum(map(max, limits.chains, limits.trees)), room)
        if num_drafts == 0:  # requests without drafts, or the last token of each
            if not any(each.num_draft_tokens for each in sequences):
                self._is_speculating = False
                self._next_plan = self._step + _REST
            return limits.equal(0)
        row_seconds = self._costs.row_seconds(num_rows, num_drafts, is_optimistic=self._is_free)
        ages = [self._step - self._last_drafted[each.request_id] for each in sequences]
        batch = PlannedBatch.of(sequences, limits, row_seconds, ages)
        bounds = (_LEAST_GAIN, 0.0) if self._is_speculating else (_WAKE_GAIN, _WAKE_ERRORS)
        planned, is_tree = self._shapes.rows(self._step, batch, *bounds)
        lengths = [*map(add, planned, self._shapes.priced_rows(batch))]
        self._is_speculating = any(lengths)
        self.is_resting = not self._is_speculating
        is_changed = self._probe(batch, lengths, is_tree)
        sizes = limits.sizes(lengths, is_tree)
        self._hold(self._costs.pass_s(len(sequences)), is_changed=is_changed)
        return sizes

    def _probe(self, batch: PlannedBatch, lengths: list[int], is_tree: list[bool]) -> bool:
        """Change the plan for one pass now and then, to measure another. Changes both lists; returns True if it does.

        Under a time limit nothing is tried.
        """
        step, probes, doubtful = self._step, self._probes, self._shapes.doubtful
        is_tried = self._is_free and probes.try_other_shape(step, batch, lengths, is_tree, doubtful)
        trees = [flag and length > 1 for flag, length in zip(is_tree, lengths, strict=True)]
        is_alone = probes.let_one_draft_alone(step, batch.drafters(trees), lengths)
        is_probe = probes.probe(step, self._last_drafted, lengths, batch.limits.chains)
        return is_tried or is_alone or is_probe

    def _hold(self, plain_s: float, *, is_changed: bool) -> None:
        """Let a plan hold until it has cost a small share of the time, unless it is `is_changed` for one pass.

        The first plans hold for one, two, three steps, since few costs are known, and longer and longer while no
        sequence drafts: drafts that an unlucky measurement has ended come back soon.
        """
        self._is_short = plain_s < _LONG_S
        if is_changed:
            return
        affordable = self._plan_s / (_PLAN_SHARE * plain_s)
        if self._is_speculating:
            longest = _LONG_S / plain_s if self._shapes.has_priced else _HOLD
            hold = min(self._steady, affordable, longest) if self._is_free else 1.0
            self._rest, self._steady = _REST, self._steady + 1
        else:
            hold = min(self._rest, max(affordable, _REST))
            self._rest, self._steady = 2 * ceil(hold), 1
        self._next_plan = max(self._next_plan, self._step + ceil(hold))

    def _is_up_to_date(self, request_id: str, step: int) -> bool:
        """True if the draft has to prefill the tokens of a few passes at most, and no prompt."""
        num_missed = step - 1 - self._last_drafted.get(request_id, step)
        return self._shapes.knows(request_id) and num_missed <= _FEW_MISSED

    def _learn_time(self, step: int, record: PassRecord, parts: PassParts, has_catch_up: bool, num_steps: int) -> None:
        """Learn from the time of a pass; the wait for drafts is ignored if one had to prefill missed tokens."""
        num_prompt_rows, requested = record.num_prompt_rows, parts.requested
        target_s, draft_s = record.times.target_s, record.times.draft_s
        if not self._costs.is_known:
            self._costs.observe(num_prompt_rows, parts.num_rows, target_s)
            return
        if parts.num_rows == parts.num_sequences and num_prompt_rows == 0:
            self._last_plain = step
        if requested and not self._is_speculating:
            plain_s = self._costs.pass_s(parts.num_sequences)
            more_s = max(0.0, target_s - plain_s) if num_prompt_rows == 0 else 0.0
            self._probes.charge(step, draft_s + more_s, plain_s)
        if requested and not has_catch_up:
            # A probe that finds drafts much cheaper than expected goes on until that is known.
            if not self._is_speculating and draft_s < self._costs.drafts.seconds(requested) / 2.0:
                self._probes.repeat(
                    step, next(each.sequence.request_id for each in record.passes if each.num_requested)
                )
            self._costs.drafts.observe(requested, draft_s)
        if num_prompt_rows == 0 or self._costs.has_prompts:
            self._gates.observe(record, parts, num_steps + self._num_skipped, is_speculating=self._is_speculating)
            self._num_skipped = 0
        self._costs.observe(num_prompt_rows, parts.num_rows, target_s)

    def _num_possible(self, sequence: Sequence, *, is_tree: bool) -> int:
        """Return the longest chain of the next pass, or the largest tree."""
        if sequence.has_fixed_length or sequence.num_remaining_tokens <= 1:
            return 0
        is_known = self._costs.drafts.knows(drafter_of(sequence, is_tree=is_tree))
        limit = max(self._max_length, self._max_nodes) if is_known else self._first_length
        if is_tree:
            return min(limit, sequence.num_tree_nodes if sequence.num_draft_tokens > 0 else 0)
        return min(limit, sequence.num_draft_tokens, sequence.num_remaining_tokens - 1)
