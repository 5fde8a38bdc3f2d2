"""Loads a pair's draft model, in its own process or the target's."""

from __future__ import annotations

from dataclasses import replace

from actors.settings import PairSettings
from engine.model.cuda_graphs.buckets import sized
from engine.proposer.draft_model.loader import Drafter, load_drafter

_PROMPT_SHARE = 4  # times the target's tokens per step: the draft prefills that many, and is still done sooner


def load_draft(settings: PairSettings) -> Drafter:
    """Load the draft model of a pair that has one.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the target.
    """
    engine, draft = settings.engine, settings.draft
    assert draft.model is not None, "the pair has a draft model"
    assert draft.cache is not None, "a draft model has a pool"
    limits = replace(engine.scheduler, max_tokens_per_step=_PROMPT_SHARE * engine.scheduler.max_tokens_per_step)
    return load_drafter(
        replace(draft.model, graphs=sized(draft.model.graphs, limits, engine.speculation)),
        draft.cache,
        limits,
        engine.model.path,
        draft.vocabulary,
        engine.speculation.tree,
        is_ahead=draft.is_ahead,
    )
