"""The padded fixture: equal logits, even spreading, refusal to cut."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.padded_fixture import DEMO_TARGET, build_fixture, pad_model, spread


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def test_padding_leaves_the_logits_alone() -> None:
    trained, ids = tiny_model(), torch.randint(0, 64, (2, 24))
    padded = pad_model(trained, num_layers=7, mlp_size=160)
    assert padded.config.num_hidden_layers == 7
    torch.testing.assert_close(padded(ids).logits, trained(ids).logits, rtol=0.0, atol=1e-5)


def test_trained_layers_keep_their_order_among_the_extra_ones() -> None:
    assert spread(3, 7) == [0, None, 1, None, 2, None, None]
    assert spread(2, 2) == [0, 1]


def test_a_smaller_shape_is_refused_by_its_numbers() -> None:
    with pytest.raises(ValueError, match="2 layers"):
        pad_model(tiny_model(), num_layers=2, mlp_size=160)


def test_a_fixture_may_hold_longer_texts_than_it_was_trained_on(tmp_path: Path) -> None:
    trained = json.loads((DEMO_TARGET / "config.json").read_text())
    for num_positions in (None, 1 << 15):
        build_fixture(DEMO_TARGET, tmp_path, 13, 800, num_positions)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["max_position_embeddings"] == (num_positions or trained["max_position_embeddings"])
