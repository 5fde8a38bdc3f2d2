"""The demo target with a draft of another tokenizer: drafts are accepted, and none changes a token."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.contenders.prompts import held_out_prompts
from bench.speculation.foreign_draft import DEMO, foreign_tokenizer, generate
from engine.config import DraftVocabulary
from models.fixtures.transplant import transplant
from models.training.corpus import collect

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def foreign_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft, moved to 2,048 tokens learned from a few files."""
    folder = tmp_path_factory.mktemp("draft")
    texts = [document.text for document in collect().training if document.is_test][:20]
    transplant(DEMO / "draft", foreign_tokenizer(2048, texts), folder)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_foreign_draft_is_often_right_and_changes_no_token(foreign_draft: Path, temperature: float) -> None:
    prompts = held_out_prompts(DEMO / "target", 2)
    plain = generate(prompts, temperature, NUM_TOKENS)
    for vocabulary in (DraftVocabulary.INTERSECTION, DraftVocabulary.TEXT):
        drafted = generate(prompts, temperature, NUM_TOKENS, foreign_draft, vocabulary)
        assert drafted.texts == plain.texts
        assert drafted.tokens_per_pass > 1.1
