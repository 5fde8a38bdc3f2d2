"""The engine's model: one forward batch over spans of many sequences, from token ids to logits.

It does not know requests, scheduling or drafts. Prefill chunks, decodes and verification rows are all spans.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention.backend import check_kv_kind, choose_attention, is_batch_invariant, is_triton
from engine.attention.base import PlanAttention
from engine.batch.span import Span
from engine.config import (
    CacheConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    KVDtype,
    ModelConfig,
    Quantization,
)
from engine.kv_cache.block_pool import KVMove
from engine.kv_cache.kv_dtype import kv_name
from engine.kv_cache.pool import LayerShape, ShardedKVLayout, block_bytes, pool_size
from engine.kv_cache.state_pool import StatePool, num_slots, state_bytes
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.end_tokens import ids_without_token, refuse_tokens_without_rows
from engine.model.cuda_graphs.buckets import graph_buckets
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner, ForwardOutput, RecordedStep
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.determinism import config_has_experts
from engine.model.draft_heads.checkpoint import head_version
from engine.model.draft_heads.loader import Head, HeadTarget, load_head, whole_lm_head
from engine.model.draft_heads.self_draft import SelfDraft
from engine.model.forward_batch import NO_TAPS, ForwardBatch, plan_steps
from engine.model.generation_defaults import eos_token_ids, sampling_defaults
from engine.model.gpu_memory import WEIGHTS_REMEDY, MemoryMeter, enough_memory, memory_meter
from engine.model.linear.packed_experts import expert_reads
from engine.model.linear.packed_linear import Linear
from engine.model.linear.quantized_linear import can_quantize, linear_factory
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.loader import load_model, model_folder, model_version, resolve_device
from engine.model.paged_model import PagedModel
from engine.model.position_limit import max_positions, unread_warning
from engine.model.resident_memory import leave_checkpoint, trim_heap
from engine.model.runner.gpu_passes import PassQueue, warm_up
from engine.model.runner.kept_weights import kept_weights
from engine.model.tensor_parallel import ALONE, Rank
from engine.native.library import native_instructions
from engine.remote_prefill.kv_transfer import KVLayout
from protos.errors import ConfigError
from protos.token_bytes import forget_tokenizer

logger = logging.getLogger(__name__)

_PASSES_REMEDY = "lower scheduler.max_tokens_per_step or scheduler.max_num_sequences, or stop other programs"


class ModelRunner:
    """A loaded model and its KV pool.

    Attributes:
        vocab_size: columns of the logits, padding rows of the embedding included.
        max_model_len: most tokens of a sequence: the model's positions, or the lower configured limit.
        num_blocks, block_size: the pool.
        num_states: slots for states of recurrent layers; 0 for models without such layers.
        bytes_per_block: size of an exported block, all layers together.
        bytes_per_state: size of a state of the recurrent layers; 0 for models without any.
        kv_layout: describes a block of the pool to engines that exchange blocks.
        model_version: digest of weights and compute dtypes; equal on every machine with the same files and
            dtypes.
        eos_token_ids: tokens that end a text, the usual one first.
        sampling_defaults: sampling parameters of requests that leave them out.
        experts: what rows read of the model's experts.
        head: drafts from the model's hidden states, with its KV in the same pool; None without one.
        self_draft: the model's own weights as a draft; None if unused.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        max_model_len: int | None = None,
        head: HeadConfig | None = None,
        rank: Rank = ALONE,
        *,
        repeats_checks: bool = False,
    ) -> None:
        """Load, check and pack; takes as long as reading the weights, or those that an earlier start packed.

        Args:
            model: the checkpoint, and its device and kernels.
            cache: the size of the pool.
            max_model_len: in tokens; None for all of the model's positions.
            head: drafts from the model's hidden states.
            rank: with several ranks, all construct runners and call the same methods together, in one order.
            repeats_checks: compare with the stock model even if an earlier start on this machine did.

        Raises:
            ConfigError: the model cannot be served with these settings.
        """
        if model.num_threads is not None:
            torch.set_num_threads(model.num_threads)
        self._rank = rank
        device = rank.device or resolve_device(model.device)
        meter = memory_meter(cache, device)
        # Other heads compute in the dtype of their weights.
        is_alone = rank.size == 1 and (head is None or head.kind is HeadKind.SELF)
        self._dtype = resolve_dtype(model.dtype, device)
        self._plan_attention = choose_attention(model.attention, device, is_deterministic=model.deterministic)
        if is_batch_invariant(self._plan_attention) and model.graphs.has_trees:
            raise ConfigError(
                "target.deterministic is true and speculation.tree is set: on a GPU a token's bits differ between a "
                "tree and the chain that it becomes; remove the tree, or set deterministic to false"
            )
        kind = KVDtype(cache.dtype)
        check_kv_kind(kind, self._plan_attention, device)
        with self._stored(model, device, f"views: {is_alone}", repeats_checks=repeats_checks) as store:
            stock = load_model(
                model,
                rank.load_device,
                keeps_dtype=_keeps_dtype if is_alone else None,
                is_checked=store.is_checked,
            )
            self.experts = expert_reads(stock)
            with enough_memory(device, f"the weights of {model.path!r}, packed or sharded", WEIGHTS_REMEDY):
                self._take_weights(stock, model, head, device, store)
        self.vocab_size = self._model.vocab_size
        folder = model_folder(model.path)
        self.eos_token_ids = eos_token_ids(stock, folder, self.vocab_size, model.chat_template)
        self._fit_tokenizer(folder, model.chat_template)
        forget_tokenizer()
        self.sampling_defaults = sampling_defaults(stock, model.generation_config)
        has_graphs = not self._model.state_shapes and _has_graphs(model.graphs, device, self._plan_attention)
        self._queue = PassQueue.of(device)
        self._features: Tensor | None = None
        self._graphs: CudaGraphRunner | None = None
        if meter is not None:
            meter.loaded()
            with enough_memory(device, "the widest pass over a prompt", _PASSES_REMEDY):
                cache = self._measured(meter, cache, model.graphs, stock, max_model_len, has_graphs=has_graphs)
        with enough_memory(device, "the KV pool", "lower cache.memory_gib or cache.num_blocks, or stop other programs"):
            self._make_pool(cache, kind, has_padding=has_graphs)
        kv_dtype = kv_name(kind, self._dtype)
        self.model_version = model_version(model.path, model.quantization, str(self._dtype), kv_dtype)
        self.kv_layout = self._new_kv_layout(model, head, kv_dtype, device)
        if warning := unread_warning(stock.config):
            logger.warning("%s", warning)
        self.max_model_len = length_limit(stock.config, max_model_len, self.num_blocks * self.block_size)
        if device.type == "cuda":
            with enough_memory(device, "a pass over a prompt", _PASSES_REMEDY):
                warm_up(self._compute, self.block_size, self.max_model_len)
        if has_graphs:
            with enough_memory(device, "the buffers of recorded passes", _PASSES_REMEDY):
                self._graphs = self._record(model.graphs, self.max_model_len)

    def _stored(
        self, model: ModelConfig, device: torch.device, kept_as: str, *, repeats_checks: bool = False
    ) -> AbstractContextManager[WeightStore]:
        """Return the store of packed weights; the parts of several ranks are not kept."""
        if self._rank.size > 1:
            return nullcontext(NO_STORE)
        return kept_weights(model, self._dtype, device, kept_as, repeats_checks=repeats_checks)

    def _take_weights(
        self,
        stock: PreTrainedModel,
        model: ModelConfig,
        head: HeadConfig | None,
        device: torch.device,
        store: WeightStore,
    ) -> None:
        """Pack and check `stock` and its head; no page of their files stays in memory."""
        quantization = usable_quantization(model, device)
        if device.type == "cpu":
            is_fast = self._rank.size == 1 and FusedDecoder.fits(stock)
            make_linear = linear_factory(quantization, self._dtype)
            leave_checkpoint(stock, make_linear, self._dtype, keeps_embeddings=is_fast, store=store)
        self.head: Head | None = None
        self._head_loader: Callable[[str], Head] | None = None
        self._second_head_bytes = 0  # on a GPU, for exchanges
        self._head_layers: Seq[LayerShape] = ()
        self.self_draft: SelfDraft | None = None
        taps, own_lm_head = NO_TAPS, None
        if head is not None and head.kind is HeadKind.SELF:
            self.self_draft = SelfDraft(head, stock, quantization, self._dtype)
        elif head is not None:
            loaded, own_lm_head = self._take_head(head, stock, device, quantization)
            self._head_layers, taps = loaded.layer_shapes, loaded.taps
            self.head = loaded if self._rank.is_first else None
        self._model = PagedModel(
            stock,
            quantization,
            self._plan_attention,
            taps,
            self._rank,
            dtype=self._dtype,
            is_deterministic=model.deterministic,
            store=store,
        )
        if self.head is not None:
            self.head.lm_head = own_lm_head or self._model.lm_head
            self.head.place(len(self._model.layer_shapes))
        if self.self_draft is not None:
            quantized = replace(model, quantization=self.self_draft.quantization)
            kept_as = f"draft of {self.self_draft.num_layers} layers"
            is_shared = self.self_draft.is_shared
            with nullcontext(NO_STORE) if is_shared else self._stored(quantized, device, kept_as) as draft_store:
                self.self_draft.begin(self._model.decoder, draft_store)
        trim_heap()

    def _fit_tokenizer(self, folder: Path, template: str | None) -> None:
        """Mask the rows of the head without a token: their text would be empty."""
        if note := refuse_tokens_without_rows(folder, self.vocab_size, template):
            logger.warning("%s", note)
        padding = ids_without_token(folder, self.vocab_size, self.eos_token_ids)
        if padding:
            logger.info("%d ids without a token are masked, the first is %d", len(padding), padding[0])
        self._model.mask(padding)

    def _take_head(
        self, config: HeadConfig, stock: PreTrainedModel, device: torch.device, quantization: Quantization
    ) -> tuple[Head, Linear | None]:
        """Return the head, and its function to logits if it needs its own.

        Only the first rank keeps the head, unsharded, since the model's is sharded over all ranks. The other ranks need
        its taps, because all compute the same rows.
        """
        if not self._rank.is_first:
            return load_head(config, stock, torch.device("cpu")), None
        if config.path is None:
            head = load_head(config, stock, device, quantization)
        else:
            self._head_loader = partial(HeadTarget.of(stock, device, quantization).load, config.kind)
            before_bytes = _allocated_bytes(device)
            head = self._head_loader(config.path)
            self._second_head_bytes = _allocated_bytes(device) - before_bytes
        return head, None if self._rank.size == 1 else whole_lm_head(stock, device)

    def load_head(self, path: str) -> Head:
        """Return another head for this model, which may replace `head` between two passes. Any thread may call it.

        Raises:
            ConfigError: it cannot be loaded, or the pool and the recorded passes have no room for it.
        """
        assert self.head is not None, "it has a head to replace"
        assert self._head_loader is not None, "that is not made of the model's own weights"
        with enough_memory(self._cache.device, f"the head {path!r}", "free memory, or deploy it by draft.path"):
            head = self._head_loader(path)
        if (head.taps, head.layer_shapes) != (self.head.taps, self.head.layer_shapes):
            raise ConfigError(
                f"it {_layout(head)}, and the pair's passes and blocks are laid out for a head that "
                f"{_layout(self.head)}; set draft.path in deploy.yaml and deploy again"
            )
        head.lm_head = self.head.lm_head
        head.place(len(self._model.layer_shapes))
        return head

    def _measured(
        self,
        meter: MemoryMeter,
        cache: CacheConfig,
        graphs: GraphConfig,
        stock: PreTrainedModel,
        max_model_len: int | None,
        *,
        has_graphs: bool,
    ) -> CacheConfig:
        """Return `cache` with the bytes that weights, the widest pass and the recordings leave on the GPU."""
        self._make_pool(replace(cache, num_blocks=1, num_states=1), KVDtype(cache.dtype), has_padding=has_graphs)
        max_rows = min(graphs.max_rows, max_positions(stock.config) or graphs.max_rows)
        self._compute([Span([0] * max_rows, 0, [0] * -(-max_rows // self.block_size), 1)])
        widest = max((bucket.num_rows for bucket in graph_buckets(graphs)), default=graphs.max_batch)
        if has_graphs:
            # The largest recording alone: the others reuse its memory. The pool it depends on is not known yet.
            most_tokens = max(1, meter.most_bytes() // self._bytes_per_rank_block) * self.block_size
            max_len = length_limit(stock.config, max_model_len, most_tokens)
            self._record(graphs, max_len, most_tokens)
        trial_bytes = (1 + has_graphs) * self._bytes_per_rank_block
        logits_bytes = widest * self.vocab_size * torch.float32.itemsize
        pool_bytes = meter.pool_bytes(trial_bytes, self._bytes_per_rank_block, logits_bytes, self._second_head_bytes)
        del self._cache
        torch.cuda.empty_cache()
        num_bytes = self._rank.size * self._rank.least(pool_bytes)
        return replace(cache, memory_bytes=num_bytes, gpu_memory_utilization=None)

    def _record(self, graphs: GraphConfig, max_model_len: int, trial_pool_tokens: int | None = None) -> CudaGraphRunner:
        return CudaGraphRunner(
            self._pass,
            self._cache,
            self._plan_attention,
            graphs,
            max_model_len,
            self.vocab_size,
            trial_pool_tokens=trial_pool_tokens,
        )

    def _make_pool(self, cache: CacheConfig, kind: KVDtype, *, has_padding: bool) -> None:
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

    def _new_kv_layout(self, model: ModelConfig, head: HeadConfig | None, dtype: str, device: torch.device) -> KVLayout:
        """Describe a block by all weights that it depends on, including a separate head's."""
        head_path = head.path if head is not None and head.kind.keeps_kv else None
        return KVLayout(
            dtype=dtype,
            block_size=self.block_size,
            layers=(*self._model.layer_shapes, *self._head_layers),
            model_version=self.model_version,
            states=tuple(self._model.state_shapes),
            head_version=head_version(head_path) if head_path is not None else "",
            rounding=_rounding(model, device),
        )

    @property
    def can_overlap(self) -> bool:
        """True if passes may be issued before the host knows their tokens.

        Then small passes are recorded, so the device works while the host waits, and no other rank waits.
        """
        return self._graphs is not None and self._graphs.has_passes and self._rank.size == 1

    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        """Compute `spans` in one pass: write their KV to their slots, and return their logits as [R, V] float32.

        Rows are in span order. Each layer writes KV before any row reads it, so a span may read KV that another span
        of this pass writes. Block tables must cover every position of their span. The next pass may overwrite the
        logits.

        `input_ids` [T] int64, if given, replace the spans' tokens, which the host does not know yet.
        """
        if self._queue is None:
            return self._compute(spans, input_ids)
        self._queue.wait()
        logits = self._compute(spans, input_ids)
        self._queue.issued()
        return logits

    @property
    def features(self) -> Tensor | None:
        """The head's hidden states, for every row of the last `forward`, [T, F]; None without a head."""
        return self._features

    def lay_out(self, spans: Seq[Span], *, has_blocks: bool = False) -> ForwardBatch:
        """Lay out a pass over `spans`, for this model or its head (`has_blocks`: a parallel one); for one forward."""
        return ForwardBatch.of(spans, self._cache, self._plan_attention, has_blocks=has_blocks)

    def _compute(self, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        output = None if self._graphs is None else self._graphs.forward(spans, input_ids)
        if output is None:
            batch = self.lay_out(spans)
            if input_ids is not None:
                batch.input_ids.copy_(input_ids)
            output = self._pass(batch)
        self._features = output.features
        return output.logits

    def _pass(self, batch: ForwardBatch, out: Tensor | None = None) -> ForwardOutput:
        return ForwardOutput(self._model.forward(batch, out), self._model.features)

    def move(self, moves: Seq[KVMove]) -> None:
        """Perform all `moves` in the pool as one batch; the next pass reads the result."""
        if moves:
            block_size = self._cache.block_size
            self._cache.move(
                [move.slot(index, block_size) for move in moves for index in move.from_indices],
                [move.slot(index, block_size) for move in moves for index in move.to_indices],
            )

    def plan_steps(self, spans: Seq[Span]) -> list[ForwardBatch]:
        """Return one pass per token of `spans`, all of one length: pass i computes the i-th token of each.

        For a draft that feeds its own tokens back: all tensors are laid out at once, with placeholder token ids.
        Fill `input_ids` of each pass, in place, before computing it.
        """
        return plan_steps(spans, self._cache, self._plan_attention)

    def plan_own_steps(self, spans: Seq[Span]) -> Seq[ForwardBatch | RecordedStep]:
        """`plan_steps` for passes of this model, to be computed by `run`; recorded passes if they fit."""
        recorded = None if self._graphs is None else self._graphs.plan_steps(spans)
        return self.plan_steps(spans) if recorded is None else recorded

    def run(self, step: ForwardBatch | RecordedStep) -> Tensor:
        """`forward` for a pass laid out beforehand."""
        if isinstance(step, RecordedStep):
            assert self._graphs is not None, "recorded steps come from it"
            return self._graphs.run(step)
        return self._model.forward(step)

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


def _keeps_dtype(config: PreTrainedConfig) -> bool:
    """True for models whose weights are packed as the files have them: described families, and mixtures of experts."""
    return FusedDecoder.fits_config(config) or config_has_experts(config)


def usable_quantization(model: ModelConfig, device: torch.device) -> Quantization:
    """Return the configured quantization. Raises ConfigError if the device has no kernels for it."""
    quantization = Quantization(model.quantization)
    if quantization is not Quantization.NONE and not can_quantize(device):
        raise ConfigError(
            f"quantization is {str(quantization)!r}, which needs our kernels: on a processor with AVX2 (compiled at "
            f"install), or Triton and a GPU of compute capability 8.0; the model runs on {device}; set it to 'none'"
        )
    return quantization


def _layout(head: Head) -> str:
    layers = [f"{shape.num_kv_heads} x {shape.key_dim}" for shape in head.layer_shapes]
    inputs = f"the inputs of layers {', '.join(map(str, head.taps.layers))}" if head.taps.layers else "the last states"
    return f"reads {inputs} and keeps {f'keys of {chr(44).join(layers)}' if layers else 'no keys'}"


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


def _allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _has_graphs(graphs: GraphConfig, device: torch.device, plan_attention: PlanAttention) -> bool:
    """True if small passes are to be recorded; logs why a GPU does not record them."""
    if graphs.kind is GraphKind.OFF or not graphs.row_counts:
        return False
    if graphs.kind is GraphKind.EAGER:
        return True
    if device.type != "cuda":
        return False
    if not is_triton(plan_attention):
        logger.info("passes are not recorded: CUDA graphs need the Triton attention kernel")
        return False
    return True


def length_limit(config: PreTrainedConfig, configured: int | None, num_slots: int) -> int:
    """Return the most tokens of a sequence. Raises ConfigError if configured above the model's positions."""
    positions = max_positions(config) or num_slots
    if configured is not None and configured > positions:
        raise ConfigError(
            f"scheduler.max_model_len is {configured}, but the model has {positions} positions; lower it, "
            "or scale them in its config.json, for example by YaRN"
        )
    return positions if configured is None else configured
