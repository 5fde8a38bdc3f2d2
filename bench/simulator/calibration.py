"""The speed at which a trace must be replayed for a wanted load."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from bench.simulator.baselines import POLICIES
from bench.simulator.replay import Fleet, replay
from bench.simulator.trace import Trace

_NUM_ROUNDS = 8
_TOLERANCE = 0.002
_CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Calibration:
    """A trace at its new pace, and the share of time for which random routing then keeps the fleet's prefill busy."""

    trace: Trace
    wanted_load: float
    measured_load: float

    @property
    def is_reached(self) -> bool:
        """True if the wanted load is there.

        It may not be: a session waits for its answers at any pace, so a few sessions cannot fill many workers.
        """
        return self.error < _CLOSE

    @property
    def error(self) -> float:
        """The load's distance from the wanted one, as a fraction of it."""
        return abs(self.measured_load / self.wanted_load - 1.0)


def at_load(trace: Trace, fleet: Fleet, load: float) -> Calibration:
    """`trace` at the pace at which random routing keeps the fleet's prefill busy for `load` of the time.

    Without sessions the load is inversely proportional to the factor on arrival times; sessions that wait for their
    answers bend that, so each round takes its slope from the two before (secant method, on logarithms).
    """
    machines = fleet.num_workers + fleet.num_prefill_workers
    factor = trace.num_tokens / (fleet.rates.prefill_tokens_per_s * machines * load * trace.span_s)
    tried: list[Calibration] = []
    for _ in range(_NUM_ROUNDS):
        stretched = trace.stretched(factor)
        tried.append(Calibration(stretched, load, replay(stretched, POLICIES["random"], fleet).load(machines)))
        if tried[-1].error < _TOLERANCE:
            break
        factor *= (load / tried[-1].measured_load) ** (1.0 / _slope(tried))
    return min(tried, key=lambda trial: trial.error)


def _slope(tried: list[Calibration]) -> float:
    """Return the slope of log load over log factor, kept within the range that sessions allow."""
    if len(tried) < 2:
        return -1.0
    stretch = log(tried[-1].trace.span_s / tried[-2].trace.span_s)
    rise = log(tried[-1].measured_load / tried[-2].measured_load)
    return min(max(rise / stretch, -1.5), -0.2)
