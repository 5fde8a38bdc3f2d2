"""A DSpark head without training (arXiv:2607.05147), in speculators' layout: one layer as wide as its target's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from engine.config import HeadKind
from engine.model.draft_heads.published import HeadFormat
from engine.position_log.shard import LoggedRequest
from protos.errors import ConfigError
from tuning.drafts import load_reader, partial_of
from tuning.student import BlockStudent


def write_new_head(folder: Path, target: str, requests: Sequence[LoggedRequest]) -> None:
    """Write a head for `target`, whose vocabulary is the most frequent tokens at logged positions of `requests`.

    Raises:
        ConfigError: the target has too few layers, or its states cannot be computed here.
    """
    text: Any = AutoConfig.from_pretrained(target).get_text_config()
    least_layers = 4  # for three different taps
    if text.num_hidden_layers < least_layers:
        raise ConfigError(
            f"--draft dspark makes a head on three of the target's layers, and {target} has {text.num_hidden_layers}; "
            f"it needs {least_layers} or more: give the folder of a draft model"
        )
    reader = load_reader(target, torch.device("cpu"), folder.parent)
    counts = _counts(requests, reader.vocab_size)
    # 5120 tokens are 97% to 98% of a chat model's own answers; a head for SmolLM2-135M then has 19 MB.
    target_ids = counts.argsort(descending=True, stable=True)[:5120].sort().values
    config = _config(text, reader.vocab_size, len(target_ids), mask_id=int(counts.argmin()))
    student = BlockStudent(HeadFormat.of(HeadKind.DSPARK, config, reader.shape, str(folder)))
    _begin(student, reader.embedding.float(), reader.lm_head.float(), target_ids)
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in student.state_dict().items()}
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    tensors["t2d"] = torch.zeros(reader.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.rename(folder)


def _counts(requests: Sequence[LoggedRequest], vocab_size: int) -> Tensor:
    chosen = [torch.from_numpy(each.token_ids[each.positions]).long() for each in requests]
    return torch.bincount(torch.cat(chosen), minlength=vocab_size)


def _config(text: Any, vocab_size: int, draft_vocab_size: int, mask_id: int) -> dict[str, Any]:
    """Return config.json. Every head has its own keys and values: what a row knows of the text comes through them."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_heads = max(1, text.hidden_size // head_dim)
    layer = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    num_layers = text.num_hidden_layers
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab_size,
        "aux_hidden_state_layer_ids": sorted(
            {min(2, num_layers // 4), num_layers // 2, num_layers - num_layers // 10 - 1}
        ),
        "block_size": 4,
        "mask_token_id": mask_id,
        "sample_from_anchor": True,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


@torch.no_grad()
def _begin(student: BlockStudent, embedding: Tensor, lm_head: Tensor, target_ids: Tensor) -> None:
    """Take the target's output layer, and its tokens' main directions for the term of the token before."""
    student.lm_head.weight.copy_(lm_head[target_ids])
    known = embedding[target_ids]
    student.mask_embedding.copy_(known.mean(0))
    centred = embedding - known.mean(0)
    rank = student.markov_head.markov_w1.embedding_dim
    directions = torch.linalg.svd(centred[target_ids], full_matrices=False).Vh[:rank]
    table = centred @ directions.T
    student.markov_head.markov_w1.weight[:, : table.shape[1]] = table / table[target_ids].std()
    student.markov_head.markov_w2.weight.zero_()
    # At first a row sees the mean of the highest states before it. Larger logits would be wrong with confidence.
    student.norm.weight.fill_(1.5 / float(student.lm_head.weight.norm(dim=1).mean()))
    nn.init.zeros_(student.fc.weight)
    student.fc.weight[:, -student.fc.out_features :].fill_diagonal_(1.0)
    for layer in student.layers:
        nn.init.eye_(layer.self_attn["v_proj"].weight)
        nn.init.eye_(layer.self_attn["o_proj"].weight)
        layer.mlp["down_proj"].weight.mul_(0.1)
