"""A tiny random pair on disk: a Llama of sixteen tokens, whose draft is often right, and its tokenizer."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.engine.fixtures.checkpoints import write_checkpoint

CHARACTERS = "abdehlnorstw .("
VOCAB_SIZE = len(CHARACTERS) + 1  # and the end of text, 0
NUM_POSITIONS = 4096


def write_pair(folder: Path) -> None:
    """Folders `target` and `draft`; the draft is the target with noise, right about two times in three."""
    for name, noise in (("target", 0.0), ("draft", 0.2)):
        write_checkpoint(
            folder / name, seed=3, noise=noise, vocab_size=VOCAB_SIZE, steepness=0.25, num_positions=NUM_POSITIONS
        )
        _write_tokenizer(folder / name)


def _write_tokenizer(folder: Path) -> None:
    vocabulary = {"<end>": 0, **{character: index + 1 for index, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)
