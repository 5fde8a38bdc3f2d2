"""The committed pair: loadable, small, and one vocabulary for both halves."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.training.architecture import CHAT_TEMPLATE, load_tokenizer

DEMO = Path(__file__).parents[3] / "models" / "demo"
SIZE_LIMIT_BYTES = 60_000_000


@pytest.mark.parametrize("half", ["target", "draft"])
def test_checkpoint_loads_and_answers(half: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / half, dtype=torch.bfloat16)
    ids = torch.tensor([load_tokenizer(DEMO / half).encode("import os\n").ids])
    assert model(ids).logits.shape[-1] == model.config.vocab_size == 4096
    assert model.config.max_position_embeddings == 8192


def test_both_halves_share_one_tokenizer() -> None:
    assert (DEMO / "target/tokenizer.json").read_bytes() == (DEMO / "draft/tokenizer.json").read_bytes()


def test_auto_tokenizer_carries_the_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.encode("x = 1\n") == load_tokenizer(DEMO / "target").encode("x = 1\n").ids


def test_the_pair_stays_under_its_size_limit() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < SIZE_LIMIT_BYTES
