"""`make profile`: the time of each kind of pass against its floor on this machine, and its share by operator.

    python -m bench.profile --threads 2 --context 1024

The floor of a pass is the larger of its bytes over the measured bandwidth and its operations over the measured speed
of a matrix product in `--dtype`. Both are the best of five tries just before the pass, since a machine's speed drifts.
Bytes: every weight once, packed as it is, and the keys and values that the rows read. Operations: two per weight and
row, and attention.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig

from bench.padded_pair import padded_target
from engine.attention.native import NativeAttention
from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig
from engine.model.decoders.native_layers import NativeLayers
from engine.model.linear.native_product import NativeProduct
from engine.model.linear.native_quantized import NativeQuantizedProduct
from engine.model.linear.packed_linear import torch_linear_of
from engine.model.linear.weight_store import Storable, empty_in_large_pages
from engine.model.runner.model_runner import ModelRunner

BANDWIDTH_BYTES = 1 << 30
NUM_OPERATORS = 6


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The measured limits of this machine."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class PassKind:
    """One kind of pass: spans of `rows` tokens after `context` tokens, for `streams` sequences at once."""

    name: str
    streams: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The weights that every pass reads and multiplies by; `attention_width` is heads x head size x layers."""

    num_weights: int
    weight_bytes: float
    attention_width: int

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype) -> ModelSize:
        """Read the headers of the weight files: every matrix, but an embedding only if it is the output layer too."""
        config = AutoConfig.from_pretrained(folder)
        num_weights = 0
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a mapping
                    shape = tensors.get_slice(name).get_shape()
                    if len(shape) == 2 and (config.tie_word_embeddings or "embed_tokens" not in name):
                        num_weights += shape[0] * shape[1]
        head_size = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        width = config.num_hidden_layers * config.num_attention_heads * head_size
        return cls(num_weights, _packed_bytes() or num_weights * dtype.itemsize, width)


def _packed_bytes() -> int:
    """Return the bytes of all packed products of this process; 0 if torch multiplies."""
    products = [product for product in gc.get_objects() if issubclass(type(product), Storable)]
    tensors = {
        value.data_ptr(): value for product in products for value in vars(product).values() if torch.is_tensor(value)
    }
    return sum(tensor.nbytes for tensor in tensors.values())


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes and operations of a pass."""

    num_bytes: float
    num_flops: float

    def floor_s(self, ceiling: Ceiling) -> float:
        return max(self.num_bytes / ceiling.bytes_per_s, self.num_flops / ceiling.flops_per_s)


def main() -> None:
    """Time every kind of pass and print it with its floor."""
    args = _parse_args()
    torch.set_num_threads(args.threads)
    folder = args.model or padded_target()
    runner = _runner(folder, args)
    size = ModelSize.of(folder, getattr(torch, args.dtype))
    dtype = getattr(torch, args.dtype)
    print(f"{args.threads} threads, {args.dtype}")
    print(
        f"{'pass':34} {'MB':>8} {'GFLOP':>8} {'GB/s':>6} {'TFLOP/s':>8} {'floor ms':>9} {'ms':>8} {'over':>6}   "
        "where it goes"
    )
    for kind in _kinds(args.context):
        _report(kind, runner, size, measure_ceiling(dtype), args.repeats)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; the padded fixture if absent")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=1024, help="tokens in the cache of each sequence")
    parser.add_argument("--repeats", type=int, default=9, help="passes; the table quotes medians")
    return parser.parse_args()


def _kinds(context: int) -> list[PassKind]:
    return [
        PassKind("plain, 1 stream", 1, 1, context),
        PassKind("verify K=4, 1 stream", 1, 5, context),
        PassKind("plain, 8 streams", 8, 1, context),
        PassKind("verify K=4, 8 streams", 8, 5, context),
        PassKind("plain, 16 streams", 16, 1, context),
        PassKind("prefill, 512 tokens of a prompt", 1, 512, 0),
        PassKind("prefill, 512 tokens at 7,500", 1, 512, 7500),
        PassKind("plain, 1 stream at 8,000", 1, 1, 8000),
    ]


def _runner(folder: Path, args: argparse.Namespace) -> ModelRunner:
    model = ModelConfig(str(folder), args.dtype, quantization=args.quantization, num_threads=args.threads)
    num_blocks = max(kind.streams * (kind.context + kind.rows) for kind in _kinds(args.context)) // 16 + 32
    return ModelRunner(model, CacheConfig(num_blocks=num_blocks))


def measure_ceiling(dtype: torch.dtype) -> Ceiling:
    """Time `sum` over a gigabyte in pages like the weights', and a product in `dtype` that arithmetic limits."""
    memory = empty_in_large_pages((BANDWIDTH_BYTES // 4,), torch.float32).fill_(1)
    weight = torch.randn(4096, 4096, dtype=dtype)
    multiply, rows = torch_linear_of(weight, None), torch.randn(1024, 4096, dtype=dtype)
    read_s = min(_seconds(lambda: memory.sum()) for _ in range(5))
    product_s = min(_seconds(lambda: multiply(rows)) for _ in range(5))
    return Ceiling(BANDWIDTH_BYTES / read_s, 2 * weight.numel() * len(rows) / product_s)


def _report(kind: PassKind, runner: ModelRunner, size: ModelSize, ceiling: Ceiling, repeats: int) -> None:
    spans = _spans(kind, runner)
    seconds = _median_s(lambda: runner.forward(spans), repeats)
    cost = _cost(kind, runner, size)
    floor_s = cost.floor_s(ceiling)
    operators = _operators(lambda: runner.forward(spans))
    print(
        f"{kind.name:34} {cost.num_bytes / 1e6:8.0f} {cost.num_flops / 1e9:8.1f} {ceiling.bytes_per_s / 1e9:6.1f} "
        f"{ceiling.flops_per_s / 1e12:8.2f} {1e3 * floor_s:9.1f} {1e3 * seconds:8.1f} {seconds / floor_s:6.2f}   "
        f"{operators}",
        flush=True,
    )


def _spans(kind: PassKind, runner: ModelRunner) -> list[Span]:
    blocks_each = -(-(kind.context + kind.rows) // runner.block_size)
    num_logits = kind.rows if kind.rows <= 16 else 1
    return [
        Span(
            [1 + (7 * row) % 1000 for row in range(kind.rows)],
            kind.context,
            list(range(stream * blocks_each, (stream + 1) * blocks_each)),
            num_logits,
        )
        for stream in range(kind.streams)
    ]


def _cost(kind: PassKind, runner: ModelRunner, model: ModelSize) -> Cost:
    num_rows = kind.streams * kind.rows
    kv_bytes_per_token = runner.bytes_per_block / runner.block_size
    kv_bytes = kind.streams * (kind.context + kind.rows) * kv_bytes_per_token
    # A row of a prefill chunk attends to half of the chunk on average, and to all tokens before it.
    seen = kind.context + (kind.rows if kind.rows <= 16 else kind.rows / 2)
    attention_flops = 4 * num_rows * seen * model.attention_width
    return Cost(model.weight_bytes + kv_bytes, 2 * model.num_weights * num_rows + attention_flops)


def _operators(call: Callable[[], Tensor]) -> str:
    """Return the largest shares of processor time by operator; layers are called kernel by kernel."""
    with (
        patch.object(NativeLayers, "take", return_value=False),
        _recorded(NativeProduct, "__call__", "native product"),
        _recorded(NativeQuantizedProduct, "__call__", "native product"),
        _recorded(NativeAttention, "attend", "native attention"),
        profile(activities=[ProfilerActivity.CPU]) as recorded,
    ):
        call()
    events = recorded.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:NUM_OPERATORS]
    return ", ".join(
        f"{event.key.removeprefix('aten::').removeprefix('mkldnn::')} {event.self_cpu_time_total / total:.0%}"
        for event in largest
    )


def _recorded(owner: type, method: str, name: str) -> AbstractContextManager[object]:
    """Record calls of a kernel that is not an operator of torch as if it were one."""
    inner = getattr(owner, method)

    def call(*args: object) -> object:
        with record_function(name):
            return inner(*args)

    return patch.object(owner, method, call)


def _median_s(call: Callable[[], object], repeats: int) -> float:
    call()
    return statistics.median(_seconds(call) for _ in range(repeats))


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
