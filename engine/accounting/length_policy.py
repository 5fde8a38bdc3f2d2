"""Chooses each sequence's number of drafts for the next pass, so that the pass makes the most tokens per second.

After every pass the policy learns from the accepted drafts and the time of the pass. It chooses each next length before
any token is drawn, so a length depends only on committed tokens, counts and clocks. Otherwise `rejection` and `block`
verification would be biased (the look-ahead counter-example of DSpark, arXiv:2607.05147: p = (.7, .3) comes out as
(.85, .15)); `coupled` verification cannot be biased. In the first two modes the text of a seed depends on the lengths,
which depend on clocks: sequences with a client's seed keep their first length.

Suffixes know the chance of each of their drafts. Instead of a planned length they get a price, the least chance that is
worth a row (`engine.accounting.length_allocation`), and end where their chance falls below it.

A plan may give all sequences length 0. Then a fixed share of the time goes to probes: a draft of one token in two
successive passes, since the first also prefills the tokens that the draft has missed. While sequences draft, one pass
now and then has no drafts, which measures the baseline; with several draft models, one pass uses each of them alone.

A simpler rule, the best measured K of {0, 2, 4, 8} per class and batch size, is up to a quarter slower
(bench/EXPERIMENTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from engine.accounting.acceptance import AcceptanceTable, Floats, Ints
from engine.accounting.cost_model import DENSE, CostModel, ExpertReads
from engine.accounting.draft_cost import RequestedDrafts
from engine.accounting.length_allocation import Allocation, RowPrice, allocate
from engine.accounting.record import PassRecord, SequencePass
from engine.accounting.speculation_gate import SpeculationGates, class_of, method_of
from engine.sequence.sequence import Sequence
from protos.messages import SpeculationMethod

# Shares of time for measurements. Fewer plain passes and more plans moved simulated goodput by 3% at most
# (bench/EXPERIMENTS.md).
_PLAIN_PERIOD = 64  # steps between plain passes that measure the baseline
_PROBE_SHARE = 0.01  # of the time is for probes of sequences without drafts
_PROBE_PERIODS = (60, 1000)  # fewest and most steps between two probes
_FEW_MISSED = 2  # passes without a draft; after more, the next draft has much to prefill
_REST = 8  # steps between two plans while no sequence drafts
# What clients notice: a small gain is not worth longer and uneven passes.
_WAKE_GAIN = 1.05  # drafts start above this expected gain: the first ones also pay for missed tokens
_LEAST_GAIN = 1.02  # drafts end below this expected gain
_LONGEST = 6.0  # plain passes: the longest pass with drafts for a single sequence
LONGEST_SHARED = 2.5  # the same for several sequences, which wait for each other's drafts


class LengthPolicy:
    """Plans draft lengths from 0 to each sequence's limit. Used by the engine's thread alone.

    Args:
        first_length: The length before any pass is measured, and the limit until the cost of drafts is known.
        max_length: The longest draft.
        max_pass_s: The longest pass that drafts may cause; a pass that is longer without drafts gets none.
        experts: What rows read of the target's experts.

    Attributes:
        least_chance: the price of a row in the last plan: a draft with a lower known chance is not worth it.
    """

    def __init__(
        self, first_length: int, max_length: int, max_pass_s: float = np.inf, experts: ExpertReads = DENSE
    ) -> None:
        self.least_chance = 0.0
        self._first_length = first_length
        self._max_length = max_length
        self._max_pass_s = max_pass_s
        self._acceptance = AcceptanceTable(max_length)
        self._costs = CostModel(experts)
        self._price = RowPrice()
        self._gates = SpeculationGates(self._costs)
        self._step = 0
        self._last_plain = -_PLAIN_PERIOD  # step of the last pass without drafts
        self._last_plan = 0
        self._last_drafted: dict[str, int] = {}  # request id -> step of its last draft, or of its first pass
        self._last_alone: dict[str, int] = {}  # method -> step of the last plan for it to draft alone
        self._is_speculating = False
        self._probed: str | None = None  # request that has had the first pass of its probe
        self._next_probe = _PROBE_PERIODS[0]  # step
        self._probe_s = 0.0  # wait for the drafts of the last probe

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second relative to plain decoding, by class of requests."""
        return self._gates.speedups

    def goodput(self, method: str, kind: str) -> float | None:
        """Return the speedup of a method's greedy or sampled requests; None until it is measured."""
        return self._gates.goodput(f"{method}-{kind}")

    def is_open(self, sequence: Sequence) -> bool:
        """False while drafts are off for the sequence's class, in batches of the last pass's size."""
        return self._gates.is_open(class_of(sequence))

    def forget_draft(self) -> None:
        """Forget all measurements of the draft model, since another has replaced it; keep the target's costs."""
        self._acceptance = AcceptanceTable(self._max_length)
        self._costs.forget_drafts()
        self._gates = SpeculationGates(self._costs)
        self._is_speculating = True

    def on_pass(self, record: PassRecord) -> None:
        """Learn from a pass; call it once per pass, before `lengths`."""
        passes = [each for each in record.passes if each.outcome.is_exact]
        self._costs.expect_prompts(record.num_prompt_rows)
        if not passes:
            return
        self._set_size(len(passes))
        self._step += 1
        drafted_ids = [each.sequence.request_id for each in passes if each.num_requested > 0]
        has_catch_up = not all(map(self._is_up_to_date, drafted_ids))
        self._acceptance.observe(
            [each.sequence.request_id for each in passes],
            [class_of(each.sequence) for each in passes],
            np.array([each.num_proposed for each in passes]),
            np.array([each.num_accepted for each in passes]),
        )
        self._last_drafted.update(dict.fromkeys(drafted_ids, self._step))
        priced = [each for each in passes if _is_priced(each.sequence)]
        num_accepted = sum(each.num_accepted for each in priced)
        self._price.observe(len(priced), sum(each.num_proposed for each in priced), num_accepted)
        # A reasoning step makes a pass that other passes are not comparable with.
        if len(passes) == len(record.passes):
            self._learn_time(record, has_catch_up)

    def lengths(self, sequences: Seq[Sequence]) -> list[int]:
        """Return the length of each sequence's next draft; the next pass samples all of them."""
        request_ids = [sequence.request_id for sequence in sequences]
        has_new = not self._last_drafted.keys() >= set(request_ids)
        self._acceptance.keep_only(request_ids)
        self._last_drafted = {each: self._last_drafted.get(each, self._step) for each in request_ids}
        if not sequences:
            return []
        self._set_size(len(sequences))
        is_resting = not self._is_speculating and self._probed is None and self._step - self._last_plan < _REST
        if is_resting and not has_new and all(each.draft_allowance == 0 for each in sequences):
            return [0] * len(sequences)
        self._last_plan = self._step
        return [int(length) for length in self._plan(sequences)]

    def _set_size(self, num_sequences: int) -> None:
        self._costs.set_size(num_sequences)
        self._gates.batch_size = num_sequences

    def _plan(self, sequences: Seq[Sequence]) -> Ints:
        num_possible = np.array([self._num_possible(sequence) for sequence in sequences])
        num_rows = len(sequences) + sum(each.num_wanted_drafts for each in sequences if each.has_fixed_length)
        # Before any pass is measured, use the first length.
        if not self._costs.is_known:
            self._is_speculating = True
            first: Ints = np.minimum(num_possible, self._first_length)
            return first
        # Use no drafts if a plain pass is due, or if the costs are not known for more rows.
        room = self._costs.room(num_rows)
        if self._step - self._last_plain > _PLAIN_PERIOD or room <= 0:
            self._last_plain = self._step
            return np.zeros_like(num_possible)
        # Plan the lengths of most methods; set a price for drafts that know their chances.
        is_free = np.isinf(self._max_pass_s)  # under a time limit nothing is tried
        num_drafts = min(int(num_possible.sum()), room)
        row_seconds = self._costs.row_seconds(num_rows, num_drafts, is_optimistic=is_free)
        is_priced = np.array([_is_priced(each) for each in sequences])
        lengths = self._planned(sequences, np.where(is_priced, 0, num_possible), row_seconds)
        lengths += self._priced(sequences, np.where(is_priced, num_possible, 0), row_seconds)
        # Change the plan now and then to measure a method alone, or to probe a sequence without drafts.
        self._is_speculating = bool(lengths.any())
        self._measure_alone(sequences, lengths)
        self._probe(sequences, lengths, np.where(is_priced, 0, num_possible))
        return lengths

    def _planned(self, sequences: Seq[Sequence], num_possible: Ints, row_seconds: Floats) -> Ints:
        """Return the lengths, at most `num_possible`, with the most expected tokens per second."""
        if not num_possible.any():
            return np.zeros_like(num_possible)
        names = [class_of(sequence) for sequence in sequences]
        acceptance = self._acceptance.of([sequence.request_id for sequence in sequences], names)
        allowed = np.where([self._gates.is_open(name) for name in names], num_possible, 0)
        acceptance[np.arange(self._max_length) >= allowed[:, None]] = 0.0
        best = self._best_allocation(sequences, acceptance, row_seconds)
        needed = _LEAST_GAIN if self._is_speculating else _WAKE_GAIN
        is_worth = best.tokens_per_s > needed * best.plain_tokens_per_s
        return best.lengths if is_worth else np.zeros_like(best.lengths)

    def _priced(self, sequences: Seq[Sequence], num_possible: Ints, row_seconds: Floats) -> Ints:
        """Set the price of a row, and return the longest lengths of sequences with priced drafts."""
        num_priced = int(np.count_nonzero(num_possible))
        self.least_chance = self._price.of(len(sequences), num_priced, row_seconds)
        if self.least_chance >= 1.0 or num_priced == 0:
            return np.zeros_like(num_possible)
        num_rows = int(np.searchsorted(row_seconds, self._limit_s(len(sequences), row_seconds), side="right")) - 1
        most = num_rows if num_rows == len(row_seconds) - 1 else max(0, num_rows // num_priced)
        is_open = [self.is_open(each) for each in sequences]
        return np.where(is_open, np.minimum(num_possible, most), 0)

    def _best_allocation(self, sequences: Seq[Sequence], acceptance: Floats, row_seconds: Floats) -> Allocation:
        """Return the best allocation over the cheapest method, the two cheapest, and so on: one may be too slow."""
        limit_s, drafts = self._limit_s(len(sequences), row_seconds), self._costs.drafts
        names = [str(method_of(sequence)) for sequence in sequences]
        if len(set(names)) == 1:
            return allocate(acceptance, row_seconds, *drafts.prices(names[:1]), limit_s)
        methods = np.array(names)
        by_price = sorted(set(names), key=lambda method: (*drafts.prices([method]), method))
        allocations = []
        for number in range(1, len(by_price) + 1):
            is_in = np.isin(methods, by_price[:number])
            prices = drafts.prices(methods[is_in].tolist())
            allocations.append(allocate(acceptance * is_in[:, None], row_seconds, *prices, limit_s))
        return max(allocations, key=lambda each: each.tokens_per_s)

    def _limit_s(self, num_sequences: int, row_seconds: Floats) -> float:
        """Return the limit for the expected seconds of a pass, lowered by noise so that most keep `max_pass_s`."""
        longest_s = (_LONGEST if num_sequences == 1 else LONGEST_SHARED) * float(row_seconds[0])
        return min(self._max_pass_s / (1.0 + self._costs.noise), longest_s)

    def _measure_alone(self, sequences: Seq[Sequence], lengths: Ints) -> None:
        """Let one of several methods draft alone now and then, to measure the cost of each."""
        methods = [method_of(sequence) for sequence in sequences]
        drafting = {method for method, length in zip(methods, lengths.tolist(), strict=True) if length > 0}
        if len(drafting) < 2:
            return
        alone = min(sorted(drafting), key=lambda method: self._last_alone.get(method, -_PLAIN_PERIOD))
        if self._step - self._last_alone.get(alone, -_PLAIN_PERIOD) >= _PLAIN_PERIOD:
            self._last_alone[alone] = self._step
            lengths[[method != alone for method in methods]] = 0

    def _probe(self, sequences: Seq[Sequence], lengths: Ints, num_possible: Ints) -> None:
        """Now and then, give a draft of one token to the sequence that has waited longest.

        The same sequence also drafts in the next pass, which takes as long as an ordinary draft.
        """
        idle = np.flatnonzero((lengths == 0) & (num_possible > 0)).tolist()
        probed, self._probed = self._probed, None
        second = next((index for index in idle if sequences[index].request_id == probed), None)
        if second is not None:
            lengths[second] = 1
        elif idle and self._step >= self._next_probe:
            first = min(idle, key=lambda index: self._last_drafted[sequences[index].request_id])
            lengths[first] = 1
            self._probed = sequences[first].request_id
            self._next_probe = self._step + _PROBE_PERIODS[0]  # until its cost is measured
            self._probe_s = 0.0

    def _charge_probe(self, draft_s: float, plain_s: float) -> None:
        """Let the next probe wait until the last one, with this pass, is a small share of the time."""
        self._probe_s += draft_s
        period = int(min(self._probe_s / (_PROBE_SHARE * plain_s), _PROBE_PERIODS[1]))
        self._next_probe = max(self._next_probe, self._step + period)

    def _is_up_to_date(self, request_id: str) -> bool:
        """True if the draft has to prefill the tokens of a few passes at most, and no prompt."""
        num_missed = self._step - 1 - self._last_drafted.get(request_id, self._step)
        return self._acceptance.knows(request_id) and num_missed <= _FEW_MISSED

    def _learn_time(self, record: PassRecord, has_catch_up: bool) -> None:
        """Learn from the time of a pass; the wait for drafts is ignored if one had to prefill missed tokens."""
        requested, num_proposed = _requested(record.passes), sum(each.num_proposed for each in record.passes)
        num_rows = len(record.passes) + num_proposed
        self._costs.observe(record.num_prompt_rows, num_rows, record.times.target_s)
        if not self._costs.is_known:
            return
        if num_proposed == 0:
            self._last_plain = self._step
        if requested and not self._is_speculating:
            self._charge_probe(record.times.draft_s, record.times.target_s)
        if requested and not has_catch_up:
            self._costs.drafts.observe(requested, record.times.draft_s)
        self._gates.observe(record, requested, is_speculating=self._is_speculating)

    def _num_possible(self, sequence: Sequence) -> int:
        if sequence.has_fixed_length:
            return 0
        limit = self._max_length if self._costs.drafts.knows(method_of(sequence)) else self._first_length
        return max(0, min(limit, sequence.num_draft_tokens, sequence.num_remaining_tokens - 1))


def _is_priced(sequence: Sequence) -> bool:
    """True if the drafts of a sequence know their chances."""
    return method_of(sequence) == SpeculationMethod.SUFFIX


def _requested(passes: Seq[SequencePass]) -> dict[str, RequestedDrafts]:
    """Return the requested drafts of a pass, by method."""
    numbers: dict[str, list[int]] = {}
    for each in passes:
        if each.num_requested > 0:
            numbers.setdefault(method_of(each.sequence), []).append(each.num_requested)
    return {method: RequestedDrafts(max(requested), sum(requested)) for method, requested in numbers.items()}
