"""`python -m bench.gpu.look`: a first look at a card, in parts that fail alone.

    python -m bench.gpu.look --out results                     on a GPU, within four minutes
    python -m bench.gpu.look --device cpu --smoke              the same code on a tiny model, to see that it runs

    texts          tokens with drafts against tokens without, and how near the first difference is to a tie
    syncs          host waits of an engine's steps, and the lines of code that wait
    kernels        the device's time of one pass by kernel, at 1, 5 and 640 rows
    sampling       noise and truncation at 1, 128 and 640 rows
    fill           host time that lays out one recorded pass
    drafts         chains of drafts by recorded steps, and by steps that the host plans one by one
    products       every matrix product of a layer at 1 to 640 rows, with bandwidth and product rate, in bfloat16 and in
                   few bits, these also in other tiles
    attention      the attention kernel over its tilings, next to each of torch's own
    deterministic  the same texts by a deterministic model, where not one token may differ

One engine, with Llama-3's 1 B shape and the demo target's logits (`bench.wide_fixture`), serves all parts but `drafts`
and the last. Every line is printed and saved to `--out` at once; what cannot be measured on this device is named.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import median
from typing import TypeVar
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.card import DRAFTED, MODES, NUM_SEQUENCES, PROMPT, SMOKE_SHAPE, K, Look
from bench.gpu.draft_parts import look_at_drafts
from bench.gpu.kernel_parts import device_us, look_at_attention, look_at_products, look_at_sampling
from bench.gpu.table import NOT_MEASURED
from bench.wide_fixture import LLAMA_3_1B
from engine.batch.span import Span
from engine.engine_core import EngineCore
from engine.model.cuda_graphs.static_batch import StaticBatch
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams, TokenChunk

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        kernels = sorted(found, key=device_us, reverse=True)
        total_us = sum(map(device_us, kernels))
        top = {each.key[:60]: f"{each.count} x, {device_us(each):.0f} us" for each in kernels[:12]}
        look.add(
            "kernels", rows=num_rows, total_us=round(total_us), launches=sum(each.count for each in kernels), top=top
        )


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
    "drafts": look_at_drafts,
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
