"""Predictions of several sequences: one index per client request, not shared between tenants."""

from __future__ import annotations

import pytest

from engine.proposer.text_match.text_matcher import PredictionMatcher
from protos.messages import GenerateRequest, SamplingParams
from protos.predicted_text import Prediction
from tests.engine.fixtures.builders import sequence_of

PREDICTION = [5, 6, 7, 8, 5, 9]


def open_choices(matcher: PredictionMatcher, name: str, tenant: str = "") -> None:
    for index in range(4):
        request = GenerateRequest(
            f"{name}-{index}",
            (1, 2, 3),
            SamplingParams(max_tokens=100),
            tenant=tenant,
            prediction_token_ids=tuple(PREDICTION),  # as from the socket: equal, but not the same object
        )
        matcher.open(sequence_of(request))


@pytest.fixture
def num_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    class Counted(Prediction):
        def __init__(self, token_ids: tuple[int, ...]) -> None:
            super().__init__(token_ids)
            made.append(len(token_ids))

    monkeypatch.setattr("engine.proposer.text_match.text_matcher.Prediction", Counted)
    return made


def test_the_choices_of_a_request_share_what_is_made_of_their_prediction(num_made: list[int]) -> None:
    open_choices(PredictionMatcher(), "a")
    assert len(num_made) == 1


def test_what_is_made_of_a_prediction_goes_with_its_last_sequence(num_made: list[int]) -> None:
    matcher = PredictionMatcher()
    for name in ("a", "b"):
        open_choices(matcher, name)
        for index in range(4):
            matcher.close(f"{name}-{index}")
    assert len(num_made) == 2


def test_tenants_share_no_prediction(num_made: list[int]) -> None:
    matcher = PredictionMatcher()
    open_choices(matcher, "a", tenant="one")
    open_choices(matcher, "b", tenant="other")
    assert len(num_made) == 2
