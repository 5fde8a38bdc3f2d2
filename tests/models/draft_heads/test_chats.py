"""Chats that heads are trained on: the target's own greedy words, and held-out ones that no window has."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.demo_pair.card import DEMO_FOLDER
from models.draft_heads.chats import HELD_OUT_EVERY, Chats, answered, made_prompts, read_prompts
from protos.errors import ConfigError

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def chats() -> Chats:
    return answered(DEMO_FOLDER / "target", ["Write a function.", "Write a class.", "Write a function."], NUM_TOKENS, 0)


def test_an_answer_is_the_targets_own(chats: Chats) -> None:
    """Chats of one prompt share it, and greedy answers to it (every second one is sampled) are equal."""
    assert chats.texts[0] == chats.texts[2]
    alone = answered(DEMO_FOLDER / "target", ["Write a function."], NUM_TOKENS, 0)
    assert alone.texts == chats.texts[:1]


def test_what_is_measured_with_is_never_trained_on() -> None:
    texts = [[index] * 70 for index in range(2 * HELD_OUT_EVERY)]
    windows, prompts = Chats(texts).windows(9, 0).windows(400, 9), Chats(texts).held_out(8)
    assert set(windows.flatten().tolist()).isdisjoint(prompts.flatten().tolist())
    assert set(prompts[:, 0].tolist()) == {0, HELD_OUT_EVERY}


def test_too_few_chats_are_refused(chats: Chats) -> None:
    with pytest.raises(ConfigError, match="more --chats"):
        chats.windows(4096, 0)
    with pytest.raises(ConfigError, match="more --chats"):
        Chats([[1, 2]]).held_out(1)


def test_prompts_are_read_from_lines_and_from_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('Say hello.\n\n{"prompt": "Add 1 and 2."}\n{"turns": ["Tell a story.", "Go on."]}\n')
    assert read_prompts(file) == ["Say hello.", "Add 1 and 2.", "Tell a story."]
    for bad in ("", '{"text": "x"}', "{broken"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="prompts"):
            read_prompts(file)


def test_made_prompts_are_all_different_and_hang_on_the_seed() -> None:
    assert len(set(made_prompts(0))) == len(made_prompts(0)) > 500
    assert sorted(made_prompts(0)) == sorted(made_prompts(1))
    assert made_prompts(0) != made_prompts(1)
