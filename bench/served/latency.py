"""`make bench-latency`: the time to the first token and the gaps between tokens, as HTTP clients see them.

    python -m bench.served.latency --models demo smollm2 padded --clients 1 6 8 --threads default 1 2 --rounds 5

Each round starts every deployment in turn, warms it up, times it with each number of clients and stops it. A gap is the
time between two chunks of a stream. The bars: the 99th percentile of a run's gaps is at most 2.5 times their median,
the longest at most 8 times.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.contenders.contender import ContenderRun
from bench.contenders.http_contender import HttpContender
from bench.contenders.prompts import held_out_prompts
from bench.padded_pair import CACHE, DEMO, PAIRS, SMOLLM2, padded_target
from bench.served.application import BASE_URL, MODEL_ID, DeployArgs, start_served

P99_BAR = 2.5  # times the median gap
MAX_BAR = 8.0
MODELS = ("demo", "smollm2", "padded", "smollm2-0.5b", "smollm2-1b")
_DEFAULT = "default"
_WARM_UP_TOKENS = 48
_HEAD = f"{'model':9} {'threads':>7} {'clients':>7} {'tok/s':>7} {'first p50':>9} {'max':>6}"
_GAPS = f"{'gap p50':>8} {'p90':>6} {'p99':>6} {'max':>7} {'p99/p50':>8} {'max/p50':>8}"


@dataclass(frozen=True, slots=True)
class Latency:
    """One run, in milliseconds."""

    tokens_per_second: float
    first_p50: float
    first_max: float
    p50: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, run: ContenderRun) -> Latency:
        """Return the figures of a run whose prompts all have arrival times."""
        arrivals = [1000 * np.array(times) for times in run.arrivals or ()]
        firsts = [float(times[0]) for times in arrivals]
        gaps = np.concatenate([np.diff(times) for times in arrivals])
        p50, p90, p99 = (float(each) for each in np.percentile(gaps, (50, 90, 99)))
        first_p50, first_max = statistics.median(firsts), max(firsts)
        return cls(run.tokens_per_second, first_p50, first_max, p50, p90, p99, float(gaps.max()))

    @property
    def is_even(self) -> bool:
        """True if the run keeps both bars."""
        return self.p99 <= P99_BAR * self.p50 and self.longest <= MAX_BAR * self.p50

    def __str__(self) -> str:
        return (
            f"{self.tokens_per_second:7.1f} {self.first_p50:9.0f} {self.first_max:6.0f} "
            f"{self.p50:8.1f} {self.p90:6.1f} {self.p99:6.1f} {self.longest:7.1f} "
            f"{self.p99 / self.p50:8.2f} {self.longest / self.p50:8.2f}"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and the target's threads: a number, or `default` for the placement's choice."""

    model: str
    threads: str

    def change(self, args: DeployArgs) -> None:
        """Apply the case to the args of a deploy.yaml."""
        args["model_id"] = MODEL_ID
        args["target"]["path"] = str(Path(args["target"]["path"]).resolve())
        if self.model == "padded":
            args["target"] |= {"path": str(padded_target().resolve()), "dtype": "bfloat16"}
            args["draft"]["dtype"] = "bfloat16"
        elif self.is_smollm2 and self.model in PAIRS:
            args["target"] |= {"path": str(padded_target(name=self.model).resolve()), "dtype": "bfloat16"}
        if self.threads != _DEFAULT:
            args["target"]["num_threads"] = int(self.threads)

    @property
    def is_smollm2(self) -> bool:
        return self.model.startswith("smollm2")

    @property
    def tokenizer_folder(self) -> Path:
        return SMOLLM2 if self.is_smollm2 else DEMO / "target"


def main() -> None:
    """Measure all cases in turn; print each run, and then the medians."""
    args = _parse_args()
    cases = [Case(model, threads) for model in args.models for threads in args.threads]
    found: dict[tuple[Case, int], list[Latency]] = {}
    print(f"{_HEAD} {_GAPS}")
    for _ in range(args.rounds):
        for case in cases:
            for num_clients, latency in _measure(case, args):
                found.setdefault((case, num_clients), []).append(latency)
                print(f"{case.model:9} {case.threads:>7} {num_clients:7} {latency}", flush=True)
    print(f"\nmedians of {args.rounds} rounds; even: runs that keep both bars\n{_HEAD} {_GAPS} {'even':>6}")
    for (case, num_clients), runs in found.items():
        print(f"{case.model:9} {case.threads:>7} {num_clients:7} {_median(runs)} {_num_even(runs):>6}")


def _measure(case: Case, args: argparse.Namespace) -> Iterator[tuple[int, Latency]]:
    prompts = held_out_prompts(case.tokenizer_folder, max(args.clients))
    source = Path("models/published/smollm2.deploy.yaml" if case.is_smollm2 else "deploy.yaml")
    path = CACHE / f"latency-{case.model}-{case.threads}.yaml"
    with closing(start_served(path, case.change, source)) as application:
        application.wait_until_ready()
        contender = HttpContender(BASE_URL, MODEL_ID, {"enabled": True})
        contender.run(prompts, _WARM_UP_TOKENS)
        for num_clients in args.clients:
            yield num_clients, Latency.of(contender.run(prompts[:num_clients], args.tokens))


def _median(runs: list[Latency]) -> Latency:
    columns = zip(*([getattr(run, name) for name in Latency.__slots__] for run in runs), strict=True)
    return Latency(*(statistics.median(column) for column in columns))


def _num_even(runs: list[Latency]) -> str:
    return f"{sum(run.is_even for run in runs)}/{len(runs)}"


def _threads(text: str) -> str:
    if text != _DEFAULT and (not text.isdigit() or int(text) == 0):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of threads nor {_DEFAULT!r}")
    return text


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["demo", "smollm2", "padded"], choices=MODELS, help="to be served in turn"
    )
    parser.add_argument("--threads", nargs="+", type=_threads, default=[_DEFAULT], help="of the target, or 'default'")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 6, 8])
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
