"""Paged attention against a slow oracle that computes every row alone, in float64, from the tokens it may see."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.base import LayerOptions, UnsupportedAttentionError
from engine.attention.read_plan import MAX_PACKED_ROWS, ReadPlan
from engine.attention.torch_attention import TorchAttention, attending, paged_attention
from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache, LayerShape

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 96


@dataclass(frozen=True, slots=True)
class Heads:
    num_kv_heads: int = 2
    group_size: int = 2
    key_dim: int = 8
    value_dim: int = 8

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size


@dataclass(frozen=True, slots=True)
class SpanShape:
    """A span's shape: tokens before it, and its own."""

    start: int
    num_rows: int


class RandomPass:
    """Sequences with random keys and values, their past already in the pool, and one pass over their new rows."""

    def __init__(self, extents: list[SpanShape], heads: Heads, *, is_scattered: bool = True, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = LayerShape(heads.num_kv_heads, heads.key_dim, heads.value_dim)
        self.heads = heads
        self.extents = extents
        self.cache = KVCache([shape], NUM_BLOCKS, BLOCK_SIZE, dtype=torch.float32, device=CPU)
        self.cache.keys[0].fill_(float("nan"))  # whoever reads a block that is not its own is found out
        self.cache.values[0].fill_(float("nan"))
        self.spans = self._spans(generator, is_scattered)
        lengths = [span.end for span in self.spans]
        self.keys = [torch.randn(n, heads.num_kv_heads, heads.key_dim, generator=generator) for n in lengths]
        self.values = [torch.randn(n, heads.num_kv_heads, heads.value_dim, generator=generator) for n in lengths]
        num_rows = sum(extent.num_rows for extent in extents)
        self.query = torch.randn(1, heads.num_heads, num_rows, heads.key_dim, generator=generator)
        self._write_past()

    def _spans(self, generator: torch.Generator, is_scattered: bool) -> list[Span]:
        order = torch.randperm(NUM_BLOCKS, generator=generator).tolist() if is_scattered else list(range(NUM_BLOCKS))
        sizes = [-(-(extent.start + extent.num_rows) // BLOCK_SIZE) for extent in self.extents]
        ends = list(accumulate(sizes))
        tables = [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [
            Span([0] * extent.num_rows, extent.start, table, extent.num_rows)
            for extent, table in zip(self.extents, tables, strict=True)
        ]

    def _slots(self, span: Span, start: int, end: int) -> Tensor:
        table = span.block_table
        return index_tensor((table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, end)), CPU)

    def _write_past(self) -> None:
        for span, keys, values in zip(self.spans, self.keys, self.values, strict=True):
            slots = self._slots(span, 0, span.start)
            self.cache.write(0, slots, keys[: span.start], values[: span.start])

    def attend(self, options: LayerOptions) -> Tensor:
        slots = torch.cat([self._slots(span, span.start, span.end) for span in self.spans])
        new_keys = torch.cat([keys[span.start :] for span, keys in zip(self.spans, self.keys, strict=True)])
        new_values = torch.cat([values[span.start :] for span, values in zip(self.spans, self.values, strict=True)])
        attention = TorchAttention(self.spans, self.cache, slots)
        return attention.attend(
            0, self.query, new_keys.transpose(0, 1)[None], new_values.transpose(0, 1)[None], options
        )[0]

    def expected(self, options: LayerOptions) -> Tensor:
        """[T, heads, D], row by row."""
        rows = []
        for span, keys, values in zip(self.spans, self.keys, self.values, strict=True):
            for position in range(span.start, span.end):
                query = self.query[0, :, len(rows)]
                rows.append(one_row(query, keys, values, position, options, self.heads.group_size))
        return torch.stack(rows)


def one_row(
    query: Tensor, keys: Tensor, values: Tensor, position: int, options: LayerOptions, group_size: int
) -> Tensor:
    """Query [heads, D] at `position` over keys [S, kv heads, D] -> [heads, D of the values]."""
    first = 0 if options.window is None else max(0, position - options.window + 1)
    out = []
    for head in range(query.shape[0]):
        seen = keys[first : position + 1, head // group_size].double()
        scores = seen @ query[head].double() * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks[head : head + 1].double()))
        probs = scores.softmax(dim=0)[: seen.shape[0]]
        out.append(probs @ values[first : position + 1, head // group_size].double())
    return torch.stack(out).float()


def check(world: RandomPass, options: LayerOptions) -> None:
    torch.testing.assert_close(world.attend(options), world.expected(options), rtol=0, atol=1e-5)


MIXED = [SpanShape(0, 21), SpanShape(13, 1), SpanShape(30, 5), SpanShape(7, 18), SpanShape(0, 1), SpanShape(5, 2)]
SCALED = LayerOptions(scaling=0.3)


@pytest.mark.parametrize("heads", [Heads(), Heads(group_size=1), Heads(num_kv_heads=1, group_size=4)])
@pytest.mark.parametrize("is_scattered", [True, False])
def test_each_row_of_a_mixed_pass_sees_its_own_sequence_up_to_itself(heads: Heads, is_scattered: bool) -> None:
    check(RandomPass(MIXED, heads, is_scattered=is_scattered), SCALED)


@pytest.mark.parametrize("heads", [Heads(key_dim=12, value_dim=8), Heads(group_size=1, key_dim=8, value_dim=16)])
def test_values_may_have_another_head_size(heads: Heads) -> None:
    check(RandomPass(MIXED, heads), SCALED)


@pytest.mark.parametrize("window", [1, 3, 4, 6, 17, 100])
def test_a_sliding_window_hides_what_lies_before_it(window: int) -> None:
    check(RandomPass(MIXED, Heads()), LayerOptions(scaling=0.3, window=window))


@pytest.mark.parametrize("window", [None, 6])
def test_softcaps_bound_the_scores(window: int | None) -> None:
    check(RandomPass(MIXED, Heads()), LayerOptions(scaling=3.0, softcap=2.0, window=window))


@pytest.mark.parametrize("heads", [Heads(), Heads(group_size=1)])
def test_sinks_take_probability_and_give_no_value(heads: Heads) -> None:
    sinks = torch.linspace(-1.0, 2.0, heads.num_heads)
    check(RandomPass(MIXED, heads), LayerOptions(scaling=0.3, sinks=sinks))
    check(RandomPass(MIXED, heads), LayerOptions(scaling=0.3, sinks=sinks, window=5))


def test_sequences_of_very_different_length_are_not_padded_to_the_longest() -> None:
    extents = [SpanShape(3, 1)] * 9 + [SpanShape(120, 1)] * 2
    world = RandomPass(extents, Heads())
    world.cache.min_view_tokens = 1 << 30
    num_keys = sorted(read.num_keys for read in ReadPlan(world.spans, world.cache).reads(None))
    assert num_keys == [4, 124]
    check(world, SCALED)


@pytest.mark.parametrize("is_scattered", [True, False])
def test_a_long_run_of_blocks_is_read_in_place(is_scattered: bool) -> None:
    world = RandomPass([SpanShape(40, 1), SpanShape(50, 2)], Heads(), is_scattered=is_scattered)
    world.cache.min_view_tokens = 40
    reads = ReadPlan(world.spans, world.cache).reads(None)
    assert all(isinstance(read.blocks, slice) for read in reads) is not is_scattered
    check(world, SCALED)


EXTENTS = st.lists(
    st.builds(SpanShape, st.integers(0, 24), st.one_of(st.integers(1, 6), st.integers(1, MAX_PACKED_ROWS + 8))),
    min_size=1,
    max_size=4,
)
# Read together, padded with blocks whose tails nobody has written.
SHORT_OF_MANY_LENGTHS = [SpanShape(3, 1), SpanShape(24, 1), SpanShape(0, 1), SpanShape(11, 2)]


@settings(max_examples=60)
@given(
    extents=EXTENTS,
    is_scattered=st.booleans(),
    min_view_tokens=st.sampled_from([1, 12, 1 << 20]),
    window=st.one_of(st.none(), st.integers(1, 30)),
    group_size=st.sampled_from([1, 3]),
    seed=st.integers(0, 100),
)
@example(extents=SHORT_OF_MANY_LENGTHS, is_scattered=True, min_view_tokens=1 << 20, window=None, group_size=1, seed=0)
@example(extents=SHORT_OF_MANY_LENGTHS, is_scattered=False, min_view_tokens=1, window=1, group_size=3, seed=0)
@example(
    extents=[SpanShape(0, MAX_PACKED_ROWS + 8)], is_scattered=True, min_view_tokens=1, window=2, group_size=3, seed=0
)
def test_any_pass_equals_the_oracle(
    extents: list[SpanShape], is_scattered: bool, min_view_tokens: int, window: int | None, group_size: int, seed: int
) -> None:
    world = RandomPass(extents, Heads(group_size=group_size), is_scattered=is_scattered, seed=seed)
    world.cache.min_view_tokens = min_view_tokens
    check(world, LayerOptions(scaling=0.3, window=window))


@settings(max_examples=60)
@given(extents=EXTENTS, window=st.one_of(st.none(), st.integers(1, 30)), min_view_tokens=st.sampled_from([1, 1 << 20]))
@example(extents=SHORT_OF_MANY_LENGTHS, window=1, min_view_tokens=1)
def test_reads_cover_every_row_of_a_pass(extents: list[SpanShape], window: int | None, min_view_tokens: int) -> None:
    world = RandomPass(extents, Heads())
    world.cache.min_view_tokens = min_view_tokens
    every_row = torch.arange(sum(extent.num_rows for extent in extents))
    covered = torch.cat([every_row[read.rows] for read in ReadPlan(world.spans, world.cache).reads(window)])
    assert torch.equal(covered.unique(), every_row)


def test_a_layer_with_a_bias_of_its_own_is_found_out() -> None:
    world = RandomPass([SpanShape(0, 1)], Heads())
    attention = TorchAttention(world.spans, world.cache, slice(0, 1))
    q = torch.zeros(1, 2, 1, 8)
    with attending(attention), pytest.raises(UnsupportedAttentionError, match="a bias or a mask"):
        paged_attention(torch.nn.Module(), q, q, q, None, position_bias=q)
