"""The stateless randomness contract: every random number is a pure function of where it is used.

A number is named by (seed, sample index, position, purpose, lane). Nothing counts steps, so plain decoding,
speculation with any K, preemption, a retry on another replica and a draft in another process all meet the same
numbers. What must be new in every pass is named by the pass: its position is that of the first
token it can commit, its lane the index of the draft. The function is a contract between processes and between versions:
the tests hold golden values, and changing it changes every seeded output.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants of Stafford's variant 13), in wrapping
int64 arithmetic, which is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.indexing import send

Words = NDArray[np.uint64]

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
# The same for arrays of the host.
_GAMMA, _FACTOR_1, _FACTOR_2 = (np.uint64(each % (1 << 64)) for each in (_GOLDEN_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2))
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)

_ELEMENTS_PER_CHUNK = 1 << 15  # on a CPU the temporaries of this many lanes stay in the second-level cache
_MIN_UNIFORM = 2.0**-64  # below the smallest non-zero draw, so that it stands for zero alone
_MAX_UNIFORM = 1.0 - 2.0**-24  # the largest float32 below one


class Purpose(IntEnum):
    """The use of a number; two uses at one position are independent because their purposes differ."""

    TARGET_GUMBEL = 0  # the token of a position, and its coupled draft
    DRAFT = 1  # a draft drawn from a distribution that goes along, by pass; must not know the noise that verifies it
    ACCEPT = 2  # the uniform number that judges one draft; by pass in block verification
    RESIDUAL = 3  # the recovered token


def key_prefixes(seeds: Iterable[int], sample_indices: Iterable[int]) -> Words:
    """Return the part of each key that is the same at all positions of a sequence, [n].

    Seeds are any integers and count modulo 2**64.
    """
    prefixes = np.zeros(1, np.uint64)
    for words in (seeds, sample_indices):
        prefixes = _absorb(prefixes, np.array([word % (1 << 64) for word in words], np.uint64))
    return prefixes


def noise_keys(
    prefixes: Words, positions: NDArray[np.int64], purpose: Purpose, device: torch.device | None = None
) -> Tensor:
    """One key per row, `[R] int64`; a key and a lane name one random number.

    The prefix of a row is that of its sequence. Positions are absolute: the prompt's first token is at position 0.
    The host computes the keys, a number per row, so that a device gets one copy instead of some fifty small kernels.
    """
    keys = _absorb(_absorb(prefixes, positions.astype(np.uint64)), np.uint64(purpose))
    return send(torch.from_numpy(keys.view(np.int64)), device or torch.device("cpu"))


def uniform(keys: Tensor, lanes: Tensor | int = 0) -> Tensor:
    """One lane of every key, uniform on [0, 1) with a grid of 2**-53: `[R] float64`; `lanes` are [R] or one for all."""
    return _logical_shift(_lane_bits(keys, lanes), 11).double() * 2.0**-53


def random_bits(keys: Tensor, num_bits: int, lanes: Tensor | int = 0) -> Tensor:
    """One lane of every key, uniform on the integers [0, 2**num_bits): `[R] int64`; `num_bits` is at most 63."""
    return _logical_shift(_lane_bits(keys, lanes), 64 - num_bits)


def gumbel(keys: Tensor, num_lanes: int) -> Tensor:
    """Standard Gumbel noise for lanes [0, num_lanes) of every key: `[R, num_lanes] float32`, always finite.

    A lane is a token id of the target's vocabulary, so that draft and target, and any shard of either, see the same
    noise for the same token.
    """
    noise = torch.empty(len(keys), num_lanes, dtype=torch.float32, device=keys.device)
    for first, last in _chunks(num_lanes, len(keys), keys.device):
        lanes = torch.arange(first, last, device=keys.device)
        noise[:, first:last] = _gumbel_of(_lane_bits(keys[:, None], lanes))
    return noise


def _gumbel_of(bits: Tensor) -> Tensor:
    """-log(-log(1 - u)): a large Gumbel comes from a small u, where float32 is fine-grained, not from u near one."""
    u = _logical_shift(bits, 1).float().mul_(2.0**-63).clamp_(_MIN_UNIFORM, _MAX_UNIFORM)
    return u.neg_().log1p_().neg_().log_().neg_()


def _lane_bits(keys: Tensor, lanes: Tensor | int) -> Tensor:
    return _mix_(keys + (lanes + 1) * _GOLDEN_GAMMA)


def _mix_(x: Tensor) -> Tensor:
    """Scramble 64-bit words in place: each input bit flips each output bit with probability one half."""
    x ^= _logical_shift(x, 30)
    x *= _MULTIPLIER_1
    x ^= _logical_shift(x, 27)
    x *= _MULTIPLIER_2
    x ^= _logical_shift(x, 31)
    return x


def _logical_shift(x: Tensor, num_bits: int) -> Tensor:
    """Right shift that fills with zeros; int64's own shift repeats the sign."""
    return (x >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _absorb(keys: Words, words: Words | np.uint64) -> Words:
    """Scramble the next word of each key into it, as `_mix_`: the shifts of unsigned words fill with zeros."""
    x = keys + words
    x += _GAMMA
    x ^= x >> _SHIFT_1
    x *= _FACTOR_1
    x ^= x >> _SHIFT_2
    x *= _FACTOR_2
    x ^= x >> _SHIFT_3
    return x


def _chunks(num_lanes: int, num_rows: int, device: torch.device) -> Seq[tuple[int, int]]:
    size = num_lanes if device.type != "cpu" else max(1024, _ELEMENTS_PER_CHUNK // max(1, num_rows))
    return [(first, min(first + size, num_lanes)) for first in range(0, num_lanes, max(1, size))]
