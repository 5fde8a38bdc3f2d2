"""The check of a start without loading weights: every model that can start passes, each flaw is named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, GptOssConfig, LongcatFlashConfig, MixtralConfig, PreTrainedConfig

from engine.config import CacheConfig, HeadConfig, HeadKind, ModelConfig
from engine.model.linear import quantized_linear
from engine.model.runner.outline import check_outline
from protos.errors import ConfigError
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.families import LATENT, PLAIN, REFUSED, SERVED, write_family
from tests.engine.fixtures.heads.block_heads import (
    BlockShape,
    block_tensors,
    peagle_tensors,
    write_block_head,
    write_peagle,
)
from tests.engine.fixtures.heads.mtp_heads import write_mtp, write_qwen3
from tests.engine.fixtures.hybrids import HYBRIDS

CACHE = CacheConfig(16, num_blocks=8, memory_bytes=None)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_family(folder, SERVED["llama"]())
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


@pytest.mark.parametrize("family", SERVED | HYBRIDS)
def test_a_family_that_is_served_passes(family: str, tmp_path: Path):
    write_family(tmp_path, (SERVED | HYBRIDS)[family]())
    check_outline(ModelConfig(str(tmp_path)), CACHE)


def test_a_check_shows_no_bar_as_if_it_loaded(llama: Path, capfd: pytest.CaptureFixture[str]):
    check_outline(ModelConfig(str(llama)), CACHE)
    assert "Loading" not in capfd.readouterr().err


@pytest.mark.parametrize("family", sorted(set(REFUSED) - {"bart"}))  # its numbers alone show it
def test_a_family_that_is_refused_is_refused_without_its_numbers(family: str, tmp_path: Path):
    write_family(tmp_path, REFUSED[family]())
    with pytest.raises(ConfigError, match="cannot be served"):
        check_outline(ModelConfig(str(tmp_path)), CACHE)


@pytest.mark.parametrize(
    "config",
    [
        lambda: LongcatFlashConfig(**PLAIN, num_layers=2, n_routed_experts=4, ffn_hidden_size=64, head_dim=32),
        lambda: MixtralConfig(**PLAIN, num_local_experts=4, num_experts_per_tok=5),
        lambda: GptOssConfig(**PLAIN, head_dim=8, num_local_experts=4, num_experts_per_tok=6),
        lambda: DeepseekV3Config(**{**PLAIN, **LATENT, "topk_group": 3}),
        lambda: DeepseekV3Config(**{**PLAIN, **LATENT, "n_group": 3}),
    ],
    ids=["rotated width", "mixtral's experts", "gpt-oss' experts", "groups of a token", "groups of experts"],
)
def test_a_configuration_whose_forward_fails_is_refused_without_its_numbers(
    config: Callable[[], PreTrainedConfig], tmp_path: Path
):
    """Its tensors have the shapes that it asks for, so only a forward shows it."""
    write_family(tmp_path, config())
    with pytest.raises(ConfigError, match="its modules fail, RuntimeError"):
        check_outline(ModelConfig(str(tmp_path)), CACHE)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drop_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_tensor, r"incomplete: 1 tensors are missing, 'model\.layers\.0\.self_attn\.q_proj\.weight'"),
        (lambda folder: change_config(folder, hidden_size=48), "do not fit its configuration"),
        (lambda folder: change_config(folder, num_hidden_layers=1), "the configuration has no such tensor"),
        (lambda folder: change_config(folder, model_type="lama"), "no model configuration that transformers knows"),
        (lambda folder: change_config(folder, hidden_size="x"), "no model configuration that transformers knows"),
    ],
)
def test_files_that_do_not_make_the_model_are_refused(copy: Path, spoil: Callable[[Path], None], message: str):
    spoil(copy)
    with pytest.raises(ConfigError, match=message):
        check_outline(ModelConfig(str(copy)), CACHE)


def test_settings_that_the_node_cannot_honour_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch):
    model = ModelConfig(str(llama))
    for cache, length, message in (
        (CACHE, 1 << 20, r"max_model_len is 1048576, but the model has 128 positions"),
        (replace(CACHE, dtype="fp8"), None, "cache.dtype is 'fp8'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_outline(model, cache, length)
    quantized = replace(model, quantization="int8")
    monkeypatch.setattr(quantized_linear, "has_triton", lambda: True)
    check_outline(quantized, CACHE, is_on_gpu=True)  # the process with the card asks it
    monkeypatch.setattr(quantized_linear, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="quantization is 'int8', which needs our kernels"):
        check_outline(quantized, CACHE, is_on_gpu=True)


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused(llama: Path):
    check_outline(ModelConfig(str(llama), tensor_parallel_size=2), CACHE)
    with pytest.raises(ConfigError, match="must divide the model's num_key_value_heads"):
        check_outline(ModelConfig(str(llama), tensor_parallel_size=3), CACHE)


def test_a_head_of_another_target_is_refused(llama: Path, tmp_path: Path):
    head = HeadConfig(HeadKind.MEDUSA, str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    weights = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    save_file({"0.0.linear.weight": weights, "0.0.linear.bias": weights[0].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="does not fit the target"):
        check_outline(ModelConfig(str(llama)), CACHE, head=head)


HEADS: dict[str, BlockShape | None] = {
    "dflash": BlockShape(),
    "dflash 2": BlockShape(is_refined=True),
    "xpress": BlockShape(has_refiner=True),
    "dspark": BlockShape(markov_type="vanilla"),
    "peagle": None,
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_layers_is_checked_by_shapes_alone(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    target, folder, shape = tmp_path / "target", tmp_path / "head", HEADS[name]
    write_checkpoint(target, seed=0)
    kind = HeadKind.PEAGLE if shape is None else HeadKind.DSPARK if shape.markov_type else HeadKind.DFLASH
    if shape is None:
        write_peagle(folder, peagle_tensors(target, 2), (1, 2))
    else:
        write_block_head(folder, block_tensors(target, 2, shape), (1, 2), shape)
    with caplog.at_level("INFO"):
        check_outline(ModelConfig(str(target)), CACHE, head=HeadConfig(kind, str(folder)))
    assert "is checked at the start" not in caplog.text
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mask_token_id": 999}))
    with pytest.raises(ConfigError, match="mask_token_id 999"):
        check_outline(ModelConfig(str(target)), CACHE, head=HeadConfig(kind, str(folder)))


def test_an_mtp_head_of_its_own_files_is_checked_by_shapes_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    target, head = tmp_path / "target", HeadConfig(HeadKind.MTP, str(tmp_path / "head"))
    write_qwen3(target)
    write_mtp(tmp_path / "head", target)
    with caplog.at_level("INFO"):
        check_outline(ModelConfig(str(target)), CACHE, head=head)
    assert "is checked at the start" not in caplog.text
    weights = load_file(tmp_path / "head" / "model.safetensors")
    weights.pop("mtp_layers.0.final_layernorm.weight")
    save_file(weights, tmp_path / "head" / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"tensor 'mtp_layers\.0\.final_layernorm\.weight' of shape \[32\] is missing"
    ):
        check_outline(ModelConfig(str(target)), CACHE, head=head)
