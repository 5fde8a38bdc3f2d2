"""A model moved to another tokenizer without training: each of its new tokens is the mean of those that spell it."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.translation.spelled_vocabulary import SpelledVocabulary


def transplant(source: Path, tokenizer: Tokenizer, folder: Path, noise: float = 0.0) -> None:
    """Write to `folder` the Llama of `source` over `tokenizer`, which comes along.

    Control tokens are those of the same name. `noise` perturbs each weight by that share of its spread.
    """
    model: Any = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = SpelledVocabulary.from_file(source / "tokenizer.json", model.config.vocab_size)
    new = SpelledVocabulary(tokenizer, tokenizer.get_vocab_size())
    pieces = [_pieces(new, old, token_id) for token_id in range(tokenizer.get_vocab_size())]
    embedding = _rows(model.get_input_embeddings().weight, pieces)
    head = _rows(model.get_output_embeddings().weight, pieces)
    model.resize_token_embeddings(len(pieces))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embedding)
        model.get_output_embeddings().weight.copy_(head)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std().nan_to_num(0.0))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def _pieces(new: SpelledVocabulary, old: SpelledVocabulary, token_id: int) -> list[int]:
    """The old tokens that a new one is made of, control tokens by name."""
    if token_id in new.special_ids:
        return [each for each in old.special_ids if old.names[each] == new.names[token_id]]
    return old.encode_bytes(new.bytes_of(token_id))


def _rows(weight: Tensor, pieces: list[list[int]]) -> Tensor:
    """[V of the old, hidden] -> [V of the new, hidden]; zero for tokens that nothing old can spell."""
    weight = weight.detach()
    return torch.stack([weight[each].mean(dim=0) if each else torch.zeros_like(weight[0]) for each in pieces])
