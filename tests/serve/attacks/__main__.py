"""`make abuse`: hostile clients against the served demo, while seeded streams must not notice.

    python -m tests.serve.attacks --only gRPC "random bodies"

Each attack runs once, while three seeded streams repeat; first on a server without keys, then the attacks of tenants on
a server with keys. The promises: no stream's text changes, no stream fails, no gap of a stream reaches a second, no
answer is a 5xx except 503 with Retry-After, no health check fails, no stalled connection stays, no tenant learns of
another, no process ends, and memory stays within 300 MB of its size after a first burst has filled the pool. The exit
status is 1 if a promise is broken. The first row is the machine without an attack.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import yaml

from bench.served.application import ServedApplication
from cluster.deploy_file import VLLM_SERVICER_FUNCTION
from cluster.local import private_root
from cluster.local.serve_environment import free_port
from tests.serve.attacks import ATTACKS, BROKEN, TENANT_ATTACKS, TENANTS, Answers, Face
from tests.serve.attacks.tenants import key_of, keys_text
from tests.serve.bystanders import Bystanders, Habits, Stay

MAX_GAP_S = 1.0
MAX_GROWTH_BYTES = 300 << 20
_LASTING = (
    "ray::Serve",
    "ray::Target",
    "ray::Draft",
    "ray::Index",
    "ray::HAProxy",
    "ray::Proxy",
    "raylet",
    "haproxy",
    "gcs",
)
_POOL_GIB = 0.25  # small, so that the first burst fills it: a pool takes memory as it fills
# names of the attacks that fill pools begin so
_FILLING = ("n = 128", "twelve grammars", "a prediction of", "200 streams", "30 streams")
_SETTLE_S = 3.0
_ATTACK_TIMEOUT_S = 300.0
_BYSTANDER = "bystander"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attack: the answers by status, the bystanders' streams meanwhile, and the seconds it took."""

    name: str
    answers: Answers
    stay: Stay
    seconds: float

    @property
    def faults(self) -> list[str]:
        """The broken promises, except of time."""
        stay = self.stay
        bad = [status for status in self.answers if status.startswith(BROKEN)]
        return [
            *(f"{self.answers[status]} times {status.removeprefix(BROKEN)}" for status in bad),
            *([f"{stay.num_changed} texts changed"] if stay.num_changed else []),
            *([f"{len(stay.failures)} streams failed: {stay.failures[0]}"] if stay.failures else []),
        ]

    @property
    def broken(self) -> list[str]:
        """The broken promises."""
        gap_s = self.stay.longest_gap_s
        return [*self.faults, *([f"a gap of {gap_s:.2f} s"] if gap_s >= MAX_GAP_S else [])]


def attack(face: Face, bystanders: Bystanders, names: Sequence[str]) -> Iterator[Outcome]:
    """Run the attacks in turn, each when the caller takes its outcome."""
    for name in names:
        bystanders.report()
        began_s = time.monotonic()
        answers = asyncio.run(_bounded(face, name))
        yield Outcome(name, answers, bystanders.report(), time.monotonic() - began_s)


async def _bounded(face: Face, name: str) -> Answers:
    # One key per attack: HAProxy refuses a key for seconds after refusals.
    face = replace(face, key=name.replace(" ", "-"))
    return await asyncio.wait_for({**ATTACKS, **TENANT_ATTACKS}[name](face), _ATTACK_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class LastingProcesses:
    """The processes of an application that must last, and the resident memory of all processes by name."""

    lasting: dict[int, str]
    num_bytes: Counter[str]

    @classmethod
    def of(cls, pid: int) -> LastingProcesses:
        lasting: dict[int, str] = {}
        num_bytes: Counter[str] = Counter()
        served = psutil.Process(pid)
        for process in (served, *served.children(recursive=True)):
            try:
                title = (process.cmdline() or [process.name()])[0]
                size = process.memory_info().rss
            except psutil.Error:
                continue
            name = title.split(".")[0] if title.startswith("ray::") else Path(title).name
            num_bytes[name] += size
            if name.startswith(_LASTING):
                lasting[process.pid] = name
        return cls(lasting, num_bytes)


def main() -> None:
    """Serve the demo without keys and with keys, attack it, print the tables."""
    args = _parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    is_kept = [
        _is_kept(args, names, has_keys=attacks is TENANT_ATTACKS)
        for attacks in (ATTACKS, TENANT_ATTACKS)
        if (names := [name for name in attacks if not args.only or any(part in name for part in args.only)])
    ]
    sys.exit(not all(is_kept))


def _is_kept(args: argparse.Namespace, names: list[str], *, has_keys: bool) -> bool:
    """Serve the demo, attack it, print the table. Returns whether every promise was kept."""
    face, deploy = _deployed(args.folder, has_keys=has_keys)
    application = ServedApplication(deploy, face.url, options=["--no-ray"] if args.no_ray else [])
    try:
        application.wait_until_ready()
        with Bystanders(face.url, face.model, Habits(key=key_of(_BYSTANDER))) as bystanders:
            list(attack(face, bystanders, [name for name in ATTACKS if name.startswith(_FILLING) and not has_keys]))
            before = LastingProcesses.of(application.pid)
            outcomes = report_each(attack(face, bystanders, names))
            time.sleep(_SETTLE_S)
            after = LastingProcesses.of(application.pid)
    finally:
        application.close()
    return report(outcomes, before, after)


def _deployed(folder: Path, *, has_keys: bool) -> tuple[Face, Path]:
    """Write a deploy.yaml of the demo on free ports, with keys and vLLM's service if `has_keys`."""
    deploy = yaml.safe_load(Path("deploy.yaml").read_text())
    args, grpc_options = deploy["applications"][0]["args"], deploy["grpc_options"]
    path, keys = folder / ("keyed.yaml" if has_keys else "deploy.yaml"), folder / "keys"
    logs = (path.with_suffix(".log"), Path(private_root()) / "ray/session_latest/logs")
    model = args.get("model_id", "outrider-demo")
    face = Face("127.0.0.1", free_port(), free_port(), model, keys_file=keys if has_keys else None, logs=logs)
    args["cache"]["memory_gib"] = _POOL_GIB
    deploy["http_options"]["port"], grpc_options["port"] = face.http_port, face.grpc_port
    if has_keys:
        keys.write_text(keys_text((*TENANTS, _BYSTANDER)))
        args["ingress"] = {**args.get("ingress", {}), "api_keys_file": str(keys.resolve())}
        args["ingress"].pop("open_admin", None)
        grpc_options["grpc_servicer_functions"].append(VLLM_SERVICER_FUNCTION)
    path.write_text(yaml.safe_dump(deploy, sort_keys=False))
    return face, path


def report_each(outcomes: Iterator[Outcome]) -> list[Outcome]:
    """Print each row of the table at once: a run may be stopped early."""
    print("| attack | answers | streams | first token | longest gap | verdict |\n|---|---|---|---|---|---|")
    seen = []
    for each in outcomes:
        answers = ", ".join(f"{number} x {status}" for status, number in sorted(each.answers.items()))
        stay = each.stay
        refused = f", {stay.num_refused} refused" if stay.num_refused else ""
        waits = f"{stay.longest_start_s:.2f} s | {stay.longest_gap_s:.2f} s"
        verdict = "; ".join(each.broken) or "kept"
        print(f"| {each.name} | {answers} | {stay.num_streams}{refused} | {waits} | {verdict} |", flush=True)
        seen.append(each)
    return seen


def report(outcomes: list[Outcome], before: LastingProcesses, after: LastingProcesses) -> bool:
    """Print the processes' fate; return whether every promise was kept."""
    gone = [name for pid, name in before.lasting.items() if pid not in after.lasting]
    growths = {name: size - before.num_bytes[name] for name, size in after.num_bytes.items()}
    growth = after.num_bytes.total() - before.num_bytes.total()
    largest = sorted(growths, key=growths.__getitem__, reverse=True)[:4]
    print(f"\nprocesses that ended: {', '.join(gone) or 'none'}; memory {growth / 2**20:+.0f} MiB, most of it")
    print(", ".join(f"{name} {growths[name] / 2**20:+.0f}" for name in largest))
    return not gone and growth < MAX_GROWTH_BYTES and not any(each.broken for each in outcomes)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="attacks whose names have one of these parts")
    parser.add_argument("--no-ray", action="store_true", help="serve in one process, without HAProxy")
    parser.add_argument("--folder", type=Path, default=Path(".cache/abuse"), help="for the deploy.yaml and the log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
