"""The log has the target's likeliest tokens, of requests that allow it, and changes no token."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.position_log.shard import LoggedRequest, log_files, make_room, new_file, read_model, read_shard
from engine.proposer.draft_model.model_proposer import ModelProposer
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, write_pair

REQUESTS = tuple(
    GenerateRequest(
        f"cmpl-{index}-0",
        (5, 6, 7 + index, 5, 6),
        SamplingParams(temperature=0.7 * (index % 2), seed=3, max_tokens=24, stop_token_ids=(0, 9)),
        is_logged=True,
    )
    for index in range(4)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"), noise=0.3).target


def engine(model: Path, log: Path | None) -> EngineCore:
    methods = (SpeculationMethod.MODEL,)
    draft = ModelConfig(str(model.parent / "draft"), dtype="float32", device="cpu")
    config = EngineConfig(
        replace(draft, path=str(model)),
        CacheConfig(num_blocks=64),
        speculation=SpeculationConfig(3, methods=methods),
        log=None if log is None else str(log),
    )
    return load_engine(config, ModelProposer.from_config(draft, config.cache, config.scheduler))


def texts(core: EngineCore, requests: tuple[GenerateRequest, ...] = REQUESTS) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for chunk in core.step():
            found[chunk.request_id] = found.get(chunk.request_id, ()) + chunk.token_ids
    core.close()
    return found


def logged(folder: Path) -> list[LoggedRequest]:
    return [request for file in log_files(folder) for request in read_shard(file)]


def test_logged_positions_are_those_of_the_target_and_no_token_changes(model: Path, tmp_path: Path) -> None:
    core = engine(model, tmp_path)
    found = texts(core)
    assert found == texts(engine(model, None))
    assert core.stats().drafts.num_accepted_tokens > 0
    teacher = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    requests = logged(tmp_path)
    assert {tuple(request.token_ids.tolist()) for request in requests} == {
        (*request.prompt_token_ids, *found[request.request_id]) for request in REQUESTS
    }
    for request in requests:
        ids = torch.from_numpy(request.token_ids.copy()).long()
        assert request.positions.tolist() == list(range(5, len(ids)))  # all of the output, each once
        assert request.traffic_class == ("greedy-free" if request.temperature == 0 else "sampled-free")
        expected = teacher(ids[None]).logits[0, 4:-1].log_softmax(-1).detach()
        assert torch.equal(torch.from_numpy(request.top_ids[:, 0].copy()).long(), expected.argmax(-1))
        logprobs = torch.from_numpy(request.top_logprobs.copy()).float()
        torch.testing.assert_close(
            logprobs, expected.gather(1, torch.from_numpy(request.top_ids.copy()).long()), atol=2e-2, rtol=1e-2
        )
    stats = core.stats().log
    assert stats.num_positions == sum(len(request.positions) for request in requests)
    assert stats.num_bytes == sum(file.stat().st_size for file in log_files(tmp_path))
    assert read_model(log_files(tmp_path)[0]).vocab_size == VOCAB_SIZE


def test_no_other_user_can_read_what_clients_wrote(model: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        texts(engine(model, tmp_path / "log"))
    finally:
        os.umask(before)
    (file, *_) = log_files(tmp_path / "log")
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_requests_that_are_not_to_be_logged_leave_nothing(model: Path, tmp_path: Path) -> None:
    texts(engine(model, tmp_path / "no"), tuple(replace(request, is_logged=False) for request in REQUESTS))
    assert not (tmp_path / "no").exists()


def test_an_aborted_request_leaves_what_was_committed(model: Path, tmp_path: Path) -> None:
    core = engine(model, tmp_path)
    core.add(REQUESTS[1])
    for _ in range(3):
        core.step()
    core.close()
    (request,) = logged(tmp_path)
    assert len(request.positions) == len(request.token_ids) - 5 >= 3


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_the_log_and_no_request(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = engine(model, tmp_path)
    with file_size_limit(1024):
        found = texts(core)
    assert found == texts(engine(model, None))
    assert core.stats().log.is_stopped
    assert [record.message.split(":")[0] for record in caplog.records if record.levelname == "ERROR"] == [
        "the log of verified positions has stopped"
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_files_make_room_and_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    left = tmp_path / "0-1.positions.partial"
    left.touch()
    os.utime(left, (0, 0))
    files = []
    for _ in range(3):
        files.append(new_file(tmp_path))
        files[-1].write_bytes(bytes(10))
        make_room(files[-1], max_bytes=25)
    assert sorted(tmp_path.iterdir()) == log_files(tmp_path) == files[1:]


def test_a_file_that_is_no_log_and_one_that_is_cut_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a log of verified positions"):
        read_shard(model / "model.safetensors")
    texts(engine(model, tmp_path))
    (file,) = log_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="cannot be read as part of a log"):
        read_shard(file)
