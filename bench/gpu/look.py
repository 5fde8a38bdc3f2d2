"""`python -m bench.gpu.look`: the first look at a card, in seven parts that fail alone.

    python -m bench.gpu.look --out results                     on a GPU, two minutes
    python -m bench.gpu.look --device cpu --smoke              the same code on a tiny model, to see that it runs

    syncs      host waits of an engine's steps, and the lines of code that wait
    kernels    the device's time of one pass by kernel, at 1, 5 and 640 rows
    products   every matrix product of a layer at 1 to 640 rows, beside bandwidth and product rate
    sampling   noise and truncation at 1, 128 and 640 rows
    attention  the attention kernel over its compile-time choices, beside torch's own
    fill       host time that lays out one recorded pass
    texts      greedy tokens that are equal with drafts on and off

The model has Llama-3's 1 B shape and the demo target's logits (`models.fixtures.wide_fixture`). Every line is printed
and saved to `--out` at once; what cannot be measured on this device says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bench.gpu.table import NOT_MEASURED
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    ModelConfig,
    ModelDtype,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.model.cuda_graphs.buckets import sized
from engine.model.cuda_graphs.static_batch import StaticBatch
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.text_match.ngram import NgramProposer
from engine.sampling.logits_row import LogitsRow
from engine.sampling.sampler import Sampler
from engine.span import Span
from models.fixtures.wide_fixture import LLAMA_3_1B, LLAMA_3_8B, WideShape, build_wide_fixture
from protos.messages import GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

DEMO = Path(__file__).parents[2] / "models" / "demo"
SMOKE_SHAPE = WideShape(288, 13, 800, 8, 2, 64, 4160)
K = 4
PROMPT = tuple(range(100, 164))
REPEATS = 7
MODES = {
    "greedy": (0, SamplingParams(temperature=0.0, max_tokens=100)),
    "T 0.7": (0, SamplingParams(temperature=0.7, max_tokens=100, seed=1)),
    "T 0.7, top_p 0.9": (0, SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, seed=1)),
    "greedy, K 4": (K, SamplingParams(temperature=0.0, max_tokens=100)),
    "T 0.7, top_p 0.9, K 4": (K, SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, seed=1)),
}


class Look:
    """The model that is looked at, the device, and the lines that were found so far."""

    def __init__(self, device: torch.device, shape: WideShape, work: Path, out: Path, *, is_smoke: bool) -> None:
        """`work` is the folder of the built model, `out` that of the results."""
        self.device = device
        self.shape = shape
        self.is_smoke = is_smoke
        self.row_counts = (1, 5, 40) if is_smoke else (1, 5, 640)
        self._work = work
        self._file = out / "look.json"
        self._lines: list[dict[str, object]] = []

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def folder(self) -> Path:
        """The model, built on the first use."""
        folder = self._work / f"look-{self.shape.hidden_size}-{self.shape.num_layers}"
        if not (folder / "tokenizer.json").exists():
            build_wide_fixture(DEMO / "target", folder, self.shape, self.device, self.dtype)
        return folder

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.has_gpu else torch.float32

    @cached_property
    def model(self) -> ModelConfig:
        kind = GraphKind.AUTO if self.has_gpu else GraphKind.EAGER  # a processor records nothing, but pads
        graphs = GraphConfig(kind, batches=(1, 8) if self.is_smoke else (1, 2, 4, 8, 16, 32, 64, 128))
        dtype = ModelDtype(str(self.dtype).removeprefix("torch."))
        return ModelConfig(str(self.folder), dtype, self.device.type, graphs=graphs)

    def add(self, part: str, **figures: object) -> None:
        """Print a line and save it with those before."""
        print(f"{part:10s} " + "  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        self._lines.append({"part": part, **figures})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._lines, indent=1) + "\n", encoding="utf-8")

    def engine(self, num_drafts: int) -> EngineCore:
        """An engine whose drafts, if any, come from n-grams: no second model, no second process."""
        config = EngineConfig(self.model, CacheConfig(num_blocks=512), speculation=SpeculationConfig(num_drafts))
        proposer: Proposer | None = NgramProposer(min_size=1) if num_drafts else None
        return EngineCore.from_config(config, proposer)

    def seconds(self, call: Callable[[], object]) -> float:
        """The median time of a call, the device's work included."""
        call()
        times = []
        for _ in range(2 if self.is_smoke else REPEATS):
            self.wait()
            began_s = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - began_s)
        return median(times)

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


def look_at_syncs(look: Look) -> None:
    """Host waits per step of each mode, and the lines that cause most of them."""
    if not look.has_gpu:
        look.add("syncs", result=f"{NOT_MEASURED}: the device has no host waits to count")
        return
    for name, (num_drafts, sampling) in MODES.items():
        engine = look.engine(num_drafts)
        for index in range(8):
            engine.add(GenerateRequest(str(index), (*PROMPT, index), sampling))
        for _ in range(4):
            engine.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            for _ in range(8):
                engine.step()
            torch.cuda.set_sync_debug_mode("default")
        places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in caught)
        look.add("syncs", mode=name, per_step=len(caught) / 8, places=dict(places.most_common(6)))
        engine.close()


def look_at_kernels(look: Look) -> None:
    """The device's time of one pass, by kernel."""
    runner = _runner(look)
    activity = ProfilerActivity.CUDA if look.has_gpu else ProfilerActivity.CPU
    for num_rows in look.row_counts:
        spans = _spans(runner, num_rows)
        runner.forward(spans)
        look.wait()
        with profile(activities=[activity]) as profiled:
            runner.forward(spans)
            look.wait()
        kernels = sorted(profiled.key_averages(), key=_device_us, reverse=True)
        total_us = sum(map(_device_us, kernels))
        top = {each.key[:60]: f"{each.count} x, {_device_us(each):.0f} us" for each in kernels[:12]}
        look.add(
            "kernels", rows=num_rows, total_us=round(total_us), launches=sum(each.count for each in kernels), top=top
        )


def look_at_products(look: Look) -> None:
    """Every product of a layer, and of the head, in the larger model's shapes."""
    shape = SMOKE_SHAPE if look.is_smoke else LLAMA_3_8B
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    products = {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, width),
        "output": (width, heads),
        "gate and up": (2 * shape.mlp_size, width),
        "down": (width, shape.mlp_size),
        "head": (shape.vocab_size, width),
    }
    for name, (num_outputs, num_inputs) in products.items():
        weight = torch.randn(num_outputs, num_inputs, dtype=look.dtype, device=look.device)
        for num_rows in (1, 5, 40, 128, 640):
            rows = torch.randn(num_rows, num_inputs, dtype=look.dtype, device=look.device)
            seconds = look.seconds(partial(F.linear, rows, weight))
            look.add(
                "products",
                product=name,
                rows=num_rows,
                us=round(1e6 * seconds, 1),
                gigabytes_per_s=round(weight.nbytes / seconds / 1e9),
                teraflops=round(2 * num_rows * weight.numel() / seconds / 1e12, 1),
            )


def look_at_sampling(look: Look) -> None:
    """The sampler over a large vocabulary: each mode's truncation and noise."""
    vocab_size = 4160 if look.is_smoke else 128_256
    sampler = Sampler()
    for num_rows in (1, 128, 640):
        logits = torch.randn(num_rows, vocab_size, device=look.device)
        for name in ("greedy", "T 0.7", "T 0.7, top_p 0.9"):
            rows = [LogitsRow(MODES[name][1], [1] * (10 + index), 5) for index in range(num_rows)]

            def sample(logits: Tensor = logits, rows: Seq[LogitsRow] = rows) -> Tensor:
                return sampler.sample(sampler.apply_processors(logits, rows), rows)

            look.add("sampling", mode=name, rows=num_rows, us=round(1e6 * look.seconds(sample)))


def look_at_attention(look: Look) -> None:
    """One launch over the larger model's heads for each tiling, beside torch's attention on contiguous keys."""
    if not look.has_gpu:
        look.add("attention", result=f"{NOT_MEASURED}: the kernel's tiling is the GPU's")
        return
    # Not at the top: it needs Triton, which a machine without a GPU may lack.
    from bench.gpu.attention_sweep import sweep, torch_attention_s

    for context in (1024, 8192):
        look.add(
            "attention", context=context, torch_us=round(1e6 * torch_attention_s(look.seconds, LLAMA_3_8B, context), 1)
        )
        for stages, block_n, programs in product((2, 3, 4, 5, 6, 7), (32, 64, 128), (2, 4, 8)):
            try:
                seconds = sweep(look.seconds, LLAMA_3_8B, context, stages, block_n, programs)
            except Exception as error:  # one choice that does not fit the card costs its own line
                look.add("attention", context=context, stages=stages, block_n=block_n, failed=str(error)[:80])
                break
            us = round(1e6 * seconds, 1)
            look.add("attention", context=context, stages=stages, block_n=block_n, programs=programs, us=us)


def look_at_fill(look: Look) -> None:
    """Host time that lays out a recorded pass, by batch and rows per sequence."""
    runner = _runner(look)
    spent: list[float] = []
    with mock.patch.object(StaticBatch, "fill", _timed(StaticBatch.fill, spent)):
        for num_sequences, rows_each in ((1, 1), (1, K + 1), (8, K + 1), (64, 1), (128, K + 1)):
            spans = _spans(runner, num_sequences * rows_each, rows_each)
            spent.clear()
            for _ in range(10):
                runner.forward(spans)
            result = round(1e6 * median(spent)) if spent else f"{NOT_MEASURED}: no recorded pass took it"
            look.add("fill", sequences=num_sequences, rows_each=rows_each, us=result)


def look_at_texts(look: Look) -> None:
    """Greedy tokens that are equal with drafts and without: in bfloat16 rounding parts them late, a fault soon."""
    texts = []
    for num_drafts in (0, K):
        engine = look.engine(num_drafts)
        for index in range(8):
            engine.add(GenerateRequest(str(index), (*PROMPT[index:], *PROMPT[:index]), MODES["greedy"][1]))
        found: dict[str, list[int]] = {str(index): [] for index in range(8)}
        while engine.has_work:
            for chunk in engine.step():
                found[chunk.request_id] += chunk.token_ids
        texts.append(found)
    plain, drafted = texts
    equal = [_num_equal(plain[name], drafted[name]) for name in plain]
    total = sum(len(tokens) for tokens in plain.values())
    look.add("texts", share_equal=round(sum(equal) / total, 3), shortest=min(equal), tokens=total)


PARTS: dict[str, Callable[[Look], None]] = {
    "syncs": look_at_syncs,
    "kernels": look_at_kernels,
    "products": look_at_products,
    "sampling": look_at_sampling,
    "attention": look_at_attention,
    "fill": look_at_fill,
    "texts": look_at_texts,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the chosen parts; one that fails is named, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few repetitions: proves that it runs")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench-gpu"), help="folder of the results")
    parser.add_argument("--work", type=Path, help="folder of the built model (3 GB); that of the results if absent")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU here: {NOT_MEASURED}")
        return
    device, shape = torch.device(args.device), SMOKE_SHAPE if args.smoke else LLAMA_3_1B
    look = Look(device, shape, args.work or args.out, args.out, is_smoke=args.smoke)
    for name in args.parts:
        began_s = time.monotonic()
        try:
            PARTS[name](look)
        except Exception as error:
            logger.exception("%s failed", name)
            look.add(name, failed=f"{type(error).__name__}: {str(error)[:200]}")
        look.add(name, seconds=round(time.monotonic() - began_s, 1))


def _runner(look: Look) -> ModelRunner:
    limits, speculation = SchedulerConfig(max_num_sequences=128), SpeculationConfig(K)
    model = replace(look.model, graphs=sized(look.model.graphs, limits, speculation))
    return ModelRunner(model, CacheConfig(num_blocks=128 * 8))


def _spans(runner: ModelRunner, num_rows: int, rows_each: int | None = None) -> list[Span]:
    """Passes of verification behind 64 tokens each: `rows_each` rows, K + 1 or all, per sequence."""
    each = rows_each or min(num_rows, K + 1)
    blocks_each = -(-(64 + each) // runner.block_size)
    return [
        Span([1] * each, 64, list(range(index * blocks_each, (index + 1) * blocks_each)), each)
        for index in range(num_rows // each)
    ]


def _device_us(event: object) -> float:
    time_us = getattr(event, "self_device_time_total", 0.0)
    return float(time_us or getattr(event, "self_cpu_time_total", 0.0))


def _timed(call: Callable[..., None], spent: list[float]) -> Callable[..., None]:
    def timed(*arguments: object) -> None:
        began_s = time.perf_counter()
        call(*arguments)
        spent.append(time.perf_counter() - began_s)

    return timed


def _num_equal(left: Seq[int], right: Seq[int]) -> int:
    """Tokens before the first that differ."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


if __name__ == "__main__":
    main()
