"""Rejection verification: enumerated exactly, then sampled through the real verifier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.batch.draft import NO_DRAFT, WEIGHT_SUM, Draft, SparseDistribution
from engine.verifier import rejection_rule
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.exactness_checks import (
    ALPHA,
    EVERYTHING,
    certain_path,
    check_enumeration,
    check_samples,
    check_zero_uniforms,
    draft_by_malice,
    enumerated_probs,
)
from tests.engine.fixtures.tabular import (
    Experiment,
    chi_square_tail,
    detectable_variation,
    draft_by_sampling,
    joint_probs,
    new_sequence,
    no_draft,
    one_pass,
    pair_library,
    total_variation,
)

PEAKED, FLAT, ZEROS, EQUAL, CERTAIN = range(5)

SAMPLINGS = {
    "temperature": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.3),
    "penalties": SamplingParams(presence_penalty=2.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias": SamplingParams(logit_bias=((0, 1.5), (2, -1.0))),
    "bad words": SamplingParams(bad_words=((1, 0), (2,))),
    "minimum": SamplingParams(stop_token_ids=(1,), min_tokens=2),
    "greedy": SamplingParams(temperature=0.0),
    "everything": replace(EVERYTHING, top_k=3, bad_words=((1, 0),), stop_token_ids=(2,), min_tokens=2),
}


@pytest.mark.parametrize("num_tokens", [3, 5])
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_a_pass_emits_exactly_the_target_distribution(num_tokens: int, num_drafts: int) -> None:
    pairs = pair_library(num_tokens)
    check_enumeration(num_tokens, num_drafts, pairs=pairs if num_tokens**num_drafts < 100 else pairs[:3:2])


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_sampling_parameter_keeps_the_distribution_exact(name: str) -> None:
    check_enumeration(3, 2, SAMPLINGS[name])


@pytest.mark.parametrize("draft_ids", [(), (0,), (2, 1), (1, 1, 0), (3,), (1, -1, 0), (0, 2**40)])
def test_a_draft_without_distributions_is_certain_and_exact_even_outside_the_vocabulary(
    draft_ids: tuple[int, ...],
) -> None:
    for pair in pair_library(3):
        emitted = enumerated_probs(pair, SamplingParams(), 3, certain_path(draft_ids))
        assert total_variation(emitted, joint_probs(pair.target, SamplingParams(), 3)) < 1e-12


def test_a_distribution_with_mass_outside_the_vocabulary_is_exact() -> None:
    q = SparseDistribution((0, 3), (WEIGHT_SUM // 4, 3 * WEIGHT_SUM // 4))
    paths = [(Draft((0,), (q,)), 0.25), (Draft((3,), (q,)), 0.75)]
    for pair in pair_library(3):
        emitted = enumerated_probs(pair, SamplingParams(), 2, paths)
        assert total_variation(emitted, joint_probs(pair.target, SamplingParams(), 2)) < 1e-12


@pytest.mark.parametrize(
    "experiment",
    [
        Experiment(pair_library(4)[PEAKED], num_drafts=2, num_tokens=3, num_sequences=20_000),
        Experiment(pair_library(4)[ZEROS], num_drafts=3, num_tokens=3, num_sequences=10_000),
        Experiment(pair_library(5)[FLAT], num_drafts=1, num_tokens=3, num_sequences=10_000),
        Experiment(pair_library(4)[EQUAL], num_drafts=2, num_tokens=3, num_sequences=5_000),
        Experiment(pair_library(4)[PEAKED], 2, 3, 4_000, replace(SAMPLINGS["everything"], temperature=1.5)),
        Experiment(pair_library(4)[PEAKED], 4, 3, 10_000, SamplingParams(presence_penalty=2.0)),
    ],
)
def test_samples_of_the_real_verifier_follow_the_target(experiment: Experiment) -> None:
    """Worst case detected with power 0.999 at alpha 1e-6: total variation .042 at 20,000 sequences, .060 at 10,000.

    All sampling parameters at once cost eight times as much per sequence, and are enumerated above: .094 at 4,000.
    """
    check_samples(experiment)


def test_the_stated_power_of_the_samples() -> None:
    assert detectable_variation(20_000, 64) == pytest.approx(0.042, abs=1e-3)
    assert detectable_variation(10_000, 64) == pytest.approx(0.060, abs=1e-3)
    assert detectable_variation(4_000, 64) == pytest.approx(0.094, abs=1e-3)
    assert detectable_variation(10_000, 125) == pytest.approx(0.067, abs=1e-3)


@pytest.mark.parametrize("drafting", [no_draft, draft_by_malice])
def test_samples_follow_the_target_without_a_draft_and_with_a_malicious_one(drafting) -> None:
    check_samples(Experiment(pair_library(4)[PEAKED], 2, 3, 10_000), drafting)


def test_successive_passes_use_independent_randomness() -> None:
    """Five tokens take several passes, which must not share uniforms or noise."""
    experiment = Experiment(pair_library(3)[PEAKED], num_drafts=2, num_tokens=5, num_sequences=10_000)
    tokens = experiment.run(draft_by_sampling)
    expected = joint_probs(experiment.pair.target, experiment.sampling, 5)
    assert chi_square_tail(tokens, expected) > ALPHA


def test_a_uniform_of_zero_accepts_nothing_impossible() -> None:
    check_zero_uniforms(pair_library(3)[CERTAIN])


def test_an_equal_draft_is_nearly_always_accepted_whole() -> None:
    sequences = [new_sequence(SamplingParams(seed=seed), VerifyMode.REJECTION) for seed in range(500)]
    pair = pair_library(4)[EQUAL]
    one_pass(pair.target, sequences, draft_by_sampling(pair.draft, sequences, 3))
    assert sum(sequence.num_accepted for sequence in sequences) >= 0.995 * 1500


def test_greedy_emits_the_argmax_whatever_is_drafted() -> None:
    greedy = SamplingParams(temperature=0.0)
    for pair in pair_library(4):
        drafted = Experiment(pair, 2, 6, 4, greedy).run(draft_by_sampling)
        plain = Experiment(pair, 0, 6, 4, greedy, VerifyMode.COUPLED).run(no_draft)
        assert torch.equal(drafted, plain)


@pytest.mark.parametrize(
    "q",
    [
        SparseDistribution((0, 1), (WEIGHT_SUM, 1)),
        SparseDistribution((0, 1), (WEIGHT_SUM + 1, -1)),
        SparseDistribution((0, 0), (WEIGHT_SUM // 2, WEIGHT_SUM // 2)),
        SparseDistribution((1,), (WEIGHT_SUM,)),
        SparseDistribution((0, 1), (WEIGHT_SUM,)),
        SparseDistribution((), ()),
    ],
)
def test_a_distribution_that_cannot_be_is_not_believed(q: SparseDistribution) -> None:
    assert rejection_rule.proposals_of(Draft((0,), (q,))) == (SparseDistribution((0,), (WEIGHT_SUM,)),)


def test_distributions_that_do_not_match_their_tokens_in_number_are_not_believed() -> None:
    q = SparseDistribution((0, 1), (WEIGHT_SUM // 2, WEIGHT_SUM // 2))
    assert rejection_rule.proposals_of(Draft((0, 1), (q,))) == (
        SparseDistribution((0,), (WEIGHT_SUM,)),
        SparseDistribution((1,), (WEIGHT_SUM,)),
    )
    assert rejection_rule.proposals_of(NO_DRAFT) == ()


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    p = torch.tensor([[0.25, 0.75]])
    assert torch.equal(rejection_rule.recovered_probs(p, p.clone()), p)
