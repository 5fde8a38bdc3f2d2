"""Paged attention on AVX2, AVX-512 or AMX: `engine/native/attention` reads the pool in place, in one call per layer.

`engine.attention.torch_attention.TorchAttention` instead gathers blocks into padded batches for torch's kernel. The
tests compare the two, and so does `engine.model.paged_model` at every start. A row has the same bits in any pass, so
deterministic models use this kernel too.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.attention.base import LayerOptions
from engine.attention.batch_invariant import BatchInvariantAttention
from engine.attention.torch_attention import TorchAttention
from engine.batch.draft import path_to
from engine.batch.indexing import Index
from engine.batch.span import Span
from engine.config import KVDtype
from engine.kv_cache.pool import KVCache, kv_name
from engine.native.library import kernel, kernels_for
from protos.errors import ConfigError

MAX_HEAD_DIM = 576  # of a head

_POINTERS = ("query", "new_keys", "new_values", "keys", "values", "out", "slots", "sinks")
_LAYOUT = ("spans", "tables", "nodes", "paths")
_SIZES = ("num_rows", "num_spans", "query_row", "query_head", "key_row", "key_head", "value_row", "value_head")
_SHAPE = ("num_heads", "group_size", "key_dim", "value_dim", "block_size", "window", "is_bf16", "is_int8")


class AttentionCall(ctypes.Structure):
    """`struct attention` of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_LAYOUT)),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_SHAPE)),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class NativeAttention:
    """An `engine.attention.base.AttentionPass` of the kernel; all layers share its layout.

    Attributes:
        call: the kernel's arguments; each layer sets its own fields.
    """

    def __init__(self, spans: Seq[Span], cache: KVCache, slots: Index) -> None:
        """Raises ConfigError where the kernel does not read such a pool."""
        if not fits(cache):
            raise ConfigError(
                f"attention is 'native', which reads keys and values in float32 on processors with AVX2, in bfloat16 "
                f"on those with AVX-512 for bfloat16, and in int8 on both, with heads of up to {MAX_HEAD_DIM} numbers, "
                f"and these are {kv_name(cache.kind, cache.dtype)} with {cache.max_head_dim} on {cache.device}; "
                "set it to auto or torch"
            )
        self._cache, self._spans = cache, spans
        self._layout = _SpanArrays(spans)
        if isinstance(slots, Tensor):
            self._slots: Tensor | array[int] = slots
            address = slots.data_ptr()
        else:
            self._slots = run = array("q", range(slots.start, slots.stop))
            address, _ = run.buffer_info()
        call = AttentionCall(num_rows=len(self._slots), num_spans=self._layout.num_spans, slots=address)
        call.block_size = cache.block_size
        call.is_bf16, call.is_int8 = cache.dtype is torch.bfloat16, cache.kind is KVDtype.INT8
        for name, numbers in self._layout.arrays().items():
            setattr(call, name, numbers.buffer_info()[0])
        self.call = call

    def with_logits(self) -> NativeAttention:
        """Return the attention of the rows with logits, in layers whose KV of the whole pass others have stored."""
        spans = [span.with_logits() for span in self._spans if span.num_logits]
        no_slots = slice(0, sum(span.num_logits for span in spans))  # nothing is stored
        return NativeAttention(spans, self._cache, no_slots)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        cache, call = self._cache, self.call
        assert query.dtype == key.dtype == value.dtype == cache.dtype, "the kernel takes one dtype"
        query, key, value = (_rowwise(heads) for heads in (query, key, value))
        _, num_heads, num_rows, key_dim = query.shape
        _, num_kv_heads, _, value_dim = value.shape
        out = query.new_empty(1, num_rows, num_heads, value_dim)
        # Fill the kernel's arguments; strides let it read views without a copy.
        call.query, call.new_keys, call.new_values = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.keys, call.values = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()  # equal for latents
        call.out = out.data_ptr()
        _, call.query_head, call.query_row, _ = query.stride()
        _, call.key_head, call.key_row, _ = key.stride()
        _, call.value_head, call.value_row, _ = value.stride()
        call.num_heads, call.group_size = num_kv_heads, num_heads // num_kv_heads
        call.key_dim, call.value_dim = key_dim, value_dim
        call.window, call.softcap, call.scaling = options.window or 0, options.softcap or 0.0, options.scaling
        # `sinks` must stay referenced until the kernel returns.
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        if kernel("attend", "p", "i")(ctypes.byref(call)):
            raise MemoryError("no memory for the partial sums of attention")
        return out

    def pool_addresses(self) -> tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]]:
        """The keys and the values of every layer in memory, valid as long as the pool."""
        pointers = ctypes.c_void_p * len(self._cache.keys)
        keys, values = self._cache.addresses
        return pointers(*keys), pointers(*values)


class _SpanArrays:
    """The spans as the kernel reads them; a span with a tree becomes two, since each node reads its own path.

    Arrays, not tensors: a step of a small model has time for few calls of torch.
    """

    def __init__(self, spans: Seq[Span]) -> None:
        self._spans = array("q")  # the fields of `struct span`
        self._tables = array("i")
        self._nodes = array("i")  # per node: its position, and where its path begins
        self._paths = array("i")
        first_row = 0
        for span in spans:
            num_chained = span.num_chained
            num_nodes = len(span.token_ids) - num_chained
            table, tree = len(self._tables), span.tree_start
            # The span's chain, up to the first node of its tree.
            if num_chained:
                self._spans.extend((first_row, num_chained, span.start, table, tree, -1))  # -1: no first node
            # The tree's nodes as a second span, each with its path from `tree_start`.
            if num_nodes:
                first = span.start + num_chained
                self._spans.extend((first_row + num_chained, num_nodes, first, table, tree, len(self._nodes) // 2))
                for node in range(first - tree, first - tree + num_nodes):
                    path = path_to(span.parents, node)
                    self._nodes.extend((tree + len(path) - 1, len(self._paths)))
                    self._paths.extend(tree + step for step in path)
            self._tables.extend(span.block_table)
            first_row += len(span.token_ids)

    @property
    def num_spans(self) -> int:
        return len(self._spans) // 6  # fields of a span

    def arrays(self) -> dict[str, array[int]]:
        """The arrays by their names in the call; they live as long as this."""
        return {"spans": self._spans, "tables": self._tables, "nodes": self._nodes, "paths": self._paths}


def native_or_torch(spans: Seq[Span], cache: KVCache, slots: Index) -> NativeAttention | TorchAttention:
    """Return a processor's attention: the kernel for pools that it reads, torch for others."""
    return NativeAttention(spans, cache, slots) if fits(cache) else TorchAttention(spans, cache, slots)


def native_or_batch_invariant(
    spans: Seq[Span], cache: KVCache, slots: Index
) -> NativeAttention | BatchInvariantAttention:
    """Return `native_or_torch` for deterministic models."""
    return NativeAttention(spans, cache, slots) if fits(cache) else BatchInvariantAttention(spans, cache, slots)


def fits(cache: KVCache) -> bool:
    """True if this process has the kernel and it reads such a pool."""
    is_read = cache.device.type == "cpu" and cache.kind is not KVDtype.FP8 and cache.max_head_dim <= MAX_HEAD_DIM
    return is_read and kernels_for(cache.dtype) is not None


def _rowwise(heads: Tensor) -> Tensor:
    """Return heads [1, H, T, D] with the numbers of each head contiguous."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()
