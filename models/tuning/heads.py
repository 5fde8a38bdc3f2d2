"""EAGLE-3 and Medusa heads in training, over the target's hidden states of logged texts.

The log has token ids and no hidden states, so the target computes each batch again, without its output layer: the log
has its likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.draft_heads.eagle3_student import Eagle3Student
from models.draft_heads.medusa_heads import TrainableMedusaHeads
from models.tuning.log_windows import Window
from models.tuning.student import Student


class Reader:
    """A frozen target that computes hidden states for its heads: any model of transformers."""

    def __init__(self, target: Any) -> None:
        self._trunk = target.base_model
        self.embedding: Tensor = target.get_input_embeddings().weight
        self.lm_head: Tensor = target.get_output_embeddings().weight
        self.vocab_size = len(self.lm_head)

    @torch.no_grad()
    def inputs_of(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        """Ids [B, T] to the inputs of layers, side by side, [B, T, layers * hidden] float32."""
        found = self._trunk(ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[layer] for layer in layers], dim=-1).float()

    @torch.no_grad()
    def last_states(self, ids: Tensor) -> Tensor:
        """Map ids [B, T] to the states after the final norm, [B, T, hidden] float32."""
        states: Tensor = self._trunk(ids, use_cache=False).last_hidden_state
        return states.float()

    @torch.no_grad()
    def embedded(self, ids: Tensor) -> Tensor:
        """Ids [B, T] to their embeddings [B, T, hidden] float32."""
        return F.embedding(ids, self.embedding).float()


class _Heads(Student):
    """The base of both kinds: the place in the states of a batch where the round of a row and of a draft began."""

    def __init__(self, model: nn.Module, reader: Reader, **limits: int) -> None:
        super().__init__(model, are_drafts_alike=False, **limits)
        self._reader = reader

    def _texts(self, windows: Sequence[Window], num_more: int = 0) -> Tensor:
        """Return the windows' tokens [B, longest + num_more], padded with zeros: attention is causal."""
        longest = max(len(window.token_ids) for window in windows)
        ids = torch.zeros(len(windows), longest + num_more, dtype=torch.long)
        for index, window in enumerate(windows):
            ids[index, : len(window.token_ids)] = window.token_ids
        return ids.to(self._reader.embedding.device)

    @staticmethod
    def _at_begin(states: Tensor, windows: Sequence[Window], draft: int) -> Tensor:
        """Select the states [N, ...] of [B, T, ...] that draft number `draft` predicts from, for each row.

        They are 1 + `draft` places before the row, or at the first place of a text.
        """
        owners = torch.cat([torch.full_like(window.rows, index) for index, window in enumerate(windows)])
        places = torch.cat([(window.rows - 1 - draft).clamp(min=0) for window in windows])
        return states[owners.to(states.device), places.to(states.device)]


class Eagle3Heads(_Heads):
    """An EAGLE-3 head, unrolled over the drafts of a round; `target_ids` are its vocabulary, None for all."""

    def __init__(
        self, student: Eagle3Student, reader: Reader, layers: Sequence[int], target_ids: Tensor | None
    ) -> None:
        super().__init__(student, reader)
        self._student, self._layers, self._target_ids = student, layers, target_ids
        self._draft_ids = torch.arange(reader.vocab_size)
        if target_ids is not None:
            self._draft_ids = torch.full_like(self._draft_ids, -1)
            self._draft_ids[target_ids] = torch.arange(len(target_ids))

    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield the drafts in order; each continues the head's own states of its predecessor."""
        ids = self._texts(windows, num_drafts - 1)
        features, embedded = self._reader.inputs_of(ids, self._layers), self._reader.embedded(ids)
        for draft, states in enumerate(self._student.steps(features, embedded, num_drafts)):
            yield F.linear(self._at_begin(states, windows, draft), self._student.lm_head.weight)

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        return self._draft_ids[target_ids.long()]

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]

    def vocabulary(self) -> Sequence[Tensor]:
        return [self._student.lm_head.weight]


class Medusa(_Heads):
    """Medusa heads that share the target's layer to the vocabulary."""

    def __init__(self, heads: TrainableMedusaHeads, reader: Reader) -> None:
        super().__init__(heads, reader, max_drafts=heads.num_heads)
        self._heads = heads

    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield head by head; all read the same state."""
        hidden, lm_head = self._reader.last_states(self._texts(windows)), self._reader.lm_head
        for draft, blocks in enumerate(self._heads.blocks[:num_drafts]):
            states = blocks(self._at_begin(hidden, windows, draft))
            yield F.linear(states.to(lm_head.dtype), lm_head)

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        return target_ids.long()

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def vocabulary(self) -> Sequence[Tensor]:
        return []
