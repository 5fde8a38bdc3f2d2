"""A draft model with a mask token (PARD) drafts in one pass, as its model computes masks, and changes no token."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch.draft import Draft
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.method_dispatcher import proposer_of
from engine.sequence.batch import DraftQuery
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, VerifyMode
from tests.engine.fixtures.ahead_proposer import AheadProposer
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, Folders, write_pair
from tests.engine.fixtures.hybrids import HYBRIDS, write_hybrid_pair

MASK_ID = 63
PROMPT = (5, 9, 33, 2, 17, 60, 5, 9, 41)
REQUESTS = [
    GenerateRequest(str(i), (*PROMPT, i), SamplingParams(temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, max_tokens=20))
    for i in range(6)
]


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A pair of llamas, or of a family with recurrent layers."""
    root, family = tmp_path_factory.mktemp("pair"), getattr(request, "param", None)
    if family is None:
        folders = write_pair(root, noise=0.02)
    else:
        config = HYBRIDS[family]()
        config.vocab_size = VOCAB_SIZE
        folders = write_hybrid_pair(root, config, noise=0.005)
    set_mask(folders.draft, MASK_ID)
    return folders


def set_mask(folder: Path, mask_id: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": mask_id}))


def proposer_at(folder: Path, num_blocks: int = 64) -> ModelProposer:
    model = ModelConfig(str(folder), dtype="float32", device="cpu")
    return ModelProposer.from_config(model, CacheConfig(8, num_blocks), SchedulerConfig(), VOCAB_SIZE)


def engine_of(folders: Folders, draft: Proposer | None, speculation: SpeculationConfig) -> EngineCore:
    config = EngineConfig(
        ModelConfig(str(folders.target), dtype="float32", device="cpu"),
        CacheConfig(8, 16),  # so small that sequences are preempted
        SchedulerConfig(max_model_len=64),
        speculation,
    )
    return load_engine(config, None if draft is None else proposer_of(speculation.methods, draft))


def texts(core: EngineCore, requests: Seq[GenerateRequest]) -> dict[str, tuple[int, ...]]:
    for request in requests:
        core.add(request)
    found: dict[str, tuple[int, ...]] = {}
    while core.has_work:
        for chunk in core.step():
            found[chunk.request_id] = found.get(chunk.request_id, ()) + chunk.token_ids
    return found


SPECULATION = SpeculationConfig(3, methods=(SpeculationMethod.MODEL,))


@pytest.mark.parametrize(
    ("folders", "tree_nodes"),
    [(None, 0), ("bamba", 0), (None, 5)],
    indirect=["folders"],
    ids=["chains", "recurrent chains", "trees"],
)
def test_one_pass_drafts_what_the_model_computes_after_masks_and_changes_no_token(
    tree_nodes: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = proposer_at(folders.draft, num_blocks=12)
    model = AutoModelForCausalLM.from_pretrained(folders.draft, dtype=torch.float32).eval()
    propose, checked = proposer.propose, []

    def recording(queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = propose(queries)
        for query, draft in zip(queries, drafts, strict=True):
            num = query.max_draft_tokens if draft.parents else len(draft.token_ids)
            if query.sequence.is_greedy and draft.token_ids:
                ids = [*query.sequence.token_ids, *[MASK_ID] * (num - 1)]
                with torch.no_grad():
                    expected = model(torch.tensor([ids])).logits[0, -num:].argmax(-1).tolist()
                num_equal = 1 if draft.parents else num
                checked.append(list(draft.token_ids[:num_equal]) == expected[:num_equal])
        return drafts

    monkeypatch.setattr(proposer, "propose", recording)
    core = engine_of(folders, proposer, replace(SPECULATION, tree_nodes=tree_nodes))
    assert texts(core, REQUESTS) == texts(engine_of(folders, None, SPECULATION), REQUESTS)
    assert len(checked) > 5
    assert all(checked)
    assert core.stats().drafts.num_accepted_tokens > 10
    assert core.stats().num_preemptions > 0
    shapes = core.stats().drafts.num_passes_by_shape
    assert shapes["tree" if tree_nodes else "block"] > 10


def test_greedy_text_is_the_same_under_rejection(folders: Folders) -> None:
    speculation = replace(SPECULATION, verify=VerifyMode.REJECTION)
    core = engine_of(folders, proposer_at(folders.draft), speculation)
    asked = [request for request in REQUESTS if request.sampling.temperature == 0.0]
    assert texts(core, asked) == texts(engine_of(folders, None, SPECULATION), asked)
    assert core.stats().drafts.num_accepted_tokens > 5


@pytest.mark.parametrize("verify", list(VerifyMode))
def test_drafts_ahead_take_one_pass_too_and_are_those_made_after_the_verdict(
    verify: VerifyMode, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the text of a seed under `rejection` would depend on the time that the draft had."""
    ahead = AheadProposer(proposer_at(folders.draft, num_blocks=256), fan_out=3)
    monkeypatch.setattr(ModelRunner, "plan_own_steps", None)
    speculation = replace(SPECULATION, verify=verify)
    core = engine_of(folders, ahead, speculation)
    found = texts(core, REQUESTS)
    assert core.stats().drafts.num_passes_by_shape["ahead"] > 10
    assert 0 < ahead.num_hits < ahead.num_lookups
    assert found == texts(engine_of(folders, proposer_at(folders.draft, num_blocks=256), speculation), REQUESTS)


@pytest.mark.parametrize("mask_id", [VOCAB_SIZE, "63", -1])
def test_a_mask_that_is_no_token_is_refused_by_name(mask_id: object, tmp_path: Path) -> None:
    draft = write_pair(tmp_path, noise=0.0).draft
    set_mask(draft, mask_id)
    with pytest.raises(ConfigError, match=f"mask token {mask_id!r} in config.json, and its ids are below 64"):
        proposer_at(draft)
