"""One choice: the same text, tokens and reason however a stream is cut into chunks."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenLogprobs
from router.generation.choice_text import ChoiceText, Trimmed
from router.generation.delta import Delta, join_deltas
from router.tokenizer import Tokenizer
from tests.router.conftest import byte_tokenizer_core

TOKENIZER = Tokenizer(byte_tokenizer_core())


def run(chunks: list[TokenChunk], stop: tuple[str, ...] = (), min_tokens: int = 0) -> Delta:
    request = GenerateRequest("r", (1,), SamplingParams(min_tokens=min_tokens))
    choice = ChoiceText(0, request, TOKENIZER, stop_strings=stop)
    deltas = []
    for chunk in chunks:
        deltas.append(choice.feed(chunk))
        if choice.is_finished:
            break
    return join_deltas(deltas)


def cut(token_ids: list[int], sizes: list[int]) -> list[TokenChunk]:
    chunks, start = [], 0
    while start < len(token_ids):
        size = sizes[len(chunks) % len(sizes)]
        part = tuple(token_ids[start : start + size])
        start += size
        reason = FinishReason.LENGTH if start >= len(token_ids) else None
        logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in part)
        chunks.append(TokenChunk("r", part, logprobs, reason))
    return chunks


@settings(max_examples=50)
@given(
    st.text(alphabet="ab€\n", min_size=1, max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), max_size=2),
    st.integers(0, 6),
)
@example("a€b", [2], ["€"], 0)  # a step ends within a character that is a stop string
@example("ab", [1], ["ab"], 2)  # the stop string is whole with the last token that it must wait for
@example("aab", [3], ["b", "ab"], 0)
@example("€", [1], [], 0)
def test_the_outcome_does_not_depend_on_the_steps(
    text: str, sizes: list[int], stops: list[str], min_tokens: int
) -> None:
    token_ids = [byte + 1 for byte in text.encode()]
    whole = run(cut(token_ids, [len(token_ids)]), tuple(stops), min_tokens)
    pieces = run(cut(token_ids, sizes), tuple(stops), min_tokens)
    assert pieces == whole
    assert len(pieces.token_ids) == len(pieces.logprobs) == len(pieces.text_offsets)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    chunks = cut([byte + 1 for byte in b"abab"], [1])
    assert run(chunks, ("ab",)).text == ""
    assert run(chunks, ("ab",), min_tokens=3).text == "ab"


def test_the_stop_token_is_kept_among_the_tokens_only() -> None:
    delta = run([TokenChunk("r", (98, 34), finish_reason=FinishReason.STOP, stop_token_id=34)])
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("a", (98, 34), FinishReason.STOP)


def test_a_character_left_open_at_the_end_is_replaced() -> None:
    assert run(cut([0xE2 + 1], [1])).text == "\ufffd"


def test_a_thoughts_label_is_no_part_of_it_in_any_pieces() -> None:
    """Gemma opens its thoughts with the name of their channel."""
    for said, thought in (("thought\nso, thoughts", "so, thoughts"), ("though", ""), ("thought so", "thought so")):
        for pieces in ([said], list(said)):
            text = Trimmed("thought\n")
            assert "".join(text.push(piece) for piece in pieces) == thought


def test_drafts_are_shown_until_a_later_token_has_verified_them() -> None:
    shown, verified = Delta(0, "a", draft_ids=(5,), draft_text="x"), Delta(0, "x", token_ids=(5,))
    assert (join_deltas([verified, shown]).draft_ids, join_deltas([verified, shown]).draft_text) == ((5,), "x")
    assert (join_deltas([shown, verified]).draft_ids, join_deltas([shown, verified]).draft_text) == ((), "")
