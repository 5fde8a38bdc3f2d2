"""Every verifier emits exactly the masked distribution of a grammar; mistakes in the masks are seen."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from engine.batch.draft import Draft
from engine.sampling.grammar import GrammarMatcher, TokenMask
from engine.sampling.logits_row import LogitsRow
from engine.sequence.batch import CheckedDraft
from engine.verifier import verify_task
from protos.messages import VerifyMode
from tests.engine.fixtures import tabular
from tests.engine.fixtures.exactness_checks import check_enumeration, check_samples, draft_by_malice
from tests.engine.fixtures.tabular import CONSTRAINED, Experiment, no_draft, pair_library

PEAKED, FLAT, *_ = pair_library(4)


def samples(verify: VerifyMode, *, num_drafts: int = 2) -> Experiment:
    return Experiment(FLAT, num_drafts, num_tokens=4, num_sequences=1_000, sampling=CONSTRAINED, verify=verify)


CHECKS: dict[str, Callable[[], None]] = {
    "rejection": lambda: check_enumeration(4, 2, CONSTRAINED, [PEAKED, FLAT]),
    "block": lambda: check_enumeration(4, 2, CONSTRAINED, [PEAKED, FLAT], VerifyMode.BLOCK),
    "rejection, samples": lambda: check_samples(samples(VerifyMode.REJECTION)),
    "block, samples": lambda: check_samples(samples(VerifyMode.BLOCK)),
    "rejection, certain drafts": lambda: check_samples(samples(VerifyMode.REJECTION), draft_by_malice),
    "coupled": lambda: check_samples(samples(VerifyMode.COUPLED, num_drafts=0), no_draft),
}


@pytest.mark.parametrize("check", CHECKS)
def test_one_pass_emits_the_masked_distribution(check: str) -> None:
    CHECKS[check]()


def test_coupled_drafts_under_a_grammar_change_no_token() -> None:
    plain = samples(VerifyMode.COUPLED, num_drafts=0).run(no_draft)
    assert samples(VerifyMode.COUPLED, num_drafts=3).run(draft_by_malice).tolist() == plain.tolist()


def test_a_forced_token_is_drafted_without_a_proposer() -> None:
    """After "ca" the text is free, after "b" it is a or ca, and after "bc" only a is left."""
    sequence = tabular.new_sequence(CONSTRAINED)
    sequence.append((1, 2))
    assert tabular.as_computed(sequence, Draft(), 4).token_ids == (0,)


def mask_is_applied_to_the_first_row_only(patch: pytest.MonkeyPatch) -> None:
    def first_only(*fields: Any) -> LogitsRow:
        row = LogitsRow(*fields)
        return row._replace(mask=None) if row.draft_ids else row

    patch.setattr(verify_task, "LogitsRow", first_only)


def mask_of_the_first_row_is_applied_to_all(patch: pytest.MonkeyPatch) -> None:
    real = GrammarMatcher.masks
    patch.setattr(GrammarMatcher, "masks", lambda self, ids: [real(self, ids)[0]] * (len(ids) + 1))


def matcher_is_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GrammarMatcher, "_roll_back", lambda self, num_tokens, drafted: False)


def matcher_reads_the_drafts_too(patch: pytest.MonkeyPatch) -> None:
    real = GrammarMatcher.masks

    def reading(self: GrammarMatcher, draft_ids: Seq[int]) -> list[TokenMask]:
        masks = real(self, draft_ids)
        self.read(draft_ids)
        return masks

    patch.setattr(GrammarMatcher, "masks", reading)


def forbidden_draws_are_left_out(patch: pytest.MonkeyPatch) -> None:
    """Treat a forbidden draw as no draft. This is wrong: the token is drawn from p instead of the residual."""
    real = tabular.constrain

    def leave_out(checked: CheckedDraft, max_tokens: int, matcher: GrammarMatcher) -> CheckedDraft:
        kept = real(checked, max_tokens, matcher)
        ids, distributions = kept.token_ids, kept.draft.distributions[: kept.num_valid]
        return CheckedDraft(Draft(ids, distributions), len(ids))

    patch.setattr(tabular, "constrain", leave_out)


MUTANTS = {
    mask_is_applied_to_the_first_row_only: ("rejection", "block", "rejection, samples"),
    mask_of_the_first_row_is_applied_to_all: ("rejection", "block", "rejection, samples"),
    matcher_is_not_rolled_back: ("rejection, samples", "rejection, certain drafts"),
    matcher_reads_the_drafts_too: ("rejection, samples", "block, samples"),
    forbidden_draws_are_left_out: ("rejection", "block"),
}


@pytest.mark.parametrize(
    ("mutant", "check"),
    [pytest.param(each, check, id=f"{each.__name__}-{check}") for each, checks in MUTANTS.items() for check in checks],
)
def test_every_mutant_of_the_masks_fails_its_check(
    mutant: Callable[[pytest.MonkeyPatch], None], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()
