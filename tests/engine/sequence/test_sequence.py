"""The state of a sequence between two steps, and its end."""

from __future__ import annotations

import pytest

from engine.scheduler.ending import finished_before_start, keep_output
from engine.sequence.sequence import Sequence
from protos.messages import FinishReason, GenerateRequest, SamplingParams, SpeculationStats
from tests.engine.fixtures.builders import sequence_of


def new_sequence(
    output: tuple[int, ...] = (),
    *,
    max_tokens: int = 8,
    num_drafts: int = 4,
    stop: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, min_tokens=min_tokens)
    request = GenerateRequest("r", (1, 2, 3), sampling, output_token_ids=output)
    return sequence_of(request, num_drafts)


def test_committed_tokens_of_a_lost_replica_count_as_generated() -> None:
    sequence = new_sequence((7, 8))
    assert sequence.token_ids == [1, 2, 3, 7, 8]
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.num_remaining_tokens) == (3, 2, 6)


@pytest.mark.parametrize(("num_output", "num_drafts"), [(0, 4), (3, 4), (5, 2), (7, 0), (8, 0)])
def test_drafts_leave_room_for_the_token_that_follows_them(num_output: int, num_drafts: int) -> None:
    assert new_sequence((9,) * num_output).num_wanted_drafts == num_drafts


def test_passes_are_counted_by_how_many_drafts_they_accepted() -> None:
    sequence = new_sequence()
    for num_proposed, num_accepted in [(4, 4), (4, 0), (2, 1), (0, 0)]:
        sequence.record_pass(num_proposed, num_accepted)
    stats = sequence.speculation_stats()
    assert stats == SpeculationStats(10, 5, (1, 1, 0, 0, 1))
    assert stats.num_passes == 3, "plain decoding is no verification"


@pytest.mark.parametrize(
    ("token_ids", "kept", "reason"),
    [
        ((5, 6), (5, 6), None),
        ((5, 9, 6), (5, 9), FinishReason.STOP),
        ((9, 9), (9,), FinishReason.STOP),
        ((4, 4, 4, 4, 4), (4, 4, 4, 4), FinishReason.LENGTH),
        ((4, 4, 4, 9), (4, 4, 4, 9), FinishReason.STOP),
        ((4, 4, 4, 4, 9), (4, 4, 4, 4), FinishReason.LENGTH),
    ],
)
def test_output_is_cut_at_the_first_stop_token_or_the_length(
    token_ids: tuple[int, ...], kept: tuple[int, ...], reason: FinishReason | None
) -> None:
    cut = keep_output(new_sequence(max_tokens=4, stop=(9,)), token_ids)
    assert (cut.token_ids, cut.finish_reason) == (kept, reason)
    assert cut.stop_token_id == (9 if reason is FinishReason.STOP else None)


def test_stop_tokens_do_not_stop_below_min_tokens() -> None:
    sequence = new_sequence((4,), stop=(9,), min_tokens=3)
    assert keep_output(sequence, (9, 9, 9, 9)).token_ids == (9, 9, 9)


@pytest.mark.parametrize(
    ("output", "reason"), [((), None), ((4,), None), ((4, 9), FinishReason.STOP), ((4, 4, 4), FinishReason.LENGTH)]
)
def test_a_sequence_can_arrive_finished(output: tuple[int, ...], reason: FinishReason | None) -> None:
    end = finished_before_start(new_sequence(output, max_tokens=3, stop=(9,)))
    assert (end and end.finish_reason) == reason


def test_a_prompt_that_ends_with_a_stop_token_is_not_finished() -> None:
    assert finished_before_start(new_sequence(stop=(3,))) is None
