"""The dtype that a model is computed in."""

from __future__ import annotations

import torch

from engine.config import ModelDtype
from protos.errors import ConfigError

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ModelDtype if name is not ModelDtype.AUTO}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto` is bfloat16 on devices with bfloat16 units (CUDA, AVX512-BF16, AMX), else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _has_bfloat16_units() else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _has_bfloat16_units() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
