"""Sampling defaults of a request are the checkpoint's, or else OpenAI's."""

import json
from pathlib import Path

import pytest

from engine.config import CacheConfig, ModelConfig
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from protos.messages import SamplingDefaults
from tests.engine.fixtures.families import SERVED, write_family


def load(path: Path, stated: dict[str, object], generation_config: str = "auto") -> SamplingDefaults:
    write_family(path, SERVED["llama"]())
    (path / "generation_config.json").write_text(json.dumps(stated))
    model = ModelConfig(str(path), dtype="float32", generation_config=generation_config)
    return ModelRunner(model, CacheConfig(num_blocks=4, memory_bytes=None)).sampling_defaults


def test_sampling_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    stated = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    assert load(tmp_path, stated) == SamplingDefaults(0.7, 20, 0.8, 0.0, 1.1)


def test_a_checkpoint_without_sampling_defaults_leaves_openais(tmp_path: Path) -> None:
    assert load(tmp_path, {"eos_token_id": 3}) == SamplingDefaults(1.0, 0, 1.0, 0.0, 1.0)


def test_sampling_defaults_of_the_checkpoint_can_be_ignored(tmp_path: Path) -> None:
    assert load(tmp_path, {"do_sample": True, "temperature": 0.7}, "none") == SamplingDefaults()


def test_a_sampling_default_out_of_range_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"repetition_penalty 40.*in \[1e-06, 10\].*generation_config to none"):
        load(tmp_path, {"repetition_penalty": 40})


def test_a_sampling_default_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="temperature 'hot'"):
        load(tmp_path, {"temperature": "hot"})
