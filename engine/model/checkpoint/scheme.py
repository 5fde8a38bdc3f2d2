"""The `quantization_config` of a checkpoint: the format of its weights, or a refusal with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from protos.errors import ConfigError

_SERVED = "GPTQ (4 or 8 bits), AWQ (gemm), FP8, MXFP4, BitNet and compressed-tensors (packed integers, int8, float8)"
SECTIONS = ("quantization_config", "compression_config")  # of config.json
_COMPRESSED_FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


class WeightFormat(StrEnum):
    """The storage of a linear layer's weight, by its tensors.

    GPTQ: `qweight` packed along the inputs, `qzeros`, `scales`. AWQ: the same names, packed along the outputs.
    PACKED: `weight_packed` along the inputs, `weight_scale`. TERNARY: `weight` of two bits packed along the outputs and
    `weight_scale`, or one in floats that is rounded. SCALED: `weight` in float8 or int8 and `weight_scale` or
    `weight_scale_inv`. Checkpoints of compressed-tensors use both PACKED and SCALED. MXFP4: experts in `_blocks` and
    `_scales`, whose names follow the parameter's. GGUF: blocks as the file has them, in a tensor named by the
    parameter and the type of its blocks.
    """

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "packed"
    SCALED = "scaled"
    TERNARY = "ternary"
    MXFP4 = "mxfp4"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The facts about quantized weights that only a checkpoint's configuration has.

    Attributes:
        method: `quant_method`, for messages.
        formats: formats that may occur.
        num_bits: bits of a packed integer.
        zero_offset: added to a stored zero point; 1 in GPTQ's first format.
        block: rows and columns that share a scale, if scales are per block.
        group_size: inputs that share a scale, if scales are per group; the last group may be smaller.
        has_group_index: inputs are not in group order, so a tensor names the group of each.
        may_be_dense: the checkpoint may have no quantized weight.
        divides: a weight is its number divided by the scale.
        kept_modules: the last parts of the names of layers whose weights in floats are not rounded; None for all.
    """

    method: str
    formats: tuple[WeightFormat, ...]
    num_bits: int = 4
    zero_offset: int = 0
    block: tuple[int, int] | None = None
    group_size: int | None = None
    has_group_index: bool = False
    may_be_dense: bool = False
    divides: bool = False
    kept_modules: tuple[str, ...] | None = None


def scheme_of(config: Mapping[str, Any], path: str) -> Scheme | None:
    """Return the scheme of the checkpoint at `path`; None if its weights are plain or read by transformers.

    Raises:
        ConfigError: the format is not supported.
    """
    section = next((config[key] for key in SECTIONS if config.get(key) is not None), None)
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise refusal(path, f"quantization_config is {section!r}; it must be a mapping")
    method = section.get("quant_method", "compressed-tensors" if "config_groups" in section else None)
    if not isinstance(method, str) or method not in _READERS:
        raise refusal(path, f"quant_method is {method!r}")
    try:
        return _READERS[method](section, path)
    except (AttributeError, TypeError, ValueError) as error:
        raise refusal(path, f"quantization_config is not in {method}'s form: {error}") from error


def refusal(path: str, reason: str) -> ConfigError:
    """Return an error that names the checkpoint, the reason, and the supported formats."""
    return ConfigError(
        f"the quantized weights of {path!r} are not supported: {reason}; supported are {_SERVED}. Give a checkpoint in "
        "one of these or in bfloat16, and target.quantization to quantize it on load"
    )


def _gptq(section: Mapping[str, Any], path: str) -> Scheme:
    _require(path, section, "bits", (4, 8))
    version = section.get("checkpoint_format", section.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2") or section.get("is_marlin_format"):
        raise refusal(path, f"the GPTQ format is {version!r}; it must be 'gptq' or 'gptq_v2'")
    if section.get("dynamic"):
        raise refusal(path, "GPTQ uses other bits for some modules ('dynamic')")
    return Scheme(
        "gptq",
        (WeightFormat.GPTQ,),
        int(section["bits"]),
        zero_offset=int(version == "gptq"),
        group_size=_group_size(section),
        has_group_index=bool(section.get("desc_act")),
    )


def _awq(section: Mapping[str, Any], path: str) -> Scheme:
    _require(path, section, "bits" if "bits" in section else "w_bit", (4,))
    version = str(section.get("version", section.get("format", "gemm"))).lower()
    if version != "gemm":
        raise refusal(path, f"the AWQ version is {version!r}; it must be 'gemm'")
    return Scheme("awq", (WeightFormat.AWQ,), group_size=_group_size(section))


def _fp8(section: Mapping[str, Any], path: str) -> Scheme:
    block = section.get("weight_block_size")
    return Scheme(section["quant_method"], (WeightFormat.SCALED,), block=None if block is None else _pair(block))


def _mxfp4(section: Mapping[str, Any], path: str) -> Scheme:
    return Scheme("mxfp4", (WeightFormat.MXFP4,))


def _bitnet(section: Mapping[str, Any], path: str) -> Scheme:
    layer, mode = section.get("linear_class", "bitlinear"), section.get("quantization_mode", "offline")
    if layer not in ("bitlinear", "autobitlinear") or mode not in ("online", "offline"):
        raise refusal(path, f"its layers are {layer!r}, {mode!r}")
    if section.get("use_rms_norm"):
        raise refusal(path, "its layers norm their rows ('use_rms_norm')")
    is_rounded = (layer, mode) == ("autobitlinear", "online")
    named = section.get("modules_to_not_convert")
    kept = ("embed_tokens", *(("lm_head",) if named is None else named)) if is_rounded else None
    return Scheme("bitnet", (WeightFormat.TERNARY,), num_bits=2, divides=layer == "bitlinear", kept_modules=kept)


def _gguf(section: Mapping[str, Any], path: str) -> Scheme:
    return Scheme("gguf", (WeightFormat.GGUF,), may_be_dense=True)


def _compressed(section: Mapping[str, Any], path: str) -> Scheme:
    groups = (section.get("config_groups") or {}).values()
    # Refuse formats, sparsity and rotations that the weights cannot be computed from.
    formats = {section.get("format", "dense"), *(group.get("format") or "dense" for group in groups)}
    if unknown := sorted(formats - {*_COMPRESSED_FORMATS, "mixed-precision"}):
        raise refusal(path, f"the compressed-tensors format is {unknown[0]!r}")
    if (section.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise refusal(path, "its weights are sparse ('sparsity_config')")
    if (section.get("transform_config") or {}).get("config_groups"):
        raise refusal(path, "its weights are rotated ('transform_config')")
    # All groups must share a bit width and a block shape.
    weights = [group.get("weights") or {} for group in groups]
    blocks = {_pair(each["block_structure"]) for each in weights if each.get("block_structure")}
    widths = {int(each.get("num_bits", 8)) for each in weights if each.get("type", "int") == "int"}
    if len(blocks) > 1 or len(widths) > 1 or not widths <= {4, 8}:
        raise refusal(path, f"its groups differ: {sorted(widths)} bits, blocks {sorted(blocks)}")
    sizes = {_group_size(each) for each in weights}
    return Scheme(
        "compressed-tensors",
        (WeightFormat.PACKED, WeightFormat.SCALED),
        num_bits=next(iter(widths), 8),
        block=next(iter(blocks), None),
        group_size=next(iter(sizes)) if len(sizes) == 1 else None,
        has_group_index=any(each.get("actorder") in (True, "group") for each in weights),
        may_be_dense=formats == {"dense"},
    )


_READERS = {
    **{"gptq": _gptq, "awq": _awq, "fp8": _fp8, "fbgemm_fp8": _fp8},
    **{"mxfp4": _mxfp4, "gguf": _gguf, "bitnet": _bitnet, "compressed-tensors": _compressed},
}


def _require(path: str, section: Mapping[str, Any], key: str, allowed: tuple[int, ...]) -> None:
    if section.get(key) not in allowed:
        wanted = " or ".join(str(value) for value in allowed)
        raise refusal(path, f"{key} is {section.get(key)!r}; it must be {wanted}")


def _group_size(section: Mapping[str, Any]) -> int | None:
    """Return the number of inputs that share a scale; None if it is absent or -1 (all inputs)."""
    size = section.get("group_size", section.get("q_group_size"))
    return None if size is None or int(size) <= 0 else int(size)


def _pair(block: Any) -> tuple[int, int]:
    """Return a block's rows and columns, written as a list or as "128x128"."""
    rows, columns = (int(size) for size in (block.lower().split("x") if isinstance(block, str) else block))
    if min(rows, columns) <= 0:
        raise ValueError(f"a block of {rows} rows and {columns} columns")
    return rows, columns
