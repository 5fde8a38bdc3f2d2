"""The number of drafts each sequence gets in the next pass: as many as make the most tokens per second.

After every pass the budget learns which drafts were accepted and what the pass cost, and sets the length of every next
draft before any is drawn. So a length depends on committed tokens, counts and clocks alone, never on a token it
decides about: `rejection` and `block` verification would otherwise be biased (the look-ahead counter-example of
DSpark, arXiv:2607.05147: p = (.7, .3) comes out as (.85, .15)). `coupled` verification could not be biased even so.
Lengths depend on clocks nevertheless, and so would the text that those two modes make of a seed: sequences of a
client's seed keep the length that they came with.

The cost of drafts is the time that their rows add to a pass, and a prompt that is computed beside them fills what
reading the weights leaves free: a pass is expected to have as many rows of prompts as recent ones had. Prompts
themselves are work that no draft saves or adds to, so their time counts for no draft.

Suffixes know the chance of each of their drafts. They have no planned length but a price, the least chance that is
worth a row (`engine.proposer.adaptive.row_price`), and are as long as their chances are above it.

No drafts are a length like any other, and cost nothing. While there are none, a fixed share of the time is set aside
for probes: one draft of one token now and then, in two passes running, since the first time of the two is that of a
draft which reads what it missed. While there are some, now and then a pass goes without, to keep the baseline measured,
and where several draft models draft, one with each of them alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engine.proposer.adaptive.acceptance import AcceptanceTable, Floats, Ints
from engine.proposer.adaptive.draft_costs import AskedDrafts, DraftCosts
from engine.proposer.adaptive.forward_cost import ForwardCost
from engine.proposer.adaptive.goodput import Allocation, allocate
from engine.proposer.adaptive.row_price import RowPrice
from engine.proposer.adaptive.speculation_gate import ClassStep, SpeculationGate
from engine.sequence.sequence import Sequence
from protos.messages import SpeculationMethod

_PLAIN_PERIOD = 64  # steps between plain passes that measure the baseline
_CLOSE_PERIOD = 16  # the same where drafts gain so little that all hangs on the baseline
_CLOSE_GAIN = 1.1
_PROBE_SHARE = 0.01  # of the time, for probes of sequences without drafts
_MAX_SAVED = 10.0  # plain passes' time at most, for a probe
_MIN_PROBE_PERIOD = 50  # steps between two probes, however cheap
_FEW_MISSED = 2  # passes without a draft that leave the next one little to catch up with
_OPTIMISM = 2.0  # standard errors of a cost: sizes that may be cheaper than they looked are tried again
_MAX_SURPRISE = 1.5  # times the expected seconds: what a class is charged with at most for one pass, hiccups included
_NUM_RECENT_PASSES = 8  # whose rows of prompts the next one is expected to have
_LEAST_SHARE = 0.01  # of a pass's time that sampled rows are taken to cost, if beside a prompt they cost nothing
_LONGEST = 6.0  # plain passes: how long a client waits at most where drafts pay,
LONGEST_BESIDE = 2.5  # and where it may wait for those of others
_REST = 8  # steps: so often it is asked again whether drafts pay for the sequences that have none
_WAKE_GAIN = 1.05  # drafts begin where they promise this much
_LEAST_GAIN = 1.02  # and end where they promise less: what they gain then costs clients longer waits


@dataclass(frozen=True, slots=True)
class DraftedPass:
    """One sequence's part of a pass: drafts asked for, computed and accepted."""

    sequence: Sequence
    num_asked: int
    num_proposed: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds a pass took: waiting for drafts, and everything else."""

    draft_s: float
    target_s: float


class DraftBudget:
    """Plans draft lengths in [0, what the sequence may have]; state of the engine's thread.

    `first_length` is the length until there is something to plan by, and the longest one until it is known what drafts
    cost. Drafts are not to make a pass longer than `max_pass_s`, where it is given: what is longer without them has
    none.
    """

    def __init__(self, first_length: int, max_length: int, max_pass_s: float = np.inf) -> None:
        self._max_pass_s = max_pass_s
        self._first_length = first_length
        self._max_length = max_length
        self._positions = np.arange(max_length)
        self._acceptance = AcceptanceTable(max_length)
        self._row_cost = ForwardCost()  # of passes of about so many sequences as the last
        self._row_costs: dict[int, ForwardCost] = {}  # by the bits of that number
        self._batch_size = 1
        self._prompt_rows: deque[int] = deque([0], maxlen=_NUM_RECENT_PASSES)
        self._draft_costs = DraftCosts()
        self._row_price = RowPrice()
        self._gates: dict[str, SpeculationGate] = {}
        self._num_steps_since_plain = _PLAIN_PERIOD
        self._num_rested = 0  # steps since the last plan
        self._is_speculating = False
        self._expected_gain = 1.0  # tokens per second of the last plan, against none
        self._probe_credit_s = 0.0
        self._probed: str | None = None  # request whose probe has had the first of its passes
        self._last_drafted: dict[str, int] = {}  # step in which a sequence last had a draft, or was first seen
        self._last_alone: dict[str, int] = {}  # step for which a method was last planned to draft alone
        self._step = 0

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second against no speculation, by class of requests."""
        return {name: gate.meter.speedup for name, gate in self._gates.items()}

    def goodput(self, method: str, kind: str) -> float | None:
        """Return the speed-up of a method's requests of a kind, greedy or sampled; None until it is measured."""
        gate = self._gates.get(f"{method}-{kind}")
        return gate.meter.speedup if gate is not None and gate.meter.is_measured else None

    def is_open(self, sequence: Sequence) -> bool:
        """False while drafts are switched off for the class of such requests, in batches of the last one's size."""
        return self._is_open(class_of(sequence))

    def forget_draft(self) -> None:
        """Another draft has come: what is known of the one before is no guide. The target's costs stay."""
        self._acceptance = AcceptanceTable(self._max_length)
        self._draft_costs = DraftCosts()
        self._gates = {}
        self._is_speculating = True

    def observe(self, passes: Seq[DraftedPass], time: PassTime | None, num_prompt_rows: int = 0) -> None:
        """Learn from a pass of these sequences and of so many rows of prompts besides.

        `time` is None if it also computed what says nothing of other passes. Call it once per pass, before `plan`.
        """
        self._prompt_rows.append(num_prompt_rows)
        if not passes:
            return
        self._set_batch_size(len(passes))
        self._step += 1
        drafted_ids = [each.sequence.request_id for each in passes if each.num_asked > 0]
        reads_missed = not all(map(self._is_up_to_date, drafted_ids))
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
        is_comparable = num_prompt_rows == 0 or self._row_cost.max_rows > 0
        if time is not None and is_comparable:
            self._observe_time(passes, time, num_prompt_rows, reads_missed)

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
        """Turn to the costs of passes of about so many sequences: a row of one more reads a context of its own."""
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
        if self._row_cost.max_rows == 0:
            self._is_speculating = True
            first: Ints = np.minimum(num_possible, self._first_length)
            return first
        self._num_steps_since_plain += 1
        period = _PLAIN_PERIOD if self._expected_gain > _CLOSE_GAIN else _CLOSE_PERIOD
        room = self._row_cost.max_rows - max(self._prompt_rows) - num_rows
        if self._num_steps_since_plain > period or room <= 0:
            self._num_steps_since_plain = 0
            return np.zeros_like(num_possible)
        row_seconds = self._row_seconds(num_rows, min(int(num_possible.sum()), room))
        is_priced = np.array([_is_priced(each) for each in sequences])
        lengths = self._planned(sequences, np.where(is_priced, 0, num_possible), row_seconds)
        lengths += self._priced(sequences, np.where(is_priced, num_possible, 0), row_seconds)
        self._is_speculating = bool(lengths.any())
        self._leave_one(sequences, lengths)
        self._probe(sequences, lengths, np.where(is_priced, 0, num_possible), float(row_seconds[0]))
        return lengths

    def _planned(self, sequences: Seq[Sequence], num_possible: Ints, row_seconds: Floats) -> Ints:
        """Return the lengths, of at most `num_possible`, that promise the most tokens per second."""
        self._expected_gain = 1.0
        if not num_possible.any():
            return np.zeros_like(num_possible)
        acceptance = self._acceptance_of(sequences, num_possible)
        best = self._best_allocation(sequences, acceptance, row_seconds)
        self._expected_gain = best.tokens_per_s / best.plain_tokens_per_s
        needed = _LEAST_GAIN if self._is_speculating else _WAKE_GAIN
        return best.lengths if self._expected_gain > needed else np.zeros_like(best.lengths)

    def _priced(self, sequences: Seq[Sequence], num_possible: Ints, row_seconds: Floats) -> Ints:
        """Set the price of a row, and return the lengths that those may have whose drafts are priced.

        A sequence of fixed length pays none: a price follows a clock.
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
        """Allocate to the cheapest method's sequences, to those of the two cheapest, and so on: one may be too slow."""
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

    def _leave_one(self, sequences: Seq[Sequence], lengths: Ints) -> None:
        """Now and then have one of several methods draft alone, to tell what each of them costs."""
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
        """The longest pass to expect, so that most are within the limit of what is given."""
        return self._max_pass_s / (1.0 + self._row_cost.noise)

    def _row_seconds(self, num_rows: int, num_drafts: int) -> Floats:
        """Return the seconds that `num_rows` to `num_rows + num_drafts` sampled rows add to a pass, `[M + 1]`."""
        optimism = _OPTIMISM if np.isinf(self._max_pass_s) else 0.0  # a limit is no place for trials
        beside = np.unique(self._prompt_rows)[:, None]
        weights = np.array([self._prompt_rows.count(rows) for rows in beside[:, 0].tolist()]) / len(self._prompt_rows)
        whole = self._row_cost.seconds(beside + np.arange(num_rows, num_rows + num_drafts + 1), optimism)
        added = np.maximum(whole - self._row_cost.seconds(beside, optimism), _LEAST_SHARE * whole)
        return weights @ added

    def _acceptance_of(self, sequences: Seq[Sequence], num_possible: Ints) -> Floats:
        """Return the chance that each draft stands, `[B, K]`; 0 where a sequence may have no draft."""
        names = [class_of(sequence) for sequence in sequences]
        acceptance = self._acceptance.of([sequence.request_id for sequence in sequences], names)
        lengths = [n if self._is_open(name) else 0 for n, name in zip(num_possible.tolist(), names, strict=True)]
        if min(lengths) < self._max_length:
            acceptance[self._positions >= np.array(lengths)[:, None]] = 0.0
        return acceptance

    def _probe(self, sequences: Seq[Sequence], lengths: Ints, num_possible: Ints, plain_s: float) -> None:
        """Give the sequence without drafts that has waited longest a draft of one token, if it has been saved for.

        The same sequence has the next pass's too, which costs what a draft costs while drafts are made.
        """
        self._probe_credit_s = min(
            self._probe_credit_s + self._num_rested * _PROBE_SHARE * plain_s, _MAX_SAVED * plain_s
        )
        idle = np.flatnonzero((lengths == 0) & (num_possible > 0)).tolist()
        probed, self._probed = self._probed, None
        if not idle:
            return
        second = next((index for index in idle if sequences[index].request_id == probed), None)
        if second is not None:
            lengths[second] = 1
            return
        least_s = _PROBE_SHARE * _MIN_PROBE_PERIOD * plain_s
        first = min(idle, key=lambda index: self._last_drafted[sequences[index].request_id])
        probe = AskedDrafts(0 if lengths.any() else 1, 1)
        expected_s = 2.0 * self._draft_costs.seconds({method_of(sequences[first]): probe})
        if self._probe_credit_s >= min(max(expected_s, least_s), _MAX_SAVED * plain_s):
            lengths[first] = 1
            self._probed = sequences[first].request_id
            self._probe_credit_s -= least_s  # and what its passes turn out to cost

    def _is_up_to_date(self, request_id: str) -> bool:
        """True if the draft of a request has at most the tokens of a few passes to read first, and no prompt."""
        num_missed = self._step - 1 - self._last_drafted.get(request_id, self._step)
        return self._acceptance.knows(request_id) and num_missed <= _FEW_MISSED

    def _observe_time(self, passes: Seq[DraftedPass], time: PassTime, num_prompt_rows: int, reads_missed: bool) -> None:
        """Learn from the time of a pass; that of drafts says nothing where a draft first read what it had missed."""
        asked = _asked(passes)
        num_proposed = sum(each.num_proposed for each in passes)
        num_rows = len(passes) + num_proposed
        self._row_cost.observe(num_prompt_rows + num_rows, time.target_s)
        if num_proposed == 0:
            self._num_steps_since_plain = 0
        if asked:
            if not self._is_speculating:  # a probe
                self._probe_credit_s -= time.draft_s + self._row_cost.at(num_rows) - self._row_cost.at(len(passes))
            if not reads_missed:
                self._draft_costs.observe(asked, time.draft_s)
        members: dict[str, list[DraftedPass]] = {}
        for each in passes:
            members.setdefault(class_of(each.sequence), []).append(each)
        expected_s, shares = self._draft_costs.seconds(asked), self._draft_costs.shares(asked)
        draft_s = min(time.draft_s, _MAX_SURPRISE * expected_s) if expected_s > 0.0 else time.draft_s
        for name, part in members.items():
            method = method_of(part[0].sequence)
            own = sum(each.num_asked for each in part) / asked[method].num_tokens if method in asked else 0.0
            own_s = own * shares.get(method, 0.0) * draft_s
            step = self._class_step(part, num_rows, num_prompt_rows, PassTime(draft_s, time.target_s), own_s)
            is_drafting = self._is_speculating and any(each.num_asked > 0 for each in part)
            self._gate(name).observe(step, len(passes), is_drafting=is_drafting)

    def _class_step(
        self, part: Seq[DraftedPass], num_rows: int, num_prompt_rows: int, time: PassTime, own_s: float
    ) -> ClassStep:
        """Return a class's part of a step, of which its drafts took `own_s`.

        The target's time without the class's drafts goes by the ratio of the costs.
        """
        proposed = sum(each.num_proposed for each in part)
        whole_s, prompts_s = self._row_cost.at(num_prompt_rows + num_rows), self._row_cost.at(num_prompt_rows)
        plain_s = self._row_cost.at(num_prompt_rows + num_rows - proposed)
        least_s = _LEAST_SHARE * whole_s
        added = max(whole_s - prompts_s, least_s) / whole_s  # of the pass's time: what its sampled rows added
        share = max(plain_s - prompts_s, least_s) / max(whole_s - prompts_s, least_s)
        target_s = added * min(time.target_s, _MAX_SURPRISE * whole_s)
        return ClassStep(
            num_sequences=len(part),
            num_tokens=sum(each.num_accepted + 1 for each in part),
            seconds=target_s + time.draft_s,
            plain_seconds=target_s * share + time.draft_s - own_s,
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
    """True where the drafts of a sequence know their chances."""
    return method_of(sequence) == SpeculationMethod.SUFFIX


def class_of(sequence: Sequence) -> str:
    """Return the class of requests that should fare alike: by their method, and by greedy or sampled."""
    return f"{method_of(sequence)}-{kind_of(is_greedy=sequence.is_greedy)}"


def _longest_s(num_sequences: int, row_seconds: Floats) -> float:
    """Return how long drafts may make a pass of so many sequences, whatever they promise."""
    return (_LONGEST if num_sequences == 1 else LONGEST_BESIDE) * float(row_seconds[0])


def _asked(passes: Seq[DraftedPass]) -> dict[str, AskedDrafts]:
    """Return what a pass asked for, by method."""
    numbers: dict[str, list[int]] = {}
    for each in passes:
        if each.num_asked > 0:
            numbers.setdefault(method_of(each.sequence), []).append(each.num_asked)
    return {method: AskedDrafts(max(asked), sum(asked)) for method, asked in numbers.items()}


def kind_of(*, is_greedy: bool) -> str:
    """Return the part of a class's name that is not its method."""
    return "greedy" if is_greedy else "sampled"
