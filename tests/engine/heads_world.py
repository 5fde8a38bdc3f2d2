"""Heads for tests: checkpoints in exactly the published formats, random but for being often right."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from tests.engine.checkpoints import VOCAB_SIZE, write_checkpoint

HIDDEN_SIZE = 32
NUM_LAYERS = 2


def random(*shape: int, seed: int, scale: float = 0.3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def lm_head_of(target: Path) -> Tensor:
    return load_file(target / "model.safetensors")["lm_head.weight"].float()


def write_medusa(
    folder: Path, target: Path, num_heads: int = 3, num_layers: int = 1, *, prefix: str = "", **config: object
) -> None:
    """FasterDecoding's format: a pickled state dict, blocks and linear layer of each head in one Sequential."""
    folder.mkdir(parents=True)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = random(HIDDEN_SIZE, HIDDEN_SIZE, seed=10 * head + layer)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = random(HIDDEN_SIZE, seed=10 * head + layer + 5)
        tensors[f"{prefix}{head}.{num_layers}.weight"] = lm_head_of(target) + random(VOCAB_SIZE, HIDDEN_SIZE, seed=head)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    named = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": str(target)}
    (folder / "config.json").write_text(json.dumps(named | config))


def write_vllm_medusa(
    folder: Path, target: Path, *, num_heads: int = 3, lm_head: str = "own", cut: int | None = None, **config: object
) -> None:
    """vLLM's format; `lm_head` is "own", "one" (stored once) or "target" (not stored), `cut` a smaller vocabulary."""
    folder.mkdir(parents=True)
    size = HIDDEN_SIZE
    tensors = {f"blocks.{h}.layers.0.weight": random(size, size, seed=10 * h) for h in range(num_heads)}
    token_map = torch.arange(VOCAB_SIZE) if cut is None else torch.arange(cut).flip(0).contiguous()
    if cut:
        tensors["token_map"] = token_map
    stored = {"own": range(num_heads), "one": range(1), "target": range(0)}[lm_head]
    for head in stored:
        tensors[f"lm_heads.{head}.weight"] = lm_head_of(target)[token_map].contiguous()
    save_file(tensors, folder / "model.safetensors")
    named = {
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": 1,
        "hidden_size": size,
        "vocab_size": VOCAB_SIZE,
        "truncated_vocab_size": cut or VOCAB_SIZE,
        "original_lm_head": lm_head != "own",
    }
    (folder / "config.json").write_text(json.dumps(named | config))


def fit_medusa(folder: Path, target: Path, num_heads: int = 3) -> None:
    """Heads that are often right about `target`: a linear fit to what it says when it is greedy."""
    write_medusa(folder, target, num_heads)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = torch.randint(1, VOCAB_SIZE, (32, 4), generator=torch.Generator().manual_seed(0))
    ids = model.generate(prompts, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]  # [B, T, hidden]
    tensors = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    for head in range(num_heads):
        x = hidden[:, : -2 - head].flatten(0, 1)
        y = torch.nn.functional.one_hot(ids[:, 2 + head :].flatten(), VOCAB_SIZE).float()
        ridge = x.T @ x + 0.1 * torch.eye(HIDDEN_SIZE)
        tensors[f"{head}.1.weight"] = 6.0 * torch.linalg.solve(ridge, x.T @ y).T.contiguous()
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN_SIZE)
    torch.save(tensors, folder / "medusa_lm_head.pt")


def write_llama_with_mtp(folder: Path, *, seed: int = 0, num_mtp_layers: int = 1) -> None:
    """A Llama with DeepSeek-V3's names for the layer behind its last: `model.layers.2.enorm` and so on."""
    write_checkpoint(folder, seed=seed)
    add_mtp(folder, num_mtp_layers)


def add_mtp(folder: Path, num_mtp_layers: int = 1) -> None:
    """Give a Llama of two layers such a layer, and make its own change little about a token, so that it can guess."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.03
    for index in range(num_mtp_layers):
        tensors |= _mtp_tensors(f"model.layers.{NUM_LAYERS + index}.", tensors, "model.layers.1.")
    _add_layers(folder, tensors, num_mtp_layers)


def write_deepseek(folder: Path, *, seed: int = 0) -> None:
    """A DeepSeek-V3 with latent attention and experts, and its MTP layer under the published names."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=0,
        num_nextn_predict_layers=1,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= _mtp_tensors(f"model.layers.{NUM_LAYERS}.", tensors, "model.layers.1.")
    _add_layers(folder, tensors, 1)


def transformers_mtp(folder: Path) -> tuple[AutoModelForCausalLM, object]:
    """The target and its MTP layer as transformers itself computes them, in float32."""
    target = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    target.config.num_mtp_layers = 1
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_LAYERS}\."]
    return target, MtpModel.from_pretrained(target).eval()


def _mtp_tensors(prefix: str, tensors: dict[str, Tensor], copied: str) -> dict[str, Tensor]:
    """The layer's tensors: the block is the target's last, so that it is often right."""
    size = HIDDEN_SIZE
    halves = torch.cat((torch.eye(size), 0.1 * torch.eye(size)), dim=1) + random(size, 2 * size, seed=1, scale=0.02)
    block = {prefix + name.removeprefix(copied): tensor for name, tensor in tensors.items() if name.startswith(copied)}
    return {
        **{name: tensor.clone() for name, tensor in block.items()},
        prefix + "enorm.weight": torch.ones(size),
        prefix + "hnorm.weight": torch.ones(size),
        prefix + "eh_proj.weight": halves,
        prefix + "shared_head.norm.weight": torch.ones(size),
        prefix + "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        prefix + "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }


def _add_layers(folder: Path, tensors: dict[str, Tensor], num_mtp_layers: int) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = num_mtp_layers
    (folder / "config.json").write_text(json.dumps(config))
