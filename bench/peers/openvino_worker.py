"""OpenVINO GenAI's continuous batching as a worker (`bench.peers.libraries`), in OpenVINO's environment.

python openvino_worker.py TARGET --draft DRAFT --precision bf16 --threads 2
"""

import argparse
import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 1


def main() -> None:
    """Answer one request per line of standard input."""
    args = _parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to standard output too
    pipeline = _pipeline(args)
    print(json.dumps({"version": openvino_genai.get_version()}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        config = _generation(request["num_tokens"], request["setting"])
        print(json.dumps(_run(pipeline, request["prompts"], config)), file=answers)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--precision", choices=("bf16", "f32"), required=True)
    parser.add_argument("--kv-precision", choices=("bf16", "f32", "u8"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt-lookup", action="store_true")
    parser.add_argument("--max-streams", type=int, required=True)
    return parser.parse_args()


def _pipeline(args: argparse.Namespace) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = args.max_streams
    scheduler.cache_size = CACHE_GIB
    properties = {
        "INFERENCE_NUM_THREADS": args.threads,
        "INFERENCE_PRECISION_HINT": args.precision,
        "KV_CACHE_PRECISION": args.kv_precision,
    }
    extra = {}
    if args.prompt_lookup:
        extra["prompt_lookup"] = True
    if args.draft:
        extra["draft_model"] = openvino_genai.draft_model(args.draft, "CPU", scheduler_config=scheduler, **properties)
    tokenizer = openvino_genai.Tokenizer(args.target)
    return openvino_genai.ContinuousBatchingPipeline(args.target, tokenizer, scheduler, "CPU", **properties, **extra)


def _generation(num_tokens: int, setting: dict[str, int]) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    for name, value in setting.items():
        setattr(config, name, value)
    return config


def _run(pipeline: Any, prompts: list[list[int]], config: Any) -> dict[str, Any]:
    outputs: list[list[int]] = [[] for _ in prompts]
    arrivals: list[list[float]] = [[] for _ in prompts]
    began = time.perf_counter()
    handles = [
        pipeline.add_request(index, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        for index, prompt in enumerate(prompts)
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        seconds = time.perf_counter() - began
        for index, handle in enumerate(handles):
            token_ids = _new_tokens(handle)
            if token_ids:
                outputs[index].extend(token_ids)
                arrivals[index].append(seconds)
    return {"outputs": outputs, "arrivals": arrivals, "seconds": time.perf_counter() - began}


def _new_tokens(handle: Any) -> list[int]:
    token_ids: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            token_ids.extend(output.generated_ids)
    return token_ids


if __name__ == "__main__":
    main()
