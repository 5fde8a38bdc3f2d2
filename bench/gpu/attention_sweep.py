"""One launch of the attention kernel under choices that serving does not make, and torch's attentions to compare."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

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


def contiguous_s(
    backend: SDPBackend, seconds: Seconds, shape: WideShape, context: int, rows: int, device: str
) -> float:
    """Return the seconds of one of torch's attentions over as many contiguous keys, without a mask among the drafts.

    Raises:
        RuntimeError: the backend does not compute this here.
    """
    query = torch.randn(BATCH, shape.num_heads, rows, shape.head_dim, dtype=torch.bfloat16, device=device)
    size = (BATCH, shape.num_kv_heads, context + rows, shape.head_dim)
    keys, values = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    with sdpa_kernel(backend):
        return seconds(lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True))


def paged_s(page_size: int, seconds: Seconds, shape: WideShape, context: int, rows: int, device: str) -> float:
    """Return the seconds of torch's attention over pages, which is FlashAttention 2 unless another is activated.

    Raises:
        ImportError, TypeError: this torch is older than its attention over pages.
        RuntimeError: it does not take these pages.
    """
    from torch.nn.attention.varlen import varlen_attn  # not in every torch that a card's machine has

    num_keys = context + rows
    pages_each = -(-num_keys // page_size)
    table = torch.randperm(BATCH * pages_each).to(device, torch.int32).view(BATCH, pages_each)
    pool = (BATCH * pages_each, page_size, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool, dtype=torch.bfloat16, device=device) for _ in range(2))
    query = torch.randn(BATCH * rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    starts = torch.arange(BATCH + 1, dtype=torch.int32, device=device)
    lengths = torch.full((BATCH,), num_keys, dtype=torch.int32, device=device)

    def attend() -> torch.Tensor:
        found = varlen_attn(
            query,
            keys,
            values,
            rows * starts,
            num_keys * starts,
            rows,
            num_keys,
            window_size=(-1, 0),  # the last row reads all keys, the row before it one fewer
            enable_gqa=True,
            seqused_k=lengths,
            block_table=table,
        )
        assert isinstance(found, torch.Tensor), "nothing else was asked for"
        return found

    return seconds(attend)


YARDSTICKS: dict[str, Callable[[Seconds, WideShape, int, int, str], float]] = {
    "torch, contiguous, cuDNN": partial(contiguous_s, SDPBackend.CUDNN_ATTENTION),
    "torch, contiguous, flash": partial(contiguous_s, SDPBackend.FLASH_ATTENTION),
    "torch, contiguous, efficient": partial(contiguous_s, SDPBackend.EFFICIENT_ATTENTION),
    "torch, contiguous, math": partial(contiguous_s, SDPBackend.MATH),
    "torch, pages of 16": partial(paged_s, _BLOCK_SIZE),
    "torch, pages of 256": partial(paged_s, 256),
}


def yardstick(name: str, seconds: Seconds, shape: WideShape, context: int, rows: int, device: str) -> dict[str, object]:
    """Return the line of one of torch's attentions: its microseconds, or why it is refused here."""
    line: dict[str, object] = {"context": context, "rows": rows, "kernel": name}
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            us = 1e6 * YARDSTICKS[name](seconds, shape, context, rows, device)
        except Exception as error:  # a refusal is a result, and costs no other line
            reason = str(reasons[-1].message) if reasons else str(error)
            return {**line, "refused": f"{type(error).__name__}: {reason}".splitlines()[0][:160]}
    return {**line, "us": round(us, 1)}
