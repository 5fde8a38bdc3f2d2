"""The draft of a pair is exchanged one order at a time, and comes back where the new one does not come up."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field, replace

import pytest

from actors.pair.pair_draft import PairDraft
from actors.pair.pair_shell import refusal
from actors.settings import DraftSettings
from actors.shell_messages import HeadFailure, RunningHead
from engine.accounting.goodput import GoodputStats
from protos.errors import ConflictError, DeadlineExceededError, RequestError
from protos.messages import SpeculationMethod
from protos.served_model import CanaryOutcome, CheckDraft, DraftReport, SwapDraft, TryDraft

OLD = DraftReport("pair-1", "/old", "old", 10.0, is_deployed=True)


@dataclass
class FakeProcess:
    """Runs any path except the `late` ones; each start waits for `gate`."""

    late: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def check_draft(self, path: str) -> None:
        if path == "/nan":
            raise RequestError("weights are NaN")

    async def replace_draft(self, path: str, wait_s: float) -> str:
        self.started.append(path)
        await self.gate.wait()
        if path in self.late:
            raise DeadlineExceededError("not up")
        return path.strip("/")


async def no_goodput() -> tuple[GoodputStats, ...]:
    raise AssertionError("no canary runs")


@pytest.fixture
def process() -> FakeProcess:
    process = FakeProcess(late={"/late"})
    process.gate.set()
    return process


async def test_a_swap_runs_the_new_draft_and_says_since_when(process: FakeProcess) -> None:
    draft = PairDraft(process, OLD, no_goodput, lambda: 99.0)
    new = DraftReport("pair-1", "/new", "new", 99.0, is_deployed=False)
    assert await draft.carry_out(SwapDraft("/new", 5.0)) == new
    assert new == draft.report
    assert (await draft.carry_out(SwapDraft("/old", 5.0))).is_deployed


async def test_the_old_draft_comes_back_where_the_new_one_is_late(process: FakeProcess) -> None:
    draft = PairDraft(process, OLD, no_goodput, lambda: 99.0)
    with pytest.raises(DeadlineExceededError):
        await draft.carry_out(SwapDraft("/late", 5.0))
    assert process.started == ["/late", "/old"]
    assert draft.report == replace(OLD, since_s=99.0)


async def test_a_draft_that_is_refused_leaves_the_process_alone(process: FakeProcess) -> None:
    draft = PairDraft(process, OLD, no_goodput)
    with pytest.raises(RequestError, match="NaN"):
        await draft.carry_out(CheckDraft("/nan"))
    assert (process.started, draft.report) == ([], OLD)


async def test_a_second_order_is_a_conflict_and_the_first_ends_without_its_caller(process: FakeProcess) -> None:
    process.gate.clear()
    draft = PairDraft(process, OLD, no_goodput)
    caller = asyncio.create_task(draft.carry_out(SwapDraft("/new", 5.0)))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(ConflictError, match="pair-1"):
        await draft.carry_out(SwapDraft("/other", 5.0))
    assert draft.report == OLD
    process.gate.set()
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "draft-order"))
    assert (process.started, draft.report.path) == (["/new"], "/new")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (SpeculationMethod.MODEL, "draft.gpu: own"),
        (SpeculationMethod.MTP, "'mtp', whose weights are the target's own"),
        (SpeculationMethod.SELF, "'self', whose weights are the target's own"),
        (SpeculationMethod.SUFFIX, "'suffix', which has no weights"),
        (SpeculationMethod.NONE, "'none', which has no weights"),
    ],
)
def test_drafts_that_cannot_be_exchanged_are_refused_with_the_reason(kind: SpeculationMethod, reason: str) -> None:
    assert re.search(reason, refusal(DraftSettings(kind)).message)


async def test_a_head_that_the_target_has_left_is_reported_and_an_old_answer_is_not(process: FakeProcess) -> None:
    draft = PairDraft(process, OLD, no_goodput, lambda: 99.0)
    await draft.carry_out(SwapDraft("/new", 5.0))
    draft.note_head(RunningHead("/old", "old"))  # of a ping just before the exchange
    assert (draft.report.path, draft.report.canary) == ("/new", None)
    draft.note_head(RunningHead("/old", "old", HeadFailure("/new", "the target ended")))
    assert (draft.report.path, draft.report.digest, draft.report.is_deployed) == ("/old", "old", True)
    assert draft.report.canary is not None
    assert (draft.report.canary.path, draft.report.canary.outcome) == ("/new", CanaryOutcome.ROLLED_BACK)
    assert draft.report.canary.reason == "the target ended"


async def test_a_head_that_the_target_has_left_ends_its_trial(process: FakeProcess) -> None:
    draft = PairDraft(process, OLD, no_goodput)
    async with asyncio.timeout(20.0):
        while draft.report.path != "/new":  # the order of the first two blocks is random
            if draft.report.canary is not None:
                await draft.stop_canary()
            await draft.carry_out(TryDraft("/new"))
            for _ in range(20):
                await asyncio.sleep(0)
    for _ in range(2):
        draft.note_head(RunningHead("/old", "old", HeadFailure("/new", "the target ended")))
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "draft-order"))
    assert draft.report.canary is not None
    assert (draft.report.canary.outcome, draft.report.canary.reason) == (CanaryOutcome.ROLLED_BACK, "the target ended")
    assert (draft.report.path, process.started[-1]) == ("/old", "/old")
