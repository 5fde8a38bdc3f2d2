"""The planner of drafts against plain decoding and fixed lengths, over HTTP and in turn.

    python -m bench.served.planner --target .cache/models/smollm2-135m-instruct --quantization int4 --draft suffix \
        --texts spec_bench_question.jsonl --streams 1 8 --rounds 6

Two servers without Ray: one plans each pass, the other has fixed lengths (`speculation.adaptive: false`). Only one of
them works at a time. Every run has a `cache_salt` of its own, so no run finds the texts of another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from bench.contenders.contender import ContenderRun, Prompts
from bench.contenders.event_streams import Body, run_streams
from bench.contenders.prompts import held_out_prompts, recorded_prompts
from bench.served.application import ServedApplication

PORT = 8140  # of the first server; the second has the next one
PLAIN, PLANNER = "plain", "planner"


@dataclass(frozen=True, slots=True)
class Row:
    """The speed of one way to draft over plain decoding of the same round: the median, the lowest, the highest."""

    text: str
    temperature: float
    num_streams: int
    name: str
    tokens_per_second: float  # median
    ratios: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Way:
    """A server, and the `speculation` field of its requests."""

    name: str
    url: str
    speculation: Body


class Runner:
    """Runs prompts at once through one of the ways; `salts` numbers the runs."""

    def __init__(self, num_tokens: int, temperature: float) -> None:
        self._num_tokens, self._temperature = num_tokens, temperature
        self._salts = count()

    def speed(self, way: Way, prompts: Prompts) -> float:
        """Return tokens per second of all streams together, prefill included."""
        salt = f"{way.name} {next(self._salts)}"
        fields = {
            "model": "bench",
            "max_tokens": self._num_tokens,
            "temperature": self._temperature,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
            "speculation": way.speculation,
        }
        bodies = [{**fields, "prompt": prompt, "seed": index} for index, prompt in enumerate(prompts)]
        streams = run_streams(f"{way.url}/v1/completions", bodies, 600.0)
        run = ContenderRun.of_streams(
            streams,
            lambda event: [token for each in event.data.get("choices", ()) for token in each["token_ids"] or ()],
        )
        return run.tokens_per_second


def main() -> None:
    """Start both servers, race all ways and print the rows."""
    args = _parse_args()
    rows = []
    with ExitStack() as stack:
        planned, fixed = (_start(args, stack, is_adaptive=flag) for flag in (True, False))
        ways = [Way(PLAIN, planned, {"enabled": False}), Way(PLANNER, planned, {})]
        ways += [Way(f"K = {length}", fixed, {"num_tokens": length}) for length in args.fixed]
        for temperature in args.temperatures:
            for text, num_streams in ((text, number) for text in args.texts for number in args.streams):
                for row in _race(ways, args, text, num_streams, temperature):
                    low, high = row.ratios[1:]
                    print(
                        f"{row.text}, T = {row.temperature}, {row.num_streams} streams, {row.name}: "
                        f"{row.tokens_per_second:.1f} tokens/s, {row.ratios[0]:.3f} ({low:.2f} to {high:.2f}) of plain",
                        flush=True,
                    )
                    rows.append(row)
                if args.json is not None:
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _race(ways: Seq[Way], args: argparse.Namespace, text: str, num_streams: int, temperature: float) -> Iterator[Row]:
    prompts = _prompts(args.target, text, num_streams * (args.rounds + args.warm))
    parts = [prompts[start : start + num_streams] for start in range(0, len(prompts), num_streams)]
    runner = Runner(args.tokens, temperature)
    for part in parts[args.rounds :]:  # the planner learns from other texts of the same kind
        runner.speed(ways[1], part)
    runner.speed(ways[-1], parts[-1])
    speeds: dict[str, list[float]] = {way.name: [] for way in ways}
    for index, part in enumerate(parts[: args.rounds]):
        for way in [*ways[index % len(ways) :], *ways[: index % len(ways)]]:
            speeds[way.name].append(runner.speed(way, part))
    for way in ways:
        own = speeds[way.name]
        ratios = [speed / plain for speed, plain in zip(own, speeds[PLAIN], strict=True)]
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        yield Row(text, temperature, num_streams, way.name, statistics.median(own), spread)


def _prompts(target: Path, text: str, num_prompts: int) -> Prompts:
    """Return held-out Python for `code`, else the texts of a file; few texts are repeated."""
    if text == "code":
        return held_out_prompts(target, num_prompts)
    for number in (num_prompts, num_prompts // 2, num_prompts // 4):
        try:
            found = recorded_prompts(target, Path(text), number, 64)
        except ValueError:
            continue
        return (found * 4)[:num_prompts]
    raise SystemExit(f"{text} has too few texts for {num_prompts} prompts; lower --streams or --rounds")


def _start(args: argparse.Namespace, stack: ExitStack, *, is_adaptive: bool) -> str:
    """Start a server and return its address."""
    port = PORT + (not is_adaptive)
    deploy: dict[str, Any] = yaml.safe_load(Path("deploy.yaml").read_text(encoding="utf-8"))
    deploy["http_options"]["port"] = port
    deploy.pop("grpc_options")
    target = {"path": str(args.target.resolve()), "dtype": args.dtype, "quantization": args.quantization}
    draft: Body = {"kind": args.draft}
    if args.draft not in ("suffix", "self", "ngram"):
        draft = {"kind": "model", "path": str(Path(args.draft).resolve()), "dtype": args.dtype}
    deploy["applications"][0]["args"] |= {
        "model_id": "bench",
        "target": target | {"num_threads": args.threads},
        "draft": draft,
        "speculation": {"num_tokens": 4, "max_num_tokens": 8, "adaptive": is_adaptive},
        "cache": {"memory_gib": 1.0},
        "scheduler": {"max_num_sequences": max(args.streams), "max_stall_passes": None},
    }
    path = Path(f".cache/planner/{port}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(deploy), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    application = stack.enter_context(closing(ServedApplication(path, url, options=("--no-ray",))))
    application.wait_until_ready()
    return url


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/demo/target"), help="folder of the target")
    parser.add_argument("--draft", default="models/demo/draft", help="suffix, ngram, self, or a model's folder")
    parser.add_argument("--dtype", default="auto", help="of target and draft")
    parser.add_argument("--quantization", default="none", help="of the target")
    parser.add_argument("--texts", nargs="+", default=["code"], help="code, or files of JSON lines with turns or input")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of the requests")
    parser.add_argument("--fixed", type=int, nargs="+", default=[2, 4, 8], help="fixed lengths")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=6, help="in turn; ratios are within a round")
    parser.add_argument("--warm", type=int, default=4, help="runs of the planner before the first round")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
