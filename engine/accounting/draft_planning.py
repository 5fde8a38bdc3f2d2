"""Plans the shapes, methods and times of an engine's drafts; an adaptive configuration learns from earlier passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.accounting.cost_model import DENSE, ExpertReads, size_class
from engine.accounting.counters import DraftCounters, TimeTotals
from engine.accounting.goodput import GoodputMeter
from engine.accounting.length_policy import LengthPolicy
from engine.accounting.rates import RateMeter
from engine.accounting.record import PassRecord
from engine.accounting.request_limits import MethodChooser, draft_rule, is_adaptive
from engine.config import SpeculationConfig
from engine.sequence.sequence import DraftRule, Sequence, SequenceStatus
from protos.messages import GenerateRequest

logger = logging.getLogger(__name__)

_BLOCK = 16  # steps
_SETTLING = 2  # first steps of a block, whose drafts were made in the way before
_KNOWN = 2  # blocks of a way
_PERIOD = 24  # blocks between two of the slower way: a way that takes 20% longer costs 0.8%
_FADE = 0.8  # of a way's earlier blocks, per block
_LEAST_GAIN = 1.02  # of a change


class AheadChoice:
    """Chooses by measurement whether a draft model works ahead of verdicts, where the deployment allows it.

    Ahead, the draft of a likely outcome is ready before its verdict. But any other outcome waits for the step that
    runs, and the work may take cores or bandwidth that the target needs. Only the speed of whole steps shows all of
    this, so each way has blocks of steps in turn until both are known; then the faster one has them, and the other one
    block now and then. Ahead or not, a draft is the same, so the choice changes no text.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Ways] = {}  # by class of batch sizes
        self._ways = _Ways(0)

    @property
    def is_ahead(self) -> bool:
        """True if drafts are made ahead of the next verdicts, in batches of about the last step's size."""
        return self._ways.is_ahead

    def observe(self, record: PassRecord) -> None:
        """Learn from a step; one without drafts, with prompts or with a reasoning step is left out."""
        num_sequences = len(record.passes)
        has_drafts = any(each.num_requested for each in record.passes)
        if not has_drafts or record.num_prompt_rows > 0 or not all(each.outcome.is_exact for each in record.passes):
            return
        number = size_class(num_sequences)
        if number != self._ways.size_class:
            self._ways = self._sizes.setdefault(number, _Ways(number))
            self._ways.begin()
        num_tokens = sum(each.num_accepted + 1 for each in record.passes)
        self._ways.observe(num_tokens / num_sequences, record.times.total_s)


class _Ways:
    """Both ways at about one size of batch: blocks so far, and decayed tokens per sequence and seconds."""

    def __init__(self, number: int) -> None:
        self.size_class = number
        self.is_ahead = True
        self._best = True
        self._num_blocks = 0
        self._num_of = {True: 0, False: 0}
        self._sums = {True: (0.0, 0.0), False: (0.0, 0.0)}
        self.begin()

    def begin(self) -> None:
        """Begin a block; a block that has not ended counts for nothing."""
        self._num_steps, self._tokens, self._seconds = 0, 0.0, 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        self._num_steps += 1
        if self._num_steps > _SETTLING:
            self._tokens += num_tokens
            self._seconds += seconds
        if self._num_steps == _BLOCK:
            self._end()

    def _end(self) -> None:
        """Count the block, and choose the way of the next one."""
        tokens, seconds = self._sums[self.is_ahead]
        self._sums[self.is_ahead] = _FADE * tokens + self._tokens, _FADE * seconds + self._seconds
        self._num_of[self.is_ahead] += 1
        self._num_blocks += 1
        self.begin()
        fewest = min(self._num_of, key=self._num_of.__getitem__)
        if self._num_of[fewest] < _KNOWN:
            self.is_ahead = not self.is_ahead
            return
        best, other = self._speed(self._best), self._speed(not self._best)
        if other > _LEAST_GAIN * best:
            self._best = not self._best
            way, size = "ahead of" if self._best else "after", 1 << max(0, self.size_class - 1)
            logger.info("batches of about %d: drafts %s verdicts are %.2f times as fast", size, way, other / best)
        self.is_ahead = self._best if self._num_blocks % _PERIOD else not self._best

    def _speed(self, is_ahead: bool) -> float:
        tokens, seconds = self._sums[is_ahead]
        return tokens / seconds if seconds else 0.0


class DraftPlanning:
    """The draft rules of a deployment and their policy, owned by the engine's thread.

    Attributes:
        policy: plans each pass; None if K is fixed.
    """

    def __init__(self, config: SpeculationConfig, experts: ExpertReads = DENSE) -> None:
        self._config = config
        self._chooser = MethodChooser(config.choices, self._goodput)
        self.policy = _length_policy(config, experts) if is_adaptive(config) else None
        self._ahead = AheadChoice() if config.can_draft_ahead else None
        self._running: Seq[Sequence] = ()  # of the last pass, to be planned for

    @property
    def speedups(self) -> dict[str, float]:
        """Measured speedup over no speculation, by class of requests."""
        return {} if self.policy is None else self.policy.speedups

    def rule(self, request: GenerateRequest) -> DraftRule:
        """Return the draft rule of a new request."""
        return draft_rule(request, self._config, self._chooser)

    def is_open(self, sequence: Sequence) -> bool:
        """False while the policy has switched drafts off for the sequence's class."""
        return self.policy is None or self.policy.is_open(sequence)

    def is_resting(self, sequence: Sequence) -> bool:
        """True while plans give no drafts, since they do not pay; a sequence with a fixed length has its drafts."""
        return self.policy is not None and self.policy.is_resting and not sequence.has_fixed_length

    def forget_draft(self) -> None:
        """Discard the measurements of drafts, since another model makes them now."""
        if self.policy is not None:
            self.policy.forget_draft()
            self._ahead = None if self._ahead is None else AheadChoice()

    def on_pass(self, record: PassRecord) -> None:
        """Update the policy with a committed pass, then set the draft lengths of the next one."""
        if self.policy is None:
            return
        began_s = time.perf_counter()
        self.policy.on_pass(record)
        if self._ahead is not None:
            self._ahead.observe(record)
        # After a pass issued ahead, the earlier plan is still unused, unless yet another pass is underway.
        if not record.is_ahead or record.is_followed:
            sequences = [each.scheduled.sequence for each in record.passes]
            self._running = [each for each in sequences if each.status is SequenceStatus.RUNNING]
            is_ahead = self._ahead is not None and self._ahead.is_ahead
            first = next(iter(self._running), None)
            if first is None or first.drafts_ahead != is_ahead or not self.policy.holds_for(self._running):
                set_lengths(self.policy, self._running)
                for each in self._running:
                    each.drafts_ahead = is_ahead
        self.policy.charge(time.perf_counter() - began_s)

    def plan_ahead(self) -> None:
        """Make the next plan if it is due. Call it when a draft model has its tokens: the plan costs no time then."""
        if self.policy is None or not self._running:
            return
        began_s = time.perf_counter()
        self.policy.plan_ahead(self._running)
        self._running = ()
        self.policy.charge(time.perf_counter() - began_s)

    def _goodput(self, method: str, kind: str) -> float | None:
        return None if self.policy is None else self.policy.goodput(method, kind)


def _length_policy(config: SpeculationConfig, experts: ExpertReads) -> LengthPolicy:
    max_pass_s = float("inf") if config.target_itl_s is None else config.target_itl_s
    return LengthPolicy(config.num_tokens, config.max_num_tokens, max_pass_s, experts, config.tree_nodes)


def set_lengths(policy: LengthPolicy, sequences: Seq[Sequence]) -> None:
    """Set the shapes of drafts in the next pass, which samples all of `sequences`.

    A sequence with a fixed length keeps its shape, and pays no price: both depend on a clock.
    """
    for sequence, size in zip(sequences, policy.sizes(sequences), strict=True):
        if not sequence.has_fixed_length:
            sequence.draft_allowance, sequence.node_allowance = size
            sequence.row_prices = policy.row_prices


class Accounting:
    """The observers of an engine's passes. They take each record of a committed pass in the order of the list.

    They run on the engine's thread, before the tokens go to the proposer.

    Args:
        config: the limits of drafts.
        rates: the meter, which the scheduler and the prefill decision read too.
        times_passes: see `GoodputMeter`.
        experts: what rows read of the target's experts.
    """

    def __init__(
        self, config: SpeculationConfig, rates: RateMeter, *, times_passes: bool, experts: ExpertReads = DENSE
    ) -> None:
        self.times = TimeTotals()
        self.rates = rates
        self.goodput = GoodputMeter(times_passes=times_passes)
        self.counters = DraftCounters(config)
        self.planning = DraftPlanning(config, experts)
        parts = (self.times, self.rates, self.goodput, self.counters, self.planning)
        self.observers: list[Callable[[PassRecord], None]] = [part.on_pass for part in parts]
