"""The proposer and the verifier of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.approximate.steps import StepSpeculation
from engine.config import SpeculationConfig
from engine.proposer import Proposer
from engine.proposer.hidden_state.factory import LiveHead
from engine.scheduler.async_scheduling import Overlap, SyncScheduling
from engine.verifier.verifier import Verifier


@dataclass(frozen=True, slots=True)
class Speculation:
    """The proposer and the verifier of an engine.

    Attributes:
        proposer: makes the drafts.
        verifier: accepts or rejects them.
        config: the limits of drafts.
        head: reads the model's hidden states. It is the proposer, or the proposer calls it.
        steps: speculates on reasoning steps, and is then both `proposer` and `verifier`; None if all requests are
            exact.
        overlap: issues passes ahead, or waits for each commit. It does not support heads or steps.
    """

    proposer: Proposer | StepSpeculation
    verifier: Verifier | StepSpeculation
    config: SpeculationConfig
    head: LiveHead | None = None
    steps: StepSpeculation | None = None
    overlap: Overlap = field(default_factory=SyncScheduling)
