"""Packed experts equal the stock modules by the same numbers; a row's result does not depend on other rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from engine.accounting.cost_model import DENSE
from engine.batch.span import Span
from engine.config import Quantization
from engine.model.forward_batch import ForwardBatch
from engine.model.linear.packed_experts import (
    PackedExperts,
    expert_reads,
    expert_weights,
    experts_of,
    pack_experts,
    widen_shared_gates,
)
from engine.model.linear.packed_linear import weight_of
from engine.model.linear.quantized_linear import linear_factory, quantizer
from engine.model.paged_model import PagedModel
from engine.native.library import Instructions, native_instructions
from protos.errors import ConfigError
from tests.engine.fixtures.families import PLAIN
from tests.engine.fixtures.native_kernels import needs_float_kernels
from tests.engine.model.test_more_families import random_model, small_config

pytestmark = [needs_float_kernels, pytest.mark.usefixtures("any_instructions")]

NUM_EXPERTS, TOP = 8, 3
HIDDEN, BETWEEN = 96, 128
SIZES = {**PLAIN, "hidden_size": HIDDEN, "num_hidden_layers": 1, "head_dim": 8, "num_experts_per_tok": TOP}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=BETWEEN),
    "a function of torch": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=BETWEEN, hidden_act="leaky_relu"
    ),
    "gpt_oss": lambda: GptOssConfig(
        **{**SIZES, "intermediate_size": BETWEEN}, num_local_experts=NUM_EXPERTS, swiglu_limit=1.5
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
        layers_block_type=["moe"],
        n_routed_experts=NUM_EXPERTS,
        moe_intermediate_size=BETWEEN,
    ),
    "gemma4_text": lambda: Gemma4TextConfig(
        **{key: value for key, value in SIZES.items() if key != "num_experts_per_tok"},
        enable_moe_block=True,
        num_experts=NUM_EXPERTS,
        top_k_experts=TOP,
        vocab_size_per_layer_input=PLAIN["vocab_size"],
        moe_intermediate_size=BETWEEN,
    ),
}
MAX_ERROR = {Quantization.NONE: 1e-5, Quantization.INT8: 0.03, Quantization.INT4: 0.03}  # of rows rounded to 8 bits
NUM_ROWS = (0, 1, 2, 7, 40, 400)
MIXTURES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
)
MAX_LOGIT_ERROR = {Quantization.NONE: 1e-5, Quantization.INT8: 0.1, Quantization.INT4: 0.1}


def stock_model(family: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape).mul_(0.2).bfloat16())
    return model


def stock_experts(family: str) -> Any:
    [(_, experts)] = experts_of(stock_model(family))
    return experts


def round_weights(experts: Any, quantization: Quantization) -> None:
    for weight in expert_weights(experts):
        matrix = (weight.transpose(1, 2) if experts.is_transposed else weight).flatten(0, 1)
        if (round_ := quantizer(matrix, quantization)) is not None:
            numbers = round_(matrix).dequantized().unflatten(0, (len(weight), -1))
            weight.copy_(numbers.transpose(1, 2) if experts.is_transposed else numbers)


def routed(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=-1)[:, :TOP]
    return torch.randn(num_rows, HIDDEN, generator=generator), ids, torch.rand(num_rows, TOP, generator=generator)


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected).norm() / expected.norm()) if expected.numel() else 0.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", Quantization)
def test_packed_experts_are_the_stock_ones_of_the_same_numbers(family: str, quantization: Quantization) -> None:
    experts = stock_experts(family)
    packed = PackedExperts(experts, linear_factory(quantization, torch.float32))
    round_weights(experts, quantization)
    for num_rows in NUM_ROWS:
        rows = routed(num_rows)
        assert relative_error(packed(*rows), experts(*rows)) < MAX_ERROR[quantization]


@pytest.mark.parametrize("quantization", Quantization)
def test_bfloat16_rows_cost_their_own_roundings_only(quantization: Quantization) -> None:
    if quantization is Quantization.NONE and native_instructions() is Instructions.AVX2:
        pytest.skip("no kernel of bfloat16 rows by bfloat16 weights on AVX2")
    experts = stock_experts("qwen3_moe")
    packed = PackedExperts(experts, linear_factory(quantization, torch.bfloat16))
    round_weights(experts, quantization)
    rows, ids, weights = routed(40)
    result = packed(rows.bfloat16(), ids, weights)
    assert result.dtype is torch.bfloat16
    assert relative_error(result, experts(rows.bfloat16().float(), ids, weights)) < 0.03


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", Quantization)
def test_a_row_does_not_depend_on_the_rows_beside_it(family: str, quantization: Quantization) -> None:
    packed = PackedExperts(stock_experts(family), linear_factory(quantization, torch.float32))
    rows = routed(400)
    together = packed(*rows)
    for first, last in ((0, 1), (7, 8), (399, 400), (3, 20), (100, 300)):
        assert torch.equal(packed(*(each[first:last] for each in rows)), together[first:last])


def test_experts_of_unknown_numbers_are_skipped() -> None:
    packed = PackedExperts(stock_experts("qwen3_moe"), linear_factory(Quantization.INT8, torch.float32))
    rows, ids, weights = routed(20)
    ids[::2, 1] = NUM_EXPERTS
    weights_without = weights.clone()
    weights_without[::2, 1] = 0
    assert torch.equal(packed(rows, ids, weights), packed(rows, ids.clamp(max=NUM_EXPERTS - 1), weights_without))


def _swapped(tables: Tensor) -> None:
    one = len(tables) // NUM_EXPERTS
    tables[: 2 * one] = torch.cat((tables[one : 2 * one], tables[:one])).clone()


@pytest.mark.parametrize("mutant", ["scales", "weights"])
def test_a_neighbours_scales_or_row_weights_stop_the_start(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PackedExperts.__init__

    def pack_wrongly(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        if mutant == "scales":
            for product in self._products:
                _swapped(product._tables)

    def multiply_wrongly(self: Any, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return multiply(self, rows, ids, weights.roll(1, dims=0))

    multiply = PackedExperts.__call__
    monkeypatch.setattr(PackedExperts, "__init__", pack_wrongly)
    if mutant == "weights":
        monkeypatch.setattr(PackedExperts, "__call__", multiply_wrongly)
    model = stock_model("qwen3_moe")
    [(_, experts)] = experts_of(model)
    experts.gate_up_proj[1].mul_(10)  # two experts of unequal size
    with pytest.raises(ConfigError, match="differ from the plain ones"):
        pack_experts(model, linear_factory(Quantization.INT8, torch.float32))


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_experts_that_cannot_be_quantized_are_named(
    quantization: Quantization, caplog: pytest.LogCaptureFixture
) -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=48)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        pack_experts(model, linear_factory(quantization, torch.float32))
    [(_, experts)] = experts_of(model)
    assert isinstance(experts.gate_up_proj, torch.nn.Parameter)
    assert "1 layers of experts are not quantized, the first is model.layers.0.mlp.experts: their sizes" in caplog.text
    assert "(8, 96, 96) and (8, 96, 48)" in caplog.text


@torch.no_grad()
def rounded(model: Any, quantization: Quantization) -> Any:
    """`model` with the weights that a served one of this quantization multiplies by."""
    head, routed_weights = model.get_output_embeddings(), {id(experts) for _, experts in experts_of(model)}
    for module in model.modules():
        if id(module) in routed_weights:
            round_weights(module, quantization)
        elif (weight := weight_of(module)) is not None:
            round_ = quantizer(weight, quantization, is_head=module is head)
            if round_ is not None:
                module.weight = torch.nn.Parameter(round_(weight).dequantized(), requires_grad=False)
    return model


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("quantization", Quantization)
@torch.inference_mode()
def test_logits_of_a_mixture_are_transformers_of_the_same_numbers(family: str, quantization: Quantization) -> None:
    model = random_model(small_config(family))
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    text = torch.randint(3, 96, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    paged = PagedModel(copy.deepcopy(model), quantization)
    cache = paged.new_cache(num_blocks=4, block_size=16)
    first = paged.forward(ForwardBatch.of([Span(text[:25], 0, [0, 1, 2], 25)], cache)).clone()
    last = paged.forward(ForwardBatch.of([Span(text[25:], 25, [0, 1, 2], 15)], cache))
    wanted = rounded(model, quantization)(torch.tensor([text]), use_cache=False).logits[0]
    spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
    errors = (torch.cat((first, last)) - wanted).norm(dim=-1) / spread
    # A rounding may send a token to another expert.
    assert float(errors.median()) < MAX_LOGIT_ERROR[quantization]


def test_a_rows_reads_are_its_experts_and_everything_else_once() -> None:
    model = stock_model("qwen3_moe")
    routed = NUM_EXPERTS * 3 * HIDDEN * BETWEEN
    dense = sum(each.numel() for each in model.parameters()) - routed - model.get_input_embeddings().weight.numel()
    reads = expert_reads(model)
    assert reads.chance == TOP / NUM_EXPERTS
    assert reads.share == pytest.approx(routed * reads.chance / (routed * reads.chance + dense))
    assert expert_reads(random_model(small_config("llama"))) == DENSE


def test_a_shared_expert_has_the_same_weight_in_a_row_however_many_rows_there_are() -> None:
    """Torch computes the last of 50 numbers by another exp than the first 32."""

    class FirstNumber(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1]

    gate = FirstNumber()
    widen_shared_gates(nn.ModuleDict({"block": nn.ModuleDict({"shared_expert_gate": gate})}))
    rows = torch.randn(50, 1, generator=torch.Generator().manual_seed(0)).repeat(1, 32)
    alone = torch.cat([torch.sigmoid(gate(row[None])) for row in rows])
    assert torch.equal(torch.sigmoid(gate(rows)), alone)
