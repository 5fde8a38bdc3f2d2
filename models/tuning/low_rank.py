"""Low-rank changes of a model's matrices (LoRA, arXiv:2106.09685), which become part of them in the end."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SCALE = 2.0  # alpha over rank


class LowRankLinear(nn.Module):
    """A linear layer W x + scale B A x whose W is frozen; B begins at zero, so that nothing has changed yet."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features, device=linear.weight.device) / rank**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=linear.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = self.linear(x) + _SCALE * F.linear(F.linear(x, self.a), self.b)
        return out

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the plain layer, with the change in its weights."""
        self.linear.weight += _SCALE * self.b @ self.a
        return self.linear


def add_low_rank(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Freeze the model, give each linear layer but the one to the vocabulary a change of this rank; return them."""
    model.requires_grad_(False)
    added: list[nn.Parameter] = []
    for parent, name, linear in _linears(model):
        layer = LowRankLinear(linear, min(rank, *linear.weight.shape))
        setattr(parent, name, layer)
        added += [layer.a, layer.b]
    return added


def merge_low_rank(model: nn.Module) -> None:
    """Put the plain layers back, with the changes in their weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LowRankLinear):
                setattr(parent, name, child.merged())


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    head = model.get_output_embeddings()  # type: ignore[operator]  # of transformers' models
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child is not head
    ]
