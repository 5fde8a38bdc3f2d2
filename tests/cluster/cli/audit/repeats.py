"""Repeated audits of the toy server: how often each fault is found, and how often a server without one is accused.

python -m tests.cluster.cli.audit.repeats 200                  whole audits without a fault
python -m tests.cluster.cli.audit.repeats 20 "shared noise"    the check of a fault; `every` means all faults
"""

from __future__ import annotations

import asyncio
import random
import sys
import time

from cluster.cli.audit.audit import CHECKS
from cluster.cli.audit.trial import CheckVerdict
from tests.cluster.cli.audit.test_audit import FOUND_BY, audit, checks_of
from tests.cluster.cli.audit.toy_server import ToyServer


def at_least(num_hits: int, num_runs: int) -> float:
    """The share whose chance of `num_hits` or more is 5%: the rate is larger with confidence 95% (Clopper-Pearson)."""
    if num_hits == num_runs:
        return float(0.05 ** (1 / num_runs))
    raise SystemExit("a fault was missed or a clean server accused; see the lines above")


def repeat(fault: str, num_runs: int) -> None:
    """Audit with new seeds, and print each run that ends otherwise than it should."""
    checks = checks_of(FOUND_BY[fault]) if fault else CHECKS
    num_right, slowest = 0, 0.0
    for run in range(num_runs):
        began_s = time.monotonic()
        results = asyncio.run(audit(ToyServer(fault).app, checks, start=random.randrange(10**9)))
        found = [name for name, result in results.items() if result.verdict is CheckVerdict.FOUND]
        is_right = bool(found) == bool(fault)
        slowest = max(slowest, time.monotonic() - began_s)
        num_right += is_right
        if not is_right:
            sys.stdout.write(f"run {run}: {found or [result.sentence for result in results.values()]}\n")
    kind = f"finds {fault!r}" if fault else "accuses no clean server"
    bound = at_least(num_right, num_runs)
    ends = f"at least {bound:.2%} with confidence 95%; slowest {slowest:.1f} s"
    sys.stdout.write(f"{num_right} of {num_runs} {kind}, {ends}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    runs, *faults = sys.argv[1:]
    for each in list(FOUND_BY) if faults == ["every"] else faults or [""]:
        repeat(each, int(runs))
