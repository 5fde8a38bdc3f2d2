"""GGUF files: every type of block as ggml defines it, the tokenizer with its template, and refusals by name."""

from __future__ import annotations

import resource
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import CacheConfig, ModelConfig
from engine.model.checkpoint.gguf import convert_gguf, main
from engine.model.checkpoint.gguf_header import read_gguf_header
from engine.model.checkpoint.unread_weight import read_weight
from engine.model.checkpoint.weight_files import tensor_headers
from engine.model.loader import load_model
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from router.tokenizer.tokenizer_files import load_tokenizer_files
from tests.engine.model.checkpoint.gguf_files import (
    HEAD_DIM,
    TEMPLATE,
    TOKENS,
    GgufFile,
    add_tokenizer,
    finish,
    set_metadata,
    write_mixture,
    write_model,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    return GgufFile(tmp_path_factory.mktemp("gguf") / "tiny.gguf").write()


@pytest.fixture(scope="module")
def folder(file: GgufFile) -> Path:
    folder = file.path.parent / "float32"
    convert_gguf(file.path, folder, torch.float32)
    return folder


def test_every_type_of_block_is_read_as_it_is_defined(file: GgufFile, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert set(weights) == set(file.expected)
    for name, numbers in file.expected.items():
        np.testing.assert_allclose(weights[name].numpy(), numbers, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_served_dtype_is_the_nearest_of_the_exact_numbers(file: GgufFile, folder: Path, tmp_path: Path) -> None:
    convert_gguf(file.path, tmp_path / "m", torch.bfloat16)
    exact = load_file(folder / "model.safetensors")
    for name, weight in load_file(tmp_path / "m" / "model.safetensors").items():
        assert torch.equal(weight, exact[name].to(torch.bfloat16)), name


def test_blocks_are_kept_and_their_numbers_read_when_they_are_used(file: GgufFile, tmp_path: Path) -> None:
    convert_gguf(file.path, tmp_path / "m")
    folder = sum(each.stat().st_size for each in (tmp_path / "m").glob("*.safetensors"))
    assert folder < 1.1 * file.path.stat().st_size
    weights = load_model(ModelConfig(str(tmp_path / "m"), "float32", "cpu")).state_dict()
    assert set(weights) == set(file.expected)
    for name, numbers in file.expected.items():
        np.testing.assert_allclose(read_weight(weights[name]).numpy(), numbers, rtol=1e-5, atol=1e-6, err_msg=name)
    runner = ModelRunner(ModelConfig(str(tmp_path / "m"), "float32", "cpu"), CacheConfig(num_blocks=4))
    assert runner.vocab_size == len(TOKENS)


def test_experts_keep_their_blocks(tmp_path: Path) -> None:
    """llama.cpp has the gates and the ups of all experts in a tensor each, transformers both in one."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}
    model = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, vocab_size=len(TOKENS))
    )
    metadata = {
        **{"context_length": 64, "embedding_length": 64, "feed_forward_length": 64, "block_count": 1},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16},
        **{"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e4, "rope.dimension_count": 16},
        **{"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    }
    expected = write_mixture(tmp_path / "moe.gguf", model, metadata)
    convert_gguf(tmp_path / "moe.gguf", tmp_path / "m")
    names = tensor_headers(tmp_path / "m")
    assert {name for name in names if "experts" in name} == {
        "model.layers.0.mlp.experts.gate_up_proj.Q8_0",
        "model.layers.0.mlp.experts.down_proj.Q8_0",
    }
    weights = load_model(ModelConfig(str(tmp_path / "m"), "float32", "cpu")).state_dict()
    for name, numbers in expected.items():
        np.testing.assert_allclose(read_weight(weights[name]).numpy(), numbers, rtol=1e-5, atol=1e-6, err_msg=name)
    config = ModelConfig(str(tmp_path / "m"), "float32", "cpu")
    assert ModelRunner(config, CacheConfig(num_blocks=4)).vocab_size == len(TOKENS)


def test_its_tokenizer_and_chat_template_come_along(folder: Path) -> None:
    files = load_tokenizer_files(str(folder))
    assert files.chat_template is not None
    assert files.chat_template.source == TEMPLATE
    ids = files.tokenizer.encode("the hen", add_special_tokens=False)
    assert TOKENS.index("he") in ids


def test_it_is_served(folder: Path) -> None:
    runner = ModelRunner(ModelConfig(str(folder), "float32"), CacheConfig(num_blocks=4))
    assert runner.vocab_size == len(TOKENS)
    assert runner.eos_token_ids == (len(TOKENS) - 1,)


def test_without_a_head_of_its_own_the_embeddings_are_the_head(tmp_path: Path) -> None:
    convert_gguf(GgufFile(tmp_path / "tied.gguf", is_tied=True).write().path, tmp_path / "m", torch.float32)
    assert AutoConfig.from_pretrained(tmp_path / "m").tie_word_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")


def llama_3_divisors(factor: float) -> np.ndarray:
    """Divisors as convert_hf_to_gguf.py computes them from Llama 3's `rope_scaling`."""
    divisors = []
    for frequency in 10_000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM):
        length = 2 * np.pi / frequency
        smooth = (8192 / length - 1) / (4 - 1)
        middle = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1 if length < 8192 / 4 else factor if length > 8192 else middle)
    return np.array(divisors)


def test_llama_3_keeps_its_scaled_frequencies(tmp_path: Path) -> None:
    divisors = llama_3_divisors(32.0)
    assert len(set(divisors)) > 3
    file = GgufFile(tmp_path / "llama3.gguf", rope_divisors=divisors).write()
    convert_gguf(file.path, tmp_path / "m", torch.float32)
    config = AutoConfig.from_pretrained(tmp_path / "m")
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10_000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(frequencies.numpy(), plain / divisors, rtol=1e-4)


def test_other_scalings_of_frequencies_are_refused(tmp_path: Path) -> None:
    file = GgufFile(tmp_path / "odd.gguf", rope_divisors=np.linspace(1, 3, HEAD_DIM // 2)).write()
    with pytest.raises(ConfigError, match="scales its rotary frequencies"):
        convert_gguf(file.path, tmp_path / "m", torch.float32)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_alone_is_a_scaling(tmp_path: Path, key: str) -> None:
    file = GgufFile(tmp_path / "linear.gguf", metadata={f"llama.{key}": 8.0}).write()
    with pytest.raises(ConfigError, match=r"scales its rotary frequencies in an unsupported way \(linear, 8.0\)"):
        convert_gguf(file.path, tmp_path / "m", torch.float32)
    file = GgufFile(tmp_path / "none.gguf", metadata={f"llama.{key}": 1.0}).write()
    convert_gguf(file.path, tmp_path / "m", torch.float32)


FAMILIES = {
    "starcoder2": (Starcoder2Config, {"rope_theta": 1e6}, {"norm_epsilon": 0.01}),
    "stablelm": (StableLmConfig, {"rope_theta": 1e6, "partial_rotary_factor": 0.5}, {"layer_norm_eps": 0.01}),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_families_keep_the_numbers_of_their_metadata(tmp_path: Path, architecture: str) -> None:
    kind, rope, epsilon = FAMILIES[architecture]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", **rope}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = kind(
        **sizes,
        **epsilon,
        **ends,
        rope_parameters=rope,
        num_key_value_heads=2,
        vocab_size=len(TOKENS),
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    metadata = {
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_epsilon": 0.01,
        "rope.freq_base": 1e6,
        "rope.dimension_count": int(16 * rope.get("partial_rotary_factor", 1)),
    }
    write_model(tmp_path / "a.gguf", architecture, model, metadata)
    convert_gguf(tmp_path / "a.gguf", tmp_path / "m", torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    token_ids = torch.arange(40)[None]
    torch.testing.assert_close(converted(token_ids).logits, model(token_ids).logits)


def test_the_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": len(TOKENS) - 1}
    convert_gguf(GgufFile(tmp_path / "chat.gguf", metadata=ends).write().path, tmp_path / "m", torch.float32)
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == [len(TOKENS) - 1, 7]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.block_count", None, "has no llama.block_count; it must be a positive integer"),
        ("llama.context_length", None, "has no llama.context_length"),
        ("llama.embedding_length", None, "has no llama.embedding_length"),
        ("llama.attention.head_count", None, "has no llama.attention.head_count"),
        ("llama.attention.head_count", 0, "has llama.attention.head_count 0; it must be a positive integer"),
        ("llama.attention.head_count_kv", 0, "has llama.attention.head_count_kv 0; it must be a positive number"),
        ("llama.rope.freq_base", float("inf"), "has llama.rope.freq_base inf"),
        ("llama.feed_forward_length", None, "has no llama.feed_forward_length"),
        ("llama.feed_forward_length", 2.5, "has llama.feed_forward_length 2.5"),
        ("llama.block_count", 10**9, "has llama.block_count 1000000000; it must be at most .* its tensors, 21"),
        ("llama.attention.layer_norm_rms_epsilon", None, "has no llama.*rms_epsilon or llama.*norm_epsilon"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "_epsilon nan; it must be a positive number"),
        ("split.count", "two", "has split.count 'two'; it must be a positive integer"),
        ("split.count", float("inf"), "has split.count inf"),
        ("split.count", float("nan"), "has split.count nan"),
        ("general.alignment", "x", "has general.alignment 'x'; it must be a positive integer"),
        ("general.alignment", 0.5, "has general.alignment 0.5"),
        ("general.alignment", 0, "has general.alignment 0"),
        ("general.tags", [[1], [2]], "has 'general.tags' as an array of 2 of GGUF type 9"),
        ("tokenizer.ggml.eos_token_id", 10**6, "eos_token_id 1000000; it must be an id of one of its 259 tokens"),
        ("tokenizer.ggml.eot_token_id", -1, "eot_token_id -1; it must be an id of one of its 259 tokens"),
        ("tokenizer.ggml.tokens", None, r"has no tokenizer \(tokenizer.ggml.tokens is missing\)"),
        ("tokenizer.ggml.model", None, r"has no tokenizer \(tokenizer.ggml.model is missing\)"),
    ],
)
def test_metadata_that_makes_no_model_is_refused_by_its_key(tmp_path: Path, key: str, value: object, said: str) -> None:
    path = GgufFile(tmp_path / "odd.gguf", metadata={key: value}).write().path
    with pytest.raises(ConfigError, match=f"odd.gguf' .*{said}"):
        read_gguf_header(path)


def test_per_layer_sizes_and_sizes_of_absent_layers_are_allowed(tmp_path: Path) -> None:
    read_gguf_header(GgufFile(tmp_path / "a.gguf", metadata={"llama.feed_forward_length": [256, 256]}).write().path)
    writer = GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    add_tokenizer(writer)
    sizes = {"context_length": 64, "embedding_length": 64, "block_count": 1, "attention.layer_norm_rms_epsilon": 1e-5}
    set_metadata(writer, {f"mamba.{key}": value for key, value in sizes.items()})
    writer.add_tensor("blk.0.ssm_a", np.ones(4, dtype=np.float32))
    finish(writer)
    assert read_gguf_header(tmp_path / "mamba.gguf").epsilon == pytest.approx(1e-5)


def test_a_tensor_has_at_most_four_dimensions(tmp_path: Path) -> None:
    class Deep(GgufFile):
        def _tokenizer(self) -> None:
            super()._tokenizer()
            self._writer.add_tensor("deep.weight", np.ones((1, 1, 1, 1, 2), dtype=np.float32))

    with pytest.raises(ConfigError, match=r"tensor 'deep.weight' of .* has 5 dimensions; the limit is 4"):
        read_gguf_header(Deep(tmp_path / "deep.gguf").write().path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.head_count", 8, r"self_attn.*weight' is \[256, 256\] in the files but \[.*512.*\] by"),
        ("llama.vocab_size", 10**9, "holds 920,320 numbers, but transformers' model has 512,000,"),
        ("llama.embedding_length", 2**30, "holds 920,320 numbers, but transformers' model has 3,8"),
        ("tokenizer.ggml.model", "odd", "transformers does not read .*: ValueError: Cannot build a tokenizer"),
    ],
)
def test_metadata_that_does_not_fit_the_tensors_is_refused(tmp_path: Path, key: str, value: object, said: str) -> None:
    path = GgufFile(tmp_path / "odd.gguf", metadata={key: value}).write().path
    with pytest.raises(ConfigError, match=said):
        convert_gguf(path, tmp_path / "m", torch.float32)


@pytest.mark.parametrize("num_bytes", [0, 3, 12, 500, 4_000, 100_000, -64])
def test_a_file_that_is_cut_short_is_refused_by_its_header(file: GgufFile, tmp_path: Path, num_bytes: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.path.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"cut.gguf' is (not a GGUF file|cut short)|has a damaged or truncated"):
        read_gguf_header(cut)


_MIB = 1 << 20


def _hole(file: Path, *numbers: int, begin: bytes = b"") -> Path:
    """Write a file of 400 MB that takes no room: its counts of tensors and values, `begin`, and zeros."""
    with file.open("wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, *numbers) + begin)
        stream.truncate(400 * _MIB)
    return file


_KEY = struct.pack("<Q", 1) + b"a"


@pytest.mark.parametrize(
    ("num_tensors", "num_values", "begin"),
    [
        (1 << 24, 0, b""),
        (1 << 16, 0, b""),  # as many as allowed; the second has the name of the first
        (1 << 63, 1 << 63, b""),
        (0, 1 << 24, b""),
        (0, 1 << 30, b""),
        (0, 1, _KEY + struct.pack("<IQ", 8, 1 << 40)),  # a string
        (0, 1, _KEY + struct.pack("<IQ", 8, 380 * _MIB)),
        (0, 1, _KEY + struct.pack("<IIQ", 9, 8, 1 << 24)),  # an array of strings
        (0, 1, _KEY + struct.pack("<IIQ", 9, 0, 1 << 62)),  # an array of bytes
        (0, 1 << 20, _KEY + struct.pack("<IIQ", 9, 8, 1 << 20) + bytes(8 * _MIB) + _KEY),
    ],
)
def test_a_file_that_is_all_hole_is_refused_at_once(
    tmp_path: Path, num_tensors: int, num_values: int, begin: bytes
) -> None:
    path = _hole(tmp_path / "hole.gguf", num_tensors, num_values, begin=begin)
    began_s, peak = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"hole\.gguf' "):
        read_gguf_header(path)
    assert time.thread_time() - began_s < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 512 * 1024  # KiB; a string of 256 MiB, once


def test_a_tensor_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    class Twice(GgufFile):
        def _tokenizer(self) -> None:
            super()._tokenizer()
            self._writer.add_tensor("blk.0.attn_q.twice", np.ones(4, dtype=np.float32))
            self._writer.add_tensor("blk.0.attn_k.twice", np.ones(4, dtype=np.float32))

    path = Twice(tmp_path / "twice.gguf").write().path
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_k.twice", b"blk.0.attn_q.twice"))
    with pytest.raises(ConfigError, match=r"has tensor 'blk\.0\.attn_q\.twice' twice"):
        read_gguf_header(path)


def test_an_unknown_type_is_refused_with_the_tensor_and_the_supported_types(file: GgufFile, tmp_path: Path) -> None:
    content = file.path.read_bytes()
    name = b"blk.0.attn_q.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(content[:place] + struct.pack("<I", 39) + content[place + 4 :])
    with pytest.raises(
        ConfigError, match=r"'blk.0.attn_q.weight' of .* has GGUF type 39, which is not supported; .* Q6_K"
    ):
        read_gguf_header(odd)


def test_another_architecture_is_refused_by_its_name(
    file: GgufFile, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = replace(file, path=tmp_path / "other.gguf", architecture="rwkv7").write().path
    monkeypatch.setattr("sys.argv", ["gguf", str(path), str(tmp_path / "m")])
    assert main() == 1
    assert f"transformers does not read '{path}' (architecture 'rwkv7')" in capsys.readouterr().out


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    path = GgufFile(tmp_path / "part.gguf", left_out="blk.1.ffn_up").write().path
    with pytest.raises(ConfigError, match=r"1 tensors are missing, 'model.layers.1.mlp.up_proj.weight'"):
        convert_gguf(path, tmp_path / "m", torch.float32)


def test_tensors_that_transformers_would_drop_are_refused(tmp_path: Path) -> None:
    class WithBias(GgufFile):
        def _tokenizer(self) -> None:
            super()._tokenizer()
            self._writer.add_tensor("blk.0.attn_q.bias", np.ones(256, dtype=np.float32))

    path = WithBias(tmp_path / "bias.gguf").write().path
    with pytest.raises(ConfigError, match="a part of it would be left out"):
        convert_gguf(path, tmp_path / "m", torch.float32)
