"""Builds the proposer and the verifier of an engine from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.approximate.steps import StepSpeculation, step_speculation
from engine.config import EngineConfig, SpeculationConfig
from engine.model.loader import tokenizer_file
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import HeadProposer, Proposer
from engine.proposer.dispatch.methods import proposer_of
from engine.proposer.dispatch.no_proposer import NoProposer
from engine.proposer.hidden_state.factory import head_proposer, self_proposer
from engine.sampling.sampler import Sampler
from engine.scheduler.async_scheduling import AsyncScheduling, Overlap
from engine.scheduler.scheduler import Scheduler
from engine.verifier.verifier import Verifier
from protos.messages import SpeculationMethod


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
        overlap: issues passes ahead; None if each pass waits for the commit of the last one. It does not support heads
            or steps.
    """

    proposer: Proposer | StepSpeculation
    verifier: Verifier | StepSpeculation
    config: SpeculationConfig
    head: HeadProposer | None = None
    steps: StepSpeculation | None = None
    overlap: Overlap | None = None


def load_speculation(
    config: EngineConfig,
    runner: ModelRunner,
    scheduler: Scheduler,
    proposer: Proposer | None,
    step_writer: Proposer | None,
    models: Mapping[str, Proposer],
) -> Speculation:
    """Return the parts that draft and verify. The configuration's head drafts if it has one, otherwise `proposer`."""
    speculation, verifier, steps = config.speculation, Verifier(Sampler()), None
    head = head_proposer(runner, speculation.tree)
    own = head or self_proposer(runner, speculation.tree)
    if own is not None and config.head is not None:
        assert proposer is None, "one of the two drafts"
        proposer = proposer_of(speculation.methods, own, SpeculationMethod(config.head.kind), models)
    elif proposer is not None and speculation.steps is not None and speculation.can_draft:
        tokenizer, writer = tokenizer_file(config.model.path), step_writer or proposer
        steps = step_speculation(speculation.steps, tokenizer, runner.vocab_size, proposer, writer, verifier)
    can_overlap = config.overlap and runner.can_overlap and head is None and steps is None
    overlap = AsyncScheduling(runner, scheduler, verifier) if can_overlap else None
    if proposer is None:
        return Speculation(NoProposer(), verifier, speculation.without_drafts(), overlap=overlap)
    return Speculation(steps or proposer, steps or verifier, speculation, head, steps, overlap)
