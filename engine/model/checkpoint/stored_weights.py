"""Finds and checks the quantized weights of a checkpoint by their tensors' headers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.model.checkpoint.gguf_header import BLOCKS
from engine.model.checkpoint.scheme import SECTIONS, Scheme, WeightFormat, refusal
from engine.model.checkpoint.weight_files import TensorHeader
from protos.errors import ConfigError

WORD_BITS = 32
NUMBERS_PER_BYTE = 4  # of BitNet
_BYTE_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
# Tensors of each format, after the module's name: first the tensor that identifies the format, then the others.
_NUMBERS = {
    WeightFormat.GPTQ: "qweight",
    WeightFormat.AWQ: "qweight",
    WeightFormat.PACKED: "weight_packed",
    WeightFormat.SCALED: "weight",
    WeightFormat.TERNARY: "weight",
}
_OTHERS = {
    WeightFormat.GPTQ: ("scales", "qzeros", "g_idx"),
    WeightFormat.AWQ: ("scales", "qzeros"),
    WeightFormat.PACKED: ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    WeightFormat.SCALED: ("weight_scale", "weight_scale_inv", "weight_zero_point"),
    WeightFormat.TERNARY: ("weight_scale",),
}
_WORDS = ("qweight", "qzeros", "weight_packed")
_SCALES = ("scales", "weight_scale", "weight_scale_inv")
_BLOCKS = "_blocks"
_BY_PARAMETER = (WeightFormat.MXFP4, WeightFormat.GGUF)
GROUP_INDICES = ("g_idx", "weight_g_idx")
_BY_GROUP = (WeightFormat.GPTQ, WeightFormat.AWQ)  # scales [groups of inputs, out], and always zero points


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight as a checkpoint holds it.

    Attributes:
        module: the layer's name, without the tensor's; the parameter's, where that has another name than "weight".
        shape: [out, in], or as the model has it.
        tensors: names of its tensors by their last part ("qweight", "scales", ...).
        step: rows and columns of the weight that share a scale.
    """

    module: str
    format: WeightFormat
    shape: tuple[int, ...]
    tensors: Mapping[str, str]
    step: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.module if self.format in _BY_PARAMETER else f"{self.module}.weight"

    @property
    def strides(self) -> tuple[int, ...] | None:
        """The strides of its numbers when they are read; None for rows one after the other."""
        if self.format is not WeightFormat.MXFP4:
            return None
        _, num_inputs, num_outputs = self.shape
        return num_inputs * num_outputs, 1, num_inputs


def stored_weights(scheme: Scheme, headers: Mapping[str, TensorHeader], path: str) -> list[StoredWeight]:
    """Return the quantized weights of a checkpoint.

    Raises:
        ConfigError: a tensor is missing, or its dtype or shape does not match the others.
    """
    found = []
    for name in headers:
        if WeightFormat.MXFP4 in scheme.formats and name.endswith(_BLOCKS):
            found.append(_mxfp4(name.removesuffix(_BLOCKS), headers, path))
        module, _, last = name.rpartition(".")
        if WeightFormat.GGUF in scheme.formats and last in BLOCKS:
            found.append(_gguf(module, last, headers[name], path))
        for kind in scheme.formats:
            if last == _NUMBERS.get(kind) and _is_quantized(module, headers[name], kind, scheme):
                found.append(_Module(module, kind, scheme, headers, path).stored())
    if not found and not scheme.may_be_dense:
        wanted = " or ".join(f"'.{_NUMBERS.get(kind, _BLOCKS)}'" for kind in scheme.formats)
        raise refusal(path, f"config.json names {scheme.method}, but no tensor name ends in {wanted}")
    _refuse_orphans(scheme, headers, found, path)
    return found


def _is_quantized(module: str, header: TensorHeader, kind: WeightFormat, scheme: Scheme) -> bool:
    """True if a tensor with the name of a format's numbers has such."""
    if kind is WeightFormat.SCALED:
        return header.dtype in _BYTE_DTYPES
    if kind is not WeightFormat.TERNARY or header.dtype == "U8":
        return True
    kept = scheme.kept_modules
    return kept is not None and len(header.shape) == 2 and not any(f".{name}." in f".{module}." for name in kept)


def refuse_unscaled(config: Mapping[str, object], headers: Mapping[str, TensorHeader], path: str) -> None:
    """Raise ConfigError for a low-bit weight without a quantization_config: its scales would be ignored."""
    if any(config.get(key) for key in SECTIONS):
        return
    for name, header in headers.items():
        if header.dtype.startswith(("F8", "F4")) or (header.dtype in ("I8", "U8") and name.endswith(".weight")):
            raise refusal(path, f"{name!r} is {header.dtype}, but config.json has no quantization_config")


def _refuse_orphans(scheme: Scheme, headers: Mapping[str, TensorHeader], found: list[StoredWeight], path: str) -> None:
    """Raise ConfigError for scales without their weight."""
    used = {name for stored in found for name in stored.tensors.values()}
    lasts = {last for kind in scheme.formats for last in _OTHERS.get(kind, ())}
    for name in headers:
        module, _, last = name.rpartition(".")
        if last in lasts and name not in used:
            numbers = " or ".join(repr(f"{module}.{_NUMBERS[kind]}") for kind in scheme.formats)
            raise not_whole(path, f"it has {name!r}, but no quantized {numbers}")


def _mxfp4(parameter: str, headers: Mapping[str, TensorHeader], path: str) -> StoredWeight:
    """Return the weights of all experts, [expert, in, out] as in transformers."""
    names = {"blocks": f"{parameter}{_BLOCKS}", "scales": f"{parameter}_scales"}
    kind = WeightFormat.MXFP4
    if names["scales"] not in headers:
        raise not_whole(path, f"{parameter!r} is {kind}, but its 'scales' is missing")
    blocks, scales = (headers[name] for name in names.values())
    expected = (*blocks.shape[:3], 16)
    if len(blocks.shape) != 4 or blocks.shape != expected or scales.shape != blocks.shape[:3]:
        shapes = f"{list(blocks.shape)} and {list(scales.shape)}"
        raise not_whole(path, f"{parameter!r} is {kind}, but its blocks and scales are {shapes}")
    if (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise not_whole(path, f"{parameter!r} is {kind}, but its blocks are {blocks.dtype}, its scales {scales.dtype}")
    num_experts, num_outputs, num_groups = scales.shape
    return StoredWeight(parameter, kind, (num_experts, num_groups * 32, num_outputs), names, (1, 32, 1))


def _gguf(parameter: str, kind: str, header: TensorHeader, path: str) -> StoredWeight:
    """Return a tensor of a GGUF file: the bytes of each row are blocks."""
    size, num_bytes = BLOCKS[kind]
    if header.dtype != "U8" or not header.shape or header.shape[-1] % num_bytes:
        raise not_whole(path, f"{parameter!r} is {kind}, but has {header.dtype} {list(header.shape)}")
    shape = (*header.shape[:-1], header.shape[-1] // num_bytes * size)
    return StoredWeight(parameter, WeightFormat.GGUF, shape, {kind: f"{parameter}.{kind}"}, (1, size))


class _Module:
    """One module's tensors."""

    def __init__(
        self, module: str, kind: WeightFormat, scheme: Scheme, headers: Mapping[str, TensorHeader], path: str
    ) -> None:
        self._module, self._kind, self._scheme, self._path = module, kind, scheme, path
        names = {last: f"{module}.{last}" for last in (_NUMBERS[kind], *_OTHERS[kind])}
        self._names = {last: name for last, name in names.items() if name in headers}
        self._shapes = {last: headers[name].shape for last, name in self._names.items()}
        self._dtypes = {last: headers[name].dtype for last, name in self._names.items()}

    def stored(self) -> StoredWeight:
        self._check_dtypes()
        rows, columns = self._matrix(_NUMBERS[self._kind])
        if self._kind is WeightFormat.TERNARY and self._dtypes["weight"] != "U8":
            return StoredWeight(self._module, self._kind, (rows, columns), self._names, (rows, columns))
        kind, scales = self._kind, self._shape_of("scales" if self._kind in _BY_GROUP else self._scale_name())
        per_word = WORD_BITS // self._scheme.num_bits
        match kind:
            case WeightFormat.GPTQ:
                shape = (columns, rows * per_word)
            case WeightFormat.AWQ:
                shape = (columns * per_word, rows)
            case WeightFormat.PACKED:
                shape = (rows, columns * per_word)
            case WeightFormat.SCALED:
                shape = (rows, columns)
            case WeightFormat.TERNARY:
                shape = (rows * NUMBERS_PER_BYTE, columns)
        step = self._step(scales[::-1] if kind in _BY_GROUP else scales, shape)
        self._check_others(shape, step, per_word)
        if kind is WeightFormat.SCALED and "weight_zero_point" in self._shapes:
            self._expect("weight_zero_point", scales)
        return StoredWeight(self._module, kind, shape, self._names, step)

    def _step(self, scales: tuple[int, ...], shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share a scale, by the scales' shape: [], [1], [out], or [rows, columns]."""
        if math.prod(scales) == 1:
            return shape
        block = self._scheme.block
        if block is not None and scales == tuple(-(-size // each) for size, each in zip(shape, block, strict=True)):
            return block
        num_columns = scales[1] if len(scales) == 2 else 1
        if len(scales) in (1, 2) and scales[0] == shape[0] and num_columns:
            size = self._scheme.group_size
            if size is not None and num_columns == -(-shape[1] // size):
                return 1, size
            if shape[1] % num_columns == 0:
                return 1, shape[1] // num_columns
        raise self._refusal(f"its scales are {list(scales)}, which does not fit a weight of {list(shape)}")

    def _check_others(self, shape: tuple[int, int], step: tuple[int, int], per_word: int) -> None:
        """Check the zero points and the group index."""
        num_groups = -(-shape[1] // step[1])
        if self._kind in _BY_GROUP:
            self._expect("qzeros", (num_groups, shape[0] // per_word))
        elif self._kind is WeightFormat.PACKED and "weight_zero_point" in self._shapes:
            self._expect("weight_zero_point", (-(-shape[0] // per_word), num_groups))
        for name in GROUP_INDICES:
            is_needed = self._scheme.has_group_index and num_groups > 1 and name in _OTHERS[self._kind]
            if is_needed or name in self._shapes:
                self._expect(name, (shape[1],))

    def _check_dtypes(self) -> None:
        for last, dtype in self._dtypes.items():
            if last in _WORDS and dtype != "I32":
                raise self._refusal(f"its {last!r} is {dtype}; it must be I32")
            if last in GROUP_INDICES and dtype not in ("I32", "I64"):
                raise self._refusal(f"its {last!r} is {dtype}; it must be I32 or I64")
            if last in _SCALES and not dtype.startswith(("F", "BF")):
                raise self._refusal(f"its {last!r} is {dtype}; it must be floating")

    def _scale_name(self) -> str:
        return "weight_scale_inv" if "weight_scale_inv" in self._shapes else "weight_scale"

    def _matrix(self, last: str) -> tuple[int, int]:
        shape = self._shape_of(last)
        if len(shape) != 2:
            raise self._refusal(f"its {last!r} is {list(shape)}; it must be a matrix")
        return shape[0], shape[1]

    def _shape_of(self, last: str) -> tuple[int, ...]:
        if last not in self._shapes:
            raise self._refusal(f"its {last!r} is missing")
        return self._shapes[last]

    def _expect(self, last: str, shape: tuple[int, ...]) -> None:
        if self._shape_of(last) != shape:
            raise self._refusal(f"its {last!r} is {list(self._shapes[last])}; it must be {list(shape)}")

    def _refusal(self, reason: str) -> ConfigError:
        return not_whole(self._path, f"{self._module!r} is {self._kind}, but {reason}")


def not_whole(path: str, reason: str) -> ConfigError:
    """Return an error that names the checkpoint and the contradiction in its tensors."""
    return ConfigError(f"the quantized weights of {path!r} are incomplete: {reason}; fetch the checkpoint again")
