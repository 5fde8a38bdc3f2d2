"""A model and a few options become the deploy.yaml that an operator would write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli.__main__ import main
from cluster.cli.deployment import BUNDLED, deployment_of, to_yaml
from cluster.config import parse_config
from cluster.deploy_file import VLLM_SERVICER_FUNCTION, checked_deployment
from cluster.local.one_process import refuse_serves_options
from protos.errors import ConfigError

ROOT = Path(__file__).parents[3]
FILES = {"demo": ROOT / "deploy.yaml", "smollm2": ROOT / "models" / "smollm2.deploy.yaml"}
TARGET = str(ROOT / "models" / "demo" / "target")


def args_of(model: str, **options: Any) -> dict[str, Any]:
    return deployment_of(model, **options)["applications"][0]["args"]


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_name_is_the_deploy_file_of_the_project(name: str):
    assert yaml.safe_load(to_yaml(deployment_of(name))) == yaml.safe_load(FILES[name].read_text())


def test_options_become_keys():
    args = args_of(TARGET, draft=TARGET, quantization="int8", num_pairs=2, settings=("scheduler.max_model_len=99",))
    config = parse_config(args)
    assert (config.model_id, config.draft.path, config.target.quantization) == ("target", TARGET, "int8")
    assert (config.pair.num_replicas, config.scheduler.max_model_len) == (2, 99)


def test_vllms_service_needs_its_messages(monkeypatch: pytest.MonkeyPatch):
    deployment = deployment_of("demo")
    deployment["grpc_options"]["grpc_servicer_functions"].append(VLLM_SERVICER_FUNCTION)
    refuse_serves_options(checked_deployment(deployment, "demo"))  # without Ray it is served too
    for name in ("smg_grpc_proto", "router.grpc_api.vllm_servicer"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("cluster.deploy_file.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"vllm_engine_to_server', and its messages are not installed; pip install"):
        checked_deployment(deployment, "demo")


def test_gpus_are_demanded_and_a_machine_without_them_starts_nothing(capsys: pytest.CaptureFixture[str]):
    config = parse_config(args_of(TARGET, num_gpus=2))
    assert config.pair.gpus is not None
    assert (config.target.tensor_parallel_size, config.pair.gpus.count) == (2, 2)
    assert main(["serve", "demo", "--gpus", "64"]) == 1
    assert "demand 64 GPUs, and this machine has" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("draft", ["suffix", "ngram", "none"])
def test_a_draft_without_a_model_is_named_by_its_kind(draft: str):
    assert parse_config(args_of(TARGET, draft=draft)).draft.kind == draft


@pytest.mark.parametrize("draft", [None, "self"])
def test_the_kind_of_a_draft_without_a_checkpoint_is_refused(draft: str | None):
    with pytest.raises(ConfigError, match=r"--draft-kind eagle3 .* give --draft a path"):
        args_of(TARGET, draft=draft, draft_kind="eagle3")


def test_a_bundled_deployment_is_not_changed_by_its_options():
    args_of("demo", settings=("cache.memory_gib=7",))
    assert args_of("demo")["cache"]["memory_gib"] == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [("demoo", "did you mean 'demo'"), ("llama", "no Hub id, which has the form 'org/name'"), ("/a/b", "neither")],
)
def test_a_model_that_is_nowhere_is_refused_by_name(model: str, message: str):
    with pytest.raises(ConfigError, match=message):
        args_of(model)


@pytest.mark.parametrize(
    ("setting", "message"),
    [("cache", "not KEY"), ("=1", "not KEY"), ("model_id.a=1", "'model_id' is a value"), ("a=[", "not YAML")],
)
def test_a_malformed_setting_is_refused(setting: str, message: str):
    with pytest.raises(ConfigError, match=message):
        args_of("demo", settings=(setting,))


def test_print_starts_nothing_and_its_text_is_a_deploy_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert main(["serve", TARGET, "--draft", "ngram", "--port", "8123", "--grpc-port", "0", "--print"]) == 0
    file = tmp_path / "deploy.yaml"
    file.write_text(text := capsys.readouterr().out)
    assert main(["serve", str(file), "--print"]) == 0
    assert capsys.readouterr().out == text
    assert "port: 8123" in text
    assert "grpc_options" not in text


def test_an_option_beside_a_deploy_file_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", str(FILES["demo"]), "--port", "8123", "--set", "a=1"]) == 1
    assert "--port, --set: a deploy.yaml has keys" in capsys.readouterr().err


def test_a_mistyped_key_of_a_setting_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "demo", "--set", "cache.memory_gb=1", "--print"]) == 1
    assert "did you mean 'memory_gib'" in capsys.readouterr().err


def test_env_prints_what_a_shell_can_evaluate(capsys: pytest.CaptureFixture[str]):
    assert main(["env"]) == 0
    script = f"{capsys.readouterr().out}\necho $RAY_SERVE_ENABLE_HA_PROXY $RAY_AUTH_MODE $(umask)"
    said = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["1", "token", "0077"]
