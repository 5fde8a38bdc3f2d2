"""The dtype of a training's matrix products."""

from __future__ import annotations

import torch


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if it is faster for products of many rows: on GPUs and on processors with AMX; else float32.

    AVX512-BF16 is not enough, on Intel's processors at least; AMD's with it are not measured. A Xeon that has it and no
    AMX, with one thread and torch 2.13: 2,048 x 576 times 576 x 1,536 in 22 ms in float32 and 41 in bfloat16, and 1.2
    and 2.3 ms at the widths of the demo's draft.
    """
    has_units = device.type == "cuda" or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_units else torch.float32
