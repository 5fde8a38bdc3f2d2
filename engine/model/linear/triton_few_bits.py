"""Products by weights of 4 and 8 bits on a GPU, as they are stored: one Triton kernel reads numbers and scales.

    (x0 .. x127) (q0 .. q127)^T * scale    sums of a group in float32, times its scale; groups are added in order

Rows are not rounded: the result is the product by the weight that numbers and scales define, in float32. A row's bits
do not depend on other rows, as in `triton_product`. Import this module only if Triton is installed.

Many rows are multiplied otherwise where they need not be deterministic: the weight is unpacked, a part at a time, into
the rows' dtype, and cuBLAS multiplies by it. On an H200 the kernel takes 2 to 6 times as long from 128 rows on, and
with bases at any number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.triton_attention import operand
from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.linear.triton_product import TileSize, TritonProduct


class Kind(IntEnum):
    """The form of the numbers in a byte."""

    FLOAT8 = 0  # one of float8_e4m3fn
    INT8 = 1
    INT4 = 2  # two from 0 to 15: of inputs half a step apart, the first one in the low bits


_MOST_INPUTS = 128  # of a step, which has one scale
_FEW_ROWS = 16  # one tile: more rows read the unpacked weight
_PART = 1 << 26  # numbers that are unpacked at once: 128 MB in bfloat16
_UNPACKED = (32, 8)  # outputs of a program that unpacks, and its warps
_LOW = TileSize(16, 32, _MOST_INPUTS, num_warps=4, num_stages=5)
_TALL = TileSize(64, 128, _MOST_INPUTS, num_warps=8, num_stages=3)


@triton.jit
def multiply_few_bits(
    out,  # [M, N]
    x,  # [M, K]
    numbers,  # [N, K] bytes, or [N, K / 2] of INT4
    scales,  # [groups, S]
    zeros,  # [groups, S], exact in OPERAND like number - zero, or None
    bases,  # [groups, S] or None
    bias,  # [N] or None
    num_rows,
    num_inputs,
    num_outputs,
    group_size,
    num_scales,  # S
    row_step,  # outputs that share a scale
    KIND: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides a group
):
    """One program per tile, as in `multiply`: a weight is (number - zero) * scale + base."""
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = tl.program_id(0) % num_row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) // num_row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < num_rows, output < num_outputs
    PER_BYTE: tl.constexpr = 2 if KIND == 2 else 1
    PART: tl.constexpr = BLOCK_K // PER_BYTE  # inputs of one product
    MIDDLE: tl.constexpr = 8 if bases is None else 0
    at = tl.arange(0, PART)
    rows = x + row.to(tl.int64)[:, None] * num_inputs + at[None, :]
    weights = numbers + output.to(tl.int64)[:, None] * (num_inputs // PER_BYTE) + at[None, :]
    scale_row = output // row_step
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Each step multiplies integers within one group, and scales the sum. Of two numbers in a byte the first half of the
    # step's inputs has the low bits, the second half the high ones.
    for first in range(0, num_inputs, BLOCK_K):
        at_scale = first // group_size * num_scales + scale_row
        scale = tl.load(scales + at_scale, mask=is_output, other=0.0).to(tl.float32)
        stored = tl.load(weights + first // PER_BYTE, mask=is_output[:, None], other=0)
        left = tl.load(rows + first, mask=is_row[:, None], other=0.0).to(OPERAND)
        right = _numbers_of(stored, KIND, OPERAND, False, MIDDLE)
        if zeros is not None:
            zero = tl.load(zeros + at_scale, mask=is_output, other=0.0).to(OPERAND)
            right = right - zero[:, None]
        part = tl.dot(left, tl.trans(right), input_precision="ieee")
        if bases is not None:
            # The base is added to every weight, so it multiplies the sum of the inputs.
            ones = tl.full([PART, BLOCK_N], 1.0, OPERAND)
            sums = tl.dot(left, ones, input_precision="ieee")
        if KIND == 2:
            left = tl.load(rows + first + PART, mask=is_row[:, None], other=0.0).to(OPERAND)
            right = _numbers_of(stored, KIND, OPERAND, True, MIDDLE)
            if zeros is not None:
                right = right - zero[:, None]
            part = tl.dot(left, tl.trans(right), part, input_precision="ieee")
            if bases is not None:
                sums = tl.dot(left, ones, sums, input_precision="ieee")
        acc += part * scale[None, :]
        if bases is not None:
            acc += sums * tl.load(bases + at_scale, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    at_out = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(at_out, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _numbers_of(stored, KIND: tl.constexpr, OPERAND: tl.constexpr, IS_HIGH: tl.constexpr, MIDDLE: tl.constexpr):
    """The numbers of bytes, exact in OPERAND; INT4's are less by MIDDLE.

    Bits are put where a larger float has them: all cards do that, and it takes fewer instructions than conversions.
    """
    if KIND == 1:
        numbers = stored.to(OPERAND)
    elif KIND == 2:
        bits = stored.to(tl.int16)
        four = ((bits >> 4) & 15) if IS_HIGH else (bits & 15)
        numbers = (four | 0x4300).to(tl.bfloat16, bitcast=True).to(OPERAND) - (128.0 + MIDDLE)  # bfloat16's 128 + n
    # Float8 in a float whose exponent has a larger bias: 2 to the difference corrects it.
    elif tl.float16 == OPERAND:
        bits = stored.to(tl.int16)
        numbers = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * (2.0**8)
    elif tl.bfloat16 == OPERAND:
        bits = stored.to(tl.int16)
        numbers = (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True) * (2.0**120)
    else:
        bits = stored.to(tl.int32)
        numbers = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * (2.0**120)
    return numbers


@triton.jit
def unpack_few_bits(
    out,  # [N, K]
    numbers,  # as in `multiply_few_bits`, as are the others
    scales,
    zeros,
    bases,
    num_inputs,
    num_outputs,
    first_output,  # of `numbers`, for the first row of `out`
    group_size,
    num_scales,
    row_step,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per `BLOCK_N` outputs and step of `BLOCK_K` inputs: (number - zero) * scale + base."""
    num_steps = num_inputs // BLOCK_K
    row = tl.program_id(0) // num_steps * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(0) % num_steps * BLOCK_K
    is_output, output = row < num_outputs, row + first_output
    PER_BYTE: tl.constexpr = 2 if KIND == 2 else 1
    PART: tl.constexpr = BLOCK_K // PER_BYTE
    MIDDLE: tl.constexpr = 8 if bases is None else 0
    at = tl.arange(0, PART)
    at_scale = first // group_size * num_scales + output // row_step
    scale = tl.load(scales + at_scale, mask=is_output, other=0.0).to(tl.float32)[:, None]
    least = tl.zeros([BLOCK_N], tl.float32)[:, None]
    if zeros is not None:
        least -= tl.load(zeros + at_scale, mask=is_output, other=0.0).to(tl.float32)[:, None]
    base = tl.zeros([BLOCK_N], tl.float32)[:, None]
    if bases is not None:
        base += tl.load(bases + at_scale, mask=is_output, other=0.0).to(tl.float32)[:, None]
    # The low bits of a byte are the first half of the step, the high bits the second.
    stored_at = numbers + output.to(tl.int64)[:, None] * (num_inputs // PER_BYTE) + first // PER_BYTE + at[None, :]
    stored = tl.load(stored_at, mask=is_output[:, None], other=0)
    out_at = out + row.to(tl.int64)[:, None] * num_inputs + first + at[None, :]
    weight = (_numbers_of(stored, KIND, tl.float32, False, MIDDLE) + least) * scale + base
    tl.store(out_at, weight.to(out.dtype.element_ty), mask=is_output[:, None])
    if KIND == 2:
        weight = (_numbers_of(stored, KIND, tl.float32, True, MIDDLE) + least) * scale + base
        tl.store(out_at + PART, weight.to(out.dtype.element_ty), mask=is_output[:, None])


class UnpackedPart:
    """A buffer for a part of a weight in the dtype of rows, which the products of one model use in turn."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def reserve(self, num_numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate now: a recorded pass keeps the address."""
        if self._buffer.numel() < num_numbers:
            self._buffer = torch.empty(num_numbers, dtype=dtype, device=device)

    def view(self, num_outputs: int, num_inputs: int) -> Tensor:
        """Return the first numbers as [out, in]."""
        return self._buffer[: num_outputs * num_inputs].view(num_outputs, num_inputs)


class FewBitsProduct(TritonProduct):
    """`F.linear` by a quantized weight of whole groups."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        unpacked: UnpackedPart | None,
    ) -> None:
        """Pack `weight`, whose groups are multiples of 32, for rows of `dtype`.

        Many rows are multiplied by parts of the weight in the buffer `unpacked`. Without it, a row's bits do not depend
        on other rows.
        """
        self._dtype, self._bias, self._unpacked = dtype, bias, unpacked
        self.is_batch_invariant = is_deterministic = unpacked is None
        self._num_outputs, self.num_inputs = weight.numbers.shape
        self._group_size, self._row_step = weight.group_size, weight.row_step
        self._kind, self._weight, zeros, bases = _packed(weight, num_inputs := _step(weight.group_size))
        self._scales = _short(weight.scales)
        self._zeros, self._bases = (None if each is None else _short(each) for each in (zeros, bases))
        self._low, tall = _LOW.of_inputs(num_inputs), _TALL.of_inputs(num_inputs)
        self._tall = tall if not is_deterministic or self._are_alike(tall) else None
        self._most_rows = 0 if bases is not None else _FEW_ROWS  # of the kernel, if there is a buffer
        self._num_unpacked = min(self._num_outputs, max(1, _PART // self.num_inputs))  # outputs at once
        if unpacked is not None:
            unpacked.reserve(self._num_unpacked * self.num_inputs, dtype, self._weight.device)

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        num_rows = x.numel() // self.num_inputs
        if self._unpacked is None or num_rows <= self._most_rows:
            return super().__call__(x)
        rows = x.reshape(-1, self.num_inputs)
        out = rows.new_empty(num_rows, self._num_outputs)
        for first in range(0, self._num_outputs, self._num_unpacked):
            weight = self._part(first, min(self._num_unpacked, self._num_outputs - first))
            torch.mm(rows, weight.t(), out=out[:, first : first + len(weight)])
        if self._bias is not None:
            out += self._bias
        return out.view(*x.shape[:-1], self._num_outputs)

    def _part(self, first_output: int, num_outputs: int) -> Tensor:
        """Return some outputs of the weight, in the dtype of rows; valid until the next part."""
        assert self._unpacked is not None, "the caller has looked"
        part = self._unpacked.view(num_outputs, self.num_inputs)
        step, (block, num_warps) = self._low.num_inputs, _UNPACKED
        with torch.cuda.device_of(part):
            unpack_few_bits[(triton.cdiv(num_outputs, block) * (self.num_inputs // step),)](
                part,
                self._weight,
                self._scales,
                self._zeros,
                self._bases,
                self.num_inputs,
                num_outputs,
                first_output,
                self._group_size,
                self._scales.shape[1],
                self._row_step,
                KIND=self._kind.value,
                BLOCK_N=block,
                BLOCK_K=step,
                num_warps=num_warps,
            )
        return part

    @property
    def nbytes(self) -> int:
        """The bytes that a pass reads."""
        parts = (self._weight, self._scales, self._zeros, self._bases)
        return sum(part.nbytes for part in parts if part is not None)

    def _multiplied(self, rows: Tensor, tile: TileSize) -> Tensor:
        num_rows = len(rows)
        out = rows.new_empty(num_rows, self._num_outputs)
        grid = (triton.cdiv(num_rows, tile.num_rows) * triton.cdiv(self._num_outputs, tile.num_outputs),)
        with torch.cuda.device_of(rows):
            multiply_few_bits[grid](
                out,
                rows,
                self._weight,
                self._scales,
                self._zeros,
                self._bases,
                self._bias,
                num_rows,
                self.num_inputs,
                self._num_outputs,
                self._group_size,
                self._scales.shape[1],
                self._row_step,
                KIND=self._kind.value,
                OPERAND=operand(rows.dtype),
                BLOCK_M=tile.num_rows,
                BLOCK_N=tile.num_outputs,
                BLOCK_K=tile.num_inputs,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        return out


def _short(values: Tensor) -> Tensor:
    """Transpose values of groups, [rows of scales, groups], in float16 where that keeps them."""
    half = values.half()
    return (half if torch.equal(half.float(), values.float()) else values).t().contiguous()


def _step(group_size: int) -> int:
    # Halves of a step of int4 have at least 16 inputs.
    return next(size for size in (_MOST_INPUTS, 64, 32) if group_size % size == 0)


def _packed(weight: QuantizedWeight, step: int) -> tuple[Kind, Tensor, Tensor | None, Tensor | None]:
    """Return the numbers as bytes, and zeros and bases of the numbers that the kernel makes of them."""
    numbers, zeros, bases = weight.numbers, weight.zeros, weight.bases
    if numbers.dtype is torch.float8_e4m3fn:
        return Kind.FLOAT8, numbers.contiguous().view(torch.uint8), zeros, bases
    least, most = (int(each) for each in numbers.aminmax())
    if bases is None and -8 <= least < 0 and most <= 7:  # less by the middle, as compressed-tensors reads them
        numbers, least, most = numbers + 8, least + 8, most + 8
        zeros = torch.full_like(weight.scales, 8.0) if zeros is None else zeros + 8
    is_int4 = least >= 0 and most <= 15  # an int8 weight with such numbers alone too
    middle = (8 if bases is None else 0) if is_int4 else (128 if most > 127 else 0)
    if middle:
        zeros = weight.scales.new_zeros(weight.scales.shape) - middle if zeros is None else zeros - middle
    zeros = None if zeros is None or not zeros.any() else zeros
    if not is_int4:
        return Kind.INT8, (numbers - middle).to(torch.int8), zeros, bases
    low, high = numbers.to(torch.uint8).unflatten(1, (-1, 2, step // 2)).unbind(2)
    return Kind.INT4, (low | high << 4).flatten(1).contiguous(), zeros, bases
