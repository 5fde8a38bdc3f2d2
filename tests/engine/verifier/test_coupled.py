"""Coupled verification: the same tokens and logprobs for any draft."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer.text_match.text_matcher import NgramProposer
from engine.sequence.sequence import Sequence
from engine.verifier.verifier import Verifier, match
from engine.verifier.verify_task import VerifyResult, VerifyTask
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.builders import make_scheduled
from tests.engine.fixtures.exactness_checks import (
    EVERYTHING,
    SAMPLINGS,
    big_model,
    check_coupled_equality,
    check_samples,
    coupled_run,
    draft_by_coupling,
    draft_by_malice,
    similar_model,
)
from tests.engine.fixtures.tabular import (
    Experiment,
    TabularModel,
    draft_by_sampling,
    new_sequence,
    no_draft,
    one_pass,
    pair_library,
)


@cache
def plain_output() -> list[list[int]]:
    return coupled_run(big_model(), no_draft, big_model(), 0)


def draft_by_ngram(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
    drafts = []
    for sequence in sequences:
        proposer = NgramProposer(min_size=1)
        proposer.open(sequence)
        drafts += proposer.propose([make_scheduled(sequence, num_drafts)])
    return drafts


@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_a_model_draft_changes_no_token(num_drafts: int) -> None:
    assert coupled_run(big_model(), draft_by_coupling, similar_model(), num_drafts) == plain_output()


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_a_malicious_draft_changes_no_token(num_drafts: int) -> None:
    assert coupled_run(big_model(), draft_by_malice, big_model(), num_drafts) == plain_output()


def test_drafts_from_ngrams_and_from_private_noise_change_no_token() -> None:
    assert coupled_run(big_model(), draft_by_sampling, similar_model(), 4) == plain_output()
    assert coupled_run(big_model(), draft_by_ngram, big_model(), 4) == plain_output()


def test_the_equality_check_of_the_mutants_is_the_same_claim() -> None:
    check_coupled_equality(draft_by_coupling, similar_model(), 2)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_perfect_draft_is_accepted_whole(sampling: SamplingParams) -> None:
    sequences = [new_sequence(replace(sampling, seed=seed)) for seed in range(8)]
    for _ in range(3):
        one_pass(big_model(), sequences, draft_by_coupling(big_model(), sequences, 5))
    assert all(sequence.accepted_histogram == [0, 0, 0, 0, 0, 3] for sequence in sequences)


def test_coupled_drafts_of_a_similar_model_are_accepted_more_often_than_independent_ones() -> None:
    rates = []
    for drafting in (draft_by_coupling, draft_by_sampling):
        sequences = [new_sequence(SamplingParams(seed=seed)) for seed in range(200)]
        one_pass(big_model(), sequences, drafting(similar_model(), sequences, 1))
        rates.append(sum(sequence.num_accepted for sequence in sequences) / 200)
    assert rates[0] > 2 * rates[1]


def test_the_batch_around_a_sequence_changes_no_token() -> None:
    alone = []
    for sampling in SAMPLINGS:
        sequence = new_sequence(replace(sampling, seed=-1), sample_index=1)
        while sequence.num_output_tokens < 24:
            one_pass(big_model(), [sequence], draft_by_coupling(similar_model(), [sequence], 3))
        alone.append(sequence.token_ids[:26])
    assert alone == plain_output()[3::6]


def test_samples_of_one_request_and_seeds_differ() -> None:
    outputs = plain_output()[:12]
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_bad_words_and_early_stop_tokens_never_appear() -> None:
    for output in plain_output()[:6] + plain_output()[18:]:
        generated = output[2:]
        assert 5 not in generated
        assert not any(output[i : i + 2] == [2, 4] for i in range(len(output)))
        assert not any(output[i : i + 3] == [1, 2, 3] for i in range(len(output)))
        assert not {6, 8} & set(generated[:10])


def verify_one(sequence: Sequence, draft: Draft, logits: torch.Tensor) -> VerifyResult:
    (verified,) = Verifier().verify(logits, [VerifyTask(sequence, draft, 0)])
    return verified


@pytest.mark.parametrize("verify", VerifyMode)
def test_logprobs_come_with_every_token_and_from_its_own_raw_row(verify: VerifyMode) -> None:
    logits = big_model().logits([[0, 1], [0, 1, 3], [0, 1, 3, 4]])
    sequence = new_sequence(replace(EVERYTHING, num_logprobs=2, temperature=0.0, bad_words=()), verify)
    drafts = verify_one(sequence, NO_DRAFT, logits[:1]).token_ids
    verified = verify_one(sequence, Draft((drafts[0], 11)), logits)
    assert len(verified.logprobs) == len(verified.token_ids) >= 2
    for row, (token_id, answer) in enumerate(zip(verified.token_ids, verified.logprobs, strict=True)):
        expected = logits[row].log_softmax(0)
        assert answer.token_id == token_id
        assert answer.logprob == pytest.approx(float(expected[token_id]))
        assert [token_id for token_id, _ in answer.top] == expected.topk(2).indices.tolist()


def test_speculation_reports_the_logprobs_of_plain_decoding() -> None:
    runs = []
    for drafting, num_drafts in ((no_draft, 0), (draft_by_coupling, 4)):
        sequence = new_sequence(replace(EVERYTHING, num_logprobs=3, seed=9))
        logprobs = []
        while len(logprobs) < 20:
            (draft,) = drafting(similar_model(), [sequence], num_drafts)
            prefixes = [[*sequence.token_ids, *draft.token_ids[:i]] for i in range(len(draft.token_ids) + 1)]
            verified = verify_one(sequence, draft, big_model().logits(prefixes))
            sequence.token_ids += verified.token_ids
            logprobs += verified.logprobs
        runs.append(logprobs[:20])
    assert runs[0] == runs[1]


def test_rows_of_mixed_modes_find_their_own_logits() -> None:
    """Tasks of all modes, in any order, with unused rows between them."""
    greedy = SamplingParams(temperature=0.0)
    modes = [VerifyMode.REJECTION, VerifyMode.COUPLED, VerifyMode.BLOCK, VerifyMode.REJECTION]
    logits = torch.full((20, 12), -5.0)
    tasks = []
    for index, mode in enumerate(modes):
        tasks.append(VerifyTask(new_sequence(greedy, mode), Draft((index + 1, index + 2)), 5 * index + 1))
        for row in range(3):
            logits[5 * index + 1 + row, index + 1 + row] = 5.0
    assert [verified.token_ids for verified in Verifier().verify(logits, tasks)] == [
        (index + 1, index + 2, index + 3) for index in range(4)
    ]


def test_an_empty_step_verifies_nothing() -> None:
    assert Verifier().verify(torch.zeros(0, 12), []) == []


def test_a_draft_outside_the_vocabulary_ends_the_pass_there() -> None:
    logits = torch.zeros(4, 12)
    logits[:, 3] = 9.0
    for mode in VerifyMode:
        sequence = new_sequence(SamplingParams(temperature=0.0), mode)
        assert verify_one(sequence, Draft((3, 99, 3)), logits) == VerifyResult((3, 3), 1)


def test_matching_stops_at_the_first_difference() -> None:
    assert match([4, 5, 6], [(4, 5)]) == [VerifyResult((4, 5, 6), 2)]
    assert match([4, 5, 6], [(4, 6)]) == [VerifyResult((4, 5), 1)]
    assert match([4, 5, 6], [(5, 5)]) == [VerifyResult((4,), 0)]
    assert match([4], [()]) == [VerifyResult((4,), 0)]
    side_by_side = [VerifyResult((7,), 0), VerifyResult((4, 5, 6), 2), VerifyResult((8,), 0), VerifyResult((4, 9), 1)]
    assert match([7, 4, 5, 6, 8, 8, 4, 9, 1], [(), (4, 5), (4,), (4, 4)]) == side_by_side


def test_noise_on_a_plain_sequence_follows_the_target() -> None:
    sampling = replace(EVERYTHING, top_k=4, bad_words=())
    check_samples(Experiment(pair_library(5)[0], 0, 3, 10_000, sampling, VerifyMode.COUPLED), no_draft)
