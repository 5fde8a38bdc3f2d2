"""Models with recurrent layers draft, as a draft model or for themselves: no text changes, and states roll back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from engine.batch.span import SpanStates
from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.kv_cache.state_pool import StateSlots
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sequence.sequence import ZEROS
from protos.errors import ConfigError
from tests.engine.fixtures.hybrids import HYBRIDS
from tests.engine.recurrent.long_texts import CASES, GROUP, Family, P, Place, SpoiledProposer
from tests.engine.recurrent.test_hybrid_exactness import HITS, without_roll_back


@pytest.fixture(scope="module", params=HYBRIDS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("bamba"), "bamba")


@pytest.mark.parametrize("drafter", ["model", "self"])
def test_drafts_of_few_bits_change_no_text(family: Family, drafter: str):
    """Of every temperature and K, in company, then with prefix hits."""
    outcome = family.outcome(HITS, drafter)
    assert outcome.num_differences == 0
    assert outcome.num_hit_tokens > 0
    assert outcome.num_accepted > outcome.num_rejected > 0


@pytest.mark.parametrize("name", CASES)
def test_drafts_ahead_of_verification_change_no_text_in_any_case(bamba: Family, name: str):
    outcome = bamba.outcome(CASES[name], "ahead")
    assert outcome.num_differences == 0
    assert getattr(outcome, CASES[name].shows) > 0
    assert outcome.num_accepted > 0


def test_a_twin_of_the_target_is_right_up_to_each_wrong_token(family: Family):
    """So it starts from the state after the accepted tokens: at every temperature and K, after prefix hits too."""
    accepted, right = twin_counts(family)
    assert accepted == right > 0


@pytest.mark.parametrize("num_states", [4, 40])
def test_few_states_cost_drafts_and_nothing_else(bamba: Family, num_states: int):
    def with_few(proposer: SpoiledProposer) -> None:
        proposer.model.sequences.blocks._states = StateSlots(num_states, GROUP)

    accepted, right = twin_counts(bamba, with_few)
    assert accepted == right > 0


def test_a_budget_of_few_states_is_named(bamba: Family, caplog: pytest.LogCaptureFixture):
    model, cache = ModelConfig(str(bamba.folder), dtype="float32"), CacheConfig(P, memory_bytes=1 << 18)
    ModelProposer.from_config(model, cache, SchedulerConfig())
    assert "of 256 recurrent states" in caplog.text
    assert "raise cache.memory_gib" in caplog.text


def twin_counts(family: Family, change: Callable[[SpoiledProposer], None] = lambda _: None) -> tuple[int, int]:
    """Return how many drafts of a twin were accepted, and how many came before a wrong token; no text is different."""
    core = family.build(HITS, drafter="twin")
    proposer = core._speculation.proposer
    assert isinstance(proposer, SpoiledProposer)
    change(proposer)
    for _ in range(2):
        assert Place([core]).run(family.groups[0]) == family.texts
    return core.stats().drafts.num_accepted_tokens, proposer.num_right


def test_a_draft_that_is_not_rolled_back_is_rejected(bamba: Family):
    def without(proposer: SpoiledProposer) -> None:
        manager = proposer.model.sequences.blocks
        manager.settle_states = partial(without_roll_back, manager)  # type: ignore[method-assign]

    accepted, right = twin_counts(bamba, without)
    assert accepted < 0.8 * right


def from_nothing(states: SpanStates, row: int) -> SpanStates:
    """Start each row from the state before the text."""
    return SpanStates(ZEROS, {})


def test_drafts_without_a_state_are_rejected(bamba: Family, monkeypatch: pytest.MonkeyPatch):
    expected = bamba.outcome(HITS, "self").num_accepted
    monkeypatch.setattr(SpanStates, "at_row", from_nothing)
    accepted, right = twin_counts(bamba)
    assert accepted < 0.8 * right
    assert bamba.outcome(HITS, "self").num_accepted < 0.8 * expected


def test_trees_of_a_draft_are_refused_by_name(bamba: Family):
    model, cache = ModelConfig(str(bamba.folder), dtype="float32"), CacheConfig(P, 64, memory_bytes=None)
    with pytest.raises(ConfigError, match=r"speculation\.tree is set, but the draft .* has recurrent layers.*remove"):
        ModelProposer.from_config(model, cache, SchedulerConfig(), has_trees=True)
