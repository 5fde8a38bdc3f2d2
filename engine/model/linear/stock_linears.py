"""Linear layers of two families that packing would break or miss: LongCat-Flash's routers and JetMoE's experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter

from engine.model.checkpoint.unread_weight import read_weight


class ReadLinear(nn.Linear):
    """A linear layer that is not called: its router reads the weight, so it stays as it is."""


class SplitExperts(nn.Module):
    """Experts over rows in their order, each a linear layer; in place of one parameter of all experts."""

    def __init__(self, weights: Tensor) -> None:
        """`weights` are [experts, out, in], which the layers share."""
        super().__init__()
        self.experts = nn.ModuleList(_linear_of(weight) for weight in weights)

    def forward(self, rows: Tensor, num_rows: list[int]) -> Tensor:
        """Return the results of the first rows by the first expert, and so on; [rows, in] -> [rows, out]."""
        parts = zip(self.experts, rows.split(num_rows), strict=True)
        return torch.cat([expert(part) for expert, part in parts if len(part)])


def plain_linears(model: nn.Module) -> None:
    """Make the layers of such a model ready for packing, in place."""
    for module in list(model.modules()):
        if isinstance(module, LongcatFlashTopkRouter):
            module.classifier.__class__ = ReadLinear
        for name, child in list(module.named_children()):
            if isinstance(child, JetMoeParallelExperts):
                setattr(module, name, SplitExperts(read_weight(child.weight)))


def _linear_of(weight: Tensor) -> nn.Linear:
    num_outputs, num_inputs = weight.shape
    linear = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
