"""Torch's attentions as yardsticks: each alone, so that none is measured in another's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.gpu.card import SMOKE_SHAPE

pytest.importorskip("triton", reason="the package triton is not installed")

from bench.gpu.attention_sweep import BATCH, YARDSTICKS, yardstick


def test_a_yardstick_is_measured_or_refused_by_name() -> None:
    shapes: list[torch.Size] = []

    def seconds(call: Callable[[], Tensor]) -> float:
        shapes.append(call().shape)
        return 2e-6

    lines = {name: yardstick(name, seconds, SMOKE_SHAPE, 64, 5, "cpu") for name in YARDSTICKS}
    for name, line in lines.items():
        assert (line["context"], line["rows"], line["kernel"]) == (64, 5, name)
        assert ("us" in line) != ("refused" in line), line
    # A processor has two of them; a refused one must not be computed by the next.
    computed = {name for name, line in lines.items() if line.get("us") == 2.0}
    assert computed == {"torch, contiguous, flash", "torch, contiguous, math"}
    assert shapes == [(BATCH, SMOKE_SHAPE.num_heads, 5, SMOKE_SHAPE.head_dim)] * 2
    assert "RuntimeError" in str(lines["torch, contiguous, cuDNN"]["refused"])
    assert "NotImplementedError" in str(lines["torch, pages of 16"]["refused"])


def test_the_pages_of_a_card_are_read_in_torchs_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch checks nothing of it before its kernel, which a processor lacks."""
    asked = []

    def attend(query: Tensor, keys: Tensor, values: Tensor, *numbers: object, **settings: object) -> Tensor:
        asked.append((query.shape, keys.shape, values.shape, settings["block_table"], settings["seqused_k"]))
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    line = yardstick("torch, pages of 16", lambda call: call().numel() * 0.0, SMOKE_SHAPE, 64, 5, "cpu")
    assert line.get("us") == 0.0, line
    query, keys, values, table, used = asked[0]
    heads, dim = SMOKE_SHAPE.num_heads, SMOKE_SHAPE.head_dim
    assert query == (BATCH * 5, heads, dim)
    assert keys == values == (BATCH * 5, 16, SMOKE_SHAPE.num_kv_heads, dim)  # 69 tokens are five pages
    assert isinstance(table, Tensor)
    assert isinstance(used, Tensor)
    assert sorted(table.flatten().tolist()) == list(range(BATCH * 5))
    assert used.tolist() == [69] * BATCH
