"""Requests and their results: the plain data that Outrider's processes exchange.

Immutable dataclasses of built-in types, so that any codec can carry them and any package may import them. The frontends
(`router`) validate user input; values here are already valid. Token ids are the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any

MAX_STEP_SCORE = 9.0  # the target's score of the best reasoning step; the worst scores 0
MAX_GRAMMAR_CHARACTERS = 512 << 10  # compiles in 0.1 s: a choice of 20,000 strings is 250 KB and takes 46 ms
GREEDY_BELOW = 1e-5  # a smaller temperature would overflow the logits; the distribution is one-hot in effect


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's.

    The ingress sets `tool_calls` after parsing the text. Four more never reach a client as such: `abort`, its client or
    its pair gave the sequence up; `timeout`, its own time-out passed (the frontends report `DeadlineExceededError`);
    `grammar`, the grammar allows nothing after the last token (`GrammarError`); `non_finite`, the logits were not
    finite (`NonFiniteLogitsError`).
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    TIMEOUT = "timeout"
    GRAMMAR = "grammar"
    NON_FINITE = "non_finite"


class VerifyMode(StrEnum):
    """The verification of drafts; every mode keeps the target's distribution (see `engine.verifier`)."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    BLOCK = "block"


class SpeculationMethod(StrEnum):
    """The source of drafts; a deployment offers some of them (`ModelCard.speculation_methods`).

    A method given as text is one of these, or the name of another draft model of the deployment.
    """

    MODEL = "model"  # the deployment's draft model
    MEDUSA = "medusa"  # heads on the target's last hidden state, each for one position ahead
    EAGLE3 = "eagle3"  # a layer on three of the target's hidden states, then on its own output
    PEAGLE = "peagle"  # the same, with one pass for all drafts
    DFLASH = "dflash"  # a block of masks over the target's hidden states, in one pass
    DSPARK = "dspark"  # the same, where a draft also depends on the draft before it
    MTP = "mtp"  # the target's own multi-token-prediction layer
    SELF = "self"  # the target's own weights in fewer bits, or its first layers
    PYTHON = "python"  # a class of the operator's
    SUFFIX = "suffix"  # the continuation of an earlier match, in this request or in finished ones of its cache_salt
    NGRAM = "ngram"  # the continuation of the last tokens' most recent occurrence in this request
    HYBRID = "hybrid"  # per pass, the suffix or the model or head: the one expected to yield more
    AUTO = "auto"  # one of the others, by measurements of similar requests
    NONE = "none"  # plain decoding

    @property
    def can_branch(self) -> bool:
        """True if its drafts may be trees: it has a distribution for every position, not just one text."""
        return self in (
            SpeculationMethod.MODEL,
            SpeculationMethod.MEDUSA,
            SpeculationMethod.EAGLE3,
            SpeculationMethod.PEAGLE,
            SpeculationMethod.DFLASH,
            SpeculationMethod.DSPARK,
            SpeculationMethod.MTP,
            SpeculationMethod.SELF,
        )


def has_own_weights(method: str) -> bool:
    """True if a model, a head or the operator's class drafts, including the deployment's named draft models."""
    known = method in tuple(SpeculationMethod) and method != SpeculationMethod.PYTHON
    return not known or SpeculationMethod(method).can_branch


class TokenSource(StrEnum):
    """The origin of a committed token; an accepted one also names its draft's method (`accepted:model`)."""

    ACCEPTED = "accepted"  # an accepted draft
    FORCED = "forced"  # the only token that the grammar allowed; drafted for free and accepted
    RECOVERED = "recovered"  # sampled where a draft was rejected
    BONUS = "bonus"  # sampled after all drafts were accepted
    PLAIN = "plain"  # from a pass without drafts
    STEP = "step"  # part of an approximate reasoning step, or of the pass that scored it
    PROMPT = "prompt"  # echoed


class PlainReason(StrEnum):
    """Why a pass had no drafts."""

    OFF = "off"  # the request or the deployment does not draft
    PROMPT = "prompt"  # the pass that ends the prefill produces the first token
    LAST_TOKEN = "last_token"  # one token was left to generate
    CLASS_OFF = "class_off"  # drafts slow such requests down, by measurement
    LOAD = "load"  # no draft pays at this load, or this pass measured the baseline
    NO_ROOM = "no_room"  # the pass or the KV pool was full, or more prompts waited for prefill than sequences decoded
    DRAFT_AWAY = "draft_away"  # the draft process was away or late, and no n-gram matched
    NO_MATCH = "no_match"  # no earlier text matches here
    CONSTRAINT = "constraint"  # the grammar forbade the first draft
    INVALID = "invalid"  # the draft is not a token of the target


class GrammarKind(StrEnum):
    """The notation of a grammar: a JSON schema, a regular expression, a JSON list of texts, Lark or GBNF."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Thought:
    """The token sequence that ends a thought, and the token that may begin it.

    Without a begin token, the thought is open from the first token on.
    """

    end_ids: tuple[int, ...]
    begin_id: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the output must match: all of it, or all of it after `thought`.

    `param` is the request field that sets it, for error messages.
    """

    kind: GrammarKind
    source: str
    param: str
    thought: Thought | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of the next token, applied to the target's logits in the order of `engine.sampling.sampler`.

    Neutral values disable a transform. `seed` is always set: the ingress draws one if the client sends none, so a
    request that moves to another replica keeps its randomness.
    """

    seed: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and generated tokens
    presence_penalty: float = 0.0  # counts generated tokens
    frequency_penalty: float = 0.0  # counts generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    stop_token_ids: tuple[int, ...] = ()  # the model's own end tokens included, unless the request ignores them
    min_tokens: int = 0  # stop tokens are masked before this many generated tokens
    max_tokens: int = 16
    num_logprobs: int | None = None  # n: the token's own and the n largest; None without logprobs
    num_prompt_logprobs: int | None = None  # the same for the prompt's tokens; the prompt is then computed whole
    grammar: Grammar | None = None  # tokens that cannot continue a text of this grammar are impossible

    @property
    def is_greedy(self) -> bool:
        """True if the next token is the likeliest one."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The defaults of `SamplingParams` for fields that a request leaves open: OpenAI's, or the checkpoint's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """One request's speculation settings; None keeps the deployment's.

    `is_approximate` gives up exactness for this request only: reasoning steps of the draft that the target scores at
    `threshold` or more are committed unchanged (`engine.approximate`).
    """

    enabled: bool = True
    num_tokens: int | None = None
    verify: VerifyMode | None = None
    method: str | None = None
    is_approximate: bool = False
    threshold: float | None = None
    explain: bool = False  # the answer counts the passes without drafts by reason


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. A client request with n > 1 becomes n of these, with different `sample_index`.

    `output_token_ids` is not empty if the sequence continues after the loss of its replica: these tokens are committed,
    count as generated, and are not sent again. `is_seeded` means that the client chose the seed and expects the same
    text for it, so no decision that affects the text may depend on a clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    sample_index: int = 0
    priority: int = 0  # lower is sooner, as in vLLM
    timeout_s: float | None = None  # from arrival at the pair
    cache_salt: str = ""
    output_token_ids: tuple[int, ...] = ()
    prediction_token_ids: tuple[int, ...] = ()  # the output that the client predicts; used as a draft only
    session_id: str = ""  # shared by requests of one conversation; among equal pairs the router prefers the last one
    is_seeded: bool = False
    returns_sources: bool = False  # chunks name the source of each token
    returns_drafts: bool = False  # chunks without tokens hold the drafts of the pass in progress
    num_places: int = 1  # free places that a pair needs to take this one: for itself and the choices that follow
    is_admitted: bool = False  # a choice of an admitted request, or a moved one: a full pair takes it too
    is_moved: bool = False  # its pair was lost after taking it: it is scheduled before new requests
    tenant: str = ""  # of the API key; tenants take turns by `weight`
    weight: float = 1.0
    model_version: str = ""  # of the `ModelCard` it was made for; a pair with another one refuses it. Empty matches any
    is_traced: bool = False  # the chunk of its first tokens reports the phases before them
    is_logged: bool = False  # its tokens go into the log of verified positions, if there is one
    feed_address: str = ""  # the ingress's abstract Unix socket for tokens, used by pairs on the same node

    @property
    def group_id(self) -> str:
        """The id of the client's request; the ids of its choices begin with it."""
        return self.request_id.rpartition("-")[0]

    @property
    def is_reported(self) -> bool:
        """True if the answer reports where its tokens come from, or why drafts did not help."""
        return self.returns_sources or self.speculation.explain


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, from the target's raw logits (before any transform)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), largest first


# Not frozen, like its chunk: a step creates one of each per sequence, and this takes a third of the time.
@dataclass(slots=True, unsafe_hash=True)
class SpeculationStats:
    """Speculation counts of one sequence so far; every acceptance figure derives from them.

    `accepted_histogram[i]` is the number of verification passes that accepted exactly i drafts.
    """

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_histogram: tuple[int, ...] = ()

    @property
    def num_passes(self) -> int:
        return sum(self.accepted_histogram)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification pass, including the target's own; 0 without a pass."""
        return 1 + self.num_accepted_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Fraction of the drafted tokens that were accepted; 0 without a draft."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the fields of `speculative_decoding`, with vLLM's names and formats."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": list(self.accepted_histogram),
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_steps": self.num_passes,
        }

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        histograms = zip_longest(self.accepted_histogram, other.accepted_histogram, fillvalue=0)
        return SpeculationStats(
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            tuple(left + right for left, right in histograms),
        )


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counts of the reasoning steps that the draft wrote for one sequence so far."""

    num_scored: int = 0
    num_accepted: int = 0
    num_accepted_tokens: int = 0

    def figures(self) -> dict[str, Any]:
        """Return the fields of `x_speculation`, which mark an inexact output on both frontends."""
        return {
            "exact": False,
            "steps_from_draft": self.num_accepted,
            "steps_rejected": self.num_scored - self.num_accepted,
            "tokens_from_draft": self.num_accepted_tokens,
        }

    def __add__(self, other: StepStats) -> StepStats:
        return StepStats(
            self.num_scored + other.num_scored,
            self.num_accepted + other.num_accepted,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )


@dataclass(frozen=True, slots=True)
class SpeculationExplanation:
    """Passes of one sequence so far: with drafts by method and shape (`model:tree`), and without by `PlainReason`.

    `routes` are the router's reasons for the pair, one per sequence with an explained route.
    """

    drafted: dict[str, int] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    routes: tuple[str, ...] = ()

    def __add__(self, other: SpeculationExplanation) -> SpeculationExplanation:
        return SpeculationExplanation(
            _sums(self.drafted, other.drafted), _sums(self.plain, other.plain), self.routes + other.routes
        )


def _sums(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {key: left.get(key, 0) + right.get(key, 0) for key in {**left, **right}}


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """The seconds until the first tokens of a traced request, by phase.

    The pair's engine measures all but `routed_s`, which the ingress measures. The rest of the wait is communication
    between processes.
    """

    queued_s: float  # from arrival at the engine to its first blocks
    transfer_s: float  # for blocks sent by a prefill replica; 0 without one
    prefill_s: float  # the passes over the rest of the prompt
    routed_s: float | None = None  # the choice of a pair; None if there is only one


@dataclass(slots=True, unsafe_hash=True)
class TokenChunk:
    """The tokens that one engine step committed for one sequence; the last chunk has the finish reason.

    `request_id` is the attempt's id and `offset` the position of the tokens in the whole output, so a receiver can
    recognize late, repeated or missing chunks.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if requested, else empty
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended the sequence, also the last of token_ids
    num_cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    speculation: SpeculationStats | None = None  # the sums so far
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from the prompt's second token on, in the first chunk
    steps: StepStats | None = None  # the sums so far; None for an exact output
    sources: tuple[str, ...] = ()  # one per token if requested, else empty
    explanation: SpeculationExplanation | None = None  # the sums so far, if requested
    draft_ids: tuple[int, ...] = ()  # drafts under verification, in a chunk without tokens; never part of the output
    offset: int = 0  # number of output tokens before `token_ids`, including earlier attempts
    times: FirstTokenTimes | None = None  # with the first tokens of a traced request
    error: str = ""  # the message of a `NonFiniteLogitsError`, with that finish reason
