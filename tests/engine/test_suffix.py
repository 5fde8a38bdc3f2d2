"""Suffix drafting: the most frequent continuation of the longest known end, in bounded memory, within a tenant."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence as Seq

import pytest

from engine.batch import ScheduledSequence
from engine.draft import NO_DRAFT, Draft
from engine.proposer.shared_texts import NoiseId, SharedTexts
from engine.proposer.suffix import SuffixProposer
from engine.proposer.suffix_index import Guess, SuffixIndex
from engine.sequence import Sequence
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, VerifyMode


def new_sequence(
    *prompt_ids: int,
    name: str = "a",
    tenant: str = "",
    seed: int = 0,
    verify: VerifyMode = VerifyMode.COUPLED,
    temperature: float = 1.0,
) -> Sequence:
    request = GenerateRequest(name, prompt_ids, SamplingParams(seed, temperature), cache_salt=tenant)
    return Sequence(request, num_draft_tokens=8, verify=verify, arrival_s=0.0)


def drafts(proposer: SuffixProposer, sequence: Sequence, num_tokens: int = 8) -> tuple[int, ...]:
    (draft,) = proposer.propose([ScheduledSequence(sequence, 0, len(sequence.token_ids), num_tokens)])
    assert draft.laws == ()
    return draft.token_ids


def draft_after(*prompt_ids: int, num_tokens: int = 8, **options: float) -> tuple[int, ...]:
    """The draft after a prompt that is all there is to know."""
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


def test_the_draft_is_as_long_as_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    for match_len in (2, 3, 5):
        assert draft_after(*text, 99, *text[:match_len]) == tuple(text[match_len : 2 * match_len])


def test_alpha_scales_the_draft_and_the_budget_limits_it() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99, 1, 2, 3]
    assert draft_after(*text, alpha=2.0) == (4, 5, 6, 7, 8, 9)
    assert draft_after(*text, alpha=0.4) == (4,)
    assert draft_after(*text, alpha=2.0, num_tokens=4) == (4, 5, 6, 7)
    assert draft_after(*text, num_tokens=0) == ()


def test_the_most_frequent_continuation_wins_and_then_the_latest() -> None:
    assert draft_after(7, 8, 1, 5, 7, 8, 1, 6, 7, 8, 2, 9, 7, 8)[0] == 1
    assert draft_after(7, 8, 1, 5, 7, 8, 2, 9, 7, 8)[0] == 2


def test_a_draft_ends_where_too_few_occurrences_agree() -> None:
    text = [7, 8, 1, 5, 7, 8, 1, 6, 7, 8, 2, 9, 7, 8]
    assert draft_after(*text, tau=0.7) == ()
    assert draft_after(*text, tau=0.5) == (1,)
    assert draft_after(*text, tau=0.3) == (1, 6)


def test_a_loop_is_drafted_past_its_end() -> None:
    assert draft_after(*[5, 6, 7] * 4) == (5, 6, 7, 5, 6, 7, 5, 6)


def test_nothing_known_or_asked_means_no_draft() -> None:
    assert draft_after(1, 2, 3, 4) == draft_after(1) == ()
    proposer = SuffixProposer()
    assert proposer.propose([]) == []
    proposer.commit([new_sequence(1, 2, name="stranger")])
    proposer.close("stranger")


# ---- the index against a slow oracle ------------------------------------------------------------------------------


def slow_guess(held: Seq[int], suffix: Seq[int], max_tokens: int, alpha: float, tau: float) -> Guess | None:
    """Looks at every position of the held tokens, in which -1 separates texts and ends the last but one."""

    def match_len(position: int) -> int:
        length = 0
        while length < min(32, len(suffix), position) and held[position - 1 - length] == suffix[-1 - length]:
            length += 1
        return length

    lengths = {position: match_len(position) for position in reversed(range(1, len(held)))}
    size = next((size for size in (8, 4, 2) if any(length >= size for length in lengths.values())), None)
    if size is None:
        return None
    latest = [position for position, length in lengths.items() if length >= size][:16]
    longest = max(lengths[position] for position in latest)
    starts = [position for position in latest if lengths[position] == longest]
    drafted: list[int] = []
    expected = 0.0
    while len(drafted) < min(max_tokens, int(alpha * longest)):
        going = [[*held, *drafted][at : at + len(drafted) + 1] for at in starts]
        votes = Counter(path[-1] for path in going if path[:-1] == drafted and path[-1] != -1)
        token_id, count = max(votes.items(), key=lambda vote: vote[1], default=(-1, 0))
        if count == 0 or count < tau * len(starts):
            break
        drafted.append(token_id)
        expected += count / len(starts)
    return Guess(tuple(drafted), longest, pytest.approx(expected)) if drafted else None


@pytest.mark.parametrize("seed", range(12))
def test_an_index_that_grows_and_forgets_guesses_what_a_search_of_all_it_holds_guesses(seed: int) -> None:
    dice = random.Random(seed)
    capacity = dice.choice([1, 3, 9, 20, 60, 10**9])
    index, history = SuffixIndex(capacity), []
    num_guesses = 0
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
        alpha, tau = dice.choice([0.5, 1.0, 3.0]), dice.choice([0.1, 0.5, 1.0])
        guess = index.guess(suffix, 8, alpha, tau)
        assert guess == slow_guess(held, suffix, 8, alpha, tau)
        num_guesses += guess is not None
    assert num_guesses > 5 or capacity < 10


def test_a_commit_indexes_only_the_new_tokens() -> None:
    proposer, sequence = SuffixProposer(), new_sequence(1, 2, 3)
    proposer.open(sequence)
    index = proposer._followed["a"].index
    for token_id in (1, 2, 3, 1):
        sequence.token_ids.append(token_id)
        proposer.commit([sequence])
        assert index.end == len(sequence.token_ids)
    assert drafts(proposer, sequence) == (2, 3, 1, 2)


# ---- finished texts -----------------------------------------------------------------------------------------------


def test_what_a_finished_request_generated_is_drafted_for_the_next_one() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(1, 2, 3, name="first"), 4, 5, 6, 7)
    assert drafts(proposer, opened(proposer, new_sequence(9, 1, 2, 3, seed=1))) == (4, 5, 6)


def test_the_source_that_promises_more_is_used() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(1, 2, 3, name="first"), 4, 5, 6, 7)
    assert drafts(proposer, opened(proposer, new_sequence(2, 3, 8, 8, 1, 2, 3))) == (4, 5, 6)
    assert drafts(proposer, opened(proposer, new_sequence(0, 1, 2, 3, 8, 8, 8, 8, 0, 1, 2, 3, name="b"))) == (
        8,
        8,
        8,
        8,
    )


def test_a_text_does_not_go_on_in_the_next_one() -> None:
    proposer = SuffixProposer(alpha=4.0)
    finish(proposer, new_sequence(1, 2, name="first"), 3)
    finish(proposer, new_sequence(7, 8, name="second"), 9)
    assert drafts(proposer, opened(proposer, new_sequence(1, 2))) == (3,)
    assert drafts(proposer, opened(proposer, new_sequence(2, 3, name="b"))) == ()


def test_prompts_are_not_shared_beyond_their_end() -> None:
    proposer = SuffixProposer()
    finish(proposer, new_sequence(*range(100), name="first"), 200)
    assert proposer.num_shared_tokens == 32 + 1 + 1
    assert drafts(proposer, opened(proposer, new_sequence(10, 11, 12))) == ()
    finish(proposer, new_sequence(1, 2, 3, name="aborted"))
    assert proposer.num_shared_tokens == 32 + 1 + 1


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
        shared.add(tenant_id, NoiseId(number, 0), text)
        held = {key: len(tenant.index) for key, tenant in shared._tenants.items()}
        assert shared.num_tokens == sum(held.values()) <= 50
        assert held[tenant_id] >= min(50, len(text) + 1)
        assert shared.know(tenant_id, NoiseId(number, 0))
        assert sum(len(tenant.noise_ends) for tenant in shared._tenants.values()) <= 50


def test_the_tenant_used_longest_ago_gives_way() -> None:
    shared = SharedTexts(max_tokens=10)
    shared.add("one", NoiseId(1, 0), [1, 2, 3])
    shared.add("two", NoiseId(2, 0), [1, 2, 3])
    assert shared.of("one") is not None
    shared.add("three", NoiseId(3, 0), [1, 2, 3])
    assert shared.of("two") is None
    assert not shared.know("two", NoiseId(2, 0))
    assert shared.of("one") is not None


def test_a_full_index_stops_growing() -> None:
    """Every n-gram is new, which is the worst case; 1,000 tokens take less than 0.6 KB each, however many pass by."""
    dice = random.Random(1)
    tracemalloc.start()
    index = SuffixIndex(capacity=1_000)
    sizes = []
    for _ in range(6):
        index.extend(dice.randrange(1 << 17) for _ in range(1_000))
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(index) == 1_000
    assert sum(len(chains.heads) for chains in index._chains) <= 3_000
    assert max(sizes) < 600_000


# ---- the rest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"alpha": 0.0}, "alpha 0.0"),
        ({"tau": 0.0}, "tau 0.0"),
        ({"tau": 1.5}, "tau 1.5"),
        ({"max_shared_tokens": 0}, "0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        SuffixProposer(**values)


def test_an_unknown_sequence_gets_no_draft() -> None:
    share = ScheduledSequence(new_sequence(1, 2, 1, 2), 0, 4, 4)
    assert SuffixProposer().propose([share]) == [NO_DRAFT] == [Draft()]
