"""The router's capacity: lookups, events and decisions on one core, and memory per million blocks.

    python -m bench.routing.index_capacity --workers 32 --prompts 250

Every worker holds its own prompts of 128 blocks, all of which begin with one shared block, as conversations under one
system prompt do. Times are processor time of this process.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from bench.simulator.trace import trace_key
from protos.block_keys import join_keys, split_keys
from protos.cache_delta import CacheDelta
from protos.worker_load import WorkerLoad
from router.routing.load import LoadTable
from router.routing.policy import CostConfig, Policy, rank
from router.routing.prefix_index import PrefixIndex
from router.routing.selector import RouteRequest, Selector

PROMPT_BLOCKS = 128
BLOCK_SIZE = 16
NUM_DECISIONS = 500


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=250, help="per worker")
    options = parser.parse_args()
    bytes_per_block = _bytes_per_block(options.workers, options.prompts)
    print(f"{options.workers} workers x {options.prompts} prompts x {PROMPT_BLOCKS} blocks")
    print(f"memory per million blocks: {bytes_per_block:.0f} MB")
    _print_rates(options.workers, options.prompts)
    print(f"one decision: {_decision_s(options.workers) * 1000:.2f} ms")


def _print_rates(num_workers: int, num_prompts: int) -> None:
    prompts = {f"worker-{worker}": _prompts(worker, num_prompts) for worker in range(num_workers)}
    every = [prompt for own in prompts.values() for prompt in own]
    num_blocks = len(every) * PROMPT_BLOCKS
    index = PrefixIndex()
    store_s = _seconds(lambda: _fill(index, prompts))
    keys = [split_keys(prompt) for prompt in every]
    lookup_s = _seconds(lambda: [index.matches(prompt) for prompt in keys])
    remove_s = _seconds(lambda: _drain(index, prompts))
    print(f"blocks stored: {num_blocks / store_s:,.0f} per second, removed: {num_blocks / remove_s:,.0f} per second")
    print(f"lookups of {PROMPT_BLOCKS} blocks that all match: {len(every) / lookup_s:,.0f} per second")


def _decision_s(num_workers: int) -> float:
    """Mean time of `Selector.select` where workers hold more and less of the prompt."""
    prompt = split_keys(_prompts(0, 1)[0])
    index, loads = PrefixIndex(), LoadTable()
    names = tuple(f"worker-{number}" for number in range(num_workers))
    for number, name in enumerate(names):
        loads.update(WorkerLoad(name, 0, 0.0, 1, 1, number, 100, prefill_tokens_per_s=1000.0))
        held = prompt[: 1 + number % PROMPT_BLOCKS]
        index.apply(name, 0, 0, (CacheDelta(stored=join_keys(held)),))
    selector = Selector(partial(rank, Policy.PREFIX, config=CostConfig()), BLOCK_SIZE, index, loads)
    requests = [RouteRequest(str(n), PROMPT_BLOCKS * BLOCK_SIZE, prompt, seed=n) for n in range(NUM_DECISIONS)]
    return (
        _seconds(lambda: [selector.select(request, names, request.seed * 10.0) for request in requests]) / NUM_DECISIONS
    )


def _bytes_per_block(num_workers: int, num_prompts: int) -> float:
    """Memory of the index and of the keys in it, over the number of distinct blocks."""
    tracemalloc.start()
    index = PrefixIndex()
    _fill(index, {f"worker-{worker}": _prompts(worker, num_prompts) for worker in range(num_workers)})
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return num_bytes / len(index)


def _prompts(worker: int, num_prompts: int) -> list[bytes]:
    """Return the joined keys of each prompt."""
    shared = trace_key("system prompt")
    return [
        join_keys((shared, *(trace_key(worker, prompt, block) for block in range(1, PROMPT_BLOCKS))))
        for prompt in range(num_prompts)
    ]


def _fill(index: PrefixIndex, prompts: dict[str, list[bytes]]) -> None:
    for worker_id, own in prompts.items():
        for sequence, prompt in enumerate(own):
            index.apply(worker_id, 0, sequence, (CacheDelta(stored=prompt),))


def _drain(index: PrefixIndex, prompts: dict[str, list[bytes]]) -> None:
    for worker_id, own in prompts.items():
        for sequence, prompt in enumerate(own, start=len(own)):
            index.apply(worker_id, 0, sequence, (CacheDelta(removed=prompt),))


def _seconds(action: Callable[[], object]) -> float:
    start_s = time.process_time()
    action()
    return time.process_time() - start_s


if __name__ == "__main__":
    main()
