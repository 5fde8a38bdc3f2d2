"""Drafting ahead of the verdict: while a pass is verified, continue what it may commit (arXiv:2603.03251).

What a pass commits is some of its drafts and one token more. The draft model computes the pass's drafts once, ranks the
tokens that may end it after each of them, and drafts behind the likeliest of these outcomes, all in one batch:

    committed .. t | x1  x2  x3          the pass that is being verified, read in one go
                     |   |   '- b | y y y     all drafts stand, and the bonus token is b
                     |   '- r | y y y         the third draft is replaced by r
                     '- s | y y y             the second draft is replaced by s

A continuation is the very draft that its sequence would get if the outcome were committed already: the same model, the
same prefix, the same noise (which knows a pass only by where it begins). So nothing depends on whether it was made
ahead, and every mode of verification stays exact. Branches share the blocks of their prefix and copy the one in which
they part; what they write is forgotten with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import torch

from engine.proposer.draft_model.branch import Branch
from engine.proposer.draft_model.draft_model import DraftModel, Read, Reading
from engine.proposer.draft_model.draft_sequence import DraftSequence
from engine.proposer.draft_model.fan_out import fan_out
from engine.proposer.draft_model.offer import Offer
from engine.proposer.growth.chain import Chain, masked, row_after
from engine.sampling.logits_row import LogitsRow
from engine.sequence.request_tokens import RequestTokens
from protos.messages import VerifyMode

_MIN_ROWS, _MAX_ROWS = 8, 64  # of a wave
_MAX_UNREAD = 64  # missing tokens of a sequence that decodes; those that read their prompt wait for the others


@dataclass(frozen=True, slots=True)
class PendingPass:
    """A sequence whose next pass verifies `draft_ids` (maybe none), and K of the pass after that."""

    sequence: RequestTokens
    draft_ids: tuple[int, ...]
    num_drafts: int


@dataclass(frozen=True, slots=True)
class _ReservedPass:
    """A pending pass with slots for its committed tokens and its drafts."""

    pending: PendingPass
    sequence: DraftSequence
    draft_ids: tuple[int, ...]


class AheadDrafter:
    """Prepares drafts for outcomes of passes; `num_per_position` of them per position at which a pass may end.

    What one wave of branches brings is handed on before the next begins, so that a verdict which comes early costs the
    least likely ones. Waves shrink while not even one is done in time, since many small ones take longer than a few.
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
        """Hand `emit` what is prepared, likeliest outcomes first; False if `is_stopped` ended it early.

        `is_stopped` is asked before every step of the model. Prompts that are not read yet are read on the way; a
        sequence that is unknown or finds no blocks is left out.
        """
        self._model.sequences.begin_round()
        waiting = [reserved for each in pending if (reserved := self._begin(each)) is not None]
        while waiting:
            if is_stopped():
                return False
            read = self._model.read([Reading(each.sequence, each.draft_ids) for each in _first_in_turn(waiting)])
            is_read = {id(reading.sequence) for reading in read.readings}
            passes = {id(each.sequence): each for each in waiting if id(each.sequence) in is_read}
            waiting = [each for each in waiting if id(each.sequence) not in passes]
            branches = self._branches([passes[id(reading.sequence)] for reading in read.readings], read)
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
        return _ReservedPass(pending, sequence, draft_ids)

    def _branches(self, passes: Seq[_ReservedPass], read: Read) -> Iterator[Branch]:
        rows = [row for each in passes for row in _rows(each)]
        is_coupled = [each.pending.sequence.verify is VerifyMode.COUPLED for each in passes for _ in _rows(each)]
        num_ranks = max((self._num_ranks(len(each.draft_ids)) for each in passes), default=0)
        ranked = iter(self._model.sampler.rank(rows, is_coupled, read.logits, num_ranks) if rows else ())
        for each in passes:
            yield from self._branches_of(each, list(islice(ranked, len(each.draft_ids) + 1)))

    def _num_ranks(self, num_drafts: int) -> int:
        """Tokens to be ranked at each position: one of them may be the draft's own, which is left out."""
        return max(each.rank for each in fan_out(num_drafts, self._num_per_position)) + 2

    def _branches_of(self, reserved: _ReservedPass, ranked: Seq[Seq[int]]) -> Iterator[Branch]:
        """The branches behind one pass; `ranked` are the likely tokens at each position where it may end."""
        drafts = reserved.draft_ids
        likely = [[token_id for token_id in ids if (token_id,) != drafts[k : k + 1]] for k, ids in enumerate(ranked)]
        for order, candidate in enumerate(fan_out(len(drafts), self._num_per_position)):
            token_ids = likely[candidate.num_accepted]
            if candidate.rank < len(token_ids):
                after = (*drafts[: candidate.num_accepted], token_ids[candidate.rank])
                num_drafts = self._num_possible(reserved, after)
                if num_drafts > 0:
                    yield Branch(reserved.sequence, after, num_drafts, order, self._model.runner.block_size)

    def _num_possible(self, reserved: _ReservedPass, after: tuple[int, ...]) -> int:
        """K of the pass behind `after`; 0 where there will be none, or the draft's positions end."""
        sequence = reserved.pending.sequence
        if after[-1] in sequence.stop_token_ids:
            return 0
        num_remaining = sequence.num_remaining_tokens - len(after)
        num_positions = self._model.runner.max_model_len - len(reserved.sequence.blocks.token_ids) - len(after) + 1
        return min(reserved.pending.num_drafts, num_remaining - 1, num_positions)

    def _prepare_all(
        self, branches: Seq[Branch], emit: Callable[[tuple[Offer, ...]], None], is_stopped: Callable[[], bool]
    ) -> bool:
        num_rows = self._num_rows
        for first in range(0, len(branches), num_rows):
            if not self._prepare(branches[first : first + num_rows], emit, is_stopped):
                if first == 0:
                    self._num_rows = max(_MIN_ROWS, num_rows // 2)
                return False
        return True

    def _prepare(
        self, wave: Seq[Branch], emit: Callable[[tuple[Offer, ...]], None], is_stopped: Callable[[], bool]
    ) -> bool:
        """Grow a draft behind each branch for which there are blocks."""
        with self._model.sequences.blocks.scratch(sum(branch.num_blocks for branch in wave)) as block_ids:
            chains = self._chains(wave, block_ids)
            if not self._model.grow(chains, is_stopped):
                return False
        emit(tuple(_offer(branch, chain) for branch, chain in zip(wave, chains, strict=False)))
        return True

    def _chains(self, wave: Seq[Branch], block_ids: Seq[int]) -> list[Chain]:
        chains, copies, num_used = [], [], 0
        for branch in wave:
            own = block_ids[num_used : num_used + branch.num_blocks]
            if len(own) < branch.num_blocks:
                break
            num_used += len(own)
            copies += branch.copy_into(own)
            chains.append(branch.chain(own))
        if copies:
            self._model.runner.copy_blocks([each.source_id for each in copies], [each.block_id for each in copies])
        return chains


def _rows(reserved: _ReservedPass) -> list[LogitsRow]:
    """One for each position where the pass may end."""
    target = reserved.sequence.target_sequence
    drafts = reserved.draft_ids
    rows = [row_after(target, target.token_ids, drafts[:k]) for k in range(len(drafts) + 1)]
    return [masked(row, reserved.sequence.matcher, len(target.token_ids)) for row in rows]


def _first_in_turn(waiting: Seq[_ReservedPass]) -> Seq[_ReservedPass]:
    """Those that decode, if there are any, else all: a prompt is read while no other sequence waits."""
    return [each for each in waiting if each.sequence.num_missing_tokens <= _MAX_UNREAD] or waiting


def _offer(branch: Branch, chain: Chain) -> Offer:
    target = branch.sequence.target_sequence
    return Offer(target.request_id, len(target.token_ids), chain.draft(), branch.after)
