"""Linear layers with weights of 8, 6 or 4 bits: fewer bytes per step where a step's cost is reading weights.

Each output's inputs are rounded in groups: of 32, as in llama.cpp's blocks, or of 64 in int8, which has precision to
spare. A group has a scale, and in int4 also a base or a zero. Rows are rounded to 8 bits in the same groups, with a
base where the weights are int8. Real models have a few inputs a thousand times as large as the rest
(arXiv:2402.17762): one scale per row would round the rest away. Sums within a group are exact, and groups are added in
the order of the inputs, so a row's result does not depend on other rows.

Products run on our own kernel (`engine.model.linear.native_quantized`). The last product, from states to logits, has
6 bits where the others have 4. The served distribution follows from the quantized weights; everything above this
file is exact with respect to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from engine.batch.indexing import has_triton
from engine.config import Quantization
from engine.model.checkpoint.unread_weight import QuantizedWeight, UnreadWeight, joined_quantized, read_weight
from engine.model.linear.native_product import check_product, probe_rows
from engine.model.linear.native_quantized import (
    NativeQuantizedProduct,
    PackedPart,
    has_quantized_kernels,
    packed_part,
)
from engine.model.linear.packed_linear import Linear, LinearFactory, linear_of, plain_factory, weight_of
from engine.model.linear.rounding import (
    GROUP_SIZE,
    LONG_GROUP_SIZE,
    has_these_numbers,
    times_of,
    to_int4,
    to_int4_with_bases,
    to_int6,
    to_int8_groups,
)
from engine.model.linear.weight_store import OUTPUTS, converted, parts_of
from protos.errors import ConfigError

if TYPE_CHECKING:
    from engine.model.linear.triton_few_bits import UnpackedPart

LEAST_CAPABILITY = (8, 0)  # of GPUs with bfloat16 products


def _int8_group_size(weight: Tensor) -> int:
    """Return 64; 32 if a group of 64 is not whole, or if groups of 32 keep the weight's numbers (from Q8_0)."""
    if weight.shape[1] % LONG_GROUP_SIZE:
        return GROUP_SIZE
    parts = (weight[:1], *parts_of(weight))
    return GROUP_SIZE if all(map(_is_kept, parts)) else LONG_GROUP_SIZE


def _is_kept(weight: Tensor) -> bool:
    return torch.equal(to_int8_groups(weight, GROUP_SIZE).dequantized().to(weight.dtype), weight)


def quantizer(
    weight: Tensor, quantization: Quantization, *, is_head: bool = False
) -> Callable[[Tensor], QuantizedWeight] | None:
    """Return the function that rounds outputs of `weight` [out, in]; None if the weight is served as it is.

    Args:
        weight: of any floating dtype.
        quantization: of the model.
        is_head: the weight yields the logits. It would cause most of int4's loss, and more than other weights with
            groups of 64. (It is multiplied by the last rows of a prompt only.) Numbers of few bits that it has already
            stay as they are.
    """
    is_narrow = len(weight) < OUTPUTS  # a gate, or a choice of experts: few bytes, and much follows from them
    if quantization is Quantization.NONE or is_narrow or not _has_groups(weight):
        return None
    times = times_of(weight)
    eight, four = partial(to_int8_groups, group_size=GROUP_SIZE, times=times), partial(to_int4_with_bases, times=times)
    if quantization is Quantization.INT4 and not is_head:
        return four if times or has_these_numbers(weight, four) else to_int4
    if quantization is Quantization.INT4:
        return eight if times or has_these_numbers(weight, eight) else to_int6
    if is_head or times:
        return eight
    return partial(to_int8_groups, group_size=_int8_group_size(weight))


def _has_groups(weight: Tensor) -> bool:
    has_whole = weight.ndim == 2 and weight.numel() > 0 and weight.shape[1] % GROUP_SIZE == 0
    return has_whole and can_quantize(weight.device)


def linear_factory(
    quantization: Quantization, dtype: torch.dtype | None = None, *, is_head: bool = False
) -> LinearFactory:
    """Return the function that packs a weight [out, in] and a bias [out] for rows of `dtype`; None for the weight's."""
    if quantization is Quantization.NONE:
        return linear_of if dtype is None else plain_factory(dtype)
    return partial(_quantized_linear, quantization, is_head, dtype=dtype)


def gpu_linear_factory(
    quantization: Quantization, dtype: torch.dtype, *, is_head: bool = False, is_deterministic: bool = False
) -> LinearFactory:
    """Return `linear_factory` for a GPU, which reads weights of few bits as stored, or as `quantization` rounds them.

    `is_deterministic`: a row's bits do not depend on other rows.
    """
    # Not at the top: processes without a GPU may have no Triton, and need none.
    from engine.model.linear.triton_few_bits import UnpackedPart

    unpacked = None if is_deterministic else UnpackedPart()
    return partial(_linear_on_gpu, quantization, is_head, unpacked, dtype=dtype)


def _linear_on_gpu(
    quantization: Quantization,
    is_head: bool,
    unpacked: UnpackedPart | None,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Linear:
    """Multiply by few bits, with a buffer for parts of weights; without one a row does not depend on other rows."""
    dtype = dtype or weight.dtype
    from engine.model.linear.triton_few_bits import FewBitsProduct
    from engine.model.linear.triton_product import TritonProduct

    stored = weight.quantized() if isinstance(weight, UnreadWeight) else None
    if stored is None or quantization is not Quantization.NONE:
        weight = read_weight(weight)
        round_ = quantizer(weight, quantization, is_head=is_head)
        stored = None if round_ is None else joined_quantized([round_(rows) for rows in weight.split(4096)])
    if stored is not None:
        return FewBitsProduct(stored, bias, dtype, unpacked)
    weight = read_weight(weight)
    return TritonProduct(weight.to(dtype), bias) if unpacked is None else linear_of(weight, bias, dtype)


def can_quantize(device: torch.device) -> bool:
    """True if this process has kernels for the device: a processor with AVX2, or a GPU with Triton."""
    return has_quantized_kernels() if device.type == "cpu" else reads_few_bits(device)


def check_can_quantize(option: str, kind: Quantization, device: torch.device, remedy: str = "set it to 'none'") -> None:
    """Raise ConfigError if this process has no kernels for the device."""
    if not can_quantize(device):
        raise ConfigError(
            f"{option} is {str(kind)!r}, which needs our kernels: on a processor with AVX2 (compiled at "
            f"install), or Triton and a GPU of compute capability 8.0; it runs on {device}; {remedy}"
        )


def reads_few_bits(device: torch.device) -> bool:
    """True if products on a device read weights of 4 and 8 bits as they are stored: a GPU from Ampere on."""
    if device.type != "cuda" or not has_triton():
        return False
    # A process that checks a configuration has no card; the target's asks its own.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@contextmanager
def dequantized(model: PreTrainedModel, quantization: Quantization) -> Iterator[None]:
    """In this block, the linear layers of `model` multiply by their quantized weights with plain torch in float32.

    The shards of a quantized model are compared with the result.
    """
    head = model.get_output_embeddings()
    changed = []
    for module in model.modules():
        weight = weight_of(module)
        round_ = None if weight is None else quantizer(weight, quantization, is_head=module is head)
        if weight is not None and round_ is not None:
            module.forward = partial(_plain_product, module, weight, round_)  # shadows the class's until deleted
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _plain_product(module: nn.Module, weight: Tensor, round_: Callable[[Tensor], QuantizedWeight], x: Tensor) -> Tensor:
    bias: Tensor | None = module.bias if isinstance(module.bias, Tensor) else None
    outputs = [F.linear(x.float(), round_(part).dequantized()) for part in parts_of(weight)]
    product = torch.cat(outputs, dim=-1)
    return (product if bias is None else product + bias.float()).to(x.dtype)


def _quantized_linear(
    quantization: Quantization, is_head: bool, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Linear:
    """Round, pack and check a few outputs at a time, in the processor's cache and without a copy of `weight`."""
    if reads_few_bits(weight.device):
        return _linear_on_gpu(quantization, is_head, None, weight, bias, dtype)
    weight = read_weight(weight)
    round_ = quantizer(weight, quantization, is_head=is_head)
    if round_ is None:
        return linear_of(weight, bias, dtype)
    rows = probe_rows(weight.shape[1])
    expected: list[Tensor] = []  # of the first outputs of each part: dequantizing takes longer than rounding
    checked: list[Tensor] = []

    def pack(outputs: Tensor) -> tuple[PackedPart, Tensor, int]:
        part = round_(outputs)
        return packed_part(part), F.linear(rows, part.first(OUTPUTS).dequantized()), len(outputs)

    def parts() -> Iterator[PackedPart]:
        begin = 0
        for part, some, num_outputs in converted(pack, weight):
            expected.append(some)
            checked.append(torch.arange(begin, begin + some.shape[-1]))
            begin += num_outputs
            yield part

    product = NativeQuantizedProduct.of_parts(weight.shape[0], parts())
    # Rows are rounded to 8 bits; errors of 0.01 were seen.
    check_product(product(rows)[:, torch.cat(checked)], torch.cat(expected, dim=-1), 0.05)
    return product if bias is None else product.with_bias(bias)
