"""The planner of drafts against plain decoding and fixed lengths, over HTTP and in turn.

    python -m bench.served.planner --target .cache/models/smollm2-135m-instruct --quantization int4 --draft suffix \
        --texts spec_bench_question.jsonl --streams 1 8 --rounds 6

Two servers without Ray: one plans each pass, the other has fixed lengths (`speculation.adaptive: false`). Only one of
them works at a time. A run is a steady load of some seconds: batches that begin together are no load that servers see,
and the last stream of a batch decides its speed. Every run has a `cache_salt` of its own, so no run finds the texts of
another.

With `--change` each run is one stream, then `--streams`, then one again (`bench.served.load_change`). With `--wrong`
the draft costs the same and is never right.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

from bench.contenders.contender import Prompts
from bench.contenders.event_streams import Body
from bench.contenders.prompts import held_out_prompts, recorded_prompts
from bench.served.application import ServedApplication
from bench.served.load_change import Phase, run_change, run_steady

FOLDER = Path(".cache/planner")
PORT = 8140  # of the first server; the second has the next one
PLAIN, PLANNER = "plain", "planner"
_FREE = ("suffix", "self", "ngram", "mtp")  # drafts without files of their own
_LAST_NORMS = ("model.norm.weight", "norm.weight")  # of a model, and of an EAGLE-3 head


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
class ChangeRow:
    """One way to draft over plain decoding in one phase of a changing load, the median of all rounds.

    `first` and `later` are ratios: of the first two seconds, and of the rest. `followed_s` are seconds.
    """

    text: str
    temperature: float
    phase: int
    num_streams: int
    name: str
    tokens_per_second: float
    first: float
    later: float
    followed_s: float


@dataclass(frozen=True, slots=True)
class Way:
    """A server, and the `speculation` field of its requests."""

    name: str
    url: str
    speculation: Body


class Runner:
    """Runs prompts through one of the ways; `salts` numbers the runs."""

    def __init__(self, num_tokens: int, temperature: float) -> None:
        self._num_tokens, self._temperature = num_tokens, temperature
        self._salts = count()

    def speed(self, way: Way, prompts: Prompts, num_streams: int, seconds: float) -> float:
        """Return tokens per second of all streams together under a steady load, prefill included."""
        return run_steady(f"{way.url}/v1/completions", self._bodies(way, prompts), num_streams, seconds)

    def phases(self, way: Way, prompts: Prompts, num_streams: int, phase_s: float) -> list[Phase]:
        """Return the speeds under a changing load."""
        return run_change(f"{way.url}/v1/completions", self._bodies(way, prompts), num_streams, phase_s)

    def _bodies(self, way: Way, prompts: Prompts) -> Iterator[Body]:
        """Yield requests; a prompt that comes again does not find its earlier answer."""
        run = next(self._salts)
        for lap in count():
            for index, prompt in enumerate(prompts):
                yield {
                    "model": "bench",
                    "prompt": prompt,
                    "max_tokens": self._num_tokens,
                    "temperature": self._temperature,
                    "seed": index,
                    "stream": True,
                    "ignore_eos": True,
                    "return_token_ids": True,
                    "cache_salt": f"{way.name} {run} {lap}",
                    "speculation": way.speculation,
                }


def main() -> None:
    """Start both servers, race all ways and print the rows."""
    args = _parse_args()
    rows: list[Row | ChangeRow] = []
    with ExitStack() as stack:
        planned, fixed = (_start(args, stack, is_adaptive=flag) for flag in (True, False))
        ways = [Way(PLAIN, planned, {"enabled": False}), Way(PLANNER, planned, {})]
        ways += [Way(f"K = {length}", fixed, {"num_tokens": length}) for length in args.fixed]
        for temperature in args.temperatures:
            for text, num_streams in ((text, number) for text in args.texts for number in args.streams):
                run = _change if args.change else _race
                for row in run(ways, args, text, num_streams, temperature):
                    print(_line(row), flush=True)
                    rows.append(row)
                if args.json is not None:
                    args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _line(row: Row | ChangeRow) -> str:
    if isinstance(row, Row):
        ratio = f"{row.ratios[0]:.3f} ({row.ratios[1]:.2f} to {row.ratios[2]:.2f}) of plain"
        where = f"{row.num_streams} streams"
    else:
        ratio = f"{row.first:.3f} of plain at first, then {row.later:.3f}, followed within {row.followed_s:.1f} s"
        where = f"phase {row.phase}, streams: {row.num_streams}"
    return f"{row.text}, T = {row.temperature}, {where}, {row.name}: {row.tokens_per_second:.1f} tokens/s, {ratio}"


def _change(
    ways: Seq[Way], args: argparse.Namespace, text: str, num_streams: int, temperature: float
) -> Iterator[ChangeRow]:
    prompts = _prompts(args.target, text, 4 * num_streams)
    runner = Runner(args.tokens, temperature)
    for _ in range(args.warm):
        runner.speed(ways[1], prompts, num_streams, args.seconds)
    found: dict[str, list[list[Phase]]] = {way.name: [] for way in ways}
    for index in range(args.rounds):
        for way in [*ways[index % len(ways) :], *ways[: index % len(ways)]]:
            found[way.name].append(runner.phases(way, prompts, num_streams, args.change))
    for way in ways:
        for phase, (own, plain) in enumerate(
            zip(zip(*found[way.name], strict=True), zip(*found[PLAIN], strict=True), strict=True), 1
        ):
            pairs = [*zip(own, plain, strict=True)]
            yield ChangeRow(
                text,
                temperature,
                phase,
                own[0].num_streams,
                way.name,
                statistics.median(each.tokens_per_second for each in own),
                statistics.median(a.first_tokens_per_second / b.first_tokens_per_second for a, b in pairs),
                statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs),
                statistics.median(each.followed_s for each in own),
            )


def _race(ways: Seq[Way], args: argparse.Namespace, text: str, num_streams: int, temperature: float) -> Iterator[Row]:
    prompts = _prompts(args.target, text, 4 * num_streams * (args.rounds + 1))
    parts = [prompts[start :: args.rounds + 1] for start in range(args.rounds + 1)]
    runner = Runner(args.tokens, temperature)
    for _ in range(args.warm):  # the planner learns from other texts of the same kind
        runner.speed(ways[1], parts[-1], num_streams, args.seconds)
    runner.speed(ways[-1], parts[-1], num_streams, args.seconds)
    speeds: dict[str, list[float]] = {way.name: [] for way in ways}
    for index, part in enumerate(parts[: args.rounds]):
        for way in [*ways[index % len(ways) :], *ways[: index % len(ways)]]:
            speeds[way.name].append(runner.speed(way, part, num_streams, args.seconds))
    for way in ways:
        own = speeds[way.name]
        ratios = [speed / plain for speed, plain in zip(own, speeds[PLAIN], strict=True)]
        spread = (statistics.median(ratios), min(ratios), max(ratios))
        yield Row(text, temperature, num_streams, way.name, statistics.median(own), spread)


def _prompts(target: Path, text: str, num_prompts: int) -> Prompts:
    """Return held-out Python for `code`, else the texts of a file; few texts are repeated."""
    for number in (num_prompts, num_prompts // 2, num_prompts // 4):
        try:
            is_code = text == "code"
            found = held_out_prompts(target, number) if is_code else recorded_prompts(target, Path(text), number, 64)
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
    deploy["applications"][0]["args"] |= {
        "model_id": "bench",
        "target": target | {"num_threads": args.threads},
        "draft": _draft(args),
        "speculation": {"num_tokens": 4, "max_num_tokens": 8, "adaptive": is_adaptive}
        | ({"tree": {"num_nodes": args.tree}} if args.tree and is_adaptive else {}),
        "cache": {"memory_gib": 1.0},
        "scheduler": {"max_num_sequences": max(args.streams), "max_stall_passes": None},
    }
    path = FOLDER / f"{port}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(deploy), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    application = stack.enter_context(closing(ServedApplication(path, url, options=("--no-ray",))))
    application.wait_until_ready()
    return url


def _draft(args: argparse.Namespace) -> Body:
    """Return the `draft` section."""
    kind, _, path = args.draft.rpartition("=")
    if args.draft in _FREE:
        if args.wrong:
            raise SystemExit(f"--wrong changes the files of a draft, and {args.draft} has no files; name another")
        return {"kind": args.draft}
    folder = Path(path).resolve()
    if args.wrong:
        folder = _turned(folder)
    return {"kind": kind, "path": str(folder)} if kind else {"kind": "model", "path": str(folder), "dtype": args.dtype}


def _turned(folder: Path) -> Path:
    """Write a copy of a draft whose last norm has the other sign: the least likely token comes first."""
    copy = FOLDER / "wrong"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    name = next((each for each in _LAST_NORMS if each in tensors), None)
    if name is None:
        raise SystemExit(f"{folder} has no tensor {' or '.join(_LAST_NORMS)}; --wrong takes a model or an EAGLE-3 head")
    tensors[name] = -tensors[name]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy.resolve()


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path("models/demo/target"), help="folder of the target")
    parser.add_argument(
        "--draft", default="models/demo/draft", help=f"{', '.join(_FREE)}, a model's folder, or a head as KIND=FOLDER"
    )
    parser.add_argument("--wrong", action="store_true", help="a draft that is never right")
    parser.add_argument("--tree", type=int, default=0, metavar="NODES", help="the planner may draft trees of so many")
    parser.add_argument("--change", type=float, metavar="SECONDS", help="1, --streams and 1 stream, so long each")
    parser.add_argument("--dtype", default="auto", help="of target and draft")
    parser.add_argument("--quantization", default="none", help="of the target")
    parser.add_argument("--texts", nargs="+", default=["code"], help="code, or files of JSON lines with turns or input")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="of the requests")
    parser.add_argument("--fixed", type=int, nargs="+", default=[2, 4, 8], help="fixed lengths")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=6, help="in turn; ratios are within a round")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run of a steady load")
    parser.add_argument("--warm", type=int, default=2, help="runs of the planner before the first round")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args()


if __name__ == "__main__":
    main()
