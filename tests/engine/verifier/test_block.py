"""Block verification: enumerated exactly, then sampled over several passes through the real verifier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.batch.draft import WEIGHT_SUM, Draft, SparseDistribution
from engine.verifier import block
from engine.verifier.rejection_rule import NO_PROPOSAL
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import VerifyTask
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.exactness_checks import (
    EVERYTHING,
    certain_path,
    check_enumeration,
    check_fresh_numbers,
    check_samples,
    check_zero_uniforms,
    draft_by_malice,
    enumerated_probs,
    expected_tokens,
)
from tests.engine.fixtures.tabular import (
    Experiment,
    TabularModel,
    detectable_variation,
    draft_by_sampling,
    joint_probs,
    new_sequence,
    no_draft,
    one_pass,
    pair_library,
    total_variation,
)

BLOCK = VerifyMode.BLOCK
PEAKED, FLAT, ZEROS, EQUAL, CERTAIN = range(5)
SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.6),
    "top-p": SamplingParams(top_p=0.8),
    "penalties": SamplingParams(presence_penalty=2.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "minimum": SamplingParams(stop_token_ids=(1,), min_tokens=2),
    "greedy": SamplingParams(temperature=0.0),
    "everything": replace(EVERYTHING, top_k=3, bad_words=((1, 0),), stop_token_ids=(2,), min_tokens=2),
}


# ---- layer A ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_drafts"), [(3, 1), (3, 2), (3, 3), (4, 2), (5, 1)])
def test_a_pass_emits_exactly_the_target_distribution(num_tokens: int, num_drafts: int) -> None:
    pairs = pair_library(num_tokens)
    check_enumeration(num_tokens, num_drafts, pairs=pairs if num_tokens**num_drafts < 20 else pairs[:3], verify=BLOCK)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_kind_of_sampling_parameter_keeps_the_distribution_exact(name: str) -> None:
    check_enumeration(3, 2, SAMPLINGS[name], verify=BLOCK)


@pytest.mark.parametrize("draft_ids", [(), (0,), (2, 1), (1, 1, 0), (3,), (1, -1, 0), (0, 2**40)])
def test_a_draft_without_distributions_is_certain_and_exact_even_outside_the_vocabulary(
    draft_ids: tuple[int, ...],
) -> None:
    for pair in pair_library(3):
        emitted = enumerated_probs(pair, SamplingParams(), 3, certain_path(draft_ids), BLOCK)
        assert total_variation(emitted, joint_probs(pair.target, SamplingParams(), 3)) < 1e-12


def test_a_distribution_with_mass_outside_the_vocabulary_is_exact() -> None:
    q = SparseDistribution((0, 3), (WEIGHT_SUM // 4, 3 * WEIGHT_SUM // 4))
    halves = SparseDistribution((1, 2), (WEIGHT_SUM // 2, WEIGHT_SUM // 2))
    paths = [(Draft((token_id, x), (q, halves)), p) for token_id, p in ((0, 0.125), (3, 0.375)) for x in (1, 2)]
    for pair in pair_library(3):
        emitted = enumerated_probs(pair, SamplingParams(), 3, paths, BLOCK)
        assert total_variation(emitted, joint_probs(pair.target, SamplingParams(), 3)) < 1e-12


def test_blocks_commit_at_least_what_rejection_commits() -> None:
    """Block verification gains tokens per pass, but not at K = 1 or where draft and target agree.

    On the tables of three tokens, K = 4: peaked 2.62 and 2.77 (+5.8%), flat draft 2.66 and 2.90 (+8.8%), zeros on both
    sides 1.49 and 1.50 (+0.3%).
    """
    for num_drafts in (1, 2, 4):
        for pair in pair_library(3):
            block = expected_tokens(pair, num_drafts, BLOCK)
            assert block > expected_tokens(pair, num_drafts, VerifyMode.REJECTION) - 1e-9
    peaked, flat = pair_library(3)[:2]
    assert expected_tokens(peaked, 4, BLOCK) == pytest.approx(2.770, abs=1e-3)
    assert expected_tokens(peaked, 4, VerifyMode.REJECTION) == pytest.approx(2.619, abs=1e-3)
    assert expected_tokens(flat, 4, BLOCK) == pytest.approx(2.895, abs=1e-3)
    assert expected_tokens(flat, 4, VerifyMode.REJECTION) == pytest.approx(2.661, abs=1e-3)


def test_the_expected_number_of_tokens_is_that_of_the_running_ratios() -> None:
    """One plus the sum of E[rho_i]: a constant chain of p = (1/4, 3/4), q = (1/2, 1/2) has E[rho_2] = 5/8."""
    row = torch.tensor([0.25, 0.75]).log()
    pair = replace(
        pair_library(3)[0],
        target=TabularModel(row.expand(4, 2, 2).double()),
        draft=TabularModel(torch.zeros(4, 2, 2).double()),
    )
    assert expected_tokens(pair, 2, BLOCK) == pytest.approx(1 + 3 / 4 + 5 / 8)


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_drafts_after_a_row_without_finite_logits_change_nothing(mode: VerifyMode) -> None:
    """Such a row ends the sequence. The tokens before it must have the target's distribution all the same."""
    pair = pair_library(4)[PEAKED]
    sequences = [new_sequence(SamplingParams(seed=seed), mode) for seed in range(200)]
    drafts = draft_by_sampling(pair.draft, sequences, 4)
    emitted = []
    for num_drafts in (4, 2):
        cut = [draft.head(num_drafts) for draft in drafts]
        tasks = [
            VerifyTask(sequence, draft, (num_drafts + 1) * index)
            for index, (sequence, draft) in enumerate(zip(sequences, cut, strict=True))
        ]
        prefixes = [
            [*sequence.token_ids, *draft.token_ids[:row]]
            for sequence, draft in zip(sequences, cut, strict=True)
            for row in range(num_drafts + 1)
        ]
        logits = pair.target.logits(prefixes).float()
        logits[2 :: num_drafts + 1] = float("nan")
        emitted.append([result.token_ids for result in Verifier().verify(logits, tasks)])
    assert emitted[0] == emitted[1]
    assert {len(token_ids) for token_ids in emitted[0]} == {1, 2}


# ---- layer B ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "experiment",
    [
        Experiment(pair_library(4)[PEAKED], 3, 3, 6_000, verify=BLOCK),
        Experiment(pair_library(4)[ZEROS], 2, 3, 4_000, verify=BLOCK),
        Experiment(pair_library(4)[EQUAL], 2, 3, 2_000, verify=BLOCK),
        Experiment(pair_library(4)[PEAKED], 3, 3, 4_000, replace(SAMPLINGS["everything"], temperature=1.5), BLOCK),
    ],
)
def test_samples_of_the_real_verifier_follow_the_target(experiment: Experiment) -> None:
    """Worst case detected with power 0.999 at alpha 1e-6: total variation .077 at 6,000 sequences, .094 at 4,000."""
    check_samples(experiment)


@pytest.mark.parametrize("pair", [PEAKED, FLAT])
def test_successive_passes_use_independent_randomness(pair: int) -> None:
    """Five tokens take several passes; detected with power 0.999 at alpha 1e-6: total variation .084.

    The mutants that draw a number twice are at p < 1e-8 here: uniforms on the first pair, draft noise on the second.
    """
    check_samples(Experiment(pair_library(3)[pair], num_drafts=4, num_tokens=5, num_sequences=8_000, verify=BLOCK))


def test_the_stated_power_of_the_samples() -> None:
    assert detectable_variation(6_000, 64) == pytest.approx(0.077, abs=1e-3)
    assert detectable_variation(4_000, 64) == pytest.approx(0.094, abs=1e-3)
    assert detectable_variation(8_000, 243) == pytest.approx(0.084, abs=1e-3)


@pytest.mark.parametrize("drafting", [no_draft, draft_by_malice])
def test_samples_follow_the_target_without_a_draft_and_with_a_malicious_one(drafting) -> None:
    check_samples(Experiment(pair_library(4)[PEAKED], 3, 3, 4_000, verify=BLOCK), drafting)


# ---- the numbers --------------------------------------------------------------------------------------------------


def test_no_uniform_number_and_no_draft_noise_is_seen_twice() -> None:
    check_fresh_numbers(
        Experiment(pair_library(3)[PEAKED], num_drafts=4, num_tokens=16, num_sequences=40, verify=BLOCK)
    )


def test_a_uniform_of_zero_accepts_nothing_impossible() -> None:
    check_zero_uniforms(pair_library(3)[CERTAIN], BLOCK)


def test_an_equal_draft_is_nearly_always_accepted_whole() -> None:
    sequences = [new_sequence(SamplingParams(seed=seed), BLOCK) for seed in range(500)]
    pair = pair_library(4)[EQUAL]
    one_pass(pair.target, sequences, draft_by_sampling(pair.draft, sequences, 3))
    assert sum(sequence.num_accepted for sequence in sequences) >= 0.995 * 1500


def test_greedy_emits_the_argmax_whatever_is_drafted() -> None:
    greedy = SamplingParams(temperature=0.0)
    for pair in pair_library(4):
        drafted = Experiment(pair, 2, 6, 4, greedy, BLOCK).run(draft_by_sampling)
        plain = Experiment(pair, 0, 6, 4, greedy, VerifyMode.COUPLED).run(no_draft)
        assert torch.equal(drafted, plain)


# ---- the formulas -------------------------------------------------------------------------------------------------


def test_a_ratio_recovers_up_to_one_and_not_from_zero() -> None:
    assert block.running_ratios([0.2, 0.9], [0.4, 0.6]) == [1.0, 0.5, 0.75]
    assert block.running_ratios([0.2, 0.9], [0.4, 0.3]) == [1.0, 0.5, 1.0]
    assert block.running_ratios([0.0, 0.9], [0.0, 0.3]) == [1.0, 0.0, 0.0]


def test_the_excess_is_what_the_dense_sum_says() -> None:
    p = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]], dtype=torch.float64)
    q = SparseDistribution((0, 2, 7), (WEIGHT_SUM // 2, WEIGHT_SUM // 4, WEIGHT_SUM // 4))
    rho = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)
    excess = block.excess_mass(p, [0, 1, 1], rho, [q, q, NO_PROPOSAL])
    torch.testing.assert_close(excess, torch.tensor([0.1 + 0.1, 0.5, 0.25], dtype=torch.float64))


def test_no_excess_is_certain_success_only_without_debt() -> None:
    rho, excess = torch.tensor([1.0, 0.5, 0.0]).double(), torch.zeros(3).double()
    assert block.success_probs(rho, excess).tolist() == [1.0, 0.0, 0.0]


def test_the_last_success_counts_whatever_fails_before_it() -> None:
    assert block.count_accepted([False, True, False]) == 2
    assert block.count_accepted([False, False]) == 0
    assert block.count_accepted([]) == 0
