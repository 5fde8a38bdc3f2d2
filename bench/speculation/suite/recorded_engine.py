"""An engine, with the verifier that gives recorded answers and the proposer within a run's reach."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.speculation.suite.recorded_verifier import RecordedVerifier
from engine.config import SpeculationConfig
from engine.engine_core import EngineCore
from engine.proposer import Proposer
from engine.sequence.request_tokens import DraftRule
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """`proposer` is the core's own."""

    core: EngineCore
    verifier: RecordedVerifier
    proposer: Proposer
    speculation: SpeculationConfig

    def remember(self, request: GenerateRequest, answer: Seq[int]) -> None:
        """Let the proposer see a request that ended with this answer, as if it had been served here."""
        rule = DraftRule(self.speculation.num_tokens, self.speculation.verify, self.speculation.method)
        sequence = Sequence(request, rule, arrival_s=0.0)
        if sequence.num_draft_tokens > 0:
            self.proposer.open(sequence)
            sequence.append(answer)
            self.proposer.close(request.request_id)
