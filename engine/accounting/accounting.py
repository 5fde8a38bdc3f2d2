"""Everything that an engine counts and learns, in one place."""

from __future__ import annotations

from typing import Protocol

from engine.accounting.cost_model import DENSE, ExpertReads
from engine.accounting.counters import DraftCounters, TimeTotals
from engine.accounting.draft_planning import DraftPlanning
from engine.accounting.goodput import GoodputMeter
from engine.accounting.rates import RateMeter
from engine.accounting.record import PassRecord
from engine.config import SpeculationConfig


class PassObserver(Protocol):
    """Learns from the engine's passes, on the engine's thread."""

    def on_pass(self, record: PassRecord) -> None:
        """Take the record of a committed pass. Its tokens go to the proposer later."""


class Accounting:
    """The observers of an engine's passes. They take each record in the order of the list.

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
        self.observers: list[PassObserver] = [self.times, self.rates, self.goodput, self.counters, self.planning]
