"""A key that is hidden from a row counts for nothing in it, whatever its numbers are; every attention, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from engine.attention.base import LayerOptions, PlanAttention
from engine.attention.batch_invariant import BatchInvariantAttention
from engine.attention.native import NativeAttention
from engine.attention.torch_attention import TorchAttention
from engine.attention.triton_tiles import HeadShape
from engine.config import KVDtype
from tests.engine.fixtures.attention_fixtures import (
    BUSHY,
    DECODE,
    MIXED,
    PLAIN,
    TREES,
    VERIFY,
    AttentionWorld,
    TreeSpanShape,
    seen_places,
)
from tests.engine.fixtures.native_kernels import needs_float_kernels

NAN = float("nan")
SHORT = [*MIXED, *TREES]
WINDOWED = LayerOptions(scaling=0.3, window=6)
LONG = [TreeSpanShape(900, 40), TreeSpanShape(1022, 5), TreeSpanShape(1022, 8, BUSHY), *SHORT]


def attend(world: AttentionWorld, plan: PlanAttention, options: LayerOptions) -> Tensor:
    """[T, H * G, D of the values] of a pass that writes its keys and values first."""
    slots, key, value = world.new_kv()
    query = world.query.transpose(0, 1)[None]
    return plan(world.spans, world.cache, slots).attend(0, query, key, value, options)[0]


def middle(world: AttentionWorld) -> list[int]:
    """A place in each span that some of its rows see and others do not, where there is one."""
    return [span.start + len(span.token_ids) // 2 for span in world.spans]


def last(world: AttentionWorld) -> list[int]:
    return [span.end - 1 for span in world.spans]


def past(world: AttentionWorld) -> list[int]:
    """A place before each span, out of the windows of these tests, or its first place."""
    return [max(0, span.start - 8) for span in world.spans]


def sees(world: AttentionWorld, places: Seq[int], window: int | None) -> list[bool]:
    """True for each row of the pass that sees the place of its span."""
    return [
        place in seen_places(span, row, window)
        for span, place in zip(world.spans, places, strict=True)
        for row in range(len(span.token_ids))
    ]


def spoil(world: AttentionWorld, places: Seq[int], fault: float, *, keys: bool) -> None:
    """Have `fault` as the value at a place of each span, and as its key."""
    slots = torch.cat([world.slots(span, at, at + 1) for span, at in zip(world.spans, places, strict=True)])
    key, value = (heads[0].transpose(0, 1) for heads in world.heads_of(slots))
    value = value.new_full(value.shape, fault)
    key = key.new_full(key.shape, fault) if keys else key
    for cache in {world.cache, world.source}:
        cache.write(0, slots, key, value)


def check(plan: PlanAttention, new_world: Callable[[], AttentionWorld], options: LayerOptions = PLAIN) -> None:
    """Rows that do not see a fault have the bits that they have without it, and others are no numbers."""
    sound = new_world()
    if options.sinks is not None:
        sinks = torch.linspace(-1.0, 2.0, sound.query.shape[1])
        options = replace(options, sinks=sinks.to(sound.query))
    expected = attend(sound, plan, options)
    assert expected.isfinite().all()
    for choose, fault, keys in (
        (middle, NAN, True),
        (last, float("inf"), False),
        (past, NAN, True),
        (past, NAN, False),
    ):
        world = new_world()
        places = choose(world)
        spoil(world, places, fault, keys=keys)
        out = attend(world, plan, options)
        is_seen = torch.tensor(sees(world, places, options.window), device=out.device)
        assert torch.equal(out[~is_seen], expected[~is_seen])
        assert not out[is_seen].isfinite().any()


OPTIONS = pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        WINDOWED,
        LayerOptions(scaling=3.0, softcap=2.0),
        LayerOptions(scaling=0.3, window=6, sinks=torch.zeros(0)),
    ],
    ids=["plain", "windowed", "capped", "sinks"],
)


@OPTIONS
@pytest.mark.parametrize("kind", [KVDtype.AUTO, KVDtype.INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "heads",
    [HeadShape(1, 2, 16, 16), HeadShape(2, 2, 16, 16), HeadShape(4, 1, 24, 12)],
    ids=["of a rank", "grouped", "latent"],  # of a sharded model; of MLA, whose keys are wider than its values
)
@pytest.mark.parametrize(
    "extents", [SHORT, [TreeSpanShape(5, 1), TreeSpanShape(20, 40), TreeSpanShape(40, 2)]], ids=["short", "chunk"]
)
def test_torch_reads_hidden_keys_as_nothing(
    extents: list[TreeSpanShape], heads: HeadShape, dtype: torch.dtype, kind: KVDtype, options: LayerOptions
) -> None:
    check(TorchAttention, lambda: AttentionWorld(extents, heads, dtype=dtype, kind=kind), options)


def test_torch_reads_blocks_that_others_left_as_nothing() -> None:
    """Short spans are read together, padded with blocks whose tails no row has written: these are NaN here."""
    world = AttentionWorld([TreeSpanShape(3, 1), TreeSpanShape(37, 2), TreeSpanShape(20, 1)], HeadShape(2, 2, 16, 16))
    torch.testing.assert_close(attend(world, TorchAttention, PLAIN).double(), world.expected(PLAIN), rtol=0, atol=1e-5)


def test_keys_so_large_that_a_hidden_score_overflows_are_read_as_nothing() -> None:
    world = AttentionWorld([VERIFY], HeadShape(2, 2, 16, 16))
    expected = attend(world, TorchAttention, PLAIN)
    spoil(world, last(world), 3e38, keys=True)
    assert torch.equal(attend(world, TorchAttention, PLAIN)[:-1], expected[:-1])


@pytest.mark.parametrize("plan", [TorchAttention, BatchInvariantAttention])
@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, PLAIN), (torch.bfloat16, PLAIN), (torch.float32, WINDOWED)]
)
@pytest.mark.parametrize("query", [3e38, float("inf"), NAN])
@pytest.mark.parametrize("extents", [[VERIFY, DECODE], [TreeSpanShape(9, 40)]], ids=["together", "chunk"])
def test_a_query_that_overflows_changes_no_other_row(
    extents: list[TreeSpanShape], query: float, dtype: torch.dtype, options: LayerOptions, plan: PlanAttention
) -> None:
    """Other rows of its span, and other spans that are read with it, keep their bits."""
    heads, row = HeadShape(2, 2, 16, 16), 2
    expected = attend(AttentionWorld(extents, heads, dtype=dtype), plan, options)
    world = AttentionWorld(extents, heads, dtype=dtype)
    world.query[row] = query
    out = attend(world, plan, options)
    others = torch.arange(len(out)) != row
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("plan", [TorchAttention, BatchInvariantAttention])
def test_a_row_whose_hidden_score_alone_overflows_keeps_its_bits(plan: PlanAttention) -> None:
    """The key is so large that only the largest query overflows with it. Rows that see the key are finite too."""
    heads = HeadShape(1, 1, 16, 16)
    queries, key = [1.0, 1e20, 1.0, 2.0, 1.0], 1e19
    outs = []
    for hidden in (key, 0.0):
        world = AttentionWorld([VERIFY], heads)
        world.query[:] = 1e-20 * torch.tensor(queries)[:, None, None] * torch.ones(16)
        world.query[1, :, 0] = 1e20
        slot = world.slots(world.spans[0], 22, 23)
        heads_of = [tensor[0].transpose(0, 1).clone() for tensor in world.heads_of(slot)]
        heads_of[0][..., 0] = hidden
        world.cache.write(0, slot, *heads_of)
        outs.append(attend(world, plan, PLAIN))
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0][:2], outs[1][:2])


@pytest.mark.parametrize("options", [PLAIN, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_invariant_torch_reads_hidden_keys_as_nothing(dtype: torch.dtype, options: LayerOptions) -> None:
    check(BatchInvariantAttention, lambda: AttentionWorld(SHORT, HeadShape(2, 2, 16, 16), dtype=dtype), options)


@needs_float_kernels
@pytest.mark.usefixtures("any_instructions")
@OPTIONS
@pytest.mark.parametrize("kind", [KVDtype.AUTO, KVDtype.INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads",
    [HeadShape(2, 1, 64, 64), HeadShape(1, 3, 32, 32), HeadShape(1, 7, 24, 40)],
    ids=lambda heads: f"{heads.group_size}x{heads.key_dim}",
)
def test_our_kernels_read_hidden_keys_as_nothing(
    heads: HeadShape, dtype: torch.dtype, kind: KVDtype, options: LayerOptions
) -> None:
    check(NativeAttention, lambda: AttentionWorld(LONG, heads, dtype=dtype, kind=kind), options)


@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows beyond a span see nothing, and divide by it
@OPTIONS
@pytest.mark.parametrize(
    ("dtype", "heads", "kind"),
    [
        (torch.float32, HeadShape(1, 4, 16, 16), KVDtype.AUTO),
        (torch.float16, HeadShape(2, 1, 24, 8), KVDtype.AUTO),
        (torch.float16, HeadShape(2, 1, 24, 8), KVDtype.FP8),
    ],
    ids=["float32", "float16", "float8"],
)
def test_the_triton_kernel_reads_hidden_keys_as_nothing(
    dtype: torch.dtype, heads: HeadShape, kind: KVDtype, options: LayerOptions
) -> None:
    from engine.attention.triton_attention import TritonAttention

    extents = [TreeSpanShape(30, 1), TreeSpanShape(20, 5), TreeSpanShape(19, 9, BUSHY)]
    check(TritonAttention, lambda: AttentionWorld(extents, heads, dtype=dtype, kind=kind), options)
