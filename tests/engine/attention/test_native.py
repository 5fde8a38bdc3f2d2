"""Our attention on processors against float64, and the bits of its rows in any company."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.base import LayerOptions
from engine.attention.native import NativeAttention
from engine.attention.triton_tiles import HeadShape
from engine.batch.span import Span
from engine.config import KVDtype
from engine.kv_cache.pool import to_int8_heads
from engine.native.library import Instructions, native_instructions
from tests.engine.fixtures.attention_fixtures import (
    BUSHY,
    MIXED,
    PLAIN,
    TREES,
    AttentionWorld,
    TreeSpanShape,
    check_steps,
    logits_by,
)
from tests.engine.fixtures.families import SERVED, write_family
from tests.engine.fixtures.native_kernels import (
    held_to,
    needs_float_kernels,
    needs_kernels,
    pairs_split,
    skip_unless_pairs_are_split,
)

pytestmark = [needs_float_kernels, pytest.mark.usefixtures("any_instructions")]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
INT8_TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 2e-2}  # its queries and weights are whole numbers of 16 bits
KINDS = [KVDtype.AUTO, KVDtype.INT8]


def attend(world: AttentionWorld, options: LayerOptions = PLAIN) -> Tensor:
    """[T, H * G, D of the values] of a pass that writes its keys and values first."""
    slots, key, value = world.new_kv()
    query = world.query.transpose(0, 1)[None]
    return NativeAttention(world.spans, world.cache, slots).attend(0, query, key, value, options)[0]


def check(world: AttentionWorld, options: LayerOptions = PLAIN) -> None:
    out = attend(world, options)
    assert out.dtype == world.query.dtype
    tolerance = TOLERANCE[out.dtype]
    half_a_place = 2**-9 if out.dtype is torch.bfloat16 else 0  # what rounding the result may cost
    torch.testing.assert_close(out.double(), world.expected(options), rtol=half_a_place, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group_size", [1, 4, 7, 8, 20])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_each_row_of_a_mixed_pass_sees_its_own_sequence_up_to_itself(
    num_kv_heads: int, group_size: int, dtype: torch.dtype
) -> None:
    check(AttentionWorld(MIXED, HeadShape(num_kv_heads, group_size, 64, 64), dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
def test_block_sizes_change_nothing(block_size: int, dtype: torch.dtype) -> None:
    check(AttentionWorld([TreeSpanShape(300, 2), *MIXED], HeadShape(2, 2, 64, 64), block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 4])
def test_blocks_that_begin_and_end_like_a_run_may_lie_anywhere_between(block_size: int, dtype: torch.dtype) -> None:
    per_tile = 16 // block_size
    order = [0, *range(per_tile - 2, 0, -1), per_tile - 1, per_tile, per_tile + 1, per_tile + 2]
    check(
        AttentionWorld([TreeSpanShape(16, 1)], HeadShape(1, 1, 32, 8), block_size=block_size, dtype=dtype, order=order)
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (24, 8), (8, 40), (80, 80), (192, 128), (576, 512)])
def test_head_sizes_may_be_any_up_to_576(key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    check(AttentionWorld(MIXED, HeadShape(2, 2, key_dim, value_dim), dtype=dtype), LayerOptions(scaling=key_dim**-0.5))


LONG = [
    TreeSpanShape(2047, 1),
    TreeSpanShape(1021, 5),
    TreeSpanShape(1500, 40),
    TreeSpanShape(1030, 1),
    TreeSpanShape(130, 1),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 6, 128, 1000])
def test_long_contexts_are_read_in_splits_and_windows_hide_what_lies_before_them(
    window: int | None, dtype: torch.dtype
) -> None:
    check(
        AttentionWorld([*LONG, *MIXED], HeadShape(2, 2, 32, 32), dtype=dtype), LayerOptions(scaling=0.3, window=window)
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_softcaps_bound_scores_and_sinks_take_probability(softcap: float | None, dtype: torch.dtype) -> None:
    sinks = torch.linspace(-1.0, 60.0, 4, dtype=dtype)
    options = LayerOptions(scaling=0.5, softcap=softcap, sinks=sinks)
    check(AttentionWorld([*LONG, *MIXED], HeadShape(1, 4, 32, 32), dtype=dtype), options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 2, 3, 8])
@pytest.mark.parametrize("group_size", [1, 3, 20])
def test_a_node_of_a_tree_sees_its_ancestors_and_what_lies_before_the_tree(
    group_size: int, window: int | None, dtype: torch.dtype
) -> None:
    world = AttentionWorld([*TREES, TreeSpanShape(1022, 8, BUSHY)], HeadShape(2, group_size, 16, 16), dtype=dtype)
    check(world, LayerOptions(scaling=0.3, window=window))


@pytest.mark.parametrize(("dtype", "atol"), INT8_TOLERANCE.items())
def test_an_int8_pool_is_read_as_it_was_written(dtype: torch.dtype, atol: float) -> None:
    world = AttentionWorld([*MIXED, *TREES, *LONG], HeadShape(2, 2, 24, 40), dtype=dtype, kind=KVDtype.INT8)
    num_rows = len(world.query)
    generator, sizes = torch.Generator().manual_seed(1), torch.logspace(-40, 0, num_rows)[:, None]
    key, value = ((torch.randn(1, 2, num_rows, dim, generator=generator) * sizes).to(dtype) for dim in (24, 40))
    slots = torch.cat([world.slots(span, span.start, span.end) for span in world.spans])
    whole = NativeAttention(world.spans, world.cache, slots)
    out = whole.attend(0, world.query.transpose(0, 1)[None], key, value, PLAIN)[0]
    for pool, heads in ((world.cache.keys[0], key), (world.cache.values[0], value)):
        assert torch.equal(pool.flatten(0, 1)[slots], to_int8_heads(heads[0].transpose(0, 1)))
    torch.testing.assert_close(out.double(), world.expected(PLAIN), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", INT8_TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        (HeadShape(2, 1, 16, 16), LayerOptions(scaling=0.25)),
        (HeadShape(1, 3, 64, 64), LayerOptions(scaling=0.125, window=6)),
        (HeadShape(2, 5, 80, 96), LayerOptions(scaling=0.1, window=130)),
        (HeadShape(1, 8, 128, 128), LayerOptions(scaling=0.5, softcap=2.0, sinks=torch.linspace(-1.0, 60.0, 8))),
        (HeadShape(1, 20, 512, 512), LayerOptions(scaling=0.04)),
    ],
    ids=lambda of: f"{of.key_dim}x{of.group_size}" if isinstance(of, HeadShape) else "",
)
def test_an_int8_pool_takes_all_that_another_does(heads: HeadShape, options: LayerOptions, dtype: torch.dtype) -> None:
    sinks = None if options.sinks is None else options.sinks.to(dtype)
    world = AttentionWorld([*MIXED, *TREES, *LONG], heads, dtype=dtype, kind=KVDtype.INT8)
    out, expected = attend(world, replace(options, sinks=sinks)), world.expected(options)
    torch.testing.assert_close(out.double(), expected, rtol=2**-9, atol=INT8_TOLERANCE[dtype])


LATENT = [HeadShape(1, 16, 96, 64), HeadShape(1, 3, 40, 24), HeadShape(1, 20, 576, 512)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", LATENT, ids=str)
def test_values_may_be_the_first_numbers_of_keys(heads: HeadShape, dtype: torch.dtype) -> None:
    extents = [*MIXED, *TREES, TreeSpanShape(1500, 40), TreeSpanShape(1030, 1)]
    check(
        AttentionWorld(extents, heads, dtype=dtype, is_latent=True),
        LayerOptions(scaling=heads.key_dim**-0.5),
    )


def in_pieces(world: AttentionWorld, ends: Seq[int], options: LayerOptions, *, beside: bool) -> Tensor:
    """The rows of the first span, cut at `ends`; `beside`: between the world's other spans."""
    whole, others = world.spans[0], world.spans[1:]
    num_others = sum(len(span.token_ids) for span in others) if beside else 0
    other_rows = world.query[len(whole.token_ids) :][:num_others]
    cut = len(others[0].token_ids) if beside else 0
    outs = []
    for start, end in zip((0, *ends), ends, strict=False):
        part = Span(whole.token_ids[start:end], whole.start + start, whole.block_table, 1)
        spans = [*others[:1], part, *others[1:]] if beside else [part]
        rows = torch.cat((other_rows[:cut], world.query[start:end], other_rows[cut:]))
        slots = torch.cat([world.slots(span, span.start, span.end) for span in spans])
        whole_pass = NativeAttention(spans, world.cache, slots)
        out = whole_pass.attend(0, rows.transpose(0, 1)[None], *world.heads_of(slots), options)
        outs.append(out[0, cut : cut + end - start])
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 200])
def test_a_row_has_the_same_bits_in_any_company(
    group_size: int, window: int | None, kind: KVDtype, dtype: torch.dtype
) -> None:
    extents = [TreeSpanShape(900, 300), TreeSpanShape(1100, 1), TreeSpanShape(3, 40), TREES[0]]
    world = AttentionWorld(extents, HeadShape(2, group_size, 64, 32), dtype=dtype, kind=kind)
    options = LayerOptions(scaling=0.3, window=window)
    expected = in_pieces(world, [300], options, beside=False)
    for ends in ((300,), (1, 2, 7, 12, 123, 124, 125, 126, 200, 201, 300), (150, *range(151, 170), 300)):
        for beside in (False, True):
            assert torch.equal(in_pieces(world, ends, options, beside=beside), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", LATENT[:2], ids=str)
def test_a_row_over_latents_has_the_same_bits_in_any_company(heads: HeadShape, dtype: torch.dtype) -> None:
    extents = [TreeSpanShape(1000, 60), TreeSpanShape(1100, 1), TreeSpanShape(3, 40), TREES[0]]
    world = AttentionWorld(extents, heads, dtype=dtype, is_latent=True)
    expected = in_pieces(world, [60], PLAIN, beside=False)
    for ends in ((60,), (1, 2, 7, 12, 23, 24, 25, 60), (30, *range(31, 50), 60)):
        for beside in (False, True):
            assert torch.equal(in_pieces(world, ends, PLAIN, beside=beside), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [5, 120, 1018])
def test_a_node_of_a_tree_has_the_bits_that_its_path_has_as_a_chain(
    start: int, kind: KVDtype, dtype: torch.dtype
) -> None:
    parents = (-1, 0, 0, 2, 1, 3, 5, 6, 7, 8, 9)
    world = AttentionWorld([TreeSpanShape(start, 11, parents)], HeadShape(2, 3, 32, 32), dtype=dtype, kind=kind)
    as_tree = attend(world)
    path = [0, 2, 3, 5, 6, 7, 8, 9, 10]
    chain = AttentionWorld([TreeSpanShape(start, len(path))], HeadShape(2, 3, 32, 32), dtype=dtype, kind=kind)
    seen = [*range(start), *(start + node for node in path)]
    places = torch.cat([world.slots(world.spans[0], place, place + 1) for place in seen])
    for cache, source in ((chain.cache, world.cache), (chain.source, world.source)):
        for pool, other in ((cache.keys[0], source.keys[0]), (cache.values[0], source.values[0])):
            pool.flatten(0, 1)[chain.slots(chain.spans[0], 0, len(seen))] = other.flatten(0, 1)[places]
    chain.query = world.query[path]
    assert torch.equal(attend(chain), as_tree[path])


EXTENTS = st.lists(
    st.builds(TreeSpanShape, st.integers(0, 1100), st.one_of(st.just(1), st.integers(2, 70))), min_size=1, max_size=3
)


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    extents=EXTENTS,
    heads=st.builds(HeadShape, st.integers(1, 3), st.integers(1, 5), st.integers(1, 70), st.integers(1, 70)),
    block_size=st.sampled_from([1, 8, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    seed=st.integers(0, 100),
)
@example(
    extents=[TreeSpanShape(3, 1), TreeSpanShape(1022, 5)],
    heads=HeadShape(1, 3, 24, 40),
    block_size=64,
    window=None,
    seed=0,
)
@example(
    extents=[TreeSpanShape(63, 2), TreeSpanShape(0, 1)], heads=HeadShape(2, 1, 64, 64), block_size=1, window=1, seed=0
)
def test_any_pass_equals_the_oracle(
    extents: list[TreeSpanShape], heads: HeadShape, block_size: int, window: int | None, dtype: torch.dtype, seed: int
) -> None:
    world = AttentionWorld(extents, heads, block_size=block_size, dtype=dtype, seed=seed)
    check(world, LayerOptions(scaling=heads.key_dim**-0.5, window=window))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("kind", [KVDtype.AUTO, KVDtype.INT8])
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    extents=st.one_of(EXTENTS, st.just(TREES), st.just(MIXED)),
    heads=st.builds(HeadShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 70), st.integers(1, 70)),
    window=st.one_of(st.none(), st.integers(1, 300)),
    scale=st.sampled_from([1.0, 1e-19, 1e-38]),
)
def test_split_pairs_have_the_bits_of_whole_ones(
    extents: list[TreeSpanShape], heads: HeadShape, window: int | None, scale: float, kind: KVDtype, dtype: torch.dtype
) -> None:
    skip_unless_pairs_are_split()
    outs = []
    for are_split in (False, True):
        world = AttentionWorld(extents, heads, dtype=dtype, kind=kind)
        if kind is KVDtype.AUTO:
            world.cache.keys[0].mul_(scale)
            world.cache.values[0].mul_(scale)
        options = LayerOptions(scaling=heads.key_dim**-0.5, window=window)
        slots = torch.cat([world.slots(span, span.start, span.end) for span in world.spans])
        generator = torch.Generator().manual_seed(1)
        key, value = (
            (scale * torch.randn(1, heads.num_kv_heads, len(slots), dim, generator=generator)).to(dtype)
            for dim in (heads.key_dim, heads.value_dim)
        )
        with pairs_split(are_split):
            whole = NativeAttention(world.spans, world.cache, slots)
            outs.append(whole.attend(0, world.query.transpose(0, 1)[None], key, value, options)[0])
    assert torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))


@needs_kernels
@pytest.mark.parametrize("dtype", INT8_TOLERANCE)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    extents=st.one_of(EXTENTS, st.just(TREES), st.just(MIXED)),
    heads=st.builds(HeadShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 140), st.integers(1, 140)),
    window=st.one_of(st.none(), st.integers(1, 300)),
    softcap=st.sampled_from([None, 2.0]),
)
def test_an_int8_pool_gives_the_same_bits_with_and_without_amx(
    extents: list[TreeSpanShape], heads: HeadShape, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    if native_instructions() is not Instructions.AMX:
        pytest.skip("no AMX on this processor")
    world = AttentionWorld(extents, heads, dtype=dtype, kind=KVDtype.INT8)
    options = LayerOptions(scaling=heads.key_dim**-0.5, window=window, softcap=softcap)
    outs = []
    for instructions in (Instructions.AVX512, Instructions.AMX):
        with held_to(instructions):
            outs.append(attend(world, options).float())
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("family", "kv"),
    [(family, kv) for family in ("llama", "gemma2", "gpt_oss") for kv in ("auto", "int8")] + [("deepseek_v3", "auto")],
)
def test_a_models_logits_are_those_of_the_torch_path(family: str, kv: str, tmp_path: Path) -> None:
    write_family(tmp_path, SERVED[family]())
    ours, theirs = (logits_by(attention, tmp_path, "cpu", kv) for attention in ("native", "torch"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_steps_compute_what_single_passes_do(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    check_steps("native", tmp_path, "cpu")
