"""A draft made ahead of verification equals the draft made after it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from engine.batch.draft import Draft, Offer, SparseDistribution
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.chain import Chain
from engine.proposer.draft_model.ahead_drafter import AheadDrafter, Branch, PendingPass
from engine.sequence.sequence import Sequence
from protos.messages import SamplingParams, VerifyMode
from tests.engine.fixtures.builders import make_scheduled, sequence_of
from tests.engine.fixtures.checkpoints import VOCAB_SIZE
from tests.engine.fixtures.drafters import (
    GREEDY,
    SAMPLED,
    DrafterParts,
    DraftOracle,
    new_drafter,
    new_sequence,
    write_draft,
)

K = 3
MODES = list(VerifyMode)
UNPENALIZED = replace(SAMPLED, presence_penalty=0.0)
PENALIZED = replace(SAMPLED, top_p=1.0, temperature=1.0, repetition_penalty=1.3)


@pytest.fixture(scope="module", params=["llama", "bamba"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_draft(path, request.param)
    return path


@pytest.fixture
def drafter(folder: Path) -> DrafterParts:
    return new_drafter(folder, num_blocks=512)


def never() -> bool:
    return False


def draft_ahead(
    drafter: DrafterParts,
    pending: Seq[PendingPass],
    fan_out: int = 3,
    is_stopped: Callable[[], bool] = never,
    ahead_drafter: AheadDrafter | None = None,
) -> list[Offer]:
    waves: list[tuple[Offer, ...]] = []
    (ahead_drafter or drafter.proposer.ahead_drafter(fan_out)).run(pending, waves.append, is_stopped)
    drafter.check()
    assert drafter.blocks.num_free_blocks == drafter.blocks.num_blocks - num_held(drafter)
    return [each for wave in waves for each in wave]


def num_held(drafter: DrafterParts) -> int:
    sequences = drafter.proposer.sequences._by_id.values()
    return len({block_id for each in sequences for block_id in each.blocks.block_table})


def pending_pass(drafter: DrafterParts, sequence: Sequence, num_drafts: int = K) -> PendingPass:
    (draft,) = drafter.proposer.propose([make_scheduled(sequence, num_drafts)])
    return PendingPass(sequence, draft.token_ids, num_drafts)


@dataclass(frozen=True, slots=True)
class Afterwards:
    """A fresh draft model, which drafts after the outcome is committed."""

    drafter: DrafterParts

    def agrees(self, sequence: Sequence, prepared: Offer, num_drafts: int = K) -> bool:
        """The same tokens, drawn from the same distributions up to rounding."""
        copy = sequence_of(sequence.request, num_drafts, sequence.verify)
        copy.token_ids = [*sequence.token_ids, *prepared.after]
        self.drafter.proposer.open(copy)
        (draft,) = self.drafter.proposer.propose([make_scheduled(copy, num_drafts)])
        self.drafter.proposer.close(copy.request_id)
        return draft.token_ids == prepared.draft.token_ids and all(
            _are_close(*distributions)
            for distributions in zip(draft.distributions, prepared.draft.distributions, strict=True)
        )


def _are_close(left: SparseDistribution, right: SparseDistribution) -> bool:
    ours, theirs = (
        dict(zip(distribution.token_ids, distribution.weights, strict=True)) for distribution in (left, right)
    )
    return all(abs(ours.get(token_id, 0) - theirs.get(token_id, 0)) <= 8 for token_id in ours | theirs)


@pytest.fixture(scope="module")
def afterwards(folder: Path) -> Afterwards:
    return Afterwards(new_drafter(folder, num_blocks=256))


@pytest.mark.parametrize("verify", MODES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALIZED])
@pytest.mark.parametrize(
    "length", [8, 9, 10, 11]
)  # blocks have 4 tokens: branches diverge at every position of a block
def test_a_draft_made_ahead_is_the_one_that_would_be_made_afterwards(
    afterwards: Afterwards, drafter: DrafterParts, length: int, sampling: SamplingParams, verify: VerifyMode
) -> None:
    sequence = new_sequence(drafter, "a", length, sampling, verify)
    prepared = draft_ahead(drafter, [pending_pass(drafter, sequence)])
    assert len(prepared) == 3 * (K + 1)
    for each in prepared:
        assert (each.request_id, each.base_len) == ("a", length)
        assert afterwards.agrees(sequence, each)


def test_sequences_of_all_kinds_share_a_batch(afterwards: Afterwards, drafter: DrafterParts) -> None:
    kinds = [(GREEDY, VerifyMode.COUPLED), (SAMPLED, VerifyMode.BLOCK), (SAMPLED, VerifyMode.REJECTION)]
    sequences = [new_sequence(drafter, str(i), 7 + 9 * i, *kind) for i, kind in enumerate([*kinds, *kinds])]
    pending = [pending_pass(drafter, sequence, 1 + index % 3) for index, sequence in enumerate(sequences)]
    prepared = draft_ahead(drafter, pending)
    assert {each.request_id for each in prepared} == {sequence.request_id for sequence in sequences}
    for each in prepared:
        index = int(each.request_id)
        assert afterwards.agrees(sequences[index], each, 1 + index % 3)


def test_outcomes_are_distinct_and_those_of_the_pass(drafter: DrafterParts) -> None:
    sequence = new_sequence(drafter, "a", sampling=SAMPLED)
    expected = pending_pass(drafter, sequence)
    outcomes = [each.after for each in draft_ahead(drafter, [expected])]
    assert len(set(outcomes)) == len(outcomes)
    for *accepted, last in outcomes:
        assert tuple(accepted) == expected.draft_ids[: len(accepted)]
        assert (last,) != expected.draft_ids[len(accepted) : len(accepted) + 1]
    assert {len(outcome) for outcome in outcomes} == {1, 2, 3, 4}


def test_the_likeliest_outcome_is_what_the_draft_itself_would_say(drafter: DrafterParts, folder: Path) -> None:
    sequence = new_sequence(drafter, "a", sampling=SAMPLED)
    first = draft_ahead(drafter, [pending_pass(drafter, sequence)], fan_out=1)[0]
    assert first.after == DraftOracle(folder).draft(sequence, K + 1)


def test_nothing_is_left_behind(folder: Path, afterwards: Afterwards, drafter: DrafterParts) -> None:
    """Rounds of drafting and drafting ahead, with every outcome; each draft equals a fresh model's."""
    oracle = DraftOracle(folder)
    sequence = new_sequence(drafter, "a", 9, SAMPLED)
    for num_accepted in (0, 3, 1, 2, 3, 0):
        expected = pending_pass(drafter, sequence)
        assert expected.draft_ids == oracle.draft(sequence, K)
        prepared = draft_ahead(drafter, [expected])
        true = next(each for each in prepared if len(each.after) == num_accepted + 1)
        sequence.token_ids += true.after
        # Draft ahead again without a query in between, as after a hit.
        assert true.draft.token_ids == oracle.draft(sequence, K)
        for each in draft_ahead(drafter, [PendingPass(sequence, true.draft.token_ids, K)])[:2]:
            assert afterwards.agrees(sequence, each)


def test_after_a_prompt_the_first_tokens_are_expected(afterwards: Afterwards, drafter: DrafterParts) -> None:
    sequence = new_sequence(drafter, "a", 100)
    prepared = draft_ahead(drafter, [PendingPass(sequence, (), K)])
    assert [len(each.after) for each in prepared] == [1, 1, 1]
    assert afterwards.agrees(sequence, prepared[0])


def test_a_long_prompt_is_read_in_pieces_after_the_others(folder: Path) -> None:
    drafter = new_drafter(folder, max_tokens_per_round=16)
    short, long = new_sequence(drafter, "a", 9), new_sequence(drafter, "b", 90)
    expected = pending_pass(drafter, short)
    prepared = draft_ahead(drafter, [PendingPass(long, (), K), expected])
    assert [each.request_id for each in prepared] == ["a"] * 12 + ["b"] * 3


@pytest.mark.parametrize("sampling", [SAMPLED, UNPENALIZED], ids=["penalized", "unpenalized"])
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_drafting_ahead_that_is_stopped_ends_at_once_without_a_trace(
    folder: Path, drafter: DrafterParts, num_steps: int, sampling: SamplingParams
) -> None:
    """The tokens of a chain without penalties are read only when it is long enough."""
    sequence = new_sequence(drafter, "a", 9, sampling)
    expected = pending_pass(drafter, sequence)
    asked = count()
    prepared = draft_ahead(drafter, [expected], is_stopped=lambda: next(asked) >= num_steps)
    assert next(asked) <= num_steps + 2
    assert len(prepared) in (0, 12)
    assert not drafter.proposer._model.sampler._unread, "tokens of drafts that were given up would pile up"
    sequence.token_ids += [*expected.draft_ids[:2], 7]
    assert drafter.draft([sequence], K) == [DraftOracle(folder).draft(sequence, K)]


def test_a_short_verification_gets_the_likeliest_outcomes(drafter: DrafterParts) -> None:
    """If it is always stopped after the same few steps, its waves shrink until one is done."""
    sequences = [new_sequence(drafter, f"s{i}", 9) for i in range(4)]
    ahead_drafter = drafter.proposer.ahead_drafter(3)
    pending = [pending_pass(drafter, sequence) for sequence in sequences]
    for _ in range(5):
        rows_left = [100]

        def is_stopped(rows_left: list[int] = rows_left) -> bool:
            rows_left[0] -= ahead_drafter._num_rows
            return rows_left[0] < 0

        prepared = draft_ahead(drafter, pending, is_stopped=is_stopped, ahead_drafter=ahead_drafter)
    assert 0 < len(prepared) < 48
    assert {each.request_id for each in prepared[:4]} == {"s0", "s1", "s2", "s3"}
    assert {len(each.after) for each in prepared[:4]} == {K + 1}
    assert len(draft_ahead(drafter, pending, ahead_drafter=ahead_drafter)) == 48


def test_a_short_pool_costs_branches_and_nothing_else(folder: Path, afterwards: Afterwards) -> None:
    drafter = new_drafter(folder, num_blocks=8)
    sequence = new_sequence(drafter, "a", 9)
    prepared = draft_ahead(drafter, [pending_pass(drafter, sequence)])
    assert 0 < len(prepared) < 12
    assert all(afterwards.agrees(sequence, each) for each in prepared)


def test_sequences_without_room_or_unknown_are_left_out(folder: Path) -> None:
    drafter = new_drafter(folder, num_blocks=8)
    large = new_sequence(drafter, "a", 40)
    closed = new_sequence(drafter, "b", 4)
    drafter.proposer.close("b")
    assert draft_ahead(drafter, [PendingPass(large, (), K), PendingPass(closed, (), K)]) == []


def test_nothing_is_drafted_behind_the_end_of_a_text(drafter: DrafterParts) -> None:
    sequence = new_sequence(drafter, "a", 9, replace(GREEDY, max_tokens=5))
    prepared = draft_ahead(drafter, [pending_pass(drafter, sequence)])
    # Five tokens in all: after an outcome of n tokens the next pass may draft 4 - n.
    assert {(len(each.after), len(each.draft.token_ids)) for each in prepared} == {(1, 3), (2, 2), (3, 1)}
    stopping = new_sequence(drafter, "b", 9, replace(GREEDY, stop_token_ids=tuple(range(VOCAB_SIZE))))
    assert draft_ahead(drafter, [pending_pass(drafter, stopping)]) == []


def test_branches_end_where_the_drafts_positions_do(folder: Path) -> None:
    drafter = new_drafter(folder, num_blocks=400, max_tokens_per_round=1024)
    for length in range(506, 514):
        sequence = new_sequence(drafter, f"s{length}", length)
        (draft,) = drafter.draft([sequence], K)
        prepared = draft_ahead(drafter, [PendingPass(sequence, (*draft, 1, 2, 3)[:K], K)])
        assert all(length + len(each.after) + len(each.draft.token_ids) <= 513 for each in prepared)
        drafter.proposer.close(f"s{length}")


@pytest.mark.parametrize("num_states", [4, 16, 24])
def test_few_states_cost_drafts_and_branches_and_nothing_else(
    folder: Path, afterwards: Afterwards, num_states: int
) -> None:
    drafter = new_drafter(folder, num_states=num_states)
    sequences = [new_sequence(drafter, name, 9) for name in "ab"]
    oracle = DraftOracle(folder)
    for sequence in 3 * sequences:
        expected = pending_pass(drafter, sequence)
        assert 0 < len(expected.draft_ids) <= K
        assert oracle.draft(sequence, len(expected.draft_ids)) == expected.draft_ids
        prepared = draft_ahead(drafter, [expected])
        assert all(afterwards.agrees(sequence, each, len(each.draft.token_ids)) for each in prepared)
        sequence.token_ids.append(7)


# ---- mutants: each of these mistakes is seen ----------------------------------------------------------------------


def differs(afterwards: Afterwards, drafter: DrafterParts, sampling: SamplingParams, verify: VerifyMode) -> bool:
    sequence = new_sequence(drafter, "a", 10, sampling, verify)
    prepared = draft_ahead(drafter, [pending_pass(drafter, sequence)])
    return not all(afterwards.agrees(sequence, each) for each in prepared)


def test_a_branch_without_the_start_of_its_block_is_noticed(
    afterwards: Afterwards, drafter: DrafterParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "copy_blocks", lambda self, source_ids, block_ids: None)
    assert differs(afterwards, drafter, GREEDY, VerifyMode.COUPLED)


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_noise_of_the_pass_before_is_noticed(
    afterwards: Afterwards, drafter: DrafterParts, monkeypatch: pytest.MonkeyPatch, verify: VerifyMode
) -> None:
    monkeypatch.setattr(Branch, "chain", chain_in_the_running_pass)
    assert differs(afterwards, drafter, replace(SAMPLED, temperature=1.0, top_p=1.0), verify)


def chain_in_the_running_pass(branch: Branch, block_ids: Seq[int], state: int) -> Chain:
    """Treats the outcome as drafts of the pass under verification, and uses that pass's noise a second time."""
    sequence, num_outcome = branch.sequence.target_sequence, len(branch.after)
    table = [*branch.sequence.blocks.block_table[: branch.start // branch.block_size], *block_ids]
    num_drafts, states = branch.num_drafts + num_outcome, branch.states(state)
    chain = Chain(sequence, sequence.token_ids, table, num_drafts, matcher=None, states=states)
    for token_id in branch.after:
        chain.add(lambda: None)
        chain.fill_in(token_id, is_finite=True)
    chain.draft = lambda: Draft(tuple(chain.token_ids[num_outcome:]), tuple(chain.distributions))  # type: ignore[method-assign]
    return chain
