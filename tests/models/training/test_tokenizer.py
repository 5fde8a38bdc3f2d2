"""The tokenizer: round trips, ids of the special tokens, chat template."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from models.training.architecture import SPECIAL_TOKENS, load_tokenizer, render_chat, save_tokenizer, train_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "    \t\n\n\n   trailing  ",
    "naïve 漢字 🐍 \x00\x7f",
    "",
    "a\r\nb",
    "12345678 0x1F",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def f(x):\n    return x\n" * 20, "class A:\n    pass\n" * 20])


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_take_the_first_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]


def test_saving_and_loading_keeps_the_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path)
    assert load_tokenizer(tmp_path).encode(TEXTS[0]).ids == tokenizer.encode(TEXTS[0]).ids


def test_chat_renders_each_turn_and_opens_the_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (
        render_chat(messages, add_generation_prompt=True) == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    )
