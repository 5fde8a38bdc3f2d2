"""Checks a pair's models on the node where it would start, while another pair may still serve there."""

from __future__ import annotations

from actors.settings import DraftSettings, PairSettings
from actors.target.code_draft import check_code
from engine.model.loader import load_config
from engine.model.runner.outline import check_outline
from engine.proposer.vocab_mapping.choice import choose_vocabulary
from engine.proposer.vocab_mapping.translation import SameVocabulary
from engine.recurrent.limits import check_draft, check_target


def check_start(settings: PairSettings, *, is_on_gpu: bool) -> list[str]:
    """Check that a pair can start, as far as the headers of its files show; return notes about the target.

    Raises:
        ConfigError: the target, its head, a draft or its code cannot be served here, or they do not fit each other.
    """
    engine = settings.engine
    max_model_len = engine.scheduler.max_model_len
    outline = check_outline(engine.model, engine.cache, max_model_len, engine.head, is_on_gpu=is_on_gpu)
    if outline.keeps_states:
        check_target(engine)
    if settings.draft.code:
        check_code(settings.draft.code)
    for each in settings.of_drafts.values():
        _check_draft(settings, each.draft, is_on_gpu=is_on_gpu)
    return outline.notes


def _check_draft(settings: PairSettings, draft: DraftSettings, *, is_on_gpu: bool) -> None:
    assert draft.model is not None, "the draft is a model"
    assert draft.cache is not None, "a draft model has a pool"
    if check_outline(draft.model, draft.cache, is_on_gpu=is_on_gpu).keeps_states:
        check_draft(draft.model.path, settings.engine.speculation.tree)
    choice = choose_vocabulary(settings.engine.model.path, draft.model.path)
    if choice.pair is None:
        draft_size = int(load_config(draft.model.path).get_text_config().vocab_size)
        SameVocabulary(draft_size, choice.target_tokens.vocab_size)
