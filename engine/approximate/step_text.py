"""Finds the boundaries of reasoning and of its steps in text."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.config import StepConfig

_MARKER_TOKENS = 16  # longest marker that is found when two passes each commit a part of it


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The number of tokens in a complete step; `is_ending` if the reasoning ends right after it."""

    num_tokens: int
    is_ending: bool = False


class StepText:
    """Searches decoded tokens, special tokens included."""

    def __init__(self, tokenizer: Tokenizer, config: StepConfig) -> None:
        self._tokenizer = tokenizer
        self._step_end = config.step_end
        self._think = config.think

    def is_thinking(self, token_ids: Seq[int], num_new: int, was_thinking: bool) -> bool:
        """True if the text ends between the markers; the last marker in its `num_new` last tokens decides."""
        if self._think is None:
            return True
        text = self._text(token_ids[max(0, len(token_ids) - num_new - _MARKER_TOKENS) :])
        begin, end = (text.rfind(marker) for marker in self._think)
        return was_thinking if begin == end else begin > end  # equal if both are absent

    def find_end(self, token_ids: Seq[int], num_searched: int, stop_token_ids: Collection[int] = ()) -> StepEnd | None:
        """Return the end of the step that `token_ids` begin with; None if the step is incomplete.

        The first `num_searched` tokens have no end. Tokens that end the reasoning or the output do not belong to a
        step: the target decides about them.
        """
        for number in range(num_searched + 1, len(token_ids) + 1):
            if token_ids[number - 1] in stop_token_ids:
                return StepEnd(number - 1, is_ending=True)
            text = self._text(token_ids[:number])
            if self._think is not None and self._think[1] in text:
                return StepEnd(self._num_before(token_ids, text.index(self._think[1])), is_ending=True)
            if self._step_end in text.lstrip():
                return StepEnd(number)
        return None

    def _num_before(self, token_ids: Seq[int], num_characters: int) -> int:
        """Count the tokens whose text ends before a character."""
        fitting = (n for n in range(len(token_ids), 0, -1) if len(self._text(token_ids[:n])) <= num_characters)
        return next(fitting, 0)

    def _text(self, token_ids: Seq[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
