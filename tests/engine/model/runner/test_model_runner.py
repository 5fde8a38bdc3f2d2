"""The runner against transformers itself: same logits and same text, however the tokens are cut into passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedModel

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig, Quantization
from engine.model.decoders import rotary
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.families import NUM_POSITIONS, REFUSED, SERVED, VOCAB_SIZE, write_family

BLOCK_SIZE = 4
NUM_BLOCKS = 48
CACHE = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)

PROMPTS = tuple(
    tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (23, 9, 14)
)


def load(folder: Path, dtype: str = "float32", max_model_len: int | None = None) -> ModelRunner:
    return ModelRunner(ModelConfig(str(folder), dtype=dtype, device="cpu"), CACHE, max_model_len)


def scattered_tables(count: int) -> list[list[int]]:
    """Block tables without runs, all of the pool dealt out."""
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    return [blocks[index::count] for index in range(count)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_family(folder, SERVED["llama"]())
    return folder


def stock_logits(model: PreTrainedModel, token_ids: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def stock_greedy(model: PreTrainedModel, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    model.generation_config.eos_token_id = None
    config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return output[0, len(prompt) :].tolist()


def greedy(runner: ModelRunner, prompts: tuple[tuple[int, ...], ...], num_tokens: int, chunk: int) -> list[list[int]]:
    """All prompts at once: each pass computes a chunk of each text's missing tokens, so chunks and decodes mix."""
    tables = scattered_tables(len(prompts))
    texts = [list(prompt) for prompt in prompts]
    num_computed = [0] * len(prompts)
    lengths = [len(prompt) + num_tokens for prompt in prompts]
    while any(len(text) < length for text, length in zip(texts, lengths, strict=True)):
        spans, sampled = [], []
        for index, text in enumerate(texts):
            if len(text) == lengths[index]:
                continue
            start, end = num_computed[index], min(num_computed[index] + chunk, len(text))
            spans.append(Span(text[start:end], start, tables[index], int(end == len(text))))
            num_computed[index] = end
            sampled += [index] if end == len(text) else []
        for index, token_id in zip(sampled, runner.forward(spans).argmax(dim=1).tolist(), strict=True):
            texts[index].append(token_id)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("family", SERVED)
def test_greedy_text_of_mixed_chunked_passes_is_that_of_generate(family: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, SERVED[family]())
    expected = [stock_greedy(model, prompt, 12) for prompt in PROMPTS]
    runner = load(tmp_path)
    assert greedy(runner, PROMPTS, 12, chunk=5) == expected
    assert greedy(runner, PROMPTS, 12, chunk=64) == expected


@pytest.mark.parametrize("family", SERVED)
def test_logits_of_a_mixed_pass_are_the_stock_models(family: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, SERVED[family]())
    runner = load(tmp_path)
    first, second, third = PROMPTS
    tables = scattered_tables(3)
    runner.forward([Span(first[:18], 0, tables[0], 0), Span(second[:4], 0, tables[1], 0)])
    logits = runner.forward(
        [
            Span(first[18:], 18, tables[0], 5),  # five rows to verify
            Span(second[4:5], 4, tables[1], 1),  # a decode
            Span(third, 0, tables[2], 3),  # a prefill whose last rows are wanted
        ]
    )
    wanted = [stock_logits(model, first)[18:], stock_logits(model, second)[4:5], stock_logits(model, third)[-3:]]
    torch.testing.assert_close(logits, torch.cat(wanted).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_would_come_out_wrong_are_refused_by_name(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, REFUSED[family]())
    with pytest.raises(ConfigError, match=f"model type '{family}' cannot be served"):
        load(tmp_path)


def test_a_prefill_chunk_alone_yields_no_logits(llama: Path) -> None:
    runner = load(llama)
    assert runner.forward([Span(PROMPTS[0], 0, scattered_tables(1)[0], 0)]).shape == (0, VOCAB_SIZE)


def test_logits_are_float32_whatever_the_model_computes_in(llama: Path) -> None:
    table = scattered_tables(1)[0]
    exact = load(llama).forward([Span(PROMPTS[0], 0, table, 4)])
    rough = load(llama, dtype="bfloat16").forward([Span(PROMPTS[0], 0, table, 4)])
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0, atol=0.15 * float(exact.std()))


def test_rejected_rows_are_overwritten_by_the_next_pass(llama: Path) -> None:
    runner = load(llama)
    prompt, table = PROMPTS[0], scattered_tables(1)[0]
    expected = runner.forward([Span(prompt, 0, table, 1)])
    runner.forward([Span((*prompt[:10], 7, 7, 7, 7), 0, table, 1)])
    assert torch.allclose(runner.forward([Span(prompt[10:], 10, table, 1)]), expected, atol=1e-5)


def test_planned_steps_compute_what_single_passes_do(llama: Path) -> None:
    runner = load(llama)
    tables = scattered_tables(2)
    texts = [list(PROMPTS[0]), list(PROMPTS[1])]
    runner.forward([Span(text[:6], 0, table, 0) for text, table in zip(texts, tables, strict=True)])
    expected = [
        runner.forward([Span([text[at]], at, table, 1) for text, table in zip(texts, tables, strict=True)])
        for at in (6, 7, 8)
    ]
    steps = runner.plan_steps([Span([0] * 3, 6, table, 3) for table in tables])
    for at, (step, logits) in enumerate(zip(steps, expected, strict=True), start=6):
        step.input_ids.copy_(torch.tensor([text[at] for text in texts]))
        torch.testing.assert_close(runner.run(step), logits, rtol=0, atol=1e-5)


def test_rotary_tables_grow_with_the_positions(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = scattered_tables(1)[0]
    expected = load(llama).forward([Span(PROMPTS[0], 0, table, 1)])
    monkeypatch.setattr(rotary, "_FIRST_POSITIONS", 8)
    assert torch.equal(load(llama).forward([Span(PROMPTS[0], 0, table, 1)]), expected)


def test_the_pool_is_sized_by_blocks_or_by_bytes(llama: Path) -> None:
    assert load(llama).num_blocks == NUM_BLOCKS
    by_bytes = CacheConfig(block_size=BLOCK_SIZE, num_blocks=None, memory_bytes=100_000)
    runner = ModelRunner(ModelConfig(str(llama), dtype="float32"), by_bytes)
    assert runner.bytes_per_block == 2 * 2 * BLOCK_SIZE * 2 * 8 * 4  # layers, K and V, P, H, D, float32
    assert runner.num_blocks == 100_000 // runner.bytes_per_block


def test_a_pool_without_a_block_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="holds no block: one takes 1024 bytes"):
        ModelRunner(ModelConfig(str(llama), dtype="float32"), CacheConfig(block_size=4, memory_bytes=1000))


def test_max_model_len_is_the_models_positions_or_less(llama: Path) -> None:
    assert load(llama).max_model_len == NUM_POSITIONS
    assert load(llama, max_model_len=50).max_model_len == 50
    with pytest.raises(ConfigError, match="max_model_len is 500, but the model has 128 positions"):
        load(llama, max_model_len=500)


def test_rotary_scalings_that_depend_on_batch_mates_limit_the_positions(tmp_path: Path) -> None:
    config = SERVED["llama"]()
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    write_family(tmp_path, config)
    assert load(tmp_path).max_model_len == 64


def test_model_version_names_the_weights(llama: Path, tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    assert load(tmp_path).model_version == load(llama).model_version
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).model_version != load(llama).model_version


def test_model_version_names_what_the_weights_are_computed_in(llama: Path) -> None:
    """A stream is not continued after a deploy that changed the dtype of the model or its KV."""
    exact = ModelRunner(ModelConfig(str(llama), dtype="float32"), CacheConfig(4, 8))
    rounded = ModelRunner(ModelConfig(str(llama), dtype="bfloat16"), CacheConfig(4, 8))
    packed = ModelRunner(ModelConfig(str(llama), dtype="float32"), CacheConfig(4, 8, dtype="int8"))
    assert len({runner.model_version for runner in (exact, rounded, packed)}) == 3


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere' does not exist"):
        load(tmp_path / "nowhere")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model configuration"):
        load(tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors and no index"):
        load(tmp_path)


def test_incomplete_weights_are_refused_rather_than_filled_with_noise(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensors are missing, 'model.layers.1.mlp.up_proj.weight'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("dropped", "num_layers"), [("layers.1.mlp.up_proj.bias", 2), ("layers.2.input_layernorm.weight", 3)]
)
def test_tensors_that_the_configuration_leaves_out_are_refused(tmp_path: Path, dropped: str, num_layers: int) -> None:
    model = SERVED["llama"]()
    write_family(tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    usual = {name: weight for name, weight in weights.items() if name.startswith("model.layers.1.")}
    if num_layers == 3:
        weights |= {name.replace("layers.1.", "layers.2."): weight.clone() for name, weight in usual.items()}
    else:
        weights[f"model.{dropped}"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"'model.{dropped}' is in the files, but the configuration has no such tensor"
    ):
        load(tmp_path)


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, quantization: Quantization, value: float) -> None:
    write_family(tmp_path, SERVED["llama"]())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][50, 3] = value
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 of \d+ values of 'model.embed_tokens.weight' in .* are NaN or infinite"):
        ModelRunner(ModelConfig(str(tmp_path), dtype="float32", quantization=quantization), CACHE)


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"rms_norm_eps": None}, {"hidden_act": "nope"}],
    ids=str,
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    write_family(tmp_path, SERVED["llama"]())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=r"(holds no model configuration|cannot be loaded).*: \w*Error: "):
        load(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    LlamaConfig.from_pretrained(tmp_path, intermediate_size=48).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"'model.layers.0.mlp.down_proj.weight' is \[.*\] in the files but \[.*48\] by"
    ):
        load(tmp_path)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, SERVED["llama"]())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"not a whole safetensors file: .*not fully covered"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "float64", ""])
def test_unknown_dtypes_are_refused(dtype: str, llama: Path) -> None:
    with pytest.raises(ConfigError, match="is unknown; use auto"):
        load(llama, dtype=dtype)


def test_unknown_devices_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        ModelRunner(ModelConfig(str(llama), device="gpu"), CACHE)


def test_thread_count_is_the_configured_one(llama: Path) -> None:
    before = torch.get_num_threads()
    try:
        ModelRunner(ModelConfig(str(llama), dtype="float32", num_threads=before + 1), CACHE)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
