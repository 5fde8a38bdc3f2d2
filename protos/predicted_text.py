"""The position of a growing text in a text that its client predicted.

The engine drafts from it and the ingress counts by it, so both use one definition of "in the prediction".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

_MIN_MATCH = 2  # last tokens of the text that must occur in the prediction, to continue there after a divergence
_MAX_MATCH = 16  # last tokens that are compared to choose among such positions
_MAX_CANDIDATES = 128  # positions that are compared on either side of the divergence: a token may repeat all along


class PredictedText:
    """Follows a text token by token; `num_matched` counts the tokens that occurred in the prediction, in its order.

    While the text is what was predicted, `position` is the prediction's next token. After a token that is not, it is
    None until the text's last tokens, two or more, occur in the prediction again: at the position that most of them
    match, and of equal ones at the first behind the divergence, since edits keep the order of what they leave. Of very
    many such positions the first behind the divergence and the first of all are compared.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.position: int | None = 0
        self.num_matched = 0
        self._token_ids = token_ids
        self._diverged_at = 0
        self._tail: list[int] = []  # the last tokens of the text
        self._num_diverged = 0  # of them, those that are not counted as matched
        self._positions: dict[tuple[int, int], list[int]] = {}  # two tokens -> positions behind them
        for end in range(_MIN_MATCH, len(token_ids) + 1):
            self._positions.setdefault((token_ids[end - 2], token_ids[end - 1]), []).append(end)

    def read(self, token_ids: Iterable[int]) -> None:
        """Take in the next tokens of the text."""
        for token_id in token_ids:
            self._tail = [*self._tail[1 - _MAX_MATCH :], token_id]
            if self._is_next(token_id):
                assert self.position is not None
                self.position += 1
                self._count(1)
                self._num_diverged = 0
            else:
                self._diverge()

    def next(self, max_tokens: int) -> tuple[int, ...]:
        """Return the prediction's next tokens, up to `max_tokens`; none while the text diverges from it."""
        return () if self.position is None else tuple(self._token_ids[self.position : self.position + max_tokens])

    def _is_next(self, token_id: int) -> bool:
        at = self.position
        return at is not None and at < len(self._token_ids) and self._token_ids[at] == token_id

    def _diverge(self) -> None:
        if self.position is not None:
            self._diverged_at = self.position
        self._num_diverged = min(self._num_diverged + 1, _MAX_MATCH)
        positions = self._positions.get((self._tail[-2], self._tail[-1]), ()) if len(self._tail) > 1 else ()
        self.position = min(self._candidates(positions), key=self._mismatch, default=None)
        if self.position is not None:
            self._count(min(self._num_diverged, self._match_len(self.position)))
            self._num_diverged = 0

    def _candidates(self, positions: Sequence[int]) -> Sequence[int]:
        if len(positions) <= 2 * _MAX_CANDIDATES:
            return positions
        behind = bisect_left(positions, self._diverged_at)
        return [*positions[: min(behind, _MAX_CANDIDATES)], *positions[behind : behind + _MAX_CANDIDATES]]

    def _mismatch(self, position: int) -> tuple[int, bool, int]:
        return -self._match_len(position), position < self._diverged_at, position

    def _match_len(self, position: int) -> int:
        length = 0
        while (
            length < min(position, len(self._tail))
            and self._token_ids[position - 1 - length] == self._tail[-1 - length]
        ):
            length += 1
        return length

    def _count(self, num_tokens: int) -> None:
        self.num_matched = min(self.num_matched + num_tokens, len(self._token_ids))
