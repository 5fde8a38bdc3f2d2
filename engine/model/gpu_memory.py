"""Divides one GPU's memory: measures everything else first, and gives the KV pool the rest.

Only the sampler's copies of the logits are estimated. The weights are loaded, the widest pass runs and the largest
graph is recorded over a pool of one block; then the device reports the used memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.config import GIB, CacheConfig
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

WEIGHTS_REMEDY = "raise target.tensor_parallel_size, or stop other programs"


@dataclass(frozen=True, slots=True)
class CardMemory:
    """A GPU's memory, over all processes."""

    free_bytes: int
    total_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


@contextmanager
def enough_memory(device: torch.device, purpose: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory on `device` within the block into a ConfigError; `purpose` names the block.

    Raises:
        ConfigError: with the free memory and the remedy.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        card = CardMemory(*torch.cuda.mem_get_info(device))
        wanted = re.search(r"Tried to allocate [\d.]+ \w+", str(error))
        raise ConfigError(
            f"{device} has no memory for {purpose}{f' ({wanted[0].lower()})' if wanted else ''}: "
            f"{card.free_bytes / GIB:.2f} of {card.total_bytes / GIB:.2f} GiB are free; {remedy}"
        ) from error


def card_memory(device: torch.device) -> CardMemory:
    """Read a GPU's memory after all issued work has finished."""
    torch.cuda.synchronize(device)
    return CardMemory(*torch.cuda.mem_get_info(device))


class MemoryMeter:
    """Measures the memory that a runner allocates on its GPU while it starts.

    Args:
        cache: with `gpu_memory_utilization`.
        read: returns the GPU's memory now.
    """

    def __init__(self, cache: CacheConfig, read: Callable[[], CardMemory]) -> None:
        assert cache.gpu_memory_utilization is not None, "else the pool's size is set"
        self._share = cache.gpu_memory_utilization
        self._counts_own_use = cache.counts_own_use
        self._read = read
        self._before = self._loaded = read()

    def loaded(self) -> None:
        """Record that the weights are on the GPU."""
        self._loaded = self._read()

    def most_bytes(self) -> int:
        """Return the bytes that a pool could have if passes and recordings took none."""
        weights = self._loaded.used_bytes - (0 if not self._counts_own_use else self._before.used_bytes)
        return min(int(self._share * self._loaded.total_bytes) - weights, self._loaded.free_bytes)

    def pool_bytes(self, trial_bytes: int, block_bytes: int, logits_bytes: int, second_head_bytes: int = 0) -> int:
        """Return the bytes left for the pool, and log all other uses.

        Args:
            trial_bytes: the pool of the passes so far, which is freed.
            block_bytes: one block.
            logits_bytes: the logits of the widest pass, float32.
            second_head_bytes: a head that may be loaded next to the present one.

        Raises:
            ConfigError: less than one block is left.
        """
        # Measured use so far, and the share of the GPU that is left for the pool.
        now, sampling = self._read(), 2 * logits_bytes  # float32 scores and noise, in addition to the logits
        others = 0 if self._counts_own_use else self._before.used_bytes
        weights = self._loaded.used_bytes - self._before.used_bytes
        passes = now.used_bytes - self._loaded.used_bytes - trial_bytes
        budget = int(self._share * now.total_bytes)
        pool = min(budget - others - weights - passes, now.free_bytes + trial_bytes) - sampling - second_head_bytes
        # Log every use, so that an operator can see where the memory went.
        rows = {
            "other programs, and context": others,
            "weights": weights,
            "passes and recordings": passes,
            "sampling": sampling,
            "second head": second_head_bytes,
            "KV pool": pool,
            "left free": now.total_bytes - budget,
        }
        table = ", ".join(f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in rows.items())
        text = f"{now.total_bytes / GIB:.2f} GiB on the GPU, cache.gpu_memory_utilization {self._share:.2f}: {table}"
        if pool < block_bytes:
            raise ConfigError(
                f"the GPU has no memory for one block of KV, {block_bytes / GIB:.4f} GiB: {text}; raise "
                "cache.gpu_memory_utilization, lower scheduler.max_tokens_per_step or scheduler.max_num_sequences, "
                "shard the target (target.tensor_parallel_size), or stop other programs"
            )
        logger.info("%s", text)
        return pool


def memory_meter(cache: CacheConfig, device: torch.device) -> MemoryMeter | None:
    """Return a meter if the pool takes the rest of a GPU; None if its size is set or there is no GPU."""
    if device.type != "cuda" or cache.gpu_memory_utilization is None:
        return None
    return MemoryMeter(cache, lambda: card_memory(device))
