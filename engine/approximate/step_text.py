"""The boundaries of reasoning and of its steps in a text of tokens."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.config import StepConfig

_MARKER_TOKENS = 16  # a marker is at most so many tokens, or it is not seen where it lies across two passes


@dataclass(frozen=True, slots=True)
class StepCut:
    """The number of tokens in one whole step; `is_ending` where the text goes on to end the reasoning."""

    num_tokens: int
    is_ending: bool = False


class StepText:
    """Reads tokens as text, special tokens included."""

    def __init__(self, tokenizer: Tokenizer, config: StepConfig) -> None:
        self._tokenizer = tokenizer
        self._step_end = config.step_end
        self._think = config.think

    def is_thinking(self, token_ids: Seq[int], num_new: int, was_thinking: bool) -> bool:
        """True if the text is inside the markers after its `num_new` last tokens; the last marker decides."""
        if self._think is None:
            return True
        text = self._text(token_ids[max(0, len(token_ids) - num_new - _MARKER_TOKENS) :])
        begin, end = (text.rfind(marker) for marker in self._think)
        return was_thinking if begin == end else begin > end  # equal where both are absent

    def cut(self, token_ids: Seq[int], num_read: int, stop_token_ids: Collection[int] = ()) -> StepCut | None:
        """Return the step that `token_ids` begin with, None while it is incomplete, as after the first `num_read`.

        Tokens that would end the reasoning, or the whole output, are no part of a step: the target decides on them.
        """
        for number in range(num_read + 1, len(token_ids) + 1):
            if token_ids[number - 1] in stop_token_ids:
                return StepCut(number - 1, is_ending=True)
            text = self._text(token_ids[:number])
            if self._think is not None and self._think[1] in text:
                return StepCut(self._num_before(token_ids, text.index(self._think[1])), is_ending=True)
            if self._step_end in text.lstrip():
                return StepCut(number)
        return None

    def _num_before(self, token_ids: Seq[int], num_characters: int) -> int:
        """Count the tokens whose text lies before a character."""
        fitting = (n for n in range(len(token_ids), 0, -1) if len(self._text(token_ids[:n])) <= num_characters)
        return next(fitting, 0)

    def _text(self, token_ids: Seq[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
