"""Turns: of tenants' requests that wait for admission, and of sequences whose grammars need a mask in a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import attrgetter, itemgetter

from engine.sampling.grammar import DEAR_MASK_S
from engine.sequence.sequence import Sequence
from protos.messages import GenerateRequest

PRIORITY_TOKENS = 1 << 16  # one step of priority delays a turn by so many tokens


class FairQueue:
    """Orders waiting requests so that tenants get tokens in proportion to their weights, however many they ask for.

    This is start-time fair queueing (Goyal, Vin and Cheng, 1996): a request's turn is the end of its tenant's last
    request, or the turn being served now if that is later. A lower priority delays the turn by a fixed number of
    tokens, so the work that overtakes a waiting request is bounded. A turn is measured in tokens divided by weight, so
    no clock and no rate is needed.
    """

    def __init__(self) -> None:
        self._now = 0.0  # the turn served last
        self._ends: dict[tuple[str, int], float] = {}  # end of the last request by tenant and priority, if after now

    def turn(self, request: GenerateRequest, num_tokens: int) -> float:
        """Return the turn of a request of at most `num_tokens` of prompt and output. Lower turns come first."""
        flow = request.tenant, request.priority
        start = max(self._now, self._ends.get(flow, 0.0))
        self._ends[flow] = start + num_tokens / request.weight
        return start + request.priority * PRIORITY_TOKENS

    def serve(self, request: GenerateRequest, turn: float) -> None:
        """Advance to the turn of a request that is admitted."""
        self._now = max(self._now, turn - request.priority * PRIORITY_TOKENS)
        self._ends = {flow: end for flow, end in self._ends.items() if end > self._now}


class MaskTurns:
    """Spends a step's processor time on the masks of grammars: cheap masks first, then the longest waiting sequence."""

    def __init__(self, step_s: float = 0.03) -> None:
        self._step_s = step_s
        self._spent_s = 0.0
        self._num_steps = 0

    def start_step(self, ready: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose masks this step has time for, in the same order; cheap masks come first.

        Of the others, the sequence that has waited longest goes on, so each has its turn.
        """
        self._num_steps, self._spent_s = self._num_steps + 1, 0.0
        bound = [(each.matcher.grammar.mask_s, each.last_step, each) for each in ready if each.matcher is not None]
        waiting = [each for _, _, each in sorted(bound, key=itemgetter(0, 1)) if not self.has_mask(each)]
        if not waiting:
            return ready
        self._compute(min(waiting, key=attrgetter("last_step")))
        return [each for each in ready if each.matcher is None or each.last_step == self._num_steps]

    def has_mask(self, sequence: Sequence) -> bool:
        """Compute the next mask of a sequence's grammar if the step has time for it. True if it may be sampled."""
        if sequence.matcher is None:
            return True
        if self._spent_s >= self._step_s:
            return False
        self._compute(sequence)
        return True

    def fit(self, sequences: Seq[Sequence]) -> bool:
        """True if one step has time for all masks of `sequences`."""
        return sum([each.matcher.grammar.mask_s for each in sequences if each.matcher is not None]) <= self._step_s

    def _compute(self, sequence: Sequence) -> None:
        assert sequence.matcher is not None
        mask_s = sequence.matcher.prepare()
        num_masks = 1 if has_dear_masks(sequence) else 1 + sequence.num_wanted_rows
        self._spent_s += num_masks * mask_s
        sequence.last_step = self._num_steps


def has_dear_masks(sequence: Sequence) -> bool:
    """True if the sequence gets no drafts, since each would need a mask."""
    return sequence.matcher is not None and sequence.matcher.grammar.mask_s > DEAR_MASK_S
