"""The parts of a look that time kernels alone: products, the sampler, attention."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bench.gpu.card import CACHE_BYTES, MODES, SMOKE_SHAPE, Look
from bench.gpu.table import NOT_MEASURED
from bench.wide_fixture import LLAMA_3_8B
from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear.rounding import to_int4
from engine.sampling.logits_row import LogitsRow
from engine.sampling.sampler import Sampler


def look_at_products(look: Look) -> None:
    """Every product of a layer, and of the head, in the larger model's shapes."""
    shape = SMOKE_SHAPE if look.is_smoke else LLAMA_3_8B
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    products = {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, width),
        "output": (width, heads),
        "gate and up": (2 * shape.mlp_size, width),
        "down": (width, shape.mlp_size),
        "head": (shape.vocab_size, width),
    }
    for name, (num_outputs, num_inputs) in products.items():
        copies = 1 if look.is_smoke else -(-2 * CACHE_BYTES // (num_outputs * num_inputs))  # of 4 bits
        weights = [torch.randn(num_outputs, num_inputs, dtype=look.dtype, device=look.device) for _ in range(copies)]
        for form, (multiply, num_bytes) in _forms(look, weights).items():
            for num_rows in (1, 5, 40, 128, 640):
                rows = torch.randn(num_rows, num_inputs, dtype=look.dtype, device=look.device)
                seconds = look.device_seconds(*(partial(each, rows) for each in multiply))
                look.add(
                    "products",
                    product=name,
                    form=form,
                    rows=num_rows,
                    us=round(1e6 * seconds, 1),
                    gigabytes_per_s=round(num_bytes / seconds / 1e9),
                    teraflops=round(2 * num_rows * num_outputs * num_inputs / seconds / 1e12, 1),
                )


def _forms(look: Look, weights: Seq[Tensor]) -> dict[str, tuple[list[Callable[[Tensor], Tensor]], int]]:
    """Return products by `weights` in each form, and the bytes of one; few bits also in other tiles of few rows."""
    forms: dict[str, tuple[list[Callable[[Tensor], Tensor]], int]] = {
        "bfloat16": ([partial(F.linear, weight=weight) for weight in weights], weights[0].nbytes)
    }
    if not look.has_gpu:
        return forms
    # Not at the top: it needs Triton, which a machine without a GPU may lack.
    from engine.model.linear.triton_few_bits import FewBitsProduct, UnpackedPart

    ones = torch.ones(len(weights[0]), 1, device=look.device)
    stored = {
        "float8": [QuantizedWeight(weight.to(torch.float8_e4m3fn), ones) for weight in weights],
        "int4": [_of_128(weight) for weight in weights],
        "our int4": [to_int4(weight) for weight in weights],
    }
    for form, parts in stored.items():
        for suffix, unpacked in {"": UnpackedPart(), ", the kernel alone": None}.items():
            products = [FewBitsProduct(part, None, look.dtype, unpacked) for part in parts]
            forms[form + suffix] = (list(products), products[0].nbytes)
    return forms


def _of_128(weight: Tensor) -> QuantizedWeight:
    """Return numbers from 0 to 15 with a zero of 8 and a scale for 128 inputs, as GPTQ's are."""
    groups = weight.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(dim=-1) / 7
    numbers = (groups / scales[..., None]).round_().add_(8).to(torch.int8).flatten(1)
    return QuantizedWeight(numbers, scales.half(), zeros=torch.full_like(scales, 8))


def look_at_sampling(look: Look) -> None:
    """The sampler over a large vocabulary: each mode's truncation and noise."""
    vocab_size = 4160 if look.is_smoke else 128_256
    sampler = Sampler()
    for num_rows in (1, 128, 640):
        logits = 3 * torch.randn(num_rows, vocab_size, device=look.device)  # about as wide as a model's
        for name in ("greedy", "T 0.7", "T 0.7, top_p 0.9"):
            rows = [LogitsRow(MODES[name], [1] * (10 + index), 5) for index in range(num_rows)]

            draw = partial(sampler.draw, logits, rows)
            us = round(1e6 * look.seconds(draw))
            look.add("sampling", mode=name, rows=num_rows, us=us, device_us=_device_us_of(look, draw))


def _device_us_of(look: Look, call: Callable[[], object]) -> dict[str, int] | str:
    """The device's time of one call, by kernel."""
    if not look.has_gpu:
        return NOT_MEASURED
    look.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        look.wait()
    kernels = [each for each in profiled.key_averages() if not each.key.startswith(("cu", "Activity"))]
    return {each.key[:40]: round(device_us(each)) for each in sorted(kernels, key=device_us, reverse=True)}


def look_at_attention(look: Look) -> None:
    """Time one launch over the larger model's heads for each tiling, next to torch's attentions."""
    if not look.has_gpu:
        look.add("attention", result=f"{NOT_MEASURED}: the kernel's tiling is the GPU's")
        return
    # Not at the top: it needs Triton, which a machine without a GPU may lack.
    from bench.gpu.attention_sweep import TILINGS, YARDSTICKS, sweep, yardstick

    for context in (1024, 8192):
        for rows, tilings in TILINGS.items():
            for name in YARDSTICKS:
                look.add("attention", **yardstick(name, look.device_seconds, LLAMA_3_8B, context, rows, "cuda"))
            for tiling in tilings:
                _time_tiling(
                    look, context, rows, partial(sweep, look.device_seconds, LLAMA_3_8B, context, rows, tiling)
                )


def _time_tiling(look: Look, context: int, rows: int, sweep: partial[float]) -> None:
    tiling = str(sweep.args[-1])
    for programs in (3, 4):
        try:
            us = round(1e6 * sweep(programs), 1)
        except Exception as error:  # one choice that does not fit the card costs its own line
            look.add("attention", context=context, rows=rows, tiling=tiling, failed=str(error)[:80])
            return
        look.add("attention", context=context, rows=rows, tiling=tiling, programs=programs, us=us)


def device_us(event: object) -> float:
    """Return the own time of a profiled kernel, in microseconds."""
    time_us = getattr(event, "self_device_time_total", 0.0)
    return float(time_us or getattr(event, "self_cpu_time_total", 0.0))
