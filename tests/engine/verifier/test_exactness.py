"""The output is a function of prompt, seed and target only: a matrix of everything else shows no difference.

All tests use float32 and one tiny random model, whose logits are steep enough for rounding not to matter. The reference
is plain decoding of each prompt alone, in an engine with room for everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import pytest

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
from engine.proposer import NoProposer, Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.text_match.suffix import SuffixProposer
from engine.proposer.text_match.text_matcher import NgramProposer
from engine.sequence.batch import ScheduledSequence
from protos.messages import GenerateRequest, SamplingParams, TokenLogprobs, VerifyMode
from tests.engine.fixtures.ahead_proposer import AheadProposer
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, Folders, write_pair

NUM_PROMPTS = 16
MAX_TOKENS = 24

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=5, min_p=0.05),
    SamplingParams(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=0.9, repetition_penalty=1.4, num_logprobs=3),
    SamplingParams(temperature=1.0, logit_bias=((5, 4.0), (9, -100.0)), bad_words=((5, 5), (7,))),
    SamplingParams(temperature=1.0, stop_token_ids=(1, 2, 3), min_tokens=6),
)


class RandomProposer(NoProposer):
    """Proposes random ids of random length, some of them outside the vocabulary."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def propose(self, batch: Seq[ScheduledSequence]) -> list[Draft]:
        return [Draft(tuple(self._ids(scheduled.max_draft_tokens))) for scheduled in batch]

    def _ids(self, max_tokens: int) -> list[int]:
        return [self._random.randrange(-1, VOCAB_SIZE + 1) for _ in range(self._random.randint(0, max_tokens))]


class TreeAdversary(RandomProposer):
    """Random trees: equal siblings, ids outside the vocabulary, too many or too deep nodes, and impossible parents."""

    def propose(self, batch: Seq[ScheduledSequence]) -> list[Draft]:
        return [self._tree(self._ids(scheduled.max_draft_rows + 2)) for scheduled in batch]

    def _tree(self, ids: list[int]) -> Draft:
        highest = [node - (self._random.random() < 0.98) for node in range(len(ids))]  # 1 in 50 is its own parent
        return Draft(tuple(ids), (), tuple(self._random.randint(-1, high) for high in highest))


class Oracle(NoProposer):
    """Knows the text, and hides it in a tree: the right token is the last of three siblings at every depth."""

    def __init__(self, texts: dict[str, Text]) -> None:
        self._texts = texts

    def propose(self, batch: Seq[ScheduledSequence]) -> list[Draft]:
        return [self._tree(scheduled) for scheduled in batch]

    def _tree(self, scheduled: ScheduledSequence) -> Draft:
        sequence = scheduled.sequence
        known = self._texts[sequence.request_id].token_ids[sequence.num_output_tokens :]
        right = known[: min(scheduled.max_draft_tokens, scheduled.max_tree_nodes // 3)]
        token_ids = [(token + off) % VOCAB_SIZE for token in right for off in (1, 2, 0)]
        parents = [3 * depth - 1 for depth in range(len(right)) for _ in range(3)]
        return Draft(tuple(token_ids), (), tuple(parents))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_pair(tmp_path_factory.mktemp("pair"), noise=0.1)


def no_draft(folders: Folders) -> Proposer:
    return NoProposer()


def ngram(folders: Folders) -> Proposer:
    return NgramProposer(min_size=1, max_size=3)


def suffix(folders: Folders) -> Proposer:
    return SuffixProposer()


def model(folders: Folders) -> Proposer:
    return ModelProposer.from_config(
        ModelConfig(str(folders.draft), dtype="float32"),
        CacheConfig(num_blocks=256, memory_bytes=None),
        SchedulerConfig(),
    )


def ahead(folders: Folders) -> Proposer:
    proposer = model(folders)
    assert isinstance(proposer, ModelProposer)
    return AheadProposer(proposer, fan_out=3)


def dynamic_trees(folders: Folders) -> Proposer:
    return model(folders)


def adversary(folders: Folders) -> Proposer:
    return RandomProposer()


def tree_adversary(folders: Folders) -> Proposer:
    return TreeAdversary()


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to compute the same text."""

    proposer: Callable[[Folders], Proposer] = no_draft
    num_draft_tokens: int = 0
    num_at_once: int = NUM_PROMPTS
    max_tokens_per_step: int = 2048
    num_blocks: int = 256
    verify: VerifyMode = VerifyMode.COUPLED
    num_repeats: int = 1  # from the second on, prompts hit the prefix cache
    tree_nodes: int = 0
    adaptive: bool = False


REFERENCE = Setup(num_at_once=1)
TREE = 9

SETUPS = {
    "batched": Setup(),
    "chunked prefill": Setup(max_tokens_per_step=7),
    "forced preemption": Setup(num_blocks=10),
    "prefix hits": Setup(num_repeats=2),
    "n-gram": Setup(ngram, 4),
    "suffix": Setup(suffix, 6),
    "suffix, finished texts": Setup(suffix, 6, num_repeats=2),
    "suffix, preempted": Setup(suffix, 4, num_blocks=10),
    "adversary": Setup(adversary, 4),
    "adversary, alone": Setup(adversary, 8, num_at_once=1),
    "adversary, chunked and preempted": Setup(adversary, 5, max_tokens_per_step=40, num_blocks=10),
    "tree adversary": Setup(tree_adversary, 4, tree_nodes=TREE),
    "tree adversary, alone": Setup(tree_adversary, 8, num_at_once=1, tree_nodes=TREE),
    "tree adversary, chunked and preempted": Setup(
        tree_adversary, 5, max_tokens_per_step=40, num_blocks=10, tree_nodes=TREE
    ),
    "tree adversary where chains are wanted": Setup(tree_adversary, 4),
    "draft trees": Setup(dynamic_trees, 4, tree_nodes=TREE),
    "draft trees, alone": Setup(dynamic_trees, 6, num_at_once=1, tree_nodes=TREE),
    "draft trees, chunked": Setup(dynamic_trees, 5, max_tokens_per_step=11, tree_nodes=TREE),
    "draft trees, preempted": Setup(dynamic_trees, 4, num_blocks=10, tree_nodes=TREE),
    "draft trees, prefix hits": Setup(dynamic_trees, 4, num_repeats=2, tree_nodes=TREE),
    "draft trees, adaptive": Setup(dynamic_trees, 4, tree_nodes=TREE, adaptive=True),
    "draft, alone": Setup(model, 4, num_at_once=1),
    "draft, chunked": Setup(model, 4, max_tokens_per_step=11),
    "draft, preempted": Setup(model, 4, num_blocks=10),
    "draft, prefix hits": Setup(model, 4, num_repeats=2),
    **{f"draft, K={k}": Setup(model, k) for k in range(1, 9)},
    "ahead, alone": Setup(ahead, 4, num_at_once=1),
    "ahead, chunked": Setup(ahead, 3, max_tokens_per_step=11),
    "ahead, preempted": Setup(ahead, 4, num_blocks=10),
}


def prompts() -> list[tuple[int, ...]]:
    """Half of them share a prefix of two blocks; lengths differ."""
    source = random.Random(1)
    shared = [source.randrange(VOCAB_SIZE) for _ in range(32)]
    return [
        (*(shared if index % 2 else ()), *(source.randrange(VOCAB_SIZE) for _ in range(3 + 2 * index)))
        for index in range(NUM_PROMPTS)
    ]


def requests() -> list[GenerateRequest]:
    return [
        GenerateRequest(
            str(index), prompt, replace(SAMPLINGS[index % len(SAMPLINGS)], seed=index, max_tokens=MAX_TOKENS)
        )
        for index, prompt in enumerate(prompts())
    ]


def build(folders: Folders, setup: Setup) -> EngineCore:
    config = EngineConfig(
        ModelConfig(str(folders.target), dtype="float32"),
        CacheConfig(num_blocks=setup.num_blocks, memory_bytes=None),
        SchedulerConfig(max_tokens_per_step=setup.max_tokens_per_step, max_model_len=128),
        SpeculationConfig(setup.num_draft_tokens, setup.verify, tree_nodes=setup.tree_nodes, adaptive=setup.adaptive),
    )
    return load_engine(config, setup.proposer(folders))


@dataclass(frozen=True, slots=True)
class Text:
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


def generate(engine: EngineCore, setup: Setup) -> dict[str, Text]:
    texts: dict[str, Text] = {}
    pending = requests()
    while pending:
        group, pending = pending[: setup.num_at_once], pending[setup.num_at_once :]
        for request in group:
            engine.add(request)
            texts[request.request_id] = Text((), ())
        while engine.has_work:
            for chunk in engine.step():
                text = texts[chunk.request_id]
                texts[chunk.request_id] = Text(text.token_ids + chunk.token_ids, text.logprobs + chunk.logprobs)
            engine.scheduler.check_integrity()
    return texts


@pytest.fixture(scope="module")
def reference(folders: Folders) -> dict[str, Text]:
    return generate(build(folders, REFERENCE), REFERENCE)


@pytest.mark.parametrize("name", SETUPS)
def test_the_text_depends_on_nothing_but_prompt_seed_and_target(
    name: str, folders: Folders, reference: dict[str, Text]
) -> None:
    setup = SETUPS[name]
    engine = build(folders, setup)
    for _ in range(setup.num_repeats):
        texts = generate(engine, setup)
    assert {key: text.token_ids for key, text in texts.items()} == {
        key: text.token_ids for key, text in reference.items()
    }
    for key, text in texts.items():
        assert_same_logprobs(text.logprobs, reference[key].logprobs)
    if setup.num_blocks < 20:
        assert engine.stats().num_preemptions > 0
    if setup.proposer is ahead:
        assert isinstance(engine._speculation.proposer, AheadProposer)
        assert engine._speculation.proposer.num_hits > 20
    if setup.num_repeats > 1:
        assert engine.stats().num_prefix_hit_tokens > 0
    if setup.proposer in (model, dynamic_trees, ahead, ngram, suffix) and not setup.adaptive:
        assert engine.stats().drafts.num_accepted_tokens > 0


@pytest.mark.parametrize("num_blocks", [10, 256])
def test_paths_that_are_accepted_out_of_order_leave_the_right_kv(
    num_blocks: int, folders: Folders, reference: dict[str, Text]
) -> None:
    """Every accepted node comes after two rejected ones, so every pass moves KV, which later passes and prompts use."""
    setup = Setup(num_draft_tokens=3, num_blocks=num_blocks, tree_nodes=TREE)
    setup = replace(setup, proposer=lambda folders: Oracle(reference))
    engine = build(folders, setup)
    for _ in range(2):
        texts = generate(engine, setup)
        assert {key: text.token_ids for key, text in texts.items()} == {
            key: text.token_ids for key, text in reference.items()
        }
    drafts = engine.stats().drafts
    assert drafts.num_draft_tokens == 3 * drafts.num_accepted_tokens
    assert len(drafts.num_accepted_tokens_per_pos) == 3


def assert_same_logprobs(ours: Seq[TokenLogprobs], theirs: Seq[TokenLogprobs]) -> None:
    assert [each.token_id for each in ours] == [each.token_id for each in theirs]
    assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
    assert [[top for top, _ in each.top] for each in ours] == [[top for top, _ in each.top] for each in theirs]


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
@pytest.mark.parametrize("proposer", [no_draft, ngram, suffix, adversary, model, dynamic_trees, ahead])
def test_greedy_text_is_the_same_in_every_mode(
    proposer: Callable[[Folders], Proposer], verify: VerifyMode, folders: Folders, reference: dict[str, Text]
) -> None:
    setup = Setup(proposer, 4, verify=verify, tree_nodes=TREE if proposer is dynamic_trees else 0)
    texts = generate(build(folders, setup), setup)
    greedy = [request.request_id for request in requests() if request.sampling.temperature == 0.0]
    assert [texts[key].token_ids for key in greedy] == [reference[key].token_ids for key in greedy]


def test_a_request_continues_elsewhere_with_the_same_text(folders: Folders, reference: dict[str, Text]) -> None:
    """Migration relies on this: committed tokens and seed are the whole state."""
    engine = build(folders, Setup(model, 4))
    for request in requests():
        whole = reference[request.request_id].token_ids
        half = whole[: len(whole) // 2]
        engine.add(replace(request, output_token_ids=half))
        rest: list[int] = []
        while engine.has_work:
            for chunk in engine.step():
                rest += chunk.token_ids
        assert (*half, *rest) == whole
