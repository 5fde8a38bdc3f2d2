"""Models with recurrent layers give the same texts with and without drafts, chunks, neighbours, prefixes and room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
    StepConfig,
)
from engine.engine_core.loading import load_engine
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.state_pool import StateSlots
from engine.model.generation_config import unread_warning
from engine.model.runner.model_runner import ModelRunner
from engine.sequence.sequence import TokenBlocks
from protos.block_keys import BlockKey, root_key
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams, VerifyMode
from tests.engine.fixtures.hybrids import HYBRIDS
from tests.engine.recurrent.long_texts import CASES, Family, P, Place

HITS = CASES["in company, then prefix hits"]


@pytest.fixture(scope="module", params=HYBRIDS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("lfm2"), "lfm2")


@pytest.mark.parametrize("name", CASES)
def test_every_case_gives_the_texts_without_drafts(family: Family, name: str):
    """Each has a text of every temperature and K."""
    outcome = family.outcome(CASES[name])
    assert outcome.num_differences == 0
    assert getattr(outcome, CASES[name].shows) > 0
    assert outcome.num_accepted > 0
    assert outcome.num_rejected > 0


def test_greedy_texts_are_transformers(family: Family):
    assert family.num_unlike_stock() == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_no_length_of_a_config_is_taken_for_unread(name: str):
    assert unread_warning(HYBRIDS[name]()) is None


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_greedy_texts_need_no_verification_of_one_kind(lfm2: Family, verify: VerifyMode):
    wanted = [replace(each, speculation=SpeculationParams(verify=verify)) for each in greedy(lfm2)]
    found = Place([lfm2.build(HITS)]).run(wanted)
    assert found == {each.request_id: lfm2.texts[each.request_id] for each in wanted}


def greedy(family: Family) -> list[GenerateRequest]:
    return [each for each in family.groups[0] if each.sampling.is_greedy]


_settle_states, _keep = BlockManager.settle_states, StateSlots.keep


def without_roll_back(manager: BlockManager, tokens: TokenBlocks) -> bool:
    """Take the state after a pass's last row for the state after the last committed token."""
    if tokens.states:
        kept = tokens.states.pop(max(tokens.states))
        if (old := tokens.states.pop(tokens.num_computed_tokens, None)) is not None:
            manager._states.drop(old)  # type: ignore[union-attr]
        tokens.states[tokens.num_computed_tokens] = kept
    return _settle_states(manager, tokens)


def with_late_snapshots(slots: StateSlots, key: BlockKey, slot: int) -> None:
    """Keep another slot than the one after the block's last token."""
    _keep(slots, key, slot % (slots.num_slots - 1) + 1)


def with_one_tenant(model_version: str, cache_salt: str = "") -> BlockKey:
    return root_key(model_version)


@pytest.mark.parametrize("mutant", [without_roll_back, with_late_snapshots])
def test_a_wrong_state_changes_texts(lfm2: Family, monkeypatch: pytest.MonkeyPatch, mutant: Any):
    owner, name = (BlockManager, "settle_states") if mutant is without_roll_back else (StateSlots, "keep")
    assert lfm2.texts
    monkeypatch.setattr(owner, name, mutant)
    monkeypatch.setattr("engine.scheduler.scheduler.Scheduler.check_integrity", lambda self: None)
    assert lfm2.outcome(HITS).num_differences > 0


def hit_tokens_of_another_tenant(family: Family) -> int:
    core = family.build(HITS)
    for salt in ("", "other"):
        Place([core]).run([replace(family.groups[0][4], cache_salt=salt)])
    return core.stats().num_prefix_hit_tokens


def test_tenants_share_no_state(lfm2: Family, monkeypatch: pytest.MonkeyPatch):
    assert hit_tokens_of_another_tenant(lfm2) == 0
    monkeypatch.setattr("engine.kv_cache.block_manager.root_key", with_one_tenant)
    assert hit_tokens_of_another_tenant(lfm2) > 0


def test_a_prompt_that_parts_from_a_cached_one_leaves_a_snapshot_there(lfm2: Family):
    core = lfm2.build(HITS, num_drafts=0)
    prompts = [(*range(1, 25), last, 7, 8, 9, 10) for last in (30, 31, 32)]
    hits = []
    for prompt in prompts:
        before = core.stats().num_prefix_hit_tokens
        Place([core]).run([GenerateRequest("parting", prompt, SamplingParams(temperature=0.0, max_tokens=2))])
        hits.append(core.stats().num_prefix_hit_tokens - before)
    assert hits == [0, 0, 24]


def test_states_take_at_most_half_of_the_memory_and_limit_the_sequences(lfm2: Family):
    core = lfm2.build(HITS, num_blocks=None, memory_bytes=1 << 14)
    assert core.blocks.max_sequences == ((1 << 13) // 512 - 1) // 3
    texts = Place([core]).run(greedy(lfm2))
    assert texts == {name: lfm2.texts[name] for name in texts}
    with pytest.raises(ConfigError, match=r"holds 1 states of the model's recurrent layers.*raise it"):
        lfm2.build(HITS, num_blocks=None, memory_bytes=1 << 10)


@pytest.mark.parametrize(("name", "option"), [("tree", {"tree_nodes": 8}), ("steps", {"steps": StepConfig()})])
def test_trees_and_steps_are_refused_by_name(lfm2: Family, name: str, option: dict[str, Any]):
    config = EngineConfig(ModelConfig(str(lfm2.folder)), CacheConfig(P, 64), speculation=SpeculationConfig(**option))
    reason = rf"speculation.{name} is set, but .* has recurrent layers.*remove speculation.{name}$"
    with pytest.raises(ConfigError, match=reason):
        load_engine(config)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}], ids=str)
def test_families_are_served_in_other_dtypes(family: Family, settings: dict[str, str]):
    runner = ModelRunner(ModelConfig(str(family.folder), **settings), CacheConfig(P, 8, memory_bytes=None))
    assert runner.num_states == 256
