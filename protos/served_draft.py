"""Orders about the drafts that pairs run, and a pair's report of its draft."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CHECK_TIMEOUT_S = 300.0  # for each pair to check a new draft
RETURN_S = 600.0  # for an old draft to serve again
ANSWER_S = 30.0  # more than a pair's own limit, for its answer to arrive


class CanaryOutcome(StrEnum):
    """The state or the outcome of a canary."""

    RUNNING = "running"
    KEPT = "kept"
    ROLLED_BACK = "rolled_back"
    STOPPED = "stopped"  # by an admin; the old draft was restored


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """The measurements of a draft's trial against another one, running or finished.

    `gain` is the new goodput over the old, less 1; `low` and `high` are its bounds, None until measured.
    """

    path: str
    old_path: str
    outcome: CanaryOutcome
    reason: str = ""
    num_pairs: int = 0  # measured pairs of blocks: one block with each draft
    gain: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A draft model or head of a pair, for requests of `method`, that can be exchanged.

    `digest` is its part of the deployment's fingerprint. `is_deployed` is true for the draft of deploy.yaml, which a
    restarted replica runs again. `canary` is the last trial since the draft was exchanged by hand, `tuning` the state
    of the response to the latest drift alarm, if alarms are answered (`tune.auto`).
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
    """Report the draft without changing anything."""


@dataclass(frozen=True, slots=True)
class CheckDraft:
    """Load the checkpoint at `path` on the pair's node next to the running draft, and refuse an unfit one.

    In all orders, `method` names the draft to replace; empty for the deployment's own.
    """

    path: str
    method: str = ""


@dataclass(frozen=True, slots=True)
class SwapDraft:
    """Run the checkpoint at `path`; restore the old draft if the new one is not up within `wait_s`."""

    path: str
    wait_s: float
    method: str = ""


@dataclass(frozen=True, slots=True)
class TryDraft:
    """Alternate between the checkpoint at `path` and the current draft, and keep the faster. Returns at once.

    A block is `block_s` of the target's decoding steps with one draft. `min_gain`, the two error rates and `max_pairs`
    are described in `engine.accounting.goodput.GoodputTrial`. Without a verdict after `deadline_s` the old draft
    stays.
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
    """End the running canary, if any, and run the old draft."""


DraftOrder = ShowDraft | CheckDraft | SwapDraft | TryDraft | StopCanary
