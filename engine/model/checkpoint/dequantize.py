"""Dequantizes GPTQ, AWQ, FP8, MXFP4, GGUF and compressed-tensors weights one by one, exactly in float32.

GPTQ: arXiv:2210.17323, as AutoGPTQ and GPTQModel write it. AWQ: arXiv:2306.00978, AutoAWQ's `gemm` layout. FP8:
blocks as in DeepSeek-V3 (arXiv:2412.19437), channels and tensors as in vLLM. Packed integers: compressed-tensors.
MXFP4: gpt-oss' experts, in the blocks of the OCP Microscaling standard. BitNet: arXiv:2402.17764, as transformers packs
it; rows are not rounded. GGUF: the library `gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from engine.model.checkpoint.gguf_header import BLOCKS
from engine.model.checkpoint.scheme import Scheme, WeightFormat
from engine.model.checkpoint.stored_weights import (
    GROUP_INDICES,
    NUMBERS_PER_BYTE,
    WORD_BITS,
    StoredWeight,
    not_whole,
    stored_weights,
)
from engine.model.checkpoint.unread_weight import QuantizedWeight, UnreadWeight
from engine.model.checkpoint.weight_files import TensorHeader, tensor_headers

_PART_ROWS = 256
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each of eight outputs in a word
_FP4 = (*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))


def unread_weights(folder: Path, scheme: Scheme | None) -> dict[str, Tensor]:
    """Return all weights of the checkpoint in `folder` under their plain names; its floats are not read yet.

    Raises:
        ConfigError: a tensor of a quantized weight is missing or has a wrong shape, or an input names an unknown group.
    """
    headers, path = tensor_headers(folder), str(folder)
    quantized = [] if scheme is None else stored_weights(scheme, headers, path)
    parts = {name for stored in quantized for name in stored.tensors.values()}
    weights = {name: _unread(header, name, path) for name, header in headers.items() if name not in parts}
    for stored in quantized:
        assert scheme is not None, "a quantized weight has a scheme"
        files = {last: (headers[name], name) for last, name in stored.tensors.items()}
        groups = _group_index({last: _read(*file) for last, file in files.items() if last in GROUP_INDICES})
        _check_groups(stored, groups, path)
        read = partial(_read_dequantized, stored, files, scheme)
        as_stored = partial(_read_stored, stored, files, scheme) if _fits_kernels(stored, headers, groups) else None
        weights[stored.name] = UnreadWeight(
            read, stored.shape, torch.float32, (stored.name, path), stored.strides, stored=as_stored
        )
    return weights


def _unread(header: TensorHeader, name: str, path: str) -> Tensor:
    if (dtype := FLOATS.get(header.dtype)) is None:
        return _read(header, name)
    return UnreadWeight(partial(_read, header, name), header.shape, dtype, (name, path))


def _read_dequantized(stored: StoredWeight, files: Mapping[str, tuple[TensorHeader, str]], scheme: Scheme) -> Tensor:
    return dequantized(stored, {last: _read(*file) for last, file in files.items()}, scheme)


def _fits_kernels(stored: StoredWeight, headers: Mapping[str, TensorHeader], groups: Tensor | None) -> bool:
    """True if kernels can read the stored numbers: groups of inputs are in order, each of a multiple of 32 inputs."""
    group_size = 1 if stored.format not in _PARTS else min(stored.step[1], stored.shape[1])
    if group_size % 32 or _columns(stored, {} if groups is None else {"g_idx": groups}) is not None:
        return False
    return stored.format is not WeightFormat.SCALED or headers[stored.tensors["weight"]].dtype in ("F8_E4M3", "I8")


def _read_stored(
    stored: StoredWeight, files: Mapping[str, tuple[TensorHeader, str]], scheme: Scheme
) -> QuantizedWeight:
    numbers, scales, zeros = _PARTS[stored.format]({last: _read(*file) for last, file in files.items()}, scheme)
    scales = _grid(scales)
    zeros = None if zeros is None else _grid(zeros)[: len(scales)].float()  # packed ones fill whole words
    return QuantizedWeight(numbers, scales, zeros=zeros, row_step=stored.step[0])


def _group_index(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the group of each input, [in]; all are -1 where inputs are in group order."""
    return tensors.get("g_idx", tensors.get("weight_g_idx"))


def _check_groups(stored: StoredWeight, groups: Tensor | None, path: str) -> None:
    if groups is None or bool((groups == -1).all()):
        return
    num_groups = -(-stored.shape[1] // stored.step[1])
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= num_groups:
        raise not_whole(path, f"{stored.module!r} has inputs in groups {low} to {high}, but {num_groups} scales")


def dequantized(stored: StoredWeight, tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    """Return a stored weight as float32, [out, in] or as the model has it."""
    if stored.format is WeightFormat.MXFP4:
        return _mxfp4(tensors["blocks"], tensors["scales"])
    if stored.format is WeightFormat.GGUF:
        ((kind, blocks),) = tensors.items()
        return gguf_numbers(blocks.numpy(), kind)
    integers, scales, zeros = _PARTS[stored.format](tensors, scheme)
    rows, columns = torch.arange(stored.shape[0]) // stored.step[0], _columns(stored, tensors)
    numbers = torch.empty(stored.shape)
    for first in range(0, stored.shape[0], _PART_ROWS):  # so that copies are small
        part = slice(first, first + _PART_ROWS)
        numbers[part] = integers[part]
        groups = numbers[part].unflatten(1, (-1, stored.step[1] if columns is None else 1))
        if zeros is not None:
            groups -= _spread(zeros, rows[part], columns)
        groups *= _spread(scales, rows[part], columns)
    return numbers


def _columns(stored: StoredWeight, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the group of each input, [in]; None where whole groups follow each other."""
    groups, (_, step) = _group_index(tensors), stored.step
    if groups is not None and bool((groups >= 0).all()):
        is_in_order = len(groups) % step == 0 and torch.equal(groups.long(), torch.arange(len(groups)) // step)
        return None if is_in_order else groups.long()
    return None if stored.shape[1] % step == 0 else torch.arange(stored.shape[1]) // step


def gguf_numbers(blocks: Any, kind: str) -> Tensor:
    """Return the numbers of an array of blocks of a type, as float32."""
    from gguf import GGMLQuantizationType, dequantize, quants  # most checkpoints need no part of it

    if kind not in BLOCKS:
        return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[kind]))
    size, num_bytes = BLOCKS[kind]
    rows = blocks.reshape(-1, blocks.shape[-1])
    numbers = torch.empty(len(rows), rows.shape[1] // num_bytes * size)
    for first in range(0, len(rows), _PART_ROWS):  # `dequantize` holds all numbers twice
        part = slice(first, first + _PART_ROWS)
        numbers[part] = torch.from_numpy(getattr(quants, kind).dequantize_rows(rows[part]))
    return numbers.view(*blocks.shape[:-1], -1)


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return experts [expert, in, out].

    `blocks` [expert, out, in / 32, 16] have two numbers a byte, `scales` a power of two for each 32 numbers.
    """
    num_experts, num_outputs, num_groups = scales.shape
    numbers = torch.empty(num_experts, num_outputs, num_groups * 32)
    table = torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)])
    for expert, levels, exponents in zip(numbers, blocks, scales, strict=True):
        factors = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
        groups = F.embedding(levels.int(), table).flatten(-2)  # [out, group, 32]
        expert.copy_(groups.mul_(factors[..., None]).flatten(1))
    return numbers.transpose(1, 2)


def _spread(values: Tensor, rows: Tensor, columns: Tensor | None) -> Tensor:
    """Return the value of each of `rows`, and of each group in `columns`: [rows, groups, 1] float32.

    `values` are [], [1], [out] or [row steps, column steps].
    """
    grid = _grid(values).float()
    spread = grid[rows.clamp(max=len(grid) - 1)]
    return (spread if columns is None else spread[:, columns])[..., None]


def _grid(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1) if values.ndim else values.reshape(1, 1)


# Integers [out, in], and the scales and zero points of the row and column steps.
_Parts = tuple[Tensor, Tensor, Tensor | None]


def _gptq(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    numbers = _unpack(tensors["qweight"], scheme.num_bits).T
    zeros = _unpack(tensors["qzeros"].T, scheme.num_bits) + scheme.zero_offset & (1 << scheme.num_bits) - 1
    return numbers, tensors["scales"].T, zeros


def _awq(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    numbers, zeros = (_unpack(tensors[name].T, 4, _AWQ_PLACES) for name in ("qweight", "qzeros"))
    return numbers, tensors["scales"].T, zeros


def _packed(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    middle = 1 << scheme.num_bits - 1
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _unpack(zeros, scheme.num_bits) - middle
    numbers = _unpack(tensors["weight_packed"].T, scheme.num_bits).T
    return numbers.sub_(middle), tensors["weight_scale"], zeros


def _scaled(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scales is not None, "the headers were checked"
    return tensors["weight"], scales, tensors.get("weight_zero_point")


def _ternary(tensors: Mapping[str, Tensor], scheme: Scheme) -> _Parts:
    weight, scale = tensors["weight"], tensors.get("weight_scale")
    if scale is None:  # a trained weight, which BitNet's layers round at each use
        factor = 1 / weight.float().abs().mean().clamp(min=1e-5)
        return (weight.float() * factor).round().clamp(-1, 1).to(torch.int8), 1 / factor, None
    numbers = torch.cat([weight >> 2 * place & 3 for place in range(NUMBERS_PER_BYTE)]).to(torch.int8) - 1
    return numbers, 1 / scale.float() if scheme.divides else scale, None


_PARTS = {
    WeightFormat.GPTQ: _gptq,
    WeightFormat.AWQ: _awq,
    WeightFormat.PACKED: _packed,
    WeightFormat.SCALED: _scaled,
    WeightFormat.TERNARY: _ternary,
}


def _unpack(words: Tensor, num_bits: int, places: Seq[int] | None = None) -> Tensor:
    """Unpack [n, m] int32 -> [n * 32 / bits, m] int16, lowest bits first, or by the places of numbers in a word."""
    numbers = torch.empty(words.shape[0], WORD_BITS // num_bits, words.shape[1], dtype=torch.int16)
    for number, place in enumerate(places or range(WORD_BITS // num_bits)):
        numbers[:, number] = words >> place * num_bits & (1 << num_bits) - 1
    return numbers.flatten(0, 1)


def _read(header: TensorHeader, name: str) -> Tensor:
    with safe_open(header.file, framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
        return tensor
