"""Engines that take turns on one target, which gives recorded answers at the full cost of its passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.draft import depths
from engine.config import CacheConfig, HeadConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.dispatch.guarded_proposer import NoProposer
from engine.proposer.hidden_state.factory import LiveHead
from engine.sampling.sampler import Sampler
from engine.scheduler.scheduler import Scheduler
from engine.sequence.request_tokens import DraftRule
from engine.sequence.sequence import Sequence
from engine.verifier.verifier import Verifier
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask
from protos.messages import GenerateRequest


class RecordedVerifier(Verifier):
    """Verifies against the recorded answer of a request, or against the logits if it has none.

    Attributes:
        answers: by request id; its owner fills it.
    """

    answers: Mapping[str, Seq[int]] = {}

    @torch.inference_mode()
    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Verify; each row of a recorded request gets probability 1 for the recorded token at its depth."""
        for task in tasks:
            answer = self.answers.get(task.sequence.request_id)
            if answer is not None:
                _write_recorded(logits, task, answer)
        return super().verify(logits, tasks)


def _write_recorded(logits: Tensor, task: VerifyTask, answer: Seq[int]) -> None:
    num_committed = len(task.sequence.token_ids) - task.sequence.num_prompt_tokens
    parents = task.draft.parents or range(-1, len(task.draft.token_ids) - 1)
    for row, depth in enumerate((0, *depths(parents))):
        place = num_committed + depth
        if task.first_row + row < len(logits) and place < len(answer):
            logits[task.first_row + row] = -torch.inf
            logits[task.first_row + row, answer[place]] = 0.0


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """An engine core with access to its verifier and its proposer."""

    core: EngineCore
    verifier: RecordedVerifier
    proposer: Proposer
    speculation: SpeculationConfig

    def remember(self, request: GenerateRequest, answer: Seq[int]) -> None:
        """Show the proposer a finished request with this answer, as if it had been served here."""
        rule = DraftRule(self.speculation.num_tokens, self.speculation.verify, self.speculation.method)
        sequence = Sequence(request, rule, arrival_s=0.0)
        if sequence.num_draft_tokens > 0:
            self.proposer.open(sequence)
            sequence.append(answer)
            self.proposer.close(request.request_id)


class SharedTarget:
    """Weights, KV pool and prefix cache, shared by engines so that prompts are prefilled once.

    Each run has an engine of its own, which knows nothing of earlier texts but their KV.
    """

    def __init__(self, model: ModelConfig, cache: CacheConfig, head: HeadConfig | None = None) -> None:
        self._runner = ModelRunner(model, cache, head=head)
        self._blocks = BlockManager(self._runner.num_blocks, self._runner.block_size, self._runner.model_version)

    def engine(self, speculation: SpeculationConfig, make_proposer: Callable[[], Proposer | None]) -> RecordedEngine:
        """Return an engine whose drafts come from the target's head, or else from the made proposer."""
        scheduler = Scheduler(SchedulerConfig(), self._blocks, self._runner.max_model_len)
        verifier = RecordedVerifier(Sampler())
        head = None if self._runner.head is None else LiveHead(self._runner, speculation.tree)
        proposer = head or make_proposer() or NoProposer()
        core = EngineCore(self._runner, scheduler, Speculation(proposer, verifier, speculation, head))
        return RecordedEngine(core, verifier, proposer, speculation)
