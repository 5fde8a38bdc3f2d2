"""Where a growing text stands in a text that its client predicted.

The engine drafts from it and the ingress counts by it, so both must agree on what "in the prediction" means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MIN_MATCH = 2  # tokens of the text that must stand in the prediction, to go on there after a divergence
_MAX_MATCH = 16  # tokens that can tell two such places apart


class PredictedText:
    """Follows a text token by token; `num_matched` counts the tokens that stood in the prediction, in its order.

    While the text is what was predicted, `position` is the prediction's next token. After a token that is not, it is
    None until the text's last tokens, two or more, stand in the prediction again: at the place that most of them fit,
    and of equals at the first one behind where the text was lost, since edits leave the order of what they keep.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.position: int | None = 0
        self.num_matched = 0
        self._token_ids = token_ids
        self._lost_at = 0
        self._tail: list[int] = []  # the last tokens of the text
        self._num_strayed = 0  # of them, those that have not been counted as matched
        self._places: dict[tuple[int, int], list[int]] = {}  # two tokens -> positions behind them
        for end in range(_MIN_MATCH, len(token_ids) + 1):
            self._places.setdefault((token_ids[end - 2], token_ids[end - 1]), []).append(end)

    def read(self, token_ids: Iterable[int]) -> None:
        """Take in the text's next tokens."""
        for token_id in token_ids:
            self._tail = [*self._tail[1 - _MAX_MATCH :], token_id]
            if self._is_next(token_id):
                assert self.position is not None
                self.position += 1
                self._count(1)
                self._num_strayed = 0
            else:
                self._stray()

    def next(self, max_tokens: int) -> tuple[int, ...]:
        """What the prediction says comes next, up to `max_tokens`; nothing while the text is elsewhere."""
        return () if self.position is None else tuple(self._token_ids[self.position : self.position + max_tokens])

    def _is_next(self, token_id: int) -> bool:
        at = self.position
        return at is not None and at < len(self._token_ids) and self._token_ids[at] == token_id

    def _stray(self) -> None:
        if self.position is not None:
            self._lost_at = self.position
        self._num_strayed = min(self._num_strayed + 1, _MAX_MATCH)
        places = self._places.get((self._tail[-2], self._tail[-1]), ()) if len(self._tail) > 1 else ()
        self.position = min(places, key=self._unlikeliness, default=None)
        if self.position is not None:
            self._count(min(self._num_strayed, self._match_len(self.position)))
            self._num_strayed = 0

    def _unlikeliness(self, place: int) -> tuple[int, bool, int]:
        return -self._match_len(place), place < self._lost_at, place

    def _match_len(self, place: int) -> int:
        length = 0
        while length < min(place, len(self._tail)) and self._token_ids[place - 1 - length] == self._tail[-1 - length]:
            length += 1
        return length

    def _count(self, num_tokens: int) -> None:
        self.num_matched = min(self.num_matched + num_tokens, len(self._token_ids))
