"""Sequences and scheduled sequences for tests of any package."""

from __future__ import annotations

from typing import Any

from engine.sampling.grammar import GrammarMatcher
from engine.sequence.batch import ScheduledSequence
from engine.sequence.request_tokens import DraftRule
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, VerifyMode

SAMPLING = SamplingParams(seed=5, max_tokens=1000)


def make_sequence(
    request_id: str = "a", prompt: tuple[int, ...] = (1, 2, 3), sampling: SamplingParams = SAMPLING, **options: Any
) -> Sequence:
    """A sequence of a new request; `options` are passed to `sequence_of`."""
    return sequence_of(GenerateRequest(request_id, prompt, sampling), **options)


def sequence_of(
    request: GenerateRequest,
    num_drafts: int = 4,
    verify: VerifyMode = VerifyMode.COUPLED,
    *,
    arrival_s: float = 0.0,
    method: str = SpeculationMethod.NONE,
    matcher: GrammarMatcher | None = None,
) -> Sequence:
    """A sequence of the request, with nothing computed yet."""
    return Sequence(request, DraftRule(num_drafts, verify, method), arrival_s, matcher)


def make_scheduled(sequence: Sequence, num_drafts: int = 4, num_nodes: int = 0) -> ScheduledSequence:
    """A sequence that decodes: its last token is computed, with room for drafts."""
    return ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, num_drafts, num_nodes)
