"""A sequence in the engine: the state of one request between two steps.

`RequestTokens`, a proposer's view of it in the target's process and in others, does not depend on scheduling.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto

from engine.batch.draft import PREDICTION
from engine.batch.span import SpanStates
from engine.sampling.grammar import GrammarMatcher
from protos.block_keys import BlockKey
from protos.messages import (
    FirstTokenTimes,
    GenerateRequest,
    PlainReason,
    SpeculationExplanation,
    SpeculationMethod,
    SpeculationStats,
    StepStats,
    TokenLogprobs,
    VerifyMode,
)

ZEROS = 0  # the slot of the state before the first token; nothing is written to it


def span_states(states: Mapping[int, int], start: int, end: int) -> SpanStates | None:
    """Return the slots of the states before and within the tokens [start, end); None without recurrent layers.

    `states` are slots by the number of tokens that they follow.
    """
    if not states:
        return None
    before = states[start] if start else ZEROS
    return SpanStates(before, {at - start: slot for at, slot in states.items() if start < at <= end})


class TokenBlocks:
    """Tokens with a block table over one pool.

    The KV of `token_ids[:num_computed_tokens]` is in the blocks of `block_table`. `token_ids` only grow, except in a
    draft with its own tokenizer, which tokenizes the end of the text again.

    Args:
        token_ids: kept by reference; the owner may append to it.
        cache_salt: part of every key; tokens of different salts never share a block.
    """

    def __init__(self, token_ids: list[int], cache_salt: str = "") -> None:
        self.token_ids = token_ids
        self.cache_salt = cache_salt
        self.num_computed_tokens = 0
        self.block_table: array[int] = array("i")
        self.block_keys: list[BlockKey] = []  # keys of the leading full blocks, computed on demand
        self.states: dict[int, int] = {}  # slots of recurrent states by the number of tokens that they follow
        self.num_shared_tokens = 0  # leading tokens whose blocks were findable at admission
        self.num_keyed_blocks = 0  # leading blocks of `block_table` that are in the prefix cache under these keys
        self.is_private = False  # no block gets a key: a part of the KV is of a head that was replaced

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not written yet; 1 when the prompt is computed, never 0."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_scoring(self) -> bool:
        """True if every token needs logits. Then no block may come from the cache, which has no logits."""
        return False


@dataclass(frozen=True, slots=True)
class DraftRule:
    """The drafts of one request: their number, verification and source.

    `num_draft_tokens` is the largest K of a pass; 0 is plain decoding. `num_free_draft_tokens` is K for drafts that
    cost nothing to make; None uses `num_draft_tokens`. `num_tree_nodes` is the largest tree; with 0 drafts are chains.
    If `has_fixed_length`, every pass has the same K and the same tree.
    """

    num_draft_tokens: int
    verify: VerifyMode
    method: str = SpeculationMethod.NONE
    num_free_draft_tokens: int | None = None
    has_fixed_length: bool = False
    num_tree_nodes: int = 0


class RequestTokens(TokenBlocks):
    """Committed tokens, and how the next ones are sampled, drafted and verified.

    `token_ids` are the prompt, then the output. The `matcher` has read exactly the output.

    Args:
        request: its prompt and output are the first tokens.
        rule: its drafts.
        matcher: the grammar of the output; None if the output is free.
    """

    def __init__(self, request: GenerateRequest, rule: DraftRule, matcher: GrammarMatcher | None = None) -> None:
        super().__init__([*request.prompt_token_ids, *request.output_token_ids], request.cache_salt)
        self.request = request
        self.sampling = request.sampling
        self.verify = rule.verify
        self.is_greedy = request.sampling.is_greedy  # every token is the argmax
        self.is_matched = self.is_greedy or rule.verify is VerifyMode.COUPLED  # drafts are verified by matching
        self.method = rule.method
        self.matcher = matcher
        self.num_draft_tokens = rule.num_draft_tokens
        self.num_free_draft_tokens = rule.num_free_draft_tokens
        self.has_fixed_length = rule.has_fixed_length
        self.num_tree_nodes = rule.num_tree_nodes
        self.draft_allowance = rule.num_draft_tokens  # largest K of the next pass
        self.node_allowance = rule.num_tree_nodes  # largest tree of the next pass; 0 for a chain
        self.drafts_ahead = True  # a draft model that can may draft for the next pass before it is committed
        # The tokens that the first, second, ... draft of the next pass costs, if it knows its chance of acceptance; the
        # last price is for all later ones. Empty if drafts are free.
        self.row_prices: Seq[float] = ()
        self.num_matched = 0  # ready drafts for the next pass; they may exceed `draft_allowance`
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_output_tokens = request.sampling.max_tokens  # the scheduler lowers it to the limits of model and pool
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        """Committed tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that the request may still generate."""
        return self.max_output_tokens - len(self.token_ids) + self.num_prompt_tokens

    @property
    def num_wanted_drafts(self) -> int:
        """K of the next pass, limited so that its K + 1 tokens do not exceed the tokens left to generate."""
        num_drafts = self.draft_allowance if self.draft_allowance > self.num_matched else self.num_matched
        num_left = self.max_output_tokens - 1 - len(self.token_ids) + self.num_prompt_tokens
        num_drafts = min(num_drafts, num_left)
        return num_drafts if num_drafts > 0 else 0

    @property
    def num_wanted_rows(self) -> int:
        """Drafts that the next pass verifies."""
        return max(self.num_wanted_drafts, self.num_wanted_nodes)

    @property
    def num_wanted_nodes(self) -> int:
        """Nodes of the next pass's tree; 0 for a chain, or without drafts."""
        return self.node_allowance if self.num_wanted_drafts > 0 else 0

    @property
    def num_wanted_matches(self) -> int:
        """K of the next pass if its drafts cost nothing to make."""
        limit = self.draft_allowance if self.num_free_draft_tokens is None else self.num_free_draft_tokens
        return max(0, min(limit, self.num_remaining_tokens - 1))

    def append(self, token_ids: Seq[int]) -> None:
        """Commit output tokens and advance the grammar over them."""
        self.token_ids += token_ids
        if self.matcher is not None:
            self.matcher.read(token_ids)


def num_equal(left: Seq[int], right: Seq[int]) -> int:
    """Return the length of the common prefix."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class TokenReport:
    """Counts the passes of one sequence. `sources` has one entry per token of the last pass, before any cut."""

    def __init__(self) -> None:
        self.sources: tuple[str, ...] = ()
        self._drafted: Counter[str] = Counter()
        self._plain: Counter[PlainReason] = Counter()

    def record(self, sources: Seq[str], drafter: str, reason: PlainReason | None) -> None:
        """Count one pass: with drafts of `drafter`, a method, its blocks or trees, or without drafts for `reason`."""
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


def kind_of(*, is_greedy: bool) -> str:
    """Return the second part of the name of a class of requests, after the drafter."""
    return "greedy" if is_greedy else "sampled"


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
        self.drafter = PREDICTION if request.prediction_token_ids else str(rule.method)  # the source of its drafts
        self.draft_class = f"{self.drafter}-{kind_of(is_greedy=self.is_greedy)}"  # requests with a similar acceptance
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
