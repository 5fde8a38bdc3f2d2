"""Passes that are padded to a bucket have the results of unpadded ones, and write no block of a sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.attention.torch_attention import TorchAttention
from engine.attention.triton_tiles import HeadShape, RowLayout, TileField, choose_tiling
from engine.batch.span import Span
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core.loading import load_engine
from engine.kv_cache.pool import KVCache, LayerShape
from engine.model.cuda_graphs.buckets import (
    GraphBucket,
    fitting_bucket,
    graph_buckets,
    max_spans,
    pad,
    row_sizes,
    sized,
)
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner
from engine.model.cuda_graphs.recorder import Compute, ForwardOutput, Record, recorder_of
from engine.model.cuda_graphs.static_attention import TiledAttention
from engine.model.cuda_graphs.static_batch import PlannedAttention
from engine.model.forward_batch import ForwardBatch
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.model_proposer import ModelProposer
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from tests.engine.fixtures.checkpoints import Folders, write_pair
from tests.engine.fixtures.families import SERVED, write_family
from tests.engine.fixtures.heads.heads_fixtures import write_medusa

BLOCK_SIZE = 4
NUM_BLOCKS = 64
GRAPHS = GraphConfig(GraphKind.EAGER, batches=(1, 2, 4), row_counts=(1, 4), has_trees=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_pair(tmp_path_factory.mktemp("pair"), noise=0.05)


def runner(path: Path, graphs: GraphConfig, attention: str = "torch", device: str = "cpu") -> ModelRunner:
    model = ModelConfig(str(path), dtype="float32", device=device, attention=attention, graphs=graphs)
    return ModelRunner(model, CacheConfig(BLOCK_SIZE, num_blocks=NUM_BLOCKS))


def random_passes(seed: int, num_passes: int) -> list[list[Span]]:
    """Prompts of three sequences in pieces, then passes of 1 to 4 rows of some of them, chains and trees."""
    rng = random.Random(seed)
    order = rng.sample(range(NUM_BLOCKS), 48)
    tables = [order[:16], order[16:32], order[32:]]
    lengths = [rng.randrange(5, 30) for _ in tables]
    passes = [[_span(rng, 0, length, table, 1) for length, table in zip(lengths, tables, strict=True)]]
    for _ in range(num_passes):
        spans = []
        for index in rng.sample(range(3), rng.randrange(1, 4)):
            num_rows = rng.randrange(1, 5)
            num_logits = rng.choice([num_rows, 1])
            span = _span(rng, lengths[index], num_rows, tables[index], num_logits)
            if num_rows > 2 and rng.random() < 0.4:
                parents = tuple(rng.randrange(-1, node) for node in range(num_rows - 1))
                span = span._replace(parents=parents)
            lengths[index] += rng.randrange(1, num_rows + 1)
            spans.append(span)
        passes.append(spans)
    return passes


def _span(rng: random.Random, start: int, num_rows: int, table: Seq[int], num_logits: int) -> Span:
    return Span([rng.randrange(64) for _ in range(num_rows)], start, table, num_logits)


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_padding_changes_no_logit_and_no_block_of_a_pass(folders: Folders, attention: str) -> None:
    """With `triton` these are the very buffers and lists of work that a GPU replays; where there is one, it does."""
    device = "cuda" if attention == "triton" and torch.cuda.is_available() else "cpu"
    graphs = replace(GRAPHS, kind=GraphKind.AUTO) if device == "cuda" else GRAPHS
    plain = runner(folders.target, GraphConfig(GraphKind.OFF), device=device)
    padded = runner(folders.target, graphs, attention, device)
    assert padded.num_blocks == plain.num_blocks == NUM_BLOCKS
    all_blocks = list(range(1, NUM_BLOCKS))  # many rows share the slots of block 0 when a GPU is warmed up
    for spans in random_passes(seed=0, num_passes=4 if attention == "triton" else 16):
        expected, logits = plain.forward(spans), padded.forward(spans)
        assert logits.shape == expected.shape
        assert torch.allclose(logits, expected, atol=1e-4), spans  # before the next pass overwrites them
        blocks = padded.export_blocks(all_blocks).view(torch.float32)
        assert torch.allclose(blocks, plain.export_blocks(all_blocks).view(torch.float32), atol=1e-4), spans
    assert padded._graphs is not None
    assert any(fitting_bucket(spans, graph_buckets(GRAPHS)) for spans in random_passes(0, 4))


def test_padding_lies_in_the_scratch_block_and_fills_its_bucket() -> None:
    bucket = GraphBucket(36, 9)
    spans = [Span([1] * 9, 3, [0, 1, 2], 9), Span([1], 7, [5, 6], 1)]
    padded = pad(spans, bucket, scratch_block=63, block_size=BLOCK_SIZE)
    assert padded[:2] == spans
    assert sum(len(span.token_ids) for span in padded) == bucket.num_rows
    assert len(padded) <= max_spans(bucket, 4, BLOCK_SIZE)
    for span in padded[2:]:
        assert span.block_table == [63]
        assert span.end <= BLOCK_SIZE


@pytest.mark.parametrize("window", [None, 8])
def test_no_pass_of_a_bucket_needs_more_programs_than_were_recorded(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst contexts for the splits of a device with 132 processors: all long, one long, just above a split."""
    monkeypatch.setattr("engine.model.cuda_graphs.static_attention.num_processors", lambda device: 132)
    heads = HeadShape(num_kv_heads=2, group_size=4, key_dim=16, value_dim=16)
    bucket = GraphBucket(24, 6)
    cache = KVCache([LayerShape(2, 16, 16)], 1, BLOCK_SIZE, dtype=torch.bfloat16, device=torch.device("cpu"))
    tables = torch.zeros(4 * 10_000 + 24, dtype=torch.int32)
    attention = TiledAttention(bucket, cache, tables, max_batch=4, has_trees=False)
    static = attention._launches[window, heads] = attention._new_launch(window, heads, itemsize=2)
    launch = static.launch
    for contexts in ([39_000] * 4, [39_000], [257] * 4, [39_000, 1, 1, 1], [512, 513, 511, 5], [255, 256, 257, 300]):
        for num_rows in (1, 6):
            spans = [Span([0] * num_rows, start, [0] * 10_000, num_rows) for start in contexts]
            padded = pad(spans, bucket, 0, BLOCK_SIZE)
            attention.fill(RowLayout.of(padded, BLOCK_SIZE))
            work = launch.tiles[launch.tiles[:, 2] > 0]
            assert work[:, -1].max() < launch.num_partials
            rows = set(map(tuple, work[:, [TileField.FIRST_ROW, TileField.FIRST_PACKED]].tolist()))
            assert len(rows) >= len(contexts)


LLAMA = HeadShape(num_kv_heads=8, group_size=4, key_dim=128, value_dim=128)


def deterministic(bucket: GraphBucket, longest: int, pool_tokens: int, window: int | None = None) -> TiledAttention:
    """The recorded attention of a deterministic Llama with 64 sequences, laid out for `window`."""
    cache = KVCache([LayerShape(8, 128, 128)], 1, 16, dtype=torch.bfloat16, device=torch.device("cpu"))
    tables = torch.zeros(64 * -(-longest // 16) + bucket.num_rows, dtype=torch.int32)
    limits = (longest, pool_tokens)
    attention = TiledAttention(bucket, cache, tables, 64, has_trees=False, batch_invariant=limits)
    attention._launches[window, LLAMA] = attention._new_launch(window, LLAMA, itemsize=2)
    return attention


@pytest.mark.parametrize(
    ("bucket", "most_programs", "most_mib"),
    [(GraphBucket(64, 1), 4_600, 40), (GraphBucket(320, 5), 9_000, 75), (GraphBucket(1088, 17), 22_500, 180)],
)
def test_a_deterministic_pass_reserves_programs_and_sums_for_the_pool_and_not_for_the_longest_contexts(
    bucket: GraphBucket, most_programs: int, most_mib: int
) -> None:
    """60 GiB of an 8 B Llama are 491,520 tokens; 64 contexts of 131,072 would take 86,688 programs, and 3.2 GiB."""
    (static,) = deterministic(bucket, 131_072, 491_520)._launches.values()
    launch = static.launch
    assert len(launch.tiles) * 8 <= most_programs
    assert launch.num_partials * 8 * launch.tiling.block_m * (128 + 2) * 4 <= most_mib << 20
    (shorter,) = deterministic(bucket, 16_384, 491_520)._launches.values()
    assert len(shorter.launch.tiles) == len(launch.tiles)


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("bucket", [GraphBucket(64, 1), GraphBucket(320, 5)])
def test_deterministic_contexts_that_fill_the_pool_have_room(bucket: GraphBucket, window: int | None) -> None:
    attention = deterministic(bucket, 131_072, 491_520, window)
    rows = bucket.rows_per_span
    for length in ([131_072] * 3, [7_680] * 64, [1_025] * 64, [131_072, *[5_500] * 63], [1_024] * 64, [5] * 64):
        spans = [Span([0] * rows, each - rows, [0] * 8_192, rows) for each in length]
        assert attention.fill(RowLayout.of(pad(spans, bucket, 0, 16), 16))


def test_contexts_that_share_more_than_the_pool_have_none_and_leave_the_work_as_it_was() -> None:
    bucket = GraphBucket(64, 1)
    attention = deterministic(bucket, 131_072, 491_520)
    (static,) = attention._launches.values()
    table = [0] * 8_192
    assert attention.fill(RowLayout.of([Span([0], 4_000, table, 1)] * 64, 16))
    before = static.launch.tiles.clone()
    assert not attention.fill(RowLayout.of([Span([0], 131_071, table, 1)] * 64, 16))
    assert torch.equal(static.launch.tiles, before)


def test_a_pass_without_room_among_the_recorded_work_is_computed_call_by_call(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, padded = runner(folders.target, GraphConfig(GraphKind.OFF)), runner(folders.target, GRAPHS)
    monkeypatch.setattr(PlannedAttention, "fill", lambda attention, layout: False)
    span = Span([5, 6], 0, [1], 2)
    assert torch.equal(padded.forward([span]), plain.forward([span]))
    for mine, theirs in zip(padded.plan_own_steps([span]), plain.plan_own_steps([span]), strict=True):
        for step in (mine, theirs):
            step.input_ids.fill_(9)
        assert torch.equal(padded.run(mine), plain.run(theirs))


def test_buckets_follow_from_the_limits_of_the_engine() -> None:
    limits = SchedulerConfig(max_num_sequences=24, max_tokens_per_step=64)
    graphs = sized(GraphConfig(batches=(1, 16, 32)), limits, SpeculationConfig(3))
    assert graph_buckets(graphs) == [
        GraphBucket(1, 1),
        GraphBucket(4, 4),
        GraphBucket(16, 1),
        GraphBucket(16, 4),
        GraphBucket(24, 1),
        GraphBucket(24, 4),
        GraphBucket(64, 4),
    ]
    tree = sized(GraphConfig(), limits, SpeculationConfig(3, tree_nodes=8))
    assert (tree.row_counts, tree.has_trees) == ((1, 4, 9), True)
    assert sized(GraphConfig(), limits, SpeculationConfig(2, max_num_tokens=5, adaptive=True)).row_counts == (1, 3, 6)
    suffixes = SpeculationConfig(3, max_num_tokens=8, methods=(SpeculationMethod.SUFFIX,))
    assert sized(GraphConfig(), limits, suffixes).row_counts == (1, 4, 9)


def test_the_smallest_bucket_with_room_is_taken() -> None:
    buckets = graph_buckets(GRAPHS)
    one, four = Span([1], 0, [0], 1), Span([1] * 4, 0, [0], 4)
    assert fitting_bucket([one], buckets) == GraphBucket(1, 1)
    assert fitting_bucket([one] * 3, buckets) == GraphBucket(4, 1)
    assert fitting_bucket([one, four], buckets) == GraphBucket(8, 4)
    assert fitting_bucket([four] * 3, buckets) == GraphBucket(16, 4)
    assert fitting_bucket([four] * 5, buckets) is None
    assert fitting_bucket([Span([1] * 5, 0, [0, 1], 5)], buckets) is None


def test_few_long_drafts_among_many_sequences_take_few_rows() -> None:
    limits = SchedulerConfig(max_num_sequences=64)
    buckets = graph_buckets(sized(GraphConfig(), limits, SpeculationConfig(4)))
    one, five = Span([1], 0, [0], 1), Span([1] * 5, 0, [0], 5)
    assert fitting_bucket([*[one] * 32, five], buckets) == GraphBucket(40, 5)
    assert buckets[-1] == GraphBucket(320, 5)
    sizes = row_sizes(2048)
    assert all(larger - size <= max(8, size // 8) for size, larger in pairwise(sizes))


ADAPTIVE = SpeculationConfig(4, adaptive=True)  # the default pair's


@pytest.mark.parametrize(
    ("num_drafts", "bucket", "block_m", "num_warps"),
    [
        (0, GraphBucket(32, 1), 16, 4),
        (1, GraphBucket(64, 5), 32, 4),
        (4, GraphBucket(160, 5), 32, 4),
        (8, GraphBucket(320, 9), 64, 4),
        (16, GraphBucket(640, 17), 128, 8),
    ],
)
def test_tiles_are_as_high_as_the_drafts_of_the_pass_need_where_drafts_adapt(
    num_drafts: int, bucket: GraphBucket, block_m: int, num_warps: int
) -> None:
    """32 sequences of a Llama with four query heads per kv head."""
    buckets = graph_buckets(sized(GraphConfig(), SchedulerConfig(), ADAPTIVE))
    found = fitting_bucket([Span([1] * (num_drafts + 1), 0, [0], 1)] * 32, buckets)
    assert found == bucket
    tiling = choose_tiling(found.rows_per_span, HeadShape(8, 4, 128, 128), itemsize=2)
    assert (tiling.block_m, tiling.num_warps) == (block_m, num_warps)


@pytest.mark.parametrize("num_drafts", [1, 4, 8, 16])
def test_drafts_of_one_length_have_buckets_of_their_own_rows(num_drafts: int) -> None:
    graphs = sized(GraphConfig(), SchedulerConfig(), SpeculationConfig(num_drafts))
    assert {bucket.rows_per_span for bucket in graph_buckets(graphs)} == {1, num_drafts + 1}


@pytest.mark.parametrize("batch", [3, 50, 64])
@pytest.mark.parametrize("batches", [(), (1, 8, 64)])
def test_no_pass_gets_higher_tiles_than_its_longest_span_needs(batch: int, batches: tuple[int, ...]) -> None:
    graphs = sized(GraphConfig(batches=batches), SchedulerConfig(max_num_sequences=batch), ADAPTIVE)
    buckets = graph_buckets(graphs)
    for longest in range(2 if batches else 1, 18):  # decodes between the given sizes take what has the fewest rows
        for others in range(batch):
            found = fitting_bucket([Span([1] * longest, 0, [0], 1), *[Span([1], 0, [0], 1)] * others], buckets)
            assert found is not None
            assert found.rows_per_span == min(rows for rows in graphs.row_counts if rows >= longest)


def test_drafts_that_adapt_take_a_bounded_number_of_recordings() -> None:
    """Each takes up to a second at start: 77 of 64 sequences, where one height of tiles would take 54."""
    for num_tokens in range(17):
        graphs = sized(GraphConfig(), SchedulerConfig(), replace(ADAPTIVE, num_tokens=num_tokens))
        assert len(graph_buckets(graphs)) <= 90
        assert len(graphs.row_counts) <= 5
    assert len(graph_buckets(sized(GraphConfig(), SchedulerConfig(), ADAPTIVE))) == 77


def recorded(record: Record, num_masked: int = 0) -> CudaGraphRunner:
    """A runner of a model whose logits are its token ids, over a fake of a GPU's recorder.

    The last `num_masked` tokens have no text.
    """
    cache = KVCache([LayerShape(1, 8, 8)], 3, BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"))

    def forward(batch: ForwardBatch, out: torch.Tensor) -> ForwardOutput:
        out.copy_(torch.nn.functional.one_hot(batch.input_ids, 64).float())
        out[:, 64 - num_masked :] = float("-inf")
        return ForwardOutput(out)

    graphs = GraphConfig(GraphKind.EAGER, batches=(1, 2), row_counts=(1, 3))
    return CudaGraphRunner(forward, cache, TorchAttention, graphs, 32, 64, record)


def test_what_cannot_be_recorded_is_computed_call_by_call(caplog: pytest.LogCaptureFixture) -> None:
    def record(compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing")

    passes = recorded(record)
    assert not passes.has_passes
    assert passes.forward([Span([1], 0, [0], 1)]) is None
    assert "not permitted" in caplog.text


def test_a_model_that_cannot_be_recorded_whole_has_no_recording(caplog: pytest.LogCaptureFixture) -> None:
    def record(compute: Compute) -> Compute:
        if len(compute().logits) < 6:  # after larger ones have been recorded
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute

    assert not recorded(record).has_passes
    assert "call by call" in caplog.text


def test_masked_tokens_lose_no_recording() -> None:
    """Many checkpoints have more rows in the head than tokens in the tokenizer."""
    passes = recorded(lambda compute: compute, num_masked=3)
    assert passes._buckets == graph_buckets(GraphConfig(GraphKind.EAGER, batches=(1, 2), row_counts=(1, 3)))


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_replay_that_is_not_finite_where_the_pass_is_is_not_trusted(fault: float) -> None:
    def record(compute: Compute) -> Compute:
        def replay() -> ForwardOutput:
            output = compute()
            output.logits[-1, 5] = fault
            return output

        return replay

    assert not recorded(record, num_masked=3).has_passes


def test_a_replay_that_differs_in_its_last_row_alone_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    def record(compute: Compute) -> Compute:
        def replay() -> ForwardOutput:
            output = compute()
            if len(output.logits) == 6:
                output.logits[-1] = output.logits[-1].roll(1)
            return output

        return replay

    assert recorded(record).forward([Span([7] * 3, 0, [0], 3)] * 2) is None
    assert "GraphBucket(num_rows=6, rows_per_span=3) is computed call by call" in caplog.text


@pytest.mark.parametrize("is_first", [True, False])
def test_too_little_memory_for_a_recording_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """The device runs out in the first computation of a bucket, or in its recording."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 29, 80 << 30))

    def fail(*args: object) -> Compute:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80")

    def record(compute: Compute) -> Compute:
        return compute

    if is_first:
        monkeypatch.setattr(torch.nn.functional, "one_hot", fail)
    what = "recorded passes of 6 rows" if is_first else "a recording of 6 rows"
    with pytest.raises(
        ConfigError, match=rf"no memory for {what} \(tried to allocate 2.00 gib\): 0.50 of 80.00 GiB are"
    ):
        recorded(record if is_first else fail)


def test_a_replay_that_differs_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    """A recording that holds the tokens of its own first pass, as one does whose tensors have moved."""

    def record(compute: Compute) -> Compute:
        output = compute()
        if len(output.logits) != 6:
            return compute
        frozen = output.logits.clone()
        return lambda: ForwardOutput(frozen)

    passes = recorded(record)
    assert passes.has_passes
    three, span = Span([7] * 3, 0, [0], 3), Span([9], 0, [1], 1)
    output = passes.forward([span])
    assert output is not None
    assert output.logits.argmax(dim=1).tolist() == [9]
    assert passes.forward([three, three]) is None
    assert "GraphBucket(num_rows=6, rows_per_span=3) is computed call by call" in caplog.text


@pytest.mark.parametrize("row_counts", [(1, 3), (1, 9)])
def test_no_recording_is_lost_where_rows_are_written_in_any_order(
    folders: Folders, row_counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU writes the rows of a pass in no fixed order; where two rows share a slot, either may remain."""
    write, generator = KVCache.write, torch.Generator().manual_seed(1)

    def write_in_any_order(
        cache: KVCache, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        for row in torch.randperm(len(key), generator=generator):
            one = row[None]
            write(cache, layer, slots[one], key[one], value[one])

    plain = runner(folders.target, GraphConfig(GraphKind.OFF))
    monkeypatch.setattr(KVCache, "write", write_in_any_order)
    graphs = GraphConfig(GraphKind.EAGER, max_batch=5, row_counts=row_counts)
    passes = CudaGraphRunner(
        plain._pass, plain._cache, TorchAttention, graphs, 32, plain.vocab_size, lambda compute: compute
    )
    assert passes._buckets == graph_buckets(graphs)


@pytest.mark.parametrize("tree_nodes", [0, 5])
def test_texts_are_the_same_with_padded_passes(folders: Folders, tree_nodes: int) -> None:
    def generate(kind: GraphKind) -> dict[str, list[int]]:
        graphs = GraphConfig(kind, batches=(2, 4))
        model = ModelConfig(str(folders.target), dtype="float32", device="cpu", graphs=graphs)
        cache, limits = CacheConfig(BLOCK_SIZE, num_blocks=NUM_BLOCKS), SchedulerConfig(3, 32)
        speculation = SpeculationConfig(3, tree_nodes=tree_nodes)
        draft = ModelConfig(str(folders.draft), "float32", "cpu", graphs=sized(graphs, limits, speculation))
        proposer = ModelProposer.from_config(draft, cache, limits)
        core = load_engine(EngineConfig(model, cache, limits, speculation), proposer)
        for index in range(5):
            sampling = SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=20)
            core.add(GenerateRequest(str(index), tuple(range(1, 9 + index)), sampling))
        texts: dict[str, list[int]] = {}
        while core.has_work:
            for chunk in core.step():
                texts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            core.scheduler.check_integrity()
        return texts

    assert generate(GraphKind.EAGER) == generate(GraphKind.OFF)


def test_a_head_reads_the_rows_of_the_pass_and_none_of_its_padding(tmp_path: Path, folders: Folders) -> None:
    write_medusa(tmp_path / "head", folders.target)
    head = HeadConfig(HeadKind.MEDUSA, str(tmp_path / "head"))
    plain, padded = (
        ModelRunner(
            ModelConfig(str(folders.target), "float32", "cpu", graphs=graphs),
            CacheConfig(BLOCK_SIZE, num_blocks=NUM_BLOCKS),
            head=head,
        )
        for graphs in (GraphConfig(GraphKind.OFF), GRAPHS)
    )
    for spans in random_passes(seed=1, num_passes=3):
        plain.forward(spans)
        padded.forward(spans)
        assert plain.features is not None
        assert padded.features is not None
        assert padded.features.shape == plain.features.shape
        assert torch.allclose(padded.features, plain.features, atol=1e-4)


def test_a_budget_in_bytes_pays_for_the_block_of_the_padding_too(folders: Folders) -> None:
    model = ModelConfig(str(folders.target), dtype="float32", device="cpu", graphs=GRAPHS)
    budget = CacheConfig(BLOCK_SIZE, memory_bytes=1 << 16)
    off = replace(model, graphs=GraphConfig(GraphKind.OFF))
    assert ModelRunner(model, budget).num_blocks == ModelRunner(off, budget).num_blocks - 1


def test_padding_changes_no_logit_of_a_family_that_is_not_recorded(tmp_path: Path) -> None:
    """A processor records no family; `eager` pads for every one of them."""
    write_family(tmp_path, SERVED["gpt2"]())
    span = Span([5], 0, [1], 1)
    plain, padded = runner(tmp_path, GraphConfig()), runner(tmp_path, GRAPHS)
    assert plain._graphs is None
    assert torch.allclose(padded.forward([span]), plain.forward([span]), atol=1e-4)


def test_eager_passes_are_not_recorded_on_a_gpu_either() -> None:
    assert recorder_of(GraphKind.EAGER, torch.device("cuda")) is None
