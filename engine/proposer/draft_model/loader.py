"""Loads a draft model with any tokenizer, for a draft process."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import CacheConfig, ModelConfig, SchedulerConfig, TreeConfig
from engine.proposer.draft_model.ahead_drafter import AheadDrafter
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.draft_model.text_proposer import TextProposer
from engine.proposer.vocab_mapping.choice import DraftVocabulary, choose_vocabulary
from engine.proposer.vocab_mapping.translation import SharedTokens


@dataclass(frozen=True, slots=True)
class Drafter:
    """A loaded draft model; `ahead` is set if it also drafts ahead of verification."""

    proposer: ModelProposer | TextProposer
    ahead: AheadDrafter | None = None


def load_drafter(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    target_path: str,
    tree: TreeConfig | None = None,
    *,
    is_ahead: bool = False,
) -> Drafter:
    """Load a draft model for the target at `target_path`.

    With `is_ahead` it also drafts ahead of verification.

    Raises:
        ConfigError: the model cannot be served, or does not fit the target.
    """
    choice = choose_vocabulary(target_path, model.path, needs_ids=is_ahead or tree is not None)
    if choice.vocabulary is DraftVocabulary.TEXT:
        return Drafter(TextProposer(ModelProposer.from_config(model, cache, scheduler), choice.require_pair()))
    translation, tokenizer_path = None, None
    if choice.vocabulary is DraftVocabulary.INTERSECTION:
        translation, tokenizer_path = SharedTokens(choice.require_pair()), target_path
    vocab_size = choice.target_tokens.vocab_size
    proposer = ModelProposer.from_config(
        model, cache, scheduler, vocab_size, tree, translation=translation, tokenizer_path=tokenizer_path
    )
    return Drafter(proposer, proposer.ahead_drafter() if is_ahead else None)
