"""Re-encodes the target's committed tokens in the draft's tokens as they grow."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from engine.proposer.vocab_mapping.byte_vocabulary import ByteVocabulary
from engine.sequence.request_tokens import num_equal

_SPACES = b" \n\t\r"


class TextReader:
    """Translates one growing sequence of the target's tokens; `token_ids` has the draft's tokens.

        target    | the | tok | eni |            the | tok | eni | zer |
        draft     | the | token | i |            the | tokenizer |          the last tokens change with what follows
                  '- settled -''-- tail --'

    The last tokens of a text are provisional, since later tokens may belong to the same word. So the end of the text,
    the tail, is encoded again at every commit. Tokens before it are settled and never change, even if the whole text
    would be encoded differently: any spelling is a valid context for a draft. The bytes of an incomplete character are
    held back.
    """

    def __init__(
        self, target: ByteVocabulary, draft: ByteVocabulary, special_ids: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.token_ids: list[int] = []
        self._target = target
        self._draft = draft
        self._special_ids = special_ids
        self._num_translated = 0
        self._num_settled = 0
        self._tail = ""
        self._decoder = _new_decoder()

    @property
    def held(self) -> bytes:
        """The first bytes of an incomplete character."""
        return self._decoder.getstate()[0]

    def extend(self, target_ids: Seq[int]) -> int:
        """Translate the tokens of `target_ids` that were added since the last call.

        Returns how many of the first `token_ids` have not changed.
        """
        num_settled = self._num_settled
        known = self.token_ids[num_settled:]
        for token_id in target_ids[self._num_translated :]:
            if token_id in self._special_ids:
                self._end_text(self._special_ids[token_id])
            else:
                self._tail += self._decoder.decode(self._target.bytes_of(token_id))
        self._num_translated = len(target_ids)
        self._encode_tail()
        self._settle()
        return num_settled + num_equal(known, self.token_ids[num_settled:])

    def _end_text(self, special_ids: Seq[int]) -> None:
        """End the text before a control token, even within a character, and append the control token."""
        self._tail += self._decoder.decode(b"", final=True)
        self._decoder = _new_decoder()
        self._encode_tail()
        self.token_ids += special_ids
        self._num_settled = len(self.token_ids)
        self._tail = ""

    def _encode_tail(self) -> None:
        self.token_ids[self._num_settled :] = self._draft.encode(self._tail) if self._tail else []

    def _settle(self) -> None:
        """Settle all but the last words of a tail that has grown long."""
        data = self._tail.encode()
        if len(data) <= 256:  # so much text is encoded again every time
            return
        tail_ids = self.token_ids[self._num_settled :]
        if self._draft.spell(tail_ids) != data:  # the tokenizer changes texts, so the end of a token is unknown
            self._num_settled, self._tail = len(self.token_ids), ""
            return
        # Settle up to the last border between words, or between tokens, that leaves a tail of 64 bytes.
        borders = [
            (num_tokens, end)
            for num_tokens, end in enumerate(self._draft.ends(tail_ids), start=1)
            if end <= len(data) - 64 and data[end] & 0xC0 != 0x80
        ]
        between_words = [border for border in borders if data[border[1]] in _SPACES]
        if borders:
            num_tokens, end = (between_words or borders)[-1]
            self._num_settled += num_tokens
            self._tail = data[end:].decode()


def _new_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")(errors="replace")
