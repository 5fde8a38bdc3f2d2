"""A tiny random pair on disk: Llama with a vocabulary small enough that drafts are often right, and its tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,:()"


def write_pair(folder: Path) -> None:
    """Folders `target` and `draft`; the draft is the target with noise, so it is right often and not always."""
    torch.manual_seed(7)
    target = LlamaForCausalLM(_config())
    _write(target, folder / "target")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.std())
    _write(target, folder / "draft")


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )


def _write(model: LlamaForCausalLM, folder: Path) -> None:
    model.float().save_pretrained(folder)
    vocabulary = {"<end>": 0, **{character: index + 1 for index, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)
