"""The part of a look that times chains of drafts: steps that the host plans one by one, and recorded ones."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from unittest import mock

from bench.gpu.card import MODES, NUM_SEQUENCES, K, Look
from engine.batch.draft import Draft
from engine.config import CacheConfig, GraphConfig, GraphKind, ModelConfig, ModelDtype, SchedulerConfig
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sequence.batch import UnscheduledQuery
from engine.sequence.sequence import DraftRule, RequestTokens
from protos.messages import GenerateRequest, SamplingParams, VerifyMode

_CONTEXT = 1024


def look_at_drafts(look: Look) -> None:
    """Draft K tokens after the same texts again and again: one pass over the last token, and K - 1 steps."""
    drafter = _load_drafter(look)
    for num_sequences in _batches(look):
        for name, sampling in MODES.items():
            queries = [_query(look, f"{name} {index}", index, sampling) for index in range(num_sequences)]
            for query in queries:
                drafter.open(query.sequence)
            drafter.propose(queries)  # reads the prompts
            recorded, us = _drafted(look, drafter, queries)
            with mock.patch.object(ModelRunner, "draft_steps", return_value=None):
                plain, plain_us = _drafted(look, drafter, queries)
            equal = sum(ours == theirs for ours, theirs in zip(recorded, plain, strict=True))
            look.add("drafts", mode=name, sequences=num_sequences, us=us, one_by_one_us=plain_us, equal=equal)
            for query in queries:
                drafter.close(query.sequence.request_id)


def _drafted(look: Look, drafter: ModelProposer, queries: Seq[UnscheduledQuery]) -> tuple[list[Draft], int]:
    """Return the drafts and their time in microseconds."""
    return drafter.propose(queries), round(1e6 * look.seconds(partial(drafter.propose, queries)))


def _query(look: Look, request_id: str, first: int, sampling: SamplingParams) -> UnscheduledQuery:
    num_tokens = 64 if look.is_smoke else _CONTEXT
    prompt = tuple(100 + (first + place) % 900 for place in range(num_tokens))
    request = GenerateRequest(request_id, prompt, sampling)
    return UnscheduledQuery(RequestTokens(request, DraftRule(K, VerifyMode.COUPLED)), K)


def _batches(look: Look) -> tuple[int, ...]:
    return (1, NUM_SEQUENCES) if look.is_smoke else (1, NUM_SEQUENCES, 32)


def _load_drafter(look: Look) -> ModelProposer:
    """Load the model once more, as a draft."""
    kind = GraphKind.AUTO if look.has_gpu else GraphKind.EAGER
    batches = _batches(look)
    graphs = GraphConfig(kind, batches=batches, row_counts=(1, K + 1))
    dtype = ModelDtype(str(look.dtype).removeprefix("torch."))
    model = ModelConfig(str(look.folder), dtype, look.device.type, graphs=graphs)
    limits = SchedulerConfig(max_num_sequences=max(batches), max_tokens_per_step=max(batches) * _CONTEXT)
    return ModelProposer.from_config(model, CacheConfig(num_blocks=max(batches) * (_CONTEXT // 16 + 2)), limits)
