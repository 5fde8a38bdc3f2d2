"""The proposer of each sequence, and its substitute."""

from __future__ import annotations

from collections.abc import Mapping

from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer import NoProposer
from engine.proposer.method_dispatcher import MethodDispatcher, Ranking
from engine.proposer.text_match.text_matcher import NgramProposer
from engine.sequence.sequence import Sequence
from protos.messages import SpeculationMethod
from tests.engine.fixtures.builders import make_scheduled, make_sequence
from tests.engine.fixtures.fakes import ScriptedProposer

MODEL, NGRAM, SUFFIX, NONE = (
    SpeculationMethod.MODEL,
    SpeculationMethod.NGRAM,
    SpeculationMethod.SUFFIX,
    SpeculationMethod.NONE,
)


def new_sequence(name: str, method: SpeculationMethod, prompt: tuple[int, ...] = (1, 2, 3)) -> Sequence:
    return make_sequence(name, prompt, method=method)


def saying(token_id: int) -> ScriptedProposer:
    return ScriptedProposer(lambda sequence, max_tokens: [token_id] * max_tokens)


def choice_of(methods: Mapping[SpeculationMethod, Ranking], *sequences: Sequence) -> MethodDispatcher:
    choice = MethodDispatcher(methods)
    for sequence in sequences:
        choice.open(sequence)
    return choice


def test_each_sequence_is_drafted_for_by_its_own_method() -> None:
    model, suffix = saying(7), saying(8)
    sequences = [new_sequence("a", MODEL), new_sequence("b", SUFFIX), new_sequence("c", NONE), new_sequence("d", MODEL)]
    choice = choice_of({MODEL: (model,), SUFFIX: (suffix,)}, *sequences)
    choice.commit(sequences)
    drafts = choice.propose([make_scheduled(sequence, 2) for sequence in sequences])
    assert drafts == [Draft((7, 7)), Draft((8, 8)), NO_DRAFT, Draft((7, 7))]
    assert (model.opened, model.committed) == (["a", "d"], ["a", "d"])
    assert (suffix.opened, suffix.committed) == (["b"], ["b"])


def test_the_next_in_rank_stands_in_for_one_without_a_draft() -> None:
    sequence = new_sequence("a", MODEL, (5, 6, 7, 8, 5, 6))
    choice = choice_of({MODEL: (NoProposer(), NgramProposer())}, sequence)
    assert choice.propose([make_scheduled(sequence, 2)]) == [Draft((7, 8))]


def test_a_stand_in_costs_nothing_until_it_is_needed() -> None:
    stand_in = saying(9)
    sequence = new_sequence("a", MODEL)
    choice = choice_of({MODEL: (saying(7), stand_in)}, sequence)
    for _ in range(3):
        choice.commit([sequence])
        assert choice.propose([make_scheduled(sequence, 2)]) == [Draft((7, 7))]
    choice.close("a")
    assert (stand_in.opened, stand_in.committed, stand_in.closed) == ([], [], [])


def test_a_stand_in_follows_what_was_committed_before_it_was_needed() -> None:
    sequence = new_sequence("a", MODEL)
    answers = {"is_away": True}
    model = ScriptedProposer(lambda sequence, max_tokens: [] if answers["is_away"] else [0])
    choice = choice_of({MODEL: (model, NgramProposer())}, sequence)
    for grown, expected in (((8, 1, 2), (3, 8)), ((3, 8), (1, 2))):
        sequence.token_ids += grown
        choice.commit([sequence])
        assert choice.propose([make_scheduled(sequence, 2)]) == [Draft(expected)]
    answers["is_away"] = False
    assert choice.propose([make_scheduled(sequence, 2)]) == [Draft((0,))]


def test_all_who_met_a_sequence_hear_that_it_ended() -> None:
    model, stand_in, unused = ScriptedProposer(lambda *_: ()), saying(9), saying(10)
    sequence = new_sequence("a", MODEL)
    choice = choice_of({MODEL: (model, stand_in, unused)}, sequence)
    choice.propose([make_scheduled(sequence, 2)])
    choice.close("a")
    choice.close("a")
    assert (model.closed, stand_in.closed, unused.closed) == (["a"], ["a"], [])
    assert choice.propose([make_scheduled(sequence, 2)]) == [NO_DRAFT]
