"""Tiny random checkpoints: the same seed gives the same weights, and noise makes a draft that is often right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 64


def write_checkpoint(
    folder: Path, *, seed: int, noise: float = 0.0, vocab_size: int = VOCAB_SIZE, steepness: float = 0.4
) -> None:
    """A float32 Llama of two layers; `noise` perturbs each weight by that share of its spread, which is `steepness`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=steepness,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std().nan_to_num(0.0))
    model.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Folders:
    """A target and its draft."""

    target: Path
    draft: Path


def write_pair(root: Path, *, noise: float) -> Folders:
    """Both under `root`; the draft is the target with this much noise."""
    folders = Folders(root / "target", root / "draft")
    write_checkpoint(folders.target, seed=0)
    write_checkpoint(folders.draft, seed=0, noise=noise)
    return folders
