"""Drafts ahead of verification: while the target verifies a pass, draft after its likely outcomes (arXiv:2603.03251).

A pass commits some of its drafts and one more token. The draft model computes the pass's drafts once, ranks the tokens
that may end the pass after each of them, and drafts after the likeliest outcomes, all in one batch:

    committed .. t | x1  x2  x3          the pass that is verified, computed at once
                     |   |   '- b | y y y     all drafts are accepted, and the bonus token is b
                     |   '- r | y y y         the third draft is replaced by r
                     '- s | y y y             the second draft is replaced by s

A draft made ahead equals the draft that its sequence would get after the commit: the same model, the same prefix and
the same noise, which depends only on where a pass begins. So the result does not depend on drafting ahead, and every
mode of verification stays exact. A parallel model (PARD) drafts after all outcomes of a wave in one pass. Branches
share the blocks of their prefix, except for the last one, which they copy. Recurrent layers start from the state after
the prefix, and a branch keeps its newest state alone. KV and states of branches are dropped at the end of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from operator import attrgetter

import torch
from torch import Tensor

from engine.batch.draft import Offer
from engine.proposer.chain import Chain, masked, row_after
from engine.proposer.draft_model.draft_model import DraftModel, DraftSequence
from engine.sampling.logits_row import LogitsRow
from engine.sequence.sequence import RequestTokens
from protos.messages import VerifyMode

FAN_OUT = 3  # outcomes per position
_MAX_ROWS = 64  # rows of a wave


@dataclass(frozen=True, slots=True)
class Branch:
    """A likely outcome, `after`, which follows the committed tokens of a sequence.

    The sequence's blocks hold the KV of both, without the last token. A draft of `num_drafts` tokens grows after it.
    `order` is the branch's rank in its sequence, likeliest first.
    """

    sequence: DraftSequence
    after: tuple[int, ...]
    num_drafts: int
    order: int
    block_size: int

    @property
    def start(self) -> int:
        """The KV index of the last token of `after`, which is the first slot that the branch writes."""
        return len(self.sequence.blocks.token_ids) + len(self.after) - 1

    @property
    def num_blocks(self) -> int:
        """The number of the branch's own blocks, including the copied one."""
        return (self.start + self.num_drafts - 1) // self.block_size - self._first_block + 1

    def copy_into(self, block_ids: Seq[int]) -> list[tuple[int, int]]:
        """Return the sequence's last shared block, and the block that gets its copy; empty at the begin of a new block.

        The branch then writes the rest of the copy.
        """
        if self.start % self.block_size == 0:
            return []
        return [(self.sequence.blocks.block_table[self._first_block], block_ids[0])]

    def chain(self, block_ids: Seq[int], state: int) -> Chain:
        """Return the branch's draft, which grows in `block_ids` after the shared blocks, with its states in `state`."""
        table = [*self.sequence.blocks.block_table[: self._first_block], *block_ids]
        token_ids = [*self.sequence.target_sequence.token_ids, *self.after]
        return self.sequence.chain(token_ids, table, self.num_drafts, self.states(state))

    def states(self, own: int) -> Mapping[int, int]:
        """Return the slots of the state before the branch and of its own states, all in slot `own`."""
        states = self.sequence.blocks.states
        if not states:
            return states
        later = range(self.start + 1, self.start + self.num_drafts + 1)
        return {self.start: states[self.start], **dict.fromkeys(later, own)}

    @property
    def _first_block(self) -> int:
        return self.start // self.block_size


# The token of a rank (from 0) after a number of accepted drafts; the next draft itself is not ranked.
PassOutcome = tuple[int, int]


@cache
def fan_out(num_drafts: int, num_per_position: int) -> tuple[PassOutcome, ...]:
    """Return the likeliest outcomes of a pass, likeliest first: `num_per_position` per position on average.

    A pass of K drafts ends at one of K + 1 positions: its first 0, 1, .. K drafts are accepted, and a token that is not
    a draft follows. Position k needs k accepted drafts, so its chance falls geometrically (arXiv:2603.03251). The
    chance of the r-th token in the draft's ranking is proportional to about r**-1.5.

    After the last draft the draft model's own choice is rank 0, and it is the likeliest outcome.
    """
    num_outcomes = num_per_position * (num_drafts + 1)
    rejected = [(k, rank) for k in range(num_drafts) for rank in range(num_outcomes)]
    bonus = [(num_drafts, rank) for rank in range(1, num_outcomes)]
    likeliest = sorted([*rejected, *bonus], key=lambda each: _weight(each, num_drafts), reverse=True)
    return ((num_drafts, 0), *likeliest[: num_outcomes - 1])


def _weight(outcome: PassOutcome, num_drafts: int) -> float:
    num_accepted, rank = outcome
    num_better = rank if num_accepted == num_drafts else rank + 1
    # One more draft is accepted with a chance of 0.8; 0.7 to 0.9 hardly change the result. Ranks 1 to 5 of the demo
    # pair's coupled drafts at temperature 1 come with 47, 19, 10, 6 and 3%.
    return float(0.8**num_accepted * num_better**-1.5)


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A sequence, the drafts that its next pass verifies (maybe none), and K of the pass after that."""

    sequence: RequestTokens
    draft_ids: tuple[int, ...]
    num_drafts: int


# A pending pass, and the draft's copy of its sequence with reserved slots for committed tokens and drafts.
_ReservedPass = tuple[PendingPass, DraftSequence]


class AheadDrafter:
    """Drafts after likely outcomes of passes: on average `num_per_position` per position where a pass may end.

    Branches are drafted in waves. Each wave is emitted before the next begins, so an early verification loses only the
    least likely outcomes. Waves shrink while not even the first is done in time, and grow again otherwise, since many
    small waves take longer than a few large ones.
    """

    def __init__(self, model: DraftModel, num_per_position: int) -> None:
        self._model = model
        self._num_per_position = num_per_position
        self._num_rows = _MAX_ROWS

    @torch.inference_mode()
    def run(
        self,
        pending: Seq[PendingPass],
        emit: Callable[[tuple[Offer, ...]], None],
        is_stopped: Callable[[], bool],
    ) -> bool:
        """Emit drafts, those for the likeliest outcomes first; return False if `is_stopped` ended the call early.

        `is_stopped` is called before every step of the model. Missing prompts are prefilled; an unknown sequence, or
        one without free blocks, is left out.
        """
        # Reserve slots for all passes.
        self._model.sequences.begin_round()
        waiting = [reserved for each in pending if (reserved := self._begin(each)) is not None]
        # Prefill a batch of passes, then draft after the outcomes of those that are complete.
        while waiting:
            if is_stopped():
                return False
            jobs, logits = self._model.prefill([(own, pending.draft_ids) for pending, own in _first_in_turn(waiting)])
            by_sequence = {id(own): pending for pending, own in waiting}
            passes = [(replace(by_sequence.pop(id(own)), draft_ids=tuple(ids)), own) for own, ids in jobs]
            waiting = [(pending, own) for pending, own in waiting if id(own) in by_sequence]
            branches = self._branches(passes, logits)
            if not self._prepare_all(sorted(branches, key=attrgetter("order")), emit, is_stopped):
                return False
        self._num_rows = min(_MAX_ROWS, 2 * self._num_rows)
        return True

    def _begin(self, pending: PendingPass) -> _ReservedPass | None:
        sequence = self._model.sequences.sync(pending.sequence)
        if sequence is None or not sequence.blocks.token_ids:
            return None
        num_read = len(sequence.blocks.token_ids)
        num_positions = self._model.runner.max_model_len - num_read
        if num_positions < 0:
            return None
        draft_ids = pending.draft_ids[:num_positions]
        if not self._model.sequences.reserve(sequence, num_read + len(draft_ids)):
            return None
        return replace(pending, draft_ids=draft_ids), sequence

    def _branches(self, passes: Seq[_ReservedPass], logits: Tensor) -> Iterator[Branch]:
        rows_of = [_rows(own, pending.draft_ids) for pending, own in passes]
        is_coupled = [
            pending.sequence.verify is VerifyMode.COUPLED
            for (pending, _), rows in zip(passes, rows_of, strict=True)
            for _ in rows
        ]
        rows = [row for each in rows_of for row in each]
        num_ranks = max((self._num_ranks(len(pending.draft_ids)) for pending, _ in passes), default=0)
        ranked = iter(self._model.sampler.rank(rows, is_coupled, logits, num_ranks) if rows else ())
        for pending, own in passes:
            yield from self._branches_of(pending, own, list(islice(ranked, len(pending.draft_ids) + 1)))

    def _num_ranks(self, num_drafts: int) -> int:
        """Return the number of tokens to rank at each position; one of them may be the draft itself and is left out."""
        return max(rank for _, rank in fan_out(num_drafts, self._num_per_position)) + 2

    def _branches_of(self, pending: PendingPass, own: DraftSequence, ranked: Seq[Seq[int]]) -> Iterator[Branch]:
        """Yield the branches of one pass; `ranked` has the likely tokens at each position where the pass may end."""
        drafts = pending.draft_ids
        likely = [[token_id for token_id in ids if (token_id,) != drafts[k : k + 1]] for k, ids in enumerate(ranked)]
        for order, (num_accepted, rank) in enumerate(fan_out(len(drafts), self._num_per_position)):
            token_ids = likely[num_accepted]
            if rank < len(token_ids):
                after = (*drafts[:num_accepted], token_ids[rank])
                num_drafts = self._num_possible(pending, own, after)
                if num_drafts > 0:
                    yield Branch(own, after, num_drafts, order, self._model.runner.block_size)

    def _num_possible(self, pending: PendingPass, own: DraftSequence, after: tuple[int, ...]) -> int:
        """Return K of the pass after `after`; 0 if the sequence ends there, or the draft model's positions do."""
        sequence = pending.sequence
        if after[-1] in sequence.stop_token_ids:
            return 0
        num_remaining = sequence.num_remaining_tokens - len(after)
        num_positions = self._model.runner.max_model_len - len(own.blocks.token_ids) - len(after) + 1
        return min(pending.num_drafts, num_remaining - 1, num_positions)

    def _prepare_all(
        self, branches: Seq[Branch], emit: Callable[[tuple[Offer, ...]], None], is_stopped: Callable[[], bool]
    ) -> bool:
        num_rows = self._num_rows
        for first in range(0, len(branches), num_rows):
            if not self._prepare(branches[first : first + num_rows], emit, is_stopped):
                if first == 0:
                    self._num_rows = max(8, num_rows // 2)
                return False
        return True

    def _prepare(
        self, wave: Seq[Branch], emit: Callable[[tuple[Offer, ...]], None], is_stopped: Callable[[], bool]
    ) -> bool:
        """Grow and emit a draft for each branch that finds free blocks and a state."""
        blocks = self._model.sequences.blocks
        num_blocks = sum(branch.num_blocks for branch in wave)
        with blocks.scratch(num_blocks) as block_ids, blocks.scratch_states(len(wave)) as states:
            chains = self._chains(wave, block_ids, states)
            if not self._model.grow(chains, is_stopped):
                return False
        emit(tuple(_offer(branch, chain) for branch, chain in zip(wave, chains, strict=False)))
        return True

    def _chains(self, wave: Seq[Branch], block_ids: Seq[int], states: Seq[int]) -> list[Chain]:
        chains, copies, num_used = [], [], 0
        for branch, state in zip(wave, states, strict=False):
            own = block_ids[num_used : num_used + branch.num_blocks]
            if len(own) < branch.num_blocks:
                break
            num_used += len(own)
            copies += branch.copy_into(own)
            chains.append(branch.chain(own, state))
        if copies:
            source_ids, own_ids = zip(*copies, strict=True)
            self._model.runner.copy_blocks(source_ids, own_ids)
        return chains


def _rows(sequence: DraftSequence, draft_ids: tuple[int, ...]) -> list[LogitsRow]:
    """Return a row for each position where the pass of these drafts may end."""
    target = sequence.target_sequence
    rows = [row_after(target, target.token_ids, draft_ids[:k]) for k in range(len(draft_ids) + 1)]
    return [masked(row, sequence.matcher, len(target.token_ids)) for row in rows]


def _first_in_turn(waiting: Seq[_ReservedPass]) -> Seq[_ReservedPass]:
    """Return the decoding sequences, or all if no sequence decodes: prompts are prefilled last."""
    # A sequence with more prefills its prompt and waits.
    return [(pending, own) for pending, own in waiting if own.num_missing_tokens <= 64] or waiting


def _offer(branch: Branch, chain: Chain) -> Offer:
    target = branch.sequence.target_sequence
    return Offer(target.request_id, len(target.token_ids), replace(chain.draft(), is_ahead=True), branch.after)
