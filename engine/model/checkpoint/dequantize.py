"""Dequantizes GPTQ, AWQ, FP8 and compressed-tensors weights: exactly in float32, then rounded to the served dtype.

GPTQ: arXiv:2210.17323, as AutoGPTQ and GPTQModel write it. AWQ: arXiv:2306.00978, AutoAWQ's `gemm` layout. FP8:
blocks as in DeepSeek-V3 (arXiv:2412.19437), channels and tensors as in vLLM. Packed integers: compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.model.checkpoint.progress import ReadingReport
from engine.model.checkpoint.scheme import Scheme, WeightFormat
from engine.model.checkpoint.stored_weights import StoredWeight, not_whole, stored_weights
from engine.model.checkpoint.weight_files import TensorHeader, tensor_headers

_WORD_BITS = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight outputs in a word


def read_dequantized(folder: Path, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all weights of the checkpoint in `folder` under their plain names; floating weights get `dtype`.

    Raises:
        ConfigError: a tensor of a quantized weight is missing or has a wrong shape, or an input names an unknown group.
    """
    headers = tensor_headers(folder)
    quantized = stored_weights(scheme, headers, str(folder))
    parts = {name for stored in quantized for name in stored.tensors.values()}
    report = ReadingReport(folder, folder.name, len(headers))

    def read(name: str) -> Tensor:
        tensor = _read(headers[name], name)
        report.read(name)
        return tensor

    weights = {name: _cast(read(name), dtype) for name in headers if name not in parts}
    for stored in quantized:
        tensors = {last: read(name) for last, name in stored.tensors.items()}
        _check_groups(stored, tensors, str(folder))
        weights[f"{stored.module}.weight"] = dequantized(stored, tensors, scheme).to(dtype)
    return weights


def _group_index(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the group of each input, [in]; all are -1 where inputs are in group order."""
    return tensors.get("g_idx", tensors.get("weight_g_idx"))


def _check_groups(stored: StoredWeight, tensors: Mapping[str, Tensor], path: str) -> None:
    groups, num_groups = _group_index(tensors), -(-stored.shape[1] // stored.step[1])
    if groups is None or bool((groups == -1).all()):
        return
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= num_groups:
        raise not_whole(path, f"{stored.module!r} has inputs in groups {low} to {high}, but {num_groups} scales")


def dequantized(stored: StoredWeight, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return a stored weight as [out, in] float32."""
    rows, columns = (torch.arange(size) // step for size, step in zip(stored.shape, stored.step, strict=True))
    groups = _group_index(tensors)
    if groups is not None and bool((groups >= 0).all()):
        columns = groups.long()
    parts = _PARTS[stored.format](tensors, scheme)
    numbers = parts.numbers.float()
    if parts.zeros is not None:
        numbers -= _spread(parts.zeros, rows, columns)
    return numbers.mul_(_spread(parts.scales, rows, columns))


def _spread(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Repeat [], [1], [out] or [row steps, column steps] over its steps -> [out, in] float32."""
    grid: Tensor = values.float().reshape(len(values), -1) if values.ndim else values.float().reshape(1, 1)
    return grid[rows.clamp(max=len(grid) - 1)][:, columns]


@dataclass(frozen=True, slots=True)
class _Parts:
    """Integers [out, in], and the scales and zero points of the row and column steps."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None


def _gptq(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    numbers = _unpack(tensors["qweight"].T, scheme.num_bits)
    zeros = _unpack(tensors["qzeros"], scheme.num_bits) + scheme.zero_offset & (1 << scheme.num_bits) - 1
    return _Parts(numbers, tensors["scales"].T, zeros.T)


def _awq(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    numbers, zeros = (_awq_outputs(tensors[name]) for name in ("qweight", "qzeros"))
    return _Parts(numbers, tensors["scales"].T, zeros)


def _awq_outputs(words: Tensor) -> Tensor:
    """Unpack outputs: [n, out / 8] int32 -> [n, out]."""
    octets: Tensor = _unpack(words, 4).unflatten(1, (-1, 8))
    ordered: Tensor = octets[..., list(_AWQ_PLACES)].flatten(1)
    return ordered.T


def _packed(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    middle = 1 << scheme.num_bits - 1
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _unpack(zeros.T, scheme.num_bits).T - middle
    return _Parts(_unpack(tensors["weight_packed"], scheme.num_bits) - middle, tensors["weight_scale"], zeros)


def _scaled(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scales is not None, "the headers were checked"
    return _Parts(tensors["weight"], scales, tensors.get("weight_zero_point"))


_PARTS = {
    WeightFormat.GPTQ: _gptq,
    WeightFormat.AWQ: _awq,
    WeightFormat.PACKED: _packed,
    WeightFormat.SCALED: _scaled,
}


def _unpack(words: Tensor, num_bits: int) -> Tensor:
    """Unpack [n, m] int32 -> [n, m * 32 / bits] int32, lowest bits first."""
    shifts = torch.arange(0, _WORD_BITS, num_bits, dtype=torch.int32)
    numbers: Tensor = words[..., None] >> shifts & (1 << num_bits) - 1
    return numbers.flatten(-2)


def _read(header: TensorHeader, name: str) -> Tensor:
    with safe_open(header.file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
        return tensor


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
