"""The stateless randomness contract: every random number is a pure function of its place of use.

The key of a number is (seed, sample index, position, purpose, lane). No step counter is part of it, so plain decoding,
speculation with any K, preemption, a retry on another replica and a draft in another process use the same numbers.
Numbers that must differ between passes are keyed by pass: the position is the first that the pass can commit, the lane
is the index of the draft. The function is a contract between processes and versions. The tests pin golden values, since
a change changes every seeded output.

The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants of Stafford's variant 13), in wrapping
int64 arithmetic, which is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.indexing import send

Words = NDArray[np.uint64]

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)
# The same constants for numpy arrays.
_GAMMA, _FACTOR_1, _FACTOR_2 = (np.uint64(each % (1 << 64)) for each in (_GOLDEN_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2))
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


class Purpose(IntEnum):
    """The use of a number. Different purposes make numbers at one position independent."""

    TARGET_GUMBEL = 0  # the token of a position, and its coupled draft
    DRAFT = 1  # a draft sent with its distribution, keyed by pass; independent of the noise that verifies it
    ACCEPT = 2  # the uniform number that accepts or rejects one draft; keyed by pass in block verification
    RESIDUAL = 3  # the recovered token


def key_prefixes(seeds: Iterable[int], sample_indices: Iterable[int]) -> Words:
    """Return the part of each key that is constant over a sequence, [n]. Seeds are integers modulo 2**64."""
    prefixes = np.zeros(1, np.uint64)
    for words in (seeds, sample_indices):
        prefixes = _absorb(prefixes, np.array([word % (1 << 64) for word in words], np.uint64))
    return prefixes


def noise_keys(
    prefixes: Words, positions: NDArray[np.int64], purpose: Purpose, device: torch.device | None = None
) -> Tensor:
    """Return one key per row, `[R] int64`. A key and a lane identify one random number.

    `prefixes` has each row's sequence prefix. Positions are absolute: the prompt's first token is at position 0. The
    host computes the keys, so a device needs one copy instead of about fifty small kernels.
    """
    keys = _absorb(_absorb(prefixes, positions.astype(np.uint64)), np.uint64(purpose))
    return send(torch.from_numpy(keys.view(np.int64)), device or torch.device("cpu"))


def uniform(keys: Tensor, lanes: Tensor | int = 0) -> Tensor:
    """Return one lane of every key, uniform on [0, 1) on a grid of 2**-53: `[R] float64`.

    `lanes` are [R], or one lane for all keys.
    """
    return _logical_shift(_lane_bits(keys, lanes), 11).double() * 2.0**-53


def random_bits(keys: Tensor, num_bits: int, lanes: Tensor | int = 0) -> Tensor:
    """Return one lane of every key, uniform on the integers [0, 2**num_bits), num_bits <= 63: `[R] int64`."""
    return _logical_shift(_lane_bits(keys, lanes), 64 - num_bits)


def gumbel(keys: Tensor, num_lanes: int) -> Tensor:
    """Return standard Gumbel noise for lanes [0, num_lanes) of every key: `[R, num_lanes] float32`, always finite.

    A lane is a token id of the target's vocabulary, so draft and target, and all their shards, see the same noise for
    the same token.
    """
    noise = torch.empty(len(keys), num_lanes, dtype=torch.float32, device=keys.device)
    for first, last in _chunks(num_lanes, len(keys), keys.device):
        lanes = torch.arange(first, last, device=keys.device)
        noise[:, first:last] = _gumbel_of(_lane_bits(keys[:, None], lanes))
    return noise


def _gumbel_of(bits: Tensor) -> Tensor:
    """Return -log(-log(1 - u)): a large Gumbel comes from a small u, where float32 is fine-grained."""
    # A draw of zero becomes one below the smallest other draw; the largest is below one.
    u = _logical_shift(bits, 1).float().mul_(2.0**-63).clamp_(2.0**-64, 1.0 - 2.0**-24)
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
    """Shift right and fill with zeros; int64's own shift repeats the sign."""
    return (x >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)


def _absorb(keys: Words, words: Words | np.uint64) -> Words:
    """Mix the next word into each key, as `_mix_` does. Shifts of unsigned words fill with zeros."""
    x = keys + words
    x += _GAMMA
    x ^= x >> _SHIFT_1
    x *= _FACTOR_1
    x ^= x >> _SHIFT_2
    x *= _FACTOR_2
    x ^= x >> _SHIFT_3
    return x


def _chunks(num_lanes: int, num_rows: int, device: torch.device) -> Seq[tuple[int, int]]:
    # On a CPU, temporaries of so many lanes stay in the L2 cache.
    size = num_lanes if device.type != "cpu" else max(1024, (1 << 15) // max(1, num_rows))
    return [(first, min(first + size, num_lanes)) for first in range(0, num_lanes, max(1, size))]


@contextmanager
def limited_threads(scores: Tensor) -> Iterator[None]:
    """Limit torch's threads inside the context to a number that fits operations on `scores`; never raise it.

    torch splits even a few thousand numbers among all its threads and waits for each thread. If a core has other work
    (a frontend, a helper of our kernels), the noise of one row takes a hundred times as long on two threads as on one.
    The number of threads changes no bits, since each number is computed independently.
    """
    num_threads = torch.get_num_threads()
    # Some milliseconds of noise are worth waiting for a core.
    num_wanted = min(num_threads, 1 + scores.numel() // (1 << 18))
    if num_wanted == num_threads or scores.device.type != "cpu":
        yield
        return
    torch.set_num_threads(num_wanted)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
