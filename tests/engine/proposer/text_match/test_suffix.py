"""Suffix drafting: continuations of a text's end while their chance suffices, in bounded memory, by tenant."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence as Seq
from itertools import islice

import pytest

from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer.text_match.suffix import (
    MatchAcceptance,
    SharedTexts,
    SuffixProposer,
    VotedToken,
    continuation,
)
from engine.proposer.text_match.suffix_index import SuffixIndex
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest, SamplingParams, VerifyMode
from tests.engine.fixtures.builders import make_scheduled, sequence_of


def new_sequence(
    *prompt_ids: int,
    name: str = "a",
    tenant: str = "",
    seed: int = 0,
    verify: VerifyMode = VerifyMode.COUPLED,
    temperature: float = 1.0,
) -> Sequence:
    request = GenerateRequest(name, prompt_ids, SamplingParams(seed, temperature), cache_salt=tenant)
    return sequence_of(request, 8, verify)


def drafts(proposer: SuffixProposer, sequence: Sequence, num_tokens: int = 8) -> tuple[int, ...]:
    (draft,) = proposer.propose([make_scheduled(sequence, num_tokens)])
    assert draft.distributions == ()
    return draft.token_ids


def draft_after(*prompt_ids: int, num_tokens: int = 8, **options: float) -> tuple[int, ...]:
    """Return the draft after a prompt, without other texts."""
    proposer = SuffixProposer(**options)
    return drafts(proposer, opened(proposer, new_sequence(*prompt_ids)), num_tokens)


def finish(proposer: SuffixProposer, sequence: Sequence, *output_ids: int) -> None:
    proposer.open(sequence)
    sequence.token_ids += output_ids
    proposer.close(sequence.request_id)


def opened(proposer: SuffixProposer, sequence: Sequence) -> Sequence:
    proposer.open(sequence)
    return sequence


# ---- one text -----------------------------------------------------------------------------------------------------


def test_a_draft_goes_on_while_it_has_a_chance() -> None:
    """With n tokens of context the next token has the prior chance n / (n + 2)."""
    text = list(range(1, 40))
    for match_len, min_chance, num_tokens in ((1, 0.5, 1), (1, 0.16, 2), (2, 0.25, 2), (3, 0.25, 3), (8, 0.5, 3)):
        draft = tuple(text[match_len : match_len + num_tokens])
        assert draft_after(*text, 99, *text[:match_len], min_chance=min_chance) == draft


def test_the_budget_limits_a_draft_and_a_known_token_has_one_at_least() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99, 1, 2, 3]
    assert draft_after(*text, num_tokens=4) == (4, 5, 6, 7)
    assert draft_after(*text, num_tokens=0) == ()
    assert draft_after(*text, min_chance=1.0) == (4,)


def test_a_draft_ends_where_its_row_is_worth_more_than_its_chance() -> None:
    proposer = SuffixProposer()
    sequence = opened(proposer, new_sequence(*range(10, 20), 1, 2, *range(10, 20)))
    lengths = []
    for price in (0.0, 0.5, 0.8, 1.0):
        sequence.row_prices = (price,)
        lengths.append(len(drafts(proposer, sequence)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > lengths[-1] == 0


def test_a_draft_has_the_length_that_is_worth_most() -> None:
    """A first row may be dear and the next ones free, or a later one dear."""
    proposer = SuffixProposer()
    sequence = opened(proposer, new_sequence(*range(10, 20), 1, 2, *range(10, 20)))
    free = len(drafts(proposer, sequence))
    lengths = []
    for sequence.row_prices in ((0.9, 0.0), (9.0, 0.0), (0.0, 0.0, 9.0, 0.0), (0.0, 0.0, 1.2, 0.0)):
        lengths.append(len(drafts(proposer, sequence)))
    assert lengths == [free, 0, 2, free]


def test_matches_that_were_not_worth_a_row_are_learned_from() -> None:
    proposer = SuffixProposer()
    sequence = opened(proposer, new_sequence(1, 2, 3, 1, 2))
    sequence.row_prices = (0.6,)  # the prior of a match of two tokens is 0.5
    assert drafts(proposer, sequence) == ()
    for _ in range(12):
        sequence.token_ids += [3, 1, 2]
        proposer.commit([sequence])
        drafts(proposer, sequence)
    short = opened(proposer, new_sequence(4, 5, 6, 4, 5, name="b"))
    short.row_prices = (0.6,)
    assert drafts(proposer, short) == ()  # no match as short was learned yet
    long = opened(proposer, new_sequence(*range(30, 40), 7, *range(30, 40), name="c"))
    long.row_prices = (0.9,)
    assert drafts(proposer, long)[:1] == (7,)


def test_more_context_outweighs_more_places_and_of_equals_the_later_ones_win() -> None:
    assert draft_after(7, 8, 1, 5, 7, 8, 1, 6, 7, 8, 2, 9, 7, 8)[0] == 1
    assert draft_after(7, 8, 1, 5, 7, 8, 2, 9, 7, 8)[0] == 2
    assert draft_after(4, 7, 8, 1, 5, 7, 8, 2, 6, 7, 8, 2, 4, 7, 8)[0] == 1


def test_a_draft_ends_where_the_places_part() -> None:
    text = [7, 8, 1, 5, 5, 5, 7, 8, 1, 6, 6, 6, 9, 7, 8]
    assert draft_after(*text, min_chance=0.5) == (1,)
    assert draft_after(*text, min_chance=0.15) == (1, 6)


def test_a_loop_is_drafted_past_its_end() -> None:
    assert draft_after(*[5, 6, 7] * 4) == (5, 6, 7, 5, 6, 7, 5, 6)


def test_nothing_known_or_asked_means_no_draft() -> None:
    assert draft_after(1, 2, 3, 4) == draft_after(1) == ()
    proposer = SuffixProposer()
    assert proposer.propose([]) == []
    proposer.commit([new_sequence(1, 2, name="stranger")])
    proposer.close("stranger")


# ---- the index against a slow oracle ------------------------------------------------------------------------------


Place = tuple[int, int, int]  # position, length of the match, later places with the same n-gram


def slow_places(held: Seq[int], suffix: Seq[int]) -> list[Place]:
    """Look at every held position; -1 separates texts, and ends all texts but the last."""

    def match_len(position: int) -> int:
        length = 0
        while length < min(16, len(suffix), position) and held[position - 1 - length] == suffix[-1 - length]:
            length += 1
        return length

    lengths = {position: match_len(position) for position in reversed(range(1, len(held)))}
    places: dict[int, Place] = {}
    for size in (4, 2, 1):
        latest = [position for position, length in lengths.items() if length >= size][:4]
        for rank, position in enumerate(latest):
            places.setdefault(position, (position, lengths[position], rank))
    return list(places.values())


def slow_continuation(held: Seq[int], places: Seq[Place], num_tokens: int) -> list[VotedToken]:
    """Collect the continuation of each place, and let places vote that agree so far."""
    drafted: list[int] = []
    voted: list[VotedToken] = []
    for _ in range(num_tokens):
        votes: dict[int, float] = {}
        lengths: dict[int, int] = {}
        for position, length, rank in places:
            *before, token_id = [*held, *drafted][position : position + len(drafted) + 1]
            if before == drafted:
                votes[token_id] = votes.get(token_id, 0.0) + 4.0**length * 0.7**rank
                lengths[token_id] = max(lengths.get(token_id, 0), length)
        total = sum(votes.values())
        best = max((token_id for token_id in votes if token_id >= 0), key=lambda each: votes[each], default=None)
        if best is None:
            break
        voted.append(VotedToken(best, pytest.approx(votes[best] / total), lengths[best] + len(drafted)))
        drafted.append(best)
    return voted


@pytest.mark.parametrize("seed", range(12))
def test_an_index_that_grows_and_forgets_finds_what_a_search_of_all_it_holds_finds(seed: int) -> None:
    dice = random.Random(seed)
    capacity = dice.choice([1, 3, 9, 20, 60, 10**9])
    index, history = SuffixIndex(capacity), []
    num_found = 0
    for _ in range(60):
        tokens = [dice.randrange(3) for _ in range(dice.randint(0, 5))]
        if history and dice.random() < 0.4:
            start = dice.randrange(len(history))
            tokens += [token for token in history[start : start + 12] if token >= 0]
        index.extend(tokens)
        history += tokens
        if dice.random() < 0.15:
            index.end_text()
            history.append(-1)
        held = history[-capacity:]
        assert len(index) == len(held)
        suffix = [token for token in history[-40:] if token >= 0] if dice.random() < 0.8 else [dice.randrange(3)] * 5
        places = slow_places(held, suffix)
        occurrences = index.occurrences(suffix)
        start = len(history) - len(held)
        assert [(each.position - start, each.match_len, each.rank) for each in occurrences] == places
        assert list(islice(continuation(occurrences), 8)) == slow_continuation(held, places, 8)
        num_found += bool(places)
    assert num_found > 5 or capacity < 10


def test_a_commit_indexes_only_the_new_tokens() -> None:
    proposer, sequence = SuffixProposer(), new_sequence(1, 2, 3)
    proposer.open(sequence)
    index = proposer._sequences["a"].index
    for token_id in (1, 2, 3, 1):
        sequence.token_ids.append(token_id)
        proposer.commit([sequence])
        assert index.end == len(sequence.token_ids)
    assert drafts(proposer, sequence)[:4] == (2, 3, 1, 2)


# ---- learned chances ----------------------------------------------------------------------------------------------


def test_chances_are_learned_by_length_of_the_match_and_per_vote() -> None:
    chances = MatchAcceptance()
    assert [chances.of(length, 1.0) for length in (1, 3, 9)] == [1 / 3, 0.6, 9 / 11]
    assert chances.of(3, 0.5) == 0.3
    for _ in range(400):
        chances.observe(2, 0.5, is_accepted=False)
        chances.observe(5, 0.5, is_accepted=True)
    assert chances.of(3, 1.0) < 0.1
    assert chances.of(7, 0.5) == pytest.approx(1.0, abs=0.1)
    assert chances.of(7, 1.0) == 1.0
    assert chances.of(1, 1.0) == 1 / 3
    for _ in range(400):
        chances.observe(2, 1.0, is_accepted=True)
    assert chances.of(3, 1.0) > 0.8, "old votes have faded"


def match_lengths(is_right: bool, verify: VerifyMode = VerifyMode.COUPLED) -> list[int]:
    """The lengths of successive matches with one known token, which is always right or always wrong."""
    proposer, sequence = SuffixProposer(min_chance=0.09), new_sequence(*range(1, 1000), verify=verify)
    proposer.open(sequence)
    lengths = []
    for start in range(0, 900, 20):
        sequence.token_ids += (2000 + start, start + 1)
        proposer.commit([sequence])
        match = proposer.match(sequence, 16)
        assert match is not None
        lengths.append(len(match[0]))
        sequence.token_ids += match[0] if is_right else (3000 + start,)
        proposer.commit([sequence])
    return lengths


def test_drafts_grow_where_they_stand_and_shrink_to_a_token_where_they_fall() -> None:
    right, wrong = match_lengths(is_right=True), match_lengths(is_right=False)
    assert right[0] == wrong[0] == 3
    assert right[-1] == 16
    assert wrong[-1] == 1


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_lengths_tell_nothing_of_other_texts_where_noise_must_be_unknown(verify: VerifyMode) -> None:
    """A length learned from a text of the same seed would depend on the number that verifies the draft."""
    assert set(match_lengths(is_right=False, verify=verify)) == {3}


# ---- finished texts -----------------------------------------------------------------------------------------------


def test_what_a_finished_request_generated_is_drafted_for_the_next_one() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(1, 2, 3, name="first"), 4, 5, 6, 7)
    assert drafts(proposer, opened(proposer, new_sequence(9, 1, 2, 3, seed=1))) == (4, 5, 6, 7)


def test_own_text_and_finished_ones_vote_together() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(1, 2, 3, name="first"), 4, 5, 6, 7)
    assert drafts(proposer, opened(proposer, new_sequence(2, 3, 8, 8, 1, 2, 3)))[:3] == (4, 5, 6)
    own = new_sequence(0, 1, 2, 3, 8, 8, 8, 8, 0, 1, 2, 3, name="b")
    assert drafts(proposer, opened(proposer, own))[:4] == (8, 8, 8, 8)


def test_a_text_does_not_go_on_in_the_next_one() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(1, 2, name="first"), 3)
    finish(proposer, new_sequence(7, 8, name="second"), 9)
    assert drafts(proposer, opened(proposer, new_sequence(1, 2))) == (3,)
    assert drafts(proposer, opened(proposer, new_sequence(2, 3, name="b"))) == ()


def test_prompts_are_not_shared_beyond_their_end() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(*range(100), name="first"), 200)
    assert proposer._shared.num_tokens == 16 + 1 + 1
    assert drafts(proposer, opened(proposer, new_sequence(10, 11, 12))) == ()
    finish(proposer, new_sequence(1, 2, 3, name="aborted"))
    assert proposer._shared.num_tokens == 16 + 1 + 1


def test_no_tenant_sees_another_ones_text() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(1, 2, 3, name="first", tenant="one"), 4, 5, 6)
    assert drafts(proposer, opened(proposer, new_sequence(1, 2, 3, tenant="two"))) == ()
    assert drafts(proposer, opened(proposer, new_sequence(1, 2, 3, name="b"))) == ()
    assert drafts(proposer, opened(proposer, new_sequence(1, 2, 3, name="c", tenant="one"))) == (4, 5, 6)


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_a_text_of_the_same_seed_does_not_draft_where_noise_must_be_unknown(verify: VerifyMode) -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(1, 2, 3, name="first", seed=5), 4, 5, 6)

    def drafted(name: str, **changes: object) -> tuple[int, ...]:
        return drafts(proposer, opened(proposer, new_sequence(1, 2, 3, name=name, **changes)))

    assert drafted("a", seed=5, verify=verify) == ()
    assert drafted("b", seed=6, verify=verify) == (4, 5, 6)
    assert drafted("c", seed=5, verify=verify, temperature=0.0) == (4, 5, 6)
    assert drafted("d", seed=5) == (4, 5, 6)


# ---- memory -------------------------------------------------------------------------------------------------------


def test_finished_texts_never_exceed_their_bound_and_the_latest_stay() -> None:
    dice = random.Random(0)
    shared = SharedTexts(max_tokens=50)
    for number in range(300):
        tenant_id = str(dice.randrange(4))
        text = [dice.randrange(5) for _ in range(dice.choice([1, 5, 20, 90]))]
        shared.add(tenant_id, (number, 0), text)
        held = {key: len(index) for key, (index, _) in shared._tenants.items()}
        assert shared.num_tokens == sum(held.values()) <= 50
        assert held[tenant_id] >= min(50, len(text) + 1)
        assert shared.has_noise(tenant_id, (number, 0))
        assert sum(len(noise_ends) for _, noise_ends in shared._tenants.values()) <= 50


def test_the_tenant_used_longest_ago_gives_way() -> None:
    shared = SharedTexts(max_tokens=10)
    shared.add("one", (1, 0), [1, 2, 3])
    shared.add("two", (2, 0), [1, 2, 3])
    assert shared.of("one") is not None
    shared.add("three", (3, 0), [1, 2, 3])
    assert shared.of("two") is None
    assert not shared.has_noise("two", (2, 0))
    assert shared.of("one") is not None


def test_a_full_index_stops_growing() -> None:
    """Every n-gram is new, the worst case; 1,000 held tokens take less than 0.6 KB each, however many were added."""
    dice = random.Random(1)
    tracemalloc.start()
    index = SuffixIndex(capacity=1_000)
    sizes = []
    for _ in range(6):
        index.extend([dice.randrange(1 << 17) for _ in range(1_000)])
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(index) == 1_000
    assert sum(len(chains.heads) for chains in index._chains) <= 3_000
    assert max(sizes) < 600_000


# ---- the rest -----------------------------------------------------------------------------------------------------


def test_an_unknown_sequence_gets_no_draft() -> None:
    scheduled = make_scheduled(new_sequence(1, 2, 1, 2))
    assert SuffixProposer().propose([scheduled]) == [NO_DRAFT] == [Draft()]
