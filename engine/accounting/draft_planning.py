"""Plans the shapes and methods of an engine's drafts; an adaptive configuration learns them from earlier passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.accounting.ahead_choice import AheadChoice
from engine.accounting.cost_model import DENSE, ExpertReads
from engine.accounting.counters import DraftCounters, TimeTotals
from engine.accounting.goodput import GoodputMeter
from engine.accounting.length_policy import LengthPolicy
from engine.accounting.rates import RateMeter
from engine.accounting.record import PassRecord
from engine.accounting.request_limits import MethodChooser, draft_rule, is_adaptive
from engine.config import SpeculationConfig
from engine.sequence.sequence import DraftRule, Sequence, SequenceStatus
from protos.messages import GenerateRequest


class DraftPlanning:
    """The draft rules of a deployment and their policy, owned by the engine's thread.

    Attributes:
        policy: plans each pass; None if K is fixed.
    """

    def __init__(self, config: SpeculationConfig, experts: ExpertReads = DENSE) -> None:
        self._config = config
        self._chooser = MethodChooser(config.choices, self._goodput)
        self.policy = _length_policy(config, experts) if is_adaptive(config) else None

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

    def forget_draft(self) -> None:
        """Discard the measurements of drafts, since another model makes them now."""
        if self.policy is not None:
            self.policy.forget_draft()

    def on_pass(self, record: PassRecord) -> None:
        """Update the policy with a committed pass, then set the draft lengths of the next one."""
        if self.policy is None:
            return
        began_s = time.perf_counter()
        self.policy.on_pass(record)
        # After a pass issued ahead, the earlier plan is still unused, unless yet another pass is underway.
        if not record.is_ahead or record.is_followed:
            sequences = [each.sequence for each in record.passes]
            set_lengths(self.policy, [each for each in sequences if each.status is SequenceStatus.RUNNING])
        self.policy.charge(time.perf_counter() - began_s)

    def _goodput(self, method: str, kind: str) -> float | None:
        return None if self.policy is None else self.policy.goodput(method, kind)


def _length_policy(config: SpeculationConfig, experts: ExpertReads) -> LengthPolicy:
    max_pass_s = float("inf") if config.target_itl_s is None else config.target_itl_s
    num_nodes = config.tree.num_nodes if config.tree else 0
    ahead = AheadChoice() if config.can_draft_ahead else None
    return LengthPolicy(config.num_tokens, config.max_num_tokens, max_pass_s, experts, num_nodes, ahead)


def set_lengths(policy: LengthPolicy, sequences: Seq[Sequence]) -> None:
    """Set the shapes of drafts in the next pass, which samples all of `sequences`.

    A sequence with a fixed length keeps its shape, and pays no price: both depend on a clock.
    """
    for sequence, size in zip(sequences, policy.sizes(sequences), strict=True):
        sequence.drafts_ahead = policy.is_ahead
        if not sequence.has_fixed_length:
            sequence.draft_allowance, sequence.node_allowance = size
            sequence.least_chance = policy.least_chance


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
