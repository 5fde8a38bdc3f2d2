"""The KV pool of a model: its size, what moves within it, and the blocks and states that leave and enter it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from engine.config import CacheConfig, HeadConfig, KVDtype, ModelConfig
from engine.kv_cache.block_pool import KVMove
from engine.kv_cache.pool import LayerShape, ShardedKVLayout, block_bytes, pool_size
from engine.kv_cache.state_pool import StatePool, num_slots, state_bytes
from engine.model.draft_heads.checkpoint import head_version
from engine.model.paged_model import PagedModel
from engine.model.tensor_parallel import Rank
from engine.native.library import native_instructions
from engine.remote_prefill.kv_transfer import KVLayout


class ModelPool:
    """A model's pool, or one rank's part of it; `export_*` and `import_*` see the blocks of all ranks whole.

    Attributes:
        num_blocks, block_size: the pool.
        num_states: slots for states of recurrent layers; 0 for models without such layers.
        bytes_per_block: size of an exported block, all layers together.
        bytes_per_state: size of a state of the recurrent layers; 0 for models without any.
    """

    def __init__(self, model: PagedModel, head_layers: Seq[LayerShape], rank: Rank, dtype: torch.dtype) -> None:
        self._model, self._head_layers, self._rank, self._dtype = model, head_layers, rank, dtype

    def make_pool(self, cache: CacheConfig, kind: KVDtype, *, has_padding: bool) -> None:
        """Make the pool; `has_padding` adds a scratch block for padding, within a budget of bytes."""
        shapes = [*self._model.layer_shapes, *self._head_layers]
        rank_shapes = [*self._model.rank_shapes, *self._head_layers]
        num_ranks = self._rank.size
        self.block_size = cache.block_size
        self.bytes_per_block = block_bytes(shapes, cache.block_size, self._dtype, kind)
        self._bytes_per_rank_block = block_bytes(rank_shapes, cache.block_size, self._dtype, kind)
        self.bytes_per_state = state_bytes(self._model.state_shapes, self._dtype)
        self.num_states = num_slots(cache, self.bytes_per_state) if self.bytes_per_state else 0
        if cache.memory_bytes is not None:
            cache = replace(cache, memory_bytes=cache.memory_bytes - self.num_states * self.bytes_per_state)
        self.num_blocks = pool_size(cache, num_ranks * self._bytes_per_rank_block) - (
            has_padding and cache.num_blocks is None
        )
        self._kv_sharding = ShardedKVLayout(shapes, rank_shapes, cache.block_size, self._dtype, num_ranks, kind)
        num_blocks = self.num_blocks + has_padding
        self._cache = self._model.new_cache(num_blocks, cache.block_size, self._head_layers, kind, self.num_states)

    def layout_of(
        self, model: ModelConfig, model_version: str, head: HeadConfig | None, dtype: str, device: torch.device
    ) -> KVLayout:
        """Describe a block by all weights that it depends on, including a separate head's."""
        head_path = head.path if head is not None and head.kind.keeps_kv else None
        return KVLayout(
            dtype=dtype,
            block_size=self.block_size,
            layers=(*self._model.layer_shapes, *self._head_layers),
            model_version=model_version,
            states=tuple(self._model.state_shapes),
            head_version=head_version(head_path) if head_path is not None else "",
            rounding=_rounding(model, device),
        )

    @property
    def device(self) -> torch.device:
        """The device of the pool."""
        return self._cache.device

    def move(self, moves: Seq[KVMove]) -> None:
        """Perform all `moves` in the pool as one batch; the next pass reads the result."""
        if moves:
            block_size = self._cache.block_size
            self._cache.move(
                [move.slot(index, block_size) for move in moves for index in move.from_indices],
                [move.slot(index, block_size) for move in moves for index in move.to_indices],
            )

    def export_blocks(self, block_ids: Seq[int]) -> Tensor:
        """Return a copy of these blocks (at least one), [n, bytes_per_block] uint8, on its device.

        The copy of several ranks' blocks is in main memory.
        """
        part = self._cache.export_blocks(block_ids)
        if self._rank.size == 1:
            return part
        parts = self._rank.gather(part.cpu())
        return self._kv_sharding.join(parts) if parts else part

    def import_blocks(self, block_ids: Seq[int], blocks: Tensor) -> None:
        """Overwrite these blocks with blocks exported by an engine with the same `kv_layout`."""
        if self._rank.size > 1:
            blocks = self._kv_sharding.of_rank(self._rank.broadcast(blocks.cpu()), self._rank.index)
        self._cache.import_blocks(block_ids, blocks)

    def export_state(self, slot: int) -> Tensor:
        """Return a copy of a slot's state of the recurrent layers, [bytes_per_state] uint8, on its device."""
        return self._states.export_state(slot)

    def import_state(self, slot: int, state: Tensor) -> None:
        """Overwrite a slot with a state exported by an engine with the same `kv_layout`."""
        self._states.import_state(slot, state)

    @property
    def _states(self) -> StatePool:
        assert self._cache.states is not None, "the model has no recurrent layers"
        return self._cache.states

    def copy_blocks(self, source_ids: Seq[int], block_ids: Seq[int]) -> None:
        """Copy each source's KV into the block at the same index, for branches that part within a block."""
        self._cache.copy_blocks(source_ids, block_ids)


def _rounding(model: ModelConfig, device: torch.device) -> str:
    """Name the rounding of a deterministic model: sums depend on threads and processor, so machines may differ."""
    if not model.deterministic:
        return "any"
    if device.type == "cuda":
        return f"deterministic on {torch.cuda.get_device_name(device)} with torch {torch.__version__}"
    instructions = native_instructions()
    kernels = "torch's" if instructions is None else instructions.name
    capability = torch.backends.cpu.get_cpu_capability()
    return f"deterministic on {torch.get_num_threads()} threads of {capability} with {kernels} kernels"
