"""A drift alarm is answered by a trained draft, which is tried like any other; what fails leaves the serving alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from actors.pair.auto_tune import AutoTune
from actors.settings import AutoTuneSettings
from protos.served_model import CanaryOutcome, DraftReport
from tests.actors.pair.simulated_pair import SimulatedTrialPair

TRAINER = """
import pathlib, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert arguments["--draft"] == "/old"
if (status := int(arguments["--status"])) == 0:
    folder = pathlib.Path(arguments["--output"])
    folder.mkdir()
    (folder / "config.json").write_text("{}")
print("trained")
sys.exit(status)
"""


class NewIsFaster(dict[str, float]):
    """Speeds of drafts by path."""

    def __missing__(self, path: str) -> float:
        return 10.0 if path == "/old" else 12.0


def settings(folder: Path, status: int) -> AutoTuneSettings:
    return AutoTuneSettings(("-c", TRAINER, "--status", str(status)), str(folder))


async def until_done() -> None:
    for name in ("auto-tune", "draft-order"):
        tasks = [task for task in asyncio.all_tasks() if task.get_name() == name]
        await asyncio.gather(*tasks, return_exceptions=True)


async def answered(folder: Path, status: int) -> tuple[SimulatedTrialPair, DraftReport]:
    pair = SimulatedTrialPair(NewIsFaster())
    draft = pair.draft()
    AutoTune(settings(folder, status), draft).on_drift()
    await until_done()
    return pair, draft.report


async def test_an_alarm_ends_with_a_new_draft_that_is_faster(tmp_path: Path) -> None:
    pair, report = await answered(tmp_path / "drafts", 0)
    folder = Path(report.path)
    assert (pair.path, folder.parent) == (report.path, tmp_path / "drafts")
    assert report.canary is not None
    assert report.canary.outcome is CanaryOutcome.KEPT
    assert folder.with_suffix(".log").read_text() == "trained\n"


@pytest.mark.parametrize(("status", "text"), [(3, "no training gave a better draft"), (1, "failed with status 1")])
async def test_a_training_without_a_draft_changes_nothing(tmp_path: Path, status: int, text: str) -> None:
    pair, report = await answered(tmp_path, status)
    assert (report.path, pair.starts, report.canary) == ("/old", [], None)
    assert text in report.tuning


async def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, report = await answered(tmp_path / "file" / "drafts", 0)
    assert "given up" in report.tuning


async def test_a_check_that_fails_in_an_unknown_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: SimulatedTrialPair, path: str) -> None:
        raise ImportError("half an installation")

    monkeypatch.setattr(SimulatedTrialPair, "check_draft", broken)
    _, report = await answered(tmp_path / "drafts", 0)
    assert "given up" in report.tuning
    assert "half an installation" in report.tuning


async def test_a_second_alarm_within_the_pause_is_not_answered(tmp_path: Path) -> None:
    now_s = [0.0]
    draft = SimulatedTrialPair(NewIsFaster()).draft()
    tune = AutoTune(settings(tmp_path, 3), draft, lambda: now_s[0])
    for seconds in (0.0, 1.0, 3599.0, 3601.0):
        now_s[0] = seconds
        draft.note_tuning("")
        tune.on_drift()
        await until_done()
        assert (draft.report.tuning != "") is (seconds in (0.0, 3601.0))


async def test_pairs_of_one_node_try_the_draft_that_one_of_them_has_trained(tmp_path: Path) -> None:
    drafts = [SimulatedTrialPair(NewIsFaster()).draft() for _ in range(2)]
    for draft in drafts:
        AutoTune(settings(tmp_path, 0), draft).on_drift()
    await until_done()
    first, second = (draft.report.path for draft in drafts)
    assert first == second != "/old"
