"""A draft with another tokenizer changes no output, is accepted for shared text, and loses no state."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch.draft import Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.loader import load_config
from engine.proposer import Proposer
from engine.proposer.draft_model.loader import TextProposer, load_drafter
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sampling.noise import gumbel
from engine.sampling.sampler import Purpose, row_keys
from protos.messages import GenerateRequest, SamplingParams, VerifyMode
from tests.engine.fixtures.ahead_proposer import AheadProposer
from tests.engine.fixtures.builders import make_scheduled, make_sequence, sequence_of
from tests.engine.fixtures.checkpoints import Folders
from tests.engine.fixtures.hybrids import HYBRIDS, write_hybrid
from tests.engine.fixtures.pairs.foreign_pair import COVERAGE, write_foreign_pair, write_small_pair
from tests.engine.fixtures.tabular import chi_square_tail
from tests.serve.reference_probs import probs_of_first_tokens

K = 3
MAX_TOKENS = 24
ALPHA = 1e-4
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5),
    SamplingParams(temperature=1.2, top_k=8, logit_bias=((5, 2.0),)),
)
CACHE = CacheConfig(num_blocks=512, block_size=4, memory_bytes=None)

Texts = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_foreign_pair(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_small_pair(tmp_path_factory.mktemp("small"))


def intersection(folders: Folders, *, has_trees: bool = False) -> Proposer:
    model = ModelConfig(str(folders.draft), dtype="float32", num_threads=1)
    return load_drafter(model, CACHE, SchedulerConfig(), str(folders.target), has_trees=has_trees)[0]


def ahead(folders: Folders) -> Proposer:
    proposer = intersection(folders)
    assert isinstance(proposer, ModelProposer)
    return AheadProposer(proposer, fan_out=3)


def trees(folders: Folders) -> Proposer:
    return intersection(folders, has_trees=True)


def text(folders: Folders) -> Proposer:
    with patch(COVERAGE, 1.1):
        return intersection(folders)


def new_engine(
    folders: Folders, proposer: Proposer | None, verify: VerifyMode = VerifyMode.COUPLED, tree_nodes: int = 0
) -> EngineCore:
    model = ModelConfig(str(folders.target), dtype="float32", num_threads=1)
    speculation = SpeculationConfig(K if proposer else 0, verify, tree_nodes=tree_nodes)
    limits = SchedulerConfig(max_num_sequences=256, max_model_len=128)
    return load_engine(EngineConfig(model, replace(CACHE, num_blocks=2048), limits, speculation), proposer)


def generate(engine: EngineCore, requests: Seq[GenerateRequest]) -> Texts:
    texts: Texts = {request.request_id: () for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for chunk in engine.step():
            texts[chunk.request_id] += chunk.token_ids
    return texts


def requests(samplings: Seq[SamplingParams] = SAMPLINGS) -> list[GenerateRequest]:
    dice = random.Random(0)
    return [
        GenerateRequest(
            str(index),
            tuple(dice.choices(range(1, 40), k=5 + index)),
            replace(sampling, seed=index, max_tokens=MAX_TOKENS),
        )
        for index, sampling in enumerate(samplings * 2)
    ]


@pytest.fixture(scope="module")
def reference(folders: Folders) -> Texts:
    return generate(new_engine(folders, None), requests())


@pytest.mark.parametrize(("drafting", "least"), [(intersection, 1.4), (ahead, 1.4), (trees, 1.6), (text, 1.02)])
def test_the_output_is_the_one_without_a_draft(
    folders: Folders, reference: Texts, drafting: Callable[[Folders], Proposer], least: float
) -> None:
    proposer = drafting(folders)
    engine = new_engine(folders, proposer, tree_nodes=8 if drafting is trees else 0)
    assert generate(engine, requests()) == reference
    assert engine.stats().drafts.acceptance_length > least
    if isinstance(proposer, AheadProposer):
        assert proposer.num_hits > 0.3 * proposer.num_lookups


def test_shared_noise_goes_by_the_targets_ids(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = requests([SamplingParams(temperature=1.0)] * 4)
    plain, engine = generate(new_engine(folders, None), warm), new_engine(folders, intersection(folders))
    assert generate(engine, warm) == plain
    coupled = engine.stats().drafts.acceptance_length

    mutant = intersection(folders)
    assert isinstance(mutant, ModelProposer)
    monkeypatch.setattr(mutant._model.sampler._sampler, "sample", sample_by_other_ids)
    engine = new_engine(folders, mutant)
    assert generate(engine, warm) == plain
    assert engine.stats().drafts.acceptance_length < coupled - 0.3


def sample_by_other_ids(scores: torch.Tensor, rows: Seq) -> torch.Tensor:
    noise = gumbel(row_keys(rows, Purpose.TARGET_GUMBEL, scores.device), scores.shape[1])
    return (scores + noise.roll(1, dims=1)).argmax(dim=1)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The draft has recurrent layers and random weights."""
    pair = write_foreign_pair(tmp_path_factory.mktemp("recurrent"))
    config = HYBRIDS["bamba"]()
    config.vocab_size = int(load_config(str(pair.draft)).vocab_size)
    write_hybrid(pair.draft, config)
    return pair


@pytest.mark.parametrize("pair", ["folders", "recurrent"])
@pytest.mark.parametrize("new_proposer", [intersection, text])
def test_a_draft_depends_on_nothing_but_what_is_committed(
    request: pytest.FixtureRequest, pair: str, new_proposer: Callable[[Folders], Proposer]
) -> None:
    """Rounds with every outcome; each draft equals a fresh model's."""
    folders: Folders = request.getfixturevalue(pair)
    proposer, fresh = new_proposer(folders), new_proposer(folders)
    dice = random.Random(3)
    sequence = sequence_of(requests()[1], 5)
    proposer.open(sequence)
    num_accepted = 0
    for round_index in range(25):
        (draft,) = proposer.propose([make_scheduled(sequence, 5)])
        other = sequence_of(sequence.request, 5)
        other.token_ids = list(sequence.token_ids)
        fresh.open(other)
        assert fresh.propose([make_scheduled(other, 5)]) == [draft], round_index
        fresh.close(other.request_id)
        num_accepted = dice.randint(0, len(draft.token_ids))
        sequence.token_ids += [*draft.token_ids[:num_accepted], dice.randint(1, 40)]
        proposer.commit([sequence])
        check_integrity(proposer)
    proposer.close(sequence.request_id)
    check_integrity(proposer)


def check_integrity(proposer: Proposer) -> None:
    if isinstance(proposer, TextProposer):
        proposer.check_integrity()
    if isinstance(proposer, ModelProposer):
        proposer.sequences.check_integrity()


def test_a_draft_through_text_is_what_the_draft_model_says_next(folders: Folders) -> None:
    proposer = text(folders)
    assert isinstance(proposer, TextProposer)
    pair = proposer._pair
    model = AutoModelForCausalLM.from_pretrained(folders.draft).eval()
    for prompt in ("a draft of the next token", "that it counts at t", "go"):
        ids = pair.target.encode(prompt)
        sequence = make_sequence(prompt, tuple(ids))
        proposer.open(sequence)
        (draft,) = proposer.propose([make_scheduled(sequence, 4)])
        own_ids = pair.draft.encode(prompt)
        for _ in range(12):
            own_ids.append(int(model(torch.tensor([own_ids])).logits[0, -1].argmax()))
        said = pair.draft.spell(own_ids)[len(prompt) :]
        drafted = pair.target.spell(draft.token_ids)
        assert drafted
        assert said.startswith(drafted)


def test_trees_and_drafts_made_ahead_do_not_go_through_text(folders: Folders) -> None:
    model = ModelConfig(str(folders.draft), dtype="float32")
    with patch(COVERAGE, 1.1):
        assert isinstance(intersection(folders), TextProposer)
        assert isinstance(intersection(folders, has_trees=True), ModelProposer)
        proposer, ahead = load_drafter(model, CACHE, SchedulerConfig(), str(folders.target), is_ahead=True)
    assert isinstance(proposer, ModelProposer)
    assert ahead is not None


# ---- verification by ratios: samples against the exact distribution -------------------------------------------------

NUM_SAMPLES = 2000  # swapping two of 12 tokens in a distribution has TV > 0.1, which chi-square detects with certainty
PROMPT = (1, 5, 3)


def p_value(folders: Folders, proposer: Proposer, verify: VerifyMode) -> float:
    """Of the first two tokens of NUM_SAMPLES requests."""
    probs = probs_of_first_tokens(
        AutoModelForCausalLM.from_pretrained(folders.target), list(PROMPT), SamplingParams(), 2
    )
    sampled = [
        GenerateRequest(str(seed), PROMPT, SamplingParams(seed=seed, max_tokens=4)) for seed in range(NUM_SAMPLES)
    ]
    texts = generate(new_engine(folders, proposer, verify), sampled)
    pairs = torch.tensor([token_ids[:2] for token_ids in texts.values()])
    return chi_square_tail(pairs, probs.view(12, 12))


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_drafts_of_shared_tokens_leave_the_distribution_as_it_is(small: Folders, verify: VerifyMode) -> None:
    assert p_value(small, intersection(small), verify) > ALPHA


def test_drafts_through_text_leave_the_distribution_as_it_is(small: Folders) -> None:
    assert p_value(small, text(small), VerifyMode.REJECTION) > ALPHA


def test_a_distribution_that_is_mapped_otherwise_than_its_draw_is_found_out(small: Folders) -> None:
    """The adversary maps the drawn token by one table, and its distribution by another."""
    proposer = intersection(small)

    class TranslationMutant:
        open, commit, close = proposer.open, proposer.commit, proposer.close

        def propose(self, batch):
            return [self._remap(draft) for draft in proposer.propose(batch)]

        def _remap(self, draft: Draft) -> Draft:
            distributions = [
                replace(
                    distribution,
                    token_ids=(*distribution.token_ids[1:], distribution.token_ids[0])
                    if len(distribution.token_ids) > 1
                    else distribution.token_ids,
                )
                for distribution in draft.distributions
            ]
            return Draft(draft.token_ids, tuple(distributions))

    assert p_value(small, TranslationMutant(), VerifyMode.REJECTION) < ALPHA
