"""A draft model for tests: a proposer over a tiny checkpoint, its parts, and the same drafts computed from scratch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from engine.batch import ScheduledSequence
from engine.block_manager import BlockManager
from engine.config import CacheConfig, ModelConfig
from engine.model_runner import ModelRunner
from engine.proposer.model import ModelProposer
from engine.row import Row
from engine.sampler import Sampler
from engine.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, VerifyMode
from tests.engine.checkpoints import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=400)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, presence_penalty=0.5, seed=3, max_tokens=400)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A proposer, and its parts for the tests to look at."""

    proposer: ModelProposer
    runner: ModelRunner
    blocks: BlockManager

    def draft(self, sequences: Seq[Sequence], num_tokens: int = 4) -> list[tuple[int, ...]]:
        drafts = self.proposer.propose([share(sequence, num_tokens) for sequence in sequences])
        self.check()
        return [draft.token_ids for draft in drafts]

    def check(self) -> None:
        self.proposer.mirrors.check_integrity()


def new_drafter(
    folder: Path, *, num_blocks: int = 64, max_tokens_per_round: int = 256, target_vocab_size: int | None = None
) -> Drafter:
    runner = ModelRunner(ModelConfig(str(folder), dtype="float32"), CacheConfig(num_blocks=num_blocks, block_size=4))
    blocks = BlockManager(runner.num_blocks, runner.block_size, runner.model_version)
    proposer = ModelProposer(
        runner, blocks, max_tokens_per_round=max_tokens_per_round, target_vocab_size=target_vocab_size
    )
    return Drafter(proposer, runner, blocks)


def new_sequence(
    drafter: Drafter,
    name: str,
    length: int = 11,
    sampling: SamplingParams = GREEDY,
    verify: VerifyMode = VerifyMode.COUPLED,
) -> Sequence:
    generator = torch.Generator().manual_seed(sum(name.encode()) + length)
    prompt = tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist())
    request = GenerateRequest(name, prompt, sampling)
    sequence = Sequence(request, num_draft_tokens=4, verify=verify, arrival_s=0.0)
    drafter.proposer.open(sequence)
    return sequence


def share(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, num_tokens)


class Oracle:
    """The draft model run from scratch for every token, with transformers' own forward."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        self._sampler = Sampler()

    def draft(self, sequence: Sequence, num_tokens: int = 4) -> tuple[int, ...]:
        draft_ids: list[int] = []
        row = Row(sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, 0, draft_ids)
        for _ in range(num_tokens):
            with torch.inference_mode():
                logits = self._model(torch.tensor([[*sequence.token_ids, *draft_ids]])).logits[:, -1]
            draft_ids += self._sampler.pick(self._sampler.process(logits, [row]), [row]).tolist()
        return tuple(draft_ids)
