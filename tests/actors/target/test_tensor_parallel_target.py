"""A target in two processes on the shell's socket: the same texts as one process, and an end when one dies."""

import asyncio
import multiprocessing
from pathlib import Path

import psutil
import pytest

from actors.pair.target_client import TargetClient
from actors.process.frames import private_folder
from actors.settings import PairSettings
from actors.shell_messages import TARGET_SOCKET
from actors.target.target_process import serve_target
from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core.loading import load_engine
from protos.errors import UnavailableError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from tests.engine.fixtures.checkpoints import write_checkpoint

REQUEST = GenerateRequest("a", (5, 6, 7, 5, 6, 7), SamplingParams(temperature=0.7, seed=3, max_tokens=40))
START_TIMEOUT_S = 240.0


def settings(path: Path, num_ranks: int) -> EngineConfig:
    model = ModelConfig(str(path), dtype="float32", device="cpu", num_threads=1, tensor_parallel_size=num_ranks)
    ngram = SpeculationConfig(3, methods=(SpeculationMethod.NGRAM,))
    return EngineConfig(model, CacheConfig(num_blocks=64), speculation=ngram)


def serve(engine: EngineConfig, folder: Path) -> None:
    """Run an engine as a `TargetActor` does, whose process ends when the engine fails."""
    serve_target(PairSettings(engine), folder, None, lambda: None)


async def generate(client: TargetClient, request: GenerateRequest) -> list[int]:
    stream = client.add(request)
    token_ids: list[int] = []
    while True:
        chunks = await stream.next()
        token_ids += [token_id for chunk in chunks for token_id in chunk.token_ids]
        if chunks[-1].finish_reason is not None:
            return token_ids


async def test_two_ranks_serve_the_texts_of_one_and_die_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "target", seed=1)
    core = load_engine(settings(tmp_path / "target", 1))
    core.add(REQUEST)
    expected: list[int] = []
    while core.has_work:
        expected += [token_id for chunk in core.step() for token_id in chunk.token_ids]

    folder = private_folder()
    target = multiprocessing.get_context("forkserver").Process(
        target=serve, args=(settings(tmp_path / "target", 2), folder)
    )
    target.start()
    try:
        client = TargetClient(folder / TARGET_SOCKET)
        await client.wait_connected(START_TIMEOUT_S)
        assert await generate(client, REQUEST) == expected

        ranks = [
            each
            for each in psutil.Process(target.pid).children()
            if "engine.model.runner.rank_process" in each.cmdline()
        ]
        assert len(ranks) == 1
        ranks[0].kill()  # while nothing is computed: only the watch can notice
        await asyncio.to_thread(target.join, 30)
        assert target.exitcode == 1
        with pytest.raises(UnavailableError):
            await client.ping()
        await client.close()
    finally:
        target.kill()
