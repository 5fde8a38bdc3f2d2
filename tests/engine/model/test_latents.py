"""Latents in the pool in place of keys and values: their bytes, the texts that follow from them, and the refusals."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig

from engine.batch.indexing import has_triton
from engine.batch.span import Span
from engine.config import CacheConfig, EngineConfig, KVDtype, ModelConfig, ModelDtype, Quantization
from engine.engine_core.loading import load_engine
from engine.kv_cache.pool import LayerShape
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.latent import expand, latent_note
from engine.model.decoders.stock_decoder import StockDecoder
from engine.model.paged_model import PagedModel
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.outline import check_outline
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams
from tests.engine.fixtures.drafted_texts import check_drafts_change_no_token, run, texts
from tests.engine.fixtures.families import write_family
from tests.engine.fixtures.native_kernels import needs_float_kernels
from tests.engine.model.test_more_families import small_config
from tests.engine.model.test_native_layers import IN_GROUPS, LATENT

RANK, ROTATED, HEADS, PLAIN_DIMS, VALUE = 128, 32, 4, 32, 64
CACHE = CacheConfig(block_size=16, num_blocks=64)
PROMPT = tuple(range(3, 60))


def config(**more: Any) -> PreTrainedConfig:
    return DeepseekV3Config(**LATENT | IN_GROUPS | {"first_k_dense_replace": 1} | more)


def write(folder: Path, model_config: PreTrainedConfig) -> None:
    """Write a model whose weights are numbers of bfloat16, which our kernels take."""
    model = write_family(folder, model_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=["in one call", "by torch"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents")
    (write if request.param == "in one call" else write_family)(path, config())
    return path


def test_a_token_takes_its_latent_and_its_rotary_part(folder: Path) -> None:
    runner = ModelRunner(ModelConfig(str(folder), ModelDtype.FLOAT32), CACHE)
    assert runner.kv_layout.layers == (LayerShape(1, RANK + ROTATED, RANK, is_latent=True),) * 3
    assert runner.bytes_per_block == 3 * 16 * (RANK + ROTATED) * 4
    assert runner.bytes_per_block < 3 * 16 * HEADS * (PLAIN_DIMS + ROTATED + VALUE) * 4 / 3


def greedy(folder: Path, num_tokens: int) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        for length in range(len(ids := list(PROMPT)), len(PROMPT) + num_tokens):
            assert len(ids) == length
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def request(name: str, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(name, PROMPT, SamplingParams(max_tokens=24, **sampling))


def test_greedy_texts_are_transformers_also_after_a_prefix_hit(folder: Path) -> None:
    engine = load_engine(EngineConfig(ModelConfig(str(folder), ModelDtype.FLOAT32), CACHE))
    for name in ("first", "again"):
        assert texts(run(engine, [request(name, temperature=0.0)]))[name] == greedy(folder, 24)
    assert engine.stats().num_prefix_hit_tokens == 48


def test_a_preempted_text_is_the_same(folder: Path) -> None:
    requests = [request(str(seed), temperature=0.7, seed=seed) for seed in range(4)]
    model, found = ModelConfig(str(folder), ModelDtype.FLOAT32), []
    for num_blocks in (64, 9):
        engine = load_engine(EngineConfig(model, replace(CACHE, num_blocks=num_blocks)))
        found.append(texts(run(engine, [replace(each, cache_salt=each.request_id) for each in requests])))
    assert engine.stats().num_preemptions > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("quantization", ["none", pytest.param("int4", marks=needs_float_kernels)])
def test_drafts_change_no_token(folder: Path, quantization: str) -> None:
    check_drafts_change_no_token(
        ModelConfig(str(folder), ModelDtype.FLOAT32, quantization=Quantization(quantization)), CACHE
    )


@needs_float_kernels
@pytest.mark.parametrize("quantization", Quantization)
@torch.inference_mode()
def test_the_stock_model_multiplies_by_the_factors_own_numbers(folder: Path, quantization: Quantization) -> None:
    """Scores and results by way of latents equal those by the keys and values that `kv_b_proj` yields."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    stored = model.model.layers[0].self_attn.kv_b_proj.weight.clone()
    decoder: Any = PagedModel(copy.deepcopy(model).requires_grad_(False), quantization).decoder
    latent = decoder._layers[0].latent
    generator = torch.Generator().manual_seed(1)
    latents, query = (torch.randn(7, *sizes, generator=generator) for sizes in ((RANK,), (HEADS, PLAIN_DIMS)))
    keys, values = expand(latent.keys, latent.values, latents).view(7, HEADS, -1).split((PLAIN_DIMS, VALUE), -1)
    own_keys, own_values = (latents @ stored.T).view(7, HEADS, -1).split((PLAIN_DIMS, VALUE), -1)
    rows = 0 if quantization is Quantization.NONE else 0.02  # kernels of few bits round rows to 8
    weights = 0 if quantization is Quantization.NONE else 0.15
    close(torch.einsum("thp,shp->hts", query, keys), torch.einsum("thr,sr->hts", latent.keys(query), latents), rows)
    each = latents[:, None].expand(-1, HEADS, -1)
    close(values, latent.values(each), 0)
    close(keys, own_keys, weights)
    close(values, own_values, weights)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert float((found - expected).norm() / expected.norm()) <= tolerance + 1e-5


def test_a_latent_that_takes_more_than_keys_and_values_is_not_kept() -> None:
    model: Any = AutoModelForCausalLM.from_config(
        config(**LARGE), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert not FusedDecoder.fits(model)
    paged = PagedModel(model.requires_grad_(False))
    assert isinstance(paged.decoder, StockDecoder)
    assert paged.layer_shapes[0] == LayerShape(1, PLAIN_DIMS + ROTATED, 32)


LARGE: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "kv_lora_rank": 128, "v_head_dim": 32}
WHOLE = "the cache keeps the keys and values of all heads, 512 numbers a token and layer, not latents"
OF_LATENTS = "the cache keeps latents, 160 numbers a token and layer, not 512 of keys and values"


@pytest.mark.parametrize(
    ("model_config", "is_described", "num_ranks", "is_on_gpu", "note"),
    [
        (config(), True, 1, False, OF_LATENTS),
        (config(), True, 1, True, f"{WHOLE} of 160, since no kernel for GPUs reads them"),
        (config(), True, 2, True, f"{WHOLE} of 160, since each of 2 ranks has its own heads"),
        (config(), False, 2, True, f"{WHOLE} of 160, since model type 'deepseek_v3' runs module by module"),
        (config(**LARGE), False, 2, True, f"{WHOLE.replace('512', '96')}, which have 160"),
        (LlamaConfig(), True, 1, False, None),
    ],
    ids=["kept", "gpu", "ranks", "no description", "not smaller", "no latents"],
)
def test_the_first_reason_against_latents_is_named(
    model_config: PreTrainedConfig, is_described: bool, num_ranks: int, is_on_gpu: bool, note: str | None
) -> None:
    found = latent_note(model_config, is_described=is_described, num_ranks=num_ranks, is_on_gpu=is_on_gpu)
    assert found == note


@pytest.mark.parametrize(
    ("model_config", "is_kept"),
    [(config(), True), (config(**LARGE), False), (small_config("longcat_flash"), False)],
    ids=["kept", "not smaller", "longcat_flash"],
)
def test_check_and_start_say_what_the_cache_keeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_config: PreTrainedConfig, is_kept: bool
) -> None:
    write_family(tmp_path, model_config)
    model = ModelConfig(str(tmp_path), ModelDtype.FLOAT32)
    notes, _ = check_outline(model, CACHE)
    with caplog.at_level(logging.INFO):
        layers = ModelRunner(model, CACHE).kv_layout.layers
    said = [note for note in notes if note.startswith("the cache keeps")]
    assert said == [message for message in caplog.messages if message.startswith("the cache keeps")]
    assert [note.startswith("the cache keeps latents") for note in said] == [is_kept]
    assert {layer.is_latent for layer in layers} == {is_kept}


@pytest.mark.parametrize("kind", ["int8"])
def test_latents_are_not_rounded_to_8_bits(folder: Path, kind: str) -> None:
    message = rf"cache.dtype is '{kind}', but model type 'deepseek_v3' keeps latents .*; set it to auto"
    model, cache = ModelConfig(str(folder), ModelDtype.FLOAT32), replace(CACHE, dtype=KVDtype(kind))
    with pytest.raises(ConfigError, match=message):
        ModelRunner(model, cache)
    with pytest.raises(ConfigError, match=message):
        check_outline(model, cache)
    check_outline(replace(model, tensor_parallel_size=2), cache)  # ranks keep keys and values


@pytest.mark.skipif(torch.cuda.is_available() or not has_triton(), reason="Triton is interpreted on processors")
def test_triton_on_a_processor_is_refused_by_name(tmp_path: Path) -> None:
    write_family(tmp_path, config())
    message = "attention is 'triton', which does not read latents, and model type 'deepseek_v3' .*; set it to auto"
    model = ModelConfig(str(tmp_path), ModelDtype.FLOAT32, attention="triton")
    with pytest.raises(ConfigError, match=message):
        ModelRunner(model, CACHE)
    with pytest.raises(ConfigError, match=message):
        check_outline(model, CACHE)


@needs_float_kernels
def test_a_long_prompt_whose_heads_go_in_turns_has_the_bits_of_chunks(tmp_path: Path) -> None:
    write(tmp_path, config(max_position_embeddings=4096, num_hidden_layers=2))
    runner = ModelRunner(ModelConfig(str(tmp_path), ModelDtype.FLOAT32), replace(CACHE, num_blocks=170))
    text, table = [3 + place % 90 for place in range(2600)], list(range(170))
    expected = runner.forward([Span(text, 0, table, 40)]).clone()
    for start in range(0, 2600, 200):
        found = runner.forward([Span(text[start : start + 200], start, table, 40)])
    assert torch.equal(found, expected)
