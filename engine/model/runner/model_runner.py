"""The engine's model: one forward batch over spans of many sequences, from token ids to logits.

It does not know requests, scheduling or drafts. Prefill chunks, decodes and verification rows are all spans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.backend import check_kv_kind, choose_attention, is_batch_invariant
from engine.attention.base import PlanAttention
from engine.batch.span import Span
from engine.config import CacheConfig, GraphConfig, HeadConfig, KVDtype, ModelConfig
from engine.kv_cache.pool import kv_name
from engine.model.checkpoint.dtype import resolve_dtype
from engine.model.checkpoint.end_tokens import ids_without_token, refuse_tokens_without_rows
from engine.model.cuda_graphs.buckets import graph_buckets
from engine.model.cuda_graphs.draft_steps import DraftSteps
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner, RecordedStep
from engine.model.cuda_graphs.recorder import ForwardOutput
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.latent import latent_note
from engine.model.draft_heads.loader import Head
from engine.model.forward_batch import ForwardBatch, plan_steps
from engine.model.generation_config import eos_token_ids, length_limit, max_positions, sampling_defaults, unread_warning
from engine.model.gpu_memory import MemoryMeter, enough_memory, memory_meter
from engine.model.loader import model_folder, model_version, resolve_device
from engine.model.runner.gpu_passes import PassQueue, has_recordings, warm_up
from engine.model.runner.head_steps import head_steps
from engine.model.runner.model_pool import ModelPool
from engine.model.runner.served_weights import load_weights
from engine.model.tensor_parallel import ALONE, Rank
from protos.errors import ConfigError
from protos.token_bytes import forget_tokenizer

logger = logging.getLogger(__name__)

_PASSES_REMEDY = "lower scheduler.max_tokens_per_step or scheduler.max_num_sequences, or stop other programs"


class ModelRunner(ModelPool):
    """A loaded model and its KV pool.

    Attributes:
        vocab_size: columns of the logits, padding rows of the embedding included.
        max_model_len: most tokens of a sequence: the model's positions, or the lower configured limit.
        kv_layout: describes a block of the pool to engines that exchange blocks.
        model_version: digest of weights and compute dtypes; equal on every machine with the same files and
            dtypes.
        eos_token_ids: tokens that end a text, the usual one first.
        sampling_defaults: sampling parameters of requests that leave them out.
        experts: what rows read of the model's experts.
        self_draft: the model's own weights as a draft; None if unused.
        features: the head's hidden states, for every row of the last `forward`, [T, F]; None without a head.
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
        # Refuse settings that do not fit each other before the weights are read.
        if model.num_threads is not None:
            torch.set_num_threads(model.num_threads)
        device = rank.device or resolve_device(model.device)
        meter = memory_meter(cache, device)
        dtype = resolve_dtype(model.dtype, device)
        kind = KVDtype(cache.dtype)
        self._plan_attention = _attention_of(model, kind, device)
        # Load and pack the weights.
        weights, stock = load_weights(model, head, rank, dtype, self._plan_attention, repeats_checks=repeats_checks)
        super().__init__(weights.model, weights.head_layers, rank, dtype)
        self._weights, self.self_draft, self.experts = weights, weights.self_draft, weights.experts
        self._read_generation(stock, model)
        self._log_latents(stock, rank, device)
        is_recordable = self._model.decoder.is_recordable
        has_graphs = has_recordings(
            model.graphs, device, self._plan_attention, num_ranks=rank.size, is_recordable=is_recordable
        )
        self._queue = PassQueue.of(device)
        self.features: Tensor | None = None
        self._graphs: CudaGraphRunner | None = None
        self._head_graphs: CudaGraphRunner | None = None
        self._graph_config = model.graphs if has_graphs else None
        # Size the pool: on a GPU it gets the rest after the weights and the widest pass.
        if meter is not None:
            cache = self._measured(meter, cache, model.graphs, stock, max_model_len, has_graphs=has_graphs)
        with enough_memory(device, "the KV pool", "lower cache.memory_gib or cache.num_blocks, or stop other programs"):
            self.make_pool(cache, kind, has_padding=has_graphs)
        self.model_version = model_version(model.path, model.quantization, str(dtype), kv_name(kind, dtype))
        self.kv_layout = self.layout_of(model, self.model_version, head, kv_name(kind, dtype), device)
        self.max_model_len = length_limit(stock.config, max_model_len, self.num_blocks * self.block_size)
        self._prepare_passes(device)

    @staticmethod
    def _log_latents(stock: PreTrainedModel, rank: Rank, device: torch.device) -> None:
        is_described, is_on_gpu = FusedDecoder.fits_config(stock.config), device.type != "cpu"
        note = latent_note(stock.config, is_described=is_described, num_ranks=rank.size, is_on_gpu=is_on_gpu)
        if note is not None and rank.is_first:
            logger.info("%s", note)

    def _prepare_passes(self, device: torch.device) -> None:
        """Compile the passes over the pool, and record the small ones."""
        graphs = self._graph_config
        if device.type == "cuda":
            with enough_memory(device, "a pass over a prompt", _PASSES_REMEDY):
                warm_up(self._compute, self.block_size, self.max_model_len)
        if graphs is not None:
            with enough_memory(device, "the buffers of recorded passes", _PASSES_REMEDY):
                self._graphs = self._record(graphs, self.max_model_len)
                self._head_graphs = self._record_head(self._graphs, graphs, self.max_model_len)

    def _read_generation(self, stock: PreTrainedModel, model: ModelConfig) -> None:
        """Read end tokens and sampling defaults; mask the head's rows without a token, whose text would be empty."""
        folder, template = model_folder(model.path), model.chat_template
        self.vocab_size = self._model.vocab_size
        self.eos_token_ids = eos_token_ids(stock, folder, self.vocab_size, template)
        self.sampling_defaults = sampling_defaults(stock, model.generation_config)
        if warning := unread_warning(stock.config):
            logger.warning("%s", warning)
        if note := refuse_tokens_without_rows(folder, self.vocab_size, template):
            logger.warning("%s", note)
        padding = ids_without_token(folder, self.vocab_size, self.eos_token_ids)
        if padding:
            logger.info("%d ids without a token are masked, the first is %d", len(padding), padding[0])
        self._model.mask(padding)
        forget_tokenizer()

    @property
    def head(self) -> Head | None:
        """The head that drafts from the model's hidden states, with its KV in the same pool; None without one."""
        return self._weights.head

    @head.setter
    def head(self, head: Head | None) -> None:
        self._weights.head, self._head_graphs = head, None  # the recordings read the former head
        if self._graphs is not None and self._graph_config is not None:
            try:
                self._head_graphs = self._record_head(self._graphs, self._graph_config, self.max_model_len)
            except ConfigError as error:
                logger.warning("steps of the new head are computed call by call: %s", error)

    def load_head(self, path: str) -> Head:
        """Return another head for this model, which may replace `head` between two passes. Any thread may call it.

        Raises:
            ConfigError: it cannot be loaded, or the pool and the recorded passes have no room for it.
        """
        return self._weights.load_head(path)

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
        meter.loaded()
        recorded: list[CudaGraphRunner | None] = []
        with enough_memory(self._weights.device, "the widest pass over a prompt", _PASSES_REMEDY):
            self.make_pool(replace(cache, num_blocks=1, num_states=1), KVDtype(cache.dtype), has_padding=has_graphs)
            max_rows = min(graphs.max_rows, max_positions(stock.config) or graphs.max_rows)
            self._compute([Span([0] * max_rows, 0, [0] * -(-max_rows // self.block_size), 1)])
            if has_graphs:
                # The largest recordings alone: the others reuse their memory. The pool it depends on is not known yet.
                most_tokens = max(1, meter.most_bytes() // self._bytes_per_rank_block) * self.block_size
                max_len = length_limit(stock.config, max_model_len, most_tokens)
                passes = self._record(graphs, max_len, most_tokens)
                recorded += passes, self._record_head(passes, graphs, max_len, most_tokens)
                del passes
        widest = max((bucket.num_rows for bucket in graph_buckets(graphs)), default=graphs.max_batch)
        trial_bytes = (1 + has_graphs) * self._bytes_per_rank_block
        logits_bytes = widest * self.vocab_size * torch.float32.itemsize
        pool_bytes = meter.pool_bytes(
            trial_bytes, self._bytes_per_rank_block, logits_bytes, self._weights.second_head_bytes
        )
        del self._cache, recorded
        torch.cuda.empty_cache()
        num_bytes = self._rank.size * self._rank.least(pool_bytes)
        return replace(cache, memory_bytes=num_bytes, gpu_memory_utilization=None)

    def _record(self, graphs: GraphConfig, max_model_len: int, trial_pool_tokens: int | None = None) -> CudaGraphRunner:
        passes = CudaGraphRunner(
            self._pass,
            self._cache,
            self._plan_attention,
            graphs,
            max_model_len,
            self.vocab_size,
            trial_pool_tokens=trial_pool_tokens,
        )
        if graphs.draft_ids_end:
            passes.record_steps(graphs.draft_ids_end)
        return passes

    def _record_head(
        self, passes: CudaGraphRunner, graphs: GraphConfig, max_model_len: int, trial_pool_tokens: int | None = None
    ) -> CudaGraphRunner | None:
        return head_steps(
            self.head,
            self._cache,
            self._plan_attention,
            graphs,
            max_model_len,
            passes,
            trial_pool_tokens=trial_pool_tokens,
        )

    @property
    def can_overlap(self) -> bool:
        """True if passes may be issued before the host knows their tokens.

        Then small passes are recorded, so the device works while the host waits, and no other rank waits. States of
        recurrent layers get slots for known tokens only.
        """
        if self._graphs is None or self.num_states:
            return False
        return self._graphs.has_passes and self._rank.size == 1

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
        self.features = output.features
        return output.logits

    def _pass(self, batch: ForwardBatch, out: Tensor | None = None) -> ForwardOutput:
        return ForwardOutput(self._model.forward(batch, out), self._model.features)

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
            return self._compute(step.spans, step.input_ids)
        return self._model.forward(step)

    def draft_steps(self, spans: Seq[Span]) -> DraftSteps | None:
        """Return recorded steps for the tokens of `spans`, up to `MAX_STEPS` each; None if they are not recorded."""
        return None if self._graphs is None else self._graphs.draft_steps(spans)

    def head_steps(self, spans: Seq[Span]) -> DraftSteps | None:
        """`draft_steps` of the head."""
        return None if self._head_graphs is None else self._head_graphs.draft_steps(spans)


def _attention_of(model: ModelConfig, kind: KVDtype, device: torch.device) -> PlanAttention:
    """Return the attention of a model over a pool of `kind`. Raises ConfigError for settings that do not fit."""
    plan_attention = choose_attention(model.attention, device, is_deterministic=model.deterministic)
    if is_batch_invariant(plan_attention) and model.graphs.has_trees:
        raise ConfigError(
            "target.deterministic is true and speculation.tree is set: on a GPU a token's bits differ between a "
            "tree and the chain that it becomes; remove the tree, or set deterministic to false"
        )
    check_kv_kind(kind, plan_attention, device)
    return plan_attention
