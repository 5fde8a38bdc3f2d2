"""Refuses NaN and infinite weights, which a diverged training leaves."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.model.checkpoint.node_memory import drop_pages
from engine.model.checkpoint.weight_files import tensor_headers
from protos.errors import ConfigError

_FLOATS = ("BF16", "F16", "F32", "F64")  # includes the scales of quantized weights


def refuse_not_finite(folder: Path) -> None:
    """Raise ConfigError if a weight in `folder` is NaN or infinite; reads one tensor at a time.

    Raises:
        ConfigError: a value is not finite, or a file is missing, cut short or not safetensors.
    """
    headers = tensor_headers(folder)
    if not headers:
        raise ConfigError(f"model folder {str(folder)!r} has no weights in safetensors; fetch or convert them")
    floats = [(header.file, name) for name, header in sorted(headers.items()) if header.dtype in _FLOATS]
    for file, entries in groupby(sorted(floats), key=lambda entry: entry[0]):
        with safe_open(file, framework="pt") as tensors:
            for _, name in entries:
                refuse_not_finite_tensor(tensors.get_tensor(name), name, str(file))


def refuse_not_finite_model(path: str, model: nn.Module) -> None:
    """Raise ConfigError if a weight of `model`, loaded from `path`, is NaN or infinite.

    Weights without numbers of their own (`engine.model.linear.stored_experts`) are checked when they are read.
    """
    for name, weight in model.named_parameters():
        has_numbers = 0 < weight.nbytes <= weight.untyped_storage().nbytes()
        if has_numbers and weight.is_floating_point():
            refuse_not_finite_tensor(weight, name, path)
            drop_pages([weight])


def refuse_not_finite_tensor(tensor: Tensor, name: str, source: str) -> None:
    """Raise ConfigError if a number of `name` in `source` is NaN or infinite."""
    low, high = torch.aminmax(tensor)  # NaN where a value is NaN; allocates no boolean tensor of the same size
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        num_wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        raise ConfigError(
            f"{num_wrong} of {tensor.numel()} values of {name!r} in {source!r} are NaN or infinite: the checkpoint is "
            "damaged, or its training diverged; fetch or export it again"
        )
