"""Runner of a model sharded over several processes: this is rank 0, and the others follow its calls."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.batch.span import Span
from engine.config import CacheConfig, HeadConfig, ModelConfig
from engine.kv_cache.block_pool import KVMove
from engine.model.loader import load_config
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.rank_group import RankGroup
from engine.model.tensor_parallel import check_divisible


def load_runner(
    model: ModelConfig, cache: CacheConfig, max_model_len: int | None = None, head: HeadConfig | None = None
) -> ModelRunner:
    """The runner of a model, sharded if it is configured so. Raises ConfigError for what cannot be served."""
    if model.tensor_parallel_size == 1:
        return ModelRunner(model, cache, max_model_len, head)
    return TensorParallelRunner(model, cache, max_model_len, head)


class TensorParallelRunner(ModelRunner):
    """A `ModelRunner` whose passes, moves and exchanged blocks span all ranks.

    Every call is sent to the other ranks first and then made here, so all meet in the collectives of their layers.
    Only rank 0 schedules, samples and verifies, and keeps the unsharded head. The other ranks reserve room for the
    head's keys and values, since a block has the same bytes on all. Blocks are exported with all heads, so engines with
    another number of ranks, or one, can read them.
    """

    def __init__(
        self, model: ModelConfig, cache: CacheConfig, max_model_len: int | None = None, head: HeadConfig | None = None
    ) -> None:
        """Start the ranks, load, check; raises ConfigError for what cannot be sharded or served."""
        check_divisible(load_config(model.path), model.tensor_parallel_size)
        self._ranks = RankGroup(model, cache, max_model_len, head)
        try:
            super().__init__(model, cache, max_model_len, head, self._ranks.rank)
        except BaseException:
            self._ranks.close()
            raise

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason, in another thread, when a rank dies: nothing can be computed then."""
        self._ranks.watch(on_lost)

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        self._ranks.close()

    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        assert input_ids is None, "other ranks do not have this device's tokens"
        self._ranks.tell("forward", [span.trimmed(self.block_size) for span in spans])  # less to send
        return super().forward(spans)

    def move(self, moves: Seq[KVMove]) -> None:
        if moves:
            self._ranks.tell("move", list(moves))
        super().move(moves)

    def export_blocks(self, block_ids: Seq[int]) -> Tensor:
        self._ranks.tell("export_blocks", list(block_ids))
        return super().export_blocks(block_ids)

    def import_blocks(self, block_ids: Seq[int], blocks: Tensor) -> None:
        self._ranks.tell("import_blocks", list(block_ids))
        super().import_blocks(block_ids, blocks)

    def copy_blocks(self, source_ids: Seq[int], block_ids: Seq[int]) -> None:
        self._ranks.tell("copy_blocks", list(source_ids), list(block_ids))
        super().copy_blocks(source_ids, block_ids)
