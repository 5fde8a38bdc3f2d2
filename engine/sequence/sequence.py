"""A sequence in the engine: the state of one request between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from enum import Enum, auto

from engine.sampling.grammar import GrammarMatcher
from engine.sequence.request_tokens import DraftRule, RequestTokens
from protos.messages import (
    FirstTokenTimes,
    GenerateRequest,
    PlainReason,
    SpeculationExplanation,
    SpeculationStats,
    StepStats,
    TokenLogprobs,
)


class TokenReport:
    """Counts the passes of one sequence. `sources` has one entry per token of the last pass, before any cut."""

    def __init__(self) -> None:
        self.sources: tuple[str, ...] = ()
        self._drafted: Counter[str] = Counter()
        self._plain: Counter[PlainReason] = Counter()

    def record(self, sources: Seq[str], drafter: str, reason: PlainReason | None) -> None:
        """Count one pass: with drafts of `drafter`, a method or its trees, or without drafts for `reason`."""
        self.sources = tuple(sources)
        if reason is None:
            self._drafted[drafter] += 1
        else:
            self._plain[reason] += 1

    def explanation(self) -> SpeculationExplanation:
        """Return the counts so far."""
        return SpeculationExplanation(dict(self._drafted), {str(reason): num for reason, num in self._plain.items()})


class FirstTokenClock:
    """Records the engine's time at each change of phase. The transfers add to `transfer_s`."""

    def __init__(self, arrival_s: float) -> None:
        self._arrival_s = arrival_s
        self._admitted_s = arrival_s
        self._times: FirstTokenTimes | None = None
        self.is_committed = False  # the first tokens are committed
        self.transfer_s = 0.0

    def admit(self, now_s: float) -> None:
        """Record that the sequence has its first blocks."""
        self._admitted_s = now_s

    def commit(self, now_s: float) -> float:
        """Record that the first tokens are committed and return the seconds of prefill."""
        self.is_committed = True
        prefill_s = max(0.0, now_s - self._admitted_s - self.transfer_s)
        self._times = FirstTokenTimes(max(0.0, self._admitted_s - self._arrival_s), self.transfer_s, prefill_s)
        return prefill_s

    def take(self) -> FirstTokenTimes | None:
        """Return the phases on the first call after `commit`, None otherwise."""
        times, self._times = self._times, None
        return times


class SequenceStatus(Enum):
    """WAITING holds no blocks; RUNNING holds blocks; FINISHED holds no blocks and is final."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence(RequestTokens):
    """A request in the engine.

    Invariants between steps: `token_ids` are committed and only grow; `num_computed_tokens < len(token_ids)`, because
    the pass that samples the next token writes the KV of the last one. Drafts are never in `token_ids`.

    Args:
        request: see `RequestTokens`, also for `rule` and `matcher`.
        arrival_s: arrival time of the request on the engine's clock.
    """

    def __init__(
        self, request: GenerateRequest, rule: DraftRule, arrival_s: float, matcher: GrammarMatcher | None = None
    ) -> None:
        super().__init__(request, rule, matcher)
        self.arrival_s = arrival_s
        self.arrival = 0  # sequence number of the arrival, set by the scheduler
        self.turn = 0.0  # order among the waiting sequences, set by the scheduler
        self.status = SequenceStatus.WAITING
        self.is_fetching = False  # waits for blocks from a prefill engine and computes nothing
        self.is_held = False  # the draft writes a reasoning step; the sequence keeps its slots and computes nothing
        self.last_step = 0  # the scheduler's last step that computed the grammar's mask
        self.num_expected_tokens = 0  # committed tokens that were cached when the sequence joined the queue
        self.num_cached_tokens: int | None = None  # prompt tokens found in the cache; None before the first admission
        self.prompt_logprobs: list[TokenLogprobs] = []  # from the second token on, if requested
        self.has_faulty_prompt = False  # prompt log-probabilities are requested, and a row is not finite
        self.num_proposed = 0
        self.num_accepted = 0
        self.accepted_histogram: list[int] = []
        self.clock = FirstTokenClock(arrival_s)
        self.report = TokenReport() if request.is_reported else None  # None unless the request asks for token sources
        self.step_stats = StepStats() if request.speculation.is_approximate else None  # None if the output is exact

    @property
    def urgency(self) -> tuple[bool, float, int]:
        """Sort key, lowest first: sequences moved from a lost pair, then by turn, then by arrival."""
        return not self.request.is_moved, self.turn, self.arrival

    @property
    def is_scoring(self) -> bool:
        """True while requested prompt log-probabilities are incomplete; then every row of the prompt is computed."""
        is_wanted = self.sampling.num_prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def record_pass(self, num_proposed: int, num_accepted: int) -> None:
        """Count one verification pass. A pass without drafts is plain decoding and does not count."""
        if num_proposed == 0:
            return
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        missing = num_accepted + 1 - len(self.accepted_histogram)
        self.accepted_histogram.extend([0] * missing)
        self.accepted_histogram[num_accepted] += 1

    def speculation_stats(self) -> SpeculationStats:
        """Return the counts of all verification passes so far."""
        return SpeculationStats(self.num_proposed, self.num_accepted, tuple(self.accepted_histogram))
