"""The position of a growing text in a text that its client predicted.

The engine drafts from it and the ingress counts by it, so both share one definition of "in the prediction".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

_MAX_MATCH = 16  # last tokens that are compared to rank positions
_BACKWARD = np.arange(_MAX_MATCH - 1, -1, -1)


class Prediction:
    """A predicted text, with its positions sorted by the two tokens before them.

    Immutable, and much slower to build than to query, so all choices of a request share one.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        ids = np.asarray(self.token_ids, np.int64)
        self._padded = np.concatenate([np.full(_MAX_MATCH, -1), ids])  # -1: before the prediction's first token
        pairs = (ids[:-1] << 32) | ids[1:]
        order = np.argsort(pairs, kind="stable")  # equal pairs keep the order of the text
        self._pairs: list[int] = pairs[order].tolist()
        self._positions: list[int] = (order + 2).tolist()

    def __len__(self) -> int:
        return len(self.token_ids)

    def best_position(self, tail: Sequence[int], diverged_at: int) -> tuple[int, int] | None:
        """Return the position matched by most of the text's last tokens, and their number; None below two.

        Among equal matches it is the first from `diverged_at` on, or else the first.
        """
        if len(tail) < 2 or not (candidates := self._candidates(tail, diverged_at)):
            return None
        matches = self._match_lens(candidates, tail)
        num_matched = int(matches.max())
        best = [each for each, length in zip(candidates, matches.tolist(), strict=True) if length == num_matched]
        first_after = bisect_left(best, diverged_at)
        return best[first_after % len(best)], num_matched

    def _candidates(self, tail: Sequence[int], diverged_at: int) -> list[int]:
        """Return the positions after the text's last two tokens; of too many, those around the divergence."""
        pair = (tail[-2] << 32) | tail[-1]
        begin = bisect_left(self._pairs, pair)
        positions = self._positions[begin : bisect_right(self._pairs, pair, begin)]
        most = 128  # on either side of the divergence: one token may be repeated throughout
        if len(positions) <= 2 * most:
            return positions
        first_after = bisect_left(positions, diverged_at)
        return positions[: min(first_after, most)] + positions[first_after : first_after + most]

    def _match_lens(self, positions: Sequence[int], tail: Sequence[int]) -> np.ndarray:  # [positions] int64
        last = np.full(_MAX_MATCH, -2)  # -2: before the text's first token
        last[: len(tail)] = tail[::-1]
        before = self._padded[np.asarray(positions)[:, None] + _BACKWARD]  # [positions, _MAX_MATCH], the nearest first
        matches: np.ndarray = (before == last).cumprod(axis=1).sum(axis=1)
        return matches


class PredictedText:
    """Follows a text token by token; `num_matched` counts the tokens found in the prediction, in its order.

    While the text follows the prediction, `position` is the prediction's next token. After a differing token it is None
    until the text's last two or more tokens occur in the prediction again. The text then continues at the position that
    most of them match; among equal matches, the first after the divergence, since edits keep the order of the rest. If
    there are very many such positions, the first after the divergence and the first of all are compared.
    """

    def __init__(self, prediction: Prediction) -> None:
        self.position: int | None = 0
        self.num_matched = 0
        self._prediction = prediction
        self._diverged_at = 0
        self._tail: list[int] = []  # the last tokens of the text
        self._num_diverged = 0  # how many of them are not counted as matched

    def read(self, token_ids: Iterable[int]) -> None:
        """Follow the next tokens of the text."""
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
        """Return the prediction's next tokens, up to `max_tokens`; empty while the text diverges."""
        token_ids = self._prediction.token_ids
        return () if self.position is None else token_ids[self.position : self.position + max_tokens]

    def _is_next(self, token_id: int) -> bool:
        at, token_ids = self.position, self._prediction.token_ids
        return at is not None and at < len(token_ids) and token_ids[at] == token_id

    def _diverge(self) -> None:
        if self.position is not None:
            self._diverged_at = self.position
        self._num_diverged = min(self._num_diverged + 1, _MAX_MATCH)
        best = self._prediction.best_position(self._tail, self._diverged_at)
        self.position = None
        if best is not None:
            self.position, num_matched = best
            self._count(min(self._num_diverged, num_matched))
            self._num_diverged = 0

    def _count(self, num_tokens: int) -> None:
        self.num_matched = min(self.num_matched + num_tokens, len(self._prediction))
