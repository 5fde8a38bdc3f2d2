"""The Triton kernel against float64 and against the processor's path; interpreted where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.base import LayerOptions
from engine.attention.torch_attention import TorchAttention
from engine.attention.triton_tiles import HeadShape, Tiling, split_tiles, whole_tiles
from engine.batch.indexing import send
from engine.config import KVDtype
from engine.model.decoders.fused_decoder import FusedDecoder
from tests.engine.fixtures.attention_fixtures import (
    CHUNK,
    DECODE,
    DEVICE,
    MIXED,
    PLAIN,
    TREES,
    VERIFY,
    AttentionWorld,
    TreeSpanShape,
    check_steps,
    logits_by,
)
from tests.engine.fixtures.families import SERVED, write_family

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.attention.triton_attention import Launch, RowMasks, TritonAttention, paged_attention
from engine.attention.triton_tiles import RowLayout

# Rows beyond a span see nothing, and divide by it; they are not stored.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = Tiling(block_m=16, block_n=16, num_warps=4, num_stages=2)
WHOLE = 1 << 30  # keys per split: no split
EIGHT = HeadShape(num_kv_heads=1, group_size=4, key_dim=16, value_dim=16)


def attend(
    world: AttentionWorld,
    options: LayerOptions,
    tiling: Tiling = SMALL,
    split_tokens: int = 16,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    layout = RowLayout.of(world.spans, world.cache.block_size)
    tables = send(torch.from_numpy(layout.tables), DEVICE)
    plan = split_tiles(whole_tiles(layout, options.window, tiling, world.heads.group_size), split_tokens)
    masks = RowMasks.of(world.spans, options.window, DEVICE)
    launch = Launch.of(plan, tiling, world.heads.group_size, tables, masks)
    return paged_attention(world.query, world.cache.keys[0], world.cache.values[0], launch, options, scales)


def check(world: AttentionWorld, options: LayerOptions = PLAIN, tiling: Tiling = SMALL, split_tokens: int = 16) -> None:
    out = attend(world, options, tiling, split_tokens).double()
    torch.testing.assert_close(out, world.expected(options), rtol=0, atol=1e-5)


@pytest.mark.parametrize("group_size", [1, 4, 7, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_each_row_of_a_mixed_launch_sees_its_own_sequence_up_to_itself(num_kv_heads: int, group_size: int) -> None:
    check(AttentionWorld(MIXED, HeadShape(num_kv_heads, group_size, 16, 16)), split_tokens=32)


@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize("split_tokens", [16, WHOLE])
def test_block_sizes_and_splits_change_nothing(block_size: int, split_tokens: int) -> None:
    check(AttentionWorld([DECODE, VERIFY], EIGHT, block_size=block_size), split_tokens=split_tokens)


def test_what_is_read_without_a_mask_ends_where_the_first_row_stops_seeing() -> None:
    check(AttentionWorld([TreeSpanShape(start, 3) for start in (14, 15, 16)], EIGHT), split_tokens=WHOLE)


def test_more_splits_than_are_merged_at_a_time() -> None:
    check(AttentionWorld([TreeSpanShape(160, 1), TreeSpanShape(5, 1)], EIGHT))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 8), (8, 40)])
def test_head_sizes_need_not_be_powers_of_two_nor_equal(key_dim: int, value_dim: int) -> None:
    check(AttentionWorld([DECODE, VERIFY], HeadShape(2, 2, key_dim, value_dim)))


@pytest.mark.parametrize("window", [1, 6, 17, 100])
def test_a_sliding_window_hides_what_lies_before_it(window: int) -> None:
    check(AttentionWorld(MIXED, EIGHT), LayerOptions(scaling=0.3, window=window))


@pytest.mark.parametrize("split_tokens", [16, WHOLE])
def test_softcaps_bound_scores_and_sinks_take_probability(split_tokens: int) -> None:
    sinks = torch.linspace(-1.0, 6.0, 4, device=DEVICE)
    options = LayerOptions(scaling=3.0, softcap=2.0, sinks=sinks)
    check(AttentionWorld([DECODE, VERIFY], EIGHT), options, split_tokens=split_tokens)


@pytest.mark.parametrize("window", [None, 2, 3, 8])
def test_a_node_of_a_tree_sees_its_ancestors_and_what_lies_before_the_tree(window: int | None) -> None:
    check(AttentionWorld(TREES, EIGHT), LayerOptions(scaling=0.3, window=window))


def test_a_tree_may_have_64_nodes() -> None:
    parents = (-1, *((node - 1) // 2 for node in range(1, 64)))
    check(
        AttentionWorld([TreeSpanShape(5, 64, parents)], HeadShape(1, 1, 16, 16)),
        tiling=Tiling(64, 32, 4, 2),
        split_tokens=WHOLE,
    )


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_is_as_good_as_its_rounding(dtype: torch.dtype, atol: float) -> None:
    world = AttentionWorld([VERIFY, CHUNK], EIGHT, dtype=dtype)
    out = attend(world, PLAIN)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), world.expected(PLAIN), rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_float8_keys_and_values_are_read_with_the_scales_of_their_heads(dtype: torch.dtype, atol: float) -> None:
    world = AttentionWorld([DECODE, VERIFY], HeadShape(2, 2, 16, 16), dtype=dtype)
    scales = (torch.tensor([0.5, 2.0], device=DEVICE), torch.tensor([0.25, 3.0], device=DEVICE))
    wide = []
    for pools, factors in ((world.cache.keys, scales[0]), (world.cache.values, scales[1])):
        stored = (pools[0].float() / factors[:, None]).to(torch.float8_e4m3fn)
        wide.append(stored.double() * factors[:, None].double())
        pools[0] = stored
    out = attend(world, PLAIN, scales=scales)
    world.cache.keys[0], world.cache.values[0] = wide
    torch.testing.assert_close(out.double(), world.expected(PLAIN), rtol=0, atol=atol)


def test_a_float8_pool_is_read_as_it_was_written() -> None:
    world = AttentionWorld([DECODE, TREES[2]], HeadShape(2, 2, 24, 8), kind=KVDtype.FP8)
    assert world.cache.keys[0].dtype is torch.float8_e4m3fn
    check(world)


EXTENTS = st.lists(
    st.builds(TreeSpanShape, st.integers(0, 40), st.one_of(st.just(1), st.integers(2, 20))), min_size=1, max_size=3
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    extents=EXTENTS,
    group_size=st.sampled_from([1, 3, 4]),
    block_m=st.sampled_from([16, 32]),
    block_n=st.sampled_from([16, 32]),
    split_tokens=st.sampled_from([32, 64, WHOLE]),
    window=st.one_of(st.none(), st.integers(1, 50)),
    seed=st.integers(0, 100),
)
@example(
    extents=[TreeSpanShape(3, 1), TreeSpanShape(40, 5)],
    group_size=3,
    block_m=16,
    block_n=16,
    split_tokens=32,
    window=1,
    seed=0,
)
def test_any_pass_equals_the_oracle(
    extents: list[TreeSpanShape],
    group_size: int,
    block_m: int,
    block_n: int,
    split_tokens: int,
    window: int | None,
    seed: int,
) -> None:
    world = AttentionWorld(extents, HeadShape(1, group_size, 16, 16), seed=seed)
    check(world, LayerOptions(scaling=0.3, window=window), Tiling(block_m, block_n, 4, 2), split_tokens)


@pytest.mark.parametrize("window", [None, 6])
def test_a_pass_computes_what_the_processors_pass_does(window: int | None) -> None:
    world = AttentionWorld([*MIXED, *TREES], HeadShape(2, 2, 16, 8))
    slots, key, value = world.new_kv()
    query = world.query.transpose(0, 1)[None]
    options = LayerOptions(scaling=0.3, softcap=5.0, window=window)
    world.cache.keys[0].nan_to_num_()  # the processor's path reads and masks what nobody has written
    world.cache.values[0].nan_to_num_()
    ours, theirs = (
        plan(world.spans, world.cache, slots).attend(0, query, key, value, options)
        for plan in (TritonAttention, TorchAttention)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_a_models_logits_are_those_of_the_torch_path(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, SERVED[family]())
    is_ours = family != "deepseek_v3"  # on GPUs it goes module by module, without latents in the pool
    with patch.object(FusedDecoder, "fits", return_value=is_ours):
        ours, theirs = (logits_by(attention, tmp_path, DEVICE.type) for attention in ("triton", "torch"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_steps_compute_what_single_passes_do(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    check_steps("triton", tmp_path, DEVICE.type)
