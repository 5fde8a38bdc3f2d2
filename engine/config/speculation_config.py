"""The number of drafts, their shape, and their verification."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from protos.errors import ConfigError
from protos.messages import MAX_STEP_SCORE, SpeculationMethod, VerifyMode

DEFAULT_RATING_PROMPT = (
    "\n\nOn a scale from 0 to 9, how correct and useful is the last reasoning step above? Answer with one digit: "
)


class ScorerKind(StrEnum):
    """The source of a step's score, 0 to 9 (`engine.approximate.reasoning_sequence`)."""

    RATING = "rating"  # a digit that the target answers to a prompt
    LIKELIHOOD = "likelihood"  # the likelihood of the step's tokens


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The boundaries of reasoning steps, their greatest length, and the score that accepts one.

    A step ends after `step_end`, or after `max_step_tokens`. Steps are drafted between the two markers `think`, which
    the prompt may contain; without markers, anywhere in the output. At most `max_steps` steps of a request are drafted.
    `threshold` is the default of requests.

    Raises:
        ConfigError: a limit is out of range, or a marker is empty.
    """

    threshold: float = 7.0
    judge: ScorerKind = ScorerKind.RATING
    rating_prompt: str = DEFAULT_RATING_PROMPT
    step_end: str = "\n\n"
    think: tuple[str, str] | None = None
    max_step_tokens: int = 64
    max_steps: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= MAX_STEP_SCORE:
            raise ConfigError(f"speculation.steps.threshold is {self.threshold}; scores are 0 to {MAX_STEP_SCORE:g}")
        if not self.step_end or (self.think is not None and not all(self.think)):
            raise ConfigError("speculation.steps has an empty step_end or marker, which would be found everywhere")
        if self.max_step_tokens < 1 or self.max_steps < 1:
            raise ConfigError(
                f"speculation.steps.max_step_tokens is {self.max_step_tokens} and max_steps {self.max_steps}; both "
                "must be at least 1 (to disable steps, remove speculation.steps)"
            )


MAX_DRAFT_TOKENS = 64
MAX_TREE_NODES = 64


class TreeKind(StrEnum):
    """The shape of a tree: DYNAMIC follows the draft's probabilities, STATIC is the same in every pass."""

    DYNAMIC = "dynamic"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Tree drafts of `num_nodes` nodes, or of at most so many in an adaptive deployment, which also has chains.

    `parents` is the shape of a static tree, as in `Draft`; without it the shape is the best one for the acceptance
    assumed in `engine.proposer.growth.tree`.

    Raises:
        ConfigError: `num_nodes` is out of range, or `parents` is not a tree of `num_nodes` nodes.
    """

    kind: TreeKind = TreeKind.DYNAMIC
    num_nodes: int = 8
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_TREE_NODES:
            raise ConfigError(f"speculation.tree.num_nodes is {self.num_nodes}; use 1 to {MAX_TREE_NODES}")
        if self.parents and self.kind is not TreeKind.STATIC:
            raise ConfigError("speculation.tree.parents are the shape of a static tree; set kind to 'static'")
        if self.parents and len(self.parents) != self.num_nodes:
            raise ConfigError(
                f"speculation.tree.parents are {len(self.parents)} and num_nodes is {self.num_nodes}; give one for each"
            )
        wrong = next((node for node, parent in enumerate(self.parents) if not -1 <= parent < node), None)
        if wrong is not None:
            raise ConfigError(
                f"speculation.tree.parents has {self.parents[wrong]} for node {wrong}; a parent comes before its "
                "children, and -1 means the committed tokens"
            )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """A deployment's speculation: the defaults, and the limits for requests that choose their own.

    `num_tokens` is K, the drafts per pass. Suffixes and predictions, which cost nothing to make and end where they are
    not expected to continue, have up to `max_num_tokens`. `methods` lists the methods on
    offer, the default first; a name outside `SpeculationMethod` is a further draft model. A deployment with
    `num_tokens` 0 drafts only for requests that ask.

    With a `tree`, drafts are trees of depth K unless `adaptive`.

    With `adaptive`, each pass of each request gets its own shape: none, a chain of up to `max_num_tokens` (or the
    request's limit), or a tree of up to its `num_nodes`; `num_tokens` is only the first K. Drafts then keep a pass
    within `target_itl_s`, and the method AUTO chooses another method for each class of requests
    (`engine.accounting.request_limits`).

    With `steps`, a request may ask for approximate reasoning steps; without
    them everything is exact.

    Raises:
        ConfigError: `max_num_tokens` is above `MAX_DRAFT_TOKENS`, or `num_tokens` above `max_num_tokens`.
    """

    num_tokens: int = 4
    verify: VerifyMode = VerifyMode.COUPLED
    max_num_tokens: int = 16
    methods: tuple[str, ...] = (SpeculationMethod.MODEL, SpeculationMethod.NONE)
    tree: TreeConfig | None = None
    adaptive: bool = False
    steps: StepConfig | None = None
    target_itl_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_num_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(f"speculation.max_num_tokens is {self.max_num_tokens}; use 0 to {MAX_DRAFT_TOKENS}")
        if not 0 <= self.num_tokens <= self.max_num_tokens:
            raise ConfigError(
                f"speculation.num_tokens is {self.num_tokens}; it must be between 0 and speculation.max_num_tokens, "
                f"{self.max_num_tokens}: lower it or raise the limit"
            )

    def without_drafts(self) -> SpeculationConfig:
        """Return this configuration with K = 0 everywhere, for an engine without a proposer."""
        return replace(self, num_tokens=0, max_num_tokens=0)

    @property
    def method(self) -> str:
        """The method of a request that names none."""
        return self.methods[0] if self.methods else SpeculationMethod.NONE

    @property
    def choices(self) -> tuple[str, ...]:
        """The methods that AUTO chooses from."""
        aside = (SpeculationMethod.AUTO, SpeculationMethod.NONE)
        return tuple(method for method in self.methods if method not in aside)

    @property
    def free_draft_limit(self) -> int:
        """The default K of drafts that cost nothing to make."""
        return self.max_num_tokens if self.num_tokens > 0 else 0

    @property
    def can_draft(self) -> bool:
        """True if any request can have drafts."""
        return self.max_num_tokens > 0 and any(method != SpeculationMethod.NONE for method in self.methods)
