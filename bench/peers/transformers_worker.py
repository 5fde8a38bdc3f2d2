"""Transformers' `generate`, plain and assisted, as a worker (`bench.peers.worker`), so that its memory is its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from bench.contenders.transformers_contender import TransformersContender, load


def main() -> None:
    """Answer one request per line of standard input."""
    args = _parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    target = load(args.target, dtype)
    plain = TransformersContender(target)
    assisted = TransformersContender(target, load(args.draft, dtype), args.num_draft_tokens) if args.draft else plain
    print(json.dumps({}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        run = (assisted if request["is_drafting"] else plain).run(request["prompts"], request["num_tokens"])
        answer = {"outputs": run.outputs, "arrivals": run.arrivals, "seconds": run.seconds}
        print(json.dumps(answer), file=answers)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--num-draft-tokens", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
