"""The drafts of pairs as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from protos.served_draft import CanaryReport, DraftReport
from router.openai.answers import CanaryAnswer, DraftsAnswer, PairDraftAnswer, RunningDraft


def running_draft(report: DraftReport) -> RunningDraft:
    """Return what every client may know: no path of the node."""
    answer = RunningDraft(
        name=_name(report.path),
        method=report.method,
        digest=report.digest,
        since=int(report.since_s),
        is_deployed=report.is_deployed,
    )
    if report.canary is not None:
        answer["canary"] = _canary(report.canary)
    if report.tuning:
        answer["tuning"] = report.tuning
    return answer


def _canary(report: CanaryReport) -> CanaryAnswer:
    return CanaryAnswer(
        name=_name(report.path),
        old_name=_name(report.old_path),
        outcome=report.outcome.value,
        reason=report.reason,
        num_pairs=report.num_pairs,
        gain=report.gain,
        low=report.low,
        high=report.high,
    )


def _name(path: str) -> str:
    return PurePath(path).name


def drafts_answer(reports: Sequence[DraftReport]) -> DraftsAnswer:
    """Return the drafts of every pair."""
    return DraftsAnswer(
        drafts=[
            PairDraftAnswer(**running_draft(report), replica=report.replica, path=report.path) for report in reports
        ]
    )
