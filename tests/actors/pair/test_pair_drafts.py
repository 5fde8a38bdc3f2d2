"""Several draft models of a pair: orders and alarms go to the named draft, one order at a time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from actors.pair.auto_tune import drift_response
from actors.pair.pair_draft import PairDraft, PairDrafts
from protos.errors import ConflictError, RequestError
from protos.served_model import CheckDraft, ShowDraft, StopCanary, SwapDraft
from tests.actors.pair.simulated_pair import OLD, SimulatedTrialPair
from tests.actors.pair.test_auto_tune import NewIsFaster, settings, until_done


def drafts_of(*pairs: SimulatedTrialPair) -> PairDrafts:
    names = ("model", "prose", "code")
    return PairDrafts(
        [
            PairDraft(pair, replace(OLD, method=name), pair.goodput, lambda: 99.0, pair.sleep)
            for pair, name in zip(pairs, names, strict=False)
        ]
    )


def two_pairs() -> tuple[SimulatedTrialPair, SimulatedTrialPair]:
    return SimulatedTrialPair(NewIsFaster()), SimulatedTrialPair(NewIsFaster())


async def test_an_order_goes_to_the_draft_that_it_names_and_else_to_the_first() -> None:
    own, prose = two_pairs()
    drafts = drafts_of(own, prose)
    reports = await drafts.carry_out(SwapDraft("/new", 5.0, "prose"))
    assert [(each.method, each.path) for each in reports] == [("model", "/old"), ("prose", "/new")]
    await drafts.carry_out(SwapDraft("/third", 5.0))
    assert (own.starts, prose.starts) == (["/third"], ["/new"])
    assert [each.path for each in await drafts.carry_out(ShowDraft())] == ["/third", "/new"]
    assert await drafts.carry_out(StopCanary()) == drafts.reports


async def test_a_draft_that_nobody_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(RequestError, match=r"No draft is named 'prosa' here; choose from model, prose\."):
        await drafts_of(*two_pairs()).carry_out(CheckDraft("/new", "prosa"))


async def test_while_one_draft_is_exchanged_no_other_is() -> None:
    own, prose = two_pairs()
    drafts = drafts_of(own, prose)
    swap = asyncio.create_task(drafts.carry_out(SwapDraft("/new", 5.0)))
    await asyncio.sleep(0)
    with pytest.raises(ConflictError, match="replaced, checked or tried"):
        await drafts.carry_out(SwapDraft("/new", 5.0, "prose"))
    await swap
    assert (own.starts, prose.starts) == (["/new"], [])


@pytest.mark.parametrize(
    ("fallen", "trained"), [("prose-greedy-free", 1), ("model-greedy-free", 0), ("suffix-sampled-free", 0)]
)
async def test_an_alarm_tunes_the_draft_of_its_class_and_else_the_first(
    tmp_path: Path, fallen: str, trained: int
) -> None:
    pairs = two_pairs()
    drift_response(settings(tmp_path / "drafts", 0), drafts_of(*pairs))(fallen)
    await until_done()
    assert [bool(pair.starts) for pair in pairs] == [trained == 0, trained == 1]
    folder = Path(pairs[trained].path).parent
    assert folder == (tmp_path / "drafts" / "prose" if trained else tmp_path / "drafts")
