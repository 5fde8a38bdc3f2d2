"""One launch of the attention kernel under choices that serving does not make, and torch's attention to compare."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.wide_fixture import WideShape
from engine.attention.base import LayerOptions
from engine.attention.triton_attention import Launch, num_processors, paged_attention
from engine.attention.triton_tiles import RowLayout, Tiling, num_keys_of, power_of_two, split_tiles, whole_tiles
from engine.batch.indexing import send
from engine.batch.span import Span

BATCH = 32  # more keys than the device's cache holds
_BLOCK_SIZE = 16
_MIN_SPLIT_TOKENS = 256

# By the rows of a span: a decode, and a verification of four drafts. Each is a compilation of a second or two.
TILINGS = {
    1: (
        *(Tiling(16, 64, 4, stages) for stages in (3, 4, 5, 6)),
        Tiling(16, 64, 2, 5),
        Tiling(16, 32, 4, 8),
        Tiling(16, 128, 4, 3),
        Tiling(16, 128, 8, 3),
    ),
    5: (*(Tiling(32, 64, 4, stages) for stages in (3, 4, 5)), Tiling(32, 32, 4, 6), Tiling(32, 128, 8, 3)),
}

Seconds = Callable[[Callable[[], torch.Tensor]], float]


def sweep(seconds: Seconds, shape: WideShape, context: int, rows: int, tiling: Tiling, programs: int) -> float:
    """Return the seconds of one layer's attention; `programs` per processor decide the splits."""
    device = torch.device("cuda")
    blocks_each = -(-(context + rows) // _BLOCK_SIZE)
    order = torch.randperm(BATCH * blocks_each).tolist()
    spans = [
        Span([0] * rows, context, order[index * blocks_each : (index + 1) * blocks_each], rows)
        for index in range(BATCH)
    ]
    group_size = shape.num_heads // shape.num_kv_heads
    layout = RowLayout.of(spans, _BLOCK_SIZE)
    tiles = whole_tiles(layout, None, tiling, group_size)
    share = num_keys_of(tiles) * shape.num_kv_heads // (programs * num_processors(device))
    split = max(_MIN_SPLIT_TOKENS, power_of_two(share))
    tables = send(torch.from_numpy(layout.tables), device)
    launch = Launch.of(split_tiles(tiles, split), tiling, group_size, tables, None)
    pool = (len(order), _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool, dtype=torch.bfloat16, device=device) for _ in range(2))
    query = torch.randn(BATCH * rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    options = LayerOptions(shape.head_dim**-0.5)
    return seconds(lambda: paged_attention(query, keys, values, launch, options))


def torch_attention_s(seconds: Seconds, shape: WideShape, context: int, rows: int) -> float:
    """Return the seconds of torch's attention over as many contiguous keys, without the mask among the drafts.

    cuDNN's kernel comes first where torch has it: on Hopper it is the fastest of those that come with torch.
    """
    query = torch.randn(BATCH, shape.num_heads, rows, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    size = (BATCH, shape.num_kv_heads, context + rows, shape.head_dim)
    keys, values = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return seconds(lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
