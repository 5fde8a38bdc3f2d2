"""Compares a packed product with the plain one when the weight is packed: a wrong kernel or layout stops the start."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.linear.weight_parts import converted
from protos.errors import ConfigError

# Of models and products against the stock ones of the same weights; seen: 1e-6, 1e-3, 1e-2.
MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
MAX_ROUNDING_ERROR = 0.5  # of products whose weights are rounded; seen: 0.1. Exchanged weights differ by 1.4
_NUM_ROWS = 2


def probe_rows(num_inputs: int) -> Tensor:
    """Return the rows that products are compared on, [2, in] float32."""
    return torch.randn(_NUM_ROWS, num_inputs, generator=torch.Generator().manual_seed(0))


def check_product(product: Tensor, expected: Tensor, max_error: float) -> None:
    """Raise ConfigError if a product differs from the expected one by more than `max_error` of its norm."""
    product, expected = product.float(), expected.float()
    size = float(expected.norm())
    error = float((product - expected).norm()) / size if size else float(product.norm())
    if not error <= max_error:
        raise ConfigError(
            f"a packed weight of {expected.shape[-1]} outputs gives products that differ from the plain ones by "
            f"{error:.1%} on this processor; set quantization to 'none', and report this"
        )


@torch.inference_mode()
def compare_product(
    function: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, is_exact: bool
) -> None:
    """Compare a function of rows of `dtype` with the product by `weight` [out, in] and `bias` [out].

    `is_exact` is for a function that does not round the weight.

    Raises:
        ConfigError: they differ by more than roundings.
    """
    rows = probe_rows(weight.shape[1]).to(weight.device, dtype)
    product = torch.cat(list(converted(lambda part: F.linear(rows, part.to(dtype)), weight)), dim=-1)
    expected = product if bias is None else product + bias.to(dtype)
    check_product(function(rows), expected, MAX_RELATIVE_ERROR[dtype] if is_exact else MAX_ROUNDING_ERROR)
