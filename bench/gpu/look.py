"""`python -m bench.gpu.look`: a first look at a card, in parts that fail alone.

    python -m bench.gpu.look --out results                     on a GPU, within four minutes
    python -m bench.gpu.look --device cpu --smoke              the same code on a tiny model, to see that it runs

    texts          tokens with drafts against tokens without, and how near the first difference is to a tie
    syncs          host waits of an engine's steps, and the lines of code that wait
    kernels        the device's time of one pass by kernel, at 1, 5 and 640 rows
    sampling       noise and truncation at 1, 128 and 640 rows
    fill           host time that lays out one recorded pass
    products       every matrix product of a layer at 1 to 640 rows, with bandwidth and product rate, in bfloat16 and in
                   few bits, these also in other tiles
    attention      the attention kernel over six tilings, next to torch's own
    deterministic  the same texts by a deterministic model, where not one token may differ

One engine, with Llama-3's 1 B shape and the demo target's logits (`models.fixtures.wide_fixture`), serves all parts but
the last. Every line is printed and saved to `--out` at once; what cannot be measured on this device is named.
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
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bench.gpu.table import NOT_MEASURED
from engine.batch.span import Span
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
from engine.engine_core.loading import load_engine
from engine.model.checkpoint.unread_weight import QuantizedWeight
from engine.model.cuda_graphs.graph_runner import ForwardOutput, GraphRecorder
from engine.model.cuda_graphs.static_batch import StaticBatch
from engine.model.linear.quantized_linear import to_int4
from engine.proposer.text_match.ngram import NgramProposer
from engine.sampling.logits_row import LogitsRow
from engine.sampling.sampler import Sampler
from models.fixtures.wide_fixture import LLAMA_3_1B, LLAMA_3_8B, WideShape, build_wide_fixture
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams, TokenChunk

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEMO = Path(__file__).parents[2] / "models" / "demo"
SMOKE_SHAPE = WideShape(288, 13, 800, 8, 2, 64, 4160)
K = 4
NUM_SEQUENCES = 8
PROMPT = tuple(range(100, 164))
REPEATS = 7
CALLS = 8  # timed at once
CACHE_BYTES = 200 << 20  # several times a device's cache
MODES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=100),
    "T 0.7": SamplingParams(temperature=0.7, max_tokens=100, seed=1),
    "T 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, seed=1),
}
DRAFTED = (False, True)


class Look:
    """The model that is looked at, the device, and the lines that were found so far."""

    def __init__(self, device: torch.device, shape: WideShape, work: Path, out: Path, *, is_smoke: bool) -> None:
        """`work` is the folder of the built model, `out` the file of the results."""
        self.device = device
        self.shape = shape
        self.is_smoke = is_smoke
        self.row_counts = (1, 5, 40) if is_smoke else (1, 5, 640)
        self._work = work
        self._file = out
        self._lines: list[dict[str, object]] = []

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.has_gpu else torch.float32

    @cached_property
    def folder(self) -> Path:
        """The model, built on the first use."""
        folder = self._work / f"look-{self.shape.hidden_size}-{self.shape.num_layers}"
        if not (folder / "tokenizer.json").exists():
            build_wide_fixture(DEMO / "target", folder, self.shape, self.device, self.dtype)
        return folder

    @cached_property
    def engine(self) -> EngineCore:
        """The engine of all parts but `deterministic`: the model is loaded and recorded once."""
        return self.load_engine(is_deterministic=False)

    def load_engine(self, *, is_deterministic: bool) -> EngineCore:
        """Load an engine whose drafts come from n-grams: no second model, no second process."""
        kind = GraphKind.AUTO if self.has_gpu else GraphKind.EAGER  # a processor records nothing, but pads
        batches = (1, NUM_SEQUENCES) if self.is_smoke else (1, 2, 4, 8, 16, 32, 64, 128)
        dtype = ModelDtype(str(self.dtype).removeprefix("torch."))
        graphs = GraphConfig(kind, batches=batches)
        model = ModelConfig(str(self.folder), dtype, self.device.type, graphs=graphs, deterministic=is_deterministic)
        limits = SchedulerConfig(max_num_sequences=max(batches))
        cache = CacheConfig(num_blocks=1024)
        config = EngineConfig(model, cache, scheduler=limits, speculation=SpeculationConfig(K))
        return load_engine(config, NgramProposer(min_size=1))

    def add(self, part: str, **figures: object) -> None:
        """Print a line and save it with those before."""
        print(f"{part:13s} " + "  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        self._lines.append({"part": part, **figures})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._lines, indent=1) + "\n", encoding="utf-8")

    def seconds(self, call: Callable[[], object]) -> float:
        """The median time of a call among calls one after the other, the host's and the device's work included."""
        call()
        times = []
        for _ in range(2 if self.is_smoke else REPEATS):
            self.wait()
            began_s = time.perf_counter()
            for _ in range(CALLS):
                call()
            self.wait()
            times.append((time.perf_counter() - began_s) / CALLS)
        return median(times)

    def device_seconds(self, *calls: Callable[[], Tensor]) -> float:
        """The median time of a call, without the host's: the calls are recorded and replayed.

        Several calls with their own weights do not find them in the device's cache.
        """
        if not self.has_gpu:
            return self.seconds(calls[0])
        calls = calls * -(-CALLS // len(calls))

        def compute() -> ForwardOutput:
            return ForwardOutput([call() for call in calls][-1])

        return self.seconds(GraphRecorder()(compute)) / len(calls)

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


def look_at_texts(look: Look) -> None:
    """Compare tokens with drafts and without, in bfloat16, where rounding may part texts at a near-tie."""
    _compare_texts(look, look.engine, "texts")


def look_at_deterministic(look: Look) -> None:
    """Compare the texts of a deterministic model, which has the same bits in any pass."""
    engine = look.load_engine(is_deterministic=True)
    _compare_texts(look, engine, "deterministic")
    engine.close()


def _compare_texts(look: Look, engine: EngineCore, part: str) -> None:
    for name, sampling in MODES.items():
        plain, drafted = (_texts(engine, f"{part} {name}", sampling, is_drafted=each) for each in DRAFTED)
        equal = list(map(_num_equal, plain, drafted))
        differ = [index for index, place in enumerate(equal) if place < len(plain[index])]
        look.add(part, mode=name, tokens=sum(map(len, plain)), equal=sum(equal), sequences_that_differ=len(differ))
        if differ and sampling.is_greedy:
            # A difference at a near-tie is rounding; one with a gap of 0.1 and more is a fault.
            gaps = [_gap(engine, (*_prompt(index), *plain[index][: equal[index]])) for index in differ]
            look.add(part, mode=name, largest_gap=round(max(gaps), 4))


def _texts(engine: EngineCore, salt: str, sampling: SamplingParams, *, is_drafted: bool) -> list[list[int]]:
    """Return the tokens of each sequence; a salt per call, so that both kinds compute their prompts."""
    speculation = SpeculationParams(enabled=is_drafted)
    for index in range(NUM_SEQUENCES):
        request = GenerateRequest(str(index), _prompt(index), sampling, speculation, cache_salt=f"{salt} {is_drafted}")
        engine.add(request)
    found: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
    while engine.has_work:
        for chunk in engine.step():
            found[int(chunk.request_id)] += chunk.token_ids
    return found


def _gap(engine: EngineCore, token_ids: Seq[int]) -> float:
    """Return the difference of the two largest log-probabilities after these tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, num_logprobs=2)
    engine.add(GenerateRequest("gap", tuple(token_ids), sampling, SpeculationParams(enabled=False)))
    chunks: list[TokenChunk] = []
    while engine.has_work:
        chunks += engine.step()
    best = next(chunk for chunk in chunks if chunk.logprobs).logprobs[0].top
    return abs(best[0][1] - best[1][1])


def _prompt(index: int) -> tuple[int, ...]:
    return (*PROMPT[index:], *PROMPT[:index])


def look_at_syncs(look: Look) -> None:
    """Count the host waits per step of each mode, and the lines that cause most of them."""
    if not look.has_gpu:
        look.add("syncs", result=f"{NOT_MEASURED}: the device has no host waits to count")
        return
    for is_drafted in DRAFTED:
        for name, sampling in MODES.items():
            _count_syncs(look, name, sampling, is_drafted=is_drafted)


def _count_syncs(look: Look, name: str, sampling: SamplingParams, *, is_drafted: bool) -> None:
    engine, num_steps = look.engine, 8
    for index in range(NUM_SEQUENCES):
        engine.add(GenerateRequest(str(index), _prompt(index), sampling, SpeculationParams(enabled=is_drafted)))
    for _ in range(4):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(num_steps):
            engine.step()
        torch.cuda.set_sync_debug_mode("default")
    for index in range(NUM_SEQUENCES):
        engine.abort(str(index))
    while engine.has_work:
        engine.step()
    places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in caught)
    per_step = len(caught) / num_steps
    look.add("syncs", mode=name, drafts=is_drafted, per_step=per_step, places=dict(places.most_common(6)))


def look_at_kernels(look: Look) -> None:
    """The device's time of one pass, by kernel."""
    runner = look.engine.runner
    activity = ProfilerActivity.CUDA if look.has_gpu else ProfilerActivity.CPU
    for num_rows in look.row_counts:
        spans = _spans(look.engine.blocks.block_size, num_rows)
        runner.forward(spans)
        look.wait()
        with profile(activities=[activity]) as profiled:
            runner.forward(spans)
            look.wait()
        found = [each for each in profiled.key_averages() if not each.key.startswith(("cu", "Activity"))]
        kernels = sorted(found, key=_device_us, reverse=True)
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
        copies = 1 if look.is_smoke else -(-2 * CACHE_BYTES // (num_outputs * num_inputs))  # of 4 bits
        weights = [torch.randn(num_outputs, num_inputs, dtype=look.dtype, device=look.device) for _ in range(copies)]
        for form, (multiply, num_bytes) in _forms(look, weights).items():
            for num_rows in (1, 5, 40, 128, 640):
                rows = torch.randn(num_rows, num_inputs, dtype=look.dtype, device=look.device)
                seconds = look.device_seconds(*(partial(each, rows) for each in multiply))
                look.add(
                    "products",
                    product=name,
                    form=form,
                    rows=num_rows,
                    us=round(1e6 * seconds, 1),
                    gigabytes_per_s=round(num_bytes / seconds / 1e9),
                    teraflops=round(2 * num_rows * num_outputs * num_inputs / seconds / 1e12, 1),
                )


def _forms(look: Look, weights: Seq[Tensor]) -> dict[str, tuple[list[Callable[[Tensor], Tensor]], int]]:
    """Return products by `weights` in each form, and the bytes of one; few bits also in other tiles of few rows."""
    forms: dict[str, tuple[list[Callable[[Tensor], Tensor]], int]] = {
        "bfloat16": ([partial(F.linear, weight=weight) for weight in weights], weights[0].nbytes)
    }
    if not look.has_gpu:
        return forms
    # Not at the top: it needs Triton, which a machine without a GPU may lack.
    from engine.model.linear.triton_few_bits import FewBitsProduct
    from engine.model.linear.triton_product import TileSize

    ones = torch.ones(len(weights[0]), 1, device=look.device)
    stored = {
        "float8": [QuantizedWeight(weight.to(torch.float8_e4m3fn), ones) for weight in weights],
        "int4": [_of_128(weight) for weight in weights],
        "our int4": [to_int4(weight) for weight in weights],
    }
    tiles = {"": None, " 16 outputs": (16, 6, 4), " 64 outputs": (64, 4, 4), " 8 warps": (32, 5, 8)}
    for form, parts in stored.items():
        for suffix, tile in tiles.items() if form != "our int4" else [("", None)]:
            products = [FewBitsProduct(part, None, look.dtype, is_deterministic=False) for part in parts]
            for product in products if tile else ():
                num_outputs, num_stages, num_warps = tile or (32, 5, 4)
                product._low = TileSize(16, num_outputs, product._low.num_inputs, num_warps, num_stages)
            forms[form + suffix] = (list(products), products[0].nbytes)
    return forms


def _of_128(weight: Tensor) -> QuantizedWeight:
    """Return numbers from 0 to 15 with a zero of 8 and a scale for 128 inputs, as GPTQ's are."""
    groups = weight.float().unflatten(1, (-1, 128))
    scales = groups.abs().amax(dim=-1) / 7
    numbers = (groups / scales[..., None]).round_().add_(8).to(torch.int8).flatten(1)
    return QuantizedWeight(numbers, scales.half(), zeros=torch.full_like(scales, 8))


def look_at_sampling(look: Look) -> None:
    """The sampler over a large vocabulary: each mode's truncation and noise."""
    vocab_size = 4160 if look.is_smoke else 128_256
    sampler = Sampler()
    for num_rows in (1, 128, 640):
        logits = 3 * torch.randn(num_rows, vocab_size, device=look.device)  # about as wide as a model's
        for name in ("greedy", "T 0.7", "T 0.7, top_p 0.9"):
            rows = [LogitsRow(MODES[name], [1] * (10 + index), 5) for index in range(num_rows)]

            draw = partial(sampler.draw, logits, rows)
            us = round(1e6 * look.seconds(draw))
            look.add("sampling", mode=name, rows=num_rows, us=us, device_us=_device_us_of(look, draw))


def _device_us_of(look: Look, call: Callable[[], object]) -> dict[str, int] | str:
    """The device's time of one call, by kernel."""
    if not look.has_gpu:
        return NOT_MEASURED
    look.wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        look.wait()
    kernels = [each for each in profiled.key_averages() if not each.key.startswith(("cu", "Activity"))]
    return {each.key[:40]: round(_device_us(each)) for each in sorted(kernels, key=_device_us, reverse=True)}


def look_at_attention(look: Look) -> None:
    """Time one launch over the larger model's heads for each tiling, next to torch's attention on contiguous keys."""
    if not look.has_gpu:
        look.add("attention", result=f"{NOT_MEASURED}: the kernel's tiling is the GPU's")
        return
    # Not at the top: it needs Triton, which a machine without a GPU may lack.
    from bench.gpu.attention_sweep import TILINGS, sweep, torch_attention_s

    for context in (1024, 8192):
        for rows, tilings in TILINGS.items():
            torch_us = round(1e6 * torch_attention_s(look.device_seconds, LLAMA_3_8B, context, rows), 1)
            look.add("attention", context=context, rows=rows, torch_us=torch_us)
            for tiling in tilings:
                _time_tiling(
                    look, context, rows, partial(sweep, look.device_seconds, LLAMA_3_8B, context, rows, tiling)
                )


def _time_tiling(look: Look, context: int, rows: int, sweep: partial[float]) -> None:
    tiling = str(sweep.args[-1])
    for programs in (3, 4):
        try:
            us = round(1e6 * sweep(programs), 1)
        except Exception as error:  # one choice that does not fit the card costs its own line
            look.add("attention", context=context, rows=rows, tiling=tiling, failed=str(error)[:80])
            return
        look.add("attention", context=context, rows=rows, tiling=tiling, programs=programs, us=us)


def look_at_fill(look: Look) -> None:
    """Host time that lays out a recorded pass, by batch and rows per sequence."""
    runner = look.engine.runner
    spent: list[float] = []
    with mock.patch.object(StaticBatch, "fill", _timed(StaticBatch.fill, spent)):
        cases = ((1, 1), (1, K + 1), (8, K + 1), (64, 1), (128, K + 1))
        for num_sequences, rows_each in cases[:3] if look.is_smoke else cases:
            spans = _spans(look.engine.blocks.block_size, num_sequences * rows_each, rows_each)
            spent.clear()
            for _ in range(10):
                runner.forward(spans)
            result = round(1e6 * median(spent)) if spent else f"{NOT_MEASURED}: no recorded pass took it"
            look.add("fill", sequences=num_sequences, rows_each=rows_each, us=result)


PARTS: dict[str, Callable[[Look], None]] = {
    "texts": look_at_texts,
    "syncs": look_at_syncs,
    "kernels": look_at_kernels,
    "sampling": look_at_sampling,
    "fill": look_at_fill,
    "products": look_at_products,
    "attention": look_at_attention,
    "deterministic": look_at_deterministic,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the chosen parts; one that fails is named, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few repetitions: proves that it runs")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench-gpu"), help="folder of the results")
    parser.add_argument(
        "--work", type=Path, help="folder of the built model (3 GB); default: the folder of the results"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU here: {NOT_MEASURED}")
        return
    device, shape = torch.device(args.device), SMOKE_SHAPE if args.smoke else LLAMA_3_1B
    look = Look(device, shape, args.work or args.out, args.out / "look.json", is_smoke=args.smoke)
    for name in args.parts:
        began_s = time.monotonic()
        try:
            PARTS[name](look)
        except Exception as error:
            logger.exception("%s failed", name)
            look.add(name, failed=f"{type(error).__name__}: {str(error)[:200]}")
        look.add(name, seconds=round(time.monotonic() - began_s, 1))


def _spans(block_size: int, num_rows: int, rows_each: int | None = None) -> list[Span]:
    """Return verifications after 64 tokens of context each, with `rows_each` rows per sequence, by default K + 1."""
    each = rows_each or min(num_rows, K + 1)
    blocks_each = -(-(64 + each) // block_size)
    return [
        Span([1] * each, 64, list(range(index * blocks_each, (index + 1) * blocks_each)), each)
        for index in range(num_rows // each)
    ]


def _device_us(event: object) -> float:
    time_us = getattr(event, "self_device_time_total", 0.0)
    return float(time_us or getattr(event, "self_cpu_time_total", 0.0))


def _timed(call: Callable[..., T], spent: list[float]) -> Callable[..., T]:
    def timed(*arguments: object) -> T:
        began_s = time.perf_counter()
        result = call(*arguments)
        spent.append(time.perf_counter() - began_s)
        return result

    return timed


def _num_equal(left: Seq[int], right: Seq[int]) -> int:
    """Tokens before the first that differ."""
    pairs = zip(left, right, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


if __name__ == "__main__":
    main()
