"""One launch of the attention kernel under choices that serving does not make, and torch's attention beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from engine.attention.base import LayerOptions
from engine.attention.row_layout import RowLayout
from engine.attention.triton_attention import Launch, num_processors, paged_attention
from engine.attention.triton_tiles import num_keys_of, split_tiles, whole_tiles
from engine.attention.triton_tiling import Heads, Tiling, choose_tiling, power_of_two
from engine.indexing import send
from engine.span import Span
from models.fixtures.wide_fixture import WideShape

BATCH = 32  # more keys than the device's cache holds
ROWS = 5  # a verification of four drafts
_BLOCK_SIZE = 16
_MIN_SPLIT_TOKENS = 256

Seconds = Callable[[Callable[[], object]], float]


def sweep(seconds: Seconds, shape: WideShape, context: int, stages: int, block_n: int, programs: int) -> float:
    """Seconds of one layer's attention with these choices; `programs` per processor decide the splits."""
    device = torch.device("cuda")
    blocks_each = -(-(context + ROWS) // _BLOCK_SIZE)
    order = torch.randperm(BATCH * blocks_each).tolist()
    spans = [
        Span([0] * ROWS, context, order[index * blocks_each : (index + 1) * blocks_each], ROWS)
        for index in range(BATCH)
    ]
    group_size = shape.num_heads // shape.num_kv_heads
    heads = Heads(shape.num_kv_heads, group_size, shape.head_dim, shape.head_dim)
    usual = choose_tiling(ROWS, heads, 2)
    tiling = Tiling(usual.block_m, block_n, usual.num_warps, stages)
    layout = RowLayout.of(spans, _BLOCK_SIZE)
    tiles = whole_tiles(layout, None, tiling, group_size)
    share = num_keys_of(tiles) * heads.num_kv_heads // (programs * num_processors(device))
    split = max(_MIN_SPLIT_TOKENS, power_of_two(share))
    tables = send(torch.from_numpy(layout.tables), device)
    launch = Launch.of(split_tiles(tiles, split), tiling, group_size, tables, None)
    pool = (len(order), _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool, dtype=torch.bfloat16, device=device) for _ in range(2))
    query = torch.randn(BATCH * ROWS, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    options = LayerOptions(shape.head_dim**-0.5)
    return seconds(lambda: paged_attention(query, keys, values, launch, options))


def torch_attention_s(seconds: Seconds, shape: WideShape, context: int) -> float:
    """Seconds of torch's attention over as many contiguous keys, without the mask among the drafts."""
    query = torch.randn(BATCH, shape.num_heads, ROWS, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    size = (BATCH, shape.num_kv_heads, context + ROWS, shape.head_dim)
    keys, values = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return seconds(lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
