"""Models with recurrent layers give the same texts with and without drafts, chunks, neighbours, prefixes and room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import (
    CacheConfig,
    EngineConfig,
    HeadConfig,
    HeadKind,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    TreeConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.state_pool import StateSlots
from engine.model.position_limit import unread_warning
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sequence.request_tokens import TokenBlocks
from protos.block_keys import BlockKey, root_key
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams, VerifyMode
from tests.engine.fixtures.fakes import ScriptedProposer
from tests.engine.fixtures.hybrids import HYBRIDS, VOCAB_SIZE, write_hybrid

P = 4
NUM_PROMPTS = 5
MAX_TOKENS = 14
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9),
]
Texts = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the same texts."""

    num_drafts: int = 0
    max_tokens_per_step: int = 256
    num_blocks: int = 256
    max_num_sequences: int = 8
    num_rounds: int = 1
    memory_bytes: int | None = None


WAYS = {
    "together": Way(),
    "odd chunks, then prefix hits": Way(max_tokens_per_step=7, num_rounds=2),
    "1 draft": Way(num_drafts=1),
    "3 drafts, odd chunks, prefix hits": Way(num_drafts=3, max_tokens_per_step=9, num_rounds=2),
    "8 drafts, preempted": Way(num_drafts=8, num_blocks=16, num_rounds=2),
    "5 drafts, evicted": Way(num_drafts=5, num_blocks=24, num_rounds=3, max_num_sequences=2),
}


@pytest.fixture(scope="module", params=HYBRIDS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    return Family(folder, write_hybrid(folder, HYBRIDS[request.param]()))


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("lfm2")
    return Family(folder, write_hybrid(folder, HYBRIDS["lfm2"]()))


class Family:
    """A checkpoint, and its texts one by one without drafts or a prefix cache."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self.folder, self.model = folder, model
        self._texts: Texts | None = None

    @property
    def texts(self) -> Texts:
        if self._texts is None:
            core = build(self.folder, Way(max_num_sequences=1), enable_prefix_caching=False)
            self._texts = {name: text for each in requests() for name, text in run(core, [each]).items()}
        return self._texts


def build(folder: Path, way: Way, texts: Texts | None = None, **cache: Any) -> EngineCore:
    speculation = SpeculationConfig(
        way.num_drafts, max_num_tokens=8, methods=(SpeculationMethod.MODEL,), adaptive=False
    )
    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32"),
        CacheConfig(**{"block_size": P, "num_blocks": way.num_blocks, "memory_bytes": None, **cache}),
        SchedulerConfig(way.max_num_sequences, way.max_tokens_per_step, max_model_len=60),
        speculation,
    )
    return load_engine(config, None if way.num_drafts == 0 else Guesses(texts or {}))


class Guesses(ScriptedProposer):
    """Proposes the coming text with a wrong token at changing places."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(self._guess)
        self._texts = texts

    def _guess(self, sequence: Any, max_tokens: int) -> list[int]:
        at = sequence.num_output_tokens
        known = self._texts[sequence.request_id.partition("/")[0]][at : at + max_tokens]
        wrong = (5 * at + len(sequence.request_id)) % (max_tokens + 2)
        return [(token + (index == wrong)) % VOCAB_SIZE for index, token in enumerate(known)]


def requests(verify: VerifyMode = VerifyMode.COUPLED, temperature: float | None = None) -> list[GenerateRequest]:
    """Most of them begin with the same 13 tokens."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(1, VOCAB_SIZE, (13,), generator=generator).tolist()
    found = []
    for index in range(NUM_PROMPTS):
        own = torch.randint(1, VOCAB_SIZE, (2 + 5 * index,), generator=generator).tolist()
        sampling = replace(SAMPLINGS[index % len(SAMPLINGS)], seed=index, max_tokens=MAX_TOKENS)
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        prompt = (*(shared if index else ()), *own)
        found.append(GenerateRequest(str(index), prompt, sampling, SpeculationParams(verify=verify)))
    return found


def run(core: EngineCore, wanted: Iterable[GenerateRequest]) -> Texts:
    texts: Texts = {}
    for each in wanted:
        core.add(each)
        texts[each.request_id] = []
    for _ in range(2_000):
        if not core.has_work:
            return texts
        for chunk in core.step():
            texts[chunk.request_id] += chunk.token_ids
        core.scheduler.check_integrity()
    raise AssertionError("the engine makes no progress")


def check(family: Family, way: Way, **cache: Any) -> EngineCore:
    core = build(family.folder, way, family.texts, **cache)
    for turn in range(way.num_rounds):
        found = run(core, [replace(each, request_id=f"{each.request_id}/{turn}") for each in requests()])
        assert {name.partition("/")[0]: text for name, text in found.items()} == family.texts
    return core


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_gives_the_texts_of_one_sequence_alone(lfm2: Family, way: Way):
    check(lfm2, way)


@pytest.mark.parametrize("name", ["3 drafts, odd chunks, prefix hits", "8 drafts, preempted"])
def test_every_family_gives_the_texts_of_one_sequence_alone(family: Family, name: str):
    check(family, WAYS[name])


def test_greedy_texts_are_transformers(family: Family):
    for each in requests():
        if each.sampling.temperature == 0.0:
            inputs = torch.tensor([each.prompt_token_ids])
            with torch.inference_mode():
                output = family.model.generate(inputs, max_new_tokens=MAX_TOKENS, do_sample=False, use_cache=False)
            assert family.texts[each.request_id] == output[0, len(each.prompt_token_ids) :].tolist()


@pytest.mark.parametrize("name", HYBRIDS)
def test_no_length_of_a_config_is_taken_for_unread(name: str):
    assert unread_warning(HYBRIDS[name]()) is None


def test_a_request_goes_on_elsewhere_with_the_same_text(family: Family):
    core = build(family.folder, WAYS["3 drafts, odd chunks, prefix hits"], family.texts)
    moved = [replace(each, output_token_ids=tuple(family.texts[each.request_id][:5])) for each in requests()]
    assert run(core, moved) == {name: text[5:] for name, text in family.texts.items()}


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_greedy_texts_need_no_verification_of_one_kind(lfm2: Family, verify: VerifyMode):
    plain = run(build(lfm2.folder, Way()), requests(temperature=0.0))
    assert run(build(lfm2.folder, Way(num_drafts=4), plain), requests(verify, temperature=0.0)) == plain


def test_the_ways_reuse_prefixes_preempt_and_evict(lfm2: Family):
    hits = check(lfm2, WAYS["3 drafts, odd chunks, prefix hits"]).stats()
    assert hits.num_prefix_hit_tokens > 60
    drafts = hits.drafts.values() if isinstance(hits.drafts, dict) else [hits.drafts]
    assert any(0 < each.num_accepted_tokens < each.num_draft_tokens for each in drafts)
    assert check(lfm2, WAYS["8 drafts, preempted"]).stats().num_preemptions > 0


_settle_states, _keep = BlockManager.settle_states, StateSlots.keep


def without_roll_back(manager: BlockManager, tokens: TokenBlocks) -> None:
    """Take the state after a pass's last row for the state after the last committed token."""
    if tokens.states:
        kept = tokens.states.pop(max(tokens.states))
        if (old := tokens.states.pop(tokens.num_computed_tokens, None)) is not None:
            manager._states.drop(old)  # type: ignore[union-attr]
        tokens.states[tokens.num_computed_tokens] = kept
    _settle_states(manager, tokens)


def with_late_snapshots(slots: StateSlots, key: BlockKey, slot: int) -> None:
    """Keep another slot than the one after the block's last token."""
    _keep(slots, key, slot % (slots.num_slots - 1) + 1)


def with_one_tenant(model_version: str, cache_salt: str = "") -> BlockKey:
    return root_key(model_version)


@pytest.mark.parametrize("mutant", [without_roll_back, with_late_snapshots])
def test_a_wrong_state_changes_texts(lfm2: Family, monkeypatch: pytest.MonkeyPatch, mutant: Any):
    owner, name = (BlockManager, "settle_states") if mutant is without_roll_back else (StateSlots, "keep")
    monkeypatch.setattr(owner, name, mutant)
    monkeypatch.setattr("engine.scheduler.scheduler.Scheduler.check_integrity", lambda self: None)
    with pytest.raises(AssertionError):
        check(lfm2, WAYS["3 drafts, odd chunks, prefix hits"])


def hit_tokens_of_another_tenant(family: Family) -> int:
    core = build(family.folder, Way())
    for salt in ("", "other"):
        run(core, [replace(requests()[3], request_id=f"of {salt}", cache_salt=salt)])
    return core.stats().num_prefix_hit_tokens


def test_tenants_share_no_state(lfm2: Family, monkeypatch: pytest.MonkeyPatch):
    assert hit_tokens_of_another_tenant(lfm2) == 0
    monkeypatch.setattr("engine.kv_cache.block_manager.root_key", with_one_tenant)
    assert hit_tokens_of_another_tenant(lfm2) > 0


def test_a_prompt_that_parts_from_a_cached_one_leaves_a_snapshot_there(lfm2: Family):
    core = build(lfm2.folder, Way())
    prompts = [(*range(1, 25), last, 7, 8, 9, 10) for last in (30, 31, 32)]
    hits = []
    for prompt in prompts:
        before = core.stats().num_prefix_hit_tokens
        run(core, [GenerateRequest(f"of {prompt[24]}", prompt, SamplingParams(temperature=0.0, max_tokens=2))])
        hits.append(core.stats().num_prefix_hit_tokens - before)
    assert hits == [0, 0, 24]


def test_states_take_at_most_half_of_the_memory_and_limit_the_sequences(lfm2: Family):
    core = check(lfm2, Way(num_drafts=3, num_rounds=2), num_blocks=None, memory_bytes=1 << 14)
    assert core.blocks.max_sequences == ((1 << 13) // 512 - 1) // 3
    with pytest.raises(ConfigError, match=r"holds 1 states of the model's recurrent layers.*raise it"):
        build(lfm2.folder, Way(), num_blocks=None, memory_bytes=1 << 10)


def test_trees_are_refused_by_name(lfm2: Family):
    config = EngineConfig(
        ModelConfig(str(lfm2.folder)), CacheConfig(P, 64), speculation=SpeculationConfig(tree=TreeConfig())
    )
    with pytest.raises(ConfigError, match=r"speculation\.tree is set, but .* has recurrent layers"):
        load_engine(config)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}], ids=str)
def test_families_are_served_in_other_dtypes(family: Family, settings: dict[str, str]):
    runner = ModelRunner(ModelConfig(str(family.folder), **settings), CacheConfig(P, 8, memory_bytes=None))
    assert runner.num_states == 256


def test_self_and_drafts_with_recurrent_layers_are_refused_by_name(lfm2: Family):
    model, cache = ModelConfig(str(lfm2.folder), dtype="float32"), CacheConfig(P, 64, memory_bytes=None)
    with pytest.raises(ConfigError, match=r"draft\.kind is 'self', which on 'cpu' needs .* the target's is 'lfm2'"):
        ModelRunner(model, cache, head=HeadConfig(HeadKind.SELF, num_layers=1))
    with pytest.raises(ConfigError, match="has recurrent layers, which a draft model cannot have"):
        ModelProposer.from_config(model, cache, SchedulerConfig())
