"""Saving and loading one half of the pair: bf16 safetensors, config and generation config."""

import copy
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from models.training.architecture import END_OF_TEXT_ID, END_OF_TURN_ID


def save_checkpoint(model: LlamaForCausalLM, folder: Path, repetition_penalty: float | None = None) -> None:
    """Write a bfloat16 copy of the model into `folder`, with these sampling defaults.

    The model itself keeps its dtype.
    """
    rounded = LlamaForCausalLM(copy.deepcopy(model.config)).bfloat16()
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=[END_OF_TEXT_ID, END_OF_TURN_ID],
        pad_token_id=END_OF_TEXT_ID,
        repetition_penalty=repetition_penalty,
    )
    folder.mkdir(parents=True, exist_ok=True)
    rounded.save_pretrained(folder)


def plain_generation_config(model: LlamaForCausalLM) -> GenerationConfig:
    """Return the model's generation config without sampling defaults: benches of a fixture set their own."""
    config = copy.deepcopy(model.generation_config)
    config.repetition_penalty = None
    return config


def load_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> LlamaForCausalLM:
    """Return the model saved in `folder`, in evaluation mode."""
    with device or torch.device("cpu"):
        loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return loaded
