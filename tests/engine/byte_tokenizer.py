"""A byte-level tokenizer of 300 tokens, some of several bytes, beside a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BYTE_VOCAB_SIZE = 300
END_ID = 0
_TEXTS = [json.dumps({"name": "n", "value": i, "tags": ["a", "ab"], "is": i > 9, "none": None}) for i in range(20)]


def write_tokenizer(folder: Path) -> Tokenizer:
    """Write tokenizer.json into `folder`; token 0 ends a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        _TEXTS,
        trainers.BpeTrainer(
            vocab_size=BYTE_VOCAB_SIZE,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    core.save(str(folder / "tokenizer.json"))
    return core
