"""Medusa heads in training (arXiv:2401.10774).

Head k reads the normed last hidden state of position p and predicts token p + 2 + k. All heads share the target's own
linear layer to the vocabulary, so a head is its residual blocks alone.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

NUM_HEADS = 4
NUM_BLOCKS = 2


class TrainableMedusaHeads(nn.Module):
    """`num_heads` stacks of residual blocks x + silu(W x + b), initialised as the identity."""

    def __init__(self, hidden_size: int, num_heads: int = NUM_HEADS, num_blocks: int = NUM_BLOCKS) -> None:
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
