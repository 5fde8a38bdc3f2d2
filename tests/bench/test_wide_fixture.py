"""The wide fixture: every size grows, the distribution stays, and tokens that were never trained are never chosen."""

import pytest
import torch

from bench.wide_fixture import WideShape, widen_model
from tests.bench.test_padded_pair import tiny_model

SHAPE = WideShape(64, 5, 160, 12, 3, 16, 100, 512)


@torch.no_grad()
def test_widening_leaves_the_trained_logits_alone_and_refuses_the_others() -> None:
    trained, ids = tiny_model(), torch.randint(0, 64, (2, 24))
    wide = widen_model(trained, SHAPE, torch.float32)
    config = wide.config
    sizes = (config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.num_attention_heads)
    assert sizes == (64, 5, 160, 12)
    assert (config.num_key_value_heads, config.head_dim, config.vocab_size) == (3, 16, 100)
    logits = wide(ids).logits
    torch.testing.assert_close(logits[..., :64], trained(ids).logits, rtol=0.0, atol=2e-4)
    assert logits[..., 64:].max() < logits[..., :64].min() - 50


def test_a_shape_that_does_not_hold_the_trained_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads"):
        widen_model(tiny_model(), WideShape(64, 5, 160, 4, 1, 16, 100), torch.float32)
    with pytest.raises(ValueError, match="head_dim is no multiple"):
        widen_model(tiny_model(), WideShape(64, 5, 160, 12, 3, 12, 100), torch.float32)
