"""Linear layers with int8 or int4 weights: fewer bytes per step where a step's cost is reading weights.

A weight has a scale (int4: and a base) for every 32 inputs of an output, as in llama.cpp's Q8_0 and Q4_1, or for 64
of int8, which has precision to spare. Rows are rounded to 8 bits in the same groups, with a base where the weights
have none. Real models have a few inputs a thousand times as large as the rest (arXiv:2402.17762): one scale
per row would round the rest away. Sums within a group are exact, and groups are added in the order of the inputs: a
row's result does not depend on other rows.

Products run on our own kernel (`engine.model.linear.native_quantized`). The last product, from states to logits, stays
int8 where the others are int4. The served distribution follows from the quantized weights; everything above this
file is exact with respect to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
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
    GROUP_SIZE,
    LONG_GROUP_SIZE,
    NativeQuantizedProduct,
    PackedPart,
    has_quantized_kernels,
    packed_part,
)
from engine.model.linear.packed_linear import Linear, LinearFactory, linear_of, plain_factory, weight_of
from engine.model.linear.weight_store import OUTPUTS, converted, parts_of

if TYPE_CHECKING:
    from engine.model.linear.triton_few_bits import UnpackedPart

LEAST_CAPABILITY = (8, 0)  # of GPUs with bfloat16 products
_TINY = 2.0**-24  # float16's smallest number: a scale is never zero
_HUGE = torch.finfo(torch.float16).max
_TIMES = (-8, *range(7, 0, -1), *range(8, 16))  # of a step in the greatest number of a group


def _int8_group_size(weight: Tensor) -> int:
    """Return 64, or 32 where that keeps a weight as it is (it was Q8_0) or groups of 64 are not whole."""
    if weight.shape[1] % LONG_GROUP_SIZE:
        return GROUP_SIZE
    parts = (weight[:1], *parts_of(weight))
    return GROUP_SIZE if all(map(_is_kept, parts)) else LONG_GROUP_SIZE


def _is_kept(weight: Tensor) -> bool:
    return torch.equal(to_int8_groups(weight, GROUP_SIZE).dequantized().to(weight.dtype), weight)


def to_int8_groups(weight: Tensor, group_size: int, times: Seq[int] = ()) -> QuantizedWeight:
    """Round a weight [out, in] to -127 to 127 of a scale per `group_size` inputs.

    Groups keep their numbers where these are multiples of one (`_steps_of`).
    """
    groups = weight.detach().float().unflatten(1, (-1, group_size))
    scales = _float16(groups.abs().amax(dim=-1) / 127).clamp_(min=_TINY)
    if times:
        scales = torch.where((steps := _steps_of(groups, times)) == 0, scales, steps)
    numbers = (groups / scales[..., None]).round_().clamp_(-127, 127)
    return QuantizedWeight(numbers.to(torch.int8).flatten(1), scales)


def to_int4(weight: Tensor, times: Seq[int] = ()) -> QuantizedWeight:
    """Round a weight [out, in] to levels 0 to 15 between the least and the greatest number of each group.

    Groups keep their numbers where these are multiples of one (`_steps_of`) within 15 of it.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP_SIZE))
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)  # three times as fast as aminmax
    bases = _float16(lowest)
    scales = _float16((highest - bases) / 15).clamp_(min=_TINY)
    if times:
        steps = _steps_of(groups, times)
        least, most = torch.stack((lowest / steps, highest / steps)).round_().aminmax(dim=0)
        first = torch.where((least >= -8) & (most <= 7), -8.0, least)  # as Q4_0's: its base is exact
        is_kept = (steps != 0) & (most - least <= 15)
        scales, bases = torch.where(is_kept, steps, scales), torch.where(is_kept, _float16(first * steps), bases)
    levels = ((groups - bases[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    return QuantizedWeight(levels.to(torch.int8).flatten(1), scales, bases)


def _steps_of(groups: Tensor, times: Seq[int]) -> Tensor:
    """Return the number that all of a group [..., size] are multiples of, the greatest one of `times`; 0 without one.

    Weights of GGUF's Q4_0, of GPTQ and AWQ of 4 bits, and of MXFP4 (of halves) are such multiples.
    """
    extremes, rest = _extremes(groups).flatten(), groups.flatten(0, -2)
    steps, places = torch.zeros_like(extremes), torch.arange(len(extremes), device=groups.device)
    for most in times:  # the likeliest come first
        step = _float16(extremes / most)
        off = (rest / step[:, None]).round_().mul_(step[:, None]).sub_(rest).abs_().amax(dim=-1)
        steps[places] = torch.where(off == 0, step, 0)  # NaN for zeros
        is_left = off > 0
        if not is_left.any():
            break
        rest, extremes, places = rest[is_left], extremes[is_left], places[is_left]
    return steps.view(groups.shape[:-1])


def _extremes(groups: Tensor) -> Tensor:
    """Return the number of each group that is farthest from zero."""
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    return torch.where(highest >= -lowest, highest, lowest)


def _times(weight: Tensor) -> tuple[int, ...]:
    """Return what to look for in groups of `weight`, the likeliest first; () if its first output has other numbers."""
    groups = weight[:1].detach().float().unflatten(1, (-1, GROUP_SIZE))
    groups = groups[groups.any(dim=-1)]
    steps = _steps_of(groups, _TIMES)
    if not steps.numel() or not bool(steps.all()):
        return ()
    found = Counter((_extremes(groups) / steps).round_().int().tolist())
    return tuple(sorted(_TIMES, key=lambda most: -found[most]))


def quantizer(
    weight: Tensor, quantization: Quantization, *, is_head: bool = False
) -> Callable[[Tensor], QuantizedWeight] | None:
    """Return the function that rounds outputs of `weight` [out, in] as they are served; None where they are kept.

    Args:
        weight: of any floating dtype.
        quantization: of the model.
        is_head: the weight yields the logits. It would cause most of int4's loss, and more than other weights with
            groups of 64. (It is multiplied by the last rows of a prompt only.)
    """
    is_narrow = len(weight) < OUTPUTS  # a gate, or a choice of experts: few bytes, and much follows from them
    if quantization is Quantization.NONE or is_narrow or not _has_groups(weight):
        return None
    times = _times(weight)
    if quantization is Quantization.INT4 and not is_head:
        return partial(to_int4, times=times)
    if is_head or times:
        return partial(to_int8_groups, group_size=GROUP_SIZE, times=times)
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
    """`linear_factory` for a GPU: weights of few bits are multiplied as they are stored, or as `quantization` rounds.

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


def reads_few_bits(device: torch.device) -> bool:
    """True if products on a device read weights of 4 and 8 bits as they are stored: a GPU from Ampere on."""
    if device.type != "cuda" or not has_triton():
        return False
    # A process that checks a configuration has no card; the target's asks its own.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@contextmanager
def dequantized(model: PreTrainedModel, quantization: Quantization) -> Iterator[None]:
    """Within it, the linear layers of `model` multiply by their quantized weights, in float32 and by plain torch.

    The shards of a quantized model are compared with it.
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
    """Round, pack and check some outputs at a time: they stay in the cache, and no whole copy of `weight` is made."""
    if reads_few_bits(weight.device):
        return _linear_on_gpu(quantization, is_head, None, weight, bias, dtype)
    weight = read_weight(weight)
    round_ = quantizer(weight, quantization, is_head=is_head)
    if round_ is None:
        return linear_of(weight, bias, dtype)
    rows = probe_rows(weight.shape[1])
    expected: list[Tensor] = []

    def pack(outputs: Tensor) -> tuple[PackedPart, Tensor]:
        part = round_(outputs)
        return packed_part(part.numbers, part.scales, part.bases), F.linear(rows, part.dequantized())

    def parts() -> Iterator[PackedPart]:
        for part, product_of_part in converted(pack, weight):
            expected.append(product_of_part)
            yield part

    product = NativeQuantizedProduct.of_parts(weight.shape[0], parts())
    # Rows are rounded to 8 bits; errors of 0.01 were seen.
    check_product(product(rows), torch.cat(expected, dim=-1), 0.05)
    return product if bias is None else product.with_bias(bias)


def _float16(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_HUGE, _HUGE).half().float()
