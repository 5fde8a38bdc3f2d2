"""Chooses each sequence's number of drafts for the next pass, so that the pass makes the most tokens per second.

After every pass the budget learns from the accepted drafts and the time of the pass. It sets the length of every next
draft before any token is drawn, so a length depends only on committed tokens, counts and clocks. Otherwise `rejection`
and `block` verification would be biased (the look-ahead counter-example of DSpark, arXiv:2607.05147: p = (.7, .3) comes
out as (.85, .15)); `coupled` verification cannot be biased. In the first two modes the text of a seed depends on the
lengths, which depend on clocks: sequences with a client's seed keep their first length.

The cost of drafts is the time that their rows add to a pass. Rows of a prompt use time that reading the weights leaves
free, so a pass is expected to have as many prompt rows as recent passes. The time of the prompts themselves does not
depend on drafts and counts for none.

Suffixes know the chance of each of their drafts. Instead of a planned length they get a price, the least chance that is
worth a row (`engine.accounting.length_allocation`), and end where their chance falls below it.

A plan may give all sequences length 0. Then a fixed share of the time is saved for probes: a draft of one token in two
successive passes, since the first also prefills the tokens that the draft has missed. While sequences draft, one pass
now and then has no drafts, which measures the baseline; with several draft models, one pass uses each of them alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from engine.accounting.acceptance import AcceptanceTable, Floats, Ints
from engine.accounting.cost_model import DraftCosts, ForwardCost, RequestedDrafts
from engine.accounting.length_allocation import Allocation, RowPrice, allocate
from engine.accounting.record import PassRecord, SequencePass
from engine.accounting.speculation_gate import ClassStep, SpeculationGate
from engine.accounting.step_times import StepTimes
from engine.sequence.sequence import Sequence
from protos.messages import SpeculationMethod

_PLAIN_PERIOD = 64  # steps between plain passes that measure the baseline
_CLOSE_PERIOD = 16  # the same while the expected gain is below `_CLOSE_GAIN`: the baseline then decides
_CLOSE_GAIN = 1.1
_PROBE_SHARE = 0.01  # of the time is saved for probes of sequences without drafts
_MAX_SAVED = 10.0  # plain passes: the most time that is saved for a probe
_MIN_PROBE_PERIOD = 50  # steps between two probes, however cheap
_FEW_MISSED = 2  # passes without a draft; after more, the next draft has much to prefill
_OPTIMISM = 2.0  # standard errors subtracted from a cost, so that sizes that may be cheaper are tried again
_MAX_SURPRISE = 1.5  # times the expected seconds: the most that one slow pass may cost a class
_NUM_RECENT_PASSES = 8  # passes whose prompt rows predict the prompt rows of the next pass
_LEAST_SHARE = 0.01  # of a pass's time: the least cost of sampled rows, even if a prompt hides it
_LONGEST = 6.0  # plain passes: the longest pass with drafts for a single sequence
LONGEST_SHARED = 2.5  # the same for several sequences, which wait for each other's drafts
_REST = 8  # steps between two plans while no sequence drafts
_WAKE_GAIN = 1.05  # drafts start above this expected gain
_LEAST_GAIN = 1.02  # drafts end below this expected gain, which is not worth the longer passes


class DraftBudget:
    """Plans draft lengths from 0 to each sequence's limit. Used by the engine's thread alone.

    Args:
        first_length: The length before any pass is measured, and the limit until the cost of drafts is known.
        max_length: The longest draft.
        max_pass_s: The longest pass that drafts may cause; a pass that is longer without drafts gets none.
    """

    def __init__(self, first_length: int, max_length: int, max_pass_s: float = np.inf) -> None:
        self._max_pass_s = max_pass_s
        self._first_length = first_length
        self._max_length = max_length
        self._positions = np.arange(max_length)
        self._acceptance = AcceptanceTable(max_length)
        self._row_cost = ForwardCost()  # of passes with about as many sequences as the last pass
        self._row_costs: dict[int, ForwardCost] = {}  # by the bit length of that number
        self._batch_size = 1
        self._prompt_rows: deque[int] = deque([0], maxlen=_NUM_RECENT_PASSES)
        self._draft_costs = DraftCosts()
        self._row_price = RowPrice()
        self._gates: dict[str, SpeculationGate] = {}
        self._num_steps_since_plain = _PLAIN_PERIOD
        self._num_rested = 0  # steps since the last plan
        self._is_speculating = False
        self._expected_gain = 1.0  # tokens per second of the last plan relative to no drafts
        self._probe_credit_s = 0.0
        self._probed: str | None = None  # request that has had the first pass of its probe
        self._last_drafted: dict[str, int] = {}  # request id -> step of its last draft, or of its first pass
        self._last_alone: dict[str, int] = {}  # method -> step of the last plan for it to draft alone
        self._step = 0

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second relative to plain decoding, by class of requests."""
        return {name: gate.meter.speedup for name, gate in self._gates.items()}

    def goodput(self, method: str, kind: str) -> float | None:
        """Return the speedup of a method's greedy or sampled requests; None until it is measured."""
        gate = self._gates.get(f"{method}-{kind}")
        return gate.meter.speedup if gate is not None and gate.meter.is_measured else None

    def is_open(self, sequence: Sequence) -> bool:
        """False while drafts are off for the sequence's class, in batches of the last pass's size."""
        return self._is_open(class_of(sequence))

    def forget_draft(self) -> None:
        """Forget all measurements of the draft model, since another has replaced it; keep the target's costs."""
        self._acceptance = AcceptanceTable(self._max_length)
        self._draft_costs = DraftCosts()
        self._gates = {}
        self._is_speculating = True

    def on_pass(self, record: PassRecord) -> None:
        """Learn from a pass; call it once per pass, before `plan`."""
        passes = [each for each in record.passes if each.outcome.is_exact]
        self._prompt_rows.append(record.num_prompt_rows)
        if not passes:
            return
        self._set_batch_size(len(passes))
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
        self._row_price.observe(len(priced), sum(each.num_proposed for each in priced), num_accepted)
        # A reasoning step makes a pass that other passes are not comparable with.
        is_comparable = len(passes) == len(record.passes)
        if is_comparable and (record.num_prompt_rows == 0 or self._row_cost.max_rows > 0):
            self._observe_time(passes, record.times, record.num_prompt_rows, has_catch_up)

    def plan(self, sequences: Seq[Sequence]) -> None:
        """Set `draft_allowance` of all sequences that the next pass samples."""
        request_ids = [sequence.request_id for sequence in sequences]
        has_new = not self._last_drafted.keys() >= set(request_ids)
        self._acceptance.keep_only(request_ids)
        self._last_drafted = {each: self._last_drafted.get(each, self._step) for each in request_ids}
        if not sequences:
            return
        self._set_batch_size(len(sequences))
        self._num_rested += 1
        is_resting = not self._is_speculating and self._probed is None and self._num_rested < _REST
        if is_resting and not has_new and all(each.draft_allowance == 0 for each in sequences):
            return
        self._set_lengths(sequences)
        self._num_rested = 0

    def _set_batch_size(self, num_sequences: int) -> None:
        """Select the costs of passes with about as many sequences: each sequence adds a context to attend to."""
        self._batch_size = num_sequences
        bits = num_sequences.bit_length()
        if bits not in self._row_costs:
            self._row_costs[bits] = self._row_cost.weak_copy()
        self._row_cost = self._row_costs[bits]

    def _set_lengths(self, sequences: Seq[Sequence]) -> None:
        for sequence, length in zip(sequences, self._lengths(sequences).tolist(), strict=True):
            if not sequence.has_fixed_length:
                sequence.draft_allowance = length

    def _lengths(self, sequences: Seq[Sequence]) -> Ints:
        num_possible = np.array([self._num_possible(sequence) for sequence in sequences])
        num_rows = len(sequences) + sum(each.num_wanted_drafts for each in sequences if each.has_fixed_length)
        # Before any pass is measured, use the first length.
        if self._row_cost.max_rows == 0:
            self._is_speculating = True
            first: Ints = np.minimum(num_possible, self._first_length)
            return first
        # Use no drafts if a plain pass is due, or if the costs are not known for more rows.
        self._num_steps_since_plain += 1
        period = _PLAIN_PERIOD if self._expected_gain > _CLOSE_GAIN else _CLOSE_PERIOD
        room = self._row_cost.max_rows - max(self._prompt_rows) - num_rows
        if self._num_steps_since_plain > period or room <= 0:
            self._num_steps_since_plain = 0
            return np.zeros_like(num_possible)
        # Plan the lengths of most methods; set a price for drafts that know their chances.
        row_seconds = self._row_seconds(num_rows, min(int(num_possible.sum()), room))
        is_priced = np.array([_is_priced(each) for each in sequences])
        lengths = self._planned(sequences, np.where(is_priced, 0, num_possible), row_seconds)
        lengths += self._priced(sequences, np.where(is_priced, num_possible, 0), row_seconds)
        # Change the plan now and then to measure a method alone, or to probe a sequence without drafts.
        self._is_speculating = bool(lengths.any())
        self._measure_alone(sequences, lengths)
        self._probe(sequences, lengths, np.where(is_priced, 0, num_possible), float(row_seconds[0]))
        return lengths

    def _planned(self, sequences: Seq[Sequence], num_possible: Ints, row_seconds: Floats) -> Ints:
        """Return the lengths, at most `num_possible`, with the most expected tokens per second."""
        self._expected_gain = 1.0
        if not num_possible.any():
            return np.zeros_like(num_possible)
        acceptance = self._acceptance_of(sequences, num_possible)
        best = self._best_allocation(sequences, acceptance, row_seconds)
        self._expected_gain = best.tokens_per_s / best.plain_tokens_per_s
        needed = _LEAST_GAIN if self._is_speculating else _WAKE_GAIN
        return best.lengths if self._expected_gain > needed else np.zeros_like(best.lengths)

    def _priced(self, sequences: Seq[Sequence], num_possible: Ints, row_seconds: Floats) -> Ints:
        """Set the price of a row, and return the longest lengths of sequences with priced drafts.

        A sequence with a fixed length gets no price, since a price depends on a clock.
        """
        num_priced = int(np.count_nonzero(num_possible))
        price = self._row_price.of(len(sequences), num_priced, row_seconds)
        for sequence in sequences:
            if not sequence.has_fixed_length:
                sequence.least_chance = price
        if price >= 1.0 or num_priced == 0:
            return np.zeros_like(num_possible)
        tokens_per_s = self._row_price.tokens_per_s(len(sequences), num_priced, row_seconds)
        self._expected_gain = max(self._expected_gain, tokens_per_s * float(row_seconds[0]) / len(sequences))
        limit_s = min(self._limit_s, _longest_s(len(sequences), row_seconds))
        num_rows = int(np.searchsorted(row_seconds, limit_s, side="right")) - 1
        most = num_rows if num_rows == len(row_seconds) - 1 else max(0, num_rows // num_priced)
        is_open = [self._is_open(class_of(each)) for each in sequences]
        return np.where(is_open, np.minimum(num_possible, most), 0)

    def _best_allocation(self, sequences: Seq[Sequence], acceptance: Floats, row_seconds: Floats) -> Allocation:
        """Return the best allocation over the cheapest method, the two cheapest, and so on: one may be too slow."""
        limit_s = min(self._limit_s, _longest_s(len(sequences), row_seconds))
        names = [method_of(sequence) for sequence in sequences]
        if len(different := set(names)) == 1:
            return allocate(acceptance, row_seconds, *self._draft_costs.prices(names[:1]), limit_s)
        methods = np.array(list(map(str, names)))
        by_price = sorted(map(str, different), key=lambda method: (*self._draft_costs.prices([method]), method))
        allocations = []
        for number in range(1, len(by_price) + 1):
            is_in = np.isin(methods, by_price[:number])
            prices = self._draft_costs.prices(methods[is_in].tolist())
            allocations.append(allocate(acceptance * is_in[:, None], row_seconds, *prices, limit_s))
        return max(allocations, key=lambda each: each.tokens_per_s)

    def _measure_alone(self, sequences: Seq[Sequence], lengths: Ints) -> None:
        """Let one of several methods draft alone now and then, to measure the cost of each."""
        methods = [method_of(sequence) for sequence in sequences]
        if len(set(methods)) < 2:
            return
        drafting = {method for method, length in zip(methods, lengths.tolist(), strict=True) if length > 0}
        if len(drafting) < 2:
            return
        alone = min(sorted(drafting), key=lambda method: self._last_alone.get(method, -_PLAIN_PERIOD))
        if self._step - self._last_alone.get(alone, -_PLAIN_PERIOD) >= _PLAIN_PERIOD:
            self._last_alone[alone] = self._step
            lengths[[method != alone for method in methods]] = 0

    @property
    def _limit_s(self) -> float:
        """The limit for the expected seconds of a pass, lowered by the noise so that most passes keep `max_pass_s`."""
        return self._max_pass_s / (1.0 + self._row_cost.noise)

    def _row_seconds(self, num_rows: int, num_drafts: int) -> Floats:
        """Return the seconds that `num_rows` to `num_rows + num_drafts` sampled rows add to a pass, `[M + 1]`.

        It is the mean over the prompt rows of recent passes.
        """
        optimism = _OPTIMISM if np.isinf(self._max_pass_s) else 0.0  # under a time limit nothing is tried
        prompt_rows = np.unique(self._prompt_rows)[:, None]
        counts = [self._prompt_rows.count(rows) for rows in prompt_rows[:, 0].tolist()]
        weights = np.array(counts) / len(self._prompt_rows)
        whole = self._row_cost.seconds(prompt_rows + np.arange(num_rows, num_rows + num_drafts + 1), optimism)
        added = np.maximum(whole - self._row_cost.seconds(prompt_rows, optimism), _LEAST_SHARE * whole)
        return weights @ added

    def _acceptance_of(self, sequences: Seq[Sequence], num_possible: Ints) -> Floats:
        """Return the chance that each draft is accepted, `[B, K]`; 0 for a draft that is not allowed."""
        names = [class_of(sequence) for sequence in sequences]
        acceptance = self._acceptance.of([sequence.request_id for sequence in sequences], names)
        lengths = [n if self._is_open(name) else 0 for n, name in zip(num_possible.tolist(), names, strict=True)]
        if min(lengths) < self._max_length:
            acceptance[self._positions >= np.array(lengths)[:, None]] = 0.0
        return acceptance

    def _probe(self, sequences: Seq[Sequence], lengths: Ints, num_possible: Ints, plain_s: float) -> None:
        """Give a draft of one token to the sequence that has waited longest, if enough time is saved.

        The same sequence also drafts in the next pass, which takes as long as an ordinary draft.
        """
        # Save time, and find the sequences without drafts.
        self._probe_credit_s = min(
            self._probe_credit_s + self._num_rested * _PROBE_SHARE * plain_s, _MAX_SAVED * plain_s
        )
        idle = np.flatnonzero((lengths == 0) & (num_possible > 0)).tolist()
        probed, self._probed = self._probed, None
        if not idle:
            return
        # The second pass of a probe.
        second = next((index for index in idle if sequences[index].request_id == probed), None)
        if second is not None:
            lengths[second] = 1
            return
        # The first pass of a new probe, if its expected time is saved.
        least_s = _PROBE_SHARE * _MIN_PROBE_PERIOD * plain_s
        first = min(idle, key=lambda index: self._last_drafted[sequences[index].request_id])
        probe = RequestedDrafts(0 if lengths.any() else 1, 1)
        expected_s = 2.0 * self._draft_costs.seconds({method_of(sequences[first]): probe})
        if self._probe_credit_s >= min(max(expected_s, least_s), _MAX_SAVED * plain_s):
            lengths[first] = 1
            self._probed = sequences[first].request_id
            self._probe_credit_s -= least_s  # `_observe_time` subtracts the measured cost

    def _is_up_to_date(self, request_id: str) -> bool:
        """True if the draft has to prefill the tokens of a few passes at most, and no prompt."""
        num_missed = self._step - 1 - self._last_drafted.get(request_id, self._step)
        return self._acceptance.knows(request_id) and num_missed <= _FEW_MISSED

    def _observe_time(
        self, passes: Seq[SequencePass], times: StepTimes, num_prompt_rows: int, has_catch_up: bool
    ) -> None:
        """Learn from the time of a pass; the wait for drafts is ignored if one had to prefill missed tokens."""
        # Learn the costs of the target and of the drafts.
        requested = _requested(passes)
        num_proposed = sum(each.num_proposed for each in passes)
        num_rows = len(passes) + num_proposed
        self._row_cost.observe(num_prompt_rows + num_rows, times.target_s)
        if num_proposed == 0:
            self._num_steps_since_plain = 0
        if requested:
            if not self._is_speculating:  # a probe
                self._probe_credit_s -= times.draft_s + self._row_cost.at(num_rows) - self._row_cost.at(len(passes))
            if not has_catch_up:
                self._draft_costs.observe(requested, times.draft_s)
        # Divide the pass between the classes, and measure the speedup of each.
        members: dict[str, list[SequencePass]] = {}
        for each in passes:
            members.setdefault(class_of(each.sequence), []).append(each)
        expected_s, shares = self._draft_costs.seconds(requested), self._draft_costs.shares(requested)
        draft_s = min(times.draft_s, _MAX_SURPRISE * expected_s) if expected_s > 0.0 else times.draft_s
        for name, part in members.items():
            method = method_of(part[0].sequence)
            own = (
                sum(each.num_requested for each in part) / requested[method].num_tokens if method in requested else 0.0
            )
            own_s = own * shares.get(method, 0.0) * draft_s
            step = self._class_step(part, num_rows, num_prompt_rows, draft_s, times.target_s, own_s)
            is_drafting = self._is_speculating and any(each.num_requested > 0 for each in part)
            self._gate(name).observe(step, len(passes), is_drafting=is_drafting)

    def _class_step(
        self,
        part: Seq[SequencePass],
        num_rows: int,
        num_prompt_rows: int,
        draft_s: float,
        target_s: float,
        own_s: float,
    ) -> ClassStep:
        """Return a class's part of a step that waited `draft_s` for drafts, `own_s` of it for drafts of the class.

        The target's time without the class's drafts is estimated by the ratio of the costs.
        """
        proposed = sum(each.num_proposed for each in part)
        whole_s, prompts_s = self._row_cost.at(num_prompt_rows + num_rows), self._row_cost.at(num_prompt_rows)
        plain_s = self._row_cost.at(num_prompt_rows + num_rows - proposed)
        least_s = _LEAST_SHARE * whole_s
        added = max(whole_s - prompts_s, least_s) / whole_s  # share of the pass's time that sampled rows added
        share = max(plain_s - prompts_s, least_s) / max(whole_s - prompts_s, least_s)
        target_s = added * min(target_s, _MAX_SURPRISE * whole_s)
        return ClassStep(
            num_sequences=len(part),
            num_tokens=sum(each.num_accepted + 1 for each in part),
            seconds=target_s + draft_s,
            plain_seconds=target_s * share + draft_s - own_s,
        )

    def _num_possible(self, sequence: Sequence) -> int:
        if sequence.has_fixed_length:
            return 0
        limit = self._max_length if self._draft_costs.knows(method_of(sequence)) else self._first_length
        return max(0, min(limit, sequence.num_draft_tokens, sequence.num_remaining_tokens - 1))

    def _is_open(self, name: str) -> bool:
        return self._gate(name).is_open(self._batch_size)

    def _gate(self, name: str) -> SpeculationGate:
        if name not in self._gates:
            self._gates[name] = SpeculationGate(name)
        return self._gates[name]


def method_of(sequence: Sequence) -> str:
    """Return the source of a sequence's drafts."""
    return "prediction" if sequence.request.prediction_token_ids else sequence.method


def _is_priced(sequence: Sequence) -> bool:
    """True if the drafts of a sequence know their chances."""
    return method_of(sequence) == SpeculationMethod.SUFFIX


def class_of(sequence: Sequence) -> str:
    """Return the class of requests with a similar acceptance: the method, with greedy or sampled."""
    return f"{method_of(sequence)}-{kind_of(is_greedy=sequence.is_greedy)}"


def _longest_s(num_sequences: int, row_seconds: Floats) -> float:
    """Return the longest pass of `num_sequences` sequences with drafts, in seconds, whatever the expected gain."""
    return (_LONGEST if num_sequences == 1 else LONGEST_SHARED) * float(row_seconds[0])


def _requested(passes: Seq[SequencePass]) -> dict[str, RequestedDrafts]:
    """Return the requested drafts of a pass, by method."""
    numbers: dict[str, list[int]] = {}
    for each in passes:
        if each.num_requested > 0:
            numbers.setdefault(method_of(each.sequence), []).append(each.num_requested)
    return {method: RequestedDrafts(max(requested), sum(requested)) for method, requested in numbers.items()}


def kind_of(*, is_greedy: bool) -> str:
    """Return the second part of a class's name, after its method."""
    return "greedy" if is_greedy else "sampled"
