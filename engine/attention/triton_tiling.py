"""Sizes of the kernel's tiles and splits: read from the head sizes, the pass and the device, never tried out.

Trying them out at run time would wait for the device, and would let two replicas choose differently.
"""

from __future__ import annotations

from dataclasses import dataclass

_STEP_BYTES = 1 << 15  # of keys and values read at a time; three such steps fit into shared memory
_STAGES = {16: 5, 32: 5, 64: 3}  # steps read ahead, by rows; a stage also holds the block table's entries
_MIN_SPLIT_TOKENS = 256  # a shorter read saves less than its merge costs
PROGRAMS_PER_PROCESSOR = 3  # as many as the shared memory of a Hopper processor has room for
BATCH_INVARIANT_SPLIT_TOKENS = 1024  # of every split where the other rows of a pass must not matter


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The head sizes of one layer."""

    num_kv_heads: int
    group_size: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """BLOCK_M packed rows by BLOCK_N keys at a time.

    `num_warps` and `num_stages` are the compiler's: warps that share a tile, and steps that are read ahead.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiling(num_rows: int, heads: HeadShape, itemsize: int, *, is_batch_invariant: bool = False) -> Tiling:
    """The tiling for spans of up to `num_rows` tokens whose queries take `itemsize` bytes per element.

    `is_batch_invariant`: the height of one row, since instructions of other heights may add in another order.
    """
    width = power_of_two(max(heads.key_dim, heads.value_dim))
    packed_rows = 1 if is_batch_invariant else power_of_two(num_rows * heads.group_size)
    if itemsize > 2:  # float32 goes without matrix units, which would round it, and lives in registers
        return Tiling(16, 16, 4, 2) if packed_rows <= 16 else Tiling(32, 16, 8, 2)
    # Larger tiles of queries would leave too few registers for the sums.
    most_rows = min(128, (1 << 15) // (width * itemsize))
    block_m = max(16, min(packed_rows, most_rows))  # a matrix unit takes 16 rows
    block_n = max(16, min(128, _STEP_BYTES // (2 * width * itemsize)))
    num_warps = 8 if block_m == 128 else 4
    return Tiling(block_m, block_n, num_warps, _STAGES.get(block_m, 2))


def choose_split(num_keys: int, num_kv_heads: int, num_processors: int) -> int:
    """Keys per split, when all tiles of one kv head read `num_keys` in all: each processor gets a few programs.

    A power of two, so that a growing context changes it, and with it the order of sums, seldom.
    """
    share = num_keys * num_kv_heads // (PROGRAMS_PER_PROCESSOR * num_processors)
    return max(_MIN_SPLIT_TOKENS, power_of_two(share))


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
