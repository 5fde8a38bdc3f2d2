"""Known mistakes of speculative engines, each patched into the code and refuted by checks that the code passes.

The mistakes come from other engines, or are possible errors in our bookkeeping. The pairs come from
`tabular.pair_library`, since random near-uniform pairs do not show some of the mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.draft import Draft, SparseDistribution
from engine.sampling import masks, penalties, sampler
from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose
from engine.sampling.sampler import Sampler
from engine.sampling.sparse_distribution import one_hot
from engine.sampling.truncation import keep_top_p
from engine.verifier import rejection, rejection_rule, verifier, verify_task
from engine.verifier.verify_task import VerifyResult
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.exactness_checks import (
    check_coupled_equality,
    check_enumeration,
    check_samples,
    check_zero_uniforms,
    draft_by_coupling,
    similar_model,
)
from tests.engine.fixtures.tabular import Experiment, TabularModel, draft_by_sampling, no_draft, pair_library

PEAKED, FLAT, ZEROS, EQUAL, CERTAIN = pair_library(4)
PENALIZED = SamplingParams(presence_penalty=2.0)
NUCLEUS = SamplingParams(top_p=0.8)


def check_samples_of_two_pairs() -> None:
    """A peaked draft shows a wrong q; a flat draft is accepted often and shows a wrong bonus token."""
    check_samples(Experiment(PEAKED, num_drafts=2, num_tokens=3, num_sequences=2_500))
    check_samples(Experiment(FLAT, num_drafts=2, num_tokens=3, num_sequences=2_500))


CHECKS: dict[str, Callable[[], None]] = {
    "enumeration": lambda: check_enumeration(4, 2),
    "enumeration, penalties": lambda: check_enumeration(4, 2, PENALIZED),
    "enumeration, top-p": lambda: check_enumeration(4, 2, NUCLEUS),
    "samples": check_samples_of_two_pairs,
    "samples, penalties": lambda: check_samples(Experiment(PEAKED, 2, 3, 2_500, PENALIZED)),
    "plain samples": lambda: check_samples(Experiment(PEAKED, 0, 3, 6_000, verify=VerifyMode.COUPLED), no_draft),
    "zero uniforms": lambda: check_zero_uniforms(CERTAIN),
    "equality": lambda: check_coupled_equality(draft_by_coupling, similar_model(), 3),
}


@dataclass(frozen=True, slots=True)
class _Drafted(SparseDistribution):
    """A distribution that remembers its token."""

    drafted_id: int = -1


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mistake, the place of its patch, and the checks that must find it."""

    name: str
    patch: Callable[[pytest.MonkeyPatch], None]
    checks: tuple[str, ...]


MUTANTS: list[Mutant] = []


def mutant(*checks: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    def register(patch: Callable[[pytest.MonkeyPatch], None]) -> None:
        MUTANTS.append(Mutant(patch.__name__, patch, checks))

    return register


# ---- the residual -------------------------------------------------------------------------------------------------


@mutant("enumeration", "samples")
def residual_is_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection_rule, "recovered_probs", lambda p, q: p)


@mutant("enumeration", "samples")
def residual_is_absolute(patch: pytest.MonkeyPatch) -> None:
    def absolute(p: Tensor, q: Tensor) -> Tensor:
        excess = (p - q).abs()
        return excess / excess.sum(dim=1, keepdim=True).clamp(min=1e-30)

    patch.setattr(rejection_rule, "recovered_probs", absolute)


@mutant("enumeration", "samples")
def residual_is_p_without_the_rejected_token(patch: pytest.MonkeyPatch) -> None:
    real = rejection_rule.proposals_of

    def remember(draft: Draft) -> tuple[_Drafted, ...]:
        pairs = zip(real(draft), draft.token_ids, strict=True)
        return tuple(_Drafted(q.token_ids, q.weights, token_id) for q, token_id in pairs)

    def drafted_alone(proposals: Seq[_Drafted], num_accepted: int) -> SparseDistribution:
        return (
            one_hot(proposals[num_accepted].drafted_id) if num_accepted < len(proposals) else rejection_rule.NO_PROPOSAL
        )

    patch.setattr(rejection_rule, "proposals_of", remember)
    patch.setattr(rejection_rule, "final_proposal", drafted_alone)


# ---- the bonus ----------------------------------------------------------------------------------------------------


@mutant("enumeration", "samples")
def bonus_comes_from_the_draft(patch: pytest.MonkeyPatch) -> None:
    real = rejection_rule.recovered_probs

    def marked(proposals: Seq[SparseDistribution], num_accepted: int) -> SparseDistribution:
        if num_accepted < len(proposals):
            return proposals[num_accepted]
        last = proposals[-1] if proposals else rejection_rule.NO_PROPOSAL
        return SparseDistribution(last.token_ids, tuple(-weight for weight in last.weights))

    def from_draft(p: Tensor, q: Tensor) -> Tensor:
        return torch.where(q.sum(dim=1, keepdim=True) < 0, -q, real(p, q))

    patch.setattr(rejection_rule, "final_proposal", marked)
    patch.setattr(rejection_rule, "recovered_probs", from_draft)


@mutant("enumeration", "samples")
def bonus_comes_from_the_residual(patch: pytest.MonkeyPatch) -> None:
    def last(proposals: Seq[SparseDistribution], num_accepted: int) -> SparseDistribution:
        return proposals[min(num_accepted, len(proposals) - 1)] if proposals else rejection_rule.NO_PROPOSAL

    patch.setattr(rejection_rule, "final_proposal", last)


@mutant("enumeration", "samples")
def token_comes_from_the_row_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection_rule, "final_row", lambda first_row, num_accepted: first_row + max(0, num_accepted - 1))


# ---- the test -----------------------------------------------------------------------------------------------------


@mutant("enumeration", "samples")
def accepts_iff_argmax(patch: pytest.MonkeyPatch) -> None:
    def is_argmax(distributions: Tensor, row_ids: Seq[int], token_ids: Seq[int]) -> Tensor:
        return (distributions[list(row_ids)].argmax(dim=1) == torch.tensor(token_ids)).double()

    patch.setattr(rejection_rule, "target_probs_of", is_argmax)


@mutant("enumeration", "samples")
def accepts_leniently(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection_rule, "is_accepted", lambda u, p, q: u * q < 1.25 * p)


@mutant("zero uniforms")
def accepts_at_equality(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection_rule, "is_accepted", lambda u, p, q: u * q <= p)


@mutant("enumeration", "samples")
def accepts_drafts_after_a_rejected_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection_rule, "count_accepted", sum)


# ---- the draft's distribution ---------------------------------------------------------------------------------------


def _draw_from(patch: pytest.MonkeyPatch, distort: Callable[[Tensor, Seq[LogitsRow]], Tensor]) -> None:
    """Draw from a distorted distribution and report the undistorted one."""
    real = Sampler.sample_sparse

    def dishonest(
        self: Sampler, scores: Tensor, rows: Seq[LogitsRow], k: int
    ) -> tuple[tuple[int, ...], tuple[SparseDistribution, ...]]:
        return real(self, distort(scores, rows), rows, k)[0], real(self, scores, rows, k)[1]

    patch.setattr(Sampler, "sample_sparse", dishonest)


@mutant("samples")
def draft_is_drawn_at_another_temperature(patch: pytest.MonkeyPatch) -> None:
    _draw_from(patch, lambda scores, rows: scores / 0.6)


@mutant("samples")
def draft_is_drawn_truncated_and_reported_whole(patch: pytest.MonkeyPatch) -> None:
    _draw_from(patch, lambda scores, rows: keep_top_p(scores, [row._replace(sampling=NUCLEUS) for row in rows]))


@mutant("samples")
def draft_is_the_argmax_and_reported_as_drawn(patch: pytest.MonkeyPatch) -> None:
    _draw_from(patch, lambda scores, rows: scores * 1e6)


# ---- the rows -----------------------------------------------------------------------------------------------------


def _without_drafts(rows: Seq[LogitsRow]) -> list[LogitsRow]:
    return [row._replace(draft_ids=()) for row in rows]


@mutant("enumeration, penalties", "samples, penalties", "equality")
def penalties_are_stale_for_later_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(penalties, "_add_drafts", lambda counts, rows: None)


@mutant("equality")
def bad_words_are_stale_for_later_rows(patch: pytest.MonkeyPatch) -> None:
    real = masks._banned_ids
    patch.setattr(masks, "_banned_ids", lambda row, scores: real(row._replace(draft_ids=()), scores))


@mutant("enumeration, top-p")
def target_is_verified_untruncated(patch: pytest.MonkeyPatch) -> None:
    def untruncated(sampling: SamplingParams, *others: Any) -> LogitsRow:
        return LogitsRow(replace(sampling, top_p=1.0), *others)

    patch.setattr(verify_task, "LogitsRow", untruncated)


# ---- the noise ----------------------------------------------------------------------------------------------------


@mutant("samples", "equality")
def noise_is_keyed_by_step(patch: pytest.MonkeyPatch) -> None:
    real = sampler.row_keys

    def by_step(rows: Seq[LogitsRow], purpose: Purpose, device: torch.device) -> Tensor:
        return real(_without_drafts(rows), purpose, device)

    patch.setattr(sampler, "row_keys", by_step)
    patch.setattr(rejection, "row_keys", by_step)


@mutant("plain samples")
def noise_is_the_same_at_every_position(patch: pytest.MonkeyPatch) -> None:
    real = sampler.noise_keys

    def unplaced(prefixes, positions, purpose, device) -> Tensor:
        return real(prefixes, 0 * positions, purpose, device)

    patch.setattr(sampler, "noise_keys", unplaced)


@mutant("samples")
def draft_knows_the_noise_that_verifies_it(patch: pytest.MonkeyPatch) -> None:
    real = sampler.noise_keys

    def purposeless(prefixes, positions, purpose, device) -> Tensor:
        return real(prefixes, positions, Purpose.DRAFT, device)

    patch.setattr(sampler, "noise_keys", purposeless)


# ---- coupled ------------------------------------------------------------------------------------------------------


def _match_each(patch: pytest.MonkeyPatch, match_one: Callable[[Seq[int], Seq[int]], VerifyResult]) -> None:
    """Have `match_one` verify each chain of a pass by the tokens sampled at its rows."""

    def match(sampled_ids: Seq[int], chains: Seq[Seq[int]]) -> list[VerifyResult]:
        ends = list(accumulate(len(chain) + 1 for chain in chains))
        return [
            match_one(sampled_ids[end - len(chain) - 1 : end], chain) for chain, end in zip(chains, ends, strict=True)
        ]

    patch.setattr(verifier, "match", match)


@mutant("equality")
def coupled_emits_the_last_row(patch: pytest.MonkeyPatch) -> None:
    real = verifier.match

    def last_row(sampled_ids: Seq[int], draft_ids: Seq[int]) -> VerifyResult:
        (result,) = real(sampled_ids, [draft_ids])
        return VerifyResult((*result.token_ids[:-1], sampled_ids[-1]), result.num_accepted)

    _match_each(patch, last_row)


@mutant("equality")
def coupled_goes_on_after_a_difference(patch: pytest.MonkeyPatch) -> None:
    _match_each(patch, lambda sampled_ids, draft_ids: VerifyResult(tuple(sampled_ids), len(draft_ids)))


@mutant("equality")
def coupled_trusts_the_first_draft(patch: pytest.MonkeyPatch) -> None:
    real = verifier.match

    def trusting(sampled_ids: Seq[int], draft_ids: Seq[int]) -> VerifyResult:
        return real([*draft_ids[:1], *sampled_ids[len(draft_ids[:1]) :]], [draft_ids])[0]

    _match_each(patch, trusting)


# ---- the tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
def test_the_unpatched_verifier_passes_every_check(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize(
    ("change", "check"),
    [pytest.param(each, check, id=f"{each.name}-{check}") for each in MUTANTS for check in each.checks],
)
def test_every_mutant_fails_its_checks(change: Mutant, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change.patch(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()


def test_dropping_unlikely_drafts_after_drawing_them_is_seen() -> None:
    """The choice of drafts to verify must not depend on the drafts themselves."""

    def drop_unlikely(model: TabularModel, sequences: Seq, num_drafts: int) -> list[Draft]:
        return [_up_to_unlikely(draft) for draft in draft_by_sampling(model, sequences, num_drafts)]

    with pytest.raises(AssertionError):
        check_samples(Experiment(PEAKED, num_drafts=2, num_tokens=3, num_sequences=2_500), drop_unlikely)


def _up_to_unlikely(draft: Draft) -> Draft:
    probs = rejection_rule.draft_probs_of(draft.distributions, draft.token_ids).tolist()
    count = next((i for i, prob in enumerate(probs) if prob < 0.35), len(probs))
    return Draft(draft.token_ids[:count], draft.distributions[:count])
