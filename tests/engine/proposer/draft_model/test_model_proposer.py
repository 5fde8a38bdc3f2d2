"""The draft model proposes the tokens that it would sample alone, whatever happened to earlier drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.batch.draft import NO_DRAFT, WEIGHT_SUM
from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.proposer.draft_model.model_proposer import ModelProposer
from protos.messages import GenerateRequest, SamplingParams, VerifyMode
from tests.engine.fixtures.builders import make_scheduled, sequence_of
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.fixtures.drafters import GREEDY, SAMPLED, DraftOracle, new_drafter, new_sequence, write_draft

NUM_POSITIONS = 512


@pytest.fixture(scope="module", params=["llama", "bamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_draft(path, request.param)
    return path


@pytest.fixture(scope="module")
def oracle(folder: Path) -> DraftOracle:
    return DraftOracle(folder)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 20])
def test_a_coupled_draft_is_what_the_draft_alone_would_sample(
    folder: Path, oracle: DraftOracle, sampling: SamplingParams, num_tokens: int
) -> None:
    drafter = new_drafter(folder)
    sequence = new_sequence(drafter, "a", sampling=sampling)
    assert drafter.draft([sequence], num_tokens) == [oracle.draft(sequence, num_tokens)]


def test_a_batch_drafts_what_each_sequence_drafts_alone(folder: Path, oracle: DraftOracle) -> None:
    drafter = new_drafter(folder)
    sequences = [
        new_sequence(drafter, name, length, sampling)
        for name, length, sampling in (("a", 3, GREEDY), ("b", 40, SAMPLED), ("c", 17, SAMPLED), ("d", 1, GREEDY))
    ]
    assert drafter.draft(sequences) == [oracle.draft(sequence) for sequence in sequences]


def test_each_sequence_gets_as_many_drafts_as_it_may_have(folder: Path, oracle: DraftOracle) -> None:
    drafter = new_drafter(folder)
    sequences = [new_sequence(drafter, name) for name in "abcd"]
    drafts = drafter.proposer.propose(
        [make_scheduled(each, k) for each, k in zip(sequences, (3, 0, 1, 6), strict=True)]
    )
    expected = [oracle.draft(each, k) for each, k in zip(sequences, (3, 0, 1, 6), strict=True)]
    assert [draft.token_ids for draft in drafts] == expected


@pytest.mark.parametrize("accepted", [(0, 0, 0), (1, 3, 2), (4, 4, 4), (4, 0, 4), (2, 4, 1)])
def test_rejected_drafts_leave_no_trace(folder: Path, oracle: DraftOracle, accepted: tuple[int, ...]) -> None:
    drafter = new_drafter(folder)
    sequence, other = new_sequence(drafter, "a", sampling=SAMPLED), new_sequence(drafter, "b", 23)
    for num_accepted in accepted:
        draft, _ = drafter.draft([sequence, other])
        sequence.token_ids += [*draft[:num_accepted], (draft[min(num_accepted, 3)] + 1) % VOCAB_SIZE]
        other.token_ids += [5]
        drafter.proposer.commit([sequence, other])
        assert drafter.draft([sequence, other]) == [oracle.draft(sequence), oracle.draft(other)]


def test_a_round_without_an_answer_and_a_repeated_question_change_nothing(folder: Path, oracle: DraftOracle) -> None:
    drafter = new_drafter(folder)
    sequence = new_sequence(drafter, "a")
    drafter.draft([sequence])
    assert drafter.draft([sequence]) == [oracle.draft(sequence)]
    sequence.token_ids += [1, 2, 3, 4, 5, 6, 7, 8, 9]  # rounds without this proposer
    assert drafter.draft([sequence]) == [oracle.draft(sequence)]


def test_accepted_drafts_are_not_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = new_drafter(folder)
    sequence = new_sequence(drafter, "a")
    (draft,) = drafter.draft([sequence])
    sequence.token_ids += [*draft, 9]
    asked: list[int] = []
    forward = drafter.runner.forward
    monkeypatch.setattr(
        drafter.runner, "forward", lambda spans: asked.extend(len(span.token_ids) for span in spans) or forward(spans)
    )
    drafter.draft([sequence])
    assert asked == [2]  # the last draft, which was never an input, and the bonus token


def test_a_long_prompt_is_computed_in_chunks_while_others_draft(folder: Path, oracle: DraftOracle) -> None:
    drafter = new_drafter(folder, max_tokens_per_round=8)
    short, long = new_sequence(drafter, "a", 3), new_sequence(drafter, "b", 20)
    assert drafter.draft([short, long]) == [oracle.draft(short), ()]  # 3 + 5 tokens
    assert drafter.draft([short, long]) == [oracle.draft(short), ()]  # 1 + 7
    assert drafter.draft([short, long]) == [oracle.draft(short), ()]
    assert drafter.draft([short, long]) == [oracle.draft(short), oracle.draft(long)]


def test_equal_prompts_share_the_drafts_blocks(folder: Path, oracle: DraftOracle) -> None:
    drafter = new_drafter(folder)
    first = new_sequence(drafter, "a", 20)
    drafter.draft([first])
    request = GenerateRequest("twin", tuple(first.token_ids), SAMPLED)
    twin = sequence_of(request)
    drafter.proposer.open(twin)
    assert drafter.draft([twin]) == [oracle.draft(twin)]
    assert drafter.blocks.num_hit_tokens == 16


def test_a_short_pool_costs_drafts_and_nothing_else(folder: Path, oracle: DraftOracle) -> None:
    drafter = new_drafter(folder, num_blocks=8)  # 32 slots: two sequences of 14 with their drafts
    first, second, third = (new_sequence(drafter, name) for name in "abc")
    assert drafter.draft([first, second, third]) == [oracle.draft(first), oracle.draft(second), ()]
    # The third sequence takes the blocks that were idle longest; this round's sequences keep their blocks.
    assert drafter.draft([second]) == [oracle.draft(second)]
    assert drafter.draft([second, third]) == [oracle.draft(second), oracle.draft(third)]
    first.token_ids += [4]
    assert drafter.draft([first]) == [oracle.draft(first)]


def test_a_sequence_larger_than_the_pool_has_no_draft(folder: Path) -> None:
    drafter = new_drafter(folder, num_blocks=8)
    assert drafter.draft([new_sequence(drafter, "a", 40)]) == [()]
    assert drafter.blocks.num_free_blocks == 8


def test_drafts_end_where_the_drafts_positions_do(folder: Path) -> None:
    drafter = new_drafter(folder, num_blocks=160, max_tokens_per_round=1024)
    sequence = new_sequence(drafter, "a", NUM_POSITIONS - 2)
    for num_possible in (3, 2, 1, 0, 0):
        assert [len(draft) for draft in drafter.draft([sequence])] == [num_possible]
        sequence.token_ids += [1]


def test_closing_frees_the_blocks_and_unknown_sequences_are_ignored(folder: Path) -> None:
    drafter = new_drafter(folder)
    sequence = new_sequence(drafter, "a")
    drafter.draft([sequence])
    drafter.proposer.close("a")
    drafter.proposer.close("a")
    assert drafter.blocks.num_free_blocks == 64
    assert drafter.proposer.propose([make_scheduled(sequence, 4)]) == [NO_DRAFT]


def test_drafts_for_rejection_come_with_the_distribution_they_were_drawn_from(folder: Path) -> None:
    drafter = new_drafter(folder)
    sequence = new_sequence(drafter, "a", sampling=SAMPLED, verify=VerifyMode.REJECTION)
    (draft,) = drafter.proposer.propose([make_scheduled(sequence, 4)])
    assert len(draft.token_ids) == len(draft.distributions) == 4
    for token_id, distribution in zip(draft.token_ids, draft.distributions, strict=True):
        assert sum(distribution.weights) == WEIGHT_SUM
        assert token_id in distribution.token_ids


def test_both_ways_of_verification_share_a_round(folder: Path, oracle: DraftOracle) -> None:
    drafter = new_drafter(folder)
    modes = (VerifyMode.REJECTION, VerifyMode.COUPLED, VerifyMode.REJECTION)
    sequences = [new_sequence(drafter, str(index), sampling=SAMPLED, verify=mode) for index, mode in enumerate(modes)]
    drafts = drafter.proposer.propose([make_scheduled(sequence, 4) for sequence in sequences])
    assert [len(draft.distributions) for draft in drafts] == [4, 0, 4]
    assert drafts[1].token_ids == oracle.draft(sequences[1])


@pytest.mark.parametrize("target_vocab_size", [199, 200, 201])
def test_padding_of_the_vocabulary_is_never_drafted(tmp_path: Path, target_vocab_size: int) -> None:
    write_checkpoint(tmp_path, seed=0, vocab_size=200)
    drafter = new_drafter(tmp_path, target_vocab_size=target_vocab_size)
    favoured = SamplingParams(temperature=0.0, logit_bias=((target_vocab_size - 1, 1000.0),))
    (draft,) = drafter.draft([new_sequence(drafter, "a", sampling=favoured)])
    expected = target_vocab_size - 1
    assert all(token_id < target_vocab_size for token_id in draft)
    assert (expected in draft) is (expected < 200)


def test_a_model_proposer_is_built_from_the_configuration(folder: Path) -> None:
    proposer = ModelProposer.from_config(
        ModelConfig(str(folder), dtype="float32"), CacheConfig(num_blocks=8), SchedulerConfig(), VOCAB_SIZE
    )
    assert len(proposer.model_version) == 32
