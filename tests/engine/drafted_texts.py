"""What a small engine answers to a few seeded requests, and that drafts do not change it."""

from __future__ import annotations

from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.proposer.ngram import NgramProposer
from protos.messages import GenerateRequest, SamplingParams


def check_drafts_change_no_token(model: ModelConfig, cache: CacheConfig) -> None:
    """With n-gram drafts and without any, greedy and sampled, together in one engine."""
    config = EngineConfig(model, cache, speculation=SpeculationConfig(3))
    plain, drafted = (_texts(EngineCore.from_config(config, proposer)) for proposer in (None, NgramProposer()))
    assert drafted == plain


def _texts(core: EngineCore) -> dict[str, list[int]]:
    for index in range(3):
        sampling = SamplingParams(seed=index, temperature=0.7 * index, max_tokens=40)
        core.add(GenerateRequest(str(index), tuple(range(1 + index, 20)), sampling))
    texts: dict[str, list[int]] = {str(index): [] for index in range(3)}
    while core.has_work:
        for chunk in core.step():
            texts[chunk.request_id] += chunk.token_ids
    return texts
