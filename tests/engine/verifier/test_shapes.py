"""Shapes that change in every pass change no token: none, chains, trees, and drafts ahead of the verdict.

The plan of each pass is drawn at random from everything that the limits allow, in place of the policy, whose choices
depend on a clock. Grammars, penalties, choices and temperatures share the batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from engine.accounting.draft_shapes import DraftSize
from engine.accounting.length_policy import LengthPolicy
from engine.batch.draft import Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ModelDtype,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer import Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sequence.batch import CheckedDraft
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest, Grammar, GrammarKind, SamplingParams
from tests.engine.fixtures.ahead_proposer import AheadProposer
from tests.engine.fixtures.checkpoints import Folders, write_letters, write_pair

MAX_TOKENS = 20
TREE = 7
GRAMMAR = Grammar(GrammarKind.REGEX, "([a-f][g-m]|n[a-z]{2})*", "guided_regex")
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, presence_penalty=1.5, repetition_penalty=1.2),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0),  # the second choice of the request before
    SamplingParams(temperature=0.0, grammar=GRAMMAR, stop_token_ids=(0,)),
    SamplingParams(temperature=1.0, grammar=GRAMMAR, stop_token_ids=(0,)),
    SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.7),
    SamplingParams(temperature=1.0, logit_bias=((5, 4.0),), stop_token_ids=(1,), min_tokens=6),
)
Texts = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A pair whose tokens are single letters."""
    pair = write_pair(tmp_path_factory.mktemp("pair"), noise=0.1)
    for folder in (pair.target, pair.draft):
        write_letters(folder)
    return pair


def trees(folders: Folders) -> ModelProposer:
    model, cache = (
        ModelConfig(str(folders.draft), dtype=ModelDtype.FLOAT32),
        CacheConfig(num_blocks=256, memory_bytes=None),
    )
    return ModelProposer.from_config(model, cache, SchedulerConfig())


def ahead(folders: Folders) -> AheadProposer:
    return AheadProposer(trees(folders), fan_out=3)


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            str(index),
            tuple(range(3 + index, 12 + index)),
            replace(sampling, seed=index - (index == 3), max_tokens=MAX_TOKENS),
            sample_index=int(index == 3),
        )
        for index, sampling in enumerate(SAMPLINGS)
    ]


def build(folders: Folders, proposer: Proposer | None) -> EngineCore:
    speculation = SpeculationConfig(4, max_num_tokens=6, tree_nodes=TREE, adaptive=True)
    model = ModelConfig(str(folders.target), dtype=ModelDtype.FLOAT32)
    limits, cache = SchedulerConfig(max_model_len=128), CacheConfig(num_blocks=256, memory_bytes=None)
    return load_engine(EngineConfig(model, cache, limits, speculation), proposer)


def generate(engine: EngineCore, batch_size: int) -> Texts:
    texts: Texts = {}
    pending = requests()
    while pending:
        for request in pending[:batch_size]:
            if (compiled := engine.prepare(request)) is not None:
                compiled.result(60)
            engine.add(request)
        pending = pending[batch_size:]
        while engine.has_work:
            for chunk in engine.step():
                texts[chunk.request_id] = texts.get(chunk.request_id, ()) + chunk.token_ids
            engine.scheduler.check_integrity()
    return texts


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Texts:
    return generate(build(folders, None), 1)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Draw every plan at random, and note the shapes that were verified."""
    dice, shapes = random.Random(0), set[str]()

    def any_sizes(policy: LengthPolicy, sequences: Seq[Sequence]) -> list[DraftSize]:
        return [_any_size(dice, each) for each in sequences]

    computed = vars(CheckedDraft)["computed"].fget

    def noted(checked: CheckedDraft) -> Draft:
        draft: Draft = computed(checked)
        shapes.add("none" if not draft.token_ids else "tree" if draft.depth < len(draft.token_ids) else "chain")
        return draft

    monkeypatch.setattr(LengthPolicy, "sizes", any_sizes)
    monkeypatch.setattr(CheckedDraft, "computed", property(noted))
    return shapes


def _any_size(dice: random.Random, sequence: Sequence) -> DraftSize:
    length = dice.randint(0, sequence.num_draft_tokens)
    return DraftSize(length, dice.choice([0, dice.randint(0, sequence.num_tree_nodes)]) if length else 0)


@pytest.mark.parametrize("batch_size", [1, len(SAMPLINGS)])
@pytest.mark.parametrize("proposer", [trees, ahead])
def test_shapes_that_change_in_every_pass_change_no_token(
    proposer: Callable[[Folders], Proposer], batch_size: int, folders: Folders, plain: Texts, seen: set[str]
) -> None:
    engine = build(folders, drafter := proposer(folders))
    assert generate(engine, batch_size) == plain
    assert seen == {"none", "chain", "tree"}
    drafts = engine.stats().drafts
    assert drafts.acceptance_length > 1.5
    assert drafts.num_passes_by_shape.keys() == seen | ({"ahead"} if isinstance(drafter, AheadProposer) else set())
    assert sum(drafts.num_passes_by_shape.values()) - drafts.num_passes_by_shape["none"] == drafts.num_drafts
    if isinstance(drafter, AheadProposer):
        assert 0 < drafter.num_hits < drafter.num_lookups


def test_a_plan_of_rows_that_drops_a_branch_is_caught(
    folders: Folders, plain: Texts, seen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant computes all rows of a tree as one chain."""
    noted = vars(CheckedDraft)["computed"].fget

    def without_branches(checked: CheckedDraft) -> Draft:
        draft: Draft = noted(checked)
        return replace(draft, parents=tuple(range(-1, len(draft.parents) - 1)))

    monkeypatch.setattr(CheckedDraft, "computed", property(without_branches))
    assert generate(build(folders, trees(folders)), len(SAMPLINGS)) != plain
