"""One request's tokens, blocks and progress: all that the engine remembers of it between two steps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum, auto

from engine.sampling.grammar import GrammarMatcher
from engine.sampling.logits_row import GREEDY_BELOW
from engine.sequence.token_blocks import TokenBlocks
from protos.messages import (
    FinishReason,
    GenerateRequest,
    SpeculationMethod,
    SpeculationStats,
    StepStats,
    TokenLogprobs,
    VerifyMode,
)


class SequenceStatus(Enum):
    """WAITING holds no blocks; RUNNING holds blocks; FINISHED holds none and never comes back."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence(TokenBlocks):
    """A request in the engine.

    Invariants between steps: `token_ids` are committed (prompt, then output) and only ever grow; the KV of
    `token_ids[:num_computed_tokens]` is in the blocks of `block_table`; `num_computed_tokens < len(token_ids)`, because
    the KV of the last token is written by the pass that samples its successor. Drafts are never in `token_ids`. A
    `matcher` has read the output of `token_ids`, and nothing else.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        num_draft_tokens: int,
        num_guess_tokens: int | None = None,
        has_fixed_length: bool = False,
        verify: VerifyMode,
        arrival_s: float,
        method: SpeculationMethod = SpeculationMethod.NONE,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        super().__init__([*request.prompt_token_ids, *request.output_token_ids], request.cache_salt)
        self.request = request
        self.sampling = request.sampling
        self.verify = verify
        self.method = method
        self.matcher = matcher  # None where any text will do
        self.num_draft_tokens = num_draft_tokens  # K this request may have; 0 is plain decoding
        self.num_guess_tokens = num_guess_tokens  # K of drafts that cost nothing to make; None: as of any
        self.has_fixed_length = has_fixed_length  # `draft_allowance` stays what it is
        self.draft_allowance = num_draft_tokens  # K of its next pass, never more
        self.num_guessed = 0  # drafts of its next pass that are made already, where it may have more of them than K
        self.arrival_s = arrival_s
        self.arrival = 0  # the scheduler numbers the arrivals
        self.status = SequenceStatus.WAITING
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_output_tokens = request.sampling.max_tokens  # lowered to what the model and the pool hold
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self.is_fetching = False  # blocks are on their way from elsewhere; it computes nothing until they are here
        self.is_held = False  # the draft writes a reasoning step of it; it keeps its slots and computes nothing
        self.num_expected_tokens = 0  # committed tokens that were cached when the sequence joined the queue
        self.num_cached_tokens: int | None = None  # prompt tokens found in the cache; None before the first admission
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []  # from the second token on, if they are wanted
        self.num_proposed = 0
        self.num_accepted = 0
        self.accepted_histogram: list[int] = []
        self.step_stats = StepStats() if request.speculation.is_approximate else None  # None: its output is exact

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def is_matched(self) -> bool:
        """Drafts are verified by matching, as those of greedy requests are in every mode: all emit the argmax."""
        return self.verify is VerifyMode.COUPLED or self.is_greedy

    @property
    def urgency(self) -> tuple[int, int]:
        """The lower, the sooner: priority, then arrival."""
        return self.request.priority, self.arrival

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_scoring(self) -> bool:
        """Log-probabilities of its prompt are wanted and not complete: every row of the prompt must be computed."""
        is_wanted = self.sampling.num_prompt_logprobs is not None
        return is_wanted and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens the request may still generate."""
        return self.max_output_tokens - self.num_output_tokens

    @property
    def num_wanted_drafts(self) -> int:
        """K of the next pass: one pass emits at most K + 1 tokens, and no more are left to generate."""
        return max(0, min(max(self.draft_allowance, self.num_guessed), self.num_remaining_tokens - 1))

    @property
    def num_wanted_guesses(self) -> int:
        """K of the next pass if its drafts cost nothing to make."""
        limit = self.draft_allowance if self.num_guess_tokens is None else self.num_guess_tokens
        return max(0, min(limit, self.num_remaining_tokens - 1))

    def append(self, token_ids: Seq[int]) -> None:
        """Commit tokens: they are output from now on, and the grammar goes on behind them."""
        self.token_ids += token_ids
        if self.matcher is not None:
            self.matcher.read(token_ids)

    def record_pass(self, num_proposed: int, num_accepted: int) -> None:
        """Count one verification pass; a pass without drafts is plain decoding and is not counted."""
        if num_proposed == 0:
            return
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted
        missing = num_accepted + 1 - len(self.accepted_histogram)
        self.accepted_histogram.extend([0] * missing)
        self.accepted_histogram[num_accepted] += 1

    def speculation_stats(self) -> SpeculationStats:
        return SpeculationStats(self.num_proposed, self.num_accepted, tuple(self.accepted_histogram))
