"""Text grows with its tokens, exactly and without half characters, for each way of spelling."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerCore
from tokenizers import decoders, models, pre_tokenizers, trainers

from router.tokenizer import ByteDetokenizer, Detokenizer, Tokenizer, WindowDetokenizer, make_detokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve café — 10 €",
    "日本語のテキスト",
    "👩‍👩‍👧 family 😀!",
    "  two  spaces  ",
    "\tтекст",
]


def byte_level() -> Tokenizer:
    core = TokenizerCore(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    return Tokenizer(core)


def sentencepiece() -> Tokenizer:
    """Return a tokenizer like Llama 2's: marked spaces, byte tokens, a decoder that strips the first space."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "\u2581def", "\u2581return", "\u2581caf", *"abcdefghijklmnopqrstuvwxyz():+,."]
    core = TokenizerCore(
        models.BPE(
            vocab={word: id_ for id_, word in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.add_special_tokens(["</s>"])
    return Tokenizer(core)


def word_level() -> Tokenizer:
    """A decoder that spells nothing: words joined by spaces."""
    core = TokenizerCore(models.WordLevel({"the": 0, "cat": 1, "sat": 2, "<unk>": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(core)


BYTE_LEVEL, SENTENCEPIECE, WORD_LEVEL = byte_level(), sentencepiece(), word_level()


def pieces_of(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", [ByteDetokenizer, WindowDetokenizer])
def test_byte_level_pieces_join_to_the_text(text: str, kind: type) -> None:
    arguments = (BYTE_LEVEL, ()) if kind is WindowDetokenizer else (BYTE_LEVEL,)
    pieces = pieces_of(kind(*arguments), BYTE_LEVEL.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@given(st.lists(st.integers(0, 329), max_size=40))
@example([0xE2 + 1, 0x82 + 1, 0xAC + 1])  # one character in three tokens
@example([0xE2 + 1, 0, 0x82 + 1, 0xAC + 1])  # a control token within it
@example([0xE2 + 1])
@example([0xFF + 1, 0xC0 + 1, 0x80 + 1])  # bytes of no character
def test_any_byte_level_tokens_read_as_the_tokenizer_decodes_them(token_ids: list[int]) -> None:
    for skip in (True, False):
        detokenizer = ByteDetokenizer(BYTE_LEVEL, skip_special_tokens=skip)
        decoded = BYTE_LEVEL.decode(token_ids, skip_special_tokens=skip)
        assert "".join(pieces_of(detokenizer, token_ids)) == decoded


@given(st.text(max_size=30), st.text(max_size=30))
@example("a ", " b")
@example("", "  \n")
@example("é", "\u0301🙂")
def test_sentencepiece_continues_a_prompt_with_its_spaces(prompt: str, text: str) -> None:
    token_ids = SENTENCEPIECE.encode("x" + prompt + text, add_special_tokens=False)
    for cut in range(1, len(token_ids)):
        detokenizer = make_detokenizer(SENTENCEPIECE, token_ids[:cut])
        continued = "".join(pieces_of(detokenizer, token_ids[cut:]))
        if "\ufffd" not in continued:  # the cut is not inside a character
            assert SENTENCEPIECE.decode(token_ids).endswith(continued)


def token_id_of(tokenizer: Tokenizer, name: str) -> int:
    return next(token_id for token_id in range(400) if tokenizer.token_name(token_id) == name)


def test_sentencepiece_keeps_the_space_of_a_first_word() -> None:
    word = token_id_of(SENTENCEPIECE, "\u2581def")
    assert SENTENCEPIECE.decode([word]) == "def"
    assert SENTENCEPIECE.token_text(word) == " def"
    assert make_detokenizer(SENTENCEPIECE, [258]).push(word) == " def"


def test_a_sentencepiece_character_waits_for_its_last_byte() -> None:
    token_ids = [token_id_of(SENTENCEPIECE, f"<0x{byte:02X}>") for byte in "€".encode()]
    assert pieces_of(make_detokenizer(SENTENCEPIECE, ()), token_ids) == ["", "", "€", ""]


def test_tokens_without_bytes_are_joined_as_their_decoder_does() -> None:
    detokenizer = make_detokenizer(WORD_LEVEL, WORD_LEVEL.encode("the cat"))
    assert pieces_of(detokenizer, WORD_LEVEL.encode("sat the cat")) == [" sat", " the", " cat", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_special_tokens_are_shown_only_if_asked_for(tokenizer: Tokenizer) -> None:
    name = "<|end|>" if tokenizer is BYTE_LEVEL else "</s>"
    token_id = token_id_of(tokenizer, name)
    assert make_detokenizer(tokenizer, ()).push(token_id) == ""
    assert make_detokenizer(tokenizer, (), skip_special_tokens=False).push(token_id) == name


def test_bytes_that_never_become_a_character_are_replaced_at_the_end() -> None:
    detokenizer = ByteDetokenizer(BYTE_LEVEL)
    first, *_ = [id_ for id_ in range(330) if BYTE_LEVEL.token_bytes(id_) == b"\xe2"]
    assert pieces_of(detokenizer, [first]) == ["", "\ufffd"]
