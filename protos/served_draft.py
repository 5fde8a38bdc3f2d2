"""Orders about the drafts that pairs run, and what a pair reports of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CanaryOutcome(StrEnum):
    """The state of a canary, or its end."""

    RUNNING = "running"
    KEPT = "kept"
    ROLLED_BACK = "rolled_back"
    STOPPED = "stopped"  # by an admin, and rolled back


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """A draft that is, or was, tried against another one: what was measured so far.

    `gain` is new over old goodput less 1, `low` and `high` its bounds, None until there are some.
    """

    path: str
    old_path: str
    outcome: CanaryOutcome
    reason: str = ""
    num_pairs: int = 0  # of blocks, one of each draft
    gain: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A draft model that a pair runs in a process of its own, for requests of `method`.

    `digest` is its part of the deployment's fingerprint. `is_deployed` is true while it is the one of deploy.yaml,
    which a replica that starts anew runs again. `canary` is the last one since the draft was exchanged by hand,
    `tuning` what has become of the latest drift alarm, where one is answered (`tune.auto`).
    """

    replica: str
    path: str
    digest: str
    since_s: float  # Unix time
    is_deployed: bool
    canary: CanaryReport | None = None
    tuning: str = ""
    method: str = "model"


@dataclass(frozen=True, slots=True)
class ShowDraft:
    """Report the draft, and change nothing."""


@dataclass(frozen=True, slots=True)
class CheckDraft:
    """Load the checkpoint at `path` on the pair's node, beside the draft that runs, and refuse an unfit one.

    Here as in the other orders `method` names the draft whose place it shall take; empty: the deployment's own.
    """

    path: str
    method: str = ""


@dataclass(frozen=True, slots=True)
class SwapDraft:
    """Run the checkpoint at `path`; the old draft comes back if the new one is not up within `wait_s`."""

    path: str
    wait_s: float
    method: str = ""


@dataclass(frozen=True, slots=True)
class TryDraft:
    """Run the checkpoint at `path` and the draft of now by turns, and keep the faster one. Returns at once.

    A block is `block_s` of the target's decoding steps with one draft. `min_gain`, the two error rates and `max_pairs`
    are those of `engine.stats.goodput_trial.GoodputTrial`. Without a verdict after `deadline_s` the old draft stays.
    """

    path: str
    wait_s: float = 120.0
    block_s: float = 5.0
    deadline_s: float = 7200.0
    min_gain: float = 0.05
    false_keep: float = 0.05
    false_rollback: float = 0.05
    max_pairs: int = 60
    method: str = ""


@dataclass(frozen=True, slots=True)
class StopCanary:
    """End the canary, if one runs, and run the old draft."""


DraftOrder = ShowDraft | CheckDraft | SwapDraft | TryDraft | StopCanary
