"""A draft in training: a language model, or heads on the target's states.

Medusa heads in training (arXiv:2401.10774).

Head k reads the normed last hidden state of position p and predicts token p + 2 + k. All heads share the target's own
linear layer to the vocabulary, so a head is its residual blocks alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tuning.log_windows import Window, read_batch


class TrainableMedusaHeads(nn.Module):
    """`num_heads` stacks of residual blocks x + silu(W x + b), initialised as the identity."""

    def __init__(self, hidden_size: int, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_blocks = num_heads, num_blocks
        self.blocks = nn.ModuleList(_Blocks(hidden_size, num_blocks) for _ in range(num_heads))

    def forward(self, hidden: Tensor) -> Iterator[Tensor]:
        """States [..., hidden] of each head in turn, for the target's linear layer."""
        return (blocks(hidden) for blocks in self.blocks)


class _Blocks(nn.Module):
    def __init__(self, hidden_size: int, num_blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_blocks))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class Student(ABC):
    """A draft in float32; D is the number of tokens that it can draft.

    Attributes:
        model: its weights, all trained.
        are_drafts_alike: true if a draft depends only on the text before it, and not on the start of its round.
        max_drafts: the largest number of drafts of a round.
    """

    def __init__(self, model: nn.Module, *, are_drafts_alike: bool, max_drafts: int = 1 << 16) -> None:
        self.model = model
        self.are_drafts_alike = are_drafts_alike
        self.max_drafts = max_drafts

    def num_unlike(self, num_drafts: int) -> int:
        """Return the number of different drafts of a round of `num_drafts`."""
        return 1 if self.are_drafts_alike else min(num_drafts, self.max_drafts)

    @abstractmethod
    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield the logits of the first, the second ... draft of a round, each for the tokens after all windows' rows.

        Row n of draft j, [N, D], belongs to the round that began j tokens before the token after row n.
        """

    @abstractmethod
    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Return the draft's int64 ids of tokens of the target, -1 for those that it cannot draft."""

    @abstractmethod
    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of tokens of the draft."""

    @abstractmethod
    def vocabulary(self) -> Sequence[Tensor]:
        """Return the weights with a row for each token."""


class LanguageModel(Student):
    """A draft model whose tokens are the target's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, are_drafts_alike=True)
        known: Any = model
        self._vocabulary = [known.get_input_embeddings().weight, known.get_output_embeddings().weight]

    def logits(self, windows: Sequence[Window], num_drafts: int) -> Iterator[Tensor]:
        """Yield one draft, the same for all rounds."""
        yield read_batch(self.model, windows)

    def draft_ids(self, target_ids: Tensor) -> Tensor:
        """Return the ids, with padding ids of the target that the draft lacks replaced by the draft's last."""
        return target_ids.long().clamp(max=len(self._vocabulary[1]) - 1)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the ids unchanged."""
        return draft_ids

    def vocabulary(self) -> Sequence[Tensor]:
        """Return the input and output embeddings."""
        return self._vocabulary
