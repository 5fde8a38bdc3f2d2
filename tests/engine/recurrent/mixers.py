"""The recurrent layers of random models, computed by our kernels and by transformers' modules over a pool of states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.batch.span import Span, SpanStates
from engine.kv_cache.state_pool import StatePool
from engine.model.attention_probe import record_layers
from engine.recurrent.mixer import KernelMixer
from engine.recurrent.state_pass import PooledStates
from tests.engine.fixtures.hybrids import HYBRIDS

NUM_ROWS = 26
SPANS = [
    (3, SpanStates(1, {1: 6, 3: 7})),
    (1, SpanStates(2, {1: 8})),
    (20, SpanStates(0, {2: 10, 20: 9})),
    (2, SpanStates(3, {})),
]
Spans = list[tuple[int, SpanStates]]
CPU = torch.device("cpu")


class Mixers:
    """The recurrent layers of a random model."""

    def __init__(
        self,
        name: str,
        use_kernels: Callable[[nn.Module, torch.dtype], int],
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        changes: Mapping[str, int] = {},
    ) -> None:
        """`use_kernels` lets kernels compute; `changes` are other numbers of the configuration."""
        torch.manual_seed(0)
        config = HYBRIDS[name]()
        for key, value in changes.items():
            setattr(config, key, value)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
            parameter.data = parameter.data.bfloat16().float()  # the same numbers in any dtype
        model.to(device, dtype)
        self.shapes = record_layers(model).states
        assert use_kernels(model, dtype) == len(self.shapes)
        for each in model.modules():
            if isinstance(each, torch.nn.Linear):  # torch's products of a row have other bits in other company
                setattr(each, "forward", partial(_by_rows, each.weight, each.bias))  # noqa: B010 -- shadows it
        self.modules: list[Any] = [
            each for each in model.modules() if isinstance(vars(each).get("forward"), KernelMixer)
        ]
        self.dtype, self.device, self.hidden_size = dtype, device, model.config.hidden_size

    def rows(self, num_rows: int = NUM_ROWS) -> Tensor:
        generator = torch.Generator().manual_seed(num_rows)
        return torch.randn(1, num_rows, self.hidden_size, generator=generator).to(self.device, self.dtype)

    def pool(self) -> StatePool:
        pool = StatePool(self.shapes, 12, dtype=self.dtype, device=self.device)
        for part in (*pool.rows, *pool.matrices):
            if part is not None:
                part[1:6] = torch.randn(5, *part.shape[1:], generator=torch.Generator().manual_seed(1))
        return pool

    @torch.inference_mode()
    def mixed(self, layer: int, rows: Tensor, pool: StatePool, spans: Spans, *, is_ours: bool = True) -> Tensor:
        made = [Span(range(size), start=9, block_table=(), num_logits=0, states=states) for size, states in spans]
        module, states = self.modules[layer], PooledStates(made, pool).at(layer)
        forward = module.forward if is_ours else type(module).forward.__get__(module)
        mixed: Tensor = forward(rows, state_pass=states)
        return mixed


def check_company(mixers: Mixers) -> None:
    """Check that rows and states have the same bits in chunks and next to other spans."""
    rows, pool = mixers.rows(12), mixers.pool()
    whole = mixers.mixed(0, rows, pool, [(12, SpanStates(1, {12: 6}))])
    first, second = rows[:, :5], rows[:, 5:]
    parts = [
        mixers.mixed(0, first, pool, [(5, SpanStates(1, {5: 7}))]),
        mixers.mixed(0, torch.cat((second[:, :3], second), 1), pool, [
            (3, SpanStates(2, {})), (7, SpanStates(7, {4: 9, 7: 8}))
        ])[:, 3:],
    ]  # fmt: skip
    assert torch.equal(torch.cat(parts, 1), whole)
    for part in (pool.rows[0], pool.matrices[0]):
        assert part is None or torch.equal(part[8], part[6])


def _by_rows(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.cat([torch.nn.functional.linear(row, weight, bias) for row in x.split(1, dim=1)], dim=1)
