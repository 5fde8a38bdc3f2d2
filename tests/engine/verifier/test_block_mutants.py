"""Likely mistakes of block verification, each patched into the code and refuted by checks that the code passes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from engine.batch.draft import NO_DRAFT, Draft, SparseDistribution
from engine.sampling import sampler
from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose
from engine.sampling.sampler import Sampler
from engine.sequence.sequence import Sequence
from engine.verifier import block, rejection_rule
from engine.verifier.rejection import ChainBatch
from protos.messages import VerifyMode
from tests.engine.fixtures.exactness_checks import (
    check_enumeration,
    check_fresh_numbers,
    check_samples,
    check_zero_uniforms,
)
from tests.engine.fixtures.tabular import Drafting, Experiment, TabularModel, pair_library, row_of

BLOCK = VerifyMode.BLOCK
PEAKED, FLAT, _, _, CERTAIN = pair_library(3)

CHECKS: dict[str, Callable[[], None]] = {
    "enumeration": lambda: check_enumeration(3, 2, pairs=[PEAKED, FLAT], verify=BLOCK),
    "samples, peaked": lambda: check_samples(Experiment(PEAKED, 4, 5, 4_000, verify=BLOCK)),
    "samples, flat": lambda: check_samples(Experiment(FLAT, 4, 5, 2_000, verify=BLOCK)),  # mutants: p < 3e-13
    "fresh": lambda: check_fresh_numbers(Experiment(PEAKED, 4, 12, 10, verify=BLOCK)),
    "zero uniforms": lambda: check_zero_uniforms(CERTAIN, BLOCK),
}

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: list[tuple[Patch, str]] = []


def mutant(*checks: str) -> Callable[[Patch], None]:
    def register(patch: Patch) -> None:
        MUTANTS.extend((patch, check) for check in checks)

    return register


# ---- the residual -------------------------------------------------------------------------------------------------


@mutant("enumeration")
def residual_is_not_scaled(patch: pytest.MonkeyPatch) -> None:
    real = ChainBatch.final_probs
    patch.setattr(ChainBatch, "final_probs", lambda chains, counts, scales=None: real(chains, counts))


# ---- accepted drafts ----------------------------------------------------------------------------------------------


@mutant("enumeration", "samples, flat")
def the_first_success_decides(patch: pytest.MonkeyPatch) -> None:
    def first(successes: Seq[bool]) -> int:
        return next((index + 1 for index, is_standing in enumerate(successes) if is_standing), 0)

    patch.setattr(block, "count_accepted", first)


@mutant("enumeration", "samples, flat")
def the_first_failure_decides(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "count_accepted", rejection_rule.count_accepted)


@mutant("enumeration", "samples, flat")
def the_last_draft_always_stands(patch: pytest.MonkeyPatch) -> None:
    real = block.success_probs
    patch.setattr(block, "success_probs", lambda rho, s: torch.where(s == rho, 1.0, real(rho, s)))


@mutant("enumeration")
def the_last_draft_is_verified_with_its_own_distribution(patch: pytest.MonkeyPatch) -> None:
    real = block.excess_mass

    def with_last_distribution(
        distributions: Tensor, row_ids: Seq[int], rho: Tensor, proposals: Seq[SparseDistribution]
    ) -> Tensor:
        return real(distributions, row_ids, rho, [*proposals[:-1], proposals[0]])

    patch.setattr(block, "excess_mass", with_last_distribution)


@mutant("enumeration", "samples, flat")
def debt_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "success_probs", lambda rho, s: (s > 0).double())


@mutant("enumeration")
def success_is_the_ratio_itself(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "success_probs", lambda rho, s: rho)


@mutant("enumeration")
def ratios_are_not_clipped(patch: pytest.MonkeyPatch) -> None:
    def unclipped(target_probs: Seq[float], draft_probs: Seq[float]) -> list[float]:
        ratios = [1.0]
        for p, q in zip(target_probs, draft_probs, strict=True):
            ratios.append(ratios[-1] * p / q)
        return ratios

    patch.setattr(block, "running_ratios", unclipped)


@mutant("enumeration")
def ratios_do_not_run(patch: pytest.MonkeyPatch) -> None:
    def one_by_one(target_probs: Seq[float], draft_probs: Seq[float]) -> list[float]:
        return [1.0, *(min(1.0, p / q) for p, q in zip(target_probs, draft_probs, strict=True))]

    patch.setattr(block, "running_ratios", one_by_one)


@mutant("zero uniforms")
def accepts_at_equality(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "is_success", lambda u, probs: u <= probs)


# ---- the noise ----------------------------------------------------------------------------------------------------


def _key_by_position(patch: pytest.MonkeyPatch, module: object) -> None:
    patch.setattr(module, "pass_keys", lambda rows, purpose, device: sampler.row_keys(rows, purpose, device))
    patch.setattr(module, "draft_lanes", lambda rows, device: 0)


@mutant("fresh", "samples, peaked")
def uniforms_are_seen_again_in_the_next_pass(patch: pytest.MonkeyPatch) -> None:
    _key_by_position(patch, block)


@mutant("fresh", "samples, flat")
def draft_noise_is_seen_again_in_the_next_pass(patch: pytest.MonkeyPatch) -> None:
    """Drafts after the committed tokens were verified already, so their noise is not independent of the prefix."""
    _key_by_position(patch, sampler)


@mutant("fresh", "samples, peaked")
def drafts_of_a_pass_share_one_uniform(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block, "draft_lanes", lambda rows, device: 0)


@mutant("samples, flat")
def draft_knows_the_uniform_that_judges_it(patch: pytest.MonkeyPatch) -> None:
    real = sampler.pass_keys

    def accepting(rows: Seq[LogitsRow], purpose: Purpose, device: torch.device) -> Tensor:
        return real(rows, Purpose.ACCEPT, device)

    patch.setattr(sampler, "pass_keys", accepting)


# ---- the tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
def test_the_unpatched_block_verifier_passes_every_check(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize(
    ("change", "check"), [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in MUTANTS]
)
def test_every_mutant_fails_its_checks(change: Patch, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()


# ---- drafting ahead -----------------------------------------------------------------------------------------------


def drafting_in_the_running_pass() -> Drafting:
    """Continues an outcome with the numbers of the pass that decides about it."""
    starts: dict[str, int] = {}

    def draft(model: TabularModel, sequences: Seq[Sequence], num_drafts: int) -> list[Draft]:
        sampler_ = Sampler()
        drafts = [NO_DRAFT] * len(sequences)
        passes = [starts.get(sequence.request_id, len(sequence.token_ids)) for sequence in sequences]
        for _ in range(num_drafts):
            rows = [
                row_of(sequence)._replace(
                    token_ids=sequence.token_ids[:start],
                    draft_ids=(*sequence.token_ids[start:], *drafted.token_ids),
                )
                for sequence, start, drafted in zip(sequences, passes, drafts, strict=True)
            ]
            logits = model.logits([[*row.token_ids, *row.draft_ids] for row in rows])
            sample = sampler_.sample_sparse(sampler_.apply_processors(logits, rows), rows, model.num_tokens)
            drafts = [
                Draft((*drafted.token_ids, token_id), (*drafted.distributions, distribution))
                for drafted, token_id, distribution in zip(drafts, *sample, strict=True)
            ]
        starts.update((sequence.request_id, len(sequence.token_ids)) for sequence in sequences)
        return drafts

    return draft


def test_a_draft_made_ahead_with_the_noise_of_the_running_pass_is_biased() -> None:
    experiment = Experiment(FLAT, 4, 5, 4_000, verify=BLOCK)
    check_samples(experiment)
    with pytest.raises(AssertionError):
        check_samples(experiment, drafting_in_the_running_pass())
