"""Warming up leaves nothing that a request could see; a sharded model records its passes with `on` only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from engine.batch.span import Span
from engine.config import CacheConfig, GraphConfig, GraphKind, ModelConfig
from engine.model.runner.gpu_passes import has_recordings, warm_up
from engine.model.runner.model_runner import ModelRunner
from engine.sampling import sampler, truncation
from tests.engine.fixtures.families import SERVED, write_family


class WarmUpRunner:
    block_size = 16

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.spans: list[Span] = []

    def forward(self, spans: list[Span]) -> Tensor:
        self.spans += spans
        return torch.zeros(1, 40)


@pytest.mark.parametrize(("max_model_len", "max_rows"), [(4096, 128), (50, 32), (2, 2)])
def test_warm_up_passes_of_every_size_stay_within_the_positions(max_model_len: int, max_rows: int) -> None:
    runner = WarmUpRunner(max_model_len)
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


def test_each_variant_of_the_samplers_kernels_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    from engine.sampling import triton_draw, triton_nucleus

    launched: list[tuple[object, ...]] = []

    def note(module: Any, name: str) -> None:
        function = getattr(module, name)

        def noted(*arguments: Any, **named: Any) -> Tensor:
            given = [*arguments, *named.values()]
            kinds = (tuple, triton_draw.RowEdits)  # a row's noise is a plain tuple
            launched.append((name, *(any(type(each) is kind for each in given) for kind in kinds)))
            return cast(Tensor, function(*arguments, **named))

        monkeypatch.setattr(module, name, noted)

    for module in (sampler, truncation):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    note(triton_draw, "draw")
    note(triton_draw, "edit")
    note(triton_nucleus, "draw_nucleus")
    note(triton_nucleus, "nucleus_thresholds")
    runner = WarmUpRunner(64)
    warm_up(runner.forward, runner.block_size, runner.max_model_len)
    assert set(launched) == {
        *(("draw", has_noise, has_edits) for has_noise in (False, True) for has_edits in (False, True)),
        ("draw_nucleus", True, False),
        ("draw_nucleus", True, True),
        ("edit", False, True),
        ("nucleus_thresholds", False, False),
    }


@pytest.mark.parametrize(
    ("kind", "num_ranks", "are_recorded"),
    [(GraphKind.AUTO, 1, True), (GraphKind.AUTO, 2, False), (GraphKind.ON, 2, True), (GraphKind.OFF, 1, False)],
)
def test_a_sharded_model_records_its_passes_with_on_only(kind: GraphKind, num_ranks: int, are_recorded: bool) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    from engine.attention.triton_attention import TritonAttention

    graphs, device = GraphConfig(kind, row_counts=(1,)), torch.device("cuda")
    found = has_recordings(graphs, device, TritonAttention, num_ranks=num_ranks, is_recordable=True)
    assert found is are_recorded
