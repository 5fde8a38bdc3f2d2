"""The position of a text in its prediction, as it repeats it, diverges from it and comes back."""

import random
from collections.abc import Sequence

import pytest

from protos.predicted_text import PredictedText, Prediction

PREDICTION = (10, 11, 12, 13, 14, 15, 16, 17, 10, 11, 18, 19)


def following(*token_ids: int) -> PredictedText:
    text = predicted(PREDICTION)
    text.read(token_ids)
    return text


def predicted(token_ids: Sequence[int]) -> PredictedText:
    return PredictedText(Prediction(token_ids))


def test_an_empty_text_expects_the_whole_prediction() -> None:
    assert following().next(3) == (10, 11, 12)


def test_a_text_that_repeats_the_prediction_matches_it_whole() -> None:
    text = following(10, 11, 12)
    assert (text.next(2), text.num_matched) == ((13, 14), 3)


def test_a_diverged_text_expects_nothing_until_two_tokens_match_again() -> None:
    text = following(10, 11, 99)
    assert (text.next(4), text.num_matched) == ((), 2)
    text.read((13,))
    assert text.next(4) == ()
    text.read((14,))
    assert (text.next(2), text.num_matched) == ((15, 16), 4)


@pytest.mark.parametrize(
    ("edit", "expected"), [((10, 11, 15, 16), (17, 10)), ((10, 11, 12, 13, 50, 51, 52, 13, 14), (15, 16))]
)
def test_a_text_with_deletions_or_insertions_finds_the_prediction_again(
    edit: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert following(*edit).next(2) == expected


def test_the_position_behind_the_divergence_wins_among_equal_ones() -> None:
    assert following(10, 11, 12, 13, 99, 10, 11).next(2) == (18, 19)


def test_a_longer_match_wins_over_the_order() -> None:
    assert following(10, 11, 12, 13, 14, 15, 16, 17, 10, 11, 99, 14, 15, 16).next(1) == (17,)


def test_of_very_many_equal_positions_the_first_behind_the_divergence_wins() -> None:
    text = predicted([7] * 600 + [8] + [7] * 10_000 + [9])
    text.read([*[7] * 600, 99, 7, 7])
    assert text.next(3) == (8, 7, 7)


def test_a_text_beyond_the_predictions_end_expects_nothing() -> None:
    text = following(*PREDICTION, 5)
    assert (text.next(3), text.num_matched) == ((), len(PREDICTION))


def test_matched_tokens_never_exceed_the_prediction() -> None:
    assert following(*PREDICTION, 10, 11, 12, 13).num_matched == len(PREDICTION)


def test_an_empty_prediction_expects_nothing() -> None:
    text = predicted(())
    text.read((1, 2, 3))
    assert (text.next(3), text.num_matched) == ((), 0)


def test_the_result_does_not_depend_on_the_tokens_batches() -> None:
    token_ids = (10, 11, 99, 13, 14, 15, 98, 97, 10, 11, 18)
    one, other = following(*token_ids), predicted(PREDICTION)
    for token_id in token_ids:
        other.read((token_id,))
    assert (one.position, one.num_matched) == (other.position, other.num_matched)


def test_the_best_position_is_that_of_a_search_through_all_of_them() -> None:
    generator = random.Random(4)
    for _ in range(600):
        num_tokens, num_kinds = generator.choice([0, 1, 2, 9, 40, 90]), generator.choice([1, 2, 4])
        token_ids = generator.choices(range(num_kinds), k=num_tokens)
        tail = generator.choices(range(num_kinds), k=generator.randint(0, 16))
        diverged_at = generator.randint(0, num_tokens)
        assert Prediction(token_ids).best_position(tail, diverged_at) == searched(token_ids, tail, diverged_at)


def searched(token_ids: list[int], tail: list[int], diverged_at: int) -> tuple[int, int] | None:
    def num_matched(position: int) -> int:
        lengths = range(1, min(position, len(tail)) + 1)
        return max((n for n in lengths if token_ids[position - n : position] == tail[-n:]), default=0)

    found = [position for position in range(len(token_ids) + 1) if num_matched(position) >= 2]
    best = min(found, key=lambda each: (-num_matched(each), each < diverged_at, each), default=None)
    return None if best is None else (best, num_matched(best))
