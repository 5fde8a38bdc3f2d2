"""Recorded steps of a draft model draft the tokens of steps that the host lays out one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from engine.attention.triton_attention import Launch
from engine.attention.triton_tiles import HeadShape, RowLayout, TileField
from engine.batch.draft import Draft, Offer
from engine.batch.span import Span
from engine.config import CacheConfig, GraphConfig, GraphKind, ModelConfig, SchedulerConfig
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.pool import KVCache, LayerShape
from engine.model.cuda_graphs.buckets import GraphBucket
from engine.model.cuda_graphs.draft_steps import MAX_STEPS, DraftSteps
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner
from engine.model.cuda_graphs.recorder import Compute
from engine.model.cuda_graphs.static_attention import TiledAttention
from engine.model.cuda_graphs.static_batch import PlannedAttention, StaticBatch
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.ahead_drafter import PendingPass
from engine.proposer.draft_model.draft_model import DraftModel
from engine.proposer.draft_model.loader import load_drafter
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.translation import SameVocabulary
from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import noise_keys
from engine.sampling.step_draw import MAX_TOP_K
from engine.sequence.sequence import Sequence
from protos.errors import ConfigError
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.builders import make_scheduled, make_sequence
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.fixtures.pairs.foreign_pair import COVERAGE, write_small_pair

BATCHES = (1, 2, 4, 8)
EAGER = GraphConfig(GraphKind.EAGER, BATCHES, row_counts=(1, 5), draft_ids_end=VOCAB_SIZE)
GREEDY = SamplingParams(temperature=0.0, max_tokens=400)
SAMPLED = SamplingParams(temperature=0.7, max_tokens=400)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "top_p": replace(SAMPLED, top_p=0.9),
    "min_p": replace(SAMPLED, temperature=2.0, min_p=0.1),
    "top_k": replace(SAMPLED, temperature=3.0, top_k=3),
    "top_k, top_p": replace(SAMPLED, temperature=2.0, top_k=MAX_TOP_K - 20, top_p=0.8),
}
BY_HOST = {
    "penalties": replace(SAMPLED, presence_penalty=0.5),
    "bias": replace(GREEDY, logit_bias=((7, 3.0),)),
    "large top_k": replace(SAMPLED, top_k=MAX_TOP_K + 1),
    "bad words": replace(GREEDY, bad_words=((7,),)),
    "min_tokens": replace(GREEDY, min_tokens=3, stop_token_ids=(0,)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    write_checkpoint(path, seed=0)
    return path


def proposer(
    folder: Path, graphs: GraphConfig, attention: str = "torch", target_vocab_size: int | None = None
) -> ModelProposer:
    device = "cuda" if attention == "triton" and torch.cuda.is_available() else "cpu"
    kind = GraphKind.AUTO if device == "cuda" and graphs.kind is GraphKind.EAGER else graphs.kind
    model = ModelConfig(str(folder), "float32", device, attention=attention, graphs=replace(graphs, kind=kind))
    runner = ModelRunner(model, CacheConfig(4, num_blocks=160))
    blocks = BlockManager(runner.num_blocks, runner.block_size, runner.model_version)
    translation = SameVocabulary(runner.vocab_size, target_vocab_size or runner.vocab_size)
    return ModelProposer(DraftModel(runner, blocks, translation, max_tokens_per_round=256))


def sequences_of(
    samplings: Seq[SamplingParams], verify: VerifyMode = VerifyMode.COUPLED, lengths: Seq[int] = (3, 40, 17, 8, 1, 23)
) -> list[Sequence]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for index, sampling in enumerate(samplings):
        length = lengths[index % len(lengths)]
        prompt = tuple(torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist())
        made.append(make_sequence(str(index), prompt, replace(sampling, seed=index), verify=verify))
    return made


def rounds(drafter: ModelProposer, sequences: Seq[Sequence], nums_drafts: Seq[int], num_rounds: int = 3) -> list[Draft]:
    """Draft, accept the first drafts of each sequence, and draft again."""
    found: list[Draft] = []
    for sequence in sequences:
        drafter.open(sequence)
    for number in range(num_rounds):
        queries = [make_scheduled(each, num) for each, num in zip(sequences, nums_drafts, strict=True)]
        drafts = drafter.propose(queries)
        drafter.sequences.check_integrity()
        for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            sequence.token_ids += [*draft.token_ids[: (index + number) % 4], 1 + (7 * index + number) % 60]
        found += drafts
    for sequence in sequences:
        drafter.close(sequence.request_id)
    return found


def plain_rounds(folder: Path, make: Callable[[], list[Sequence]], nums_drafts: Seq[int]) -> list[Draft]:
    return rounds(proposer(folder, GraphConfig(GraphKind.OFF)), make(), nums_drafts)


@pytest.mark.parametrize(
    ("batch", "attention"), [*((batch, "torch") for batch in (1, 2, 3, 5, 8)), (1, "triton"), (5, "triton")]
)
def test_steps_draft_what_the_host_would_have_drafted_token_by_token(
    folder: Path, num_begun: list[int], batch: int, attention: str
) -> None:
    """All samplings in one batch, lengths that differ, drafts that end early; with `triton` a GPU replays them."""
    make = partial(sequences_of, [*SAMPLINGS.values()] * 2)
    nums_drafts = [4, 2, 4, 4, 5, 1, 3, 4][:batch]
    drafter = proposer(folder, EAGER, attention)
    found = rounds(drafter, make()[:batch], nums_drafts)
    assert len(num_begun) >= 3
    assert found == plain_rounds(folder, lambda: make()[:batch], nums_drafts)
    assert [len(draft.token_ids) for draft in found[:batch]] == nums_drafts


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "torch") for name in SAMPLINGS), ("sampled", "triton"), ("top_p", "triton")]
)
def test_steps_draw_as_the_sampler_does(folder: Path, num_begun: list[int], name: str, attention: str) -> None:
    make = partial(sequences_of, [SAMPLINGS[name]] * 2)
    found = rounds(proposer(folder, EAGER, attention), make(), [6] * 2)
    assert num_begun == [5] * 3
    assert found == plain_rounds(folder, make, [6] * 2)


@pytest.mark.parametrize("name", BY_HOST)
def test_what_the_device_cannot_choose_is_drafted_by_the_host(folder: Path, num_begun: list[int], name: str) -> None:
    make = partial(sequences_of, [GREEDY, BY_HOST[name]])
    assert rounds(proposer(folder, EAGER), make(), [4, 4]) == plain_rounds(folder, make, [4, 4])
    assert not num_begun


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_drafts_with_distributions_are_drafted_by_the_host(
    folder: Path, num_begun: list[int], verify: VerifyMode
) -> None:
    make = partial(sequences_of, [GREEDY, SAMPLED], verify)
    assert rounds(proposer(folder, EAGER), make(), [4, 4]) == plain_rounds(folder, make, [4, 4])
    assert not num_begun


def test_long_drafts_are_laid_out_in_parts(folder: Path, num_begun: list[int]) -> None:
    make = partial(sequences_of, [SAMPLED, GREEDY])
    assert rounds(proposer(folder, EAGER), make(), [MAX_STEPS + 5] * 2) == plain_rounds(
        folder, make, [MAX_STEPS + 5] * 2
    )
    assert num_begun == [MAX_STEPS, 4] * 3


@pytest.mark.parametrize("target_vocab_size", [VOCAB_SIZE - 9, VOCAB_SIZE + 9])
def test_ids_that_the_target_lacks_are_not_drawn(folder: Path, num_begun: list[int], target_vocab_size: int) -> None:
    graphs = replace(EAGER, draft_ids_end=target_vocab_size)
    make = partial(sequences_of, [replace(SAMPLED, temperature=5.0)] * 4)
    found = rounds(proposer(folder, graphs, target_vocab_size=target_vocab_size), make(), [8] * 4)
    off = GraphConfig(GraphKind.OFF)
    assert found == rounds(proposer(folder, off, target_vocab_size=target_vocab_size), make(), [8] * 4)
    assert num_begun
    assert max(token_id for draft in found for token_id in draft.token_ids) < min(VOCAB_SIZE, target_vocab_size)


def test_drafts_ahead_of_verification_run_in_steps(folder: Path, num_begun: list[int]) -> None:
    def offers(graphs: GraphConfig) -> list[tuple[Offer, ...]]:
        (sequence,), drafter, waves = sequences_of([SAMPLED]), proposer(folder, graphs), []
        drafter.open(sequence)
        (draft,) = drafter.propose([make_scheduled(sequence, 3)])
        pending = PendingPass(sequence, draft.token_ids, 3)
        assert drafter.ahead_drafter(2).run([pending], waves.append, lambda: False)
        return waves

    found = offers(EAGER)
    assert num_begun == [2, 3]  # of the draft, and of eight branches
    assert found == offers(GraphConfig(GraphKind.OFF))
    assert sum(map(len, found)) == 8


@pytest.mark.parametrize("is_text", [False, True])
def test_a_draft_of_shared_tokens_is_drafted_by_the_host_and_one_through_text_in_steps(
    tmp_path: Path, num_begun: list[int], is_text: bool
) -> None:
    folders = write_small_pair(tmp_path)

    def drafts(graphs: GraphConfig) -> list[Draft]:
        model = ModelConfig(str(folders.draft), "float32", "cpu", graphs=graphs)
        with patch(COVERAGE, 1.1 if is_text else 0.0):
            drafter, _ = load_drafter(model, CacheConfig(4, num_blocks=128), SchedulerConfig(), str(folders.target))
        sequences = [make_sequence(str(index), (1, 2, 3 + index), SAMPLED) for index in range(2)]
        for sequence in sequences:
            drafter.open(sequence)
        return drafter.propose([make_scheduled(sequence, 4) for sequence in sequences])

    found = drafts(EAGER)
    assert bool(num_begun) is is_text
    assert found == drafts(GraphConfig(GraphKind.OFF))
    assert any(draft.token_ids for draft in found)


def test_more_sequences_than_were_recorded_are_drafted_by_the_host(folder: Path, num_begun: list[int]) -> None:
    make = partial(sequences_of, [SAMPLED] * 9)
    assert rounds(proposer(folder, EAGER), make(), [3] * 9) == plain_rounds(folder, make, [3] * 9)
    assert not num_begun


def test_a_step_without_room_among_the_recorded_work_is_computed_by_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(sequences_of, [SAMPLED] * 2)
    expected = plain_rounds(folder, make, [4, 4])
    drafter = proposer(folder, EAGER)
    monkeypatch.setattr(PlannedAttention, "fill_steps", lambda attention, layouts: False)
    assert rounds(drafter, make(), [4, 4]) == expected


def test_steps_that_are_stopped_leave_no_trace(folder: Path) -> None:
    (sequence,) = sequences_of([SAMPLED])
    drafter = proposer(folder, EAGER)
    drafter.open(sequence)
    stops = iter([False, False, True])
    plan = drafter._begin(make_scheduled(sequence, 6))
    assert plan is not None
    _, logits = drafter._model.prefill([(plan.sequence, ())])
    chain = plan.chain()
    drafter._model.sampler.extend([chain], logits)
    assert not drafter._model.grow([chain], lambda: next(stops))
    drafter.close(sequence.request_id)
    (again,) = sequences_of([SAMPLED])
    assert rounds(drafter, [again], [6]) == plain_rounds(folder, lambda: sequences_of([SAMPLED]), [6])


def test_a_draft_ends_where_its_logits_are_not_finite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third token of sequence 1 has a NaN; the target rejects the draft there, and its others are drafted on."""
    make = partial(sequences_of, [SAMPLED, GREEDY])
    (kept, broken) = plain_rounds(folder, make, [5, 5])[:2]
    drafter, decode = proposer(folder, EAGER), DraftSteps.decode
    calls: list[int] = []

    def overflowing(steps: DraftSteps) -> torch.Tensor:
        logits = decode(steps)
        calls.append(1)
        if len(calls) == 2:
            logits[1, 9] = float("nan")
        return logits

    monkeypatch.setattr(DraftSteps, "decode", overflowing)
    found = rounds(drafter, make(), [5, 5], num_rounds=1)
    assert found[0] == kept
    assert found[1].token_ids[:2] == broken.token_ids[:2]
    assert len(found[1].token_ids) == 3
    assert found[1].token_ids[2] < 0 or found[1].token_ids[2] >= VOCAB_SIZE


def static_batch(window: int | None) -> tuple[StaticBatch, Launch]:
    """A decode bucket of a Llama on a device of 132 processors, laid out for `window`."""
    bucket, heads = GraphBucket(8, 1), HeadShape(num_kv_heads=2, group_size=4, key_dim=16, value_dim=16)
    cache = KVCache([LayerShape(2, 16, 16)], 1, 4, dtype=torch.bfloat16, device=torch.device("cpu"))
    attention = TiledAttention(bucket, cache, torch.zeros(8 * 3_000, dtype=torch.int32), max_batch=8, has_trees=False)
    static = attention._launches[window, heads] = attention._new_launch(window, heads, itemsize=2)
    batch = StaticBatch(bucket, cache, 0, 12_000, 8, attention)
    batch.reserve_steps(MAX_STEPS)
    return batch, static.launch


def work_of(batch: StaticBatch, launch: Launch) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """The numbers of a pass and its lists of work; each tile with the blocks that it reads in place of their place."""
    tiles = launch.tiles.tolist()
    for tile in tiles:
        first = tile[TileField.TABLE_OFFSET]
        tile[TileField.TABLE_OFFSET] = launch.block_tables[first : first + -(-tile[TileField.END] // 4)].tolist()
    return batch._numbers[1:].tolist(), tiles, launch.merges.tolist()


@pytest.mark.parametrize("window", [None, 300])
def test_steps_have_the_numbers_and_the_work_of_single_passes(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts that grow past splits, blocks and windows; a pass after the steps has no work of theirs."""
    monkeypatch.setattr("engine.model.cuda_graphs.static_attention.num_processors", lambda device: 132)
    batch, launch = static_batch(window)
    alone, own = static_batch(window)
    rng = random.Random(5)
    for starts in ([9_000, 250, 1_018, 3, 505], [255], [4_090, 4_095, 511, 299, 1, 77, 1_023, 2_046]):
        tables = [[rng.randrange(999) for _ in range(2_400)] for _ in starts]
        spans = [Span([0] * 9, start, table, 9) for start, table in zip(starts, tables, strict=True)]
        assert batch.fill_steps(spans)
        for step in range(9):
            batch.take(torch.tensor([step]))
            assert alone.fill([span.at_step(step) for span in spans])
            assert work_of(batch, launch) == work_of(alone, own)
        short = [Span([0], 2, [7], 1)]
        for each in (batch, alone):
            assert each.fill(short)
        assert work_of(batch, launch) == work_of(alone, own)


def test_the_trial_of_a_draft_has_the_largest_decode_and_its_steps(folder: Path) -> None:
    plain = proposer(folder, GraphConfig(GraphKind.OFF))._model.runner
    for ids_end, expected in ((VOCAB_SIZE, [8]), (0, [])):
        graphs = replace(EAGER, draft_ids_end=ids_end)
        trial = CudaGraphRunner(
            plain._pass, plain._cache, plain._plan_attention, graphs, 64, VOCAB_SIZE, trial_pool_tokens=64
        )
        assert [bucket.num_rows for bucket in trial._buckets] == [*expected, 40]
        trial.record_steps(VOCAB_SIZE)
        assert [bucket.num_rows for bucket in trial._draft_steps] == expected


# Faults of the steps. Each must change a draft, or the tests above would not see it.


def positions_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    _move(monkeypatch, 0)


def slots_are_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    _move(monkeypatch, 1)


def _move(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    fill_steps = StaticBatch.fill_steps

    def shifted(static: StaticBatch, spans: Seq[Span]) -> bool:
        has_room = fill_steps(static, spans)
        static._steps[1:, row] = static._steps[:-1, row].clone()
        return has_room

    monkeypatch.setattr(StaticBatch, "fill_steps", shifted)


def contexts_are_one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = RowLayout.moved

    def shorter(layout: RowLayout, spans: Seq[Span]) -> RowLayout:
        return moved(layout, [span._replace(start=max(0, span.start - 1)) for span in spans])

    monkeypatch.setattr(RowLayout, "moved", shorter)
    numbers_of = StaticBatch.fill_steps

    def with_true_numbers(static: StaticBatch, spans: Seq[Span]) -> bool:
        has_room = numbers_of(static, spans)
        num_steps, block_size = len(spans[0].token_ids), static._block_size
        for step in range(num_steps):
            for row, span in enumerate(spans):
                place = span.start + step
                slot = span.block_table[place // block_size] * block_size + place % block_size
                static._steps[step, :, row] = torch.tensor([place, slot])
        return has_room

    monkeypatch.setattr(StaticBatch, "fill_steps", with_true_numbers)


def noise_is_of_the_position_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engine.sampling.step_draw.noise_keys",
        lambda prefixes, positions, purpose: noise_keys(prefixes, positions - 1, purpose),
    )


def the_first_token_is_fed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    take = StaticBatch.take
    first: list[torch.Tensor] = []

    def forgetful(static: StaticBatch, step: torch.Tensor) -> None:
        if int(step) == 0:
            first[:] = [static.batch.input_ids.clone()]
        static.batch.input_ids.copy_(first[0])
        take(static, step)

    monkeypatch.setattr(StaticBatch, "take", forgetful)


FAULTS = [
    positions_come_late,
    slots_are_of_the_step_before,
    contexts_are_one_short,
    noise_is_of_the_position_before,
    the_first_token_is_fed_again,
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replay does not run the changed code")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_steps_changes_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    make = partial(sequences_of, [SAMPLED] * 2)
    expected = plain_rounds(folder, make, [6] * 2)[:2]
    drafter = proposer(folder, EAGER, "triton")
    fault(monkeypatch)
    assert rounds(drafter, make(), [6] * 2, num_rounds=1) != expected


# The check at start, with a recorder in place of a GPU's.


def checked(folder: Path, record: Callable[[Compute], Compute]) -> CudaGraphRunner:
    """Record as a GPU's runner does, over a pool of its own."""
    runner = proposer(folder, GraphConfig(GraphKind.OFF), "triton")._model.runner
    runner._cache.keys[-1][-1].fill_(float("nan"))  # as padding may leave the scratch block
    graphs = replace(EAGER, batches=(1, 3), row_counts=(1,))
    passes = CudaGraphRunner(runner._pass, runner._cache, runner._plan_attention, graphs, 64, runner.vocab_size, record)
    passes.record_steps(VOCAB_SIZE)
    return passes


def test_faithful_recordings_of_steps_are_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    graphs = checked(folder, lambda compute: compute)
    assert [bucket.num_rows for bucket in graphs._draft_steps] == [1, 3]
    assert "call by call" not in caplog.text


@pytest.mark.parametrize("fault", FAULTS)
def test_recorded_steps_that_differ_from_passes_are_not_used(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    assert not checked(folder, lambda compute: compute)._draft_steps
    assert "steps of 3 drafts are computed call by call: recorded, they differ by" in caplog.text


def test_draws_that_cannot_be_recorded_are_the_hosts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_advances = 0

    def record(compute: Compute) -> Compute:
        nonlocal num_advances
        if not isinstance(compute, partial):  # passes are
            num_advances += 1
            if num_advances % 3 == 0:
                raise RuntimeError("operation not permitted when stream is capturing")
        return compute

    graphs = checked(folder, record)
    assert "drafts by top_k are drawn call by call, as they cannot be recorded: operation not permitted" in caplog.text
    steps, last_ids = graphs._draft_steps[GraphBucket(1, 1)], torch.tensor([5])
    spans = [Span([0, 0], 0, [2], 2)]
    for name in SAMPLINGS:
        row = LogitsRow(SAMPLINGS[name], [5], 1)
        assert steps.begin(spans, [row], last_ids.to(steps.device)) is ("top_k" not in name)


def test_memory_that_ends_while_draws_are_recorded_is_refused_with_the_figures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(compute: Compute) -> Compute:
        if not isinstance(compute, partial):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")
        return compute

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 29, 80 << 30))
    with pytest.raises(ConfigError, match="no memory for recorded draws of 1 rows"):
        checked(folder, record)
