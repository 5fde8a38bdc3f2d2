"""The padded fixture: equal logits, even spreading, refusal to cut."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.padded_pair import build_fixture, pad_model, spread
from models.training.architecture import load_checkpoint


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


@torch.no_grad()
def test_a_published_model_keeps_its_logits_head_and_chat_template(tmp_path: Path) -> None:
    source = tmp_path / "source"
    trained = tiny_model().bfloat16()
    trained.save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / name).write_text(name)
    build_fixture(source, tmp_path / "out", 3, 160)
    padded, ids = load_checkpoint(tmp_path / "out", torch.bfloat16), torch.randint(0, 64, (1, 16))
    torch.testing.assert_close(padded(ids).logits, trained(ids).logits, rtol=0.0, atol=0.2)  # bfloat16
    assert padded.config.tie_word_embeddings
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
