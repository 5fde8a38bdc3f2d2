"""A sequence in the engine: the state of one request between two steps."""

from __future__ import annotations

from enum import Enum, auto

from engine.sampling.grammar import GrammarMatcher
from engine.sequence.first_token_clock import FirstTokenClock
from engine.sequence.request_tokens import DraftRule, RequestTokens
from engine.sequence.token_report import TokenReport
from protos.messages import GenerateRequest, SpeculationStats, StepStats, TokenLogprobs


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
