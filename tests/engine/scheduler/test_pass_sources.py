"""The sources of tokens and the reasons of plain passes, as one pass gives them."""

from __future__ import annotations

import pytest

from engine.batch.draft import Draft
from engine.scheduler.ending import token_sources
from engine.sequence.batch import CheckedDraft
from engine.verifier.verify_task import VerifyResult


@pytest.mark.parametrize(
    ("draft", "outcome", "expected"),
    [
        (CheckedDraft(Draft(), 0), VerifyResult((5,), 0), ["plain"]),
        (CheckedDraft(Draft((1, 2)), 2), VerifyResult((1, 7), 1), ["accepted:model", "recovered"]),
        (CheckedDraft(Draft((1, 2)), 2), VerifyResult((1, 2, 7), 2), ["accepted:model", "accepted:model", "bonus"]),
        (CheckedDraft(Draft((1, 99)), 1), VerifyResult((1, 7), 1), ["accepted:model", "recovered"]),
        (
            CheckedDraft(Draft((1, 2)), 2, num_forced=1),
            VerifyResult((1, 2, 7), 2),
            ["accepted:model", "forced", "bonus"],
        ),
        (CheckedDraft(Draft((1, 2), parents=(-1, -1)), 2), VerifyResult((7,), 0), ["recovered"]),
        (
            CheckedDraft(Draft((1, 2), parents=(-1, -1)), 2),
            VerifyResult((2, 7), 1, path=(1,)),
            ["accepted:model", "bonus"],
        ),
        (
            CheckedDraft(Draft((1, 2), parents=(-1, 0)), 2),
            VerifyResult((1, 7), 1, path=(0,)),
            ["accepted:model", "recovered"],
        ),
        (CheckedDraft(Draft((1,)), 1), VerifyResult((1, 2), 1, is_exact=False), ["step", "step"]),
    ],
)
def test_each_token_of_a_pass_names_its_source(draft: CheckedDraft, outcome: VerifyResult, expected: list) -> None:
    assert token_sources(draft, outcome, "model") == expected
