"""A tiny target and drafts of it with other tokenizers, on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM

from models.transplant import transplant
from tests.engine.checkpoints import Folders, write_checkpoint

CONTROL = ["<end>", "<turn>"]
TARGET_TEXTS = ["the tokens of the target are those that it counts", "a draft is a guess at the next token of the text"]
DRAFT_TEXTS = ["dreft tests cost at most a token", "neat hats on a mat do nest", "shift and fig are with us", "go back"]


def new_tokenizer(texts: list[str], num_merges: int, control: list[str] = CONTROL) -> Tokenizer:
    """A BPE over the letters of both corpora; the same bytes have another id in another one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    letters = sorted({each for text in TARGET_TEXTS + DRAFT_TEXTS for each in text.replace(" ", "\u0120")})
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + len(control) + num_merges,
        special_tokens=control,
        initial_alphabet=letters,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core


def write_foreign_pair(root: Path, *, noise: float = 0.02) -> Folders:
    """The draft is the target with noise, moved to a tokenizer that lacks a few tokens, has others, and other ids.

    Models of random weights know nothing of text: a token that the draft reads in pieces is another token to it.
    """
    folders = Folders(root / "target", root / "draft")
    target = new_tokenizer(TARGET_TEXTS, 24)
    write_checkpoint(folders.target, seed=0, vocab_size=target.get_vocab_size())
    target.save(str(folders.target / "tokenizer.json"))
    draft = renumbered(new_tokenizer([*TARGET_TEXTS, "at at of of"], 25, control=["<start>", "<end>"]))
    transplant(folders.target, draft, folders.draft, noise)
    _say_often(folders.draft, draft.token_to_id("\u0120at"))
    return folders


def _say_often(folder: Path, token_id: int) -> None:
    """The draft likes a token that the target does not have."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[token_id] *= 3.0
    model.save_pretrained(folder)


def renumbered(core: Tokenizer) -> Tokenizer:
    """The same tokens, the last one first."""
    content = json.loads(core.to_str())
    last_id = core.get_vocab_size() - 1
    content["model"]["vocab"] = {name: last_id - token_id for name, token_id in content["model"]["vocab"].items()}
    for each in content["added_tokens"]:
        each["id"] = last_id - each["id"]
    content["added_tokens"].sort(key=lambda each: each["id"])
    return Tokenizer.from_str(json.dumps(content))


def write_small_pair(root: Path) -> Folders:
    """Twelve tokens beside ten, of which they share eight under other ids; the draft is wrong one time in three."""
    folders = Folders(root / "target", root / "draft")
    write_checkpoint(folders.target, seed=1, vocab_size=12)
    _letters("abcdefghij", "ab").save(str(folders.target / "tokenizer.json"))
    transplant(folders.target, _letters("jihgedcba", "dc"), folders.draft, noise=0.2)
    return folders


def _letters(letters: str, merged: str) -> Tokenizer:
    names = ["<end>", *letters, merged]
    core = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [(merged[0], merged[1])]))
    core.add_special_tokens(["<end>"])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core
