"""A draft that is tried by turns is kept where it is faster, and otherwise the old one runs again, whatever happens."""

from __future__ import annotations

import asyncio

import pytest

from actors.pair.pair_draft import PairDraft
from protos.errors import ConflictError, RequestError
from protos.served_model import CanaryOutcome, DraftReport, SwapDraft, TryDraft
from tests.actors.pair.simulated_pair import SimulatedTrialPair

ORDER = TryDraft("/new", 5.0, 20.0, 3600.0, 0.05, 0.05, 0.05, 12)


async def ended(draft: PairDraft) -> DraftReport:
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "draft-order"))
    return draft.report


async def test_a_faster_draft_is_kept_and_both_had_equal_turns() -> None:
    pair = SimulatedTrialPair({"/old": 10.0, "/new": 12.0})
    draft = pair.draft()
    began = await draft.carry_out(ORDER)
    assert began.canary is not None
    assert began.canary.outcome is CanaryOutcome.RUNNING
    report = await ended(draft)
    assert (report.path, pair.path, report.is_deployed) == ("/new", "/new", False)
    assert report.canary is not None
    assert report.canary.outcome is CanaryOutcome.KEPT
    assert report.canary.gain == pytest.approx(0.2, abs=0.02)
    assert report.canary.low is not None
    assert report.canary.low > 0
    assert "faster" in report.canary.reason
    assert 2 * 22 * report.canary.num_pairs <= pair.now_s <= 2 * 26 * report.canary.num_pairs


@pytest.mark.parametrize("speed", [8.0, 9.5])
async def test_a_slower_draft_is_rolled_back(speed: float) -> None:
    pair = SimulatedTrialPair({"/old": 10.0, "/new": speed})
    draft = pair.draft()
    await draft.carry_out(ORDER)
    report = await ended(draft)
    assert (report.path, pair.path, report.is_deployed) == ("/old", "/old", True)
    assert report.canary is not None
    assert report.canary.outcome is CanaryOutcome.ROLLED_BACK
    assert report.canary.num_pairs <= ORDER.max_pairs


@pytest.mark.parametrize("failing", [frozenset({1}), frozenset({3}), frozenset({1, 2})])
async def test_a_draft_that_does_not_come_up_ends_the_trial(failing: frozenset[int]) -> None:
    pair = SimulatedTrialPair({"/old": 10.0, "/new": 12.0}, failing)
    draft = pair.draft()
    await draft.carry_out(ORDER)
    report = await ended(draft)
    assert report.canary is not None
    assert report.canary.outcome is CanaryOutcome.ROLLED_BACK
    assert "not up" in report.canary.reason
    assert pair.starts[-1] == pair.path == "/old"


async def test_a_target_that_starts_anew_begins_a_block_anew() -> None:
    pair = SimulatedTrialPair({"/old": 10.0, "/new": 12.0}, restart_at_s=30.0)
    draft = pair.draft()
    await draft.carry_out(ORDER)
    report = await ended(draft)
    assert report.canary is not None
    assert report.canary.outcome is CanaryOutcome.KEPT
    assert report.canary.gain == pytest.approx(0.2, abs=0.02)


async def test_a_trial_is_stopped_and_nothing_else_is_ordered_meanwhile() -> None:
    pair = SimulatedTrialPair({"/old": 10.0, "/new": 12.0})
    draft = pair.draft()
    await draft.stop_canary()
    assert draft.report.canary is None
    await draft.carry_out(ORDER)
    with pytest.raises(ConflictError, match="canary/stop"):
        await draft.carry_out(SwapDraft("/other", 5.0))
    assert draft.report.canary is not None
    await draft.stop_canary()
    report = draft.report
    assert report.canary is not None
    assert report.canary.outcome is CanaryOutcome.STOPPED
    assert (report.path, pair.path, pair.starts[-1]) == ("/old", "/old", "/old")
    assert (await draft.carry_out(SwapDraft("/new", 5.0))).canary is None


async def test_a_trial_without_a_verdict_ends_at_its_deadline() -> None:
    pair = SimulatedTrialPair({"/old": 0.0, "/new": 0.0})  # no token, so no pair of blocks ever counts
    draft = pair.draft()
    await draft.carry_out(TryDraft("/new", 5.0, 1.0, 0.05, 0.05, 0.05, 0.05, 12))
    report = await ended(draft)
    assert report.canary is not None
    assert (report.canary.outcome, pair.path) == (CanaryOutcome.ROLLED_BACK, "/old")
    assert "no verdict within" in report.canary.reason


async def test_the_draft_that_runs_is_not_tried_against_itself() -> None:
    draft = SimulatedTrialPair({}).draft()
    with pytest.raises(RequestError, match="already running"):
        await draft.carry_out(TryDraft("/old", 5.0, 1.0, 1.0, 0.05, 0.05, 0.05, 12))
