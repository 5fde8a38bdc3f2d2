"""Rounds weights to numbers of 8, 6 and 4 bits with tables for each group of inputs.

int4 has two forms. Where a weight has 16 levels in each group already (GGUF's Q4_0 and Q4_1, symmetric GPTQ), scales
and bases of 16 bits keep them: 5 bits a weight. All others get a byte for the scale and one for the zero, which are
searched for: 4.5 bits, with less error than rounding between the extremes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear.weight_store import OUTPUTS
from engine.native.library import Instructions, kernel, native_library

GROUP_SIZE = 32  # inputs that share a scale
LONG_GROUP_SIZE = 64  # the same in int8, where it halves the number of sums to scale
_TINY = 2.0**-24  # float16's smallest number: a scale is never zero
_HUGE = torch.finfo(torch.float16).max
_HALF_ULP = torch.finfo(torch.float16).eps / 2  # relative
_TIMES = (-8, *range(7, 0, -1), *range(8, 16))  # of a step in the greatest number of a group
_ENDS = (-32, -31, -33, -34, 31.5)  # numbers of 6 bits tried for a group's number farthest from zero
_LEAST_EXPONENT = 127 - 20  # of a byte's scale, as a float has it


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


def to_int6(weight: Tensor) -> QuantizedWeight:
    """Round a weight [out, in] to -32 to 31 of a scale per group; of a few scales the least sum of squares wins."""
    groups = weight.detach().float().unflatten(1, (-1, GROUP_SIZE))
    extremes = _extremes(groups)
    numbers, scales = torch.zeros_like(groups), torch.full_like(extremes, _TINY)
    fewest = torch.full_like(extremes, torch.inf)
    for end in _ENDS:
        tried = _float16(extremes / end)
        tried = torch.where(tried == 0, _TINY, tried)
        rounded = (groups / tried[..., None]).round_().clamp_(-32, 31)
        error = (rounded * tried[..., None]).sub_(groups).square_().sum(dim=-1)
        is_better = error < fewest
        fewest, scales = torch.where(is_better, error, fewest), torch.where(is_better, tried, scales)
        numbers = torch.where(is_better[..., None], rounded, numbers)
    return QuantizedWeight(numbers.to(torch.int8).flatten(1), scales, num_bits=6)


def to_int4(weight: Tensor) -> QuantizedWeight:
    """Round a weight [out, in] to levels 0 to 15 with a scale and a zero per group, one byte each.

    engine/native/products/fit.c describes the search.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP_SIZE)).contiguous()
    shape = groups.shape[:-1]
    # A machine that computes on a GPU may have no compiled kernels for its processor.
    has_kernel = groups.device.type == "cpu" and native_library(Instructions.AVX2) is not None
    levels, scales, zeros = (_fitted if has_kernel else _fitted_by_torch)(groups.view(-1, GROUP_SIZE))
    return QuantizedWeight(
        levels.view(weight.shape).to(torch.int8),
        scale_of(scales.view(shape)),
        zeros=zeros.view(shape).float() / 16,
        num_bits=4,
    )


def scale_of(byte: Tensor) -> Tensor:
    """Return the scales of bytes: five bits of exponent and three of mantissa."""
    return ((byte.int() << 20) + (_LEAST_EXPONENT << 23)).view(torch.float32)


def scale_bytes(scales: Tensor) -> Tensor:
    """Return the bytes of the least scales that are not below `scales` [...] float32."""
    above = scales.contiguous().view(torch.int32) + ((1 << 20) - 1) - (_LEAST_EXPONENT << 23)
    return (above >> 20).clamp_(0, 255).to(torch.uint8)


def _fitted(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the levels [groups, 32], and the bytes of scales and zeros [groups], of numbers [groups, 32] float32."""
    levels = torch.empty(groups.shape, dtype=torch.uint8)
    scales, zeros = torch.empty(2, len(groups), dtype=torch.uint8)
    pointers = (each.data_ptr() for each in (levels, scales, zeros))
    kernel("round", "pqppp")(groups.data_ptr(), len(groups), *pointers)
    return levels, scales, zeros


def _fitted_by_torch(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`_fitted` on any device; a few groups in a million may differ by a rounding."""
    # The widest scale covers all numbers of a group; smaller ones cut extremes and round the others less.
    least, most = groups.amin(dim=1).clamp_(max=0), groups.amax(dim=1).clamp_(min=0)
    widest = scale_bytes((most - least) / 15).int()
    fewest = torch.full_like(least, torch.inf)
    scales, zeros = torch.zeros_like(widest), torch.zeros_like(least)
    for smaller in range(3):  # as fit.c tries them
        byte = (widest - smaller).clamp_(min=0)
        scale = scale_of(byte)
        low, high = -least / scale, 15 - most / scale
        # From each start the zero moves by the mean error of the rounding, a few times.
        for start in (low, high, (low + high) / 2):
            zero = start
            for _ in range(3):
                zero = (16 * zero).round_().clamp_(0, 255) / 16
                exact = groups / scale[:, None] + zero[:, None]
                off = exact.round().clamp_(0, 15) - exact
                error = off.square().sum(dim=1) * scale * scale
                is_better = error < fewest
                fewest = torch.where(is_better, error, fewest)
                scales, zeros = torch.where(is_better, byte, scales), torch.where(is_better, zero, zeros)
                zero = zero + off.mean(dim=1)
    levels = (groups / scale_of(scales)[:, None] + zeros[:, None]).round_().clamp_(0, 15)
    return levels.to(torch.uint8), scales.to(torch.uint8), (16 * zeros).to(torch.uint8)


def has_these_numbers(weight: Tensor, round_: Callable[[Tensor], QuantizedWeight]) -> bool:
    """True if the first outputs of `weight` already are numbers that `round_` gives, up to bfloat16's precision."""
    rows = weight[:OUTPUTS].detach().float()
    rounded = round_(rows)
    off = (rounded.dequantized() - rows).unflatten(1, (-1, rounded.group_size)) / rounded.scales[..., None]
    return float(off.square().mean()) < 0.15**2  # a step's third of others


def to_int4_with_bases(weight: Tensor, times: Seq[int] = ()) -> QuantizedWeight:
    """Round a weight [out, in] to levels 0 to 15 between the least and the greatest number of each group.

    Groups keep their numbers where these are multiples of one (`_steps_of`) within 15 of it.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP_SIZE))
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)  # three times as fast as aminmax
    bases = _float16(lowest)
    scales = _float16((highest - bases) / 15).clamp_(min=_TINY)
    if times:
        steps = _steps_of(groups, times, num_levels=16)
        least, most = torch.stack((lowest / steps, highest / steps)).round_().aminmax(dim=0)
        first = torch.where((least >= -8) & (most <= 7), -8.0, least)  # as Q4_0's: its base is exact
        is_kept = (steps != 0) & (most - least <= 15)
        scales, bases = torch.where(is_kept, steps, scales), torch.where(is_kept, _float16(first * steps), bases)
    levels = ((groups - bases[..., None]) / scales[..., None]).round_().clamp_(0, 15)
    return QuantizedWeight(levels.to(torch.int8).flatten(1), scales, bases, num_bits=4)


def _steps_of(groups: Tensor, times: Seq[int], num_levels: int = 255) -> Tensor:
    """Return the number that all of a group [..., size] are multiples of, the greatest one of `times`; 0 without one.

    From the least to the greatest they have at most `num_levels`. Weights of GGUF's Q4_0, of GPTQ and AWQ of 4 bits, of
    MXFP4 (of halves) and of BitNet are such multiples, the last up to float16's precision.
    """
    extremes, rest = _extremes(groups).flatten(), groups.flatten(0, -2)
    steps, places = torch.zeros_like(extremes), torch.arange(len(extremes), device=groups.device)
    for most in times:  # the likeliest come first
        step = _float16(extremes / most)
        off = (rest / step[:, None]).round_().mul_(step[:, None]).sub_(rest).abs_().amax(dim=-1)  # NaN for zeros
        is_wide = rest.amax(dim=-1) - rest.amin(dim=-1) > (num_levels - 0.5) * step.abs()
        is_left = (off > (extremes.abs() * _HALF_ULP if most == 1 else 0)) | is_wide
        steps[places] = torch.where(is_left, 0, step)
        if not is_left.any():
            break
        rest, extremes, places = rest[is_left], extremes[is_left], places[is_left]
    return steps.view(groups.shape[:-1])


def _extremes(groups: Tensor) -> Tensor:
    """Return the number of each group that is farthest from zero."""
    lowest, highest = groups.amin(dim=-1), groups.amax(dim=-1)
    return torch.where(highest >= -lowest, highest, lowest)


def times_of(weight: Tensor) -> tuple[int, ...]:
    """Return what to look for in groups of `weight`, the likeliest first; () if its first output has other numbers."""
    groups = weight[:1].detach().float().unflatten(1, (-1, GROUP_SIZE))
    groups = groups[groups.any(dim=-1)]
    steps = _steps_of(groups, _TIMES)
    if not steps.numel() or not bool(steps.all()):
        return ()
    found = Counter((_extremes(groups) / steps).round_().int().tolist())
    return tuple(sorted(_TIMES, key=lambda most: -found[most]))


def _float16(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_HUGE, _HUGE).half().float()
