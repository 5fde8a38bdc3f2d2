"""Reasoning steps by the draft change only the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.approximate.reasoning_sequence import StepText
from engine.batch.draft import NO_DRAFT, Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ScorerKind,
    SpeculationConfig,
    StepConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer import Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sequence.batch import DraftQuery, ScheduledSequence
from engine.sequence.sequence import Sequence
from protos.errors import RequestError
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams, StepStats, VerifyMode
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, write_byte_pair
from tests.engine.fixtures.checkpoints import Folders
from tests.engine.fixtures.drafted_texts import run, texts
from tests.engine.fixtures.hybrids import HYBRIDS, write_hybrid

K = 3
ANYWHERE = StepConfig(threshold=0.0, judge=ScorerKind.LIKELIHOOD, max_step_tokens=8)
THINKING = StepConfig(think=("<think>", "</think>"))
BEST_ONLY = replace(ANYWHERE, threshold=9.0)
PROMPTS = ((5, 9, 33, 7), (60, 61, 62, 63, 64, 65), (8,) * 20)
CACHE = CacheConfig(num_blocks=64, memory_bytes=None, block_size=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_byte_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The draft has recurrent layers."""
    pair = write_byte_pair(tmp_path_factory.mktemp("recurrent"))
    config = HYBRIDS["bamba"]()
    config.vocab_size = BYTE_VOCAB_SIZE
    write_hybrid(pair.draft, config)
    return pair


def new_drafter(folder: Path) -> ModelProposer:
    return ModelProposer.from_config(ModelConfig(str(folder), "float32"), CACHE, SchedulerConfig())


def new_engine(
    folder: Path,
    drafter: Proposer | None,
    steps: StepConfig | None = None,
    cache: CacheConfig = CACHE,
    limits: SchedulerConfig | None = None,
    **speculation: object,
) -> EngineCore:
    config = EngineConfig(
        ModelConfig(str(folder), "float32", num_threads=1),
        cache,
        limits or SchedulerConfig(),
        SpeculationConfig(K, steps=steps, **speculation),
    )
    return load_engine(config, drafter)


def requests(max_tokens: int = 40, *, approximate: Seq[bool], **sampling: object) -> list[GenerateRequest]:
    params = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=max_tokens)
    return [
        GenerateRequest(f"r{index}", PROMPTS[index], params, SpeculationParams(is_approximate=is_approximate))
        for index, is_approximate in enumerate(approximate)
    ]


@pytest.mark.parametrize("verify", list(VerifyMode))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_does_not_ask_gets_the_tokens_it_would_get_without_steps(
    pair: Folders, verify: VerifyMode, temperature: float
):
    asked = requests(approximate=(False, False, False), temperature=temperature, seed=5)
    plain = new_engine(pair.target, new_drafter(pair.draft), verify=verify)
    allowed = new_engine(pair.target, new_drafter(pair.draft), ANYWHERE, verify=verify)
    expected, found = run(plain, asked), run(allowed, asked)
    assert found == expected, "tokens, passes and statistics, chunk by chunk"
    assert all(chunk.steps is None for part in found.values() for chunk in part)
    assert allowed.stats().reasoning == plain.stats().reasoning
    assert allowed.stats().drafts == plain.stats().drafts


def test_an_exact_request_beside_an_approximate_one_has_its_own_tokens(pair: Folders):
    exact = requests(approximate=(False,) * 3, temperature=1.0, seed=3)
    expected = texts(run(new_engine(pair.target, None), exact))
    mixed = requests(approximate=(True, False, False), temperature=1.0, seed=3)
    engine = new_engine(pair.target, new_drafter(pair.draft), ANYWHERE)
    found = texts(run(engine, mixed))
    assert {name: found[name] for name in ("r1", "r2")} == {name: expected[name] for name in ("r1", "r2")}
    assert found["r0"] != expected["r0"]
    assert engine.stats().reasoning.num_accepted > 0


@pytest.mark.parametrize("name", ["pair", "recurrent"])
def test_where_every_step_is_good_enough_the_text_is_the_drafts(request: pytest.FixtureRequest, name: str):
    pair: Folders = request.getfixturevalue(name)
    (asked,) = requests(approximate=(True,))
    engine = new_engine(pair.target, new_drafter(pair.draft), ANYWHERE)
    chunks = run(engine, [asked])
    found = texts(chunks)["r0"]
    # The target samples the first token, the draft writes on from there.
    (begun,) = requests(approximate=(False,), max_tokens=40)
    begun = replace(begun, output_token_ids=(found[0],))
    drafts = texts(run(new_engine(pair.draft, None), [begun]))["r0"]
    stats = engine.stats().reasoning
    assert (stats.num_rejected, stats.num_abandoned) == (0, 0)
    assert stats.num_accepted_tokens >= 35
    assert found[1 : 1 + stats.num_accepted_tokens] == drafts[: stats.num_accepted_tokens]
    assert chunks["r0"][-1].steps == StepStats(stats.num_accepted, stats.num_accepted, stats.num_accepted_tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rejected_step_is_written_by_the_target(pair: Folders, temperature: float):
    """A score of 9 needs the likeliest words of the target: at temperature 0 those are its own."""
    asked = requests(approximate=(True, True), temperature=temperature, seed=9)
    expected = texts(run(new_engine(pair.target, None), asked_exactly(asked)))
    engine = new_engine(pair.target, new_drafter(pair.draft), BEST_ONLY)
    assert texts(run(engine, asked)) == expected
    assert engine.stats().reasoning.num_rejected > 0
    assert engine.stats().drafts.num_draft_tokens > 0, "drafts are verified within the target's own steps"


def asked_exactly(asked: Seq[GenerateRequest]) -> list[GenerateRequest]:
    return [replace(each, speculation=SpeculationParams()) for each in asked]


def test_steps_count_in_no_statistics_of_drafts(pair: Folders):
    (asked,) = requests(approximate=(True,), max_tokens=30)
    engine = new_engine(pair.target, new_drafter(pair.draft), replace(ANYWHERE, max_step_tokens=28))
    chunks = run(engine, [asked])["r0"]
    assert engine.stats().reasoning.num_accepted_tokens == 28
    assert engine.stats().drafts.num_draft_tokens == 0
    assert chunks[-1].speculation is not None
    assert chunks[-1].speculation.num_draft_tokens == 0


def test_a_threshold_of_the_request_overrides_the_deployments(pair: Folders):
    (asked,) = requests(approximate=(True,))
    asked = replace(asked, speculation=SpeculationParams(is_approximate=True, threshold=0.0))
    engine = new_engine(pair.target, new_drafter(pair.draft), BEST_ONLY)
    run(engine, [asked])
    assert engine.stats().reasoning.num_rejected == 0
    assert engine.stats().reasoning.num_accepted > 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10, 11, 17])
def test_no_step_exceeds_what_is_left_of_the_output(pair: Folders, max_tokens: int):
    asked = requests(max_tokens, approximate=(True, True))
    found = texts(run(new_engine(pair.target, new_drafter(pair.draft), ANYWHERE), asked))
    assert [len(text) for text in found.values()] == [max_tokens, max_tokens]


def test_at_most_so_many_steps_are_drafted(pair: Folders):
    asked = requests(approximate=(True,))
    engine = new_engine(pair.target, new_drafter(pair.draft), replace(ANYWHERE, max_steps=2))
    run(engine, asked)
    assert engine.stats().reasoning.num_accepted == 2


@pytest.mark.parametrize(
    ("cache", "limits"),
    [
        (CacheConfig(num_blocks=14, memory_bytes=None, block_size=4), SchedulerConfig()),  # two must be preempted
        (CACHE, SchedulerConfig(max_tokens_per_step=6)),  # no pass has room for a step
    ],
)
def test_a_sequence_without_blocks_for_a_step_is_continued_by_the_target(
    pair: Folders, cache: CacheConfig, limits: SchedulerConfig
):
    asked = requests(24, approximate=(True, True, True), temperature=1.0, seed=2)
    engine = new_engine(pair.target, new_drafter(pair.draft), BEST_ONLY, cache, limits)
    assert texts(run(engine, asked)) == texts(run(new_engine(pair.target, None), asked_exactly(asked)))
    assert engine.scheduler.num_preemptions > 0 or engine.stats().reasoning.num_abandoned > 0


def test_an_abort_while_the_draft_writes_frees_everything(pair: Folders):
    (asked,) = requests(approximate=(True,))
    drafter = new_drafter(pair.draft)
    engine = new_engine(pair.target, drafter, replace(ANYWHERE, max_step_tokens=30))
    engine.add(asked)
    engine.step()
    assert engine.step() == [], "nothing is computed while the draft writes"
    assert not engine.is_starved, "and yet there is no reason to rest"
    engine.abort(asked.request_id)
    assert not engine.has_work
    assert engine.stats().num_used_blocks == 0
    drafter.sequences.check_integrity()
    assert drafter.sequences.blocks.num_free_blocks == CACHE.num_blocks
    assert engine.step() == []


def test_other_requests_do_not_wait_for_a_reasoning_step(pair: Folders):
    slow, quick = requests(approximate=(True, False))
    engine = new_engine(pair.target, new_drafter(pair.draft), replace(ANYWHERE, max_step_tokens=30))
    engine.add(slow)
    engine.add(quick)
    engine.step()
    assert [chunk.request_id for chunk in engine.step()] == ["r1"]


class SilentDrafter:
    """A draft that is away."""

    def open(self, sequence: Sequence) -> None: ...

    def propose(self, batch: Seq[ScheduledSequence]) -> list[Draft]:
        return [NO_DRAFT] * len(batch)

    def commit(self, sequences: Seq[Sequence]) -> None: ...

    def close(self, request_id: str) -> None: ...


def test_the_target_writes_every_step_while_the_draft_is_away(pair: Folders):
    asked = requests(approximate=(True, True))
    engine = new_engine(pair.target, SilentDrafter(), ANYWHERE)
    assert texts(run(engine, asked)) == texts(run(new_engine(pair.target, None), asked_exactly(asked)))
    assert engine.stats().reasoning.num_abandoned > 0


def test_a_rating_leaves_no_word_of_its_question(pair: Folders):
    """The prompt after the step is computed and not committed, so the later text does not depend on it."""
    (asked,) = requests(approximate=(True,))
    rated = replace(ANYWHERE, judge=ScorerKind.RATING, rating_prompt="0 to 9: ")
    engine = new_engine(pair.target, new_drafter(pair.draft), rated)
    found = texts(run(engine, [asked]))["r0"]
    unrated = texts(run(new_engine(pair.target, new_drafter(pair.draft), ANYWHERE), [asked]))["r0"]
    assert found[:24] == unrated[:24]
    stats = engine.stats().reasoning
    assert 0 < stats.total_score < 9 * stats.num_accepted


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_request_is_refused_where_no_steps_are_drafted(pair: Folders, is_allowed: bool):
    (asked,) = requests(approximate=(True,))
    asked = replace(asked, speculation=replace(asked.speculation, num_tokens=0 if is_allowed else None))
    engine = new_engine(pair.target, new_drafter(pair.draft), ANYWHERE if is_allowed else None)
    with pytest.raises(RequestError, match="drafts no reasoning steps; leave it out"):
        engine.add(asked)


@pytest.fixture(scope="module")
def tokenizer(pair: Folders) -> Tokenizer:
    return Tokenizer.from_file(str(pair.target / "tokenizer.json"))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("text", "step", "is_ending"),
    [
        ("so a = b\n\nand", "so a = b\n\n", False),
        ("\n\nso a = b\n\nand", "\n\nso a = b\n\n", False),
        ("so a = b", None, False),
        ("so</think>I say", "so", True),
        ("</think>I say", "", True),
    ],
)
def test_a_step_ends_behind_its_mark_and_before_the_end_of_reasoning(
    tokenizer: Tokenizer, text: str, step: str | None, is_ending: bool
):
    token_ids = ids(tokenizer, text)
    end = StepText(tokenizer, THINKING).find_end(token_ids, 0)
    if step is None:
        assert end is None
    else:
        assert end == (len(ids(tokenizer, step)), is_ending)


def test_a_step_ends_before_a_stop_token(tokenizer: Tokenizer):
    assert StepText(tokenizer, THINKING).find_end([40, 41, 0, 42], 0, {0}) == (2, True)


def test_the_last_marker_says_whether_the_text_is_reasoning(tokenizer: Tokenizer):
    text = StepText(tokenizer, THINKING)
    for written, expected in (("<think>a", True), ("<think>a</think>b", False), ("</think><think>", True)):
        token_ids = ids(tokenizer, written)
        assert text.is_thinking(token_ids, len(token_ids), False) is expected
        was = False
        for end in range(1, len(token_ids) + 1):  # token by token, markers lie across them
            was = text.is_thinking(token_ids[:end], 1, was)
        assert was is expected


def test_steps_are_drafted_inside_the_markers_alone(pair: Folders, tokenizer: Tokenizer):
    inside = tuple(ids(tokenizer, "a <think> b"))
    outside = tuple(ids(tokenizer, "a <think> b </think>"))
    for prompt, is_drafted in ((inside, True), (outside, False)):
        (asked,) = requests(approximate=(True,))
        engine = new_engine(pair.target, new_drafter(pair.draft), replace(ANYWHERE, think=("<think>", "</think>")))
        run(engine, [replace(asked, prompt_token_ids=prompt)])
        assert (engine.stats().reasoning.num_accepted > 0) is is_drafted


@pytest.mark.parametrize("steps", [BEST_ONLY, replace(ANYWHERE, max_steps=1)], ids=["rejected", "the last one"])
def test_drafts_after_a_step_are_as_long_as_before_it(
    pair: Folders, steps: StepConfig, monkeypatch: pytest.MonkeyPatch
):
    drafter, asked_for = new_drafter(pair.draft), []
    propose = drafter.propose

    def noted(queries: Seq[DraftQuery]) -> list[Draft]:
        asked_for.extend(each.max_draft_tokens for each in queries if "/step-" not in each.sequence.request_id)
        return propose(queries)

    monkeypatch.setattr(drafter, "propose", noted)
    engine = new_engine(pair.target, drafter, steps)
    (asked,) = requests(approximate=(True,))
    run(engine, [asked])
    assert engine.stats().reasoning.num_accepted + engine.stats().reasoning.num_rejected > 0
    assert len(asked_for) > 3
    assert max(asked_for) == K
