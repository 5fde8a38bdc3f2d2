"""How fast a trace must be replayed for a wanted load."""

from __future__ import annotations

from bench.simulator.baselines import POLICIES
from bench.simulator.replay import Fleet, replay
from bench.simulator.trace import Trace

_NUM_ROUNDS = 6
_TOLERANCE = 0.002


def at_load(trace: Trace, fleet: Fleet, load: float) -> Trace:
    """`trace` at the pace at which random routing keeps the fleet's prefill busy for `load` of the arrivals' span.

    The work of random routing hardly depends on the speed of replay (only decode interference and cache timing do), so
    each round corrects the factor by the load it measured.
    """
    machines = fleet.num_workers + fleet.num_prefill_workers
    factor = trace.num_tokens / (fleet.rates.prefill_tokens_per_s * machines * load * trace.span_s)
    for _ in range(_NUM_ROUNDS):
        stretched = trace.stretched(factor)
        result = replay(stretched, POLICIES["random"], fleet)
        measured = result.work_s / (machines * result.span_s)
        if abs(measured / load - 1.0) < _TOLERANCE:
            return stretched
        factor *= measured / load
    return trace.stretched(factor)
