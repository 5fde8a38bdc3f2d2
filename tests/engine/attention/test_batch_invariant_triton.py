"""Attention of deterministic models on GPUs: a row's bits depend on its own text alone; interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.attention import triton_tiles
from engine.attention.base import LayerOptions, PlanAttention
from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache, LayerShape
from tests.engine.fixtures.attention_fixtures import DEVICE

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.attention import triton_attention
from engine.attention.triton_attention import TritonAttention, batch_invariant_triton

# Rows beyond a span see nothing, and divide by it; they are not stored.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("dots_without_places")]

LENGTH, BLOCK_SIZE = 100, 8
SPLIT_TOKENS = 32  # the interpreter is slow
NUM_KV_HEADS, GROUP_SIZE, DIM = 1, 2, 16
FIRST = 84  # the rows that are looked at read three or four splits
NUM_BLOCKS = -(-LENGTH // BLOCK_SIZE)


class RandomText:
    """Queries, keys and values of one text in a pool with another one."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = LayerShape(NUM_KV_HEADS, DIM, DIM)
        self.cache = KVCache([shape], 2 * NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=DEVICE)
        self.tables = torch.randperm(2 * NUM_BLOCKS, generator=generator).view(2, NUM_BLOCKS).tolist()
        sizes = ((NUM_KV_HEADS * GROUP_SIZE, 2), (NUM_KV_HEADS, 1), (NUM_KV_HEADS, 1))
        self.parts = [
            (scale * torch.randn(heads, 2 * LENGTH, DIM, generator=generator)).to(DEVICE, dtype)
            for heads, scale in sizes
        ]
        for text, table in enumerate(self.tables):
            slots = [block * BLOCK_SIZE + offset for block in table for offset in range(BLOCK_SIZE)][:LENGTH]
            own = slice(text * LENGTH, (text + 1) * LENGTH)
            key, value = (part[:, own].transpose(0, 1) for part in self.parts[1:])
            self.cache.write(0, index_tensor(slots, DEVICE), key, value)

    def attend(
        self, plan: PlanAttention, pieces: Seq[tuple[int, int, int]], options: LayerOptions = LayerOptions(0.3)
    ) -> Tensor:
        """Attention of pieces (text, start, end) in one pass, [T, H * G, D]."""
        spans = [Span([0] * (end - start), start, self.tables[text], end - start) for text, start, end in pieces]
        places = [(text, at) for text, start, end in pieces for at in range(start, end)]
        rows = index_tensor((text * LENGTH + at for text, at in places), DEVICE)
        slots = index_tensor(
            (self.tables[text][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for text, at in places), DEVICE
        )
        query, key, value = (part[None, :, rows] for part in self.parts)
        return plan(spans, self.cache, slots).attend(0, query, key, value, options)[0]

    def in_pieces(self, plan: PlanAttention, cuts: Seq[int], options: LayerOptions) -> Tensor:
        """Rows from FIRST on, cut at `cuts`; every second piece has the other text in its batch, before or after it."""
        found = []
        for index, (start, end) in enumerate(pairwise((FIRST, *cuts, LENGTH))):
            mine, other = (0, start, end), (1, 20 * index, 20 * index + 7)
            pieces = [mine] if index % 2 else [other, mine] if index % 4 else [mine, other]
            out = self.attend(plan, pieces, options)
            first = 7 if pieces[0] is other else 0
            found.append(out[first : first + end - start])
        return torch.cat(found)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def text(request: pytest.FixtureRequest) -> RandomText:
    return RandomText(request.param)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "BATCH_INVARIANT_SPLIT_TOKENS", SPLIT_TOKENS)
    monkeypatch.setattr(triton_tiles, "_MIN_SPLIT_TOKENS", SPLIT_TOKENS)
    monkeypatch.setattr(triton_tiles, "_STEP_BYTES", 2048)  # 32 keys at a time


CUTS = [(85, 90), (94, 96, 97)]
OPTIONS = {
    "plain": LayerOptions(0.3),
    "window": LayerOptions(0.3, window=50),
    "softcap, sinks": LayerOptions(
        0.3, softcap=20.0, sinks=torch.linspace(-1, 1, NUM_KV_HEADS * GROUP_SIZE).to(DEVICE)
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_rows_bits_are_the_same_however_the_text_is_cut_and_whatever_is_beside_it(
    text: RandomText, name: str
) -> None:
    options = OPTIONS[name]
    expected = text.attend(batch_invariant_triton, [(0, FIRST, LENGTH)], options)
    assert torch.equal(text.attend(batch_invariant_triton, [(0, 76, LENGTH)], options)[FIRST - 76 :], expected)
    torch.testing.assert_close(expected, text.attend(TritonAttention, [(0, FIRST, LENGTH)], options), rtol=0, atol=0.02)
    for cuts in CUTS:
        assert torch.equal(text.in_pieces(batch_invariant_triton, cuts, options), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiles of a card may give a row the same bits by chance")
def test_without_fixed_tiles_and_splits_they_are_not() -> None:
    text = RandomText(torch.float32)  # whose results are not rounded again
    expected = text.attend(TritonAttention, [(0, FIRST, LENGTH)])
    found = [text.in_pieces(TritonAttention, cuts, OPTIONS["plain"]) for cuts in CUTS]
    assert not all(torch.equal(each, expected) for each in found)
