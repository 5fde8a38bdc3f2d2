"""Predictions and suffixes take precedence over the model, and no token changes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.batch.draft import Draft
from engine.proposer.method_dispatcher import HybridProposer, MethodDispatcher, proposer_of
from engine.proposer.text_match.suffix import SuffixProposer
from engine.proposer.text_match.text_matcher import PredictionMatcher, TextMatch
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams
from tests.engine.engine_core.test_engine_core import greedy, make_core, outputs, right, run, wrong
from tests.engine.fixtures.builders import make_scheduled, sequence_of
from tests.engine.fixtures.fakes import ScriptedProposer

PROMPT = (1, 2, 3)


def new_sequence(name: str = "a", prediction: tuple[int, ...] = ()) -> Sequence:
    request = GenerateRequest(name, PROMPT, SamplingParams(max_tokens=1000), prediction_token_ids=prediction)
    return sequence_of(request)


def grow(proposer: HybridProposer, sequence: Sequence, *token_ids: int) -> None:
    sequence.token_ids += token_ids
    proposer.commit([sequence])


def model(token_id: int = 9) -> ScriptedProposer:
    return ScriptedProposer(lambda sequence, max_tokens: [token_id] * max_tokens)


def test_a_prediction_is_the_draft_while_the_text_follows_it_and_the_model_rests() -> None:
    other = model()
    proposer, sequence = HybridProposer(PredictionMatcher(), other), new_sequence(prediction=(5, 6, 7, 8, 5, 9))
    proposer.open(sequence)
    grow(proposer, sequence, 5)
    assert proposer.propose([make_scheduled(sequence)]) == [Draft((6, 7, 8, 5))]
    assert proposer.propose([make_scheduled(sequence, 2)]) == [Draft((6, 7))]
    assert other.committed == []


def test_where_the_text_strays_the_model_is_asked_until_it_is_found_again() -> None:
    other = model()
    proposer, sequence = HybridProposer(PredictionMatcher(), other), new_sequence(prediction=(5, 6, 7, 8, 5, 9))
    proposer.open(sequence)
    grow(proposer, sequence, 5, 99)
    assert proposer.propose([make_scheduled(sequence)]) == [Draft((9, 9, 9, 9))]
    assert other.committed == ["a"]
    grow(proposer, sequence, 7, 8)
    assert proposer.propose([make_scheduled(sequence)]) == [Draft((5, 9))]
    assert other.committed == ["a"]


def test_a_request_without_a_prediction_passes_through() -> None:
    other = model()
    proposer, sequence = HybridProposer(PredictionMatcher(), other), new_sequence()
    proposer.open(sequence)
    grow(proposer, sequence, 5)
    assert proposer.propose([make_scheduled(sequence)]) == [Draft((9, 9, 9, 9))]
    proposer.close("a")
    assert (other.opened, other.committed, other.closed) == (["a"], ["a"], ["a"])


class FixedMatcher(PredictionMatcher):
    """Always finds the same match."""

    def __init__(self, match: TextMatch) -> None:
        super().__init__()
        self._match = match

    def is_for(self, sequence: Sequence) -> bool:
        return True

    def match(self, sequence: Sequence, max_tokens: int) -> TextMatch | None:
        return self._match


def chosen(match: TextMatch, true_ids: Seq[int], num_passes: int = 120) -> list[bool]:
    """Return for each pass if the draft was the match; the text is `true_ids`, and the model drafts 9."""
    proposer, sequence = HybridProposer(FixedMatcher(match), model()), new_sequence()
    proposer.open(sequence)
    grow(proposer, sequence, 0)
    were_matches = []
    for _ in range(num_passes):
        (draft,) = proposer.propose([make_scheduled(sequence)])
        were_matches.append(draft.token_ids == match[0])
        grow(proposer, sequence, *true_ids)
    return were_matches


def test_matches_that_fail_lose_to_a_model_that_does_not_and_are_tried_now_and_then() -> None:
    were_matches = chosen(((5, 6, 5, 6), 3), true_ids=(9, 9, 9, 9, 9))
    assert were_matches[0]
    assert 1 <= sum(were_matches[20:]) <= 5


def test_a_match_that_stands_is_preferred_to_a_model_that_does_not() -> None:
    assert all(chosen(((5, 6, 5, 6), 3), true_ids=(5, 6, 5, 6, 7)))


def test_what_the_old_model_accepted_is_forgotten_with_it() -> None:
    """Below a dispatcher too. A match that lost to the old model is proposed again."""
    match = ((5, 6, 5, 6), 3)
    inner, sequence = HybridProposer(FixedMatcher(match), model()), new_sequence()
    proposer = HybridProposer(PredictionMatcher(), MethodDispatcher({sequence.method: (inner,)}))
    proposer.open(sequence)
    for _ in range(10):
        grow(proposer, sequence, 9, 9, 9, 9, 9)
        (draft,) = proposer.propose([make_scheduled(sequence)])
    assert draft.token_ids != match[0]
    proposer.forget_draft()
    grow(proposer, sequence, 8)  # the last draft of the old model is wrong too
    assert [each.token_ids for each in proposer.propose([make_scheduled(sequence)])] == [match[0]]


def test_the_choice_is_the_same_every_time() -> None:
    match = ((5, 6, 5, 6), 3)
    assert chosen(match, (5, 9, 9)) == chosen(match, (5, 9, 9))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", list(SpeculationMethod))
@pytest.mark.parametrize("draft_of", [right, wrong])
@pytest.mark.parametrize("prediction", ["none", "right", "half", "wrong"])
def test_neither_method_nor_prediction_changes_a_token(
    temperature: float, method: SpeculationMethod, draft_of: object, prediction: str
) -> None:
    text = greedy(PROMPT, 30)
    predictions = {"none": [], "right": text, "half": [*text[:6], 3, 3, *text[10:]], "wrong": [1, 1, 1, 1, 1]}
    proposer = proposer_of(list(SpeculationMethod), ScriptedProposer(draft_of))  # type: ignore[arg-type]
    plain, other = make_core(), make_core(proposer, adaptive=True)
    for core in (plain, other):
        sampling = SamplingParams(seed=3, temperature=temperature, max_tokens=30)
        speculation = SpeculationParams(method=method)
        core.add(
            GenerateRequest("a", PROMPT, sampling, speculation, prediction_token_ids=tuple(predictions[prediction]))
        )
    assert outputs(run(other)) == outputs(run(plain))


def test_a_right_prediction_saves_passes_without_a_model() -> None:
    core = make_core(proposer_of([SpeculationMethod.NGRAM]), num_drafts=8)
    text = tuple(greedy(PROMPT, 40))
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    speculation = SpeculationParams(method=SpeculationMethod.NGRAM)
    core.add(GenerateRequest("a", PROMPT, sampling, speculation, prediction_token_ids=text))
    run(core)
    assert core.stats().times.num_steps == 1 + 3, "17 tokens a pass, since matches have a separate length"


def test_hybrid_drafts_from_repetition_and_from_the_model() -> None:
    other = model(token_id=99)
    proposer, sequence = HybridProposer(SuffixProposer(), other), new_sequence()
    proposer.open(sequence)
    grow(proposer, sequence, 4, 5, 6, 7)
    assert proposer.propose([make_scheduled(sequence)]) == [Draft((99,) * 4)]
    grow(proposer, sequence, 8, 4, 5, 6)
    assert proposer.propose([make_scheduled(sequence)])[0].token_ids[:2] == (7, 8)


def test_a_match_may_be_longer_than_what_the_model_is_asked_for() -> None:
    other, prediction = model(), tuple(range(20, 40))
    proposer, sequence = HybridProposer(PredictionMatcher(), other), new_sequence(prediction=prediction)
    sequence.num_free_draft_tokens = 10
    proposer.open(sequence)
    assert sequence.num_wanted_drafts == 4
    grow(proposer, sequence, *prediction[:3])
    assert sequence.num_wanted_drafts == 10
    assert proposer.propose([make_scheduled(sequence, 10)]) == [Draft(prediction[3:13])]
    grow(proposer, sequence, 99)
    assert sequence.num_wanted_drafts == 4
    assert proposer.propose([make_scheduled(sequence)]) == [Draft((9, 9, 9, 9))]


@pytest.mark.parametrize("has_own_length", [True, False])
def test_a_match_is_as_long_as_the_request_or_the_budget_allows(has_own_length: bool) -> None:
    prediction = tuple(range(20, 40))
    proposer, sequence = HybridProposer(PredictionMatcher(), model()), new_sequence(prediction=prediction)
    sequence.num_free_draft_tokens = 10 if has_own_length else None
    sequence.max_output_tokens = 9
    proposer.open(sequence)
    sequence.draft_allowance = 2
    grow(proposer, sequence, *prediction[:3])
    assert sequence.num_wanted_drafts == (5 if has_own_length else 2), "one of the last six is not a draft"
    sequence.draft_allowance = 0
    assert sequence.num_wanted_drafts == (5 if has_own_length else 0)
