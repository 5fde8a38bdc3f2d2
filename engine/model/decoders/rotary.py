"""Rotary position embeddings from a table: cosines and sines are computed once, by a model's own rotary module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.forward_batch import ForwardBatch

_FIRST_POSITIONS = 2048
Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # from [..., D] like the heads and positions [1, T]


class RotaryTable:
    """Cosines and sines of all positions that have been asked for, and some more.

    Never longer than `max_positions`: past it some rotary scalings change the early positions too.
    """

    def __init__(
        self,
        embedding: Rotary,
        like: Tensor,
        max_positions: int | None = None,
        is_whole: bool = False,
        in_pairs: bool = False,
    ) -> None:
        """`embedding` computes as a rotary module of transformers; the table has dtype and device of `like`.

        `in_pairs`: neighbors turn together, not the halves of a head. A table that grows is computed again, and some
        rotary scalings then change the early positions too: one that `is_whole` has all of `max_positions` from the
        first.
        """
        self._embedding = embedding
        self._like = like
        self._max_positions = max_positions
        self._in_pairs = in_pairs
        self._table = self._rows((is_whole and max_positions) or _FIRST_POSITIONS)

    @property
    def num_dims(self) -> int:
        """Numbers of a head that are rotated."""
        return self._table.shape[-1]

    def at(self, batch: ForwardBatch) -> Tensor:
        """Cosines and sines of the pass's rows, [T, 2, R], for `rotate`."""
        if batch.num_positions > self._table.shape[0]:
            self._table = self._rows(2 * batch.num_positions)
        return self._table.index_select(0, batch.position_ids)

    def _rows(self, num_positions: int) -> Tensor:
        """[positions, 2, R], the first half of the sines negated, or the first of each two."""
        num_positions = min(num_positions, self._max_positions or num_positions)
        positions = torch.arange(num_positions, device=self._like.device)[None]
        cos, sin = self._embedding(self._like, positions)  # [1, positions, R]
        half = sin.shape[-1] // 2
        if self._in_pairs:
            if torch.equal(sin[..., :half], sin[..., half:]):  # each half has each angle once
                cos, sin = (each[..., :half].repeat_interleave(2, dim=-1) for each in (cos, sin))
            sin = sin * sin.new_tensor((-1.0, 1.0)).repeat(half)
        else:
            sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        return torch.stack((cos[0], sin[0]), dim=1).to(self._like.dtype)  # some families give float32


def rotate(x: Tensor, table: Tensor, *, in_pairs: bool = False) -> Tensor:
    """Rotary position embedding of the first R numbers of each head of x [T, heads, D] by rows of the table [T, 2, R].

    The halves of a head change places, or each two neighbors; the sign of the sines makes up for it.
    """
    if (num_dims := table.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :num_dims], table, in_pairs=in_pairs), x[..., num_dims:]), dim=-1)
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if in_pairs else x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * table[:, :1], swapped, table[:, 1:])
