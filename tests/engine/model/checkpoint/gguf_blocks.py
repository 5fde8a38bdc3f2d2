"""The blocks of GGUF by their definition in ggml-quants.c, number by number: slow, and independent of any library."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np

Numbers = Iterator[float]


def _halves(data: bytes, *offsets: int) -> list[float]:
    return [struct.unpack_from("<e", data, offset)[0] for offset in offsets]


def _q4_0(data: bytes) -> Numbers:
    (d,) = _halves(data, 0)
    yield from ((byte & 15) * d - 8 * d for byte in data[2:])
    yield from ((byte >> 4) * d - 8 * d for byte in data[2:])


def _q4_1(data: bytes) -> Numbers:
    d, m = _halves(data, 0, 2)
    yield from ((byte & 15) * d + m for byte in data[4:])
    yield from ((byte >> 4) * d + m for byte in data[4:])


def _fifth_bits(data: bytes, offset: int) -> list[int]:
    (bits,) = struct.unpack_from("<I", data, offset)
    return [(bits >> place & 1) << 4 for place in range(32)]


def _q5(data: bytes, offset: int) -> list[int]:
    low = [byte & 15 for byte in data[offset + 4 :]] + [byte >> 4 for byte in data[offset + 4 :]]
    return [number | bit for number, bit in zip(low, _fifth_bits(data, offset), strict=True)]


def _q5_0(data: bytes) -> Numbers:
    (d,) = _halves(data, 0)
    yield from ((number - 16) * d for number in _q5(data, 2))


def _q5_1(data: bytes) -> Numbers:
    d, m = _halves(data, 0, 2)
    yield from (number * d + m for number in _q5(data, 4))


def _q8_0(data: bytes) -> Numbers:
    (d,) = _halves(data, 0)
    yield from (number * d for number in struct.unpack_from("<32b", data, 2))


def _q2_k(data: bytes) -> Numbers:
    scales, qs, (d, least) = data[:16], data[16:80], _halves(data, 80, 82)
    for index in range(256):
        part, shift, place = index // 128, index % 128 // 32 * 2, index % 32
        scale = scales[index // 16]
        yield d * (scale & 15) * (qs[part * 32 + place] >> shift & 3) - least * (scale >> 4)


def _q3_k(data: bytes) -> Numbers:
    high, qs, scales, (d,) = data[:32], data[32:96], data[96:108], _halves(data, 108)
    for index in range(256):
        part, step, place, j = index // 128, index % 128 // 32, index % 32, index // 16
        scale = (scales[j % 8] >> 4 * (j // 8) & 15 | (scales[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32
        number = (qs[part * 32 + place] >> 2 * step & 3) - (0 if high[place] >> (part * 4 + step) & 1 else 4)
        yield d * scale * number


def _k_scale(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return scales[j + 4] & 15 | scales[j - 4] >> 6 << 4, scales[j + 4] >> 4 | scales[j] >> 6 << 4


def _q4_k(data: bytes) -> Numbers:
    (d, least), scales, qs = _halves(data, 0, 2), data[4:16], data[16:]
    for index in range(256):
        j, place = index // 32, index % 32
        scale, minimum = _k_scale(scales, j)
        yield d * scale * (qs[j // 2 * 32 + place] >> 4 * (j % 2) & 15) - least * minimum


def _q5_k(data: bytes) -> Numbers:
    (d, least), scales, high, qs = _halves(data, 0, 2), data[4:16], data[16:48], data[48:]
    for index in range(256):
        j, place = index // 32, index % 32
        scale, minimum = _k_scale(scales, j)
        number = (qs[j // 2 * 32 + place] >> 4 * (j % 2) & 15) | (high[place] >> j & 1) << 4
        yield d * scale * number - least * minimum


def _q6_k(data: bytes) -> Numbers:
    low, high, scales, (d,) = data[:128], data[128:192], struct.unpack_from("<16b", data, 192), _halves(data, 208)
    for index in range(256):
        part, step, place = index // 128, index % 128 // 32, index % 32
        nibble = low[part * 64 + step % 2 * 32 + place] >> 4 * (step // 2) & 15
        number = (nibble | (high[part * 32 + place] >> 2 * step & 3) << 4) - 32
        yield d * scales[index // 16] * number


def _bf16(data: bytes) -> Numbers:
    yield struct.unpack("<f", b"\0\0" + data)[0]


# Name of the type: its number, numbers and bytes of a block, offsets of its float16 scales, and its numbers.
BLOCKS: dict[str, tuple[int, int, int, tuple[int, ...], Callable[[bytes], Numbers]]] = {
    "F16": (1, 1, 2, (0,), lambda data: iter(_halves(data, 0))),
    "Q4_0": (2, 32, 18, (0,), _q4_0),
    "Q4_1": (3, 32, 20, (0, 2), _q4_1),
    "Q5_0": (6, 32, 22, (0,), _q5_0),
    "Q5_1": (7, 32, 24, (0, 2), _q5_1),
    "Q8_0": (8, 32, 34, (0,), _q8_0),
    "Q2_K": (10, 256, 84, (80, 82), _q2_k),
    "Q3_K": (11, 256, 110, (108,), _q3_k),
    "Q4_K": (12, 256, 144, (0, 2), _q4_k),
    "Q5_K": (13, 256, 176, (0, 2), _q5_k),
    "Q6_K": (14, 256, 210, (208,), _q6_k),
    "BF16": (30, 1, 2, (), _bf16),
}


def random_blocks(kind: str, rows: int, columns: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes [rows, bytes of a row] of a random matrix of a type, and its numbers [rows, columns] float32."""
    _, size, num_bytes, scales, read = BLOCKS[kind]
    blocks = random.integers(0, 256, (rows * columns // size, num_bytes), dtype=np.uint8)
    for offset in scales:
        values = random.uniform(0.001, 0.02, len(blocks)).astype("<f2")
        blocks[:, offset : offset + 2] = values.view(np.uint8).reshape(-1, 2)
    if kind == "BF16":
        numbers = random.normal(0, 0.1, len(blocks)).astype("<f4")
        blocks = numbers.view(np.uint8).reshape(-1, 4)[:, 2:].copy()
    numbers = np.array([number for block in blocks for number in read(block.tobytes())], dtype=np.float32)
    return blocks.reshape(rows, -1), numbers.reshape(rows, columns)
