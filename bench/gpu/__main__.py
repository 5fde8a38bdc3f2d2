"""`make bench-gpu`: the cost of decoding on this GPU in one table, within ten minutes; without a GPU, a table of gaps.

    python -m bench.gpu --out results            on a GPU
    python -m bench.gpu --device cpu --smoke     the same code on a tiny pair, to see that it runs

An 8 B model (the demo target widened to Llama-3-8B's shape) decodes plainly and with drafts of a 1 B one, at several
batches and contexts; last, plainly again, but not one step behind. Every line is saved to `--out` as soon as it is
there; each section and the whole run have a time limit; at the end of the latter the lines so far are printed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.gpu.floor import DeviceSpeed
from bench.gpu.plan import Plan
from bench.gpu.table import NOT_MEASURED, GpuResults, Missing
from bench.wide_fixture import LLAMA_3_1B, LLAMA_3_8B, WideShape, build_wide_fixture
from engine.config import KVDtype
from engine.kv_cache.pool import kv_name

DEMO = Path(__file__).parents[2] / "models" / "demo"
NEEDED = ("msgspec", "llguidance", "tokenizers", "transformers", "safetensors")
SECTIONS = ("kernel", "plain", "sync", "async", "tree", "waiting")
SMOKE_SHAPE = WideShape(288, 13, 800, 8, 2, 64, 4160)
SMOKE_DRAFT = WideShape(160, 3, 400, 8, 2, 64, 4160)


def main(arguments: list[str] | None = None) -> None:
    """Measure every section in time and print the table."""
    args = _parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    results = GpuResults(args.out / "gpu.json")
    if args.device == "cuda" and not torch.cuda.is_available():
        results.note(device=f"no GPU here: {NOT_MEASURED}")
        print(results.text())
        return
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SystemExit(f"missing here: {', '.join(missing)}; install them, or put them on PYTHONPATH")
    plan = _plan(args)
    with _bounded(plan.total_s, results):
        _measure(plan, results, args.work or args.out)
    print(results.text())


def _parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny pair and few steps: proves that it runs")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench-gpu"), help="folder of the results")
    parser.add_argument(
        "--work", type=Path, help="folder of the built models (20 GB); default: the folder of the results"
    )
    parser.add_argument("--kv-dtype", type=KVDtype, choices=(KVDtype.AUTO, KVDtype.FP8), default=KVDtype.AUTO)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--total-s", type=float, default=560.0, help="after so long the table is printed as it is")
    args = parser.parse_args(arguments)
    if args.device == "cpu" and not args.smoke:
        parser.error("--device cpu is for --smoke: an 8 B model takes hours there")
    if args.device == "cpu" and args.kv_dtype is KVDtype.FP8:
        parser.error("--kv-dtype fp8 is for GPUs: the processor's attention reads no float8")
    return args


def _plan(args: argparse.Namespace) -> Plan:
    sections = tuple(name for name in SECTIONS if name in args.sections)
    device = torch.device(args.device)
    if args.smoke:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shapes = SMOKE_SHAPE, SMOKE_DRAFT
        return Plan(device, dtype, args.kv_dtype, *shapes, (1, 2), (32,), sections, 4, 6, 30.0, 120.0, args.total_s)
    batches, contexts = tuple(args.batches), tuple(args.contexts)
    shapes = LLAMA_3_8B, LLAMA_3_1B
    dtype = torch.bfloat16
    return Plan(device, dtype, args.kv_dtype, *shapes, batches, contexts, sections, 16, 48, 6.0, 100.0, args.total_s)


@contextmanager
def _bounded(seconds: float, results: GpuResults) -> Iterator[None]:
    """Print the lines so far and end the process once the time is up, whatever hangs."""

    def give_up() -> None:
        results.add(Missing("all", "the rest", f"not finished after {seconds:.0f} s"))
        print(results.text(), flush=True)
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(0)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


def _measure(plan: Plan, results: GpuResults, work: Path) -> None:
    speed, cost = _speed(plan), plan.target_cost
    name = torch.cuda.get_device_name() if plan.device.type == "cuda" else "processor, smoke"
    results.note(
        device=name,
        torch=torch.__version__,
        bandwidth=f"{speed.bytes_per_s / 1e9:,.0f} GB/s measured",
        products=f"{speed.flops_per_s / 1e12:,.1f} TFLOP/s measured, bfloat16" if plan.device.type == "cuda" else "-",
        target=f"{cost.num_weights / 1e9:.2f} B weights in products, {plan.dtype}",
        target_kv=kv_name(plan.kv_kind, plan.dtype),
    )
    if "kernel" in plan.sections and plan.device.type == "cuda":
        results.attempt("kernel", "the rest", partial(_measure_kernel, plan, results, speed))
    folders = _build(plan, work)
    results.attempt("decoding", "the rest", partial(_measure_decoding, plan, results, speed, folders))


def _speed(plan: Plan) -> DeviceSpeed:
    if plan.device.type == "cuda":
        # Not at the top: it needs Triton, which a machine without a GPU may lack.
        from bench.gpu.kernel import measure_speed

        return measure_speed()
    memory = torch.ones(1 << 24)
    began_s = time.perf_counter()
    memory.sum()
    return DeviceSpeed(4 * len(memory) / (time.perf_counter() - began_s), 1e12)


def _measure_kernel(plan: Plan, results: GpuResults, speed: DeviceSpeed) -> None:
    from bench.gpu.kernel import measure_kernel

    measure_kernel(plan, results, speed)


def _measure_decoding(plan: Plan, results: GpuResults, speed: DeviceSpeed, folders: tuple[Path, Path]) -> None:
    # Not at the top: its imports may be missing, and the table must report that.
    from bench.gpu.decoding import measure_decoding

    measure_decoding(plan, results, speed, folders)


def _build(plan: Plan, work: Path) -> tuple[Path, Path]:
    """Folders of target and draft, built on the device unless they are there."""
    folders = []
    for role, shape in (("target", plan.target), ("draft", plan.draft)):
        folder = work / f"wide-{role}-{shape.hidden_size}-{shape.num_layers}-{str(plan.dtype).removeprefix('torch.')}"
        if not (folder / "tokenizer.json").exists():
            build_wide_fixture(DEMO / role, folder, shape, plan.device, plan.dtype)
        folders.append(folder)
    if plan.device.type == "cuda":
        gc.collect()  # the models built here, before the pool is sized by the free memory
        torch.cuda.empty_cache()
    return folders[0], folders[1]


if __name__ == "__main__":
    main()
