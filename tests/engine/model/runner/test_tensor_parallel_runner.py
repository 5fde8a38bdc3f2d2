"""A model sharded over two processes, connected by gloo: the tokens, blocks and errors of an unsharded one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from engine.batch.span import Span
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.engine_core.loading import load_engine
from engine.kv_cache.block_manager import BlockManager
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.tensor_parallel_runner import TensorParallelRunner, load_runner
from engine.model.tensor_parallel import check_divisible
from engine.proposer import NoProposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.scheduler.scheduler import Scheduler
from engine.verifier.verifier import Verifier
from protos.errors import ConfigError, EngineError
from protos.messages import GenerateRequest, SamplingParams
from tests.engine.fixtures.checkpoints import Folders, write_pair
from tests.engine.fixtures.families import SERVED, write_family
from tests.engine.fixtures.pairs.forked_ranks import fork_ranks

CACHE = CacheConfig(block_size=4, num_blocks=96)
PROMPTS = [tuple(range(first, first + 9 + first)) for first in range(1, 5)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_pair(tmp_path_factory.mktemp("pair"), noise=0.05)


def config(path: Path, num_ranks: int) -> ModelConfig:
    return ModelConfig(str(path), dtype="float32", device="cpu", num_threads=1, tensor_parallel_size=num_ranks)


@pytest.fixture(scope="module")
def alone(folders: Folders) -> ModelRunner:
    return load_runner(config(folders.target, 1), CACHE)


@pytest.fixture(scope="module")
def sharded(folders: Folders) -> Iterator[TensorParallelRunner]:
    runner = load_runner(config(folders.target, 2), CACHE)
    assert isinstance(runner, TensorParallelRunner)
    yield runner
    runner.close()
    runner.close()


def generate(runner: ModelRunner, draft: Path | None, tree_nodes: int = 0) -> dict[str, list[int]]:
    """Texts of four requests; the pool is small enough that blocks are used again."""
    limits = SchedulerConfig(max_num_sequences=3, max_tokens_per_step=16)
    blocks = BlockManager(runner.num_blocks, runner.block_size, runner.model_version)
    scheduler = Scheduler(limits, blocks, runner.max_model_len)
    speculation = SpeculationConfig(3 if draft else 0, tree_nodes=tree_nodes)
    proposer = None
    if draft is not None:
        proposer = ModelProposer.from_config(config(draft, 1), CACHE, limits)
    parts = Speculation(proposer or NoProposer(), Verifier(), speculation)
    core = EngineCore(runner, scheduler, parts)
    for index, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=24)
        core.add(GenerateRequest(str(index), prompt, sampling))
    texts: dict[str, list[int]] = {}
    while core.has_work:
        for chunk in core.step():
            texts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        scheduler.check_integrity()
    assert draft is None or core.stats().drafts.num_accepted_tokens > 0
    return texts


def test_texts_are_those_of_an_unsharded_model_with_and_without_drafts(
    alone: ModelRunner, sharded: TensorParallelRunner, folders: Folders
) -> None:
    expected = generate(alone, None)
    assert generate(sharded, None) == expected
    assert generate(sharded, folders.draft) == expected
    assert generate(sharded, folders.draft, tree_nodes=6) == expected  # accepted paths are moved


def test_exported_blocks_have_all_heads_and_can_be_imported(alone: ModelRunner, sharded: TensorParallelRunner) -> None:
    span = Span(list(range(1, 11)), 0, [5, 2, 7], 1)
    expected, logits = alone.forward([span]), sharded.forward([span])
    assert torch.allclose(logits, expected, atol=1e-4)
    assert sharded.kv_layout == alone.kv_layout
    blocks = sharded.export_blocks([5, 2, 7])
    whole = alone.export_blocks([5, 2, 7])
    assert blocks.shape == whole.shape == (3, sharded.bytes_per_block)
    assert torch.allclose(blocks[:2].view(torch.float32), whole[:2].view(torch.float32), atol=1e-5)

    sharded.import_blocks([9, 10], whole[:2])  # what an engine on one device has computed
    sharded.copy_blocks([10], [3])
    assert torch.equal(sharded.export_blocks([9, 3]), whole[:2])
    again = sharded.forward([Span([9, 10], 8, [9, 3, 11], 1)])
    assert torch.allclose(again, expected, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does(folders: Folders) -> None:
    one, two = (load_runner(replace(config(folders.target, each), device="cuda"), CACHE) for each in (1, 2))
    assert isinstance(two, TensorParallelRunner)
    try:
        for start, num_tokens in ((0, 11), (11, 1), (12, 5)):  # a prompt, and passes that are recorded
            span = Span(list(range(1, num_tokens + 1)), start, [5, 2, 7, 3, 8], num_tokens)
            assert torch.allclose(two.forward([span]), one.forward([span]), atol=1e-3)
    finally:
        two.close()


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
def test_sizes_that_do_not_divide_the_heads_are_refused_with_those_that_do(family: type) -> None:
    shape = family(hidden_size=96, num_attention_heads=12, num_key_value_heads=6, intermediate_size=96)
    check_divisible(shape, 3)
    with pytest.raises(
        ConfigError, match=r"is 4, but it must divide the model's num_key_value_heads 6.*choose one of 1, 2, 3, 6"
    ):
        check_divisible(shape, 4)


def test_a_model_that_cannot_be_sharded_is_refused_before_a_process_is_started(
    tmp_path: Path, folders: Folders
) -> None:
    write_family(tmp_path, SERVED["gpt2"]())
    with pytest.raises(ConfigError, match="model type 'gpt2' runs on one device: transformers has no plan"):
        load_runner(config(tmp_path, 2), CACHE)
    with pytest.raises(ConfigError, match=r"'int8' and target\.tensor_parallel_size is 2"):
        load_runner(replace(config(folders.target, 2), quantization="int8"), CACHE)


def test_a_second_sharded_model_in_one_process_is_refused_and_the_first_goes_on(
    sharded: TensorParallelRunner, folders: Folders
) -> None:
    span = Span([1, 2], 0, [0], 1)
    expected = sharded.forward([span])
    with pytest.raises(EngineError, match="already has a sharded model"):
        load_runner(config(folders.target, 2), CACHE)
    assert torch.equal(sharded.forward([span]), expected)


def test_a_rank_that_dies_ends_the_engine_without_a_hang(sharded: TensorParallelRunner, folders: Folders) -> None:
    """The last test of the shared runner."""
    reasons: list[str] = []
    sharded.watch(reasons.append)
    (process,) = sharded._ranks._processes
    process.kill()
    began_s = time.monotonic()
    process.wait(10)
    with pytest.raises((RuntimeError, EngineError)):
        sharded.forward([Span([1, 2], 0, [0], 1)])
    assert time.monotonic() - began_s < 60
    deadline_s = time.monotonic() + 10
    while not reasons and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert "rank 1 of the target exited with code -9" in reasons[0]


def test_the_engine_shards_its_target_as_configured(folders: Folders) -> None:
    """After the shared runner has been closed or killed, its place is free."""
    with pytest.raises(ConfigError, match="must divide"):
        load_engine(EngineConfig(config(folders.target, 3), CACHE))


def test_a_family_of_transformers_modules_gives_the_texts_of_one_device(
    sharded: TensorParallelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded.close()  # the shared one; its place is free now
    fork_ranks(monkeypatch)
    write_family(tmp_path, SERVED["gemma2"]())
    expected = generate(load_runner(config(tmp_path, 1), CACHE), None)
    runner = load_runner(config(tmp_path, 2), CACHE)
    assert isinstance(runner, TensorParallelRunner)
    try:
        assert generate(runner, None) == expected
        assert generate(runner, tmp_path) == expected
    finally:
        runner.close()
