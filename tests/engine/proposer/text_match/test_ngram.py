"""Prompt lookup: the longest suffix, its latest occurrence, and a cost that does not grow with the context."""

from __future__ import annotations

import random

import pytest

from engine.batch.draft import NO_DRAFT
from engine.proposer.text_match.text_matcher import NgramProposer, copy_from
from engine.sequence.sequence import Sequence
from tests.engine.fixtures.builders import make_scheduled, make_sequence


def propose(proposer: NgramProposer, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
    (draft,) = proposer.propose([make_scheduled(sequence, num_tokens)])
    assert draft.distributions == ()
    return draft.token_ids


def opened(*token_ids: int, min_size: int = 2, max_size: int = 4) -> tuple[NgramProposer, Sequence]:
    proposer, sequence = NgramProposer(min_size, max_size), make_sequence(prompt=token_ids)
    proposer.open(sequence)
    return proposer, sequence


def test_what_followed_the_suffix_is_proposed() -> None:
    proposer, sequence = opened(1, 2, 3, 4, 5, 9, 1, 2)
    assert propose(proposer, sequence, 3) == (3, 4, 5)


def test_the_latest_occurrence_wins() -> None:
    proposer, sequence = opened(1, 2, 3, 1, 2, 4, 1, 2)
    assert propose(proposer, sequence, 1) == (4,)


def test_a_longer_suffix_wins_over_a_later_one() -> None:
    proposer, sequence = opened(7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2)
    assert propose(proposer, sequence, 1) == (3,)


def test_a_copy_past_the_end_goes_on_with_itself() -> None:
    proposer, sequence = opened(5, 6, 5, 6, 5, 6)
    assert propose(proposer, sequence, 5) == (5, 6, 5, 6, 5)
    assert copy_from([1, 2, 3], 1, 5) == (2, 3, 2, 3, 2)


def test_nothing_known_means_no_draft() -> None:
    proposer, sequence = opened(1, 2, 3, 4)
    assert propose(proposer, sequence, 4) == ()
    assert propose(proposer, make_sequence("stranger", (1, 2, 1, 2)), 4) == ()


def test_no_draft_is_wanted_no_draft_is_made() -> None:
    proposer, sequence = opened(1, 2, 1, 2)
    assert propose(proposer, sequence, 0) == ()
    assert proposer.propose([]) == []


def test_a_sequence_shorter_than_a_suffix_is_fine() -> None:
    for token_ids in ((1,), (1, 1), (1, 1, 1)):
        proposer, sequence = opened(*token_ids)
        assert propose(proposer, sequence, 2) in ((), (1, 1))


def test_closing_forgets_and_twice_is_fine() -> None:
    proposer, sequence = opened(1, 2, 1, 2)
    proposer.close("a")
    proposer.close("a")
    proposer.commit([sequence])
    assert propose(proposer, sequence, 2) == NO_DRAFT.token_ids


def slow_lookup(token_ids: list[int], num_tokens: int, min_size: int, max_size: int) -> tuple[int, ...]:
    for size in range(max_size, min_size - 1, -1):
        for start in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[start - size : start] == token_ids[-size:]:
                copied = list(token_ids)
                for i in range(num_tokens):
                    copied.append(copied[start + i])
                return tuple(copied[len(token_ids) :])
    return ()


@pytest.mark.parametrize("seed", range(20))
def test_an_index_that_grows_finds_what_a_search_of_the_whole_text_finds(seed: int) -> None:
    dice = random.Random(seed)
    sizes = (dice.randint(1, 2), dice.randint(2, 4))
    proposer, sequence = opened(*dice.choices(range(3), k=dice.randint(1, 6)), min_size=sizes[0], max_size=sizes[1])
    for _ in range(30):
        assert propose(proposer, sequence, 4) == slow_lookup(sequence.token_ids, 4, *sizes)
        sequence.token_ids += dice.choices(range(3), k=dice.randint(1, 5))
        proposer.commit([sequence])


def test_a_commit_indexes_only_the_new_tokens() -> None:
    class Watched(list[int]):
        num_reads = 0

        def __getitem__(self, place):
            self.num_reads += 1
            return super().__getitem__(place)

    proposer, sequence = opened(*range(5000))
    sequence.token_ids = Watched([*sequence.token_ids, 1, 2])
    proposer.commit([sequence])
    assert sequence.token_ids.num_reads <= 2 * 3
