"""Lengths that depend on the drafts they cut bias the output; the policy's lengths do not.

Rejection and block verification are exact for lengths that were fixed before the drafts were drawn. A scheduler that
drops a drawn draft because of its token conditions on it: the remaining drafts no longer have the distribution q.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from engine.accounting.length_policy import LengthPolicy
from engine.accounting.record import SequencePass
from engine.batch.draft import WEIGHT_SUM, Draft
from engine.sampling.sparse_distribution import probability_of
from engine.sequence.sequence import Sequence
from engine.verifier import rejection_rule
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import VerifyTask
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.builders import pass_record, sequence_pass
from tests.engine.fixtures.pairs.simulated_pair import plan_pass
from tests.engine.fixtures.tabular import (
    PROMPT,
    chi_square_tail,
    draft_by_sampling,
    joint_probs,
    new_sequence,
    pair_library,
)

NUM_TOKENS, V, K, N = 3, 3, 3, 6000
Cut = Callable[[Draft], Draft]


def emitted_probs(p: Tensor, q: Tensor, is_kept: Callable[[int], bool]) -> Tensor:
    """The distribution of one token if a drawn draft is verified when it is kept, and dropped otherwise."""
    distribution = torch.zeros_like(p)
    recovered = rejection_rule.recovered_probs(p[None], q[None])[0]
    for token_id, chance in enumerate(q.tolist()):
        if not is_kept(token_id):
            distribution += chance * p
            continue
        accepted = min(1.0, float(p[token_id]) / chance)
        distribution[token_id] += chance * accepted
        distribution += chance * (1.0 - accepted) * recovered
    return distribution


def test_the_look_ahead_scheduler_of_dspark_is_biased_and_a_blind_one_is_not() -> None:
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    look_ahead = emitted_probs(p, q, is_kept=lambda token_id: token_id == 0)
    assert torch.allclose(look_ahead, torch.tensor([0.85, 0.15], dtype=torch.float64))
    for length in (0, 1):
        assert torch.allclose(emitted_probs(p, q, is_kept=lambda _, length=length: length == 1), p)


def keep(draft: Draft) -> Draft:
    return draft


def drop_unlikely(draft: Draft) -> Draft:
    """A mutant: a draft ends before its first token that the draft model found unlikely."""
    length = 0
    for distribution, token_id in zip(draft.distributions, draft.token_ids, strict=True):
        if probability_of(distribution, token_id) < 0.35 and distribution.weights != (WEIGHT_SUM,):
            break
        length += 1
    return Draft(draft.token_ids[:length], draft.distributions[:length])


def generate(verify: VerifyMode, cut: Cut) -> tuple[Tensor, set[int]]:
    """`[N, NUM_TOKENS]` tokens under the policy's lengths, and which lengths it chose after the first pass."""
    pair = pair_library(V)[0]
    sequences = [new_sequence(SamplingParams(seed=seed), verify) for seed in range(N)]
    policy = LengthPolicy(K, K)
    lengths: set[int] = set()
    plan_pass(policy, sequences)
    while active := [sequence for sequence in sequences if sequence.num_output_tokens < NUM_TOKENS]:
        drafts = [
            cut(Draft(draft.token_ids[:length], draft.distributions[:length]))
            for draft, length in zip(
                draft_by_sampling(pair.draft, active, K), [each.draft_allowance for each in active], strict=True
            )
        ]
        passes = one_pass(pair.target.logits, active, drafts)
        num_rows = len(active) + sum(len(draft.token_ids) for draft in drafts)
        policy.on_pass(pass_record(passes, 0.0, 1e-3 * N + 2e-3 * num_rows))
        plan_pass(policy, active)
        lengths |= {each.draft_allowance for each in active}
    end = len(PROMPT) + NUM_TOKENS
    return torch.tensor([sequence.token_ids[len(PROMPT) : end] for sequence in sequences]), lengths


def one_pass(
    logits_of: Callable[[Seq[Seq[int]]], Tensor], sequences: Seq[Sequence], drafts: Seq[Draft]
) -> list[SequencePass]:
    tasks, prefixes = [], []
    for sequence, draft in zip(sequences, drafts, strict=True):
        tasks.append(VerifyTask(sequence, draft, len(prefixes)))
        prefixes += [[*sequence.token_ids, *draft.token_ids[:i]] for i in range(len(draft.token_ids) + 1)]
    verified = Verifier().verify(logits_of(prefixes).float(), tasks)
    passes = []
    for sequence, draft, outcome in zip(sequences, drafts, verified, strict=True):
        sequence.token_ids += outcome.token_ids
        num_drafts = len(draft.token_ids)
        passes.append(sequence_pass(sequence, sequence.draft_allowance, num_drafts, outcome.num_accepted))
    return passes


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_lengths_that_follow_what_was_accepted_leave_the_distribution_as_it_is(verify: VerifyMode) -> None:
    tokens, lengths = generate(verify, keep)
    assert len(lengths) > 1, "the policy distinguishes the sequences, or this proves nothing"
    distribution = joint_probs(pair_library(V)[0].target, SamplingParams(), NUM_TOKENS)
    assert chi_square_tail(tokens, distribution) > 1e-4


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_a_policy_that_drops_drawn_drafts_is_caught(verify: VerifyMode) -> None:
    tokens, _ = generate(verify, drop_unlikely)
    distribution = joint_probs(pair_library(V)[0].target, SamplingParams(), NUM_TOKENS)
    assert chi_square_tail(tokens, distribution) < 1e-6
