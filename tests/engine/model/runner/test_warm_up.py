"""Warming up runs every size of pass within the model's positions and leaves nothing that a request could see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import CacheConfig, ModelConfig
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.warm_up import warm_up
from engine.span import Span
from tests.engine.fixtures.families import SERVED, write_family


class FakeRunner:
    block_size = 16

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.spans: list[Span] = []

    def forward(self, spans: list[Span]) -> Tensor:
        self.spans += spans
        return torch.zeros(1, 1)


@pytest.mark.parametrize(("max_model_len", "max_rows"), [(4096, 128), (50, 32), (2, 2)])
def test_warm_up_passes_of_every_size_stay_within_the_positions(max_model_len: int, max_rows: int) -> None:
    runner = FakeRunner(max_model_len)
    warm_up(runner.forward, runner.block_size, runner.max_model_len)
    sizes = [len(span.token_ids) for span in runner.spans]
    assert sizes == [1 << index for index in range(len(sizes))]
    assert sizes[-1] == max_rows
    for span in runner.spans:
        assert span.end <= max_model_len
        assert len(span.block_table) * 16 >= span.end


def test_warming_up_changes_no_logit(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    runner = ModelRunner(ModelConfig(str(tmp_path), dtype="float32", device="cpu"), CacheConfig(num_blocks=1))
    span = Span([5, 6, 7], 0, [0], 3)
    before = runner.forward([span])
    warm_up(runner.forward, runner.block_size, runner.max_model_len)
    assert torch.equal(runner.forward([span]), before)
